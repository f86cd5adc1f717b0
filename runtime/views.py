"""Zero-copy torch tensors over raw addresses, through DLPack.

The tensor does not own the memory: it is invalid once the memory is unmapped. The device is the one
given, also for memory that lies on a peer GPU (which torch may not even see).
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPU, _CUDA = 1, 2  # DLDeviceType
_UINT = 1  # DLDataTypeCode


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# One description serves all tensors: torch copies it when it makes the tensor, and later reads only
# the deleter, which is null. So nothing has to be freed, and no callback can come at a bad time.
_shape = (ctypes.c_int64 * 1)(0)
_strides = (ctypes.c_int64 * 1)(1)
_managed = _Managed()
_managed.tensor.ndim = 1
_managed.tensor.dtype = _DataType(_UINT, 8, 1)
_managed.tensor.shape = ctypes.cast(_shape, ctypes.POINTER(ctypes.c_int64))
_managed.tensor.strides = ctypes.cast(_strides, ctypes.POINTER(ctypes.c_int64))
_lock = threading.Lock()

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, device_index: int | None
) -> torch.Tensor:
    """A contiguous tensor over memory at an address.

    Args:
        address: bytes, aligned to the dtype.
        device_index: CUDA ordinal, or None for host memory.
    """
    import torch

    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        device = "cpu" if device_index is None else f"cuda:{device_index}"
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    with _lock:
        _managed.tensor.data = address
        kind = _CPU if device_index is None else _CUDA
        _managed.tensor.device = _Device(kind, device_index or 0)
        _shape[0] = size
        capsule = _new_capsule(ctypes.addressof(_managed), b"dltensor", None)
        raw = torch.from_dlpack(capsule)
    # Bytes first: DLPack names fewer dtypes than torch has.
    return raw.view(dtype).view(tuple(shape))
