"""mbarrier objects.  State lives in the 64-bit word itself, so copies and reuse behave as memory.

Bits: 0-19 pending arrivals, 20-39 expected arrivals, 40-61 transaction count (biased), 62 phase,
63 set while initialised.
"""

import numpy as np

from mok.tools.emulator.intrinsics import ld64, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import MB_TX_BIAS, MB_TX_LIMIT

_I = np.int64
_COUNT = (1 << 20) - 1
_TXMASK = (1 << 22) - 1
_TAG = _I(-(1 << 63))


@njit
def mb_pack(pending, expected, tx, phase):
    return _TAG | (phase << 62) | (((tx + MB_TX_BIAS) & _TXMASK) << 40) | (expected << 20) | pending


@njit
def mb_pending(word):
    return word & _COUNT


@njit
def mb_expected(word):
    return (word >> 20) & _COUNT


@njit
def mb_tx(word):
    return ((word >> 40) & _TXMASK) - MB_TX_BIAS


@njit
def mb_phase(word):
    return (word >> 62) & 1


@njit
def mb_init(host, count):
    st64(host, mb_pack(count, count, _I(0), _I(0)))


@njit
def mb_valid(host):
    return ld64(host) < 0


@njit
def mb_update(host, arrivals, tx):
    """Applies arrivals and a transaction-count change; flips the phase when both are met.

    Returns 0, 1 when more arrived than the phase expects, or 2 for more bytes than an mbarrier counts.
    """
    word = ld64(host)
    pending = mb_pending(word) - arrivals
    expected = mb_expected(word)
    count = mb_tx(word) + tx
    phase = mb_phase(word)
    if pending < 0:
        return 1
    if count > MB_TX_LIMIT or count < -MB_TX_LIMIT:
        return 2
    if pending == 0 and count == 0:
        pending = expected
        phase ^= 1
    st64(host, mb_pack(pending, expected, count, phase))
    return 0
