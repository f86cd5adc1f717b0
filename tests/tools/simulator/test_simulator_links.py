"""Push against pull: the published figures, and the arithmetic of the fluid model."""

import dataclasses

import numpy as np
import pytest

from mok.config import Config, Shape
from mok.errors import MokError, ShapeError
from mok.models import MODELS
from mok.tools.simulator import Scenario, balanced, load_machine
from mok.tools.simulator.links import drain, imbalance_gain, signalling

GB300 = load_machine("gb300")
KIMI = Shape.of_model(MODELS["kimi-k2.5"], 2048, 64)  # the authors' usual T and EP
DEFAULTS = Config(40, 28, 2560, 32 * 2560)


def scenario(**changes) -> Scenario:
    arguments = {"program": "upstream", "precision": "mxfp8", "routing": balanced(KIMI)} | changes
    return Scenario(KIMI, DEFAULTS, GB300, **arguments)


def test_published_signalling_unfitted():
    """103 us for pushing, 18 us for pulling, within 25 %."""
    found = signalling(scenario())
    assert found["pull"] == pytest.approx(18e-6, rel=0.25)
    assert found["push"] == pytest.approx(103e-6, rel=0.25)
    assert all(c.kind != "fitted" for c in GB300.constants.constants.values())


def test_published_gain_under_imbalance():
    """Up to 29 points, within 6; balanced, pulling costs about 8 % more bytes."""
    gains = [imbalance_gain(GB300, 8, hot) for hot in np.arange(1.0, 3.01, 0.1)]
    assert 0.23 <= max(gains) <= 0.35
    assert gains[0] == pytest.approx(-0.08, abs=0.01)
    assert gains[0] == min(gains)


def test_more_comm_sms_wait_less_for_acknowledgements():
    few = dataclasses.replace(scenario(), config=dataclasses.replace(DEFAULTS, fwd_num_comm_sms=20))
    assert signalling(few)["push"] > 1.7 * signalling(scenario())["push"]
    assert signalling(few)["pull"] == signalling(scenario())["pull"]


def test_flows_share_ports_fairly():
    one = [(0, 1, 1.0)]
    assert drain([one], 2, 1.0, 0.0) == pytest.approx(1.0)
    assert drain([one], 2, 1.25, 0.0) == pytest.approx(1.25)
    assert drain([one, one], 2, 1.0, 0.0) == pytest.approx(2.0)
    # Opposite directions are independent, but for what goes against the data.
    both = [one, [(1, 0, 1.0)]]
    assert drain(both, 2, 1.0, 0.0) == pytest.approx(1.0)
    assert drain(both, 2, 1.0, 0.5) == pytest.approx(1.5)
    # 0 to 1 and 0 to 2 share a sender; 3 to 2 takes what is left of its receiver, then all of it.
    assert drain([one, [(0, 2, 1.0)], [(3, 2, 1.0)]], 4, 1.0, 0.0) == pytest.approx(2.0)
    assert drain([[(0, 1, 1.0), (0, 2, 1.0)]], 3, 1.0, 0.0) == pytest.approx(2.0)
    assert drain([[(1, 1, 5.0)]], 2, 1.0, 0.0) < 1e-6  # local
    assert drain([], 2, 1.0, 0.0) == 0.0


def test_a_sender_stands_behind_a_full_receiver():
    """Two senders begin at receiver 2; the one that also feeds 3 leaves 3 idle meanwhile."""
    blocked = [[(0, 2, 1.0), (0, 3, 1.0)], [(1, 2, 1.0)]]
    at_once = [[(0, 2, 1.0)], [(0, 3, 1.0)], [(1, 2, 1.0)]]
    assert drain(blocked, 4, 1.0, 0.0) == pytest.approx(3.0)
    assert drain(at_once, 4, 1.0, 0.0) == pytest.approx(2.0)


def test_what_is_refused():
    with pytest.raises(MokError, match="upstream's program"):
        signalling(dataclasses.replace(scenario(), program="ours"))
    with pytest.raises(ShapeError, match="two ranks"):
        imbalance_gain(GB300, 1, 2.0)
    with pytest.raises(ShapeError, match="at least 1"):
        imbalance_gain(GB300, 8, 0.5)
