"""docs/scaling.md: every table is what its command makes."""

import json
from pathlib import Path

import pytest

from mok.errors import MokError
from mok.tools.simulator import scaling
from mok.tools.simulator.benched import LIMITS
from mok.tools.simulator.scaling_tables import fill, markdown, tables

DOCS = Path(__file__).parents[3] / "docs"
FOUND = json.loads((DOCS / "scaling" / "scaling.json").read_text())


def test_the_pages_tables_are_those_of_the_data():
    text = (DOCS / "scaling.md").read_text()
    made = tables(FOUND)
    assert set(made) == {"cases", "skew", "gains", "racks", "sweeps", "records", "unfitted"}
    assert fill(text, made) == text
    for name in ("sweeps", "shares", "changes", "tokens"):
        assert f"scaling/{name}.png" in text and (DOCS / "scaling" / f"{name}.png").is_file()


def test_the_data_is_of_todays_model():
    """Two cheap figures anew; the whole is minutes."""
    now = {(r["name"], r["ep"], r["pass"]): r["model_ms"] for r in scaling.unfitted()}
    for row in FOUND["unfitted"]:
        assert now[row["name"], row["ep"], row["pass"]] == pytest.approx(row["model_ms"], rel=0.01)
    sweep = {(r["sweep"], r["point"]): r["model_ms"] for r in scaling.published_sweep()}
    for row in FOUND["sweep"]:
        assert sweep[row["sweep"], row["point"]] == pytest.approx(row["model_ms"], rel=0.01)


def test_ours_is_not_slower_than_upstreams_program():
    for row in FOUND["gains"]:
        steps = {step["program"]: step for step in row["steps"]}
        assert steps["ours"]["gain"] >= 0, row["model"]
    assert {row["model"] for row in FOUND["gains"]} == set(scaling.FOUR)


def test_the_promise_on_unfitted_shapes_is_in_the_page():
    errors = sorted(abs(row["error"]) for row in FOUND["unfitted"])
    assert len(errors) == 48
    assert errors[23] <= LIMITS["median"] and errors[-1] <= LIMITS["worst"]


def test_a_table_needs_its_place():
    with pytest.raises(MokError, match="must have a place"):
        fill("nothing", {"cases": "x"})
    assert fill("<!-- a -->\nold\n<!-- end -->", {"a": "new"}) == "<!-- a -->\nnew\n<!-- end -->"
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
