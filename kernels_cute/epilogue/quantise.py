"""Quantising finished columns in the registers of the warps that computed them."""

from cutlass import Uint32

from .. import mxfp8


def wgmma_columns(packed: list[Uint32]) -> list[Uint32]:
    """64 columns in wgmma's accumulator order, quantised along the row and expanded to BF16 again.

    ``packed``: a thread's 16 BF16x2 as ``Staging.write`` takes them, per 8 columns two of row lane/4 and
    two of row lane/4 + 8. Four neighbouring lanes hold a row.
    """
    result = list(packed)
    for block in range(2):
        for half in range(2):
            places = [2 * j + half for j in range(4 * block, 4 * block + 4)]
            pairs = [packed[i] for i in places]
            most = mxfp8.magnitude_of_lanes(mxfp8.magnitude(pairs), 4)
            for place, value in zip(places, mxfp8.through(pairs, mxfp8.scale_code(most))):
                result[place] = value
    return result
