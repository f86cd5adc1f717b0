"""The adapters, without a GPU: ours on launches that do nothing, peers on small stand-ins."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mok.config import Config
from mok.errors import MokError
from mok.runtime import compile as runtime_compile
from mok.runtime.launch import set_active_emulator
from mok.tools.bench.oracle import GRADIENT_LIMIT, OUTPUT_LIMIT, Oracle
from mok.tools.bench.phases import REST, measure_phases
from mok.tools.bench.programs import (
    PROGRAMS,
    Options,
    Unavailable,
    flashinfer,
    make_program,
    program_class,
    sonic,
    sonic_configs,
)
from mok.tools.bench.programs.base import interleaved
from mok.tools.bench.programs.ours import ep_size_of, precision_of
from mok.tools.bench.shapes import parse_shape
from mok.tools.bench.timing import HostClock
from mok.tools.bench.warm import Compilation, layer_specs
from mok.tools.bench.work import Work, make_work
from tests.tools.bench.fake_sonic import FakeSonic
from tests.tools.bench.fakes import CPU, FakeClock


@pytest.fixture(scope="module")
def work() -> Work:
    return make_work(parse_shape("64,128,64,4,2"), CPU)


def options(**more: Any) -> Options:
    return Options(HostClock(), **more)


def test_names():
    assert ep_size_of("mok-ep4") == 4 and ep_size_of("mok") == 1
    assert program_class("mok-ep16") is program_class("mok") is program_class("mok-mxfp8-ep2")
    assert precision_of("mok-mxfp8-ep2") == "mxfp8" and precision_of("mok-ep2") == "bf16"
    for name in PROGRAMS:
        assert program_class(name).passes
    with pytest.raises(MokError, match="Known"):
        program_class("nonsense")


@pytest.mark.parametrize("name", ["sonic", "flashinfer"])
def test_without_a_gpu_these_are_named(work, name):
    with pytest.raises(Unavailable, match="needs a GPU"):
        make_program(name, work, options())


def test_interleaved():
    gate = torch.arange(8.0).view(1, 8, 1)
    both = interleaved(gate, gate + 100, 2).flatten().tolist()
    assert both[:8] == [0, 1, 100, 101, 2, 3, 102, 103]


# ---------------------------------------------------------------------- torch


def test_torch_pipeline_is_right(work):
    program = make_program("torch", work, options())
    oracle = Oracle(work)
    assert oracle.output_error(program.output(program.forward(0))) < OUTPUT_LIMIT
    output, saved = program.forward_training(0)
    assert oracle.output_error(output.detach()) < OUTPUT_LIMIT
    for _ in range(2):  # kept for a second time
        raw = program.backward(0, saved, keep=True)
    errors = oracle.gradient_errors(program.gradients(raw))
    assert max(errors.values()) < GRADIENT_LIMIT
    assert program.flops("both") == 18 * 128 * 128 * 64


def test_input_sets_take_turns(work):
    program = make_program("torch", work, options())
    assert not torch.equal(program.forward(0), program.forward(1))
    assert torch.equal(program.forward(0), program.forward(2))


# ---------------------------------------------------------------------- ours


class Launches:
    """Stands in for the kernels: notes what would be launched and does nothing."""

    def __init__(self) -> None:
        self.arch, self.num_sms = "sm_90a", 8
        self.specs: list[Any] = []

    def get_kernel(self, spec: Any) -> Any:
        self.specs.append(spec)
        return types.SimpleNamespace(jit=spec, spec=spec)

    def launch(self, compiled: Any, args: tuple[Any, ...]) -> None:
        pass


@pytest.fixture
def launches(monkeypatch) -> Iterator[Launches]:
    found = Launches()
    monkeypatch.setattr(runtime_compile, "get_kernel", found.get_kernel)
    before = set_active_emulator(found)
    yield found
    set_active_emulator(before)


@pytest.mark.parametrize("name", ["mok", "mok-ep4", "mok-mxfp8", "mok-mxfp8-ep4"])
def test_ours_launches_what_is_compiled_beforehand(work, launches, name):
    mxfp8 = precision_of(name) == "mxfp8"
    if mxfp8:
        with pytest.raises(Unavailable, match="multiple of 128"):
            make_program(name, work, options())
        work = make_work(parse_shape("64,128,128,4,2"), CPU)
    program = make_program(name, work, options())
    assert ("pairs" in program.note) == (not mxfp8)
    output = program.output(program.forward(0))
    assert output.shape == (64, 128) and output.dtype == torch.bfloat16
    _, saved = program.forward_training(1)
    gradients = program.gradients(program.backward(1, saved))
    shapes = {key: tuple(value.shape) for key, value in gradients.items()}
    assert shapes == {
        "x": (64, 128), "router_weights": (64, 2),
        "gate": work.gate.shape, "up": work.up.shape, "down": work.down.shape,
    }  # fmt: skip
    specs = layer_specs("sm_90a", name == "mok", True, mxfp8, [(128, 128)])
    assert set(launches.specs) == set(specs)
    program.check()
    program.close()
    assert program.workspace.closed


def test_forward_alone_needs_fewer_kernels(work, launches):
    make_program("mok", work, options()).forward(0)
    assert set(launches.specs) == set(layer_specs("sm_90a", True, trains=False))


def test_a_configuration_is_used_and_an_impossible_one_is_named(work, launches):
    program = make_program("mok", work, options(config=Config(2, 2, 256, 512)))
    assert program.note == "EP 1, minibatch 256, macrobatch 512, pairs"
    with pytest.raises(Unavailable, match="comm SMs"):
        make_program("mok-ep4", work, options(config=Config(8, 8, 256, 512)))


def test_phases_cover_a_call(work, launches):
    program = make_program("mok", work, options())

    def both(index: int) -> Any:
        _, saved = program.forward_training(index)
        return program.backward(index, saved)

    clock = FakeClock()
    cost = {"schedule": 1, "forward": 10, "backward": 20, "router_grad": 3}
    cost |= {"token_sum": 2, "dx_sum": 2}
    launches.launch = lambda spec, args: clock.spend(  # type: ignore[method-assign]
        next((ms for key, ms in cost.items() if spec.name.startswith(key)), 0)
    )
    from mok import functional

    original = functional.build_schedule
    found = measure_phases(both, clock, calls=3, warm_calls=1)
    assert functional.build_schedule is original
    assert found["schedule"] == pytest.approx(1) and found["kernel"] == pytest.approx(10)
    assert found["token sum"] == pytest.approx(2) and found["backward kernel"] == pytest.approx(20)
    assert found["backward sums"] == pytest.approx(5)
    assert found[REST] == pytest.approx(0)


def test_compilation_in_workers(tmp_path, monkeypatch):
    """Both kernels are in the cache afterwards; then there is nothing left to start."""
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    from mok import kernels

    specs = [kernels.stage_ids_spec("sm_90a", 64), kernels.stage_ids_spec("sm_90a", 32)]
    compilation = Compilation(specs, workers=2)
    assert len(compilation.processes) == 2
    compilation.wait()
    assert len(list((tmp_path / "kernels").glob("stage_ids-*/meta.json"))) == 2
    assert not Compilation(specs, workers=2).processes


# ---------------------------------------------------------------------- SonicMoE


@pytest.fixture
def fake_sonic(monkeypatch) -> FakeSonic:
    found = FakeSonic()
    found.install(monkeypatch)
    monkeypatch.setattr(sonic, "_library", None)
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")  # as loading sets it, but undone
    return found


def test_sonic_is_right_in_its_own_layouts(work, fake_sonic):
    program = sonic.SonicProgram("sonic", work, options(variants=2))
    oracle = Oracle(work)
    assert oracle.output_error(program.forward(0)) < OUTPUT_LIMIT
    output, saved = program.forward_training(0)
    assert oracle.output_error(output.detach()) < OUTPUT_LIMIT
    errors = oracle.gradient_errors(program.gradients(program.backward(0, saved)))
    assert max(errors.values()) < GRADIENT_LIMIT
    assert fake_sonic.identity.semantic_value_key(object(), set())[0] == "opaque"
    program.close()
    assert fake_sonic.forward.gemm is None  # its own entry points are back


def test_sonic_chooses_once_per_shape_and_never_tunes(work, fake_sonic):
    program = sonic.SonicProgram("sonic", work, options(variants=2))
    program.forward(0)
    tried = len(fake_sonic.configs)
    assert tried > 4  # two candidates, some calls each, for two products
    fake_sonic.configs.clear()
    program.forward(1)
    assert len(fake_sonic.configs) == 2
    roles = {key[0] for key in program.chooser.chosen}
    _, saved = program.forward_training(0)
    program.backward(0, saved)
    roles |= {key[0] for key in program.chooser.chosen}
    assert roles == set(sonic_configs.CONFIGS)
    assert all(not c.is_dynamic_persistent for c in fake_sonic.configs)


def test_sonic_configurations_are_the_same_objects_for_every_shape(work, fake_sonic):
    first, second = (sonic_configs.install(HostClock(), 2).configs for _ in range(2))
    assert all(a is b for role in first for a, b in zip(first[role], second[role], strict=True))


def test_sonic_one_variant_is_not_timed(work, fake_sonic):
    sonic.SonicProgram("sonic", work, options(variants=1)).forward(0)
    assert len(fake_sonic.configs) == 2


def test_sonic_tries_few_sums_unless_it_may_tune(work, fake_sonic, monkeypatch):
    sonic.SonicProgram("sonic", work, options())
    kept = [c.kwargs["BLOCK_H"] * c.kwargs["BLOCK_K"] for c in fake_sonic.reduction.configs]
    assert kept == [4096, 4096, 8192]


def test_sonic_with_its_own_tuner(work, fake_sonic):
    fake_sonic.forward.gemm = "its own"
    program = sonic.SonicProgram("sonic", work, options(sonic_tune=True))
    assert fake_sonic.forward.gemm == "its own" and program.note == "its own tuner"
    assert len(fake_sonic.reduction.configs) == 5


def test_sonic_that_is_absent_or_another_release(work, fake_sonic, monkeypatch):
    monkeypatch.delattr(sys.modules["sonicmoe.functional"], "_UpProjection")
    with pytest.raises(Unavailable, match="_UpProjection"):
        sonic.SonicProgram("sonic", work, options())
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", None)
    with pytest.raises(Unavailable, match="sonicmoe"):
        sonic.SonicProgram("sonic", work, options())


# ---------------------------------------------------------------------- FlashInfer

FAKE_FLASHINFER = """
import dataclasses
import torch

@dataclasses.dataclass
class MegaMoEHopperBf16Inputs:
    activation: object
    topk_idx: object
    topk_weights: object
    fc1_weight: object
    fc2_weight: object
    output_activation: object

built = []

class Frontend:
    def __init__(self, buffer, knobs):
        self.buffer, self.knobs = buffer, knobs
        self.config = tuple(sorted((knobs or {"group_hint": TABLE}).items()))

    def make_launch_thunk(self, inputs):
        if self.knobs and "swap_ab" in self.knobs:
            raise ValueError("this geometry does not fit")
        assert inputs.topk_idx.dtype == torch.int64
        assert inputs.fc1_weight.stride(1) == 1 and inputs.fc2_weight.stride(1) == 1

        def thunk():
            x, ids, weights = inputs.activation, inputs.topk_idx, inputs.topk_weights
            out = torch.zeros(x.shape)
            for e in range(len(inputs.fc1_weight)):
                both = (x.float() @ inputs.fc1_weight[e].float()).unflatten(1, (-1, 2, 8))
                gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
                hidden = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                weight = torch.where(ids == e, weights, 0).sum(1, keepdim=True)
                out += weight * (hidden @ inputs.fc2_weight[e].float())
            inputs.output_activation.copy_(out.bfloat16())
        return thunk

class Buffer:
    def __init__(self, tokens, hidden, knobs):
        self.output_activation = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        self._frontend = Frontend(self, knobs)
        self.destroyed = False
        built.append(self)
    def destroy(self):
        self.destroyed = True

TABLE = 264

def get_symm_buffer_for_hopper_bf16_mega_moe(E, T, K, H, I, rank, world, *, knobs=None):
    assert (rank, world) == (0, 1)
    return Buffer(T, H, knobs)
"""


@pytest.fixture
def fake_flashinfer(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "flashinfer":
            monkeypatch.delitem(sys.modules, name)
    folder = tmp_path.joinpath(*flashinfer.PACKAGE.split("."))
    folder.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise RuntimeError('imports everything')")
    (tmp_path / "flashinfer" / "moe_ep" / "__init__.py").write_text("raise RuntimeError('too')")
    (folder / "__init__.py").write_text(textwrap.dedent(FAKE_FLASHINFER))
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] == "flashinfer":
            del sys.modules[name]


@pytest.fixture(scope="module")
def wide_work() -> Work:
    return make_work(parse_shape("32,256,64,4,2"), CPU)


def test_flashinfer_is_right_and_keeps_one_variant(wide_work, fake_flashinfer):
    said: list[str] = []
    chosen = options(paths={"flashinfer": str(fake_flashinfer)}, variants=9, say=said.append)
    for _ in range(2):  # the second shape of a run finds it imported
        program = flashinfer.FlashInferProgram("flashinfer", wide_work, chosen)
        oracle = Oracle(wide_work)
        assert oracle.output_error(program.output(program.forward(0))) < OUTPUT_LIMIT
        first = program.forward(0).clone()
        assert not torch.equal(first, program.forward(1))
    built = sys.modules[flashinfer.PACKAGE].built
    # As shipped, the same as the table (not built twice), one more, two that fail.
    assert len(said) == 2 * 4
    assert [b.destroyed for b in built].count(False) == 2
    program.close()
    assert [b.destroyed for b in built].count(False) == 1


def test_flashinfer_folder_may_be_given_at_any_level(fake_flashinfer):
    top = fake_flashinfer / "flashinfer"
    for path in (fake_flashinfer, top, top / "moe_ep"):
        assert flashinfer.find_folder(str(path)) == top
    with pytest.raises(Unavailable, match="is not in"):
        flashinfer.find_folder(str(fake_flashinfer / "nowhere"))


def test_flashinfer_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="--peers flashinfer=PATH"):
        flashinfer.find_folder(None)


def test_flashinfer_refuses_what_it_cannot_do(work, fake_flashinfer):
    with pytest.raises(Unavailable, match="multiple of 256"):
        flashinfer.FlashInferProgram("flashinfer", work, options())
