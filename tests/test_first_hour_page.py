"""docs/blackwell-first-hour.md says what is: commands, rungs, peers, figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mok import cli
from mok.tools.bench.published import figures
from mok.tools.bench.published.programs import PEERS, TITLES
from mok.tools.bringup.rungs import RUNGS
from tests.test_docs import shell

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/blackwell-first-hour.md").read_text()
LINES = [
    line.split("  #")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.strip()
]
OURS = [line for line in LINES if re.search(r"(\bmok|-m mok) (bringup|bench)", line)]
HERE = [line for line in LINES if line.startswith("mok bringup --")]  # these need no GPU


def test_the_page_has_commands():
    assert len(OURS) >= 9 and len(HERE) == 2


@pytest.mark.parametrize("line", OURS)
def test_every_command_is_one_that_we_have(line):
    arguments = re.search(r"(?:\bmok|-m mok) ((?:bringup|bench).*)", line).group(1)
    parsed = cli.build_parser().parse_args(shlex.split(arguments))
    assert parsed.command in ("bringup", "bench")


@pytest.mark.emulator
@pytest.mark.parametrize("line", HERE)
def test_what_needs_no_gpu_runs(line, tmp_path):
    pytest.importorskip("cutlass")
    import sys

    where = f" --out {tmp_path}"
    done = shell(f"{sys.executable} -m {line}{where}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copy" in done.stdout


def test_the_first_command_installs_what_is_offered():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert LINES[0].endswith("pip install -e '.[bench]' && mok bringup")
    assert "bench" in project["optional-dependencies"]


def test_every_rung_is_explained():
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    ladder = [rung.name for rung in RUNGS if rung.name != "wgmma"]  # Hopper's, in the text
    assert named == ladder and "`wgmma`" in PAGE


def test_every_peer_is_explained():
    table = PAGE[PAGE.index("| peer |") :].split("\n\n")[0]
    titles = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert titles == [TITLES[name] for name in (*PEERS, "upstream")]


def test_figures_are_the_suites():
    for value in figures.PUBLISHED.values():
        assert f"{value}×" in PAGE
    assert f"{figures.WARMUP} iterations of warm-up and {figures.ITERATIONS} timed" in PAGE
    assert f"{figures.TOKENS} tokens a rank" in PAGE and f"EP {figures.EP}" in PAGE


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    assert "docs/blackwell-first-hour.md" in (ROOT / "README.md").read_text()
