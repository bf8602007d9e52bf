"""float32 to codes in registers, by integer arithmetic: the rounding of `elements.py` on any GPU.

All round to nearest with ties to the even code. Bits that are cut off are rounded by adding half of the last kept place
(less one unit, plus the last kept bit); numbers below the smallest normal one by adding a power of two whose unit is
their step.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.jit import jit


@jit
def _sign(x: tl.tensor) -> tl.tensor:
    """0x80 for a negative number, -0.0 or a NaN with a sign; int32."""
    return (x.to(tl.int32, bitcast=True) >> 24) & 0x80


@jit
def round_half_even(a: tl.tensor) -> tl.tensor:
    """Nearest integer of 0 <= a < 2^22, as float32."""
    return (a + 8388608.0) - 8388608.0


@jit
def f32_to_e2m1(x: tl.tensor) -> tl.tensor:
    """FP4 codes 0..15, int32; a negative number that rounds to zero keeps its sign, -0.0 and NaN become 0."""
    a = tl.where(x == x, tl.minimum(tl.abs(x), 6.0), 0.0)
    low = round_half_even(a * 2.0)  # steps of 1/2 below 2, of 1 below 4, then of 2
    middle = 4.0 + round_half_even(tl.maximum(a - 2.0, 0.0))
    high = 6.0 + round_half_even(tl.maximum(a - 4.0, 0.0) * 0.5)
    magnitude = tl.where(a < 2.0, low, tl.where(a < 4.0, middle, high))
    return magnitude.to(tl.int32) | tl.where(x < 0, 8, 0)


@jit
def f32_to_e4m3(x: tl.tensor) -> tl.tensor:
    """FP8 E4M3 codes, int32: +-448 at most, NaN 0x7f with the sign of x."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (a + 16384.0).to(tl.int32, bitcast=True) & 0xF  # units of 2^-9
    return tl.where(x == x, tl.where(a < 0.015625, small, normal), 0x7F) | _sign(x)


@jit
def f32_to_e5m2(x: tl.tensor) -> tl.tensor:
    """FP8 E5M2 codes, int32: +-57344 at most, NaN 0x7e with the sign of x."""
    a = tl.minimum(tl.abs(x), 57344.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    small = (a + 128.0).to(tl.int32, bitcast=True) & 0x7  # units of 2^-16
    return tl.where(x == x, tl.where(a < 6.103515625e-05, small, normal), 0x7E) | _sign(x)


@jit
def f32_to_bf16(x: tl.tensor) -> tl.tensor:
    """Bits of bfloat16, int32; NaN 0x7fc0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32)
    return tl.where(x == x, rounded, 0x7FC0)


@jit
def f32_to_f16(x: tl.tensor) -> tl.tensor:
    """Bits of float16, int32."""
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@jit
def f32_to_stored(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Codes of one of the formats that have a code to itself: bf16, f16, e4m3, e5m2; int32."""
    if FORMAT == "bf16":
        return f32_to_bf16(x)
    elif FORMAT == "f16":
        return f32_to_f16(x)
    elif FORMAT == "e4m3":
        return f32_to_e4m3(x)
    else:
        tl.static_assert(FORMAT == "e5m2", "unknown format")
        return f32_to_e5m2(x)


@jit
def largest(x_GN: tl.tensor) -> tl.tensor:
    """Largest magnitude of each row [G], NaN for a row with one: a maximum alone would drop it."""
    any_nan = tl.max((x_GN != x_GN).to(tl.int32), 1)
    return tl.where(any_nan > 0, float("nan"), tl.max(tl.where(x_GN == x_GN, tl.abs(x_GN), 0.0), 1))
