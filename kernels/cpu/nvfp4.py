"""NVFP4 weights: e2m1 codes, an e4m3 scale per 16 inputs, one float32 scale over the tensor.

    w_hat = e2m1 * (e4m3 * scale_2)        all in float32, the bracket rounded first

`scale_2 = amax / (6 * 448)` of the fused set is a multiplier (NVIDIA ModelOpt stores it); compressed-tensors stores the
divisor `448 * 6 / amax` and engines divide by it. The four choices of the block scale:

    0 plain          e4m3(block amax / (6 * scale_2)), clamped to [2^-9, 448] before the cast: less would become zero
    1 four-over-six  the better of plain and e4m3(1.5 times that): the largest weight lands on 6 or on 4
    2 sweep          the best e4m3 code from 2 below plain to 7 above (0.75 to 1.9 times). Of 120,000 random blocks
                     (Gaussian, Student t5, Laplace) none had a better one 8 below to 11 above; 1.5 times is inside
    3 tails          the best code from 6 below to 8 above where squared errors have the weights of `tails.py`

"Better" is the smaller float32 sum of squared errors of the block; on a tie the plain scale stays. A block of zeros has
scale 1.0 (code 0x38) and codes 0. The plain torch reference with the same sums is `microscale.py`.

Shape suffixes: R rows, I inputs, G blocks of 16 inputs, B bytes of two codes (even input in the low nibble), L lanes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import bits_of_f32, e4m3_code_to_f32, f32_of_bits, f32_to_e4m3_code
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
    weigh_sizes,
    weighted_half_loss,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

PLAIN, FOUR_OVER_SIX, SWEEP, TAILS = 0, 1, 2, 3
SWEEP_BELOW, SWEEP_ABOVE = 2, 7  # e4m3 codes around the plain one; 8 codes are a factor of 2
TAILS_BELOW, TAILS_ABOVE = 6, 8  # where few weights of a block count, the best scale lies further away
SCALE_2_MIN = np.float32(2.0**-100)  # keeps 1 / (e4m3 * scale_2) finite; no real tensor has an amax of 2e-27
_ONE_CODE = np.int32(0x38)  # 1.0 in e4m3


def nvfp4_scale_2(amax: float) -> np.float32:
    """The float32 multiplier over the block scales, amax / 2688; 1.0 for amax 0, never below 2^-100."""
    if amax == 0:
        return np.float32(1.0)
    return max(np.float32(amax) / np.float32(6 * 448), SCALE_2_MIN)


def nvfp4_global_divisor(amax: float) -> np.float32:
    """The same scale as compressed-tensors stores it, 2688 / amax: a divisor, 1 / nvfp4_scale_2 but for rounding."""
    scale_2 = nvfp4_scale_2(amax)
    if amax == 0 or scale_2 == SCALE_2_MIN:
        return np.float32(1) / scale_2
    return np.float32(6 * 448) / np.float32(amax)


@njit(nogil=True, cache=True, error_model="numpy")
def _amax_bits(w_RI: F32) -> np.int32:
    m = np.int32(0)
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            m = max(m, bits_of_f32(w_RI[r, i]) & np.int32(0x7FFFFFFF))
    return m


def amax_f32(w_RI: F32) -> float:
    """Largest magnitude of the chunk; NaN when it holds a NaN, else infinity when it holds one; 0.0 when empty."""
    return float(np.int32(_amax_bits(w_RI)).view(np.float32))


@njit(nogil=True, cache=True, error_model="numpy")
def _plain_codes(amax_L: I32, lanes: int, scale_2: np.float32, code_L: I32) -> None:
    """e4m3 code of the plain block scale."""
    six = np.float32(6) * scale_2
    for j in range(lanes):
        b = min(max(f32_of_bits(amax_L[j]) / six, np.float32(2.0**-9)), np.float32(448))
        code_L[j] = _ONE_CODE if amax_L[j] == 0 else f32_to_e4m3_code(b)


@njit(nogil=True, cache=True, error_model="numpy")
def _four_codes(amax_L: I32, lanes: int, scale_2: np.float32, code_L: I32) -> None:
    """e4m3 code of the scale that puts the largest weight of the block on 4."""
    six = np.float32(6) * scale_2
    for j in range(lanes):
        b = np.float32(1.5) * (f32_of_bits(amax_L[j]) / six)
        code_L[j] = f32_to_e4m3_code(min(max(b, np.float32(2.0**-9)), np.float32(448)))


@njit(nogil=True, cache=True, error_model="numpy")
def _shifted_codes(plain_L: I32, lanes: int, step: int, code_L: I32) -> None:
    """The code `step` places from the plain one, held to the positive finite codes 1..126."""
    for j in range(lanes):
        code_L[j] = min(max(plain_L[j] + np.int32(step), np.int32(1)), np.int32(126))


@njit(nogil=True, cache=True, error_model="numpy")
def _keep_better(size: F32, lanes: int, scale_2: np.float32, try_L: I32, best_L: F32, code_L: I32) -> None:
    """Take try_L[j] as the scale of lane j where its loss is below best_L[j]."""
    for j in range(lanes):
        code, old_code, old_loss = try_L[j], code_L[j], best_L[j]  # all loads before the first store: vectorised
        scale = e4m3_code_to_f32(code) * scale_2
        loss = half_loss(size, j, np.float32(1) / scale, scale)
        better = loss < old_loss
        best_L[j] = loss if better else old_loss
        code_L[j] = code if better else old_code


@njit(nogil=True, cache=True, error_model="numpy")
def _keep_better_weighted(size: F32, lanes: int, scale_2: np.float32, try_L: I32, best_L: F32, code_L: I32) -> None:
    """As `_keep_better`, by the weighted loss."""
    for j in range(lanes):
        code, old_code, old_loss = try_L[j], code_L[j], best_L[j]
        scale = e4m3_code_to_f32(code) * scale_2
        loss = weighted_half_loss(size, j, np.float32(1) / scale, scale)
        better = loss < old_loss
        best_L[j] = loss if better else old_loss
        code_L[j] = code if better else old_code


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(
    tile: F32, h: F32, lanes: int, scale_2: np.float32, amax_L: I32, method: int, size: F32, scratch: I32, code_L: I32
) -> None:
    """Block scales by `method` into code_L; scratch: `size` twice as long as `tile`, and int32 [3, LANES].

    Losses are measured in the power of two at or below scale_2: tiny and huge tensors are searched like any other.
    """
    plain_L, try_L, best_L = scratch[0], scratch[1], scratch[2].view(np.float32)
    _plain_codes(amax_L, lanes, scale_2, code_L)
    if method == PLAIN:
        return
    unit = f32_of_bits(np.int32(254 << 23) - (bits_of_f32(scale_2) & INF_BITS))
    for j in range(lanes):
        plain_L[j] = code_L[j]
        best_L[j] = unit
    magnitudes(tile, lanes, best_L, size)
    if method == TAILS:
        weigh_sizes(size, h, lanes)
    for j in range(lanes):
        best_L[j] = np.inf
    above, below = (TAILS_ABOVE, TAILS_BELOW) if method == TAILS else (SWEEP_ABOVE, SWEEP_BELOW)
    for k in range(2 if method == FOUR_OVER_SIX else 1 + above + below):  # the plain one first: it stays on a tie
        if method == FOUR_OVER_SIX and k == 1:
            _four_codes(amax_L, lanes, scale_2, try_L)
        else:
            _shifted_codes(plain_L, lanes, k if k <= above else above - k, try_L)
        if method == TAILS:
            _keep_better_weighted(size, lanes, scale_2 * unit, try_L, best_L, code_L)
        else:
            _keep_better(size, lanes, scale_2 * unit, try_L, best_L, code_L)


@njit(nogil=True, cache=True, error_model="numpy")
def _weight_tiles(h_I: F32) -> F32:
    """Weights of the blocks of a row, tile after tile, each block in units of its largest; 1 for a block of zeros."""
    groups = h_I.size // 16
    tiles = np.empty((-(-groups // LANES), 16 * LANES), np.float32)
    for t in range(tiles.shape[0]):
        lanes = min(LANES, groups - t * LANES)
        load_half(h_I, t * LANES * 16, 16, lanes, tiles[t])
        for j in range(lanes):
            most = np.float32(0)
            for i in range(16):
                most = max(most, tiles[t, i * LANES + j])
            for i in range(16):
                tiles[t, i * LANES + j] = tiles[t, i * LANES + j] / most if most > 0 else np.float32(1)
    return tiles


@njit(nogil=True, cache=True, error_model="numpy")
def _scales(code_L: I32, lanes: int, scale_2: np.float32, scale_L: F32) -> None:
    for j in range(lanes):
        scale_L[j] = e4m3_code_to_f32(code_L[j]) * scale_2


def quantize_nvfp4(
    w_RI: F32, scale_2: np.float32, method: int, codes_RB: U8, scale_RG: U8, sq_err_R: F64, sq_norm_R: F64,
    h_I: F32 | None = None,
) -> int:  # fmt: skip
    """Quantise rows to NVFP4; returns the first row with a NaN or infinity (outputs are then not valid), else -1.

    w_RI float32 [R, I], I a multiple of 16; scale_2 float32; method 0 plain, 1 four-over-six, 2 sweep, 3 tails, which
    alone takes h_I, float32 [I] >= 0: the loss of a block is the sum of h |w|^0.5 (w - w_hat)^2. Written:
    codes_RB uint8 [R, I / 2], scale_RG uint8 [R, I / 16] (e4m3 codes), sq_err_R and sq_norm_R float64 [R] as in
    `cpu/rows.py`.
    Codes are e2m1(w / (e4m3 * scale_2)) by float32 division, ties to even, saturating at 6.
    """
    h_I = np.empty(0, np.float32) if h_I is None else h_I
    return int(_quantize(w_RI, h_I, scale_2, method, codes_RB, scale_RG, sq_err_R, sq_norm_R))


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(
    w_RI: F32, h_I: F32, scale_2: np.float32, method: int, codes_RB: U8, scale_RG: U8, sq_err_R: F64, sq_norm_R: F64
) -> int:
    tile, error, h_T = np.empty(16 * LANES, np.float32), np.empty(32 * LANES, np.float32), _weight_tiles(h_I)
    scale_L, scratch = np.empty(LANES, np.float32), np.empty((3, LANES), np.int32)
    amax_L, code_L = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
    words, packed = np.empty(2 * LANES, np.int32), np.empty(2 * LANES, np.int32)
    err_L, norm_L = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    groups = w_RI.shape[1] // 16
    for r in range(w_RI.shape[0]):
        sq_err_R[r] = 0.0
        sq_norm_R[r] = 0.0
        for g in range(0, groups, LANES):
            lanes = min(LANES, groups - g)
            whole = load_half(w_RI[r], g * 16, 16, lanes, tile)
            clear(amax_L, err_L, norm_L)
            if amax_bits(tile, whole, amax_L) >= INF_BITS:
                return r
            h = h_T[g // LANES] if method == TAILS else tile
            _choose(tile, h, whole, scale_2, amax_L, method, error, scratch, code_L)
            _scales(code_L, whole, scale_2, scale_L)
            encode_half(tile, scale_L, whole, error, words)
            sum_squares(error, whole, err_L)
            sum_squares(tile, whole, norm_L)
            interleave(words, lanes, 2, 0, packed)
            copy_bytes(packed.view(np.uint8), lanes * 8, codes_RB[r], g * 8)
            for j in range(lanes):
                scale_RG[r, g + j] = code_L[j]
                sq_err_R[r] += err_L[j]
                sq_norm_R[r] += norm_L[j]
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_nvfp4(w_RI: F32, scale_2: np.float32, scale_RG: U8, codes_RB: U8) -> None:
    """Codes nearest to w_RI under given block scales (e4m3 codes) and multiplier; rounds as `quantize_nvfp4`."""
    tile, error = np.empty(16 * LANES, np.float32), np.empty(16 * LANES, np.float32)
    scale_L, code_L = np.empty(LANES, np.float32), np.empty(LANES, np.int32)
    words, packed = np.empty(2 * LANES, np.int32), np.empty(2 * LANES, np.int32)
    groups = w_RI.shape[1] // 16
    for r in range(w_RI.shape[0]):
        for g in range(0, groups, LANES):
            lanes = min(LANES, groups - g)
            load_half(w_RI[r], g * 16, 16, lanes, tile)
            for j in range(lanes):
                code_L[j] = scale_RG[r, g + j]
            _scales(code_L, lanes, scale_2, scale_L)
            encode_half(tile, scale_L, lanes, error, words)
            interleave(words, lanes, 2, 0, packed)
            copy_bytes(packed.view(np.uint8), lanes * 8, codes_RB[r], g * 8)
