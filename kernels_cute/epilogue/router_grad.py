"""The router-weight gradient d_w = Σ d·hidden: its order of additions, in one place.

Three fixed steps make the sum independent of tiles, ranks and tunables. A thread adds its 16 columns of a
64-column group, ascending, with one fma.rn each; the four threads of a row add in butterfly order; the
groups of a row are summed by one warp, lane l taking groups l, l+32, …, then a butterfly over the lanes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import ptx


def add_butterfly(value: Float32, lanes: int) -> Float32:
    """The sum over ``lanes`` neighbouring lanes (a power of two), the same bits in each of them."""
    step = lanes // 2
    while step > 0:
        value = ptx.add_rn(value, cute.arch.shuffle_sync_bfly(value, offset=step))
        step //= 2
    return value


@cute.jit
def sum_groups(partials: cute.Pointer, groups: Int32) -> Float32:
    """One warp adds a row's ``groups`` FP32 partials; every lane gets the sum."""
    total = Float32(0.0)
    for i in cutlass.range(cute.arch.lane_idx(), groups, 32, unroll=1):
        total = ptx.add_rn(total, cute.arch.load(partials + i, Float32))
    return add_butterfly(total, 32)


@cute.jit
def sum_groups_of_rows(partials: cute.Pointer, groups: Int32, count: cutlass.Constexpr[int]):
    """``sum_groups`` of ``count`` rows, one behind another in memory, whose loads do not wait for each other.

    Lanes without a group add 0, which changes no bit: a sum that began with +0 is not -0.
    """
    totals = tuple([Float32(0.0)] * count)
    for first in cutlass.range(0, groups, 32, unroll=1):
        i = first + cute.arch.lane_idx()
        begin = partials.toint() + Int64(i * 4)
        step = Int64(groups * 4)  # bytes of a row
        values = [ptx.load_if(begin + row * step, i < groups, Float32(0.0)) for row in range(count)]
        totals = tuple([ptx.add_rn(totals[row], values[row]) for row in range(count)])
    return tuple([add_butterfly(total, 32) for total in totals])
