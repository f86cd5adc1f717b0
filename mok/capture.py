"""A step of the layer stored in files, and run again bit for bit on one rank.

The layer's results do not depend on the number of ranks, on tunables or on timing, so a step that went
wrong on 64 GPUs can be looked at on one, or in the emulator. ``watch`` stores the step in which a NaN came
out or a wait expired, ``save`` any step, ``replay`` runs one.

A file holds one process' part, as tensors and plain values (``torch.load(weights_only=True)`` reads it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok import functional
from mok.config import Config
from mok.errors import GroupError, MokError, MokTimeoutError, ShapeError
from mok.mxfp8 import Mxfp8Weight, mxfp8_quantize

FORMAT = 1
SUFFIX = ".mok"
ROUTED = ("routed_gate", "routed_up", "routed_down")
SHARED = ("shared_gate", "shared_up", "shared_down")
RESULTS = ("output", "d_x", "d_router_weights", *(f"d_{name}" for name in ROUTED))
"""What has the same bits at every number of ranks. Gradients of the shared expert are sums over a rank's own
tokens: they are compared only on as many ranks."""
SHARED_RESULTS = tuple(f"d_{name}" for name in SHARED)


def digest(tensor: Tensor) -> str:
    """A hash of dtype, shape and bits."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass
class Step:
    """One call on this process' ranks: lists have one entry per local rank.

    Attributes:
        values: "x", "top_experts", "router_weights", the routed weights and, if they were there,
            "grad_output" and "shared_scale". Of quantised weights each part, as "routed_up.normal.data".
        shared: the shared expert's weights.
        results: of ``RESULTS`` and ``SHARED_RESULTS``, what the call returned.
        why: what made the step worth keeping.
    """

    config: Config
    ep_size: int
    local_ranks: tuple[int, ...]
    num_experts: int
    swiglu_limit: float | None
    values: dict[str, list[Tensor]]
    shared: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=dict)
    why: str = "asked for"
    arch: str = ""
    precision: str = "bf16"

    @property
    def has_nan(self) -> bool:
        """Whether a result holds a NaN. Waits for the GPU."""
        parts = [t for tensors in self.results.values() for t in tensors if t is not None]
        return any(bool(t.isnan().any()) for t in parts)


def step_of(
    config: Config, workspace: Any, schedule: Any, given: dict[str, Any], limit: float | None
) -> Step:
    """The step of a call, whose tensors it refers to: ``given`` holds them by name."""

    values: dict[str, list[Tensor]] = {}
    for name, value in given.items():
        if value is None or name in SHARED:
            continue
        ranks: list[Any] = [value] if isinstance(value, (Tensor, Mxfp8Weight)) else list(value)
        if not isinstance(ranks[0], Mxfp8Weight):
            values[name] = ranks
            continue
        parts = [weight.parts() for weight in ranks]
        values |= {f"{name}.{part}": [p[part] for p in parts] for part in parts[0]}
    values["top_experts"] = list(schedule.top_experts)
    return Step(
        config,
        workspace.shape.ep_size,
        tuple(workspace.group.local_ranks),
        workspace.shape.num_experts,
        limit,
        values,
        [given[n] for n in SHARED if given.get(n) is not None],
        arch=workspace.arch,
        precision=workspace.precision,
    )


def versions() -> dict[str, str]:
    """Of what decides bits, as far as it is known here."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("mok-cutedsl", "nvidia-cutlass-dsl", "cuda-bindings"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


# ---------------------------------------------------------------------- files


def save(step: Step, path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Write this process' part (waits for the GPU).

    Args:
        path: a file; of several processes, each names its own.
        weights: with False, of the experts only hashes are kept.

    Returns:
        The file, readable by its owner alone.
    """
    path = Path(path)
    kept = {n: [t.detach().cpu() for t in v] for n, v in step.values.items()}
    shared = [t.detach().cpu() for t in step.shared]
    hashes = {n: [digest(t) for t in v] for n, v in (kept | {"shared": shared}).items()}
    for name, tensors in step.results.items():
        hashes[name] = [digest(t) for t in tensors]
    if not weights:
        kept = {n: v for n, v in kept.items() if n.split(".")[0] not in ROUTED}
        shared = []
    document = {
        "format": FORMAT,
        "why": step.why,
        "arch": step.arch,
        "precision": step.precision,
        "config": dataclasses.asdict(step.config),
        "ep_size": step.ep_size,
        "local_ranks": list(step.local_ranks),
        "num_experts": step.num_experts,
        "swiglu_limit": step.swiglu_limit,
        "grad_dtype": _dtype_name(step.results.get("d_routed_gate")),
        "versions": versions(),
        "values": kept,
        "shared": shared,
        "hashes": hashes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        torch.save(document, file)
    partial.replace(path)
    return path


def load(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The documents of all ranks of a step, in rank order. A folder stands for its files.

    Raises:
        ShapeError: no such file, a file of something else, or not all ranks of one step.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    documents = []
    for name in files:
        try:
            document = torch.load(name, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises what pickle, zipfile and the system do
            raise ShapeError(
                "a capture must be readable",
                f"{name}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
                "Only files that mok.capture wrote are read",
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ShapeError(f"a capture must be of format {FORMAT}", str(name))
        _check_document(document, name)
        documents.append(document)
    documents.sort(key=lambda d: d["local_ranks"])
    found = [r for d in documents for r in d["local_ranks"]]
    size = documents[0]["ep_size"] if documents else 0
    if not documents or found != list(range(size)):
        raise ShapeError(
            "the files must be those of all ranks of one step",
            f"ranks {found} of {size}",
            "Name every rank's file, or the folder that holds them and nothing else",
        )
    for document in documents[1:]:
        _check_same_step(documents[0], document)
    return documents


def _check_same_step(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises ShapeError if two ranks' files cannot be of one step."""
    differ = [n for n in ("ep_size", "num_experts", "config") if first[n] != other[n]]
    differ += [n for n, d in _LATER.items() if first.get(n, d) != other.get(n, d)]
    # Results are not compared: where a wait expired, some ranks have none.
    results = {*RESULTS, *SHARED_RESULTS}
    for part in ("values", "hashes"):
        names = (first[part].keys() ^ other[part].keys()) - results
        if names:
            differ.append(f"the names of {part} ({', '.join(sorted(names))})")
    if len(first["shared"]) != len(other["shared"]):
        differ.append("shared")
    if differ:
        raise ShapeError(
            "the files of all ranks must be of one step",
            f"ranks {first['local_ranks']} and {other['local_ranks']} differ in {', '.join(differ)}",
            "Name every rank's file of one step, all with or all without weights",
        )


_KINDS: dict[str, type] = {
    "why": str,
    "config": dict,
    "ep_size": int,
    "local_ranks": list,
    "num_experts": int,
    "versions": dict,
    "values": dict,
    "shared": list,
    "hashes": dict,
}
_LATER = {"precision": "bf16", "swiglu_limit": None}  # older files may lack them
_ALWAYS = ("x", "router_weights", "top_experts")


def _check_document(document: dict[str, Any], name: Path) -> None:
    """Raises ShapeError if a file does not hold what ``save`` writes."""

    def tensors(value: Any, count: int | None = None) -> bool:
        whole = isinstance(value, list) and all(isinstance(t, Tensor) for t in value)
        return whole and count in (None, len(value))

    wrong = [key for key, kind in _KINDS.items() if not isinstance(document.get(key), kind)]
    if not wrong:
        values, ranks = document["values"], document["local_ranks"]
        wrong = [n for part in ("values", "hashes") for n in document[part] if type(n) is not str]
    if not wrong:
        wrong = [n for n in (*_ALWAYS, *values) if not tensors(values.get(n), len(ranks))]
        kept = {n.split(".")[0] for n in values} & set(ROUTED)
        if kept:
            wrong += [n for n in ROUTED if n not in kept]
        if not ranks or not all(isinstance(r, int) for r in ranks):
            wrong.append("local_ranks")
        if not tensors(document["shared"]) or len(document["shared"]) not in (0, len(SHARED)):
            wrong.append("shared")
        if not isinstance(document.get("swiglu_limit", 0), float | int | None):
            wrong.append("swiglu_limit")
        precision = document.get("precision", "bf16")
        if precision not in ("bf16", "mxfp8") or (
            precision == "bf16" and any(n.split(".")[0] in ROUTED and "." in n for n in values)
        ):
            wrong.append("precision")
    if wrong:
        raise ShapeError(
            "a capture must be as mok.capture wrote it",
            f"{name}: {', '.join(dict.fromkeys(map(str, wrong)))}",
            "Capture the step again",
        )
    stored = document["values"] | {"shared": document["shared"]}
    hashes = document["hashes"]
    changed = [n for n, v in stored.items() if v and [digest(t) for t in v] != hashes.get(n)]
    if changed:
        raise ShapeError(
            "a capture's tensors must have the hashes that were stored with them",
            f"{name}: {', '.join(changed)}",
            "The file was damaged: copy it again",
        )


def _config_of(document: dict[str, Any]) -> Config:
    try:
        return Config(**document["config"])
    except TypeError as error:
        if isinstance(error, MokError):
            raise
        raise ShapeError(
            "the tunables of a capture must be those of this version",
            str(error),
            f"Pass config, or replay it with the version that wrote it: {document['versions']}",
        ) from error


# ---------------------------------------------------------------------- watching


class _Observer:
    """What ``mok.functional`` tells of its calls while ``watch`` is active."""

    def __init__(self, folder: Path, weights: bool, on_nan: bool) -> None:
        self.folder, self.weights, self.on_nan = folder, weights, on_nan
        self.last: Step | None = None
        self.written: list[Path] = []
        self._schedule = 0

    def begin(
        self, config: Config, workspace: Any, schedule: Any, given: dict[str, Any], limit: Any
    ) -> None:
        before, self.last = self.last, step_of(config, workspace, schedule, given, limit)
        # Backward belongs to the forward call with its schedule.
        place = schedule.ranks[0].num_rows.data_ptr()
        if before is not None and "grad_output" in given and place == self._schedule:
            self.last.results = before.results
            # Backward may have been given down weights in one orientation only.
            self.last.values = before.values | self.last.values
        self._schedule = place

    def end(self, results: dict[str, Any]) -> None:
        assert self.last is not None
        for name, value in results.items():
            tensors = [value] if isinstance(value, Tensor) else value
            if tensors is not None and all(t is not None for t in tensors):
                self.last.results[name] = list(tensors)
        if self.on_nan and self.last.has_nan:
            self.write("NaN in a result")

    def write(self, why: str) -> None:
        """Keep the last step."""
        if self.last is None:
            return
        self.last.why = why
        ranks = "-".join(map(str, self.last.local_ranks))
        name = f"step{len(self.written)}-rank{ranks}{SUFFIX}"
        self.written.append(save(self.last, self.folder / name, weights=self.weights))
        self.last = None


@contextlib.contextmanager
def watch(
    folder: str | os.PathLike[str], *, weights: bool = True, on_nan: bool = True
) -> Iterator[_Observer]:
    """Store the step in which a result is NaN, or a wait expires, in ``folder``.

    Every call waits for the GPU (with ``on_nan``): for debugging. ``written`` of what it yields lists the
    files; ``write(why)`` stores the last step on request. Files of several processes go to one folder.
    """
    observer = _Observer(Path(folder), weights, on_nan)
    before, functional.observer = functional.observer, observer
    try:
        yield observer
    except (MokTimeoutError, GroupError) as error:
        observer.write(str(error))
        raise
    finally:
        functional.observer = before


# ---------------------------------------------------------------------- replaying


def replay(
    paths: Iterable[str | os.PathLike[str]],
    device: torch.device | str = "cuda",
    *,
    config: Config | None = None,
    weights: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Run a captured step on one rank and compare every result's bits.

    Args:
        device: "cpu" within an emulator.
        config: other tunables; they change no bit.
        weights: the experts' weights of all ranks by name, where the capture has only their hashes.

    Returns:
        {"ep_size", "why", "versions", "hashes": {name: [per rank]}, "differ": [names], "ok"}. A step that
        never ended has no results to differ from.
    """
    documents = load(paths)
    first = documents[0]
    device = torch.device(device)
    whole, shared = _together(documents, weights, device)
    config = config or _config_of(first)
    lengths = [len(t) for d in documents for t in d["values"]["top_experts"]]
    there = {name: t.to(device) for name, t in whole.items()}
    experts: list[Any] = [t.to(device) for t in shared] or [None] * 3
    precision = first.get("precision", "bf16")
    routed = [_routed(name, there, precision) for name in ROUTED]
    shape = routed[0].shape
    with functional.create_workspace(
        config,
        device=device,
        max_tokens=sum(lengths),
        hidden_size=shape[2],
        intermediate_size=shape[1],
        num_experts=first["num_experts"],
        topk=whole["top_experts"].shape[1],
        shared_intermediate_size=None if experts[0] is None else experts[0].shape[0],
        precision=precision,
    ) as workspace:
        call: Any = functional
        arguments = (
            there["x"], there["router_weights"], *experts, *routed, first.get("swiglu_limit"),
        )  # fmt: skip
        scale = there.get("shared_scale")
        schedule = functional.build_schedule(workspace, config, there["top_experts"])
        output, context = call.forward(config, workspace, schedule, *arguments, shared_scale=scale)
        found = {"output": output}
        if "grad_output" in there:
            dtype = _grad_dtype(first)
            grads = call.backward(
                config, workspace, schedule, context, there["grad_output"], *arguments,
                shared_scale=scale, grad_dtype=dtype,
            )  # fmt: skip
            found |= dict(zip((*RESULTS[1:], *SHARED_RESULTS), grads, strict=False))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        workspace.check()
    return _compare(documents, found, lengths)


def _dtype_name(tensors: list[Tensor] | None) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _grad_dtype(document: dict[str, Any]) -> torch.dtype:
    return torch.float32 if document.get("grad_dtype") == "float32" else torch.bfloat16


def _routed(name: str, values: dict[str, Tensor], precision: str) -> Any:
    """A routed weight of all ranks."""
    if precision == "bf16":
        return values[name]
    parts = {n.removeprefix(f"{name}."): t for n, t in values.items() if n.startswith(f"{name}.")}
    # As the weight lies: values keep its layout in both orientations, data is transposed in one.
    experts, rows, columns = next(iter(parts.values())).shape
    return Mxfp8Weight.of_parts((experts, rows, columns), parts)


def _parts_of(master: Tensor, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Those parts of a weight that a capture names, quantised again."""
    wanted = list(names)
    expanded = any(name.endswith(".values") for name in wanted)
    made = mxfp8_quantize(master.to(device).bfloat16(), expanded=expanded).parts()
    return {name: made[name].cpu() for name in wanted}


def _together(
    documents: Sequence[dict[str, Any]], weights: dict[str, Tensor] | None, device: torch.device
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """All ranks' tokens and experts, one after the other; the shared expert is the same on all."""
    whole: dict[str, Tensor] = {}
    for name in documents[0]["values"]:
        whole[name] = torch.cat([t for d in documents for t in d["values"][name]])
    shared = documents[0]["shared"]
    if not any(name.split(".")[0] in ROUTED for name in whole):
        if weights is None:
            raise ShapeError(
                "this capture holds hashes of the weights only",
                documents[0]["why"],
                "Pass the weights of that step, or capture with weights=True",
            )
        shared = [weights[name].cpu() for name in SHARED if name in weights]
        for name in ROUTED:
            parts = [
                n.partition(".")[2] for n in documents[0]["hashes"] if n.startswith(f"{name}.")
            ]
            found = {name: weights[name].cpu()}
            if parts:
                made = _parts_of(weights[name], parts, device)
                found = {f"{name}.{part}": tensor for part, tensor in made.items()}
            for part, tensor in found.items():
                want = [h for d in documents for h in d["hashes"][part]]
                sizes = [len(t) for t in _split_experts(tensor, documents)]
                if [digest(t) for t in tensor.split(sizes)] != want:
                    raise ShapeError("the weights must be those of the captured step", name)
            whole |= found
    return whole, shared


def _split_experts(tensor: Tensor, documents: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The experts of each rank."""
    size, count = documents[0]["ep_size"], documents[0]["num_experts"]
    base, extra = divmod(count, size)
    return list(tensor.split([base + (rank < extra) for rank in range(size)]))


def _compare(
    documents: Sequence[dict[str, Any]], found: dict[str, Any], lengths: list[int]
) -> dict[str, Any]:
    hashes: dict[str, list[str]] = {}
    differ = []
    alone = len(lengths) == 1
    for name in (*RESULTS, *(SHARED_RESULTS if alone else ())):
        want = [h for d in documents for h in d["hashes"].get(name, [])]
        tensor = found.get(name)
        if tensor is None:
            continue
        by_expert = name in {f"d_{n}" for n in ROUTED}
        parts = [tensor] if name in SHARED_RESULTS else (
            _split_experts(tensor, documents) if by_expert else list(tensor.split(lengths))
        )  # fmt: skip
        hashes[name] = [digest(part) for part in parts]
        if want and hashes[name] != want:
            differ.append(name)
    first = documents[0]
    return {
        "ep_size": first["ep_size"],
        "why": first["why"],
        "versions": first["versions"],
        "hashes": hashes,
        "differ": differ,
        "ok": not differ,
    }
