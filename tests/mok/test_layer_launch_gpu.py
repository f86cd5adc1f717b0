"""What the layer launches on a GPU, that the host never waits, and what a first call costs."""

from __future__ import annotations

import collections
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.reference import integer_case, random_case
from tests.helpers_layer import Layer, run_layer, to_device
from tests.runtime import ranks

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CONFIG = Config(fwd_num_comm_sms=8, bwd_num_comm_sms=8, minibatch_size=512, macrobatch_size=2048)


@pytest.fixture(autouse=True)
def _memory_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


# ------------------------------------------------------------------ one kernel


def profiled(run) -> list[str]:
    """Names of everything that a function put on the GPU, in order of its start."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert events, "the profiler saw nothing"
    return [short(e.name) for e in sorted(events, key=lambda e: e.time_range.start)]


OURS = (
    "stage_ids", "schedule_count", "schedule_scan", "schedule_place", "barrier",
    "forward_direct_save", "forward_ring_save", "forward_direct", "forward_ring",
    "token_sum_direct", "token_sum_ring",
)  # fmt: skip


def short(name: str) -> str:
    """Our kernels by the names we gave them, all else as the profiler calls it."""
    return next((ours for ours in OURS if ours in name), name)


def is_kernel(name: str) -> bool:
    return not name.startswith(("Memset", "Memcpy"))


def prepared(layer: Layer):
    """The two halves of a call, with arguments that cost no launch."""
    ids = layer.each(layer.split(layer.case.top_experts))
    given = layer.arguments(layer.case)
    config = layer.config

    def schedule():
        return functional.build_schedule(layer.workspace, config, ids)

    def forward(made, save_context=False):
        return functional.forward(config, layer.workspace, made, *given, save_context=save_context)[
            0
        ]

    return schedule, forward


@pytest.mark.parametrize("save_context", [False, True])
@pytest.mark.parametrize("ep_size", [1, 4])
def test_one_megakernel_per_rank_and_every_other_launch_by_name(ep_size, save_context):
    case = random_case(Shape(2048, 1024, 512, 16, 4, 1, 512), device="cuda")
    with Layer(case, ep_size, CONFIG, "cuda") as layer:
        schedule, forward = prepared(layer)
        for _ in range(2):
            made = schedule()
            forward(made, save_context)
        profiled(lambda: forward(made, save_context))  # the profiler's own first time
        of_schedule = profiled(schedule)
        of_forward = profiled(lambda: forward(made, save_context))
        layer.finish()
    for title, names in (("schedule", of_schedule), ("forward", of_forward)):
        print(f"EP {ep_size} {title}: {dict(collections.Counter(names))}")
    path = "direct" if ep_size == 1 else "ring"
    megakernel = f"forward_{path}" + ("_save" if save_context else "")
    assert [n for n in of_schedule if is_kernel(n)] == ["stage_ids"] * ep_size + [
        "schedule_count", "schedule_scan", "schedule_place",
    ] * ep_size  # fmt: skip
    assert of_forward.count(megakernel) == ep_size
    # x is copied before the first barrier and summed after the second. Between them virtual
    # ranks run one after the other, and nothing but the megakernel is a kernel.
    first = of_forward.index(megakernel)
    last = len(of_forward) - of_forward[::-1].index(megakernel)
    before, between, after = of_forward[:first], of_forward[first:last], of_forward[last:]
    assert [n for n in between if is_kernel(n)] == [megakernel] * ep_size
    assert not [n for n in before if is_kernel(n)]
    assert len([n for n in before if n.startswith("Memcpy")]) == (0 if ep_size == 1 else ep_size)
    assert after == [f"token_sum_{path}"] * ep_size
    if ep_size == 1:  # two launches are all: the earlier call's sum has zeroed the counters
        assert of_forward == [megakernel, f"token_sum_{path}"]


def spread_case(device):
    return to_device(random_case(Shape(600, 512, 320, 9, 3, 1, 192), kind="skewed"), device)


def _between_real_barriers(group, profile):
    """One rank of a group of processes: its output, and rank 0's launches."""
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    with Layer(spread_case(device), group.size, CONFIG, device, group=group) as layer:
        schedule, forward = prepared(layer)
        for _ in range(2):
            output = forward(schedule())
        torch.cuda.synchronize()
        group.barrier("warm")
        names = []
        made = schedule()
        if profile and group.rank == 0:
            profiled(lambda: torch.zeros(1, device=device))
        group.barrier("together")
        if profile and group.rank == 0:
            names = profiled(lambda: forward(made))
        else:
            output = forward(made)
        layer.finish()
        group.barrier("done")
        return output.float().cpu().numpy(), names


def in_processes(size: int, folder: Path, profile: bool = False):
    """Outputs of all ranks of a group of processes, those of one process, rank 0's launches."""
    want = run_layer(spread_case("cuda"), 1, CONFIG, "cuda").output.cpu()
    run_layer(spread_case("cuda"), size, CONFIG, "cuda")  # compiles; the ranks then only load
    found = ranks.run_ok(_between_real_barriers, size, folder, profile)
    got = torch.cat([torch.from_numpy(output) for output, _ in found]).bfloat16()
    return got, want, found[0][1]


def test_exactly_one_kernel_between_the_barriers(tmp_path):
    got, want, names = in_processes(2, tmp_path, profile=True)
    print("forward of rank 0 of 2 processes:", names)
    assert torch.equal(got, want)
    first, second = (i for i, name in enumerate(names) if name == "barrier")
    assert names[first + 1 : second] == ["forward_ring"]
    assert names[second + 1 :] == ["token_sum_ring"]
    assert all(name.startswith(("Memcpy", "Memset")) for name in names[:first])


@pytest.mark.multi_gpu
def test_two_gpus_give_the_bits_of_one(tmp_path):
    got, want, _ = in_processes(2, tmp_path)
    assert torch.equal(got, want)


# ------------------------------------------------------------------ no host wait

A_SECOND = 2_000_000_000  # clock cycles of an H200, or a little more


@pytest.mark.parametrize("save_context", [False, True])
@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.alone
def test_the_host_never_waits(ep_size, save_context):
    case = random_case(Shape(4096, 1024, 512, 16, 4, 1, 512), device="cuda")
    with Layer(case, ep_size, CONFIG, "cuda") as layer:
        schedule, forward = prepared(layer)
        for _ in range(3):
            want = forward(schedule(), save_context)
        layer.finish()
        begin = time.perf_counter()
        torch.cuda._sleep(A_SECOND)
        start = time.perf_counter()
        made = schedule()
        scheduled = time.perf_counter()
        output = forward(made, save_context)
        returned = time.perf_counter()
        blocked = not torch.cuda.current_stream().query()
        layer.finish()
        ended = time.perf_counter()
    print(
        f"EP {ep_size}: schedule {1e3 * (scheduled - start):.2f} ms, "
        f"forward {1e3 * (returned - scheduled):.2f} ms, stream blocked {ended - begin:.2f} s"
    )
    assert blocked and ended - begin > 0.8, "the stream was not blocked long enough to tell"
    assert returned - start < 0.05
    for a, b in zip(*(o if isinstance(o, list) else [o] for o in (output, want)), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ the first call

FIRST_CALL = """
import json, os, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
begin = time.perf_counter()
import torch, cutlass.cute, cuda.bindings.driver
from mok import functional
from mok.config import Config, Shape
from mok.reference import integer_case, forward_oracle
from tests.helpers_layer import Layer
imported = time.perf_counter()
case = integer_case(Shape(256, 512, 256, 8, 2), device="cuda")
want = forward_oracle(case).bfloat16()
torch.cuda.synchronize()
start = time.perf_counter()
with Layer(case, 1, Config(8, 8, 256, 1024), "cuda") as layer:
    found = layer()
    end = time.perf_counter()
    assert torch.equal(found.output, want)
print(json.dumps({"imports_s": imported - begin, "call_s": end - start}))
"""


def test_the_first_call(tmp_path):
    env = {
        **os.environ,
        "MOK_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    seen = []
    for what in ("cold", "from the cache"):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{what}: {seen[-1]}")
    assert seen[0]["call_s"] <= 60
    assert seen[1]["call_s"] <= 0.5


# ------------------------------------------------------------------ memcheck

MEMCHECK = """
import torch
from mok.config import Config, Shape
from mok.reference import integer_case, forward_oracle
from tests.helpers_layer import run_layer
case = integer_case(Shape(150, 320, 192, 5, 3, 1, 64), kind="dropped", device="cuda")
want = forward_oracle(case).bfloat16()
for ep_size in (1, 3):
    for save_context in (False, True):
        found = run_layer(case, ep_size, Config(2, 2, 128, 128), "cuda", save_context=save_context)
        assert torch.equal(found.output, want), ep_size
print("all equal")
"""


def test_memcheck_is_clean():
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("needs compute-sanitizer")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # every tensor has bounds of its own
    }
    done = subprocess.run(
        # Bindings newer than the driver ask it for entry points it lacks, which is no memory error.
        [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9",
         sys.executable, "-c", MEMCHECK],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    print(done.stdout[-3000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
    assert "all equal" in done.stdout


# ------------------------------------------------------------------ memory


@pytest.mark.alone
def test_a_closed_workspace_gives_all_memory_back():
    case = integer_case(Shape(2048, 1024, 512, 16, 4), device="cuda")
    run_layer(case, 4, CONFIG, "cuda")
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        run_layer(case, 4, CONFIG, "cuda")
        gc.collect()
        torch.cuda.empty_cache()
    assert abs(free - torch.cuda.mem_get_info()[0]) < 32 << 20
