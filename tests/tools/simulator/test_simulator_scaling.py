"""docs/scaling.md: every table is what its command makes."""

import json
from pathlib import Path

import pytest

from mok.errors import MokError
from mok.tools.simulator import scaling
from mok.tools.simulator.benched import LIMITS, compare_bench, read
from mok.tools.simulator.compare import records
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
    """Some figures anew; the whole is minutes, and others check every record."""
    document = read(scaling.RECORDED / scaling.UNFITTED)
    document["rows"] = [r for r in document["rows"] if r["shape"]["name"] in ("Mixtral", "OLMoE")]
    rows = compare_bench(document)
    assert len(rows) == 8
    old = {(r["name"], r["ep"], r["pass"]): r["model_ms"] for r in FOUND["unfitted"]}
    for row in rows:
        assert old[row["name"], row["ep"], row["pass"]] == pytest.approx(row["model_ms"], rel=0.01)
    for record in records():
        if record.name in ("GB300 sweep, minibatch 4096", "GB200 EP 4 sweep, 36 comm SMs"):
            name, point = record.name.split(", ")
            row = next(r for r in FOUND["sweep"] if (r["sweep"], r["point"]) == (name, point))
            assert record.predict() == pytest.approx(row["model_ms"], rel=0.01)


def test_ours_is_not_slower_than_upstreams_program():
    for row in FOUND["gains"]:
        steps = {step["program"]: step for step in row["steps"]}
        assert steps["ours"]["gain"] >= 0, row["model"]
    assert {row["model"] for row in FOUND["gains"]} == set(scaling.FOUR)


def test_the_promise_on_unfitted_shapes_is_in_the_page():
    errors = sorted(abs(row["error"]) for row in FOUND["unfitted"] if row["use"] == "check")
    assert len(FOUND["unfitted"]) == len(errors) == 48
    assert errors[24] <= LIMITS["median"] and errors[-1] <= LIMITS["worst"]


def test_a_table_needs_its_place():
    with pytest.raises(MokError, match="must have a place"):
        fill("nothing", {"cases": "x"})
    assert fill("<!-- a -->\nold\n<!-- end -->", {"a": "new"}) == "<!-- a -->\nnew\n<!-- end -->"
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
