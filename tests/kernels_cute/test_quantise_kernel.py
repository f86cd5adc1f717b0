"""The weight quantiser: every bit is the reference's."""

import pytest
import torch

pytest.importorskip("cutlass")

from mok.reference import expand, quantise, tile_scales
from mok.runtime.launch import launch
from tests.helpers import arch_of, kernel, opcodes, stream_of


def run(source, arch=None, **config):
    """(normal, normal scales, transposed, transposed scales) of bf16 [E, M, N], on the CPU."""
    batch, rows, columns = source.shape
    device, expanded = source.device, config["expanded"]
    data = lambda *size: (  # noqa: E731
        torch.full(size, torch.nan, dtype=torch.bfloat16, device=device)
        if expanded
        else torch.full(size, 0x55, dtype=torch.uint8, device=device)
    )
    scales = lambda r, c: torch.full((batch, r, c // 32), 0x55, dtype=torch.uint8, device=device)  # noqa: E731
    turned = (batch, rows, columns) if expanded else (batch, columns, rows)
    out = [data(*source.shape), scales(rows, columns), data(*turned), scales(columns, rows)]
    launch(
        kernel("quantise", arch or arch_of(device), **config),
        source.data_ptr(),
        *(t.data_ptr() for t in out),
        rows,
        columns,
        batch,
        stream_of(device),
    )
    return [t.cpu() for t in out]


def check(source, device, arch=None):
    placed = source.to(device)
    plain = quantise(source)
    turned = quantise(source.transpose(1, 2).contiguous())
    data, scales, data_t, scales_t = run(
        placed, arch, normal=True, transposed=True, expanded=False, tiled=True
    )
    bits = lambda t: t.view(torch.uint8)  # noqa: E731
    assert torch.equal(data, bits(plain.data))
    assert torch.equal(scales.flatten(), tile_scales(plain.scales).flatten())
    assert torch.equal(data_t, bits(turned.data))
    assert torch.equal(scales_t.flatten(), tile_scales(turned.scales).flatten())
    _, scales, untouched, scales_t = run(
        placed, arch, normal=True, transposed=False, expanded=False, tiled=False
    )
    assert torch.equal(scales, bits(plain.scales))
    assert (untouched == 0x55).all() and (scales_t == 0x55).all()
    wide, _, wide_t, _ = run(placed, arch, normal=True, transposed=True, expanded=True)
    same = lambda a, b: torch.equal(a.view(torch.int16), b.view(torch.int16))  # noqa: E731
    nan = expand(plain).isnan()
    assert same(wide[~nan], expand(plain)[~nan]) and wide[nan].isnan().all()
    expected = expand(turned).transpose(1, 2)
    nan = expected.isnan()
    assert same(wide_t[~nan], expected[~nan]) and wide_t[nan].isnan().all()


def random_values(*size, seed=0):
    rng = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 20, (*size[:-1], 1), generator=rng).float())
    return (torch.randn(size, generator=rng) * spread).bfloat16()


def special_values():
    """Every BF16 as the largest of its block, at random places, among smaller ones; zeros, NaN, Inf."""
    rng = torch.Generator().manual_seed(1)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[torch.randperm(len(every), generator=rng)]
    blocks = torch.zeros(5, 128, 128, 32)  # the last one's rows are half zeros, half negative ones
    blocks[4, 64:] = -0.0
    top = every.view(4, 128, 128)
    blocks[:4] = top.unsqueeze(-1).float() * torch.rand(4, 128, 128, 32, generator=rng)
    at = torch.randint(32, (4, 128, 128, 1), generator=rng)
    blocks[:4].scatter_(3, at, top.unsqueeze(-1).float())
    return blocks.bfloat16().view(5, 128, 4096)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_emulated(arch):
    from mok.tools.emulator import Emulator

    with Emulator(arch):
        check(random_values(2, 128, 256), "cpu", arch)


def run_rows(x, num_ctas, arch=None):
    """(data, plain scales) of bf16 [T, H] by the kernel that fills the heap, on the CPU."""
    tokens, hidden = x.shape
    data = torch.full((tokens, hidden), 0x55, dtype=torch.uint8, device=x.device)
    scales = torch.full((tokens, hidden // 32), 0x55, dtype=torch.uint8, device=x.device)
    launch(
        kernel("quantise_rows", arch or arch_of(x.device)),
        x.data_ptr(),
        data.data_ptr(),
        scales.data_ptr(),
        x.numel(),
        num_ctas,
        stream_of(x.device),
    )
    return data.cpu(), scales.cpu()


def check_rows(x, device, num_ctas, arch=None):
    data, scales = run_rows(x.to(device), num_ctas, arch)
    expected = quantise(x)
    assert torch.equal(data, expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scales.view(torch.uint8))


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("tokens", "hidden", "ctas"), [(1, 128, 1), (37, 384, 2), (9, 256, 16)])
def test_rows_emulated(arch, tokens, hidden, ctas):
    from mok.tools.emulator import Emulator

    with Emulator(arch):
        check_rows(random_values(tokens, hidden), "cpu", ctas, arch)


@pytest.mark.emulator
def test_special_values_emulated():
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a"):
        check(special_values(), "cpu")


@pytest.mark.gpu
def test_a_million_blocks_on_the_gpu():
    check(random_values(8, 2048, 2048), "cuda")
    check(special_values(), "cuda")
    check_rows(random_values(1000, 2048), "cuda", 64)
    check_rows(special_values().flatten(0, 1), "cuda", 64)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("expanded", [False, True])
def test_code(arch, expanded):
    built = kernel("quantise", arch, normal=True, transposed=True, expanded=expanded)
    (found,) = built.resources.kernels
    assert found.spill_bytes == 0 and found.registers <= 128
    ops = opcodes(built.ptx)
    assert ops["cvt.rn.satfinite.e4m3x2.f32"] == 4 * 16  # four blocks per thread
    assert ops["fma.rn.f32"] == 0
