from __future__ import annotations

import stat
import threading
import time
import types

import pytest
import torch

from mok.tools.bench import telemetry
from mok.tools.bench.telemetry import (
    NvmlSource,
    Reading,
    SmiSource,
    Telemetry,
    mean,
    open_telemetry,
    parse_smi,
)


class Scripted:
    name = "scripted"

    def __init__(self, values, error=None):
        self.values, self.error, self.closed = values, error, False
        self.done = threading.Event()

    def samples(self, stop):
        yield from self.values
        self.done.set()
        if self.error:
            raise self.error
        stop.wait()

    def close(self):
        self.closed = True


def test_means_of_a_window():
    times = iter([1.0, 2.0, 3.0, 4.0])
    source = Scripted([(1000, 600), (1500, 690), (1600, 700), (1980, 300)])
    with Telemetry(source, now=lambda: next(times)) as found:
        source.done.wait(5)
        assert found.between(1.5, 3.5) == Reading(1550, 695, 2)
        assert found.between(10, 20) == Reading()
        assert found.name == "scripted"
    assert source.closed


def test_a_source_that_breaks_is_named_and_nothing_more():
    source = Scripted([(1, 2)], OSError("GPU is lost"))
    found = Telemetry(source)
    source.done.wait(5)
    found.close()
    assert found.name == "none (scripted: GPU is lost)"


def test_mean_weighs_by_samples():
    assert mean([Reading(1000, 600, 1), Reading(2000, 700, 3), Reading()]) == Reading(1750, 675, 4)
    assert mean([]) == Reading() == mean([Reading()])


@pytest.mark.parametrize(
    ("line", "found"),
    [("1980, 512.34\n", (1980, 512.34)), ("[N/A], 5", None), ("", None), ("1980", None)],
)
def test_parse_smi(line, found):
    assert parse_smi(line) == found


def fake_nvml(instant=True, by_uuid=True):
    def by_uuid_(uuid):
        if not by_uuid:
            raise RuntimeError("not found")
        return ("uuid", uuid)

    found = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByUUID=by_uuid_,
        nvmlDeviceGetHandleByIndex=lambda index: ("index", index),
        nvmlDeviceGetClockInfo=lambda handle, which: 1530,
        nvmlDeviceGetPowerUsage=lambda handle: 650_000,
        nvmlDeviceGetFieldValues=lambda handle, fields: [
            types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=690_000))
        ],
    )
    if instant:
        found.NVML_FI_DEV_POWER_INSTANT = 186
    return found


@pytest.mark.parametrize(("instant", "watts"), [(True, 690), (False, 650)])
def test_nvml_reads_instant_power_where_it_can(instant, watts, monkeypatch):
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.001)
    source = NvmlSource("GPU-x", 3, fake_nvml(instant))
    assert source._handle == ("uuid", "GPU-x")
    assert next(source.samples(threading.Event())) == (1530, watts)


def test_nvml_finds_the_gpu_by_number_otherwise():
    assert NvmlSource("GPU-x", 3, fake_nvml(by_uuid=False))._handle == ("index", 3)


def test_nvidia_smi_is_read_as_it_prints(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *instant*) exit 2;; esac\n'  # an old driver
        'case "$*" in *-lms*) while true; do echo "1700, 512.5"; sleep 0.01; done;; esac\n'
        'echo "1700, 512.5"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with Telemetry(SmiSource("GPU-x", 0, str(program))) as found:
        begin = time.perf_counter()
        while not found.between(begin, time.perf_counter()).samples:
            assert time.perf_counter() - begin < 10
            time.sleep(0.01)
        reading = found.between(begin, time.perf_counter())
    assert (reading.clock_mhz, reading.watts) == (1700, 512.5)


def test_nvidia_smi_that_does_not_answer(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho broken\n")
    program.chmod(0o755)
    with pytest.raises(OSError, match="does not answer"):
        SmiSource("GPU-x", 0, str(program))


def test_without_a_gpu_nothing_is_read():
    with open_telemetry(torch.device("cpu")) as found:
        assert found.name == "none (no GPU)"
        assert found.between(0, 1) == Reading()


def test_every_source_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="a-b")
    )

    def absent(uuid, index):
        assert (uuid, index) == ("GPU-a-b", 1)
        raise ImportError("not here")

    monkeypatch.setattr(telemetry.NvmlSource, "__init__", lambda self, u, i: absent(u, i))
    monkeypatch.setattr(telemetry.SmiSource, "__init__", lambda self, u, i: absent(u, i))
    with open_telemetry(torch.device("cuda", 1)) as found:
        assert "NVML: ImportError not here; nvidia-smi: ImportError not here" in found.name
