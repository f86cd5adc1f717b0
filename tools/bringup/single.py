"""The rungs below the layer: one process, one GPU, one small kernel each."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.runtime.compile import Kernel, KernelSpec, get_kernel
from mok.runtime.launch import launch
from mok.tools.bringup.context import WrongError

if TYPE_CHECKING:
    from mok.tools.bringup.context import Context

KERNELS = "mok.kernels_cute.bringup"
ROUNDING = 1e-5  # relative L2 of an FP32 sum of BF16 products against FP64
K = 512
LOOP_TASKS, LOOP_SMS = 96, 6
RIVAL_AFTER_S = 1e-3  # of a loop of 10 ms or more


# ------------------------------------------------------------------ kernels


def copy_kernel(arch: str) -> Kernel:
    """Copies 16 bytes a thread."""
    return get_kernel(KernelSpec.of("bringup_copy", arch, f"{KERNELS}.simple:CopyKernel"))


def hold_kernel(arch: str) -> Kernel:
    """Keeps SMs for a time."""
    return get_kernel(KernelSpec.of("bringup_hold", arch, f"{KERNELS}.simple:HoldKernel"))


def tile_kernel(arch: str, **config: int) -> Kernel:
    """One MMA tile; ``config`` as the architecture's ``TileKernel`` takes it."""
    module = "tile_sm90" if arch == "sm_90a" else "tile_sm100"
    name = "bringup_tile_" + "_".join(f"{k[0]}{int(v)}" for k, v in sorted(config.items()))
    return get_kernel(KernelSpec.of(name, arch, f"{KERNELS}.{module}:TileKernel", **config))


def loop_kernel(arch: str) -> Kernel:
    """The task loop without tasks."""
    scheduling = "tickets" if arch == "sm_90a" else "clc"
    factory = f"{KERNELS}.loop:LoopKernel"
    return get_kernel(KernelSpec.of("bringup_loop", arch, factory, scheduling=scheduling))


# -------------------------------------------------------------------- rungs


def driver(ctx: Context) -> str:
    """Versions as pinned, a driver that is new enough, and a kernel that compiles."""
    from mok.backends import COMPILED_ARCHS
    from mok.commands import doctor

    for check in (doctor.python, doctor.torch, doctor.dsl, doctor.cuda_python, doctor.cache_folder):
        found = check()
        ctx.expect(f"{found['name']} ({found['found']}) usable", found["ok"], True, found["remedy"])
    if ctx.on_gpu:
        for check in (doctor.driver, doctor.torch_cuda):
            found = check()
            ctx.expect(f"{found['name']} ({found['found']})", found["ok"], True, found["remedy"])
        assert ctx.backend.info is not None
        known = ctx.backend.info.arch in COMPILED_ARCHS
        ctx.expect("a GPU with kernels", known, True)
    kernel = copy_kernel(ctx.arch)
    ctx.notes.kernel(kernel)
    target = next(line for line in kernel.ptx.splitlines() if line.startswith(".target"))
    ctx.expect("the PTX's target", target.split()[1].strip(","), ctx.arch)
    return f"{ctx.backend.name}; compiled in {kernel.compile_s:.1f} s"


def copy(ctx: Context) -> str:
    """6 KB, and on a GPU a megabyte."""
    for count in (1540, 1 << 18)[: 2 if ctx.on_gpu else 1]:
        source = torch.arange(count, dtype=torch.int32) * 7919
        with ctx.machine() as emulator:
            a, b = ctx.put(emulator, source, torch.full_like(source, -1))
            launch(copy_kernel(ctx.arch), a.data_ptr(), b.data_ptr(), count // 4, ctx.stream)
            ctx.wait()
        ctx.compare("the copy", b, source)
    return f"{4 * count} bytes, exact"


def wgmma(ctx: Context) -> str:
    """Tiles of both widths."""
    return _exact_tiles(ctx, [{"tile_n": 128}, {"tile_n": 256}])


def tile_1cta(ctx: Context) -> str:
    """Tiles of both widths."""
    return _exact_tiles(ctx, [{"ctas": 1, "tile_n": n} for n in (128, 256)])


def tile_2cta(ctx: Context) -> str:
    """Tiles of both widths."""
    return _exact_tiles(ctx, [{"ctas": 2, "tile_n": n} for n in (128, 256)])


def accumulator(ctx: Context) -> str:
    """The tile whose accumulator leaves and comes back halfway, on every kind of MMA."""
    pairs: list[dict[str, int]] = [{}] if not ctx.blackwell else [{"ctas": 1}, {"ctas": 2}]
    return _exact_tiles(ctx, [{**pair, "tile_n": 256, "parts": 2} for pair in pairs])


def block_scaled(ctx: Context) -> str:
    """A block-scaled tile; on Hopper the quantising kernel's expanded values through wgmma."""
    a, b = _random(256, K, ctx.seed), _random(256, K, ctx.seed + 1)
    from mok.reference.mxfp8 import quantise, through_mxfp8, tile_scales

    if ctx.blackwell:
        qa, qb = quantise(a), quantise(b)
        data = (qa.data, qb.data, tile_scales(qa.scales), tile_scales(qb.scales))
        found = _tile(ctx, data, {"ctas": 2, "tile_n": 256, "scaled": True})
        how = "tcgen05 kind::mxf8f6f4"
    else:
        expanded = [_expanded(ctx, side) for side in (a, b)]
        for name, side, value in (("A", a, expanded[0]), ("B", b, expanded[1])):
            ctx.compare(f"{name}, quantised and expanded", value, through_mxfp8(side))
        found = _tile(ctx, (expanded[0][:128], expanded[1]), {"tile_n": 256})
        how = "expanded to BF16, wgmma"
    rows = found.shape[0]
    want = through_mxfp8(a)[:rows].double() @ through_mxfp8(b).double().T
    return f"{how}: error {ctx.compare('the tile', found, want, ROUNDING)}"


def assumptions(ctx: Context) -> str:
    """The same random product by every tile there is: the same bits."""
    a, b = _random(256, 2 * K, ctx.seed), _random(256, 2 * K, ctx.seed + 1)
    want = a.double() @ b.double().T
    if ctx.blackwell:
        ways = [
            {"ctas": ctas, "tile_n": n, "parts": parts}
            for ctas in (2, 1)
            for n in (256, 128)
            for parts in (1, 2)
        ]
    else:
        ways = [{"tile_n": n, "parts": parts} for n in (256, 128) for parts in (1, 2)]
    first: Tensor | None = None
    for way in ways:
        found = _whole(ctx, a, b, way)
        name = ", ".join(f"{key} {value}" for key, value in way.items())
        if first is None:
            ctx.compare(f"the product by {name}", found, want, ROUNDING)
            first = found
        ctx.compare(f"the bits of {name}", found, first)
    assert first is not None
    order = torch.randperm(256, generator=torch.Generator().manual_seed(ctx.seed))
    permuted = _whole(ctx, a[order].contiguous(), b, ways[0])
    ctx.compare("the bits of permuted rows", permuted, first[order])
    return f"{len(ways)} tiles and a permutation of rows: the same bits"


def loop(ctx: Context) -> str:
    """All tasks done once with a grid that fits, and with one of many times the machine."""
    texts = []
    for tasks, fitting in _loop_sizes(ctx):
        for clusters in (fitting, tasks + 40):
            counters = _loop(ctx, tasks, clusters)
            texts.append(f"{clusters} clusters: {_counted(counters)}")
    return "; ".join(texts)


def loop_competing(ctx: Context) -> str:
    """All tasks done once beside a grid that wants SMs, which on Blackwell it gets in mid-run."""
    tasks, fitting = _loop_sizes(ctx)[-1]
    clusters = tasks + 40 if ctx.blackwell else fitting
    return _counted(_loop(ctx, tasks, clusters, competing=True))


# ------------------------------------------------------------------ helpers


def _integers(rows: int, columns: int, seed: int) -> Tensor:
    """BF16 whose products and sums are exact in FP32."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, columns), generator=rng).bfloat16()


def _random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _exact_tiles(ctx: Context, configs: list[dict[str, Any]]) -> str:
    """Integer products, which leave no room for rounding."""
    for config in configs:
        rows = 128 * config.get("ctas", 1)
        a, b = _integers(rows, K, ctx.seed), _integers(config["tile_n"], K, ctx.seed + 1)
        found = _tile(ctx, (a, b), config)
        ctx.compare(f"the tile of {config}", found, a.double() @ b.double().T)
    return f"{len(configs)} tile{'s' if len(configs) > 1 else ''}, exact"


def _tile(ctx: Context, operands: tuple[Tensor, ...], config: dict[str, Any]) -> Tensor:
    """C of ``TileKernel`` for (A, B) or (A, B, scales of A, scales of B)."""
    a, b, *scales = operands
    c = torch.full((a.shape[0], b.shape[0]), float("nan"))
    with ctx.machine() as emulator:
        a, b, c, *scales = ctx.put(emulator, a, b, c, *scales)
        addresses = [t.data_ptr() for t in scales] or [16, 16]
        kernel = tile_kernel(ctx.arch, **config)
        launch(kernel, a.data_ptr(), b.data_ptr(), *addresses, c.data_ptr(), a.shape[1], ctx.stream)
        ctx.wait()
    return c.cpu()


def _whole(ctx: Context, a: Tensor, b: Tensor, way: dict[str, int]) -> Tensor:
    """A·Bᵀ, put together from tiles."""
    rows, columns = 128 * way.get("ctas", 1), way["tile_n"]
    return torch.cat(
        [
            torch.cat(
                [
                    _tile(ctx, (a[i : i + rows].contiguous(), b[j : j + columns].contiguous()), way)
                    for j in range(0, b.shape[0], columns)
                ],
                1,
            )
            for i in range(0, a.shape[0], rows)
        ]
    )


def _expanded(ctx: Context, values: Tensor) -> Tensor:
    """BF16 [R, C] through the quantising kernel."""
    from mok.kernels import quantise_spec

    out = torch.empty_like(values)
    rows, columns = values.shape
    with ctx.machine() as emulator:
        values, out = ctx.put(emulator, values, out)
        kernel = get_kernel(quantise_spec(ctx.arch, True, False, True))
        unused = out.data_ptr()
        launch(
            kernel, values.data_ptr(), out.data_ptr(), unused, unused, unused, rows, columns, 1,
            ctx.stream,
        )  # fmt: skip
        ctx.wait()
    return out.cpu()


def _loop_sizes(ctx: Context) -> list[tuple[int, int]]:
    """(tasks, clusters that fit): the emulator's, and on a GPU its own as well."""
    pairs = 2 if ctx.blackwell else 1
    sizes = [(LOOP_TASKS, LOOP_SMS // pairs)]
    if ctx.on_gpu:
        assert ctx.backend.info is not None
        sms = ctx.backend.info.num_sms
        sizes.append((100 * sms, sms // pairs))  # 20 ms of naps on pairs, 10 on single CTAs
    return sizes


def _loop(ctx: Context, tasks: int, clusters: int, competing: bool = False) -> dict[str, int]:
    """The loop's counters; raises unless every task was done once and every cluster counted.

    ``competing``: in the emulator a rival takes two SMs in mid-run. On a GPU a grid of higher priority
    that wants a quarter of the SMs; on Blackwell it must end before the loop does.
    """
    counters = torch.zeros(16, dtype=torch.int32)
    done = torch.zeros(tasks, dtype=torch.int32)
    rival = None
    if competing and not ctx.on_gpu:
        from mok.tools.emulator import Competitor

        rival = Competitor(2, at=300 if ctx.blackwell else 0, steps=3000, kernel="bringup_loop")
    with ctx.machine(LOOP_SMS, rival) as emulator:
        counters, done = ctx.put(emulator, counters, done)
        ctx.counters = read = _counters_of(ctx, counters)
        kernel = loop_kernel(ctx.arch)
        naps = 100 if ctx.on_gpu else 4
        arguments = (counters.data_ptr(), done.data_ptr(), tasks, clusters, naps)
        if competing and ctx.on_gpu:
            _beside_a_rival(ctx, kernel, arguments)
        else:
            launch(kernel, *arguments, ctx.stream)
            ctx.wait()
        if emulator is not None and rival is not None:
            _expect_met(ctx, emulator.report.preemptions)
    found = read()
    ctx.compare("how often each task was done", done, torch.ones(tasks, dtype=torch.int32))
    if ctx.blackwell:  # each cluster of the grid started, or its launch was cancelled
        ctx.expect("clusters started or cancelled", found["started"], clusters)
    return found | {"tasks": tasks, "clusters": clusters}


def _counters_of(ctx: Context, counters: Tensor) -> Callable[[], dict[str, int]]:
    """Reads the loop's counters by name as they are, even while the kernel runs."""
    from mok.kernels_cute.bringup.loop import COUNTERS

    if not ctx.on_gpu:
        return lambda: dict(zip(COUNTERS, counters.tolist(), strict=False))
    from mok.runtime.memory import CudaMemory

    memory, address = CudaMemory(ctx.backend.device.index or 0), counters.data_ptr()
    memory.read(address, 64)  # what it needs is made now: later, that might wait for the kernel

    def read() -> dict[str, int]:
        words = struct.unpack("<16i", memory.read(address, 64))
        return dict(zip(COUNTERS, words, strict=False))

    return read


def _expect_met(ctx: Context, met: list[Any]) -> None:
    """The emulated rival came, and on Blackwell found SMs that clusters had left."""
    ctx.expect("launches that met the other grid", len(met), 1)
    if ctx.blackwell:
        ctx.expect("whether clusters left their SMs", met[0].left > 0, True)


def _beside_a_rival(ctx: Context, kernel: Kernel, arguments: tuple[int, ...]) -> None:
    """The loop on this stream, and in mid-run a grid of higher priority on another."""
    device = ctx.backend.device
    assert ctx.backend.info is not None
    hold = hold_kernel(ctx.arch)
    blocks = max(2, ctx.backend.info.num_sms // 4)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    high = torch.cuda.Stream(device, priority=-1)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # Both are loaded before they meet: loading may wait for kernels that run.
    scratch = torch.zeros(32, dtype=torch.int32, device=device)
    launch(hold, count.data_ptr(), 1, 1, ctx.stream)
    launch(kernel, scratch.data_ptr(), scratch.data_ptr() + 64, 1, 1, 1, ctx.stream)
    ctx.wait()
    count.zero_()
    torch.cuda.synchronize(device)
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    launch(kernel, *arguments, ctx.stream)
    ends[0].record()
    time.sleep(RIVAL_AFTER_S)
    hold(count.data_ptr(), blocks, 500, high.cuda_stream)
    ends[1].record(high)
    ctx.wait()
    torch.cuda.synchronize(device)
    ours, theirs = (start.elapsed_time(end) for end in ends)
    ctx.notes.write("value", name="milliseconds", ok=True, loop=ours, rival=theirs, blocks=blocks)
    ctx.expect("blocks of the other grid that ran", int(count.item()), blocks)
    if ctx.blackwell and theirs >= ours:
        raise WrongError(
            "a grid of higher priority must end before a loop that can give way",
            f"{theirs:.2f} ms against {ours:.2f} ms",
            "Launch control does not give way here: use Config(launch_control=False), and send the report",
        )


def _counted(counters: dict[str, int]) -> str:
    """For people."""
    text = f"{counters['tasks']} tasks once each"
    if counters["granted"] or counters["refused"]:
        text += (
            f", {counters['granted']} launches cancelled, {counters['refused']} queries refused, "
            f"{counters['left']} clusters gave way"
        )
    return text
