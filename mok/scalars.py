"""Numbers among the arguments: numpy's count as Python's, bools do not."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from mok.errors import DtypeError, ShapeError


def is_bool(value: Any) -> bool:
    """Python's, numpy's or a tensor's bool."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def index_of(value: Any) -> int | None:
    """The value as an int; None if it is no whole number."""
    if type(value) is int:
        return value
    try:
        return None if is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # the latter two of tensors
        return None


def whole(name: str, value: Any) -> int:
    """The value as an int; raises DtypeError if it is no whole number."""
    found = index_of(value)
    if found is None:
        raise DtypeError(f"{name} must be a whole number", repr(value))
    return found


def check_timeout(seconds: Any) -> float:
    """The seconds as a float. Nothing may wait for ever, NaN seconds included.

    Raises:
        DtypeError: no number.
        ShapeError: negative, infinite or NaN.
    """
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool):
        raise DtypeError("timeout_s must be a number", repr(seconds))
    try:
        found = float(seconds)
    except OverflowError:
        found = math.inf
    if not 0 <= found < math.inf:
        raise ShapeError("timeout_s must be a finite number from 0 on", repr(seconds))
    return found
