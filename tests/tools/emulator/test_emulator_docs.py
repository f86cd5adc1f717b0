"""The instruction table of docs/emulator.md is the code's."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.emulator


def test_the_instruction_table_is_current():
    from mok.tools.emulator.docs import update

    text = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text()
    assert update(text) == text, "run mok.tools.emulator.docs.update on docs/emulator.md"
