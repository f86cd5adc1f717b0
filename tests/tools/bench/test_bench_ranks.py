"""``mok bench`` under torchrun: what needs no GPU of it."""

import io

import pytest
import torch
from rich.console import Console

from mok.cli import build_parser, main
from mok.config import Shape
from mok.errors import MokError
from mok.reference import random_case
from mok.tools.bench import ranks, ranks_command
from mok.tools.bench.links import command as links_command
from mok.tools.bench.links.wire import CountersRefused, Traffic, read_traffic


def test_links_need_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["bench", "links"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_ep_must_be_the_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "--ep", "4"]) == 2
    assert "4, 2" in capsys.readouterr().err


def test_local_rows_stay_at_home():
    case = random_case(Shape(64, 64, 64, 8, 2))
    local = ranks.local_case(case, range(4, 8))
    assert local.top_experts.max() < 4 and local.routed.gate.shape[0] == 4
    assert torch.equal(local.routed.gate, case.routed.gate[4:8])


class TwoRanks(ranks.Rank):
    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


def test_an_idle_rank_has_no_token():
    case = random_case(Shape(10, 64, 64, 8, 2))
    shape, tokens, experts = TwoRanks(1).share(case, idle=True)
    assert shape.num_tokens == 10 and tokens == slice(10, 10) and experts == range(4, 8)
    assert TwoRanks(1).share(case)[1] == slice(5, 10)


def row(program: str, pass_name: str, ms: float) -> dict:
    return {
        "shape": [8, 64, 64, 4, 2], "routing": "random", "idle_rank": False, "program": program,
        "pass": pass_name, "ms": ms, "spread": 0.0, "tflops": 1.0, "config": None,
    }  # fmt: skip


ROWS = [
    row("mok", "forward", 2.0),
    row("mok-local", "forward", 1.5),
    row("nccl-torch", "forward", 5.0),
]


def test_exposed_is_the_share_of_time_that_local_rows_save():
    assert ranks.exposed(ROWS) == {"forward": 0.25}


def text_of(show, document) -> str:
    out = io.StringIO()
    show(document, Console(file=out, width=200))
    return out.getvalue()


def test_tables_compare_with_the_peer():
    document = {
        "ranks": 2, "rank": 0, "device": "GPU", "rows": ROWS, "bits": {"case": {"output": True}},
        "exposed": {"[8, 64, 64, 4, 2]": {"forward": 0.25}},
        "regime": {"warm_ms": 400.0, "run_ms": 300.0, "rounds": 2},
    }  # fmt: skip
    text = text_of(ranks_command.show, document)
    assert "2.50×" in text and "25.0 %" in text
    assert "windows of 300 ms after 400 ms" in text
    assert ranks_command.passed(document)
    assert not ranks_command.passed(document | {"bits": {"case": {"output": False}}})
    assert not ranks_command.passed(document | {"rows": []})
    assert text_of(ranks_command.show, document | {"rank": 1}) == ""


def sweep_of(*argv: str) -> ranks_command.Runs:
    args = build_parser().parse_args(["bench", *argv])
    return ranks_command.sweep_runs(args, [(8, 64, 64, 4, 2), (16, 64, 64, 4, 2)])


def test_a_sweep_takes_every_shape_and_value():
    found = sweep_of("--sweep", "comm_sms", "--values", "4,6")
    assert [sizes[0] for sizes, _, _ in found] == [8, 8, 16, 16]
    both = {"fwd_num_comm_sms": 6, "bwd_num_comm_sms": 6}
    assert found[1][1:] == found[3][1:] == (("mok",), {"changes": both})
    with pytest.raises(MokError, match="sweep over ranks"):
        sweep_of("--sweep", "colour")


def links_document() -> dict:
    bandwidth = [
        {
            "kind": kind, "row_bytes": size, "sms": sms, "one_way": way, "ms": 1.0,
            "gbytes_per_s": 100.0 + sms,
        }
        for kind in ("pull", "push")
        for size in links_command.ROW_BYTES
        for sms in (4, 8)
        for way in (True, False)
    ]  # fmt: skip
    routing = [
        {"routing": "zipf", "kind": "push", "sms": 16, "ms": 1.0, "ms_with_signals": 1.25,
         "gbytes_per_s": 90.0}
    ]  # fmt: skip
    return {
        "ranks": 2, "bandwidth": bandwidth, "routing": routing,
        "signals": {"device_barrier_us": 3.5},
        "wire": {"pull": {"refused": "not supported"}, "push": {"data_tx": 159600}},
    }  # fmt: skip


def test_links_tables_and_picture(tmp_path):
    text = text_of(links_command.show, links_document())
    for part in ("104 / 104", "1.250", "device barrier: 3.50 µs", "not supported", "159.6 KB"):
        assert part in text
    picture = links_command.draw(links_document(), tmp_path / "links.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_link_counters_are_summed():
    data = "Link 0: Data Tx: 3 KiB\nLink 0: Data Rx: 5 KiB\nLink 1: Data Tx: 4 KiB\nLink 1: Data Rx: 0 KiB"
    raw = "Link 0: Raw Tx: 30 KiB\nLink 0: Raw Rx: 50 KiB"
    found = read_traffic("0", lambda arguments: data if arguments[1] == "d" else raw)
    assert found == Traffic(7 * 1024, 5 * 1024, 30 * 1024, 50 * 1024)
    assert (found - found) == Traffic(0, 0, 0, 0)


@pytest.mark.parametrize("text", ["", "Unable to retrieve NVLink throughput: Not Supported"])
def test_refused_counters_say_what_was_said(text):
    with pytest.raises(CountersRefused, match="no counter"):
        read_traffic("0", lambda _: text)
