"""Steps stored and run again: captured on several ranks, the same bits on one."""

from __future__ import annotations

import contextlib
import dataclasses
import stat

import pytest
import torch

from mok import capture, functional
from mok.config import Config, Shape
from mok.errors import MokError, MokTimeoutError, ShapeError
from mok.kernels_cute import records
from mok.reference import random_case, random_gradient
from tests.helpers_layer import Layer

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")


def make(device, **options):
    return random_case(
        Shape(60, 128, 64, 6, 2, 1, 64), kind="skewed", device=device, seed=2, **options
    )


def run(layer, backward=True):
    result = layer(save_context=True)
    if backward:
        dy = random_gradient(layer.case)
        functional.backward(
            layer.config, layer.workspace, result.schedule, result.context,
            layer.each(layer.split(dy)), *layer.arguments(layer.case), layer.case.swiglu_limit,
        )  # fmt: skip
        layer.finish()
        assert result.context.used
    return result


def test_captured_on_four_ranks_replayed_on_one(device, tmp_path):
    case = make(device, swiglu_limit=0.5)
    with Layer(case, 4, device=device) as layer, capture.watch(tmp_path, on_nan=False) as watched:
        run(layer)
        assert not watched.written
        watched.write("asked for")
    (file,) = watched.written
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = Config(1, 1, 256, 256)  # no tunable matters
    for config in (None, other):
        found = capture.replay([tmp_path], device, config=config)
        assert found["ok"] and not found["differ"], found["differ"]
        assert set(found["hashes"]) == set(capture.RESULTS)
        assert all(len(h) == 4 for h in found["hashes"].values())
    assert found["ep_size"] == 4 and found["versions"]["torch"] == torch.__version__

    # One bit of one token's input is seen.
    document = torch.load(file, weights_only=True)
    x = document["values"]["x"][2]
    x[3, 5] = torch.nextafter(x[3, 5].float(), torch.tensor(9e9)).bfloat16() * 1.01
    document["hashes"]["x"][2] = capture.digest(x)  # else the file counts as damaged
    torch.save(document, file)
    found = capture.replay([file], device)
    assert not found["ok"] and "output" in found["differ"]


def test_a_nan_is_kept_and_replayed(device, tmp_path):
    case = make(device)
    x = case.x.clone()
    x[17, 3] = torch.nan
    bad = dataclasses.replace(case, x=x)
    with Layer(case, 2, device=device) as layer, capture.watch(tmp_path) as watched:
        layer(case)
        assert not watched.written
        layer(bad)
    (file,) = watched.written
    found = capture.replay([file], device)
    assert found["ok"] and found["why"] == "NaN in a result"


def test_weights_may_be_hashes(device, tmp_path):
    case = make(device)
    with (
        Layer(case, 2, device=device) as layer,
        capture.watch(tmp_path, weights=False, on_nan=False) as watched,
    ):
        layer()
        watched.write("asked for")
    with pytest.raises(ShapeError, match="hashes of the weights"):
        capture.replay(watched.written, device)
    weights = {f"routed_{n}": getattr(case.routed, n) for n in ("gate", "up", "down")}
    weights |= {f"shared_{n}": getattr(case.shared, n)[0] for n in ("gate", "up", "down")}
    assert capture.replay(watched.written, device, weights=weights)["ok"]
    weights["routed_up"] = weights["routed_up"] + 1
    with pytest.raises(ShapeError, match="routed_up"):
        capture.replay(watched.written, device, weights=weights)


@pytest.mark.parametrize("kept", [True, False], ids=["weights", "hashes"])
def test_quantised_experts(device, tmp_path, kept):
    """MXFP8 at two ranks: the values that were multiplied are kept, or named by hashes of their bytes."""
    case = random_case(Shape(60, 128, 256, 5, 2, 1, 64), kind="skewed", device=device, seed=2)
    with (
        Layer(case, 2, device=device, precision="mxfp8") as layer,
        capture.watch(tmp_path, weights=kept, on_nan=False) as watched,
    ):
        run(layer)
        watched.write("asked for")
    weights = {f"routed_{n}": getattr(case.routed, n) for n in ("gate", "up", "down")}
    weights |= {f"shared_{n}": getattr(case.shared, n)[0] for n in ("gate", "up", "down")}
    found = capture.replay(watched.written, device, weights=None if kept else weights)
    assert found["ok"] and not found["differ"], found["differ"]
    assert set(found["hashes"]) == set(capture.RESULTS)
    document = torch.load(watched.written[0], weights_only=True)
    assert document["precision"] == "mxfp8"
    if not kept:
        assert not [name for name in document["values"] if name.startswith("routed")]
        weights["routed_down"] = weights["routed_down"] * 2
        with pytest.raises(ShapeError, match="routed_down"):
            capture.replay(watched.written, device, weights=weights)
        return
    for name, tensors in document["values"].items():
        if name.startswith("routed_down.transposed"):
            tensors[0][0, 5, 7] = 1
            document["hashes"][name] = [capture.digest(t) for t in tensors]
    torch.save(document, watched.written[0])
    found = capture.replay(watched.written, device)
    # Forward has its own orientation.
    assert "d_x" in found["differ"] and "output" not in found["differ"]


def test_an_expired_wait_keeps_its_step(device, tmp_path):
    case = make(device)
    with (
        Layer(case, 2, device=device) as layer,
        contextlib.suppress(MokTimeoutError),
        capture.watch(tmp_path, on_nan=False) as watched,
    ):
        layer()
        noted = layer.workspace.records.barrier_view(1)
        noted[records.BARRIER_STATE], noted[records.BARRIER_EPOCH] = records.EXPIRED, 4
        layer()
    (file,) = watched.written
    found = capture.replay([file], device)
    assert found["ok"] and "barrier" in found["why"]
    assert functional.observer is None


def test_what_is_no_capture(tmp_path):
    with pytest.raises(ShapeError, match="all ranks"):
        capture.load([tmp_path])
    (tmp_path / "a.mok").write_bytes(b"nonsense")
    with pytest.raises(ShapeError, match="readable"):
        capture.load([tmp_path])
    torch.save({"format": 99}, tmp_path / "a.mok")
    with pytest.raises(MokError, match="format"):
        capture.load([tmp_path / "a.mok"])
    (tmp_path / "a.mok").write_bytes(b"")
    with pytest.raises(ShapeError, match="readable"):
        capture.load([tmp_path])
    torch.save(stored(tmp_path) | {"local_ranks": [1], "ep_size": 2}, tmp_path / "a.mok")
    with pytest.raises(MokError, match=r"ranks \[1\] of 2"):
        capture.load([tmp_path / "a.mok"])


def stored(folder, rank=0, ep_size=1, weights=True, grad_output=False):
    """A rank's document of a step that was never run."""
    config = Config(2, 2, 128, 256)
    sizes = {
        "x": (3, 64),
        "router_weights": (3, 1),
        "routed_gate": (2, 64, 64),
        "routed_up": (2, 64, 64),
        "routed_down": (2, 64, 64),
    }
    values = {name: [torch.ones(size)] for name, size in sizes.items()}
    values["top_experts"] = [torch.zeros(3, 1, dtype=torch.int64)]
    if grad_output:
        values["grad_output"] = [torch.ones(3, 64)]
    shared = [torch.ones(64, 64)] * 3
    step = capture.Step(config, ep_size, (rank,), 2 * ep_size, None, values, shared)
    file = capture.save(step, folder / "step", weights=weights)
    document = torch.load(file, weights_only=True)
    file.unlink()
    return document


DAMAGE = {
    **{
        f"{key} {value}": (lambda d, key=key, value=value: d.update({key: value}), key)
        for key in (
            "why", "config", "ep_size", "local_ranks", "num_experts", "versions", "values", "shared",
            "hashes", "precision",
        )
        for value in (None, 3.5, [3.5])
    },
    "no x": (lambda d: d["values"].pop("x"), "x"),
    "no ids": (lambda d: d["values"].pop("top_experts"), "top_experts"),
    "up missing": (lambda d: d["values"].pop("routed_up"), "routed_up"),
    "numbers": (lambda d: d["values"].update(x=[3]), "x"),
    "of two ranks": (lambda d: d["values"].update(x=2 * d["values"]["x"]), "x"),
    "two shared": (lambda d: d["shared"].pop(), "shared"),
    "a number for a name": (lambda d: d["values"].update({3: d["values"]["x"]}), "3"),
    "a number for a hash's name": (lambda d: d["hashes"].update({3: ["x"]}), "3"),
    "clamp": (lambda d: d.update(swiglu_limit="x"), "swiglu_limit"),
    "another precision": (lambda d: d.update(precision="fp4"), "precision"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_capture_that_lacks_something(tmp_path, damage):
    change, name = DAMAGE[damage]
    document = stored(tmp_path)
    change(document)
    torch.save(document, tmp_path / "a.mok")
    with pytest.raises(ShapeError, match=rf"as mok\.capture wrote it; found .*a\.mok: .*{name}"):
        capture.load([tmp_path])


OTHER_STEPS = {
    "without weights": (
        {"weights": False},
        {},
        "values (routed_down, routed_gate, routed_up), shared",
    ),
    "with backward": ({"grad_output": True}, {}, "values (grad_output), the names of hashes"),
    "other tunables": ({}, {"config": dataclasses.asdict(Config(2, 2, 128, 512))}, "config"),
    "another E": ({}, {"num_experts": 5}, "num_experts"),
    "another EP": ({}, {"ep_size": 3}, "ep_size"),
    "another clamp": ({}, {"swiglu_limit": 7.0}, "swiglu_limit"),
    "another precision": ({}, {"precision": "mxfp8"}, "precision"),
}


@pytest.mark.parametrize("other", [None, *OTHER_STEPS])
@pytest.mark.parametrize("odd", [0, 1])
def test_files_of_unequal_steps(tmp_path, odd, other):
    made, changes, words = OTHER_STEPS.get(other, ({}, {}, ""))
    for rank in (0, 1):
        options = made if rank == odd else {}
        document = stored(tmp_path, rank, 2, **options) | (changes if rank == odd else {})
        document["hashes"] |= {"output": ["x"]} if rank == 0 else {}  # rank 1 never ended
        torch.save(document, tmp_path / f"{rank}.mok")
    if other is None:
        assert [d["local_ranks"] for d in capture.load([tmp_path])] == [[0], [1]]
        return
    with pytest.raises(ShapeError, match="of one step") as error:
        capture.load([tmp_path])
    if other != "another EP":  # which says so before
        assert "[0] and [1] differ in " in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("name", ["x", "routed_down", "shared"])
def test_damaged_bits_are_not_taken_for_other_results(tmp_path, name):
    document = stored(tmp_path)
    (document["shared"] if name == "shared" else document["values"][name])[0][1, 0] += 1
    torch.save(document, tmp_path / "a.mok")
    with pytest.raises(ShapeError, match=rf"hashes .* found .*a\.mok: {name}"):
        capture.load([tmp_path])


@pytest.mark.parametrize("change", [{"new_tunable": 3}, {"minibatch_size": None}], ids=str)
def test_tunables_of_another_version(tmp_path, change):
    document = stored(tmp_path)
    document["config"] = {k: v for k, v in (document["config"] | change).items() if v is not None}
    torch.save(document, tmp_path / "a.mok")
    (name,) = change
    with pytest.raises(ShapeError, match=f"of this version; .*{name}.*'torch'"):
        capture.replay([tmp_path], "cpu")
