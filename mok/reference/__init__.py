"""What the layer must compute, in plain torch, on any device.

* ``schedule_reference``: the schedule, exactly as the kernels build it.
* ``forward_reference``, ``backward_reference``: the layer and its gradients as the kernels compute
  them, rounding points included.
* ``forward_loop``, ``forward_oracle``, ``backward_loop``, ``backward_oracle``: the mathematics
  alone, in FP64 or FP32.
* ``quantise``, ``expand``, ``tile_scales``: MXFP8. The scheduled references take
  ``precision="mxfp8"``.
* ``random_case``, ``integer_case``, ``routing``, ``random_gradient``, ``integer_gradient``: inputs.
"""

from mok.reference.backward import Gradients, backward_reference, swiglu_backward
from mok.reference.cases import (
    ROUTINGS,
    Case,
    Experts,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
    routing,
)
from mok.reference.gradients import backward_loop, backward_oracle
from mok.reference.layer import forward_reference, swiglu, token_sum
from mok.reference.mxfp8 import (
    FP32_COSINE_LIMIT,
    FP32_GRADIENT_LIMIT,
    FP32_LIMIT,
    MXFP8_LIMIT,
    Quantised,
    expand,
    quantise,
    scale_codes,
    through_mxfp8,
    tile_scales,
    untile_scales,
)
from mok.reference.oracle import (
    BF16_LIMIT,
    GRADIENT_LIMIT,
    cosine,
    forward_loop,
    forward_oracle,
    relative_l2,
)
from mok.reference.precision import fma32, ieee_matmul
from mok.reference.schedule import RankSchedule, schedule_reference, token_order

__all__ = [
    "BF16_LIMIT",
    "FP32_COSINE_LIMIT",
    "FP32_GRADIENT_LIMIT",
    "FP32_LIMIT",
    "GRADIENT_LIMIT",
    "MXFP8_LIMIT",
    "ROUTINGS",
    "Case",
    "Experts",
    "Gradients",
    "Quantised",
    "RankSchedule",
    "backward_loop",
    "backward_oracle",
    "backward_reference",
    "cosine",
    "expand",
    "fma32",
    "forward_loop",
    "forward_oracle",
    "forward_reference",
    "ieee_matmul",
    "integer_case",
    "integer_gradient",
    "quantise",
    "random_case",
    "random_gradient",
    "relative_l2",
    "routing",
    "scale_codes",
    "schedule_reference",
    "swiglu",
    "swiglu_backward",
    "through_mxfp8",
    "tile_scales",
    "token_order",
    "token_sum",
    "untile_scales",
]
