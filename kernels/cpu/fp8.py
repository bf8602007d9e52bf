"""FP8 E4M3 weights: one float32 scale for the tensor, for each row, or for each block of 128 x 128 weights.

    w_hat = e4m3 * scale        scale = amax / 448, rounded to float32; codes are e4m3(w / scale)

Codes come from true float32 division, held to +-448 before they are rounded (an old cast makes NaN of 449), ties to
even; -0.0 stays -0.0, as casts do. A scale of 0 becomes 1.0 (every weight is zero); none is below 2^-126, the smallest
normal float32. `ue8m0` scales are rounded up to a power of two before codes are chosen, so that no weight saturates.
Blocks at the right and lower edge of the matrix may be partial. The plain torch reference is `float8.py`.

Sums of squares run over segments of 128 inputs, padded with zeros and folded by halves (64 + 64, then 32 + 32, ... to
one), segments in order: additions that vectorise and come out the same everywhere.

Shape suffixes: R rows, I inputs, S inputs of one stripe, N blocks of 128 rows, G blocks of 128 inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import bits_of_f32, f32_of_bits
from quantkit.kernels.cpu.fp4_tile import INF_BITS
from quantkit.kernels.scheme import BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

SEGMENTS = 8
STRIPE = SEGMENTS * BLOCK  # 128 rows of a stripe are 512 KiB: read twice, the second time from the cache
_MAX = np.float32(448.0)
SCALE_MIN = np.float32(2.0**-126)
_SMALLEST = np.int32(121 << 23)  # bits of 2^-6: below 2^-5 the grid has one step, 2^-9
_MAGIC = np.int32(20 << 23)  # 2^20 times a power of two 2^e has the last bit 2^(e - 3), the step of e4m3 at 2^e


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_of(amax: np.float32, ue8m0: bool) -> np.float32:
    """float32 scale of the largest magnitude `amax`."""
    scale = max(amax / _MAX, SCALE_MIN)
    if amax == np.float32(0):
        scale = np.float32(1)
    if ue8m0:
        scale = f32_of_bits((bits_of_f32(scale) + np.int32(0x7FFFFF)) & INF_BITS)
    return scale


def fp8_scale(amax: float) -> np.float32:
    """The float32 scale of a tensor whose largest magnitude is `amax`: amax / 448, 1.0 for 0, never below 2^-126."""
    return np.float32(1) if amax == 0 else max(np.float32(amax) / _MAX, SCALE_MIN)


@njit(nogil=True, cache=True, error_model="numpy")
def _amax_bits(w_I: F32) -> np.int32:
    """Largest magnitude as the bits of a float32; infinity and NaN sort above every number."""
    m = np.int32(0)
    for i in range(w_I.shape[0]):
        m = max(m, bits_of_f32(w_I[i]) & np.int32(0x7FFFFFFF))
    return m


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(w_S: F32, scale_S: F32, codes_S: U8, size: F32, error: F32) -> None:
    """Codes of part of a row; size = |w| and error = |w| - |w_hat| in float32."""
    for i in range(w_S.shape[0]):
        w, scale = w_S[i], scale_S[i]
        a = min(abs(w) / scale, _MAX)
        exponent = max(bits_of_f32(a), _SMALLEST) & INF_BITS
        magic = exponent + _MAGIC
        y = a + f32_of_bits(magic)
        size[i] = abs(w)
        error[i] = abs(w) - (y - f32_of_bits(magic)) * scale
        code = bits_of_f32(y) - magic + ((exponent - _SMALLEST) >> np.int32(20))
        codes_S[i] = code | ((bits_of_f32(w) >> np.int32(24)) & np.int32(0x80))


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_squares(x_S: F32, segments: int, fold: F64, total: float) -> float:
    """`total` plus the sums of squares of segments of 128, each folded by halves; `fold` is scratch of 32."""
    x_KB = x_S.reshape(SEGMENTS, BLOCK)
    for k in range(segments):
        for i in range(32):
            a, b = np.float64(x_KB[k, i]), np.float64(x_KB[k, i + 32])
            c, d = np.float64(x_KB[k, i + 64]), np.float64(x_KB[k, i + 96])
            fold[i] = (a * a + c * c) + (b * b + d * d)
        for i in range(16):
            fold[i] += fold[i + 16]
        for i in range(8):
            fold[i] += fold[i + 8]
        for i in range(4):
            fold[i] += fold[i + 4]
        total += (fold[0] + fold[2]) + (fold[1] + fold[3])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _stripe(
    w_RI: F32, r: int, start: int, scale_S: F32, codes_RI: U8, scratch: F32, fold: F64, err_R: F64, norm_R: F64
) -> None:
    """Encode the weights of row r from `start` to the end of the stripe and add to its sums; scratch is [2, STRIPE]."""
    size, error = scratch[0], scratch[1]
    stop = min(start + STRIPE, w_RI.shape[1])
    _encode(w_RI[r, start:stop], scale_S, codes_RI[r, start:stop], size, error)
    segments = -(-(stop - start) // BLOCK)
    for i in range(stop - start, segments * BLOCK):
        size[i] = 0.0
        error[i] = 0.0
    err_R[r] = _sum_squares(error, segments, fold, err_R[r])
    norm_R[r] = _sum_squares(size, segments, fold, norm_R[r])


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_tensor(w_RI: F32, scale: np.float32, codes_RI: U8, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise rows under the float32 scale of the tensor (`fp8_scale` of the amax of the fused set).

    Returns the first row with a NaN or infinity (outputs are then not valid), else -1. Written: codes_RI uint8 [R, I],
    sq_err_R and sq_norm_R float64 [R] as in `cpu/rows.py`.
    """
    scratch, fold, scale_S = np.empty((2, STRIPE), np.float32), np.empty(32, np.float64), np.empty(STRIPE, np.float32)
    scale_S[:] = scale
    for r in range(w_RI.shape[0]):
        if _amax_bits(w_RI[r]) >= INF_BITS:
            return r
        sq_err_R[r] = 0.0
        sq_norm_R[r] = 0.0
        for start in range(0, w_RI.shape[1], STRIPE):
            _stripe(w_RI, r, start, scale_S, codes_RI, scratch, fold, sq_err_R, sq_norm_R)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_channel(w_RI: F32, codes_RI: U8, scale_RG: F32, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise rows, each under its own scale written to scale_RG float32 [R, 1]; the rest as `quantize_fp8_tensor`."""
    scratch, fold, scale_S = np.empty((2, STRIPE), np.float32), np.empty(32, np.float64), np.empty(STRIPE, np.float32)
    for r in range(w_RI.shape[0]):
        amax = _amax_bits(w_RI[r])
        if amax >= INF_BITS:
            return r
        scale_RG[r, 0] = _scale_of(f32_of_bits(amax), False)
        scale_S[:] = scale_RG[r, 0]
        sq_err_R[r] = 0.0
        sq_norm_R[r] = 0.0
        for start in range(0, w_RI.shape[1], STRIPE):
            _stripe(w_RI, r, start, scale_S, codes_RI, scratch, fold, sq_err_R, sq_norm_R)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _raise_amax(w_S: F32, amax_S: I32) -> None:
    for i in range(w_S.shape[0]):
        amax_S[i] = max(amax_S[i], bits_of_f32(w_S[i]) & np.int32(0x7FFFFFFF))


@njit(nogil=True, cache=True, error_model="numpy")
def _block_scales(
    w_RI: F32, top: int, bottom: int, start: int, ue8m0: bool, amax_S: I32, scale_S: F32, scale_G: F32
) -> bool:
    """Scales of the blocks of one stripe into scale_G, and spread over inputs in scale_S. False: NaN or infinity."""
    stop = min(start + STRIPE, w_RI.shape[1])
    amax_S[:] = 0
    for r in range(top, bottom):
        _raise_amax(w_RI[r, start:stop], amax_S)
    for k in range(-(-(stop - start) // BLOCK)):
        amax = np.int32(0)
        for i in range(BLOCK):
            amax = max(amax, amax_S[k * BLOCK + i])
        if amax >= INF_BITS:
            return False
        scale = _scale_of(f32_of_bits(amax), ue8m0)
        scale_G[start // BLOCK + k] = scale
        scale_S[k * BLOCK : (k + 1) * BLOCK] = scale
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_fp8_block(w_RI: F32, ue8m0: bool, codes_RI: U8, scale_NG: F32, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise 128 x 128 blocks; scale_NG is float32 [ceil(R / 128), ceil(I / 128)], powers of two when `ue8m0`.

    Row 0 of the chunk must start a block of the matrix. The rest as `quantize_fp8_tensor`.
    """
    scratch, fold, scale_S = np.empty((2, STRIPE), np.float32), np.empty(32, np.float64), np.empty(STRIPE, np.float32)
    amax_S = np.empty(STRIPE, np.int32)
    for top in range(0, w_RI.shape[0], BLOCK):
        bottom = min(top + BLOCK, w_RI.shape[0])
        for r in range(top, bottom):
            sq_err_R[r] = 0.0
            sq_norm_R[r] = 0.0
        for start in range(0, w_RI.shape[1], STRIPE):
            if not _block_scales(w_RI, top, bottom, start, ue8m0, amax_S, scale_S, scale_NG[top // BLOCK]):
                for r in range(top, bottom):
                    if _amax_bits(w_RI[r]) >= INF_BITS:
                        return r
            for r in range(top, bottom):
                _stripe(w_RI, r, start, scale_S, codes_RI, scratch, fold, sq_err_R, sq_norm_R)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_fp8(w_RI: F32, scale_NG: F32, rows_per_scale: int, inputs_per_scale: int, codes_RI: U8) -> None:
    """Codes nearest to w_RI under given scales, rounded as the functions above do.

    scale_NG[r // rows_per_scale, i // inputs_per_scale] is the scale of weight (r, i): 128 and 128 for blocks, 1 and I
    for rows, R and I for a tensor.
    """
    inputs = w_RI.shape[1]
    scale_I, size, error = np.empty(inputs, np.float32), np.empty(inputs, np.float32), np.empty(inputs, np.float32)
    for r in range(w_RI.shape[0]):
        if r % rows_per_scale == 0:
            for i in range(inputs):
                scale_I[i] = scale_NG[r // rows_per_scale, i // inputs_per_scale]
        _encode(w_RI[r], scale_I, codes_RI[r], size, error)
