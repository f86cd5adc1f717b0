"""The backward kernel and those around it against the reference: exact cases bit for bit."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import (
    GRADIENT_LIMIT,
    backward_oracle,
    backward_reference,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
    relative_l2,
)
from tests.backward_runs import BackwardRun


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer call: sizes, routing, and how it is run."""

    shape: Shape
    kind: str = "random"
    ep_size: int = 1
    direct: bool = True
    minibatch: int = 128
    macrobatch: int = 256
    lengths: tuple[int, ...] | None = None
    limit: float | None = None
    gated: bool = False
    seed: int | None = None  # of the emulator

    def __str__(self) -> str:
        s, where = self.shape, "direct" if self.direct else f"EP{self.ep_size}"
        sizes = f"T{s.num_tokens}-H{s.hidden_size}-I{s.intermediate_size}-K{s.topk}"
        return f"{where}-{sizes}-{self.kind}" + ("-gated" if self.gated else "")


def check(layer, device, grid, comm=0, grad_mode="bf16"):
    case = integer_case(
        layer.shape,
        kind=layer.kind,
        seed=1,
        device=device,
        swiglu_limit=layer.limit,
        gated=layer.gated,
    )
    dy = integer_gradient(case, seed=1)
    options = {"tokens_per_rank": layer.lengths, "grad_mode": grad_mode}
    if grad_mode.endswith("_add"):
        options["into"] = backward_reference(
            case, dy, layer.ep_size, tokens_per_rank=layer.lengths, grad_mode=grad_mode[:4]
        )
    got = BackwardRun(
        case,
        dy,
        layer.ep_size,
        direct=layer.direct,
        minibatch=layer.minibatch,
        macrobatch=layer.macrobatch,
        grid=grid,
        num_comm_ctas=comm,
        **options,
    ).run()
    want = backward_reference(case, dy, layer.ep_size, **options).named()
    assert got.named().keys() == want.keys()
    for name, value in got.named().items():
        assert value.dtype == want[name].dtype
        assert torch.equal(value, want[name]), name


# ------------------------------------------------------------------ emulator

DIRECT = [
    Layer(Shape(40, 64, 64, 2, 2, 1, 64), limit=128.0, gated=True, seed=1),
    Layer(Shape(40, 192, 320, 2, 2, 1, 128), kind="dropped"),
    # 150 tokens to one expert: it crosses macrobatches, and others have no rows.
    Layer(Shape(150, 64, 64, 3, 3), kind="few_experts", macrobatch=128, seed=2),
    Layer(Shape(0, 64, 64, 2, 2, 1, 64), gated=True),
]
RING = [
    Layer(Shape(40, 64, 128, 3, 2, 1, 64), kind="duplicates", ep_size=2, direct=False, gated=True),
    # A rank without tokens, ranks without rows, an expert larger than the ring.
    Layer(
        Shape(60, 64, 64, 3, 3, 1, 64),
        kind="one_expert",
        ep_size=3,
        direct=False,
        macrobatch=128,
        lengths=(40, 0, 20),
        seed=3,
    ),
]


def emulated(layer, grad_mode="bf16"):
    comm = 0 if layer.direct else 1
    emulator = pytest.importorskip("mok.tools.emulator").Emulator
    with emulator("sm_90a", num_sms=4, seed=layer.seed):
        check(layer, "cpu", 2 + comm, comm, grad_mode)


@pytest.mark.emulator
@pytest.mark.parametrize("layer", [*DIRECT, *RING], ids=str)
def test_exact_gradients_in_the_emulator(layer):
    emulated(layer)


@pytest.mark.emulator
@pytest.mark.slow  # each mode is a kernel of its own
@pytest.mark.parametrize("grad_mode", ["fp32", "bf16_add", "fp32_add"])
def test_grad_modes_in_the_emulator(grad_mode):
    emulated(DIRECT[0], grad_mode)
    emulated(DIRECT[2], grad_mode)


# ------------------------------------------------------------------ GPU

LARGE = [
    *DIRECT,
    *RING,
    Layer(Shape(3000, 512, 320, 8, 4, 1, 192), kind="skewed", macrobatch=512, gated=True),
    Layer(
        Shape(3000, 512, 320, 10, 4, 1, 192),
        kind="dropped",
        ep_size=3,
        direct=False,
        macrobatch=512,
        lengths=(2000, 0, 1000),
        limit=128.0,
    ),
]


@pytest.fixture(scope="module")
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the backward kernel is for Hopper")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("grad_mode", ["bf16", "fp32", "bf16_add", "fp32_add"])
@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_exact_gradients(hopper, layer, grad_mode):
    for grid in (132, 20):
        check(layer, hopper, grid, 0 if layer.direct else 3, grad_mode)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 1 + 2.0**-8])
def test_random_gradients_are_near_the_oracle(hopper, limit):
    shape = Shape(4096, 2048, 768, 16, 8, 1, 512)
    case = random_case(shape, device=hopper, swiglu_limit=limit, gated=True)
    dy = random_gradient(case)
    run = BackwardRun(case, dy, direct=True, minibatch=1024, macrobatch=8192, grid=132)
    want = backward_oracle(case, dy).named()
    for name, value in run.run().named().items():
        assert relative_l2(value, want[name]) < GRADIENT_LIMIT, name
