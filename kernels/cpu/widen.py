"""16 stored numbers to 16 float32, as LLVM vector code: the value of every code is exact.

`b` is an LLVM builder, `codes` or `bits` a vector of 16 integers of the stored width. float16 does the work where it
can: CPUs convert it in one instruction, subnormal numbers included. Where one does not (x86 before 2012), LLVM would
call a function that nobody provides, so there it is integer arithmetic.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import config
from numba.core.codegen import get_host_cpu_features

_LANES = 16
_INTS, _FLOATS = ir.VectorType(ir.IntType(32), _LANES), ir.VectorType(ir.FloatType(), _LANES)
_HALVES = ir.VectorType(ir.IntType(16), _LANES)


def features() -> str:
    """The instruction sets that code is generated for: Numba's setting, or what the CPU has."""
    chosen = config.CPU_FEATURES  # type: ignore[attr-defined]
    return str(get_host_cpu_features() if chosen is None else chosen)  # type: ignore[no-untyped-call]


def _converts_float16() -> bool:
    return binding.get_process_triple().startswith(("aarch64", "arm64")) or "+f16c" in features()


def _all(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def e4m3_to_f32(b: Any, codes: Any) -> Any:
    """Exact: the code's 7 magnitude bits are those of a float16 that is 2^8 smaller, subnormals too; 0x7f is NaN."""
    wide = b.zext(codes, _HALVES)
    magnitude = b.and_(wide, _all(_HALVES, 0x7F))
    sign = b.shl(b.and_(wide, _all(_HALVES, 0x80)), _all(_HALVES, 8))
    bits = b.or_(b.shl(magnitude, _all(_HALVES, 7)), sign)
    nan = b.icmp_unsigned("==", magnitude, _all(_HALVES, 0x7F))
    bits = b.select(nan, _all(_HALVES, 0x7E00), bits)
    return b.fmul(f16_to_f32(b, bits), _all(_FLOATS, 256.0))


def e5m2_to_f32(b: Any, codes: Any) -> Any:
    """Exact: an E5M2 code is the upper byte of a float16."""
    return f16_to_f32(b, b.shl(b.zext(codes, _HALVES), _all(_HALVES, 8)))


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
    """Exact, for any number of lanes."""
    lanes = bits.type.count
    floats, ints = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(32), lanes)
    if _converts_float16():
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), floats)
    wide = b.zext(bits, ints)
    magnitude = b.shl(b.and_(wide, _all(ints, 0x7FFF)), _all(ints, 13))
    sign = b.shl(b.and_(wide, _all(ints, 0x8000)), _all(ints, 16))
    special = b.icmp_unsigned(">=", magnitude, _all(ints, 31 << 23))  # infinity and NaN keep the largest exponent
    normal = b.add(magnitude, b.select(special, _all(ints, 224 << 23), _all(ints, 112 << 23)))
    one_up = b.bitcast(b.add(magnitude, _all(ints, 113 << 23)), floats)  # 2^-14 more than the subnormal number
    tiny = b.bitcast(b.fsub(one_up, _all(floats, 2.0**-14)), ints)
    subnormal = b.icmp_unsigned("<", magnitude, _all(ints, 1 << 23))
    return b.bitcast(b.or_(b.select(subnormal, tiny, normal), sign), floats)
