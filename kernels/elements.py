"""The number formats of quantised weights: one table, every code, and exact encoders.

Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0), OCP 8-bit Floating Point 1.0 (e4m3, e5m2); int4 is the offset-binary
nibble of compressed-tensors, GPTQ and AWQ. These numpy encoders are the readable definition that tests and references
use; the product's loops are the Numba twins in `cpu/convert.py`.

All encoders take float32, return uint8 codes of the same shape, round to nearest with ties to the even code, and
saturate: a magnitude above the largest finite value, infinity too, becomes that largest value. What else each does:

    int4   code c stands for c - 8; NaN has no code and becomes 8 (the value 0)
    e2m1   sign bit 8; exactly -0.0 becomes code 0, a negative number that rounds to zero keeps its sign (code 8), as
           NVIDIA's ModelOpt writes them; NaN has no code and becomes 0
    e4m3   the "fn" variant: no infinities, NaN is 0x7f or 0xff with the sign of the input, -0.0 is 0x80
    e5m2   as IEEE, but infinities saturate as well; NaN is 0x7e or 0xfe with the sign of the input
    e8m0   a power of two without sign: nearest in value, a tie (1.5 * 2^k) goes up; 0 and negative numbers become
           code 0 (2^-127), NaN is 255
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """One number format: `values[code]` is what a code stands for (float32, NaN where it is not a number).

    bits  width of one code;  max  largest finite value;  smallest  smallest positive value
    """

    name: str
    bits: int
    values: F32
    max: float
    smallest: float


def _float_values(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float64]:
    """Value of every code of a sign-exponent-mantissa format, before its special codes are taken out."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(code >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
    values: NDArray[np.float64] = np.ldexp(sign * (hidden + mantissa), np.maximum(exponent, 1) - bias - mantissa_bits)
    return values


def _frozen(values: NDArray[Any], special: dict[int, float]) -> F32:
    table = values.astype(np.float32)
    for code, value in special.items():
        table[code] = value
    table.flags.writeable = False
    return table


_NAN, _INF = float("nan"), float("inf")
_E5M2_SPECIAL = dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), _NAN) | {0x7C: _INF, 0xFC: -_INF}

INT4_VALUES: F32 = _frozen(np.arange(-8, 8), {})
E2M1_VALUES: F32 = _frozen(_float_values(2, 1, 1), {})
E4M3_VALUES: F32 = _frozen(_float_values(4, 3, 7), {0x7F: _NAN, 0xFF: _NAN})
E5M2_VALUES: F32 = _frozen(_float_values(5, 2, 15), _E5M2_SPECIAL)
E8M0_VALUES: F32 = _frozen(np.ldexp(1.0, np.minimum(np.arange(256), 254) - 127), {255: _NAN})

ELEMENTS: dict[str, Element] = {
    "int4": Element("int4", 4, INT4_VALUES, 7.0, 1.0),
    "e2m1": Element("e2m1", 4, E2M1_VALUES, 6.0, 0.5),
    "e4m3": Element("e4m3", 8, E4M3_VALUES, 448.0, 2.0**-9),
    "e5m2": Element("e5m2", 8, E5M2_VALUES, 57344.0, 2.0**-16),
    "e8m0": Element("e8m0", 8, E8M0_VALUES, 2.0**127, 2.0**-127),
}


def _nearest(magnitude: F32, values: F32) -> NDArray[np.int64]:
    """Index of the value nearest to each magnitude; `values` ascend, ties go to the even index, NaN to the last one.

    Two neighbours of these formats differ in few bits, so their midpoint is a float32 and the comparison is exact.
    """
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    low = np.searchsorted(middle, magnitude, side="left")
    high = np.searchsorted(middle, magnitude, side="right")
    return np.where(low % 2 == 0, low, high)


def encode_int4(x: F32) -> U8:
    """Offset-binary nibbles 0..15 of `x` rounded to -8..7."""
    q = np.clip(np.rint(x), np.float32(-8), np.float32(7))
    return (np.where(np.isnan(q), np.float32(0), q) + 8).astype(np.uint8)


def encode_e2m1(x: F32) -> U8:
    """FP4 codes 0..15 of `x`."""
    magnitude = np.where(np.isnan(x), np.float32(0), np.abs(x))
    return (_nearest(magnitude, E2M1_VALUES[:8]) + np.where(x < 0, 8, 0)).astype(np.uint8)


def encode_e4m3(x: F32) -> U8:
    """FP8 E4M3 codes of `x`, 0x7e (448) at most in magnitude."""
    code = np.where(np.isnan(x), 0x7F, _nearest(np.abs(x), E4M3_VALUES[:0x7F]))
    return (code + np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def encode_e5m2(x: F32) -> U8:
    """FP8 E5M2 codes of `x`, 0x7b (57344) at most in magnitude."""
    code = np.where(np.isnan(x), 0x7E, _nearest(np.abs(x), E5M2_VALUES[:0x7C]))
    return (code + np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def encode_e8m0(x: F32) -> U8:
    """Power-of-two codes of `x`: value 2^(code - 127)."""
    middle = np.ldexp(np.float32(1.5), np.arange(-127, 127)).astype(np.float32)
    return np.where(np.isnan(x), 255, np.searchsorted(middle, x, side="right")).astype(np.uint8)
