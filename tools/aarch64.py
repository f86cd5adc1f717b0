"""Whether every dependency has a wheel for Linux on aarch64 (Grace): asks pip, on any machine.

    python -m mok.tools.aarch64 docs/measurements/aarch64.json

pip resolves nothing for another machine's markers, so this walks the dependencies itself: each round asks
pip, which only reads metadata, for the packages that the round before named. Version conflicts between
packages are not looked for; the versions are those that pip would take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
GLIBCS = range(17, 40)  # of manylinux tags: 2.39 and older
EXTRAS = ("test", "hf", "bench")
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "aarch64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_version": "",
    "implementation_version": f"{PYTHON}.0",
}

Found = dict[str, Any]
"""A package: "name", "version", "wheel" (file name), "requires" (its own requirements), "direct"."""


class NoWheelError(Exception):
    """pip finds no wheel; what it said."""


def ask_pip(requirements: Sequence[str]) -> list[Found]:
    """What pip would install for aarch64 for each requirement, dependencies left out.

    Raises:
        NoWheelError: nothing fits one of them, or there is no index to ask.
    """
    tags = ["manylinux2014", *(f"manylinux_2_{glibc}" for glibc in GLIBCS)]
    platforms = [f"--platform={tag}_aarch64" for tag in tags]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--no-deps", "--target", folder, "--only-binary=:all:", "--implementation=cp",
            f"--python-version={PYTHON}", *platforms, "--report", str(report), *requirements,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
            raise NoWheelError("\n".join(errors) or done.stderr[-500:])
        installed = json.loads(report.read_text())["install"]
    return [
        {
            "name": canonicalize_name(entry["metadata"]["name"]),
            "version": entry["metadata"]["version"],
            "wheel": entry["download_info"]["url"].rpartition("/")[2],
            "requires": entry["metadata"].get("requires_dist", []),
        }
        for entry in installed
    ]


def direct(root: Path = ROOT) -> list[Requirement]:
    """The project's own requirements on aarch64, those of ``EXTRAS`` included."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in optional[extra])]
    return [r for r in map(Requirement, lines) if applies(r)]


def applies(requirement: Requirement, extras: Iterable[str] = ("",)) -> bool:
    """Whether a requirement's marker holds on aarch64, for one of ``extras``."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate(ENVIRONMENT | {"extra": e}) for e in extras)


def walk(
    first: Sequence[Requirement], ask: Callable[[Sequence[str]], list[Found]] = ask_pip
) -> list[Found]:
    """Every package that ``first`` need on aarch64, by name.

    Raises:
        NoWheelError: one has no wheel.
    """
    extras: dict[str, set[str]] = {}
    known: dict[str, Found] = {}
    wanted: dict[str, list[Requirement]] = {}

    def want(requirement: Requirement) -> None:
        name = canonicalize_name(requirement.name)
        new = set(requirement.extras) - extras.setdefault(name, set())
        extras[name] |= new
        if name not in known:
            wanted.setdefault(name, []).append(requirement)
        elif new:
            follow(known[name], new)

    def follow(package: Found, of: Iterable[str]) -> None:
        for text in package["requires"]:
            requirement = Requirement(text)
            if applies(requirement, ("", *of)):
                want(requirement)

    for requirement in first:
        want(requirement)
    while wanted:
        # All that is asked of a package at once: pip refuses a name that it is given twice.
        lines = [
            f"{name}{','.join(str(r.specifier) for r in rs if str(r.specifier))}"
            for name, rs in wanted.items()
        ]
        wanted = {}
        answer = ask(lines)
        for package in answer:
            known[package["name"]] = package
        for package in answer:
            follow(package, extras.get(package["name"], ()))
    names = {canonicalize_name(r.name) for r in first}
    return [{**known[n], "direct": n in names} for n in sorted(known)]


def fits(wheel: str) -> bool:
    """Whether a wheel's tags fit Linux on aarch64."""
    platforms = wheel.removesuffix(".whl").rpartition("-")[2].split(".")
    return any(p == "any" or (p.endswith("_aarch64") and "linux" in p) for p in platforms)


def main() -> int:
    """Write what was found to the file named."""
    from mok.tools.bench.versions import today

    packages = walk(direct())
    document = {
        "date": today(),
        "python": PYTHON,
        "packages": [
            {k: p[k] for k in ("name", "version", "wheel", "direct")} for p in packages
        ],
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    wrong = [p["wheel"] for p in packages if not fits(p["wheel"])]
    print(f"{len(packages)} packages, {len(wrong)} without a wheel for aarch64 {wrong or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
