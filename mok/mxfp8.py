"""Weights in MXFP8: made once per optimizer step, or taken from torchao or Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.arguments import version_of
from mok.errors import DtypeError, MokError, ShapeError
from mok.reference.mxfp8 import Quantised, expand, quantise, tile_scales, untile_scales

if TYPE_CHECKING:
    from mok.runtime.workspace import Workspace

TILE = 128
LAYOUTS = ("tile", "plain")


@dataclass(frozen=True)
class MxTensor:
    """A stack of matrices in MXFP8 with the contraction last.

    Attributes:
        data: float8_e4m3fn [E, R, C]; or, on Hopper, the same values as bfloat16 in ``values``.
        scales: float8_e8m0fnu [E, R, C/32] ("plain"), or uint8 [E, R/128, C/128, 32, 16] ("tile": the
            layout that the hardware and cuBLAS take), one per 32 elements of a row.
        values: the values as bfloat16, or None. For an orientation "transposed" they stay in the layout
            of the weight, [E, C, R].
    """

    data: Tensor | None
    scales: Tensor | None
    values: Tensor | None = None

    @property
    def layout(self) -> str:
        """Of the scales: "plain" or "tile"."""
        return "tile" if self.scales is not None and self.scales.dim() == 5 else "plain"

    def with_layout(self, layout: str) -> MxTensor:
        """The same with scales in another layout."""
        _check_layout(layout)
        if self.scales is None or layout == self.layout:
            return self
        change = tile_scales if layout == "tile" else untile_scales
        return replace(self, scales=change(self.scales))

    def split(self, lengths: Sequence[int]) -> list[MxTensor]:
        """One part per count of experts, in place."""
        columns = [
            [None] * len(lengths) if t is None else list(t.split(list(lengths)))
            for t in (self.data, self.scales, self.values)
        ]
        return [MxTensor(*parts) for parts in zip(*columns, strict=True)]

    def dequantise(self) -> Tensor:
        """BF16 [E, R, C], exact but for BF16's subnormals."""
        if self.data is None or self.scales is None:
            raise DtypeError(
                "to dequantise, E4M3 data and scales are needed", "BF16 values",
                "They are in .values",
            )  # fmt: skip
        plain = self.with_layout("plain")
        assert plain.data is not None and plain.scales is not None
        return expand(Quantised(plain.data, plain.scales.view(torch.float8_e8m0fnu)))


@dataclass(frozen=True)
class Mxfp8Weight:
    """A weight [E, M, N] in MXFP8.

    Attributes:
        shape: (E, M, N).
        normal: blocks along N, the contraction of forward's GEMMs; [E, M, N].
        transposed: blocks along M, the contraction of backward's; [E, N, M].
    """

    shape: tuple[int, int, int]
    normal: MxTensor | None
    transposed: MxTensor | None

    @staticmethod
    def of(
        data: Tensor | None,
        scales: Tensor | None,
        transposed: tuple[Tensor, Tensor] | None = None,
    ) -> Mxfp8Weight:
        """Weights that someone else has quantised.

        Args:
            data: float8_e4m3fn (or its bytes as uint8) [E, M, N] or [M, N]; None where only
                ``transposed`` is there, which backward takes of down weights.
            scales: float8_e8m0fnu (or uint8), [.., M, N/32] or in tiles [.., M/128, N/128, 32, 16];
                experts may be folded into the first dimension of tiles.
            transposed: the same of the transposed weight, data [.., N, M]; backward needs it.

        Raises:
            DtypeError, ShapeError: what is wrong, and with which tensor.
        """
        if (data is None) != (scales is None):
            raise DtypeError("data and its scales come together", "one of them")
        normal = None if data is None or scales is None else _checked("data", data, scales)
        other = None if transposed is None else _checked("transposed data", *transposed)
        if normal is None and other is None:
            raise ShapeError("a weight needs data and scales in one orientation", "neither")
        if normal is not None:
            assert normal.data is not None
            experts, rows, columns = normal.data.shape
            if other is not None:
                assert other.data is not None
                if other.data.shape != (experts, columns, rows):
                    raise ShapeError(
                        f"transposed data must be [{experts}, {columns}, {rows}]: the weight's "
                        "transpose, quantised along its last dimension",
                        list(other.data.shape),
                        "Quantise weight.transpose(-1, -2).contiguous()",
                    )
        else:
            assert other is not None and other.data is not None
            experts, columns, rows = other.data.shape
        return Mxfp8Weight((experts, rows, columns), normal, other)

    def split(self, lengths: Sequence[int]) -> list[Mxfp8Weight]:
        """One part per count of experts, in place."""
        if len(lengths) == 1:
            return [self]
        absent: list[MxTensor | None] = [None] * len(lengths)
        normal, transposed = (
            absent if part is None else part.split(lengths)
            for part in (self.normal, self.transposed)
        )
        return [
            Mxfp8Weight((count, *self.shape[1:]), *parts)
            for count, *parts in zip(lengths, normal, transposed, strict=True)
        ]

    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name ("normal.data", "transposed.scales", …), bytes as uint8; for files."""
        found = {}
        for orientation in ("normal", "transposed"):
            part = getattr(self, orientation)
            if part is None:
                continue
            tiles = part.with_layout("tile")
            for name in ("data", "scales", "values"):
                tensor = getattr(tiles, name)
                if tensor is not None:
                    plain = tensor if name == "values" else tensor.view(torch.uint8)
                    found[f"{orientation}.{name}"] = plain
        return found

    @staticmethod
    def of_parts(shape: tuple[int, int, int], parts: dict[str, Tensor]) -> Mxfp8Weight:
        """The inverse of ``parts``."""

        def part(orientation: str) -> MxTensor | None:
            data, scales, values = (
                parts.get(f"{orientation}.{name}") for name in ("data", "scales", "values")
            )
            if data is None and values is None:
                return None
            return MxTensor(
                None if data is None else data.view(torch.float8_e4m3fn), scales, values
            )

        return Mxfp8Weight(shape, part("normal"), part("transposed"))

    def take(self, orientation: str) -> MxTensor:
        """An orientation, or an error that says what is missing."""
        found: MxTensor | None = getattr(self, orientation)
        if found is None:
            other = "forward" if orientation == "normal" else "backward"
            raise ShapeError(
                f"{other} needs weights quantised in the {orientation} orientation",
                "the other one only",
                f"Call mxfp8_quantize with {orientation}=True",
            )
        return found


def _checked(name: str, data: Tensor, scales: Tensor) -> MxTensor:
    if data.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise DtypeError(f"{name} must be float8_e4m3fn", data.dtype)
    if scales.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise DtypeError(f"the scales of {name} must be float8_e8m0fnu", scales.dtype)
    data = data if data.dim() == 3 else data.unsqueeze(0)
    if data.dim() != 3:
        raise ShapeError(f"{name} must have two or three dimensions", list(data.shape))
    experts, rows, columns = data.shape
    check_size(name, rows, columns)
    plain = (experts, rows, columns // 32)
    tiles = (experts, rows // TILE, columns // TILE, 32, 16)
    folded = (experts * tiles[1], *tiles[2:])
    known: tuple[tuple[tuple[int, ...], ...], ...] = (
        (plain, plain[1:]),
        (tiles, tiles[1:], folded),
    )
    for size, *others in known:
        if scales.numel() == data.numel() // 32 and scales.shape in (size, *others):
            kind = torch.float8_e8m0fnu if size == plain else torch.uint8
            return MxTensor(
                data.contiguous().view(torch.float8_e4m3fn),
                scales.contiguous().view(size).view(kind),
            )
    hint = ""
    turned = (columns // TILE, rows // TILE, 32, 16)
    wrong = ((experts, *turned), turned, (experts * turned[0], *turned[1:]))
    if scales.shape[-2:] == (columns, rows // 32) or scales.shape in wrong:
        hint = "They are those of the transposed weight"
    raise ShapeError(
        f"the scales of {name} must be {list(plain)} or in tiles {list(tiles)}",
        list(scales.shape),
        hint or "One scale per 32 elements of the last dimension",
    )


def check_size(name: str, rows: int, columns: int) -> None:
    """Refuse what has no whole tiles.

    Raises:
        ShapeError: not multiples of 128.
    """
    if rows % TILE or columns % TILE or not rows or not columns:
        raise ShapeError(
            f"the last two dimensions of {name} must be multiples of {TILE} for MXFP8",
            f"[{rows}, {columns}]",
            "Use BF16, or pad the sizes",
        )


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ShapeError("the scale layout must be tile or plain", repr(layout))


def mxfp8_quantize(
    weight: Tensor,
    *,
    normal: bool = True,
    transposed: bool = True,
    layout: str = "tile",
    expanded: bool | None = None,
) -> Mxfp8Weight:
    """Quantise weights: one kernel, one call per weight and optimizer step.

    Args:
        weight: BF16 [E, M, N] or [M, N]; M and N multiples of 128.
        normal: with blocks along N, for forward.
        transposed: with blocks along M, for backward.
        layout: of the scales, "tile" or "plain".
        expanded: the values as BF16 instead of E4M3 and scales. None: on Hopper, which has no
            block-scaled MMA.

    The rule is NVIDIA's: the scale is the largest magnitude / 448, rounded up to a power of two
    (docs/mxfp8.md). Without a GPU or emulator the reference does it, with the same bits.

    Raises:
        DtypeError, ShapeError: the weight is not BF16, or not of whole tiles.
    """
    _check_layout(layout)
    if weight.dtype != torch.bfloat16:
        raise DtypeError("weights to quantise must be bfloat16", weight.dtype)
    if weight.dim() not in (2, 3):
        raise ShapeError("a weight must have two or three dimensions", list(weight.shape))
    weight = weight.detach()
    weight = (weight if weight.dim() == 3 else weight.unsqueeze(0)).contiguous()
    experts, rows, columns = weight.shape
    check_size("the weight", rows, columns)
    arch = kernel_arch(weight)
    if expanded is None:
        expanded = arch == "sm_90a"
    if arch is None:
        along, across = _reference(weight, normal, transposed, layout, expanded)
    else:
        along, across = _kernel(weight, normal, transposed, layout, expanded, arch)
    return Mxfp8Weight((experts, rows, columns), along, across)


def kernel_arch(weight: Tensor) -> str | None:
    """What to compile for; None where no kernel runs."""
    from mok.runtime.launch import active_emulator

    emulator: Any = active_emulator()
    if emulator is not None:
        return str(emulator.arch)
    if weight.device.type != "cuda":
        return None
    from mok.runtime.device import require_arch

    return require_arch(weight.device).arch


def _reference(
    weight: Tensor, normal: bool, transposed: bool, layout: str, expanded: bool
) -> tuple[MxTensor | None, MxTensor | None]:
    def make(values: Tensor, turned: bool) -> MxTensor:
        found = quantise(values)
        if expanded:
            wide = expand(found)
            return MxTensor(None, None, wide.transpose(1, 2).contiguous() if turned else wide)
        return MxTensor(found.data, found.scales).with_layout(layout)

    turned = weight.transpose(1, 2).contiguous()
    return make(weight, False) if normal else None, make(turned, True) if transposed else None


def _kernel(
    weight: Tensor, normal: bool, transposed: bool, layout: str, expanded: bool, arch: str
) -> tuple[MxTensor | None, MxTensor | None]:
    from mok import kernels
    from mok.arguments import on, stream_handle
    from mok.runtime.compile import get_kernel
    from mok.runtime.launch import launch

    experts, rows, columns = weight.shape

    def empty(r: int, c: int) -> MxTensor:
        if expanded:
            return MxTensor(None, None, torch.empty_like(weight))
        plain, tiles = (experts, r, c // 32), (experts, r // TILE, c // TILE, 32, 16)
        data = torch.empty(experts, r, c, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(
            tiles if layout == "tile" else plain, dtype=torch.uint8, device=weight.device
        )
        kind = torch.uint8 if layout == "tile" else torch.float8_e8m0fnu
        return MxTensor(data.view(torch.float8_e4m3fn), scales.view(kind))

    parts = (
        empty(rows, columns) if normal else None,
        empty(columns, rows) if transposed else None,
    )
    if experts and (normal or transposed):
        spec = kernels.quantise_spec(arch, normal, transposed, expanded, layout == "tile")
        with on(weight.device):
            launch(
                get_kernel(spec),
                weight.data_ptr(),
                *(address for part in parts for address in addresses(part)),
                rows,
                columns,
                experts,
                stream_handle(weight.device),
            )
    return parts


def addresses(part: MxTensor | None) -> tuple[int, int]:
    """Of the data or values, and of the scales; 0 for what is not there."""
    if part is None:
        return 0, 0
    if part.values is not None:
        return part.values.data_ptr(), 0
    assert part.data is not None and part.scales is not None
    return part.data.data_ptr(), part.scales.data_ptr()


def for_kernel(weight: Mxfp8Weight, orientation: str, scaled: bool) -> MxTensor:
    """What a kernel takes: E4M3 with scales in tiles (``scaled``), or the values as BF16."""
    part = weight.take(orientation)
    if scaled:
        if part.data is None:
            raise DtypeError(
                "this GPU's MMA takes E4M3 and scales", "weights expanded to BF16",
                "Call mxfp8_quantize with expanded=False",
            )  # fmt: skip
        return part.with_layout("tile")
    if part.values is None:
        wide = part.dequantise()
        if orientation == "transposed":
            wide = wide.transpose(1, 2)
        part = MxTensor(None, None, wide.contiguous())
    return part


def mxfp8_per_rank(
    workspace: Workspace, name: str, value: Any, is_down: bool, orientation: str = "normal"
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(what the kernel multiplies with, its scales or None) per local rank, of quantised weights.

    Transposed E4M3 is [E, N, M]; the values as BF16 stay in the layout of the weight.
    """
    values = [value] if isinstance(value, Mxfp8Weight) else value
    count = len(workspace.group.local_ranks)
    if not isinstance(values, Sequence) or not all(isinstance(v, Mxfp8Weight) for v in values):
        raise DtypeError(
            f"{name} must be an Mxfp8Weight in a workspace with precision mxfp8, one per local rank",
            type(value).__name__,
            "Quantise it with mok.mxfp8_quantize",
        )
    if len(values) != count:
        raise ShapeError(
            f"{name} needs one weight for each of the {count} local ranks", f"{len(values)} given"
        )
    hidden, inner = workspace.shape.hidden_size, workspace.shape.intermediate_size
    size = (hidden, inner) if is_down else (inner, hidden)
    for weight in values:
        if weight.shape[1:] != size and weight.shape[2:0:-1] == size:
            raise ShapeError(
                f"{name} must be quantised as [E, {size[0]}, {size[1]}]",
                f"{list(weight.shape)}: that is its transpose",
                "Quantise the weight itself; mxfp8_quantize makes both orientations",
            )
    scaled = workspace.sizes.scaled
    parts = [for_kernel(v, orientation, scaled) for v in values]
    data = [p.data if scaled else p.values for p in parts]
    return [d for d in data if d is not None], [p.scales for p in parts]


class QuantisedMasters:
    """MXFP8 copies of master weights, made again when a master has changed.

    A change is seen by torch's version counter (optimizers and ``copy_`` count), and by another address or
    device. What it cannot see is a write behind torch's back: through ``weight.data``, by a kernel, or by
    the replay of a graph that holds the optimizer. In debug mode a checksum finds these, too. A graph that
    captures a use has the quantiser in it: its replays take what the master holds then.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[Any, ...], Any, Mxfp8Weight]] = {}

    def get(
        self, name: str, master: Tensor, *, transposed: bool = False, debug: bool = False
    ) -> Mxfp8Weight:
        """The copy of a master, BF16 or FP32 (rounded to BF16 first).

        Raises:
            MokError: in debug mode, for a master that changed and whose version did not.
        """
        if capturing(master.device):
            # Replays do not come here, and what they wrote is in the graph's own memory: not for others.
            return mxfp8_quantize(master.detach().bfloat16(), transposed=transposed)
        seen = (version_of(master), master.data_ptr(), master.device)
        found = self._made.get(name)
        enough = found is not None and (not transposed or found[2].transposed is not None)
        if found is None or found[0] != seen or not enough:
            made = mxfp8_quantize(master.detach().bfloat16(), transposed=transposed)
            found = (seen, checksum(master) if debug else None, made)
            self._made[name] = found
        elif debug:
            if found[1] is None:
                found = (seen, checksum(master), found[2])
                self._made[name] = found
            elif found[1] != checksum(master):
                raise MokError(
                    f"a weight must not change behind torch's back: {name}",
                    "its values changed, its version did not",
                    "Write to it in place under torch.no_grad(), or call requantize() afterwards",
                )
        return found[2]

    def clear(self) -> None:
        """Forget all copies: the next use makes new ones."""
        self._made.clear()


def capturing(device: torch.device) -> bool:
    """Whether torch's current stream is recording a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def checksum(tensor: Tensor) -> int:
    """A sum over the bits that another position or value changes. Waits for the device."""
    bits = tensor.detach().contiguous().flatten()
    words = bits.view(torch.int16 if bits.element_size() == 2 else torch.int32).long()
    place = torch.arange(len(words), device=words.device) % 65521 + 1
    return int((words * place).sum())
