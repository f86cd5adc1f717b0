"""SwiGLU on FP32 accumulators: the one place that knows the formula and its rounding."""

from cutlass import Float32

from .. import ptx


def swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in FP32; ``limit`` = inf clamps nothing.

    silu(g) = g * rcp(1 + ex2(-g*log2 e)). The clamp is upstream's ``swiglu_limit``. NaN propagates.
    """
    gate = ptx.min_nan(gate, limit)
    up = ptx.max_nan(ptx.min_nan(up, limit), ptx.mul_rn(limit, Float32(-1.0)))
    exponential = ptx.ex2(ptx.mul_rn(gate, Float32(-ptx.LOG2_E)))
    sigmoid = ptx.rcp(ptx.add_rn(exponential, Float32(1.0)))
    return ptx.mul_rn(ptx.mul_rn(gate, sigmoid), up)
