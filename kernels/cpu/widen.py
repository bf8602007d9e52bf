"""16 stored numbers to 16 float32, as LLVM vector code: the value of every code is exact.

`b` is an LLVM builder, `codes` or `bits` a vector of 16 integers of the stored width. float16 does the work where it
can: CPUs convert it in one instruction, subnormal numbers included.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

_LANES = 16
_INTS, _FLOATS = ir.VectorType(ir.IntType(32), _LANES), ir.VectorType(ir.FloatType(), _LANES)
_HALVES, _FLOAT16S = ir.VectorType(ir.IntType(16), _LANES), ir.VectorType(ir.HalfType(), _LANES)


def _all(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * _LANES)


def e4m3_to_f32(b: Any, codes: Any) -> Any:
    """Exact: the code's 7 magnitude bits are those of a float16 that is 2^8 smaller, subnormals too; 0x7f is NaN."""
    wide = b.zext(codes, _HALVES)
    magnitude = b.and_(wide, _all(_HALVES, 0x7F))
    sign = b.shl(b.and_(wide, _all(_HALVES, 0x80)), _all(_HALVES, 8))
    bits = b.or_(b.shl(magnitude, _all(_HALVES, 7)), sign)
    nan = b.icmp_unsigned("==", magnitude, _all(_HALVES, 0x7F))
    bits = b.select(nan, _all(_HALVES, 0x7E00), bits)
    value = b.fpext(b.bitcast(bits, _FLOAT16S), _FLOATS)
    return b.fmul(value, _all(_FLOATS, 256.0))


def e5m2_to_f32(b: Any, codes: Any) -> Any:
    """Exact: an E5M2 code is the upper byte of a float16."""
    bits = b.shl(b.zext(codes, _HALVES), _all(_HALVES, 8))
    return b.fpext(b.bitcast(bits, _FLOAT16S), _FLOATS)


def e8m0_to_f32(b: Any, codes: Any) -> Any:
    """Exact: a code is the exponent field of a float32; 0 stands for the subnormal 2^-127, 255 for NaN."""
    wide = b.zext(codes, _INTS)
    bits = b.shl(wide, _all(_INTS, 23))
    for code, special in ((0, 0x00400000), (255, 0x7FC00000)):
        found = b.icmp_unsigned("==", wide, _all(_INTS, code))
        bits = b.select(found, _all(_INTS, special), bits)
    return b.bitcast(bits, _FLOATS)


def bf16_to_f32(b: Any, bits: Any) -> Any:
    """Exact: bfloat16 is the upper half of a float32."""
    return b.bitcast(b.shl(b.zext(bits, _INTS), _all(_INTS, 16)), _FLOATS)


def f16_to_f32(b: Any, bits: Any) -> Any:
    """Exact."""
    return b.fpext(b.bitcast(bits, _FLOAT16S), _FLOATS)
