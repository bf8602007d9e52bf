"""Scalar number conversions for Numba loops, and whole-array ones between bfloat16, float16 and float32.

Numba has no bfloat16, float16 or FP8 type: such numbers travel as their bits (uint16, uint8). Every function here is
exact: round to nearest, ties to even, subnormal numbers kept, with the rules of `elements.py` for overflow and NaN. The
branches are written as selects, so that a loop which calls a helper is vectorised. The tricks are two, both old: adding
half of the last kept bit to the integer form of a float rounds it, and adding a large power of two to a small float
lets the FPU round it to a fixed step (used where the result is subnormal).

Array functions take C-contiguous arrays, release the GIL, and write into `out`, which the caller owns.
Shape suffixes: R rows, I inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_F16_SUBNORMAL = np.float32(0.5)  # its last bit is 2^-24, the step of subnormal float16
_E4M3_SUBNORMAL = np.float32(16384.0)  # its last bit is 2^-9, the step of subnormal e4m3


@njit(nogil=True, cache=True, error_model="numpy")
def bits_of_f32(x: np.float32) -> np.int32:
    """The 32 bits of a float32, as int32."""
    return np.float32(x).view(np.int32)


@njit(nogil=True, cache=True, error_model="numpy")
def f32_of_bits(bits: np.int32) -> np.float32:
    """The float32 with these 32 bits."""
    return np.int32(bits).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_bf16_bits(x: np.float32) -> np.int32:
    """bfloat16 bits (int32, 0..65535). Overflow becomes infinity, NaN stays a (quiet) NaN with its sign."""
    bits = bits_of_f32(x)
    rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    kept = (bits | np.int32(0x400000)) if is_nan else rounded
    return (kept >> np.int32(16)) & np.int32(0xFFFF)


@njit(nogil=True, cache=True, error_model="numpy")
def bf16_bits_to_f32(bits: np.uint16) -> np.float32:
    """Exact."""
    return f32_of_bits(np.int32(bits) << np.int32(16))


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_f16_bits(x: np.float32) -> np.int32:
    """float16 bits (int32, 0..65535). From 65520 on infinity, subnormals rounded, NaN a quiet NaN with its sign."""
    bits = bits_of_f32(x)
    sign = (bits >> np.int32(16)) & np.int32(0x8000)
    a = bits & np.int32(0x7FFFFFFF)
    normal = (a + np.int32(0xFFF) + ((a >> np.int32(13)) & np.int32(1)) - np.int32(112 << 23)) >> np.int32(13)
    tiny = bits_of_f32(f32_of_bits(a) + _F16_SUBNORMAL) - bits_of_f32(_F16_SUBNORMAL)
    special = np.int32(0x7E00) if a > np.int32(0x7F800000) else np.int32(0x7C00)
    finite = tiny if a < np.int32(113 << 23) else normal
    return (special if a >= np.int32(143 << 23) else finite) | sign


@njit(nogil=True, cache=True, error_model="numpy")
def f16_bits_to_f32(bits: np.uint16) -> np.float32:
    """Exact."""
    h = np.int32(bits)
    m = (h & np.int32(0x7FFF)) << np.int32(13)
    tiny = bits_of_f32(f32_of_bits(m + np.int32(113 << 23)) - np.float32(2.0**-14))
    extra = np.int32(224 << 23) if m >= np.int32(31 << 23) else np.int32(112 << 23)
    a = tiny if m < np.int32(1 << 23) else m + extra
    return f32_of_bits(a | ((h & np.int32(0x8000)) << np.int32(16)))


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_e4m3_code(x: np.float32) -> np.int32:
    """E4M3 code (int32, 0..255). Saturates to 448, infinity too; NaN becomes 0x7f or 0xff; -0.0 becomes 0x80."""
    bits = bits_of_f32(x)
    sign = (bits >> np.int32(24)) & np.int32(0x80)
    a = bits & np.int32(0x7FFFFFFF)
    normal = (a + np.int32(0x7FFFF) + ((a >> np.int32(20)) & np.int32(1)) - np.int32(120 << 23)) >> np.int32(20)
    tiny = bits_of_f32(f32_of_bits(a) + _E4M3_SUBNORMAL) - bits_of_f32(_E4M3_SUBNORMAL)
    special = np.int32(0x7F) if a > np.int32(0x7F800000) else np.int32(0x7E)
    finite = tiny if a < np.int32(121 << 23) else normal
    return (special if a >= np.int32(0x43E00000) else finite) | sign


@njit(nogil=True, cache=True, error_model="numpy")
def e4m3_code_to_f32(code: np.uint8 | np.int32) -> np.float32:
    """Exact; 0x7f and 0xff are NaN."""
    c = np.int32(code)
    m = c & np.int32(0x7F)
    tiny = bits_of_f32(np.float32(m) * np.float32(2.0**-9))
    a = tiny if m < np.int32(8) else (m << np.int32(20)) + np.int32(120 << 23)
    a = np.int32(0x7FC00000) if m == np.int32(0x7F) else a
    return f32_of_bits(a | ((c & np.int32(0x80)) << np.int32(24)))


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_e2m1_code(x: np.float32) -> np.int32:
    """E2M1 code (int32, 0..15), ties to the even code, saturating at 6.

    Exactly -0.0 becomes code 0; a negative number that rounds to zero keeps its sign (code 8); NaN becomes 0.
    """
    a = abs(np.float32(x))
    code = np.int32(a > np.float32(0.25)) + np.int32(a >= np.float32(0.75)) + np.int32(a > np.float32(1.25))
    code += np.int32(a >= np.float32(1.75)) + np.int32(a > np.float32(2.5)) + np.int32(a >= np.float32(3.5))
    code += np.int32(a > np.float32(5.0))
    return code | (np.int32(8) if x < np.float32(0) else np.int32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def e2m1_code_to_f32(code: np.uint8 | np.int32) -> np.float32:
    """Exact; code 8 is -0.0."""
    c = np.int32(code)
    m = c & np.int32(7)
    a = np.int32(0x3F000000) if m == np.int32(1) else (m << np.int32(22)) + np.int32(126 << 23)
    a = np.int32(0) if m == np.int32(0) else a
    return f32_of_bits(a | ((c & np.int32(8)) << np.int32(28)))


@njit(nogil=True, cache=True, error_model="numpy")
def bf16_to_f32(u16_RI: NDArray[np.uint16], out_RI: NDArray[np.float32]) -> None:
    """bfloat16 bits to float32, exact."""
    for r in range(u16_RI.shape[0]):
        for i in range(u16_RI.shape[1]):
            out_RI[r, i] = bf16_bits_to_f32(u16_RI[r, i])


@njit(nogil=True, cache=True, error_model="numpy")
def f16_to_f32(u16_RI: NDArray[np.uint16], out_RI: NDArray[np.float32]) -> None:
    """float16 bits to float32, exact."""
    for r in range(u16_RI.shape[0]):
        for i in range(u16_RI.shape[1]):
            out_RI[r, i] = f16_bits_to_f32(u16_RI[r, i])


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_bf16(w_RI: NDArray[np.float32], out_RI: NDArray[np.uint16]) -> None:
    """float32 to bfloat16 bits, to nearest, ties to even."""
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            out_RI[r, i] = f32_to_bf16_bits(w_RI[r, i])


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_f16(w_RI: NDArray[np.float32], out_RI: NDArray[np.uint16]) -> None:
    """float32 to float16 bits, to nearest, ties to even."""
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            out_RI[r, i] = f32_to_f16_bits(w_RI[r, i])


def as_f32(x: NDArray[Any]) -> NDArray[np.float32]:
    """Float32 of float32, float16 or the bits of bfloat16 (uint16), exactly."""
    if x.dtype != np.uint16:
        return x.astype(np.float32, copy=False)
    out = np.empty(x.shape, np.float32)
    width = x.shape[-1] if x.ndim else 1
    bf16_to_f32(x.reshape(-1, max(width, 1)), out.reshape(-1, max(width, 1)))
    return out
