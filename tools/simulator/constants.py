"""Constants that say where they come from, and the TOML files that hold them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.errors import MokError

HERE = Path(__file__).resolve().parent

KINDS = {
    "measured": "by this project, on the hardware that the file describes",
    "published": "by the vendor or by others",
    "derived": "from measured or published figures, by the arithmetic that the source gives",
    "fitted": "chosen so that the model meets the figures that the source names",
    "assumed": "an estimate that nothing here confirms",
}
"""How a value is known."""


@dataclass(frozen=True)
class Constant:
    """One value and its origin; ``name`` ends in its unit (``_s``, ``_hz``, ``_bytes_per_s`` …)."""

    name: str
    value: float
    kind: str
    source: str

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "kind": self.kind, "source": self.source}


class Table(Mapping[str, float]):
    """Constants by name; reading one that is missing is an error."""

    def __init__(self, origin: str, constants: Mapping[str, Constant]) -> None:
        self.origin = origin
        self.constants = dict(constants)

    def __getitem__(self, name: str) -> float:
        try:
            return self.constants[name].value
        except KeyError:
            known = ", ".join(self.constants) or "none"
            raise MokError(f"{self.origin} must define {name}", f"only {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.constants)

    def __len__(self) -> int:
        return len(self.constants)

    def replace(
        self, kind: str = "assumed", source: str = "changed by the caller", **values: float
    ):
        """A copy with other values; ``name=value``."""
        changed = dict(self.constants)
        for name, value in values.items():
            self[name]  # it must exist
            changed[name] = _constant(
                self.origin, name, {"value": value, "kind": kind, "source": source}
            )
        return Table(self.origin, changed)

    def as_list(self) -> list[dict[str, Any]]:
        return [c.as_dict() for c in self.constants.values()]


def _constant(origin: str, name: str, entry: Any) -> Constant:
    where = f"{name} of {origin}"
    if not isinstance(entry, dict) or set(entry) != {"value", "kind", "source"}:
        raise MokError(f"{where} must have exactly value, kind and source", repr(entry))
    value, kind, source = entry["value"], entry["kind"], entry["source"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MokError(f"{where} must be a number", repr(value))
    if not math.isfinite(value) or value < 0:
        raise MokError(f"{where} must be finite and not negative", value)
    if kind not in KINDS:
        raise MokError(f"the kind of {where} must be one of {', '.join(KINDS)}", repr(kind))
    if not isinstance(source, str) or not source:
        raise MokError(f"{where} must say its source", repr(source))
    return Constant(name, float(value), kind, source)


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file.

    Raises:
        MokError: it is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MokError("the file must be readable", f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MokError("the file must be valid TOML", f"{path}: {error}") from error


def read_table(origin: str, entries: Any) -> Table:
    """Constants from a TOML table of ``name = { value, kind, source }``."""
    if not isinstance(entries, dict):
        raise MokError(f"{origin} must be a table of constants", repr(entries))
    return Table(origin, {name: _constant(origin, name, e) for name, e in entries.items()})


def calibration(name: str) -> Table:
    """The costs of one program on one architecture: ``calibration/NAME.toml``."""
    path = HERE / "calibration" / f"{name}.toml"
    return read_table(f"calibration {name}", read_toml(path).get("constants"))
