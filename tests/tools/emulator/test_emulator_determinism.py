"""One seed gives the same interleaving and the same report on every host, byte for byte."""

import hashlib
import json
import re

import pytest

from tests.tools.emulator.determinism import (
    FAULTY,
    PROGRAMS,
    RECORD,
    SEEDS,
    available,
    transcript,
)

pytestmark = pytest.mark.emulator
WANT = json.loads(RECORD.read_text())["programs"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_on_the_host_of_the_record(name):
    """After a change to the emulator that alters interleavings, or to a program, write the record anew."""
    program, package = PROGRAMS[name]
    assert available(package), f"pip install -e '.[test]' brings {package}"
    texts = [transcript(program, seed) for seed in SEEDS]
    assert not [t for t in texts if re.search(r"0x[0-9a-f]{9,}", t)], "an address of this process"
    found = {
        str(seed): hashlib.sha256(text.encode()).hexdigest()[:16]
        for seed, text in zip(SEEDS, texts, strict=True)
    }
    assert found == WANT[name], "python -m tests.tools.emulator.determinism --write, if meant"


def test_the_record_holds_ten_programs_whose_seeds_differ():
    assert len(WANT) >= 10 and set(WANT) == set(PROGRAMS)
    assert all(len(set(by_seed.values())) == len(SEEDS) for by_seed in WANT.values())


@pytest.mark.parametrize("name", FAULTY)
def test_reports_are_compared_too(name):
    text = transcript(PROGRAMS[name][0], 0)
    assert '"findings": []' not in text or '"faults": []' not in text
