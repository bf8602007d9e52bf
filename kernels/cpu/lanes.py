"""What packed kernels do with lanes: look a code up, repeat the scale of a group, raise e to a power.

Companion of `simd.py`; its vectors have 16 lanes of float32 or int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd, widen

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_F32, simd.LANES), ir.VectorType(_I32, simd.LANES)


def _lookup_avx512(builder: Any, table: Any, index: Any) -> Any:
    """One instruction, which looks at the lowest four bits only."""
    return simd.call(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, [table, index])


def _lookup_avx2(builder: Any, table: Any, index: Any) -> Any:
    """Two tables of eight, which look at three bits; bit 3 says whose answer counts."""
    eight = ir.VectorType(_F32, 8)
    halves = [builder.shuffle_vector(table, table, simd.mask(range(at, at + 8))) for at in (0, 8)]
    found = []
    for at in (0, 8):
        lanes = builder.shuffle_vector(index, index, simd.mask(range(at, at + 8)))
        low, high = (simd.call(builder, "llvm.x86.avx2.permps", eight, [h, lanes]) for h in halves)
        upper = builder.shl(lanes, ir.Constant(ir.VectorType(_I32, 8), [28] * 8))
        zero = ir.Constant(ir.VectorType(_I32, 8), [0] * 8)
        found.append(builder.select(builder.icmp_signed("<", upper, zero), high, low))
    return builder.shuffle_vector(found[0], found[1], simd.mask(range(16)))


def _lookup_plain(builder: Any, table: Any, index: Any) -> Any:
    """Lane by lane, for every other CPU."""
    result = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(simd.LANES):
        at = builder.and_(builder.extract_element(index, ir.Constant(_I32, lane)), ir.Constant(_I32, 15))
        result = builder.insert_element(result, builder.extract_element(table, at), ir.Constant(_I32, lane))
    return result


@simd.operation
def lookup(typing: Any, table: Any, index: Any) -> Any:
    """table[index & 15] for each lane: `table` is 16 float32, `index` int32 whose upper bits do not matter."""
    features = widen.features()
    if "+avx512f" in features:
        look = _lookup_avx512
    elif "+avx2" in features:
        look = _lookup_avx2
    else:
        look = _lookup_plain
    floats, ints = simd.Vector("f", simd.LANES), simd.Vector("i", simd.LANES)
    return floats(floats, ints), lambda context, builder, sig, args: look(builder, args[0], args[1])


def _repeat(each: int) -> Any:
    """An intrinsic (array, at) -> 16 / each consecutive float32, every one in `each` neighbouring lanes."""

    def repeat(typing: Any, array: Any, at: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            few = ir.VectorType(_F32, simd.LANES // each)
            v = builder.load(simd.pointer(context, builder, array, args[0], args[1], few), align=4)
            return builder.shuffle_vector(v, v, simd.mask([i // each for i in range(simd.LANES)]))

        return simd.Vector("f", simd.LANES)(array, types.intp), build

    return simd.operation(repeat)


repeat_2, repeat_4, repeat_8, repeat_16 = _repeat(2), _repeat(4), _repeat(8), _repeat(16)


@njit(nogil=True, cache=True, error_model="numpy")
def repeat(array: NDArray[np.float32], at: int, each: int) -> Any:
    """16 / each float32 from index `at` on, every one in `each` lanes (2, 4, 8 or 16)."""
    if each == 2:
        return repeat_2(array, at)
    if each == 4:
        return repeat_4(array, at)
    if each == 8:
        return repeat_8(array, at)
    return repeat_16(array, at)


@njit(nogil=True, cache=True, error_model="numpy")
def aligned_zeros(size: int) -> NDArray[np.float32]:
    """Zeros that begin at a cache line: a vector that lies in two lines costs two accesses."""
    zeros = np.zeros(size + simd.LANES, np.float32)
    skip = -(zeros.ctypes.data // 4) % simd.LANES
    return zeros[skip : skip + size]


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# (e^x - 1 - x) / x^2 on [-ln 2 / 2, ln 2 / 2], highest power first: the coefficients of Cephes' expf.
_EXP = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(0.5),
)


@njit(nogil=True, cache=True, error_model="numpy")
def exp(x: Any) -> Any:
    """e^x for x <= 0, within 2 units of the last place; below -87 it is 1.6e-38 at most, so that -inf gives (almost) 0.

    What softmax needs: the largest argument is 0.
    """
    x = simd.maximum(x, simd.splat(np.float32(-87.0)))
    k = simd.nearest(simd.mul(x, simd.splat(_LOG2_E)))
    r = simd.fma(k, simd.splat(-_LN2_HIGH), x)
    r = simd.fma(k, simd.splat(-_LN2_LOW), r)
    p = simd.splat(_EXP[0])
    p = simd.fma(p, r, simd.splat(_EXP[1]))
    p = simd.fma(p, r, simd.splat(_EXP[2]))
    p = simd.fma(p, r, simd.splat(_EXP[3]))
    p = simd.fma(p, r, simd.splat(_EXP[4]))
    p = simd.fma(p, r, simd.splat(_EXP[5]))
    y = simd.add(simd.fma(p, simd.mul(r, r), r), simd.splat(np.float32(1.0)))
    bias = simd.splat_i32(np.int32(127))
    return simd.mul(y, simd.as_f32(simd.shift_left(simd.add_i32(simd.to_i32(k), bias), 23)))
