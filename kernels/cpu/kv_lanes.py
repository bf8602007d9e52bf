"""Vector operations of attention beside those of `simd.py`: codes from raw bytes, strided tiles, sums of runs.

A KV cache of any format is one array of bytes here, so that one compiled kernel reads them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from quantkit.kernels.cpu import simd, widen

_LANES = simd.LANES
_F32, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS, _WORDS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
_F32x16, _I32x16 = simd.Vector("f", _LANES), simd.Vector("i", _LANES)


def _loader(result: simd.Vector, stored: Any, widen: Callable[[Any, Any], Any]) -> Any:
    """An operation (bytes, at) -> 16 lanes made of the LLVM vector `stored` that lies at byte `at`."""

    def load(typing: Any, array: Any, at: Any) -> Any:
        if not (isinstance(array, types.Array) and array.dtype == types.uint8 and array.ndim == 1):
            return None

        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = simd.pointer(context, builder, sig.args[0], args[0], args[1], stored)
            return widen(builder, builder.load(place, align=1))

        return result(array, types.intp), build

    return simd.operation(load)


def _e4m3(b: Any, codes: Any) -> Any:
    """Exact: sign and magnitude in their places in a float16, which is then 2^8 too small; 0x7f and 0xff are NaN."""
    halves, bytes_ = ir.VectorType(_I16, 2 * _LANES), ir.VectorType(_I8, 2 * _LANES)
    seven = ir.Constant(bytes_, [0x7F] * 2 * _LANES)
    nan = b.icmp_unsigned("==", b.and_(codes, seven), seven)
    shifted = b.shl(b.sext(codes, halves), ir.Constant(halves, [7] * 2 * _LANES))  # the sign twice, then the magnitude
    bits = b.and_(shifted, ir.Constant(halves, [0xBF80] * 2 * _LANES))
    bits = b.select(nan, ir.Constant(halves, [0x7E00] * 2 * _LANES), bits)
    return widen.f16_to_f32(b, bits)


def _nibbles(b: Any, codes: Any) -> Any:
    wide = b.zext(codes, ir.VectorType(_I32, 8))
    twice = b.shuffle_vector(wide, wide, simd.mask([i // 2 for i in range(_LANES)]))
    return b.lshr(twice, ir.Constant(_WORDS, [0, 4] * 8))


load_bf16 = _loader(_F32x16, ir.VectorType(_I16, _LANES), widen.bf16_to_f32)
load_f16 = _loader(_F32x16, ir.VectorType(_I16, _LANES), widen.f16_to_f32)
# 32 e4m3 codes, their values divided by 256: twice as fast as two loads of 16, and the factor goes into a scale
load_e4m3_256th = _loader(simd.Vector("f", 2 * _LANES), ir.VectorType(_I8, 2 * _LANES), _e4m3)
# 8 bytes as 16 int32 whose lowest four bits are the nibbles, low nibble first; the bits above are not cleared
load_nibbles = _loader(_I32x16, ir.VectorType(_I8, 8), _nibbles)


@simd.operation
def spread(typing: Any, array: Any, at: Any) -> Any:
    """The float32 at index `at` in 16 lanes; unlike `splat(array[at])` it looks at no sign of the index."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one = builder.load(simd.pointer(context, builder, array, args[0], args[1], _F32), align=4)
        empty = ir.Constant(_FLOATS, ir.Undefined)
        lane = builder.insert_element(empty, one, ir.Constant(_I32, 0))
        return builder.shuffle_vector(lane, empty, simd.mask([0] * _LANES))

    return _F32x16(array, types.intp), build


@simd.operation
def highest(typing: Any, v: Any) -> Any:
    """The largest of 16 lanes; of two of which one is not a number either may win."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        most = args[0]
        for half in (8, 4, 2, 1):
            other = builder.shuffle_vector(most, most, simd.mask([(i + half) % _LANES for i in range(_LANES)]))
            most = builder.select(builder.fcmp_ordered(">", other, most), other, most)
        return builder.extract_element(most, ir.Constant(_I32, 0))

    return types.float32(v), build


@simd.operation
def f32_at(typing: Any, array: Any, at: Any) -> Any:
    """The float32 that lies at byte `at` of an array of bytes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(simd.pointer(context, builder, sig.args[0], args[0], args[1], _F32), align=1)

    return types.float32(array, types.intp), build


@simd.operation
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of byte `at` of an array of bytes; nothing waits for it."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = simd.pointer(context, builder, sig.args[0], args[0], args[1], _I8)
        how = [ir.Constant(_I32, n) for n in (0, 2, 1)]  # to read, not into the first level, data
        simd.call(builder, "llvm.prefetch.p0i8", ir.VoidType(), [place, *how])
        return context.get_dummy_value()

    return types.none(array, types.intp), build


@simd.operation
def load_strided(typing: Any, array: Any, at: Any, stride: Any, like: Any) -> Any:
    """A tile like `like` of float32: 16 lanes from index `at`, the next 16 from `at` + `stride`, and so on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts, index = [], args[1]
        for _ in range(like.width // _LANES):
            parts.append(builder.load(simd.pointer(context, builder, array, args[0], index, _FLOATS), align=4))
            index = builder.add(index, args[2])
        return _join(builder, parts)

    return like(array, types.intp, types.intp, like), build


def _join(builder: Any, parts: list[Any]) -> Any:
    """Vectors of equal width, one after the other; their number is a power of two."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        parts = [builder.shuffle_vector(x, y, simd.mask(range(width))) for x, y in zip(*[iter(parts)] * 2, strict=True)]
    return parts[0]


def _fold(builder: Any, x: Any, y: Any, half: int) -> Any:
    """Add the upper to the lower half of each run of 2 `half` lanes, of `x` and then of `y`."""
    low = [at + i for at in range(0, 2 * _LANES, 2 * half) for i in range(half)]
    lower = builder.shuffle_vector(x, y, simd.mask(low))
    upper = builder.shuffle_vector(x, y, simd.mask([i + half for i in low]))
    return builder.fadd(lower, upper)


@simd.operation
def sums(typing: Any, v: Any) -> Any:
    """The sum of each run of 16 lanes of a tile of 256, all in one order: lane i with i + 8, then i + 4, + 2, + 1."""
    if not (isinstance(v, simd.Vector) and v.kind == "f" and v.width == _LANES * _LANES):
        return None

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        runs = range(0, v.width, _LANES)
        parts = [builder.shuffle_vector(args[0], args[0], simd.mask(range(at, at + _LANES))) for at in runs]
        for half in (8, 4, 2, 1):
            parts = [_fold(builder, x, y, half) for x, y in zip(parts[0::2], parts[1::2], strict=True)]
        return parts[0]

    return _F32x16(v), build
