"""Errors raised on purpose: each names the broken rule, the value found and the remedy."""

from __future__ import annotations


class MokError(RuntimeError):
    """A broken rule.

    Args:
        rule: what must hold, as a full statement ("hidden_size must be a multiple of 64").
        value: what was found; shown with ``str``, so pass text where a repr would be unreadable.
        remedy: what the caller can do about it.
    """

    REMEDY = "Change the argument to satisfy the rule."  # where a place has nothing better to say

    def __init__(self, rule: str, value: object = "", remedy: str = "") -> None:
        self.rule = rule
        self.value = value
        self.remedy = remedy or self.REMEDY
        super().__init__(rule, value, remedy)  # args rebuild the error when it is unpickled

    def __str__(self) -> str:
        text = f"{self.rule}; found {self.value}" if str(self.value) else self.rule
        return f"{text.rstrip('.')}. {self.remedy}" if self.remedy else text


class ShapeError(MokError, ValueError):
    """A size, shape, stride or tunable is outside its limits."""


class DtypeError(MokError, TypeError):
    """A tensor or argument has the wrong type."""


class DeviceError(MokError):
    """A tensor is on the wrong device, or the GPU is not supported."""


class DriverError(MokError):
    """The NVIDIA driver is missing or too old, or a driver call failed."""


class MissingDependencyError(MokError, ImportError):
    """A package is not installed, has the wrong version, or is hidden by a foreign one."""


class ContextError(MokError):
    """A forward context was used where it cannot be."""


class CapacityError(MokError):
    """More tokens or rows than the workspace was made for, or not enough memory."""


class ResourceError(MokError):
    """Too few free SMs, or not enough shared memory or registers, for the launch."""


class RouteError(MokError, ValueError):
    """An expert id is neither -1 nor in 0…E-1."""


class MokTimeoutError(MokError, TimeoutError):
    """A bounded wait expired; ``value`` says who waited for what."""


class CompileError(MokError):
    """The compiler failed, or its output breaks one of our rules (spills, missing instructions)."""


class GroupError(MokError):
    """The ranks of a group disagree, or the group was poisoned by an earlier failure."""
