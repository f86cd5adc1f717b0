"""The arguments of a call: what is checked of them, and the errors that say what is wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.config import Config
from mok.errors import DeviceError, DtypeError, ShapeError

if TYPE_CHECKING:
    from mok.runtime.workspace import Workspace


def check_kind(name: str, value: Any, kind: type, made_by: str) -> None:
    """Raises DtypeError if an argument is not of its class; ``made_by``: what makes such a one."""
    if not isinstance(value, kind):
        raise DtypeError(
            f"{name} must be a {kind.__name__}", f"a {type(value).__name__}", f"Use {made_by}"
        )


def check_group(group: Any) -> None:
    """Raises DtypeError if it is none."""
    from mok.runtime.group import Group

    check_kind("group", group, Group, "mok.Group.from_process_group() or mok.Group.virtual(n)")


def device_of(device: Any) -> Any:
    """A torch device; None stays None.

    Raises:
        DeviceError: torch knows no such device.
    """
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "the device must be one that torch knows", repr(device), 'Pass device="cuda"'
        ) from error


def limit_of(swiglu_limit: Any) -> float:
    """The clamp as a number, infinite for None; raises DtypeError if it is none."""
    if swiglu_limit is None:
        return math.inf
    error: Exception | None = None
    if not isinstance(swiglu_limit, str | bytes | bytearray):  # which float() would read
        try:
            return float(swiglu_limit)
        except (TypeError, ValueError, OverflowError, RuntimeError) as caught:
            # The last is of tensors, as of [2].
            error = caught
    raise DtypeError("swiglu_limit must be a number or None", repr(swiglu_limit)) from error


def check_max_tokens(max_tokens: Any) -> None:
    """Raises DtypeError or ShapeError if it is no whole number from 0 on."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise DtypeError(
            "max_tokens must be an int", f"{max_tokens!r} ({type(max_tokens).__name__})"
        )
    if max_tokens < 0:
        raise ShapeError("max_tokens must be at least 0", max_tokens)


def check_workspace(workspace: Any) -> None:
    """Raises DtypeError if it is none, else ResourceError if it is closed."""
    from mok.runtime.workspace import Workspace

    check_kind("workspace", workspace, Workspace, "functional.create_workspace(…)")
    workspace.check_open()


def check_tunables(workspace: Workspace, config: Config) -> None:
    """A call may change the tunables that no buffer is sized by; not the ring's."""
    if config is workspace.config:
        return
    check_kind("config", config, Config, "mok.Config(…) or mok.Config.suggest(shape, device)")
    for name in ("minibatch_size", "macrobatch_size", "mxfp8_wire"):
        made, given = getattr(workspace.config, name), getattr(config, name)
        if made != given:
            raise ShapeError(
                f"{name} must be what the workspace was made with: {made}",
                given,
                "Make a workspace for this config",
            )


def per_rank(workspace: Workspace, name: str, value: Any) -> list[Tensor]:
    """A list with one entry per local rank."""
    count = len(workspace.group.local_ranks)
    if isinstance(value, Tensor):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(t, Tensor) for t in value):
        raise DtypeError(
            f"{name} must be a tensor, or one tensor per local rank", type(value).__name__
        )
    if len(value) != count:
        raise ShapeError(
            f"{name} needs one tensor for each of the {count} local ranks", f"{len(value)} given"
        )
    return list(value)


def unwrap(values: list[Any], like: Any) -> Any:
    return values[0] if isinstance(like, Tensor) else values


def check_tensor(
    workspace: Any,
    name: str,
    tensor: Tensor,
    size: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Dtype, device, shape, contiguity and alignment of an argument."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} must be a tensor", f"a {type(tensor).__name__}")
    have = tensor.shape
    if (
        tensor.dtype not in dtypes
        or tensor.device != workspace.device
        or len(have) != len(size)
        or (have != size and (size[0] is not None or have[1:] != size[1:]))
        or not tensor.is_contiguous()
    ):
        _refuse_tensor(workspace, name, tensor, size, dtypes)
    # Matrices and block scales go through TMA and 16-byte accesses; the small FP32 and int inputs do not.
    if tensor.dtype in (torch.bfloat16, torch.uint8) and tensor.numel() and tensor.data_ptr() % 16:
        raise ShapeError(
            f"{name} must be 16-byte aligned", f"address {tensor.data_ptr():#x}", "Clone it"
        )


def _refuse_tensor(
    workspace: Any,
    name: str,
    tensor: Tensor,
    size: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Say what is wrong with a tensor."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise DtypeError(f"{name} must be {wanted}", str(tensor.dtype).removeprefix("torch."))
    if tensor.device != workspace.device:
        raise DeviceError(
            f"{name} must be on the workspace's device, {workspace.device}", tensor.device,
            f"Move it with .to({str(workspace.device)!r})",
        )  # fmt: skip
    shown = "[" + ", ".join("T" if n is None else str(n) for n in size) + "]"
    if tensor.dim() != len(size) or any(
        want is not None and have != want for have, want in zip(tensor.shape, size, strict=True)
    ):
        raise ShapeError(f"{name} must have the shape {shown}", list(tensor.shape))
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} must be contiguous", f"strides {tensor.stride()}", "Call .contiguous()"
        )


def stream_of(workspace: Workspace) -> int:
    """Handle of torch's current stream on the workspace's device; 0 in the emulator."""
    return stream_handle(workspace.device)


def stream_handle(device: torch.device) -> int:
    """Handle of torch's current stream on a device; 0 in the emulator."""
    if device.type == "cpu":
        return 0
    if device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    # Without making a Stream object; torch's own compiler launches this way.
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the current one, which is where launches go; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def version_of(tensor: Tensor) -> int:
    """How often torch has seen a tensor written; 0 for one of inference mode, where it does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)
