"""Shape and Config: every limit of the layer, stated and checked once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mok.errors import DeviceError, DtypeError, ResourceError, ShapeError
from mok.models import ModelShape, get_machine
from mok.scalars import index_of

DIM_MULTIPLE = 64  # H, I and shared I; tails inside a tile are masked
MAX_TOPK = 32
GEMM_TILE_N = 256  # columns of one CTA's output tile in the two-wave rule
CTA_TILE_M = 128  # rows of one CTA's output tile in the two-wave rule

# Rows of one cluster's output tile, to which an expert's segment is padded.
TILE_ROWS = {"sm_90a": 128, "sm_100a": 256, "sm_103a": 256}
CLUSTER_CTAS = {"sm_90a": 1, "sm_100a": 2, "sm_103a": 2}

# The reference system's defaults on 148 SMs (40 and 28), kept as fractions of the GPU.
_FWD_COMM_FRACTION = 40 / 148
_BWD_COMM_FRACTION = 28 / 148
_MAX_DIRECT_MINIBATCH = 65536
_RING_TWO_WAVES = (
    32  # a ring of rows, in minibatches of two waves: the reference system's 131072 / 4096
)


def tile_rows(arch: str) -> int:
    """Rows to which an expert's segment is padded on ``arch``; raises DeviceError if unknown."""
    try:
        return TILE_ROWS[arch]
    except KeyError:
        raise DeviceError(
            "the architecture must be a supported one", arch, f"Supported: {', '.join(TILE_ROWS)}"
        ) from None


def _require_int(name: str, value: Any, minimum: int, why: str = "") -> int:
    """The value as Python's int, numpy's too. A bool is an int in Python, but never a size."""
    found = index_of(value)
    if found is None:
        raise DtypeError(f"{name} must be an int", f"{value!r} ({type(value).__name__})")
    if found < minimum:
        raise ShapeError(f"{name} must be at least {minimum}", found, why)
    return found


def _set_ints(owner: Any, names: Mapping[str, tuple[str, int]]) -> None:
    """Check fields of a frozen dataclass, and keep Python's ints: {field: (what it is called, its least)}."""
    for field, (name, minimum) in names.items():
        object.__setattr__(owner, field, _require_int(name, getattr(owner, field), minimum))


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer call.

    Attributes:
        num_tokens: T, tokens on one rank; 0 is valid.
        hidden_size: H, a multiple of 64.
        intermediate_size: I of one routed expert, a multiple of 64.
        num_experts: E, routed experts on all ranks.
        topk: K, routes per token, 1…32. May exceed E, since a token may use an expert twice.
        ep_size: EP, number of ranks; need not divide E.
        shared_intermediate_size: I of the shared expert, a multiple of 64, or None for no such.

    Raises ShapeError or DtypeError.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    ep_size: int = 1
    shared_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "num_tokens": ("num_tokens (T)", 0),
            "num_experts": ("num_experts (E)", 1),
            "ep_size": ("ep_size (EP)", 1),
            "topk": ("topk (K)", 1),
        }
        _set_ints(self, counts)
        if self.topk > MAX_TOPK:
            raise ShapeError(
                f"topk (K) must be at most {MAX_TOPK}",
                self.topk,
                "Split the token's experts over two layers, or lower K",
            )
        dims = {
            "hidden_size": ("hidden_size (H)", 1),
            "intermediate_size": ("intermediate_size (I)", 1),
        }
        if self.shared_intermediate_size is not None:
            dims["shared_intermediate_size"] = ("shared_intermediate_size", 1)
        _set_ints(self, dims)
        for field, (name, _) in dims.items():
            value = getattr(self, field)
            if value % DIM_MULTIPLE:
                raise ShapeError(
                    f"{name} must be a multiple of {DIM_MULTIPLE}",
                    value,
                    f"Pad it with zeros to {-(-value // DIM_MULTIPLE) * DIM_MULTIPLE}",
                )

    @classmethod
    def of_model(cls, model: ModelShape, num_tokens: int, ep_size: int = 1) -> Shape:
        """The shape of one layer of a public model."""
        return cls(
            num_tokens,
            model.hidden_size,
            model.intermediate_size,
            model.num_experts,
            model.topk,
            ep_size,
            model.shared_intermediate_size,
        )

    def experts_on(self, rank: int) -> range:
        """Global ids of the experts that live on ``rank``.

        Experts are placed contiguously; the first E mod EP ranks hold one more.
        """
        if not 0 <= rank < self.ep_size:
            raise ShapeError(f"rank must be in 0…{self.ep_size - 1}", rank)
        base, extra = divmod(self.num_experts, self.ep_size)
        start = rank * base + min(rank, extra)
        return range(start, start + base + (rank < extra))

    @property
    def max_local_experts(self) -> int:
        """The largest number of experts on any rank."""
        return -(-self.num_experts // self.ep_size)


def two_wave_minibatch(shape: Shape | ModelShape, num_sms: int, tile: int = 256) -> tuple[int, int]:
    """The two-wave rule: least minibatch that gives gate+up and down two full waves each.

    With output tiles of 128×256 on C SMs, a minibatch of MB rows has (MB/128)·(2I/256) tiles in
    gate+up and (MB/128)·(H/256) in down. Both are at least 2C when
    MB ≥ 2·C·128·256 / min(2I, H). Source: the MoK authors' post of August 2026.

    Args:
        num_sms: C, all SMs of the GPU.
        tile: rows of a segment tile (128 on SM90, 256 on SM100 and SM103).

    Returns:
        (least number of rows, the same rounded up to a multiple of ``tile``).
    """
    exact = math.ceil(2 * _rows_of_a_wave(shape, num_sms))
    return exact, -(-exact // tile) * tile


def one_wave_minibatch(shape: Shape | ModelShape, num_sms: int, tile: int = 256) -> int:
    """A minibatch of one wave, for rings whose next minibatch fills what the last tiles of one leave idle.

    Rounded down to a multiple of ``tile``: the SMs that compute are fewer than ``num_sms``.
    """
    return max(1, int(_rows_of_a_wave(shape, num_sms)) // tile) * tile


def _rows_of_a_wave(shape: Shape | ModelShape, num_sms: int) -> float:
    _require_int("num_sms", num_sms, 1)
    narrow = min(2 * shape.intermediate_size, shape.hidden_size)
    return num_sms * CTA_TILE_M * GEMM_TILE_N / narrow


@dataclass(frozen=True)
class Config:
    """The tunables. None of them changes a bit of any result.

    Attributes:
        fwd_num_comm_sms, bwd_num_comm_sms: SMs that communicate; used at EP > 1 or with MXFP8.
        minibatch_size: rows that communication hands to compute at once; multiple of the tile
            (128 rows on SM90, 256 on SM100 and SM103).
        macrobatch_size: rows of the ring, a multiple of ``minibatch_size``.
        schedule_capacity_multiplier: share of all tokens expected on one rank at most. It sizes
            the launch only; more rows than that are still computed.
        timeout_s: seconds after which a wait inside a kernel or a barrier gives up and reports.
        reserved_sms: SMs that a persistent grid leaves to other kernels.
        debug: check expert ids on the host (costs a synchronisation).
        launch_control: on Blackwell, take work by Cluster Launch Control, which lets kernels of a
            higher priority in; False: a persistent grid, as on Hopper (docs/blackwell.md).
        mxfp8_wire: with MXFP8, x travels quantised: half the bytes over the link, one small kernel to make
            them. A workspace keeps what it was made with.
        trace: kernels record begin and end of every task; ``Workspace.recorder`` reads them.
        pairs: on Hopper, two CTAs work together on tiles of 256 rows and load their common operand once,
            or each works alone on 128; None: together in forward, in backward where tasks are long.
            Blackwell always works in pairs.
        push: on Hopper, forward's tasks send their results to the tokens' ranks themselves, or communication
            SMs combine them; None: tasks do. For rows that pass the ring; Blackwell always combines.

    Raises ShapeError or DtypeError.
    """

    fwd_num_comm_sms: int
    bwd_num_comm_sms: int
    minibatch_size: int
    macrobatch_size: int
    schedule_capacity_multiplier: float = 0.5
    timeout_s: float = 300.0
    reserved_sms: int = 0
    debug: bool = False
    launch_control: bool = True
    trace: bool = False
    mxfp8_wire: bool = False
    pairs: bool | None = None
    push: bool | None = None

    def __post_init__(self) -> None:
        sizes = ("fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch_size", "macrobatch_size")
        _set_ints(self, {name: (name, 1) for name in sizes} | {"reserved_sms": ("reserved_sms", 0)})
        self._require_minibatch_multiple(min(TILE_ROWS.values()))
        if self.macrobatch_size % self.minibatch_size:
            raise ShapeError(
                f"macrobatch_size must be a multiple of minibatch_size ({self.minibatch_size})",
                self.macrobatch_size,
            )
        for name in ("pairs", "push"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise DtypeError(f"{name} must be True, False or None", repr(value))
        for name in ("schedule_capacity_multiplier", "timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise DtypeError(f"{name} must be a number", f"{value!r}")
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not (math.isfinite(number) and number > 0):
                raise ShapeError(f"{name} must be positive and finite", value)
            object.__setattr__(self, name, number)
        if not 1e-3 <= self.timeout_s <= 1e9:
            raise ShapeError("timeout_s must be 0.001 to 1e9 seconds", self.timeout_s)
        if self.schedule_capacity_multiplier > 1000:
            raise ShapeError(
                "schedule_capacity_multiplier must be at most 1000",
                self.schedule_capacity_multiplier,
            )
        for name in ("debug", "launch_control", "trace", "mxfp8_wire"):
            if not isinstance(getattr(self, name), bool):
                raise DtypeError(f"{name} must be True or False", repr(getattr(self, name)))

    def _require_minibatch_multiple(self, tile: int) -> None:
        if self.minibatch_size % tile:
            raise ShapeError(
                f"minibatch_size must be a multiple of {tile}",
                self.minibatch_size,
                f"Use {-(-self.minibatch_size // tile) * tile}",
            )

    def check(self, arch: str, num_sms: int, num_comm_sms: int) -> None:
        """Check what depends on the GPU.

        Args:
            num_comm_sms: the communicating SMs of this launch (0 where none communicates).

        Raises:
            ShapeError: the minibatch is not a multiple of the architecture's tile.
            ResourceError: communicating and reserved SMs leave less than one compute cluster.
        """
        self._require_minibatch_multiple(tile_rows(arch))
        cluster = CLUSTER_CTAS[arch]
        usable = num_sms - self.reserved_sms
        if num_comm_sms % cluster:
            raise ShapeError(f"comm SMs must be a multiple of {cluster} on {arch}", num_comm_sms)
        if num_comm_sms + cluster > usable:
            raise ResourceError(
                "comm SMs and one compute cluster must fit the usable SMs",
                f"{num_comm_sms} comm + {cluster} > {usable} "
                f"({num_sms} SMs, {self.reserved_sms} reserved)",
                "Lower num_comm_sms or reserved_sms",
            )

    def compact(self, shape: Shape, precision: str = "bf16") -> Config:
        """These tunables with less kept for backward, where rows are gathered in place (EP 1, BF16).

        Gate and up of one ring of rows are kept there. A ring that holds every routing holds each expert's
        padding, too; this one has fewer rows than the call has routes, and backward rebuilds the last rows.
        That takes scratch, once for all layers, and a little time. Unchanged elsewhere, and for few routes.
        """
        tile = max(TILE_ROWS.values())
        routes = shape.num_tokens * shape.topk
        in_place = shape.ep_size == 1 and precision == "bf16"
        if not in_place or routes < 2 * tile or self.macrobatch_size < routes:
            return self
        rows = routes - tile
        count = min(-(-rows // self.minibatch_size), rows // tile)
        minibatch = rows // count // tile * tile
        return replace(self, minibatch_size=minibatch, macrobatch_size=count * minibatch)

    @classmethod
    def suggest(
        cls, shape: Shape, device: Any, precision: str = "bf16", push: bool | None = None
    ) -> Config:
        """What ``mok tune`` found for this shape on this GPU, else a reasonable start.

        Where rows are gathered in place (EP = 1 in BF16), a minibatch of all rows up to 65536. Elsewhere
        minibatches of one wave, since the next one's first wave fills what a minibatch's last leaves idle
        (two waves in MXFP8, which does not do so), a ring of all rows or at most 64 waves, and the comm SMs
        that the simulator finds best on this kind of GPU (a few seconds, once a shape).

        Args:
            device: a machine name ("h200"), a CUDA ``torch.device``, or any object with ``arch``
                and ``num_sms``. Only a real GPU has tuned results, and those of BF16 only.
            precision: of the routed experts. In MXFP8 rows pass the ring at EP = 1, too, and quantising
                takes comm SMs' time.
            push: whether the kernels' tasks send their results themselves, and so need fewer comm SMs. None: as
                they do by default, forward's on Hopper. Given, nothing tuned is used.

        Raises:
            DeviceError: the device is no GPU, or an unsupported one.
        """
        if not isinstance(shape, Shape):
            raise DtypeError("shape must be a mok.Shape", f"a {type(shape).__name__}")
        if precision not in ("bf16", "mxfp8"):
            raise DtypeError("precision must be 'bf16' or 'mxfp8'", repr(precision))
        arch, num_sms = _arch_and_sms(device)
        tile = tile_rows(arch)
        _, two_waves = two_wave_minibatch(shape, num_sms, tile)
        minibatch = one_wave_minibatch(shape, num_sms, tile) if precision == "bf16" else two_waves
        # Balanced routing: each expert gets as many routes, and each segment has a tail. A ring that is
        # slightly too small for the rank with one expert more costs a third of the call (docs/scaling.md).
        routes = shape.num_tokens * shape.topk * shape.ep_size
        share = -(-routes * shape.max_local_experts // shape.num_experts)
        rows = share + shape.max_local_experts * tile
        in_place = shape.ep_size == 1 and precision == "bf16"
        if in_place:
            # Nothing to overlap: the fewer minibatches cut an expert, the less often its weights are
            # read (docs/measurements/h200.md: 609 → 637 TFLOP/s on Mixtral).
            count = max(1, -(-rows // _MAX_DIRECT_MINIBATCH))
            minibatch = max(1, -(-rows // (count * tile))) * tile
        most = _RING_TWO_WAVES * max(minibatch, two_waves)
        ring = min(most // minibatch, max(1, -(-rows // minibatch)))
        # A quarter more than balanced routing brings, with half a tile of padding per expert in use.
        routes = max(1, shape.num_tokens * shape.topk)
        padding = min(shape.max_local_experts, routes) * tile / 2
        suggested = cls(
            fwd_num_comm_sms=_even(_FWD_COMM_FRACTION * num_sms),
            bwd_num_comm_sms=_even(_BWD_COMM_FRACTION * num_sms),
            minibatch_size=minibatch,
            macrobatch_size=ring * minibatch,
            schedule_capacity_multiplier=1.25 * (routes + padding) / (shape.ep_size * routes),
            push=False if push is False else None,
        )
        if not in_place:
            from mok.tools.simulator.suggest import with_comm_sms

            suggested = with_comm_sms(suggested, shape, arch, num_sms, precision, push)
        if precision != "bf16" or push is not None or (name := _gpu_name(device)) is None:
            return suggested
        from mok import tune

        return tune.apply(suggested, shape, tune.Device(name, num_sms, arch))


def _even(value: float) -> int:
    return max(2, 2 * round(value / 2))


def _gpu_name(device: Any) -> str | None:
    """Name of a real GPU; None for a machine that is only named or emulated."""
    if hasattr(device, "arch") and hasattr(device, "num_sms"):
        return str(device.name) if hasattr(device, "ordinal") else None
    if isinstance(device, str) and not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_properties(torch.device(device)).name)


def _arch_and_sms(device: Any) -> tuple[str, int]:
    if isinstance(device, str) and not device.startswith(("cuda", "cpu")):
        device = get_machine(device)
    if hasattr(device, "arch") and hasattr(device, "num_sms"):
        return device.arch, device.num_sms
    import torch

    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):  # also an ordinal where no GPU is
        device = repr(device)
    if not isinstance(device, torch.device) or device.type != "cuda":
        raise DeviceError(
            "Config.suggest needs a GPU", device, "Pass a machine name instead, such as 'h200'"
        )
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}a"
    tile_rows(arch)
    return arch, properties.multi_processor_count
