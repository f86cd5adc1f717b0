"""The numbers of docs/blackwell.md follow from the code and from the arithmetic that the page states.

python -m tests.test_blackwell_page     # prints the table of times
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mok.config import Config, Shape
from mok.kernels_cute.machine import BLACKWELL, CONTROL_BYTES, HOPPER, SMEM_BYTES, launch_grid
from mok.models import MODELS, get_machine

PAGE = (Path(__file__).parents[1] / "docs" / "blackwell.md").read_text()
TEXT = " ".join(PAGE.split())
SMS = get_machine("b200").num_sms
HBM, NVLINK = 8e12, 900e9  # bytes per second
PEAKS = {"B200": 2250e12, "GB300": 2500e12}
CALLS = [
    ("deepseek-v3", 8, 8192),
    ("kimi-k2.5", 8, 8192),
    ("qwen3-235b-a22b", 8, 8192),
    ("qwen3-30b-a3b", 1, 16384),
    ("mixtral-8x7b", 1, 8192),
]
COMM_SMS = 16
FLOP_PER_CYCLE = 8192


@dataclass(frozen=True)
class Times:
    """Milliseconds of one rank's forward pass under balanced routing."""

    shared: float
    up: float
    down: float
    nvlink: float
    hbm: float

    @property
    def bound(self) -> str:
        terms = {
            "compute": self.shared + self.up + self.down,
            "NVLink": self.nvlink,
            "HBM": self.hbm,
        }
        name = max(terms, key=lambda n: terms[n])
        return f"{name} {terms[name]:.2f}"


def times(name: str, ep_size: int, tokens: int, gpu: str) -> Times:
    model = MODELS[name]
    H, I = model.hidden_size, model.intermediate_size
    local = model.num_experts // ep_size
    rows = tokens * model.topk
    padded = rows + BLACKWELL.tile_m // 2 * local
    computing = (SMS - (COMM_SMS if ep_size > 1 else 0)) / SMS
    rate = computing * PEAKS[gpu] / 1e3
    row_bytes = (8 if ep_size > 1 else 4) * H + 4 * I
    return Times(
        shared=6 * tokens * H * (model.shared_intermediate_size or 0) / rate,
        up=4 * padded * H * I / rate,
        down=2 * padded * H * I / rate,
        nvlink=2e3 * rows * 2 * H * (ep_size - 1) / ep_size / NVLINK,
        hbm=1e3 * (6 * local * H * I + rows * row_bytes) / HBM,
    )


def table() -> list[str]:
    lines = []
    for name, ep_size, tokens in CALLS:
        for gpu in PEAKS:
            t = times(name, ep_size, tokens, gpu)
            cells = [name, ep_size, tokens, gpu]
            cells += [f"{v:.2f}" for v in (t.shared, t.up, t.down, t.nvlink, t.hbm)]
            lines.append("| " + " | ".join(map(str, [*cells, t.bound])) + " |")
    return lines


def test_the_table_of_times():
    found = re.findall(r"^\| [a-z0-9.-]+ \| \d+ \| \d+ \| (?:B200|GB300) .*$", PAGE, re.M)
    assert found == table()
    assert {re.split(r" \| ", line)[-1].split()[0] for line in found} == {"compute"}


def test_it_says_what_was_not_run():
    assert "They have not been run on a Blackwell GPU" in TEXT


def test_budgets():
    m, stages = BLACKWELL, BLACKWELL.stages
    stage = m.stage_bytes(256)
    assert f"{stages} stages" in TEXT and f"{stages} × {stage:,} = {stages * stage:,}" in TEXT
    assert f"| {CONTROL_BYTES:,} |" in PAGE
    assert f"| together | {m.smem_bytes(256, stages, 2):,} |" in PAGE
    assert f"227 KB = {SMEM_BYTES:,} bytes" in TEXT
    assert m.acc_stages * 256 == m.tmem_columns == 512
    assert "two accumulators of 256 columns, all 512" in TEXT


def test_cycles():
    step = 2 * BLACKWELL.tile_m * 256 * 64 // (2 * FLOP_PER_CYCLE)  # a pair, two SMs
    assert step == 512 and "512 cycles per K step of 64" in TEXT
    assert f"6 × 512 = {BLACKWELL.stages * step}" in TEXT
    for k in (7168, 2048, 768):
        assert f"{step * k // 64:,} for" in TEXT
    assert round(PEAKS["B200"] / SMS / FLOP_PER_CYCLE / 1e9, 2) == 1.86  # GHz
    # The epilogue of gate and up: exponential and reciprocal of 128 × 128 elements, 16 a cycle.
    assert f"at 16 a cycle: {128 * 128 * 2 // 16}" in TEXT


def test_multicast():
    loaded = BLACKWELL.stage_bytes(256) / 512
    assert loaded == 64 and "64 bytes a cycle, 17.5 TB/s" in TEXT
    assert round(loaded * SMS * 1.85e9 / 1e12, 1) == 17.5
    assert round(0.75 * loaded * SMS * 1.85e9 / 1e12, 1) == 13.1 and "13.1 TB/s" in TEXT
    assert HOPPER.stage_bytes(256) / (2 * 128 * 256 * 64 / 4096) == 48
    rows = 16384 * 8 / 128
    assert round(100 * ((rows + 256) / (rows + 128) - 1)) == 11 and "11 % more work" in TEXT


def test_surplus_clusters():
    model = MODELS["kimi-k2.5"]
    shape = Shape.of_model(model, 8192, 8)
    multiplier = Config.suggest(shape, "b200").schedule_capacity_multiplier
    per_block = 2 * model.intermediate_size // 256 + model.hidden_size // 256
    rows = int(multiplier * 8 * 8192 * model.topk)
    clusters = -(-rows // 256) * per_block
    tasks = (8192 * model.topk + 128 * shape.max_local_experts) // 256 * per_block
    assert launch_grid("sm_100a", None, SMS, COMM_SMS, clusters) == COMM_SMS + 2 * clusters
    pairs = (SMS - COMM_SMS) // 2
    text = f"{clusters:,} clusters for {tasks:,} tasks, {round((clusters - tasks) / pairs)} of them"
    assert text in TEXT, text
    assert f"for each of {pairs} pairs" in TEXT


if __name__ == "__main__":
    print("\n".join(table()))
