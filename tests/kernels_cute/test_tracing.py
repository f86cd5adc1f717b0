"""The in-kernel trace: absent when off, complete and true when on, and without effect on bits."""

import dataclasses
import importlib
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from mok import functional, kernels
from mok.config import Config, Shape, tile_rows
from mok.kernels_cute import program, trace
from mok.kernels_cute.backward import program as bw
from mok.kernels_cute.machine import machine_of
from mok.reference import random_case
from mok.runtime.compile import KernelSpec, get_kernel
from mok.tools.simulator.ours_backward import _decode as decode_backward
from mok.tools.simulator.work import NumpyOps
from tests.helpers_layer import Layer, watched

SOURCES = Path(trace.__file__).parent
LATE_S = 2e-6  # an end is noted just after it was signalled; tasks take far longer
HOOK = re.compile(r"^( *)if (?:cutlass\.const_expr\()?self\.trace\)?:$")


# ------------------------------------------------------------------ off: not there


def without_hooks(lines: list[str]) -> list[str]:
    """The source without every ``if self.trace`` block."""
    kept: list[str] = []
    inside = None
    for line in lines:
        found = HOOK.match(line)
        if inside is not None and (not line.strip() or len(line) - len(line.lstrip()) > inside):
            continue
        inside = len(found[1]) if found else None
        if not found:
            kept.append(line)
    return kept


@pytest.fixture(scope="module")
def stripped(tmp_path_factory):
    """A copy of the kernels' package, named "stripped_kernels", whose kernels have no hooks."""
    folder = tmp_path_factory.mktemp("stripped")
    package = folder / "stripped_kernels"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    removed = 0
    for path in package.rglob("*.py"):
        lines = path.read_text().splitlines()
        kept = without_hooks(lines)
        removed += len(lines) - len(kept)
        text = "\n".join(kept) + "\n"
        if path.name != "tracing.py":
            assert "tracer." not in text, f"a hook of {path.name} is not under self.trace"
        path.write_text(text)
    assert removed > 20
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield "stripped_kernels"
    sys.path.remove(str(folder))
    for name in [n for n in sys.modules if n.startswith("stripped_kernels")]:
        del sys.modules[name]


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_without_trace_the_machine_code_is_that_of_a_source_without_it(arch, direction, stripped):
    make = kernels.forward_spec if direction == "forward" else kernels.backward_spec
    spec = make(arch, direct=False)
    bare = KernelSpec(
        spec.name, arch, spec.factory.replace("mok.kernels_cute", stripped), spec.config
    )
    assert get_kernel(bare).ptx == get_kernel(spec).ptx


@pytest.mark.parametrize("direct", [True, False])
def test_with_trace_it_is_there_and_fits(direct):
    plain = get_kernel(kernels.forward_spec("sm_90a", direct))
    traced = get_kernel(kernels.forward_spec("sm_90a", direct, trace=True))
    timer = [k.ptx.count("%globaltimer") for k in (plain, traced)]
    # Begin and end, in the load and store warps; a comm worker's two besides.
    assert timer[1] - timer[0] == (2 if direct else 4)
    (used,) = traced.resources.kernels
    assert used.spill_bytes == 0 and not used.warnings
    assert used.registers == plain.resources.kernels[0].registers


# ------------------------------------------------------------------ on: what was done, and when


def check_trace(found, layer, rank, recompute=False):
    """Every task and item once, as the program has it, none before what it waits for."""
    shape, config, w = layer.shape, layer.config, layer.workspace
    schedule = layer.schedule.ranks[layer.ranks.index(rank)]
    tile = machine_of(w.arch).tile_m
    p = program.Forward(
        rows=int(schedule.num_rows[0]), tokens=layer.lengths[rank], hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        shared_intermediate=shape.shared_intermediate_size or 0,
        minibatch=config.minibatch_size, macrobatch=w.sizes.ring,
        tile=program.Tile(m=tile, group_m=machine_of(w.arch).group_m), recompute=recompute,
        ahead=0 if w.sizes.direct or w.precision == "mxfp8" else program.AHEAD,
        push=machine_of(w.arch).pushes_forward and not w.sizes.direct and not recompute,
    )  # fmt: skip
    assert found.lost == 0
    compute = {e.ticket: e for e in found.events if e.role == "compute"}
    comm = {e.ticket: e for e in found.events if e.role == "comm"}
    assert len(compute) + len(comm) == len(found.events)
    assert sorted(compute) == list(range(p.tasks))
    assert sorted(comm) == (list(range(p.items)) if w.sizes.ring and not w.sizes.direct else [])
    ends: dict[tuple[str, int], float] = {}
    for ticket, e in compute.items():
        task = p.task(ticket)
        assert e.kind == trace.NAMES[trace.FORWARD][trace.COMPUTE][task.kind]
        assert (e.block, e.n) == (task.block, task.n)
        shared = e.kind.startswith("shared")
        assert e.minibatch == (-1 if shared else task.minibatch)
        assert e.expert == (-1 if shared else int(schedule.block_expert[task.block]))
        key = (e.kind, task.block)
        ends[key] = max(ends.get(key, 0.0), e.end)
    arrived: dict[tuple[str, int], float] = {}
    for number, e in comm.items():
        item = p.item(number)
        kind = trace.NAMES[trace.FORWARD][trace.COMM][item.kind]
        assert (e.kind, e.block, e.minibatch) == (kind, item.row, item.minibatch)
        key = (e.kind, e.minibatch)
        arrived[key] = max(arrived.get(key, 0.0), e.end)
    for e in found.events:
        begin = e.begin + LATE_S
        if e.kind in ("down", "shared down"):
            # The load warp of a down task begins once its hidden rows are all there.
            assert begin >= ends[e.kind.replace("down", "up"), e.block]
        if e.kind == "up" and comm:
            assert begin >= arrived["dispatch", e.minibatch]
        if e.kind == "combine":
            first = e.minibatch * config.minibatch_size // tile
            blocks = range(first, min(first + config.minibatch_size // tile, p.blocks))
            assert begin >= max(ends["down", b] for b in blocks)
    # One SM does one thing after the other: of each kind of worker, ends are in ticket order.
    for role in (compute, comm):
        by_sm: dict[int, list[float]] = {}
        for ticket in sorted(role):
            by_sm.setdefault(role[ticket].sm, []).append(role[ticket].end)
        assert all(times == sorted(times) for times in by_sm.values())
        assert not role or len(by_sm) > 1


def traced_and_not(arch, ep_size, seed):
    """The output without a trace, and with one; both on the same emulated machine."""
    from mok.tools.emulator import Emulator

    tile = tile_rows(arch)
    case = random_case(Shape(160, 128, 192, 5, 2, 1, 64), seed=3)
    plain = Config(2, 2, tile, 2 * tile)
    outputs = []
    for config in (plain, dataclasses.replace(plain, trace=True)):
        with (
            Emulator(arch, num_sms=6, seed=seed) as machine,
            Layer(case, ep_size, config) as layer,
            watched(machine, layer),
        ):
            layer.schedule = layer.build_schedule()
            outputs.append(layer(schedule=layer.schedule, save_context=True).output.clone())
            found = layer.workspace.recorder.traces("emulator")
            assert bool(found) == config.trace
            for rank, one in enumerate(found):
                assert one.source == f"emulator, forward, rank {rank}"
                check_trace(one, layer, rank)
            if config.trace and seed is None:
                rebuild(layer)
        assert not machine.report.findings
    return outputs


def rebuild(layer):
    """The kernel that rebuilds the context records itself, in a buffer of its own."""
    x, _, _, _, _, gate, up, _ = layer.arguments(layer.case)
    shared = layer.case.shared
    functional.recompute_forward_context(
        layer.config, layer.workspace, layer.schedule, x, shared.gate[0], shared.up[0], gate, up
    )
    found = layer.workspace.recorder.traces("emulator")
    assert len(found) == 2 * len(layer.ranks)
    for rank, one in zip(layer.ranks, found[len(layer.ranks) :], strict=True):
        assert one.notes == {"program": "recompute", "rank": rank}
        check_trace(one, layer, rank, recompute=True)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "ep_size", "seed"),
    [
        ("sm_90a", 1, 5),
        ("sm_90a", 2, None),
        pytest.param("sm_100a", 2, None, marks=pytest.mark.slow),
    ],
)
def test_bits_stay_and_every_task_is_recorded(arch, ep_size, seed):
    pytest.importorskip("numba")
    plain, traced = traced_and_not(arch, ep_size, seed)
    assert torch.equal(plain, traced)


def check_backward(found, layer, rank):
    """Every ticket and item once, of the kind that the program gives it, none before what it waits for."""
    shape, config, w = layer.shape, layer.config, layer.workspace
    schedule = layer.schedule.ranks[layer.ranks.index(rank)]
    arguments = dict(
        rows=int(schedule.num_rows[0]), tokens=layer.lengths[rank], hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        shared_intermediate=shape.shared_intermediate_size or 0,
        experts=len(shape.experts_on(rank)), minibatch=config.minibatch_size,
        macrobatch=w.sizes.ring, tile=bw.backward_tile(machine_of(w.arch)),
        ahead=0 if w.sizes.direct or w.precision == "mxfp8" else program.AHEAD,
    )  # fmt: skip
    p = bw.Backward(**arguments)
    offsets = schedule.expert_offset[: len(shape.experts_on(rank)) + 1]
    blocks = offsets.diff() // machine_of(w.arch).tile_m
    plan = bw.make_plan(p, blocks.tolist())
    expected = decode_backward(p, bw.Backward(**arguments, ops=NumpyOps), plan)
    assert found.lost == 0
    compute = {e.ticket: e for e in found.events if e.role == "compute"}
    comm = {e.ticket: e for e in found.events if e.role == "comm"}
    assert len(compute) + len(comm) == len(found.events)
    assert sorted(compute) == list(range(len(expected.kind)))
    names = trace.NAMES[trace.BACKWARD][trace.COMPUTE]
    ends: dict[int, float] = {}
    for ticket, e in compute.items():
        kind = int(expected.kind[ticket])
        assert e.kind == names[kind] and e.n == expected.n[ticket]
        if kind == bw.DDOWN:
            assert (e.block, e.minibatch) == (expected.block[ticket], expected.minibatch[ticket])
            ends[e.block] = max(ends.get(e.block, 0.0), e.end)
    for ticket, e in compute.items():
        if e.kind == "dgrad up":
            assert e.begin + LATE_S >= ends[e.block]
        if e.kind.startswith("wgrad"):
            _, first, end, *_ = plan.groups[int(expected.group[ticket])]
            assert all(e.begin + LATE_S >= ends[b] for b in range(first, end))
    kinds = {e.kind for e in found.events}
    shared = {"shared wgrad up"} if shape.shared_intermediate_size else set()
    assert {"dgrad down", "wgrad gate"} | shared <= kinds
    assert ("replay" in kinds) == (p.blocks > p.ring_blocks)
    kinds = [e.kind for e in comm.values()]
    assert sorted(comm) == list(range(len(comm)))
    assert kinds.count("push") == kinds.count("dispatch") == (
        0 if w.sizes.direct else p.blocks * p.items_per_block
    )  # fmt: skip


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "ep_size", "grad_dtype", "seed", "precision"),
    [
        ("sm_90a", 2, torch.bfloat16, None, "bf16"),
        ("sm_90a", 1, torch.float32, 4, "bf16"),
        ("sm_100a", 2, torch.float32, None, "bf16"),
        ("sm_100a", 2, torch.bfloat16, None, "mxfp8"),
    ],
)
def test_backward_keeps_its_bits_and_records_every_task(arch, ep_size, grad_dtype, seed, precision):
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    tile = tile_rows(arch)
    inner = 192 if precision == "bf16" else 256
    case = random_case(Shape(160, 128, inner, 3, 4, 1, 64), seed=3)
    dy = torch.randn(160, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    results = []
    for traced in (False, True):
        config = Config(2, 2, tile, tile, trace=traced)
        with (
            Emulator(arch, num_sms=6, seed=seed) as machine,
            Layer(case, ep_size, config, precision=precision) as layer,
            watched(machine, layer),
        ):
            if ep_size > 1:
                symmetric = vars(layer.workspace.backward).values()
                machine.register(*(t.peer(r) for t in symmetric for r in layer.ranks))
            layer.schedule = layer.build_schedule()
            forward = layer.queue(schedule=layer.schedule, save_context=True)
            found = functional.backward(
                config, layer.workspace, layer.schedule, forward.context,
                layer.each(layer.split(dy)), *layer.arguments(case), grad_dtype=grad_dtype,
            )  # fmt: skip
            flat = [t for part in found for t in (part if isinstance(part, list) else [part])]
            results.append([t.clone() for t in flat if t is not None])
            if traced:
                traces = layer.workspace.recorder.traces("emulator")
                for rank, one in zip(layer.ranks, traces[len(layer.ranks) :], strict=True):
                    assert one.source == f"emulator, backward, rank {rank}"
                    check_backward(one, layer, rank)
        assert not machine.report.findings
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0]


@pytest.mark.emulator
def test_a_full_buffer_loses_records_and_nothing_else():
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    case = random_case(Shape(160, 128, 192, 5, 2), seed=3)
    config = Config(2, 2, 128, 256, trace=True)
    with Emulator("sm_90a", num_sms=6) as machine, Layer(case, 1, config) as layer:
        layer.workspace.recorder.capacity = 2
        drawn = layer().tasks_drawn
        (found,) = layer.workspace.recorder.traces()
        assert found.lost > 0 and len(found.events) <= 2 * 6
        assert len(found.events) + found.lost <= drawn
    assert not machine.report.findings


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("ep_size", [1, 4])
def test_tracing_costs_at_most_3_percent(ep_size, direction, record_property):
    """Traced and not in turn, in the steady regime; the same bits and a true trace."""
    from mok.tools.bench.timing import CudaClock, Regime, measure

    case = random_case(Shape(16384, 2048, 768, 128, 8), device="cuda")
    plain = Config.suggest(dataclasses.replace(case.shape, ep_size=ep_size), "h200")
    dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(4)).bfloat16().cuda()
    with Layer(case, ep_size, plain, "cuda") as layer:
        layer.schedule = layer.build_schedule()
        context = layer.queue(schedule=layer.schedule, save_context=True).context
        dys, arguments = layer.each(layer.split(dy)), layer.arguments(case)

        def step(config):
            """All results of a call as one list."""
            if direction == "forward":
                return [layer.queue(schedule=layer.schedule, config=config).output]
            found = functional.backward(
                config, layer.workspace, layer.schedule, context, dys, *arguments, keep_context=True
            )
            flat = [t for part in found for t in (part if isinstance(part, list) else [part])]
            return [t for t in flat if t is not None]

        results, times = {}, {False: [], True: []}
        for turn in range(6):
            for traced in (False, True) if turn % 2 else (True, False):
                config = dataclasses.replace(plain, trace=traced)
                call = lambda _, c=config: step(c)  # noqa: E731
                times[traced].append(measure(call, CudaClock(), Regime(100, 150)).median)
                results[traced] = [t.clone() for t in step(config)]
        layer.finish()
        assert all(map(torch.equal, results[False], results[True])) and results[True]
        ratio = statistics.median(times[True]) / statistics.median(times[False])
        name = f"{direction} at EP {ep_size}"
        record_property("tells", f"tracing costs {name} {100 * ratio - 100:.1f} % of its time")
        assert ratio <= 1.03, f"{ratio:.4f}"
        check = check_trace if direction == "forward" else check_backward
        for rank, found in enumerate(layer.workspace.recorder.traces()[-ep_size:]):
            assert direction in found.source
            check(found, layer, rank)
            assert 0 < found.seconds < 1.1e-3 * statistics.median(times[True])
