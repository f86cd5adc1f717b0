"""What does not need a GPU of ``mok.tools.bench.anatomy``."""

import pytest

from mok.runtime.trace import Event
from mok.tools.bench.anatomy import by_kind, main


def event(kind: str, sm: int, begin: float, end: float) -> Event:
    return Event(kind, "compute", sm, begin, end, 0, 0, 0, 0, 0)


def test_kinds_add_up_over_the_sms():
    found = by_kind([event("up", 0, 0, 2), event("up", 1, 0, 4), event("down", 0, 2, 3)])
    assert found["up"] == {"ms": 3e3, "tasks": 2, "begin_ms": 0, "end_ms": 4e3}
    assert found["down"]["ms"] == 500


def test_it_says_that_it_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--shape", "64,64,64,4,2"])
    assert "needs a GPU" in capsys.readouterr().err
