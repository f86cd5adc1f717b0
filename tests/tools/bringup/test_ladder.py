"""The way up: it stops at the first failure, ends what hangs, and reports what broke."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from mok import cli
from mok.tools.bringup import child, report
from mok.tools.bringup.ladder import Climb, Ending, in_process_group
from mok.tools.bringup.notes import Notes, read
from mok.tools.bringup.rungs import Rung, ladder, part

SAY = lambda text: None  # noqa: E731


def rungs(first, last, arch="sm_100a"):
    return part(ladder(arch, launched=False), first, last)


def here(start):
    """An executor without a process of its own."""
    notes = Notes(start.paths()[0], start.folder / "kernels")
    start.log().write_text("log line\n")
    ok = child.climb(start.rung, start.arch, start.emulate, notes, start.fault, start.seed)
    return Ending(0 if ok else 1, 0.5)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "fault,found", [("wrong", "1 of 1540 elements differ"), ("error", "an error on purpose")]
)
def test_stops_at_the_first_failure(fault, found, tmp_path):
    climb = Climb(
        rungs("driver", "tile-2cta"), "sm_100a", True, tmp_path, faults={"copy": fault},
        executor=here, say=SAY,
    )  # fmt: skip
    climb.run()
    states = {check["name"]: check["state"] for check in climb.checks}
    assert states == {
        "driver": "ok", "copy": "failed", "tile-1cta": "not run", "tile-2cta": "not run",
    }  # fmt: skip
    failure = climb.failure
    assert failure["rung"] == "copy" and found in failure["found"]
    assert failure["error"]["traceback"] and failure["log"] == ["log line"]
    assert failure["emulated"] is None  # it ran in the emulator
    (check,) = (c for c in climb.checks if c["name"] == "copy")
    assert check["remedy"] and not check["ok"]
    if fault == "wrong":
        assert failure["kernel"]["name"] == "bringup_copy"
        assert len(failure["kernel"]["ptx_sha256"]) == 64
        assert failure["values"][-1]["mismatches"] == 1


@pytest.mark.emulator
def test_processes_hold_hang_and_die(tmp_path):
    """As on a real machine: a rung that holds, one that hangs past its limit, one that aborts."""
    faults = {"tile-1cta": "hang"}
    climb = Climb(
        rungs("copy", "tile-2cta"), "sm_100a", True, tmp_path / "a", faults=faults, say=SAY,
        limit_scale=0.1,
    )  # fmt: skip
    (tmp_path / "a").mkdir()
    climb.run()
    assert [c["state"] for c in climb.checks] == ["ok", "timed out", "not run"]
    assert "ended after 30 s; it had launched no kernel" in climb.failure["found"]
    assert climb.checks[1]["seconds"] < 55
    assert "--limit-scale" in climb.checks[1]["remedy"]
    climb = Climb(
        rungs("copy", "tile-1cta"), "sm_100a", True, tmp_path / "b", faults={"copy": "crash"},
        say=SAY,
    )  # fmt: skip
    (tmp_path / "b").mkdir()
    climb.run()
    assert [c["state"] for c in climb.checks] == ["failed", "not run"]
    assert "signal SIGABRT" in climb.failure["found"]


def running(folder):
    """Rungs' processes that work for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone meanwhile
            words = path.read_bytes().decode().split("\0")
            if "mok.tools.bringup.child" in words and any(str(folder) in word for word in words):
                found.append(int(path.parent.name))
    return found


@pytest.mark.emulator
def test_the_ranks_of_a_tray_that_hangs_end_with_it(tmp_path):
    """torchrun gives each a session of its own: left alone, they would keep their GPUs."""
    climb = Climb(
        rungs("tray", "tray"), "sm_100a", True, tmp_path, 4, {"tray": "hang"}, say=SAY,
        limit_scale=0.03,
    )  # fmt: skip
    climb.run()
    assert [c["state"] for c in climb.checks] == ["timed out"]
    assert list(tmp_path.glob("tray-emulated-rank1.jsonl"))  # it had begun
    assert running(tmp_path) == []


@pytest.mark.emulator
def test_sigterm_ends_the_rung_and_leaves_a_report(tmp_path):
    """As torchrun and Slurm end the ranks beside one that failed."""
    command = [sys.executable, "-m", "mok", "bringup", "--emulate", "--out", str(tmp_path)]
    command += ["--from", "copy", "--to", "tile-1cta", "--inject", "copy=hang"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if running(tmp_path):
            break
        time.sleep(0.1)
    assert running(tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert running(tmp_path) == []
    found = json.loads((tmp_path / "bringup.json").read_text())
    assert [c["state"] for c in found["checks"]] == ["stopped", "not run"]
    assert found["failure"]["rung"] == "copy" and found["failure"]["state"] == "stopped"
    assert "no kernel" in found["failure"]["found"]
    assert "the reports of the others" in found["checks"][0]["remedy"]


@pytest.mark.emulator
@pytest.mark.timeout(300)
def test_every_rank_of_a_rack_that_fails_reports(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "mok", "bringup", "--emulate"]
    command += ["--inject", "rack=error", "--out", str(tmp_path)]
    done = subprocess.run(command, timeout=280, capture_output=True)
    assert done.returncode != 0 and running(tmp_path) == []
    failures = []
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}" / "bringup.json").read_text())
        assert found["checks"][0]["state"] == "not here"  # of fabric handles
        failures.append(found["failure"])
    assert {f["rung"] for f in failures} == {"rack"}
    assert any("an error on purpose" in f["found"] for f in failures)
    assert {f["state"] for f in failures} <= {"failed", "stopped"}


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["", "wrong"])
def test_two_processes_are_a_tray(fault, tmp_path):
    climb = Climb(
        rungs("tray", "tray"), "sm_100a", True, tmp_path, 4, {"tray": fault}, say=SAY,
    )  # fmt: skip
    climb.run()
    (check,) = climb.checks
    assert check["state"] == ("failed" if fault else "ok")
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {
        "tray-emulated-rank0.jsonl", "tray-emulated-rank1.jsonl",
    }  # fmt: skip
    if fault:
        assert "1 of" in check["found"] and climb.failure["kernel"]


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["", "wrong"])
def test_under_torchrun_it_climbs_to_the_rack(fault, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "mok", "bringup", "--emulate"]
    command += ["--out", str(tmp_path), *(["--inject", f"rack={fault}"] if fault else [])]
    done = subprocess.run(command, timeout=1700)
    assert (done.returncode != 0) == bool(fault) and running(tmp_path) == []
    failures = []
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}" / "bringup.json").read_text())
        first, second = (check["state"] for check in found["checks"])
        assert first == "not here"
        assert (second != "ok") if fault else (second == "ok" and found["failure"] is None)
        failures.append(found["failure"])
    if fault:  # who compares second may be ended before it has said so
        wrong = [f for f in failures if f["state"] == "failed"]
        assert wrong and all("1 of" in f["found"] and "differ" in f["found"] for f in wrong)
        assert {f["rung"] for f in failures} == {"rack"} and wrong[0]["kernel"]


def as_on_a_gpu(start):
    """What the processes of a GPU and of the emulator would have written."""
    notes = Notes(start.paths()[0], start.folder / "kernels")
    kernel = {"name": "bringup_copy", "arch": start.arch, "ptx_sha256": "ab" * 32}
    if start.rung.name == "copy" and not start.emulate:
        notes.write("kernel", **kernel)
        notes.write("launch", name="bringup_copy")
        notes.write("value", name="before", ok=True, sha256="01" * 32)
        notes.write("value", name="the copy", ok=False, sha256="99" * 32)
        for seconds in (2, 4):
            notes.write("counters", when=f"runs for {seconds} s", counters={"ticket": [seconds]})
        start.log().write_text("\n".join(map(str, range(100))))
        return Ending(None, 120.0)
    notes.write("kernel", **kernel)
    notes.write("value", name="before", ok=True, sha256="01" * 32)
    notes.write("value", name="the copy", ok=True, sha256="cd" * 32)
    notes.write("result", state="ok", found="fine", seconds=1.0)
    return Ending(0, 1.0)


def test_a_failure_on_a_gpu_comes_with_the_emulators_result(tmp_path):
    said = []
    climb = Climb(
        rungs("driver", "tile-1cta"), "sm_100a", False, tmp_path, executor=as_on_a_gpu,
        say=said.append,
    )  # fmt: skip
    climb.run()
    failure = climb.failure
    assert [c["state"] for c in climb.checks] == ["ok", "timed out", "not run"]
    assert failure["kernel"]["name"] == "bringup_copy" and failure["launches"] == ["bringup_copy"]
    assert [c["counters"]["ticket"] for c in failure["counters"]] == [[2], [4]]
    assert failure["emulated"]["state"] == "ok" and failure["emulated"]["same_ptx"] is True
    assert failure["emulated"]["values"][1]["sha256"] == "cd" * 32
    assert failure["emulated"]["other_bits"] == ["the copy"]
    assert failure["log"][-1] == "99" and len(failure["log"]) == 40
    assert any("in the emulator" in text for text in said)


def test_every_rank_must_hold(tmp_path, monkeypatch):
    """Of two processes the second fails: its notes are the report's."""

    def two(start):
        for path, ok in zip(start.paths(), (True, False), strict=True):
            notes = Notes(path, start.folder / "kernels")
            notes.write("launch", name=path.stem)
            state = "ok" if ok else "failed"
            notes.write("result", state=state, found="rank text", error={"remedy": "do this"})
        return Ending(1, 1.0)

    rung = Rung("tray", "t", "p", "m:f", ranks="host")
    climb = Climb([rung], "sm_100a", True, tmp_path, 4, executor=two, say=SAY)
    climb.run()
    (check,) = climb.checks
    assert check["state"] == "failed" and check["found"] == "rank text (rank 1)"
    assert climb.failure["launches"] == ["tray-emulated-rank1"] and check["remedy"] == "do this"


def test_notes_of_an_earlier_run_do_not_count(tmp_path):
    """A process that dies before it writes anything."""
    old = Notes(tmp_path / "copy-emulated.jsonl", tmp_path / "kernels")
    old.write("result", state="ok", found="long ago")
    climb = Climb(
        rungs("copy", "copy"), "sm_100a", True, tmp_path, executor=lambda start: Ending(1, 0.1),
        say=SAY,
    )  # fmt: skip
    climb.run()
    assert climb.checks[0]["state"] == "failed" and "exit code 1" in climb.failure["found"]


def test_notes_of_a_torn_line(tmp_path):
    path = tmp_path / "n.jsonl"
    notes = Notes(path, tmp_path / "kernels")
    notes.write("launch", name="a")
    with path.open("a") as file:
        file.write('{"event": "lau')
    assert [e["name"] for e in read(path)] == ["a"]
    assert read(tmp_path / "none") == []


# ------------------------------------------------------------------ command


def document(capsys, *argv):
    code = cli.main(["bringup", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_list_needs_no_machine(capsys):
    code, found = document(capsys, "--list")
    assert code == 0 and found["checks"][0]["name"] == "driver"
    assert {"name", "ok", "found", "remedy"} <= found["checks"][0].keys()
    _, hopper = document(capsys, "--list", "--arch", "sm_90a")
    assert "wgmma" in [c["name"] for c in hopper["checks"]]


def test_without_a_gpu_it_says_how_to_rehearse(capsys, monkeypatch, tmp_path):
    """An old driver is the first thing that may be wrong: it, too, leaves a report."""
    from mok.runtime import device

    none = device.Backend(None, None, "there is no NVIDIA driver")
    monkeypatch.setattr(device, "best_backend", lambda: none)
    assert cli.main(["bringup", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--emulate" in said and "bringup.json" in said
    found = json.loads((tmp_path / "bringup.json").read_text())
    assert found["failure"]["rung"] == "driver" and "no NVIDIA" in found["failure"]["found"]
    assert found["versions"]["torch"] and found["doctor"][0]["name"] == "driver"
    assert [c["state"] for c in found["checks"]] == ["failed"]


def test_a_doctor_that_stumbles_stops_nothing(monkeypatch):
    from mok.commands import doctor_gpu

    def broken():
        raise OSError("another NVML")

    monkeypatch.setattr(doctor_gpu, "ask_nvml", broken)
    found = report._doctor()
    assert [c["name"] for c in found] == ["driver", "IMEX channels", "links"]
    assert found[2]["ok"] is False and "another NVML" in found[2]["found"]


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf"])
def test_limits_are_limits(scale, capsys, tmp_path):
    assert cli.main(["bringup", "--emulate", "--limit-scale", scale, "--out", str(tmp_path)]) == 2
    assert "--limit-scale must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_said_first(capsys, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/mok"):
        assert cli.main(["bringup", "--emulate", "--to", "copy", "--out", str(place)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "must be writable" in said and "--out" in said and "driver:" not in said


def test_an_unknown_rung_or_fault(capsys):
    assert cli.main(["bringup", "--emulate", "--from", "moon"]) == 2
    assert "driver, copy" in capsys.readouterr().err
    assert cli.main(["bringup", "--emulate", "--inject", "copy=rain"]) == 2
    assert "wrong, error, hang, crash" in capsys.readouterr().err
    assert cli.main(["bringup", "--emulate", "--inject", "moon"]) == 2
    assert "a known rung" in capsys.readouterr().err


def test_faults_are_not_offered(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bringup", "--help"])
    assert "inject" not in capsys.readouterr().out


@pytest.mark.emulator
def test_the_report_is_a_file_and_the_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mok.tools.bringup.ladder.in_process_group", here)
    monkeypatch.setattr(Climb.__init__, "__defaults__", (
        *(here if d is in_process_group else d for d in Climb.__init__.__defaults__),
    ))  # fmt: skip
    folder = tmp_path / "out"
    arguments = ["--emulate", "--to", "copy", "--out", str(folder)]
    code, found = document(capsys, *arguments, "--inject", "copy")
    assert code == 1 and found["failure"]["rung"] == "copy"
    written = json.loads((folder / "bringup.json").read_text())
    assert written["failure"] == found["failure"] and written["arch"] == "sm_100a"
    assert written["versions"]["nvidia-cutlass-dsl"] and written["versions"]["python"]
    assert list((folder / "kernels").glob("bringup_copy-*.ptx"))
    assert cli.main(["bringup", *arguments, "--inject", "copy"]) == 1
    shown = capsys.readouterr().out
    assert "PTX sha256" in shown and "not run" not in shown and "failed" in shown
    assert cli.main(["bringup", *arguments]) == 0


def test_the_head_without_a_gpu():
    found = report.head("sm_100a", emulate=True)
    assert found["device"] is None and found["host"]["machine"] and found["format"] == 1
