"""``mok capture`` and ``mok replay``, in the emulator and without."""

from __future__ import annotations

import json

import pytest

from mok import cli


def document(capsys, *argv):
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.emulator
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_step_of_three_ranks_on_one(capsys, tmp_path, precision):
    pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    file = str(tmp_path / "step.mok")
    shape = ["--shape", "33,128,128,5,2", "--ep", "3", "--forward", "--emulate"]
    shape += ["--precision", precision]
    code, made = document(capsys, "capture", file, *shape)
    assert code == 0 and made["ok"] and len(made["hashes"]["output"]) == 3
    code, found = document(capsys, "replay", str(tmp_path), "--emulate")
    assert code == 0 and found["ok"] and found["ep_size"] == 3
    assert found["hashes"] == made["hashes"]
    assert cli.main(["replay", file, "--emulate"]) == 0
    assert "same bits" in capsys.readouterr().out


def test_bad_arguments(capsys, tmp_path):
    file = str(tmp_path / "step.mok")
    code, found = document(capsys, "capture", file, "--shape", "1,2,3", "--emulate")
    assert code == 2 and "five numbers" in found["error"]["rule"]
    code, found = document(capsys, "capture", file, "--ep", "0", "--emulate")
    assert code == 2 and "--ep must be at least 1" in found["error"]["rule"]
    (tmp_path / "file").write_text("")
    code, found = document(capsys, "capture", str(tmp_path / "file" / "step.mok"), "--emulate")
    assert code == 2 and "writable" in found["error"]["rule"]
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('ran')")
    place = str(tmp_path / "file" / "timeline.json")
    code, found = document(capsys, "emulate", "--timeline", place, str(script))
    assert code == 2 and "writable" in found["error"]["rule"]
    assert "--timeline" in found["error"]["remedy"]
    code, found = document(capsys, "replay", file, "--emulate")
    assert code == 2 and "readable" in found["error"]["rule"]
