"""SwiGLU and its derivative on FP32 values: the one place that knows the formulas and their rounding."""

from typing import NamedTuple

from cutlass import Float32

from .. import ptx
from ..sync import select_f32


class Gated(NamedTuple):
    """The pieces that forward and backward share."""

    up: Float32  # clamped
    sigmoid: Float32
    silu: Float32
    hidden: Float32


def gated(gate: Float32, up: Float32, limit: Float32 | None) -> Gated:
    """hidden = silu(min(gate, limit)) * clamp(up, -limit, limit) in FP32.

    ``limit`` None and infinity clamp nothing and give the same bits.

    silu(g) = g * rcp(1 + ex2(-g*log2 e)). The clamp is upstream's ``swiglu_limit``. NaN propagates.
    """
    if limit is not None:
        gate = ptx.min_nan(gate, limit)
        up = ptx.max_nan(ptx.min_nan(up, limit), ptx.mul_rn(limit, Float32(-1.0)))
    exponential = ptx.ex2(ptx.mul_rn(gate, Float32(-ptx.LOG2_E)))
    sigmoid = ptx.rcp(ptx.add_rn(exponential, Float32(1.0)))
    silu = ptx.mul_rn(gate, sigmoid)
    return Gated(up, sigmoid, silu, ptx.mul_rn(silu, up))


def swiglu(gate: Float32, up: Float32, limit: Float32 | None) -> Float32:
    """The activation alone."""
    return gated(gate, up, limit).hidden


class Gradients(NamedTuple):
    """What backward needs of one element."""

    gate: Float32  # gradient of the gate pre-activation, times the router weight
    up: Float32
    hidden: Float32  # the activation itself, unscaled: the router gradient's factor
    weighted: Float32  # router weight * hidden, for the weight gradient of down


def swiglu_backward(
    gate: Float32, up: Float32, d_hidden: Float32, weight: Float32, limit: Float32 | None
) -> Gradients:
    """Gradients for d_hidden = dy·W_down of an unweighted route and its router ``weight``.

    silu'(g) = s + silu(g)*(1 - s) with s = sigmoid(g). Where the clamp was active the gradient is 0.
    """
    g = gated(gate, up, limit)
    scaled = ptx.mul_rn(weight, d_hidden)
    slope = ptx.fma_rn(g.silu, ptx.sub_rn(Float32(1.0), g.sigmoid), g.sigmoid)
    d_gate = ptx.mul_rn(ptx.mul_rn(scaled, g.up), slope)
    d_up = ptx.mul_rn(scaled, g.silu)
    if limit is not None:
        zero = Float32(0.0)
        clamped = (up > limit) | (up < ptx.mul_rn(limit, Float32(-1.0)))
        d_gate = select_f32(gate > limit, zero, d_gate)
        d_up = select_f32(clamped, zero, d_up)
    return Gradients(d_gate, d_up, g.hidden, ptx.mul_rn(weight, g.hidden))
