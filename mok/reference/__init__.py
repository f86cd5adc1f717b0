"""What the layer must compute, in plain torch, on any device.

* ``schedule_reference``: the schedule, exactly as the kernels build it.
* ``forward_reference``: the layer as the kernel computes it, rounding points included.
* ``forward_loop``, ``forward_oracle``: the mathematics alone, in FP64 or FP32.
* ``random_case``, ``integer_case``, ``routing``: inputs.
"""

from mok.reference.cases import ROUTINGS, Case, Experts, integer_case, random_case, routing
from mok.reference.layer import forward_reference, swiglu, token_sum
from mok.reference.oracle import BF16_LIMIT, forward_loop, forward_oracle, relative_l2
from mok.reference.precision import fma32, ieee_matmul
from mok.reference.schedule import RankSchedule, schedule_reference, token_order

__all__ = [
    "BF16_LIMIT",
    "ROUTINGS",
    "Case",
    "Experts",
    "RankSchedule",
    "fma32",
    "forward_loop",
    "forward_oracle",
    "forward_reference",
    "ieee_matmul",
    "integer_case",
    "random_case",
    "relative_l2",
    "routing",
    "schedule_reference",
    "swiglu",
    "token_order",
    "token_sum",
]
