from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")
CROWDS = 4  # tests marked ``crowd`` at once on a GPU: of 15 processes each, 60 in all

# The matrices of tests are small: threads cost more than they give, above all under xdist.
torch.set_num_threads(1)


def _share_out_gpus() -> list[str]:
    """With several workers and GPUs, give each worker another first GPU; returns the GPUs, its own first.

    By the environment, before CUDA is asked for the first time: it then holds for a test's child processes too.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        listed: list[str] = []
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
            listed = subprocess.run(command, capture_output=True, text=True).stdout.split()
        given = ",".join(listed)
    names = [name for name in given.split(",") if name]
    if len(names) > 1 and not torch.cuda.is_initialized():
        first = int(worker) % len(names)
        names = names[first:] + names[:first]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return names or ["none"]


GPUS = _share_out_gpus()


@functools.cache
def gpus() -> tuple[int, str]:
    """How many GPUs have kernels, and why the first has none; "" if it has."""
    from mok.backends import choose_backend

    found = choose_backend()
    if not found.on_gpu:
        return 0, found.note or "there is no GPU"
    from mok.runtime.device import device_info

    archs = [device_info(i).arch for i in range(torch.cuda.device_count())]
    return archs.count(found.arch), ""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a worker of xdist: only here is a terminal
        config.pluginmanager.register(_FailuresAtOnce(config), "failures-at-once")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before several workers begin with GPU tests: the kernels that many of them need."""
    option = session.config.option
    chosen = option.markexpr.replace("multi_gpu", "gpu").replace("not gpu", "")
    if getattr(option, "numprocesses", None) and not option.collectonly and "gpu" in chosen:
        # A process of its own: this one has no use for a context on the GPU.
        subprocess.run([sys.executable, "-m", "tests.warm"], cwd=Path(__file__).parents[1])


@pytest.hookimpl(trylast=True)  # of the tests that remain after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers take tests in an order in which few of them wait for each other's GPU."""
    if getattr(config, "workerinput", {}).get("workercount", 1) > 1:
        items[:] = in_parallel(items, lambda item: {mark.name for mark in item.iter_markers()})


def in_parallel(items: list[T], marks: Callable[[T], set[str]]) -> list[T]:
    """First those that want a GPU alone, among short ones; then those that start processes, at even distances,
    ``spread`` ones, which take a minute or two, before ``crowd`` ones: else the end of a run waits for them.

    All workers of a GPU stand still while one wants it alone and another one's test has it: a second, or, where
    that test waits for processes, a minute. And not all workers may wait at once for the few places of tests
    marked ``crowd``.
    """

    def kind(item: T) -> str:
        found = marks(item)
        return "alone" if "alone" in found else "long" if found & {"crowd", "spread"} else "short"

    kinds = {id(item): kind(item) for item in items}
    few, short, long = (
        [item for item in items if kinds[id(item)] == which] for which in ("alone", "short", "long")
    )
    long.sort(key=lambda item: "spread" not in marks(item))
    beside = min(len(short), 3 * len(few))
    head = spread([*few, *short[:beside]], lambda item: kinds[id(item)] == "alone")
    return head + spread([*long, *short[beside:]], lambda item: kinds[id(item)] == "long")


def spread(items: list[T], apart: Callable[[T], bool]) -> list[T]:
    """Those that are ``apart`` at even distances among the others; both keep their order."""
    some = [item for item in items if apart(item)]
    others = [item for item in items if not apart(item)]
    found: list[T] = []
    for i, item in enumerate(some):
        until = (2 * i + 1) * len(others) // (2 * len(some))
        found += [*others[len(found) - i : until], item]
    return found + others[len(found) - len(some) :]


class _FailuresAtOnce:
    """Says in a few lines why a test failed as soon as it has: a run that is cut off has no summary.

    And what a test that passed has to tell: ``record_property("tells", text)``.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)  # after the line with the test's name
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            for line in ["", *failure_lines(report)]:  # "": dots may stand on this line
                terminal.write_line(line[:300])
        if report.passed and report.when == "call" and terminal is not None:
            for name, text in report.user_properties:
                if name == "tells":
                    terminal.write_line(f"\n{report.nodeid}: {text}"[:300])


def failure_lines(report: pytest.TestReport, most: int = 12) -> list[str]:
    """Where and why a test failed, and the end of what it printed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else str(crash.message)
    where = report.nodeid if crash is None else f"{crash.path}:{crash.lineno}"
    reason = [line for line in text.splitlines() if line.strip()]
    if len(reason) > most:
        reason = [*reason[: most - 3], "...", *reason[-2:]]
    printed = [line for line in report.capstdout.splitlines() if line.strip()][-3:]
    return [
        f"FAILED in {report.when}: {where}",
        *(f"E   {line}" for line in reason),
        *(f"out {line}" for line in printed),
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    if item.get_closest_marker("emulator") and importlib.util.find_spec("numba") is None:
        pytest.skip("the emulator needs numba")
    if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
        count, reason = gpus()
        if count == 0:
            pytest.skip(f"needs a supported GPU: {reason}")
        if item.get_closest_marker("multi_gpu") and count < 2:
            pytest.skip("needs two supported GPUs: there is one")


@pytest.fixture(scope="session", autouse=True)
def _backend(request: pytest.FixtureRequest) -> None:
    """Print what kernels run on, even under output capture."""
    from mok.backends import choose_backend

    lines: list[str] = []
    choose_backend().announce(lines.append)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@contextlib.contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    """Hold a lock that all test processes of this user on this machine know."""
    path = Path(tempfile.gettempdir()) / f"mok-tests-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield


@contextlib.contextmanager
def one_of(count: int, name: str) -> Iterator[int]:
    """Hold one of ``count`` places that all test processes of this user on this machine know.

    Waiting costs nothing: one process looks for a free place ten times a second, others sleep
    until it has found one. Places of processes that died are free.
    """
    with contextlib.ExitStack() as held:
        with _locked(f"{name}-next", fcntl.LOCK_EX):
            found = None
            while found is None:
                for place in range(count):
                    with contextlib.suppress(BlockingIOError):
                        how = fcntl.LOCK_EX | fcntl.LOCK_NB
                        held.enter_context(_locked(f"{name}-{place}", how))
                        found = place
                        break
                else:
                    time.sleep(0.1)
        yield found


@pytest.fixture(autouse=True)
def _gpu_to_itself(request: pytest.FixtureRequest) -> Iterator[None]:
    """With several workers, a test marked ``alone`` waits until no other one uses its GPU, then keeps them off."""
    marked = {mark.name for mark in request.node.iter_markers()}
    if not marked & {"gpu", "multi_gpu"}:
        yield
        return
    # All workers take several GPUs in one order, so that no two wait for each other.
    used = sorted(GPUS) if marked & {"multi_gpu", "spread"} else GPUS[:1]
    with contextlib.ExitStack() as stack:
        if "crowd" in marked:
            # Before the GPU's lock: who waits for a place keeps no test that wants it alone.
            stack.enter_context(one_of(CROWDS, f"crowd-{GPUS[0]}"))
        for gpu in used:
            # Through a gate, which one who waits for the GPU holds: nobody overtakes.
            with _locked(f"gate-{gpu}", fcntl.LOCK_EX):
                how = fcntl.LOCK_EX if "alone" in marked else fcntl.LOCK_SH
                stack.enter_context(_locked(f"gpu-{gpu}", how))
        yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**32:
        torch.cuda.empty_cache()  # this worker may not need it again for long, others do
