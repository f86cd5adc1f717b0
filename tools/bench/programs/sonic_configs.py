"""Tile configurations for SonicMoE's matrix products on Hopper, in place of its tuner.

The tuner compiles and times dozens of kernels for each new shape, which takes minutes. Its winners
come from a short list; here each shape's products are timed once over that list, in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mok.tools.bench.timing import Clock, best_of

# (tile rows, tile columns, pingpong, cluster rows, cluster columns), best first.
CONFIGS: dict[str, tuple[tuple[int, int, bool, int, int], ...]] = {
    "up": ((128, 256, False, 2, 1), (128, 192, True, 2, 1)),
    "down": ((128, 192, True, 2, 1), (128, 256, False, 1, 2), (128, 208, True, 1, 2)),
    "d_hidden": ((128, 192, True, 2, 1), (128, 256, False, 2, 1), (128, 128, True, 2, 1)),
    "d_x": ((128, 256, False, 1, 2), (128, 192, True, 2, 1)),
    "d_weight": ((128, 192, True, 2, 1), (128, 256, False, 2, 1)),
}

_MADE: dict[tuple[Any, ...], Any] = {}


def _made(config: Any, option: tuple[int, int, bool, int, int]) -> Any:
    """The configuration object of an option, made once and kept: quack keys its plans by identity,
    and the identity of a freed object may come back as another's."""
    key = (config, *option)
    if key not in _MADE:
        rows, columns, pingpong, cluster_m, cluster_n = option
        _MADE[key] = config(
            tile_m=rows,
            tile_n=columns,
            pingpong=pingpong,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            is_dynamic_persistent=False,
        )
    return _MADE[key]


REDUCTION_SIZES = (4096, 8192)
"""Elements per program of its token sum that are tried; all are near the speed of memory."""


class Chooser:
    """Stands in for quack's gemm entry points and picks a configuration for each shape.

    Args:
        clock: times the candidates.
        variants: how many candidates of each list are tried.
    """

    def __init__(self, clock: Clock, variants: int) -> None:
        interface = importlib.import_module("quack.gemm_interface")
        config = importlib.import_module("quack.gemm_config").GemmConfig
        self.clock = clock
        self.configs = {
            role: [_made(config, option) for option in options[: max(variants, 1)]]
            for role, options in CONFIGS.items()
        }
        self.chosen: dict[tuple[Any, ...], int] = {}
        self._gated, self._dgated = interface.gemm_gated, interface.gemm_dgated
        self._plain = interface.gemm_tuned.fn
        self._undo: list[tuple[Any, str, Any]] = []
        forward = importlib.import_module("sonicmoe.functional.forward")
        backward = importlib.import_module("sonicmoe.functional.backward")
        for module, name, replacement in (
            (forward, "gemm_gated", self.gated),
            (forward, "gemm", self.plain),
            (backward, "gemm_dgated", self.dgated),
            (backward, "gemm", self.plain),
        ):
            self._undo.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)

    def uninstall(self) -> None:
        """Put quack's own entry points back."""
        for module, name, original in self._undo:
            setattr(module, name, original)
        self._undo = []

    def _run(self, role: str, key: tuple[Any, ...], call: Callable[[Any], Any]) -> Any:
        configs = self.configs[role]
        number = self.chosen.get((role, *key))
        if number is None:
            number = 0
            if len(configs) > 1:
                number, _ = best_of([lambda c=c: call(c) for c in configs], self.clock)  # type: ignore[misc]
            self.chosen[(role, *key)] = number
        return call(configs[number])

    def gated(self, a: Any, b: Any, **more: Any) -> Any:
        key = (tuple(a.shape), tuple(b.shape), bool(more.get("store_preact", True)))
        return self._run("up", key, lambda c: self._gated(a, b, config=c, **more))

    def dgated(self, a: Any, b: Any, **more: Any) -> Any:
        key = (tuple(a.shape), tuple(b.shape))
        return self._run("d_hidden", key, lambda c: self._dgated(a, b, config=c, **more))

    def plain(self, a: Any, b: Any, *, out: Any, **more: Any) -> Any:
        """``gemm``: down and d_x have rows by expert, and differ in which side of B is contiguous;
        the weight gradients have the contraction by expert."""
        if more.get("cu_seqlens_k") is not None:
            role = "d_weight"
        else:
            role = "down" if b.stride(-2) == 1 else "d_x"
        key = (tuple(a.shape), tuple(b.shape))
        self._run(role, key, lambda c: self._plain(a, b, out, config=c, **more))
        return out


def install(clock: Clock, variants: int) -> Chooser:
    """Route SonicMoE's matrix products through a new chooser.

    Raises:
        ImportError, AttributeError, TypeError: the packages are not those this was written for.
    """
    return Chooser(clock, variants)


def pin_reduction(module: Any) -> None:
    """Shorten the list that Triton's tuner tries for the token sum."""
    kernel = module.token_gather_sum_kernel
    kept = [
        c for c in kernel.configs if c.kwargs["BLOCK_H"] * c.kwargs["BLOCK_K"] in REDUCTION_SIZES
    ]
    if kept:
        kernel.configs = kept
