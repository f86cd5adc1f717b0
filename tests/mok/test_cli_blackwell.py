"""The commands that run the Blackwell kernel without a GPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from mok import cli
from mok.commands import demo
from mok.errors import DeviceError
from mok.runtime import device as runtime_device
from mok.runtime.device import Backend as RuntimeBackend

pytestmark = pytest.mark.emulator


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    none = RuntimeBackend(None, None, "there is no NVIDIA driver")
    monkeypatch.setattr(runtime_device, "best_backend", lambda: none)


def document(capsys, *argv: str) -> tuple[int, dict]:
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_demo_runs_two_ranks_with_a_progress_bar(capsys, monkeypatch):
    told = []
    bar = demo.emulation_bar

    def watched(*args):
        context = bar(*args)
        enter = type(context).__enter__

        class Watched:
            def __enter__(self):
                advance = enter(context)
                return lambda steps: (told.append(steps), advance(steps))

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Watched()

    monkeypatch.setattr(demo, "emulation_bar", watched)
    code, found = document(capsys, "demo", "--arch", "sm_100a")
    assert code == 0 and found["ok"] and 0 < found["error"] <= 3.5e-3
    assert found["backend"] == "sm_100a in the emulator"
    assert found["shape"]["EP"] == 2
    assert len(told) > 100
    # The estimate behind the bar: a task takes about so many warp instructions.
    launches = [a for a, b in zip(told, [*told[1:], 0], strict=True) if b < a]
    tasks = 32
    assert 0.5 < sum(launches) / (tasks * demo.STEPS_PER_TASK) < 2


def test_check_emulates(capsys):
    code, found = document(
        capsys, "check", "forward", "--arch", "sm_100a", "--emulate", "--model", "olmoe"
    )
    assert code == 0 and found["backend"] == "sm_100a in the emulator"
    assert {c["metric"] for c in found["cases"]} == {"relative_l2", "mismatches"}
    assert all(c["ok"] for c in found["cases"])


def test_demo_refuses_an_unknown_architecture():
    with pytest.raises(DeviceError, match="sm_80"):
        demo.backend_for("sm_80")
