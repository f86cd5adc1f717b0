"""Routed weights as callers of the reference system give them.

A BF16 tensor [El, ., .]; one BF16 tensor per expert; or, in MXFP8, what ``mok.ops.mxfp8_quantize`` returns:
forward takes (data, scales) of each, backward (data, scales, transposed data, its scales) of gate and up
and (transposed data, its scales) of down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok.errors import DtypeError
from mok.mxfp8 import Mxfp8Weight

NAMES = ("routed_gate_weights", "routed_up_weights", "routed_down_weights")
_E4M3 = (torch.float8_e4m3fn, torch.uint8)


def routed_weights(given: Sequence[Any], backward: bool = False) -> list[Any]:
    """Gate, up and, where given, down as ``mok.functional`` takes them: all tensors or all Mxfp8Weight.

    Raises:
        DtypeError, ShapeError: what is none of these, or some in BF16 and some in MXFP8.
    """
    found = [
        _weight(name, value, backward, is_down=name == NAMES[2])
        for name, value in zip(NAMES, given, strict=False)
    ]
    kinds = [isinstance(w, Mxfp8Weight) for w in found]
    if any(kinds) and not all(kinds):
        words = ", ".join("MXFP8" if kind else "BF16" for kind in kinds)
        raise DtypeError("routed weights must be all BF16 or all MXFP8", words)
    return found


def _weight(name: str, value: Any, backward: bool, is_down: bool) -> Tensor | Mxfp8Weight:
    if isinstance(value, (Tensor, Mxfp8Weight)):
        return value
    parts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    first = parts[0] if parts else None
    if isinstance(first, Tensor) and first.dtype in _E4M3:
        return _quantised(name, parts, backward, is_down)
    if parts and all(isinstance(t, Tensor) for t in parts):
        if any(t.dtype != torch.bfloat16 for t in parts):
            raise DtypeError(
                f"{name} must be BF16, or E4M3 with its scales",
                ", ".join(str(t.dtype).removeprefix("torch.") for t in parts),
            )
        if all(t.dim() == 2 for t in parts):
            return torch.stack(parts)  # experts in allocations of their own: a copy
    raise DtypeError(
        f"{name} must be a tensor, one per expert, or what mok.ops.mxfp8_quantize returns",
        type(value).__name__,
    )


def _quantised(name: str, parts: list[Any], backward: bool, is_down: bool) -> Mxfp8Weight:
    """E4M3 with scales, in the orientations that a call needs."""
    want = "(data, scales)"
    if backward:
        want = "(transposed data, its scales)"
        if not is_down:
            want = "(data, scales, transposed data, its scales)"
    allowed = (4,) if backward and not is_down else (2, 4)
    if len(parts) not in allowed or not all(isinstance(t, Tensor) for t in parts):
        kinds = ", ".join("None" if t is None else type(t).__name__ for t in parts)
        raise DtypeError(f"{name} in MXFP8 must be {want} here", f"({kinds})")
    if len(parts) == 4:
        return Mxfp8Weight.of(parts[0], parts[1], (parts[2], parts[3]))
    if backward:
        return Mxfp8Weight.of(None, None, (parts[0], parts[1]))
    return Mxfp8Weight.of(parts[0], parts[1])
