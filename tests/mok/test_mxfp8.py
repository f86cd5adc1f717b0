"""Weights in MXFP8, and the layer that takes them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional, mxfp8
from mok.config import Config, Shape
from mok.errors import DtypeError, MokError, ShapeError
from mok.kernels_cute.machine import machine_of
from mok.layer import MoELayer
from mok.mxfp8 import Mxfp8Weight, QuantisedMasters, for_kernel, mxfp8_quantize
from mok.reference import (
    Case,
    Experts,
    backward_reference,
    expand,
    forward_oracle,
    forward_reference,
    integer_case,
    quantise,
    random_case,
    relative_l2,
    tile_scales,
)
from tests.helpers_layer import Layer

SHAPE = Shape(96, 128, 256, 4, 2, shared_intermediate_size=64)
CONFIG = Config(2, 2, minibatch_size=256, macrobatch_size=512)


def weight(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("layout", ["tile", "plain"])
def test_quantise_without_a_gpu_is_the_reference(layout):
    w = weight(2, 128, 256)
    found = mxfp8_quantize(w, layout=layout, expanded=False)
    assert found.shape == (2, 128, 256)
    for part, values in ((found.normal, w), (found.transposed, w.transpose(1, 2).contiguous())):
        expected = quantise(values)
        assert part.layout == layout
        assert torch.equal(part.data.view(torch.uint8), expected.data.view(torch.uint8))
        scales = tile_scales(expected.scales) if layout == "tile" else expected.scales
        assert torch.equal(part.scales.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(part.dequantise(), expand(expected))
        other = part.with_layout("plain" if layout == "tile" else "tile")
        assert torch.equal(
            other.with_layout(layout).scales.view(torch.uint8), part.scales.view(torch.uint8)
        )


@pytest.mark.parametrize("rows,columns", [(100, 128), (128, 96), (64, 256)])
def test_rows_and_columns_of_someone_elses_weights_are_whole_tiles(rows, columns):
    data = torch.zeros(2, rows, columns, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(2, rows, columns // 32, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="multiples of 128"):
        Mxfp8Weight.of(data, scales)


def test_one_orientation_and_two_dimensions():
    found = mxfp8_quantize(weight(128, 128), transposed=False)
    assert found.shape == (1, 128, 128) and found.transposed is None
    with pytest.raises(ShapeError, match="transposed=True"):
        found.take("transposed")
    with pytest.raises(ShapeError, match="normal=True"):
        mxfp8_quantize(weight(128, 128), normal=False).take("normal")


def test_weights_of_others():
    """float8_e4m3fn and float8_e8m0fnu as torchao and Transformer Engine have them, plain or in tiles."""
    w = weight(3, 256, 128)
    q, t = quantise(w), quantise(w.transpose(1, 2).contiguous())
    for scales, scales_t in (
        (q.scales, t.scales),
        (tile_scales(q.scales), tile_scales(t.scales)),
        (q.scales.view(torch.uint8), t.scales.view(torch.uint8)),
        (tile_scales(q.scales).flatten(0, 1), tile_scales(t.scales).flatten(0, 1)),
    ):
        taken = Mxfp8Weight.of(q.data, scales, (t.data, scales_t))
        ours = mxfp8_quantize(w, expanded=False)
        for orientation in ("normal", "transposed"):
            a, b = for_kernel(taken, orientation, True), for_kernel(ours, orientation, True)
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scales, b.scales)
            wide = for_kernel(taken, orientation, False).values
            assert torch.equal(wide, mxfp8_quantize(w, expanded=True).take(orientation).values)
    one = quantise(w[0])
    assert Mxfp8Weight.of(one.data, one.scales).shape == (1, 256, 128)
    down = Mxfp8Weight.of(None, None, (t.data, t.scales))  # all that backward takes of it
    assert down.shape == (3, 256, 128) and down.transposed is not None
    with pytest.raises(ShapeError, match="forward needs weights quantised in the normal"):
        down.take("normal")


def test_bad_weights():
    w = weight(2, 128, 256)
    q = quantise(w)
    with pytest.raises(DtypeError, match="bfloat16"):
        mxfp8_quantize(w.float())
    with pytest.raises(ShapeError, match="multiples of 128"):
        mxfp8_quantize(weight(2, 128, 192))
    with pytest.raises(ShapeError, match="two or three"):
        mxfp8_quantize(weight(128))
    with pytest.raises(ShapeError, match="tile or plain"):
        mxfp8_quantize(w, layout="rows")
    with pytest.raises(DtypeError, match="float8_e4m3fn"):
        Mxfp8Weight.of(w, q.scales)
    with pytest.raises(DtypeError, match="float8_e8m0fnu"):
        Mxfp8Weight.of(q.data, q.scales.float())
    with pytest.raises(ShapeError, match=r"scales of data must be \[2, 128, 8\]"):
        Mxfp8Weight.of(q.data, q.scales[:, :64])
    turned = quantise(w.transpose(1, 2).contiguous())
    with pytest.raises(ShapeError, match="transposed weight"):
        Mxfp8Weight.of(q.data, turned.scales)
    with pytest.raises(ShapeError, match="transposed weight"):
        Mxfp8Weight.of(q.data, tile_scales(turned.scales).flatten(0, 1))
    with pytest.raises(ShapeError, match="one orientation"):
        Mxfp8Weight.of(None, None)
    with pytest.raises(DtypeError, match="come together"):
        Mxfp8Weight.of(q.data, None, (turned.data, turned.scales))
    with pytest.raises(ShapeError, match="the weight's transpose"):
        Mxfp8Weight.of(q.data, q.scales, (q.data, q.scales))
    with pytest.raises(DtypeError, match="expanded=False"):
        for_kernel(mxfp8_quantize(w, expanded=True), "normal", True)


# ---------------------------------------------------------------------- the layer


def quantised(case, **options):
    routed = case.routed
    return [mxfp8_quantize(w, **options) for w in (routed.gate, routed.up, routed.down)]


def make_workspace(case, group=None, precision="mxfp8", config=CONFIG):
    shape = case.shape
    return functional.create_workspace(
        config, group, max_tokens=len(case.x), hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_experts=shape.num_experts, topk=shape.topk,
        shared_intermediate_size=shape.shared_intermediate_size, precision=precision,
    )  # fmt: skip


def run(case, routed, workspace, **options):
    config, shared = workspace.config, case.shared
    schedule = functional.build_schedule(workspace, config, case.top_experts)
    return functional.forward(
        config, workspace, schedule, case.x, case.router_weights, shared.gate[0], shared.up[0],
        shared.down[0], *routed, **options,
    )  # fmt: skip


@pytest.fixture(params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def machine(request):
    pytest.importorskip("cutlass")
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    with Emulator(request.param, num_sms=6) as emulator:
        yield emulator


@pytest.fixture
def emulated(machine):
    return machine.arch


@pytest.mark.emulator
def test_forward(emulated):
    tile = 128 if emulated == "sm_90a" else 256
    exact, case = integer_case(SHAPE), random_case(SHAPE)
    with make_workspace(case) as workspace:
        output, context = run(exact, quantised(exact), workspace)
        assert torch.equal(output, forward_reference(exact, tile=tile))
        wanted = forward_reference(case, tile=tile, precision="mxfp8")
        output, context = run(case, quantised(case), workspace, save_context=False)
        assert context is None and relative_l2(output, wanted) < 5e-3
        # Weights that someone else quantised give the same bits.
        parts = [quantise(w) for w in (case.routed.gate, case.routed.up, case.routed.down)]
        others = [Mxfp8Weight.of(q.data, q.scales) for q in parts]
        again, _ = run(case, others, workspace, save_context=False)
        assert torch.equal(again, output)


@pytest.mark.emulator
def test_wire_and_recompute(emulated):
    case = random_case(SHAPE, kind="dropped")
    routed = quantised(case)
    with make_workspace(case) as workspace:
        expected, saved = run(case, routed, workspace)
    wire = dataclasses.replace(CONFIG, mxfp8_wire=True)
    with make_workspace(case, config=wire) as workspace:
        assert workspace.x.peer(0).dtype == torch.uint8
        output, _ = run(case, routed, workspace, save_context=False)
        assert torch.equal(output, expected)
        schedule = functional.build_schedule(workspace, wire, case.top_experts)
        shared = (case.shared.gate[0], case.shared.up[0])
        again = functional.recompute_forward_context(
            wire, workspace, schedule, case.x, *shared, *routed[:2]
        )
        with pytest.raises(ShapeError, match="mxfp8_wire"):
            functional.build_schedule(workspace, CONFIG, case.top_experts)
        rows = min(int(schedule.num_tokens), workspace.sizes.ring)
    bits = lambda t: t.view(torch.uint8)  # noqa: E731
    for name in ("x_routed", "gate_routed", "up_routed"):
        assert torch.equal(
            bits(getattr(again, name)[0][:rows]), bits(getattr(saved, name)[0][:rows])
        )
    for name in ("gate_shared", "up_shared"):
        assert torch.equal(bits(getattr(again, name)[0]), bits(getattr(saved, name)[0]))
    assert len(again.x_scales) == (emulated != "sm_90a")
    if again.x_scales:
        used = rows // 128 * 128 * SHAPE.hidden_size // 32
        assert torch.equal(again.x_scales[0][:used], saved.x_scales[0][:used])


@pytest.mark.emulator
def test_values_that_are_not_numbers_stay_in_their_token(machine):
    case = random_case(Shape(40, 128, 128, 3, 2, 1, 64), seed=4)
    x, weights = case.x.clone(), case.router_weights.clone()
    x[7, 3], x[20, 5], weights[31, 1] = torch.nan, -torch.inf, torch.nan
    bad = dataclasses.replace(case, x=x, router_weights=weights)
    with Layer(case, 2, CONFIG, precision="mxfp8") as layer:
        clean, found = layer().output, layer(bad).output
    others = [t for t in range(40) if t not in (7, 20, 31)]
    assert torch.equal(found[others], clean[others])
    assert found[[7, 20, 31]].isnan().all()


@pytest.mark.emulator
def test_bad_calls(emulated):
    case = random_case(SHAPE)
    good = quantised(case)
    with make_workspace(case) as workspace:
        with pytest.raises(DtypeError, match="mxfp8_quantize"):
            run(case, [case.routed.gate, *good[1:]], workspace)
        with pytest.raises(ShapeError, match="its transpose"):
            run(case, [good[2], *good[1:]], workspace)
        only = [mxfp8_quantize(case.routed.gate, normal=False), *good[1:]]
        with pytest.raises(ShapeError, match="normal=True"):
            run(case, only, workspace)
        few = [mxfp8_quantize(case.routed.gate[:3]), *good[1:]]
        with pytest.raises(ShapeError, match="routed_gate"):
            run(case, few, workspace)
    narrow = random_case(Shape(8, 192, 128, 2, 1, shared_intermediate_size=64))
    with pytest.raises(ShapeError, match="H must be a multiple of 128"):
        make_workspace(narrow)
    with pytest.raises(MokError, match="bf16 or mxfp8"):
        make_workspace(case, precision="fp8")
    with make_workspace(case, precision="bf16") as workspace, pytest.raises(DtypeError):
        run(case, good, workspace)


# ---------------------------------------------------------------------- master weights


def test_masters_are_quantised_once_per_change():
    masters = QuantisedMasters()
    weight_ = torch.nn.Parameter(weight(2, 128, 128))
    first = masters.get("w", weight_)
    assert masters.get("w", weight_) is first
    optimizer = torch.optim.SGD([weight_], lr=1.0)
    weight_.grad = torch.ones_like(weight_)
    optimizer.step()
    second = masters.get("w", weight_)
    assert second is not first
    expected = mxfp8_quantize(weight_)
    assert torch.equal(second.normal.scales, expected.normal.scales)
    assert masters.get("w", weight_) is second
    masters.clear()
    assert masters.get("w", weight_) is not second


@pytest.mark.emulator
def test_inference_mode(emulated):
    """Tensors made in it have no version, and give the bits of those made outside."""
    x = weight(24, 128)
    with torch.no_grad():
        expected = make_layer(config=CONFIG)(x)
    with torch.inference_mode():
        layer = make_layer(config=CONFIG)
        assert layer.routed_up.is_inference()
        assert torch.equal(layer(x.clone()), expected)
    with torch.inference_mode():
        case = random_case(SHAPE)
        with make_workspace(case) as workspace:  # the ids, too
            run(case, quantised(case), workspace)


def test_a_graph_quantises_in_every_replay(monkeypatch):
    """While one is captured each use makes a copy of its own, and leaves it to no later call."""
    masters, weight_ = QuantisedMasters(), weight(1, 128, 128)
    before = masters.get("w", weight_)
    monkeypatch.setattr(mxfp8, "capturing", lambda device: True)
    inside = masters.get("w", weight_)
    assert inside is not before and masters.get("w", weight_) is not inside
    monkeypatch.setattr(mxfp8, "capturing", lambda device: False)
    assert masters.get("w", weight_) is before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_change_that_torch_cannot_see_is_found_in_debug_mode(dtype):
    masters = QuantisedMasters()
    weight_ = torch.nn.Parameter(weight(1, 128, 128).to(dtype))
    before = masters.get("w", weight_, debug=True)
    assert masters.get("w", weight_, debug=True) is before
    weight_.data[0, 3, 5] += 1
    assert masters.get("w", weight_) is before  # stale: torch's counter did not move
    with pytest.raises(MokError, match="behind torch's back"):
        masters.get("w", weight_, debug=True)
    masters.clear()
    masters.get("w", weight_, debug=True)
    # Values that trade places are a change, too.
    swapped = weight_.data.flatten()[[1, 0]]
    weight_.data.view(-1)[:2] = swapped
    with pytest.raises(MokError, match="behind torch's back"):
        masters.get("w", weight_, debug=True)


def make_layer(**options):
    torch.manual_seed(0)
    return MoELayer(128, 128, 3, 2, router="softmax", precision="mxfp8", **options)


@pytest.mark.emulator
def test_a_layer_in_debug_mode_finds_a_write_behind_torchs_back():
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=6):
        layer = make_layer(config=dataclasses.replace(CONFIG, debug=True))
        x = weight(40, 128)
        first = layer(x)
        assert torch.equal(layer(x), first)
        layer.routed_up.data[1, 3, 5] += 1
        with pytest.raises(MokError, match="behind torch's back"):
            layer(x)
        layer.requantize()
        assert not torch.equal(layer(x), first)
        functional.clear_workspace_cache()


@pytest.mark.emulator
def test_layer(machine, emulated):
    layer = make_layer(config=CONFIG)
    x = weight(40, 128)
    with torch.no_grad():
        output = layer(x)
        case = layer_case(layer, x)
        tile = 128 if emulated == "sm_90a" else 256
        wanted = forward_reference(case, tile=tile, precision="mxfp8")
        assert relative_l2(output, wanted) < 5e-3
        # Activations are quantised inside the megakernel: no kernel but these runs.
        first = len(machine.report.launches)
        layer(x)
        names = [launch.kernel for launch in machine.report.launches][first:]
        assert [n.rsplit("_", 1)[0] for n in names] == [
            "stage_ids", "schedule_count", "schedule_scan", "schedule_place",
            "forward_ring_mxfp8", "token_sum_ring",
        ]  # fmt: skip
        layer.routed_up.mul_(2)
        changed = layer(x)
        case = layer_case(layer, x)
        wanted = forward_reference(case, tile=tile, precision="mxfp8")
        assert relative_l2(changed, wanted) < 5e-3 < relative_l2(changed, output)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "wire", "recompute"),
    [
        ("sm_90a", False, False),
        ("sm_100a", True, False),
        pytest.param("sm_90a", True, True, marks=pytest.mark.slow),
        pytest.param("sm_100a", False, True, marks=pytest.mark.slow),
    ],
)
def test_training(arch, wire, recompute):
    """Gradients of a layer; 330 rows an expert, so that the ring wraps."""
    pytest.importorskip("cutlass")
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    tile = machine_of(arch).tile_m
    config = Config(2, 2, tile, 256, mxfp8_wire=wire)
    layer = make_layer(config=config, recompute=recompute)
    x, dy = weight(500, 128).requires_grad_(), weight(500, 128, seed=1)
    with torch.no_grad():
        case = layer_case(layer, x)
    with Emulator(arch, num_sms=6) as emulator:
        output = layer(x)
        output.backward(dy)
        # No pass over activations between the kernels of a layer: with the wire option, the copy of x.
        names = [launch.kernel.rsplit("_", 1)[0] for launch in emulator.report.launches]
    assert sum("quantise" in name for name in names) == 3 + wire * (2 + recompute)
    wanted = backward_reference(case, dy, precision="mxfp8")
    for name in ("gate", "up", "down"):
        found = layer.get_parameter(f"routed_{name}").grad
        assert relative_l2(found, getattr(wanted.routed, name)) < 5e-3, name
    # Through the router x has another gradient, which is BF16's.
    assert x.grad is not None and layer.router.weight.grad is not None


def layer_case(layer, x):
    _, weights, ids = layer.router(x)
    routed = Experts(layer.routed_gate, layer.routed_up, layer.routed_down)
    return Case("layer", x, ids.long(), weights.float(), routed)


def test_bad_layers():
    with pytest.raises(ShapeError, match="I must be a multiple of 128"):
        MoELayer(128, 192, 2, 1, precision="mxfp8")
    with pytest.raises(DtypeError, match="bf16 or mxfp8"):
        MoELayer(128, 128, 2, 1, precision="fp4")
    assert "mxfp8" in repr(make_layer())


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_layer_on_the_gpu():
    torch.manual_seed(0)
    layer = MoELayer(1024, 512, 16, 4, router="softmax", precision="mxfp8", device="cuda")
    x = torch.randn(2048, 1024, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        output = layer(x)
        assert torch.equal(layer(x), output)
        case = layer_case(layer, x)
        assert relative_l2(output, forward_reference(case, precision="mxfp8")) < 5e-3
        assert relative_l2(output, forward_oracle(case)) < 7e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("wire", "recompute"), [(False, False), (True, True)])
def test_training_on_the_gpu(wire, recompute):
    """With a ring that wraps; weight gradients against the quantised reference."""
    torch.manual_seed(0)
    config = Config(8, 8, 512, 2048, mxfp8_wire=wire)
    layer = MoELayer(
        1024, 512, 16, 4, router="softmax", precision="mxfp8", config=config, recompute=recompute,
        device="cuda",
    )  # fmt: skip
    x, dy = (torch.randn(2048, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x.requires_grad_()
    with torch.no_grad():
        case = layer_case(layer, x)
    layer(x).backward(dy)
    wanted = backward_reference(case, dy, precision="mxfp8")
    for name in ("gate", "up", "down"):
        found = layer.get_parameter(f"routed_{name}").grad
        assert relative_l2(found, getattr(wanted.routed, name)) < 5e-3, name
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.gpu
def test_a_graph_is_never_stale():
    """Weights that an optimizer has written between replays are quantised anew, without Python."""
    torch.manual_seed(0)
    config = Config(8, 8, 512, 2048)
    layer = MoELayer(
        512, 256, 8, 2, router="softmax", precision="mxfp8", config=config, device="cuda"
    )
    x = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn_like(x)

    def run():
        out = layer(x)
        return out, torch.autograd.grad(out, list(layer.routed_parameters()), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = run()
    for _ in range(3):
        with torch.no_grad():
            for parameter in layer.routed_parameters():
                parameter.mul_(1.25)
        graph.replay()
        wanted, wanted_grads = run()
        assert torch.equal(out, wanted)
        for found, expected in zip(grads, wanted_grads, strict=True):
            assert torch.equal(found, expected)
