from __future__ import annotations

import pytest

from mok.tools.bench import results

SHAPE = {"name": "A", "T": 8, "H": 64, "I": 64, "E": 4, "K": 2}
OTHER = {**SHAPE, "name": "B", "T": 16}


def row(program, ms, rounds=None, shape=SHAPE, pass_name="forward", tflops=None, **more):
    return {
        "shape": shape,
        "pass": pass_name,
        "program": program,
        "ms": ms,
        "rounds_ms": rounds or [ms, ms, ms],
        "tflops": tflops or 100 / (ms or 1),
        "spread": 0.0,
        "ok": True,
        **more,
    }


def test_ratios_are_taken_within_rounds():
    """The clock drifts by 2 over the run; the ratio does not."""
    rows = [row("mok", 2, [1, 2, 4]), row("sonic", 3, [1.5, 3, 6.4]), row("cublas", 1)]
    (found,) = results.ratios(rows)
    assert found["program"] == "sonic" and found["ratio"] == pytest.approx(1.5)
    assert (found["low"], found["high"]) == (pytest.approx(1.5), pytest.approx(1.6))


def test_ratios_need_both_and_the_same_pass_and_shape():
    rows = [
        row("mok", 1),
        row("torch", 2, pass_name="both"),
        row("torch", 2, shape=OTHER),
        row("sonic", None),
        row("mok", 5, config="minibatch_size=512"),
    ]
    assert results.ratios(rows) == []


def test_virtual_ranks_are_compared_with_the_direct_path():
    (found,) = results.ratios([row("mok", 1), row("mok-ep4", 1.1)])
    assert found["program"] == "mok-ep4" and found["ratio"] == pytest.approx(1.1)


def test_geometric_mean():
    rows = [
        row("mok", 1),
        row("sonic", 2),
        row("mok", 1, shape=OTHER),
        row("sonic", 0.5, shape=OTHER),
    ]
    (found,) = results.geometric_means(results.ratios(rows))
    assert found == {
        "program": "sonic", "pass": "forward", "mean": pytest.approx(1), "least": 0.5, "shapes": 2,
    }  # fmt: skip


def test_shares_and_targets():
    rows = [
        row("mok", 1, tflops=600, target=0.9, ceiling_ms=0.96),
        row("sonic", 1, tflops=630),
        row("cublas", 1, tflops=700, pass_name="gemm"),
        row("mok", 1, tflops=600, shape=OTHER, target=0.9),
    ]
    results.add_shares(rows)
    assert rows[0]["of_cublas"] == pytest.approx(600 / 700)
    assert rows[0]["of_ceiling"] == pytest.approx(0.96)
    assert rows[1]["of_cublas"] == pytest.approx(0.9)
    assert "of_cublas" not in rows[2] and "of_cublas" not in rows[3]
    assert results.missed_targets(rows) == [rows[0]]
    rows[0]["target"] = 0.85
    assert results.missed_targets(rows) == []


def test_comparison_prefers_the_share_of_cublas():
    """The machine is 20 % slower now; our share of it is the same."""
    then = [row("mok", 1.0, of_cublas=0.90), row("torch", 2.0, of_cublas=0.4)]
    now = [row("mok", 1.2, of_cublas=0.89), row("torch", 9.0, of_cublas=0.1)]
    (found,) = results.compare(now, then, margin=0.03)
    assert found["basis"] == "share of cuBLAS" and found["ok"]
    assert found["ratio"] == pytest.approx(0.89 / 0.90)
    (found,) = results.compare(now, then, margin=0.01)
    assert not found["ok"]


def test_comparison_by_milliseconds_otherwise():
    (found,) = results.compare([row("mok", 1.05)], [row("mok", 1.0)], margin=0.03)
    assert found["basis"] == "milliseconds" and not found["ok"]
    assert results.compare([row("mok", 1)], [row("mok", 1, shape=OTHER)], 0.03) == []


def test_settings_are_compared_with_the_same_settings():
    then = [row("mok", 1.0), row("mok", 3.0, config="minibatch_size=512")]
    now = [row("mok", 2.9, config="minibatch_size=512")]
    (found,) = results.compare(now, then, margin=0.03)
    assert found["ok"] and found["ratio"] == pytest.approx(3 / 2.9)
