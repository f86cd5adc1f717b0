"""Run a function on several processes that form a gloo group, and collect what each returned.

Processes come from a fork server that has imported torch once, since that import is what costs.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "mok.runtime.heap"])


_FOLLOWS = ("MOK_CACHE_DIR",)  # the fork server has the environment of the test that began it


def _environment():
    return {name: os.environ.get(name) for name in _FOLLOWS}


def _follow(environment):
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _main(function, rank, size, folder, timeout_s, pipe, environment, arguments):
    import torch
    import torch.distributed as dist

    _follow(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    from mok.runtime.group import Group

    try:
        with Group.from_process_group(timeout_s=timeout_s) as group:
            pipe.send(("ok", function(group, *arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def start(function, size, folder, *arguments, timeout_s=30.0, absent=()):
    """{rank: (process, pipe)} of the ranks that were started."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    started = {}
    for rank in range(size):
        if rank not in absent:
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main,
                args=(
                    function,
                    rank,
                    size,
                    str(folder),
                    timeout_s,
                    theirs,
                    _environment(),
                    arguments,
                ),
            )
            process.start()
            theirs.close()
            started[rank] = (process, ours)
    return started


def _call(function, pipe, environment, arguments):
    import torch

    _follow(environment)
    torch.set_num_threads(1)
    try:
        pipe.send(("ok", function(*arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def start_apart(work, folder):
    """As ``start``, without a group: ``work`` is {key: (function, *arguments)}."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    started = {}
    for key, (function, *arguments) in work.items():
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_call, args=(function, theirs, _environment(), arguments))
        process.start()
        theirs.close()
        started[key] = (process, ours)
    return started


def collect(started, limit_s=120.0):
    """{rank: ("ok", result) or ("error", text)} of the ranks that answered in time."""
    results = {}
    deadline = time.monotonic() + limit_s
    for rank, (process, pipe) in started.items():
        with contextlib.suppress(EOFError):
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                results[rank] = pipe.recv()
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()
    return results


def run(function, size, folder, *arguments, **options):
    return collect(start(function, size, folder, *arguments, **options))


def run_ok(function, size, folder, *arguments, **options):
    """Results in rank order; fails with the text of the first rank that failed."""
    results = run(function, size, folder, *arguments, **options)
    assert sorted(results) == list(range(size)), f"ranks {sorted(results)} answered"
    for rank, (state, value) in sorted(results.items()):
        assert state == "ok", f"rank {rank}: {value}"
    return [results[r][1] for r in range(size)]
