"""MXFP4 weights: e2m1 codes and one e8m0 scale (a power of two) per 32 inputs, as in OCP Microscaling Formats 1.0.

    w_hat = e2m1 * 2^(code - 127)        exact in float32, as is w / scale

plain   the exponent of the block's largest magnitude, minus 2 (6 = 1.5 * 2^2), after rounding a mantissa of 1.75 and
        more up to the next power: compressed-tensors' rule. The floor rule of the OCP text saturates such blocks at 6
search  the best of plain - 1, plain, plain + 1 by the float32 sum of squared errors of the block; on a tie plain stays

A block of zeros has scale 2^0 (code 127) and codes 0. The plain torch reference with the same sums is `microscale.py`.

Shape suffixes: R rows, I inputs, G blocks of 32 inputs, B bytes of two codes (even input in the low nibble), L lanes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import f32_of_bits
from quantkit.kernels.cpu.fp4_tile import (
    INF_BITS,
    LANES,
    amax_bits,
    clear,
    copy_bytes,
    encode_half,
    half_loss,
    interleave,
    load_half,
    magnitudes,
    sum_squares,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

_ZERO_BLOCK = np.int32(127)
_LAST_CODE = np.int32(254)  # 255 is NaN
_HALF = 16 * LANES  # offset of the second half of the blocks in tile and error


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _power(code: np.int32) -> np.float32:
    """2^(code - 127); code 0 is a subnormal float32."""
    return f32_of_bits(np.int32(1 << 22) if code == np.int32(0) else code << np.int32(23))


@njit(nogil=True, cache=True, error_model="numpy")
def _plain_codes(amax_L: I32, lanes: int, code_L: I32) -> None:
    for j in range(lanes):
        exponent = (amax_L[j] + np.int32(1 << 21)) >> np.int32(23)
        code_L[j] = _ZERO_BLOCK if amax_L[j] == 0 else max(exponent - np.int32(2), np.int32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _keep_better(size: F32, lanes: int, plain_L: I32, step: int, best_L: F32, code_L: I32) -> None:
    """Take plain_L[j] + step, held to 0..254, as the scale of lane j where its loss is below best_L[j].

    `size` is in units of the plain scale: squares neither vanish nor overflow.
    """
    for j in range(lanes):
        old_code, old_loss = code_L[j], best_L[j]
        code = min(max(plain_L[j] + np.int32(step), np.int32(0)), _LAST_CODE)
        scale = _power(np.int32(127) + code - plain_L[j])
        reciprocal = _power(np.int32(127) - code + plain_L[j])
        loss = half_loss(size, j, reciprocal, scale) + half_loss(size, _HALF + j, reciprocal, scale)
        better = loss < old_loss
        best_L[j] = loss if better else old_loss
        code_L[j] = code if better else old_code


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(
    tile: F32, lanes: int, amax_L: I32, search: bool, size: F32, plain_L: I32, best_L: F32, code_L: I32
) -> None:
    """Block scales into code_L; size (as `tile`), plain_L and best_L are scratch."""
    _plain_codes(amax_L, lanes, code_L)
    if not search:
        return
    for j in range(lanes):
        plain_L[j] = code_L[j]
        best_L[j] = _power(_LAST_CODE - code_L[j])
    magnitudes(tile[:_HALF], lanes, best_L, size[:_HALF])
    magnitudes(tile[_HALF:], lanes, best_L, size[_HALF:])
    for j in range(lanes):
        best_L[j] = np.inf
    for k in range(3):  # 0, +1, -1: the plain one first, it stays on a tie
        _keep_better(size, lanes, plain_L, k if k < 2 else -1, best_L, code_L)


@njit(nogil=True, cache=True, error_model="numpy")
def _load(w_I: F32, g: int, lanes: int, tile: F32) -> int:
    """Blocks g, g + 1, ... of a row: first halves, then second halves. Returns as `load_half`."""
    load_half(w_I, g * 32, 32, lanes, tile[:_HALF])
    return int(load_half(w_I, g * 32 + 16, 32, lanes, tile[_HALF:]))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(tile: F32, code_L: I32, lanes: int, error: F32, scale_L: F32, words: I32, packed: I32) -> None:
    """The 16 bytes of every block into `packed`; error as `encode_half`; scale_L and words are scratch."""
    for j in range(lanes):
        scale_L[j] = _power(code_L[j])
    for h in range(2):
        half = slice(h * _HALF, (h + 1) * _HALF)
        encode_half(tile[half], scale_L, lanes, error[half], words)
        interleave(words, lanes, 4, 2 * h, packed)


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_mxfp4(w_RI: F32, search: bool, codes_RB: U8, scale_RG: U8, sq_err_R: F64, sq_norm_R: F64) -> int:
    """Quantise rows to MXFP4; returns the first row with a NaN or infinity (outputs are then not valid), else -1.

    w_RI float32 [R, I], I a multiple of 32. Written: codes_RB uint8 [R, I / 2], scale_RG uint8 [R, I / 32] (e8m0
    codes), sq_err_R and sq_norm_R float64 [R] as in `cpu/rows.py`. Codes are e2m1(w / scale), ties to even, at most 6.
    """
    tile, error = np.empty(2 * _HALF, np.float32), np.empty(2 * _HALF, np.float32)
    scale_L, best_L = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    amax_L, code_L, plain_L = np.empty(LANES, np.int32), np.empty(LANES, np.int32), np.empty(LANES, np.int32)
    words, packed = np.empty(2 * LANES, np.int32), np.empty(4 * LANES, np.int32)
    err_L, norm_L = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    groups = w_RI.shape[1] // 32
    for r in range(w_RI.shape[0]):
        sq_err_R[r] = 0.0
        sq_norm_R[r] = 0.0
        for g in range(0, groups, LANES):
            lanes = min(LANES, groups - g)
            whole = _load(w_RI[r], g, lanes, tile)
            clear(amax_L, err_L, norm_L)
            if max(amax_bits(tile[:_HALF], whole, amax_L), amax_bits(tile[_HALF:], whole, amax_L)) >= INF_BITS:
                return r
            _choose(tile, whole, amax_L, search, error, plain_L, best_L, code_L)
            _encode(tile, code_L, whole, error, scale_L, words, packed)
            for h in range(2):
                sum_squares(error[h * _HALF : (h + 1) * _HALF], whole, err_L)
                sum_squares(tile[h * _HALF : (h + 1) * _HALF], whole, norm_L)
            copy_bytes(packed.view(np.uint8), lanes * 16, codes_RB[r], g * 16)
            for j in range(lanes):
                scale_RG[r, g + j] = code_L[j]
                sq_err_R[r] += err_L[j]
                sq_norm_R[r] += norm_L[j]
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_mxfp4(w_RI: F32, scale_RG: U8, codes_RB: U8) -> None:
    """Codes nearest to w_RI under given e8m0 codes (0..254), rounded as `quantize_mxfp4` does."""
    tile, error = np.empty(2 * _HALF, np.float32), np.empty(2 * _HALF, np.float32)
    scale_L, code_L = np.empty(LANES, np.float32), np.empty(LANES, np.int32)
    words, packed = np.empty(2 * LANES, np.int32), np.empty(4 * LANES, np.int32)
    groups = w_RI.shape[1] // 32
    for r in range(w_RI.shape[0]):
        for g in range(0, groups, LANES):
            lanes = min(LANES, groups - g)
            _load(w_RI[r], g, lanes, tile)
            for j in range(lanes):
                code_L[j] = scale_RG[r, g + j]
            _encode(tile, code_L, lanes, error, scale_L, words, packed)
            copy_bytes(packed.view(np.uint8), lanes * 16, codes_RB[r], g * 16)
