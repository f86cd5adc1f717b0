"""What is measured: shapes, suites of them, and T fitted to the free memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mok.config import Shape
from mok.errors import ShapeError

PASSES = ("forward", "backward", "both")
FLOPS_PER_ROUTE = {"forward": 6, "backward": 12, "both": 18}
"""Times H·I, for each route: the rule by which TFLOP/s are reported."""


@dataclass(frozen=True)
class BenchShape:
    """One layer at one size.

    Attributes:
        shape: T tokens in all (on all virtual ranks together), H, I, E, K.
        name: of the model, for people.
        targets: shares of cuBLAS that forward and forward + backward must reach, if set.
        asked_tokens: T before it was fitted to memory.
    """

    shape: Shape
    name: str = ""
    targets: tuple[float, float] | None = None
    asked_tokens: int | None = None

    @property
    def text(self) -> str:
        """The size as it is given on the command line."""
        s = self.shape
        sizes = (s.num_tokens, s.hidden_size, s.intermediate_size, s.num_experts, s.topk)
        return ",".join(map(str, sizes))

    @property
    def title(self) -> str:
        fitted = f" (T fitted to memory, {self.asked_tokens} asked)" if self.fitted else ""
        return f"{self.name} {self.text}{fitted}".strip()

    @property
    def fitted(self) -> bool:
        return self.asked_tokens is not None and self.asked_tokens != self.shape.num_tokens

    @property
    def routes(self) -> int:
        """T·K, as if none were dropped."""
        return self.shape.num_tokens * self.shape.topk

    def flops(self, pass_name: str, routes: int | None = None) -> int:
        """FLOP of a pass by the stated rule, for ``routes`` real routes."""
        per_route = self.shape.hidden_size * self.shape.intermediate_size
        return FLOPS_PER_ROUTE[pass_name] * (self.routes if routes is None else routes) * per_route

    def target(self, pass_name: str) -> float | None:
        """Share of cuBLAS that the pass must reach, if one was set."""
        if self.targets is None:
            return None
        return {"forward": self.targets[0], "both": self.targets[1]}.get(pass_name)

    def as_dict(self) -> dict[str, object]:
        s = self.shape
        found: dict[str, object] = {
            "name": self.name,
            "T": s.num_tokens,
            "H": s.hidden_size,
            "I": s.intermediate_size,
            "E": s.num_experts,
            "K": s.topk,
        }
        if self.fitted:
            found["asked_T"] = self.asked_tokens
        return found


def parse_shape(text: str) -> BenchShape:
    """A shape from "T,H,I,E,K".

    Raises:
        ShapeError: not five whole numbers, or outside the limits of ``mok.Shape``.
    """
    parts = text.split(",")
    try:
        tokens, hidden, inner, experts, topk = (int(part) for part in parts)
    except ValueError:
        raise ShapeError(
            "a shape is five whole numbers T,H,I,E,K",
            repr(text),
            "Write for example 16384,2048,768,128,8",
        ) from None
    if tokens < 1:
        raise ShapeError("a shape to measure needs at least one token", tokens)
    known = {s.text: s for suite in SUITES.values() for s in suite}
    wanted = BenchShape(Shape(tokens, hidden, inner, experts, topk))
    return known.get(wanted.text, wanted)


def _make(
    name: str, sizes: tuple[int, int, int, int, int], targets: tuple[float, float] | None = None
) -> BenchShape:
    return BenchShape(Shape(*sizes), name, targets)


DEFAULT_SUITE = (
    _make("Mixtral", (8192, 4096, 14336, 8, 2), (0.95, 0.92)),
    _make("DeepSeek-V3 slice", (8192, 7168, 2048, 32, 8), (0.92, 0.90)),
    _make("Sonic 120B", (32768, 4096, 2048, 64, 4), (0.91, 0.89)),
    _make("Sonic 30B", (32768, 4096, 1024, 64, 4), (0.88, 0.86)),
    _make("OLMoE", (16384, 2048, 1024, 64, 8), (0.87, 0.85)),
    _make("Qwen3-30B", (16384, 2048, 768, 128, 8), (0.83, 0.82)),
    _make("Qwen3-30B", (8192, 2048, 768, 128, 8), (0.78, 0.78)),
    _make("Sonic 7B", (24576, 1536, 512, 64, 4), (0.74, 0.73)),
)
"""The comparison with SonicMoE, FlashInfer and torch; targets as shares of cuBLAS 8192³."""

SUITES: dict[str, tuple[BenchShape, ...]] = {
    "default": DEFAULT_SUITE,
    "quick": (DEFAULT_SUITE[5], DEFAULT_SUITE[0]),
    # Small batches, where launches and schedule weigh most.
    "small": tuple(_make("Qwen3-30B", (t, 2048, 768, 128, 8)) for t in (1, 8, 64, 512)),
    # What the simulator's constants were not chosen on: the model is compared with their times.
    "unfitted": (
        _make("Sonic 7B", (24576, 1536, 512, 64, 4)),
        _make("Sonic 30B", (32768, 4096, 1024, 64, 4)),
        _make("Sonic 120B", (32768, 4096, 2048, 64, 4)),
        _make("Qwen3-235B slice", (8192, 4096, 1536, 32, 8)),
        _make("GLM-5.2 slice", (8192, 6144, 2048, 32, 8)),
        _make("Qwen3.5 slice", (8192, 4096, 1024, 64, 10)),
        _make("DeepSeek-V4-Pro slice", (4096, 7168, 3072, 24, 6)),
        _make("Kimi K2.5 slice", (4096, 7168, 2048, 48, 8)),
        _make("gpt-oss-20b", (6144, 2880, 2880, 32, 4)),
        _make("Qwen3-30B", (2048, 2048, 768, 128, 8)),
        _make("OLMoE", (4096, 2048, 1024, 64, 8)),
        _make("Mixtral", (2048, 4096, 14336, 8, 2)),
    ),
    # Where ``mok tune --exhaustive`` compares the plan's tunables with every combination on a grid.
    "planned": (
        _make("Qwen3-30B", (8192, 2048, 768, 128, 8)),
        _make("Mixtral", (4096, 4096, 14336, 8, 2)),
        _make("DeepSeek-V3 slice", (4096, 7168, 2048, 32, 8)),
        _make("OLMoE", (8192, 2048, 1024, 64, 8)),
        _make("Qwen3-235B slice", (4096, 4096, 1536, 32, 8)),
        _make("Sonic 7B", (16384, 1536, 512, 64, 4)),
    ),
    # Without a GPU: everything runs, nothing is fast.
    "cpu": (_make("small", (128, 256, 128, 8, 2)),),
}


def memory_bytes(shape: Shape, programs: Sequence[str], passes: Sequence[str], sets: int) -> int:
    """Rough bytes that measuring a shape takes, all programs held at once.

    Weights and each program's copy of gate and up in its own order; per input set what backward
    keeps; once, the largest program's temporaries and the oracle.
    """
    h, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
    tokens = shape.num_tokens
    rows = tokens * shape.topk + 128 * e
    matrix = 2 * e * h * i  # one of gate, up, down in BF16
    trains = "backward" in passes or "both" in passes
    total = 3 * matrix + sets * 4 * tokens * h
    total += sum(2 * matrix for name in programs if name in ("torch", "sonic", "flashinfer"))
    total += 6 * matrix * any("mxfp8" in name for name in programs)  # quantised, both ways
    total += 3 * matrix * ("upstream" in programs)  # in its own process
    total += 2 * rows * (h + i) * len(programs)  # workspaces
    if "backward" in passes:
        kept = {"mok": 2 * i, "sonic": 3 * i, "torch": 2 * h + 5 * i}
        total += sets * 2 * rows * sum(kept.get(name.partition("-")[0], 0) for name in programs)
    temporaries = 2 * rows * (2 * h + 4 * i)
    if trains:
        temporaries = 2 * rows * (3 * h + 8 * i) + 3 * matrix
    oracle = 16 * tokens * h + 12 * h * i + 4 * 8192 * (2 * h + 4 * i)
    if trains:
        oracle += 12 * h * i + 4 * tokens * h
    return total + max(temporaries, oracle)


def fit_tokens(
    wanted: BenchShape,
    free_bytes: int,
    programs: Sequence[str],
    passes: Sequence[str],
    sets: int,
    share: float = 0.85,
) -> BenchShape:
    """The shape with T halved until it fits a share of the free memory; says what was asked.

    Raises:
        ShapeError: not even one token fits, since the weights alone are too large.
    """
    shape = wanted.shape
    limit = share * free_bytes
    while memory_bytes(shape, programs, passes, sets) > limit:
        if shape.num_tokens == 1:
            raise ShapeError(
                "the weights must fit the free memory",
                f"{memory_bytes(shape, programs, passes, sets) / 2**30:.1f} GiB needed, "
                f"{limit / 2**30:.1f} GiB of {free_bytes / 2**30:.1f} free may be used",
                "Lower E, H or I, or measure fewer programs",
            )
        shape = dataclasses.replace(shape, num_tokens=shape.num_tokens // 2)
    if shape.num_tokens == wanted.shape.num_tokens:
        return wanted
    # Targets were set for the size asked for.
    return BenchShape(shape, wanted.name, None, wanted.shape.num_tokens)
