"""FP8 E4M3 weights: one float32 scale for the tensor, for each row, or for each block of 128 x 128 weights.

    w_hat = e4m3 * scale        scale = amax / 448, rounded to float32; codes are e4m3(w / scale)

Codes come from true float32 division, held to +-448 before they are rounded (an old cast makes NaN of 449), ties to
even; -0.0 stays -0.0, as casts do. A scale of 0 becomes 1.0 (every weight is zero); none is below 2^-126, the smallest
normal float32. `ue8m0` scales are rounded up to a power of two before codes are chosen, so that no weight saturates.
Blocks at the right and lower edge of the matrix may be partial. The plain torch reference is `float8.py`.

Sums of squares run over segments of 128 inputs, padded with zeros and folded by halves (64 + 64, then 32 + 32, ... to
one), segments in order: additions that vectorise and come out the same everywhere.

Shape suffixes: R rows, I inputs, N blocks of 128 rows, G blocks of 128 inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from quantkit.kernels.cpu.convert import bits_of_f32, f32_of_bits

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

BLOCK = 128
_MAX = np.float32(448.0)
SCALE_MIN = np.float32(2.0**-126)
_INF_BITS = np.int32(0x7F800000)  # also the mask of the exponent
_SMALLEST = np.int32(121 << 23)  # bits of 2^-6: below 2^-5 the grid has one step, 2^-9
_MAGIC = np.int32(20 << 23)  # 2^20 times a power of two 2^e has the last bit 2^(e - 3), the step of e4m3 at 2^e


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_of(amax: np.float32, ue8m0: bool) -> np.float32:
    """float32 scale of the largest magnitude `amax`."""
    scale = max(amax / _MAX, SCALE_MIN)
    if amax == np.float32(0):
        scale = np.float32(1)
    if ue8m0:
        scale = f32_of_bits((bits_of_f32(scale) + np.int32(0x7FFFFF)) & _INF_BITS)
    return scale


def fp8_scale(amax: float) -> np.float32:
    """The float32 scale of a tensor whose largest magnitude is `amax`: amax / 448, 1.0 for 0, never below 2^-126."""
    return np.float32(1) if amax == 0 else max(np.float32(amax) / _MAX, SCALE_MIN)


@njit(nogil=True, cache=True, error_model="numpy")
def _amax_bits(w_I: F32, start: int, stop: int) -> np.int32:
    m = np.int32(0)
    for i in range(start, stop):
        m = max(m, bits_of_f32(w_I[i]) & np.int32(0x7FFFFFFF))
    return m


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(w_I: F32, start: int, stop: int, scale: np.float32, codes_I: U8, error: F32) -> None:
    """Codes of w_I[start:stop] under one scale; error[i] = |w| - |w_hat| in float32."""
    for i in range(stop - start):
        w = w_I[start + i]
        a = min(abs(w) / scale, _MAX)
        exponent = max(bits_of_f32(a), _SMALLEST) & _INF_BITS
        magic = exponent + _MAGIC
        y = a + f32_of_bits(magic)
        error[i] = abs(w) - (y - f32_of_bits(magic)) * scale
        code = bits_of_f32(y) - magic + ((exponent - _SMALLEST) >> np.int32(20))
        codes_I[start + i] = code | ((bits_of_f32(w) >> np.int32(24)) & np.int32(0x80))


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_squares(x: F32, at: int, count: int, fold: F64) -> np.float64:
    """Sum of squares of x[at : at + count], count <= 128, folded by halves; `fold` is scratch of 128."""
    for i in range(count):
        v = np.float64(x[at + i])
        fold[i] = v * v
    for i in range(count, BLOCK):
        fold[i] = 0.0
    for i in range(64):
        fold[i] += fold[i + 64]
    for i in range(32):
        fold[i] += fold[i + 32]
    for i in range(16):
        fold[i] += fold[i + 16]
    for i in range(8):
        fold[i] += fold[i + 8]
    for i in range(4):
        fold[i] += fold[i + 4]
    return (fold[0] + fold[2]) + (fold[1] + fold[3])


@njit(nogil=True, cache=True, error_model="numpy")
def _segment(
    w_I: F32,
    start: int,
    stop: int,
    scale: np.float32,
    codes_I: U8,
    error: F32,
    fold: F64,
    err_R: F64,
    norm_R: F64,
    r: int,
) -> None:
    """Encode at most 128 weights of row r and add to its sums."""
    _encode(w_I, start, stop, scale, codes_I, error)
    err_R[r] += _sum_squares(error, 0, stop - start, fold)
    norm_R[r] += _sum_squares(w_I, start, stop - start, fold)


@njit(nogil=True, cache=True, error_model="numpy")
def _row(w_I: F32, scale: np.float32, codes_I: U8, error: F32, fold: F64, err_R: F64, norm_R: F64, r: int) -> None:
    """Encode row r under one scale."""
    err_R[r] = 0.0
    norm_R[r] = 0.0
    for start in range(0, w_I.shape[0], BLOCK):
        stop = min(start + BLOCK, w_I.shape[0])
        _segment(w_I, start, stop, scale, codes_I, error, fold, err_R, norm_R, r)


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_tensor(w_RI: F32, scale: np.float32, codes_RI: U8, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise rows under the float32 scale of the tensor (`fp8_scale` of the amax of the fused set).

    Returns the first row with a NaN or infinity (outputs are then not valid), else -1. Written: codes_RI uint8 [R, I],
    sq_err_R and sq_norm_R float64 [R] as in `cpu/rows.py`.
    """
    error, fold = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for r in range(w_RI.shape[0]):
        if _amax_bits(w_RI[r], 0, w_RI.shape[1]) >= _INF_BITS:
            return r
        _row(w_RI[r], scale, codes_RI[r], error, fold, sq_err_R, sq_norm_R, r)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_channel(w_RI: F32, codes_RI: U8, scale_RG: F32, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise rows, each under its own scale written to scale_RG float32 [R, 1]; the rest as `quantize_fp8_tensor`."""
    error, fold = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for r in range(w_RI.shape[0]):
        amax = _amax_bits(w_RI[r], 0, w_RI.shape[1])
        if amax >= _INF_BITS:
            return r
        scale_RG[r, 0] = _scale_of(f32_of_bits(amax), False)
        _row(w_RI[r], scale_RG[r, 0], codes_RI[r], error, fold, sq_err_R, sq_norm_R, r)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_block(w_RI: F32, ue8m0: bool, codes_RI: U8, scale_NG: F32, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise 128 x 128 blocks; scale_NG is float32 [ceil(R / 128), ceil(I / 128)], powers of two when `ue8m0`.

    Row 0 of the chunk must start a block of the matrix. The rest as `quantize_fp8_tensor`.
    """
    error, fold = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    rows, inputs = w_RI.shape
    for top in range(0, rows, BLOCK):
        bottom = min(top + BLOCK, rows)
        first_bad = bottom
        for r in range(top, bottom):
            sq_err_R[r] = 0.0
            sq_norm_R[r] = 0.0
        for start in range(0, inputs, BLOCK):
            stop = min(start + BLOCK, inputs)
            amax = np.int32(0)
            for r in range(top, bottom):
                m = _amax_bits(w_RI[r], start, stop)
                amax = max(amax, m)
                if m >= _INF_BITS:
                    first_bad = min(first_bad, r)
            scale = _scale_of(f32_of_bits(amax), ue8m0)
            scale_NG[top // BLOCK, start // BLOCK] = scale
            for r in range(top, bottom):
                _segment(w_RI[r], start, stop, scale, codes_RI[r], error, fold, sq_err_R, sq_norm_R, r)
        if first_bad < bottom:
            return first_bad
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_fp8_block(w_RI: F32, scale_NG: F32, codes_RI: U8) -> None:
    """Codes nearest to w_RI under given block scales, rounded as `quantize_fp8_block` does."""
    error = np.empty(BLOCK, np.float32)
    for r in range(w_RI.shape[0]):
        for start in range(0, w_RI.shape[1], BLOCK):
            stop = min(start + BLOCK, w_RI.shape[1])
            _encode(w_RI[r], start, stop, scale_NG[r // BLOCK, start // BLOCK], codes_RI[r], error)


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_fp8_channel(w_RI: F32, scale_RG: F32, codes_RI: U8) -> None:
    """Codes nearest to w_RI under given row scales [R, 1]; a tensor scale is passed as a broadcast of R rows."""
    error = np.empty(BLOCK, np.float32)
    for r in range(w_RI.shape[0]):
        for start in range(0, w_RI.shape[1], BLOCK):
            _encode(w_RI[r], start, min(start + BLOCK, w_RI.shape[1]), scale_RG[r, 0], codes_RI[r], error)
