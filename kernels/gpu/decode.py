"""Codes to float32 in registers, by integer arithmetic: exact for every code, on any GPU.

A float of few bits becomes one of many by moving its exponent and mantissa to their places and multiplying by the power
of two that corrects the bias; numbers below the smallest normal one come out right as well, because their bits are a
float32 below the normal ones. NaN codes give NaN. Formats are those of `elements.py`.

`NATIVE` takes the instruction that Ada and later GPUs have for E4M3; the result is the same.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.jit import jit


@jit
def e2m1_to_f32(code: tl.tensor) -> tl.tensor:
    """FP4 codes 0..15, any integer type; code 8 is -0.0."""
    c = code.to(tl.int32)
    bits = ((c & 7) << 22) | ((c & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@jit
def e4m3_to_f32(code: tl.tensor, NATIVE: tl.constexpr = False) -> tl.tensor:
    """uint8 codes of FP8 E4M3 ("fn": no infinities)."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    c = code.to(tl.int32)
    bits = ((c & 0x7F) << 20) | ((c & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((c & 0x7F) == 0x7F, float("nan"), value)


@jit
def e5m2_to_f32(code: tl.tensor) -> tl.tensor:
    """uint8 codes of FP8 E5M2: the upper half of a float16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def e8m0_to_f32(code: tl.tensor) -> tl.tensor:
    """uint8 codes of powers of two, 2^(code - 127); 255 is NaN."""
    c = code.to(tl.int32)
    value = tl.where(c == 0, 0x400000, c << 23).to(tl.float32, bitcast=True)
    return tl.where(c == 255, float("nan"), value)


@jit
def bf16_to_f32(bits: tl.tensor) -> tl.tensor:
    """Bits of bfloat16 (uint16), the upper half of a float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@jit
def f16_to_f32(bits: tl.tensor) -> tl.tensor:
    """Bits of float16 (uint16)."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@jit
def float_to_f32(x: tl.tensor) -> tl.tensor:
    """A float32, float16 or bfloat16 tensor as float32."""
    if x.dtype == tl.bfloat16:
        return bf16_to_f32(x.to(tl.uint16, bitcast=True))
    return x.to(tl.float32)


@jit
def stored_to_f32(bits: tl.tensor, FORMAT: tl.constexpr, NATIVE: tl.constexpr = False) -> tl.tensor:
    """Values of one of the formats that have a code to itself: f32, bf16, f16, e4m3, e5m2, e8m0."""
    if FORMAT == "f32":
        return bits
    elif FORMAT == "bf16":
        return bf16_to_f32(bits)
    elif FORMAT == "f16":
        return f16_to_f32(bits)
    elif FORMAT == "e4m3":
        return e4m3_to_f32(bits, NATIVE)
    elif FORMAT == "e5m2":
        return e5m2_to_f32(bits)
    else:
        tl.static_assert(FORMAT == "e8m0", "unknown format")
        return e8m0_to_f32(bits)


@jit
def nibbles(pairs: tl.tensor) -> tl.tensor:
    """Bytes [A, B] to their 4-bit codes [A, 2 B], the low nibble first, as int32."""
    p = pairs.to(tl.int32)
    return tl.join(p & 15, p >> 4).reshape(p.shape[0], 2 * p.shape[1])


@jit
def int4_to_f32(nibble: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Difference nibble - offset of integers 0..15 (int32) and float32 offsets.

    The nibble becomes the last bits of 2^23, whose unit is 1: one subtraction instead of a slow conversion.
    """
    return (nibble | 0x4B000000).to(tl.float32, bitcast=True) - (offset + 8388608.0)
