"""The original MoK, whose stand-in lives in an interpreter of its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mok.tools.bench.oracle import GRADIENT_LIMIT, OUTPUT_LIMIT, Oracle
from mok.tools.bench.programs import Options, Unavailable, make_program
from mok.tools.bench.shapes import parse_shape
from mok.tools.bench.timing import HostClock, Regime
from mok.tools.bench.work import Work, make_work
from tests.tools.bench.fakes import CPU


def options(**more: Any) -> Options:
    return Options(HostClock(), **more)


FAKE_UPSTREAM = """
import torch

class MoKConfig:
    pass

def create_workspace(config, group, *, device, num_local_tokens, hidden_size, topk):
    print("noise on standard output")
    return (num_local_tokens, hidden_size, topk)

def build_schedule(workspace, config, ids, *, num_local_experts):
    assert ids.dtype == torch.int64
    return ids, num_local_experts

def layer(ids, x, router, sg, su, sd, gate, up, down):
    assert not sg.any() and sg.shape == gate.shape[1:] and sd.shape == down.shape[1:]
    out = torch.zeros(x.shape)
    for e in range(len(gate)):
        gate_rows, up_rows = (x.float() @ w[e].float().T for w in (gate, up))
        hidden = torch.nn.functional.silu(gate_rows) * up_rows
        weight = torch.where(ids == e, router, 0).sum(1, keepdim=True)
        out = out + weight * (hidden @ down[e].float().T)
    return out

def forward(config, workspace, schedule, x, w, *weights):
    return layer(schedule[0], x, w, *weights).bfloat16(), "context"

def backward(config, workspace, schedule, context, dy, x, w, *weights):
    assert context == "context"
    leaves = [t.detach().float().requires_grad_() for t in (x, w, *weights[3:])]
    out = layer(schedule[0], leaves[0], leaves[1], *weights[:3], *leaves[2:])
    return (*torch.autograd.grad(out, leaves, dy.float()), None, None, None)
"""


@pytest.fixture
def fake_upstream(tmp_path):
    """An interpreter whose only ``mok`` is a stand-in."""
    package = tmp_path / "site" / "mok"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "functional.py").write_text(FAKE_UPSTREAM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def large_work() -> Work:
    return make_work(parse_shape("512,256,256,2,1"), CPU)


def test_upstream_runs_in_its_own_interpreter(large_work, fake_upstream):
    program = make_program("upstream", large_work, options(paths={"upstream": str(fake_upstream)}))
    try:
        assert "in its own process" in program.note
        oracle = Oracle(large_work)
        assert oracle.output_error(program.output(program.forward(0))) < OUTPUT_LIMIT
        output, saved = program.forward_training(0)
        assert oracle.output_error(output) < OUTPUT_LIMIT
        errors = oracle.gradient_errors(program.gradients(program.backward(0, saved)))
        assert max(errors.values()) < GRADIENT_LIMIT
        window = program.window("both", program.forward, HostClock(), Regime(1, 2))
        assert window.calls >= 3 and window.median > 0 and window.end > window.begin
    finally:
        program.close()
    assert program.process.poll() == 0


def test_upstream_that_fails_is_named(large_work, fake_upstream, tmp_path):
    def make(path: str) -> None:
        make_program("upstream", large_work, options(paths={"upstream": path}))

    with pytest.raises(Unavailable, match="--peers upstream=PYTHON"):
        make("")
    with pytest.raises(Unavailable, match="nowhere"):
        make(str(tmp_path / "nowhere"))
    (tmp_path / "site" / "mok" / "functional.py").write_text("raise OSError('needs a B200')")
    with pytest.raises(Unavailable, match="needs a B200"):
        make(str(fake_upstream))
    fake_upstream.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(Unavailable, match="ended with code 3"):
        make(str(fake_upstream))


def test_upstream_has_limits():
    work = make_work(parse_shape("64,128,64,4,2"), CPU)
    with pytest.raises(Unavailable, match="multiples of 256"):
        make_program("upstream", work, options(paths={"upstream": "python"}))
