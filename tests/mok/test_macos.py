"""What works on macOS, as far as Linux can show it: reference, plan and wave, without the Linux packages."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix"}
MAC |= {"platform_machine": "arm64"}
# Import names of what has no build for macOS, or needs an NVIDIA GPU.
LINUX_ONLY = ("cutlass", "cuda", "numba", "triton", "pynvml", "quack", "nvidia")


def wanted(environment: dict[str, str], extra: str = "") -> set[str]:
    """Names of the packages that pip would install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    found = map(Requirement, listed)
    return {r.name for r in found if r.marker is None or r.marker.evaluate(environment)}


def test_pip_asks_for_nothing_that_macos_has_not():
    assert wanted(MAC) == {"torch", "numpy", "rich"}
    assert {"nvidia-cutlass-dsl", "cuda-python", "numba"} <= wanted(
        {**MAC, "sys_platform": "linux"}
    )
    for name in wanted(MAC, "test"):
        assert not name.startswith(("nvidia", "cuda", "quack", "numba", "triton")), name


PROGRAM = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LINUX_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import torch  # looks at the platform to find its own libraries, so before that changes
sys.platform = "darwin"
"""

REFERENCE = """
import mok
from mok.config import Shape
from mok.reference import (
    backward_loop, backward_reference, forward_loop, forward_reference, integer_case,
    integer_gradient, random_case, relative_l2,
)
case = random_case(Shape(64, 64, 64, 8, 2, 1, 64))
assert relative_l2(forward_reference(case, ep_size=4), forward_loop(case)) < 3.5e-3
case = integer_case(Shape(60, 64, 64, 6, 2, 1, 64))
dy = integer_gradient(case)
found, want = backward_reference(case, dy, 2).named(), backward_loop(case, dy).named()
assert all(torch.equal(found[n], want[n].to(found[n].dtype)) for n in want if "shared" not in n)
"""


def on_a_mac(program: str, *arguments: str) -> str:
    """What the program prints."""
    command = [sys.executable, "-c", PROGRAM + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_reference_works():
    on_a_mac(REFERENCE)


CLI = "from mok import cli\nsys.exit(cli.main(sys.argv[1:]))"


def test_wave_works():
    """As the README gives it, and with the answer that Linux gets."""
    command = "wave --model kimi-k2.5 --machine b200"
    assert f"mok {command}" in (ROOT / "README.md").read_text()
    here = [sys.executable, "-m", "mok", *command.split(), "--json"]
    done = subprocess.run(here, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True)
    assert json.loads(on_a_mac(CLI, *command.split(), "--json")) == json.loads(done.stdout)


def test_plan_works():
    command = "plan --model qwen3-30b-a3b --machine h200 --ep 8"
    assert f"mok {command}" in (ROOT / "README.md").read_text()
    found = json.loads(on_a_mac(CLI, *command.split(), "--json"))
    assert found["rows"] and all(row["ms"] > 0 for row in found["rows"])


def test_the_demo_says_what_it_runs_on():
    assert "reference" in on_a_mac(CLI, "demo")


def test_what_is_refused_is_refused():
    on_a_mac(
        """
for name in ("cutlass", "cuda.bindings.driver", "numba", "triton.language"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(name)
"""
    )
