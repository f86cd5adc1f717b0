"""docs/tuning.md is filled from what sweeps wrote."""

import json
from pathlib import Path

import pytest

from mok.errors import MokError
from mok.tools.bench import tuning
from mok.tools.bench.sweep import TUNABLES

PAGE = (Path(__file__).parents[3] / "docs" / "tuning.md").read_text()


def document(tunable="minibatch_size", device="NVIDIA H200"):
    shape = {"name": "Layer", "T": 64, "H": 128, "I": 64, "E": 4, "K": 2}
    rows = [
        {
            "shape": shape, "pass": name, "program": "mok-ep4", "config": f"{tunable}={value}", "ok": True,
            "ms": ms, "peak_bytes": value << 20, "note": "EP 4, minibatch 1, macrobatch 2, comm SMs 8/6",
        }
        for value in (512, 1024)
        for name, ms in (("forward", 1.25), ("backward", 2.5))
    ]  # fmt: skip
    return {
        "device": device, "gpu": {"num_sms": 132}, "regime": {}, "rows": rows,
        "sweep": {"tunable": tunable},
    }  # fmt: skip


def test_a_table_of_a_sweep(tmp_path):
    file, page = tmp_path / "bench.json", tmp_path / "tuning.md"
    file.write_text(json.dumps(document()))
    page.write_text(PAGE)
    assert tuning.main([str(page), str(file)]) == 0
    text = page.read_text()
    line = "| Layer 64,128,64,4,2 | 512 | 8/6 | 124/126 | 512 | 1.250 | 2.500 |"
    assert line in text and line.replace("512 |", "1024 |") in text
    before = PAGE.partition("<!-- minibatch_size -->")[0]
    assert text.startswith(before) and text.count("<!-- end -->") == PAGE.count("<!-- end -->")


def test_what_is_no_sweep_of_this_gpu_is_refused():
    plain = document()
    del plain["sweep"]
    with pytest.raises(MokError, match="of a sweep"):
        tuning.tables([plain])
    with pytest.raises(MokError, match="of one GPU"):
        tuning.tables([document(), document(device="NVIDIA H100")])
    with pytest.raises(MokError, match="page and a bench"):
        tuning.main(["docs/tuning.md"])


def test_every_tunable_has_its_place():
    """``comm_sms`` stands for those of both directions, which are swept together."""
    for tunable in TUNABLES:
        assert f"`{tunable}`" in PAGE or tunable == "comm_sms"
        if "num_comm_sms" not in tunable:
            assert f"<!-- {tunable} -->" in PAGE
