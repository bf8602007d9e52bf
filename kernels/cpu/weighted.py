"""Scales that lose least where each input has a weight: sum_c h_c (w_c - w_hat_c)^2, over the inputs of a group.

h is the mean square of the input (the diagonal of GPTQ's Hessian), so that the sum is the squared error of the output
when errors do not add up. Unweighted searches, with sums that are exact on every CPU, are in `int4_search.py`,
`nvfp4.py` and `mxfp4.py`; here sums are float32 in any order, and the results are candidates for a method that measures
what it gets. Scales are stored ones: rounded to their format before their loss is taken; on a tie the earlier candidate
stays, of which the first is the plain scale of the format. A group whose inputs all have weight 0 is searched with 1.

    int4      plain max / 7.5; the largest weight at code -8; the least-squares scales <w, q>_h / <q, q>_h of the codes
              under |scale| = t max / 8 with both signs, t = 1.2 down to 0.3 in 32 steps
    int4 with a zero point  both ends drawn in by 0, 5, ... 45 %
    nvfp4     e4m3 codes from 6 below the plain one to 8 above
    mxfp4     exponents from 2 below the plain one to 1 above

Arrays are C-contiguous and the GIL is released. Shape suffixes: R rows, I inputs, G groups, N inputs of a group.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd
from quantkit.kernels.cpu.convert import (
    bits_of_f32,
    e4m3_code_to_f32,
    f32_of_bits,
    f32_to_e4m3_code,
)
from quantkit.kernels.cpu.gptq import round_e2m1, round_int4
from quantkit.kernels.cpu.int4 import stored_bits, stored_value

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

_STEPS = (1.2 * (0.3 / 1.2) ** (np.arange(32) / 31)).astype(np.float32)
_DRAWN_IN = 10


@njit(nogil=True, cache=True, error_model="numpy")
def stored_scale(scale: np.float32, half: bool) -> np.float32:
    """The scale in bfloat16 or float16, its magnitude kept between the smallest normal and the largest number."""
    return stored_value(stored_bits(scale, half), half)


@njit(nogil=True, cache=True, error_model="numpy")
def _fits(w_N: F32, h_N: F32, inverse_K: F32, wq_K: F32, qq_K: F32) -> None:
    """<w, q>_h and <q, q>_h of the codes under 1 / inverse_K, 32 scales side by side."""
    low, high = simd.splat(np.float32(-8)), simd.splat(np.float32(7))
    for k in range(0, inverse_K.size, 32):
        inverse_a, inverse_b = simd.load_f32(inverse_K, k), simd.load_f32(inverse_K, k + 16)
        wq_a = wq_b = qq_a = qq_b = simd.splat(np.float32(0))
        for i in range(w_N.size):
            w, h = simd.splat(w_N[i]), simd.splat(h_N[i])
            q_a = simd.minimum(simd.maximum(simd.nearest(simd.mul(w, inverse_a)), low), high)
            q_b = simd.minimum(simd.maximum(simd.nearest(simd.mul(w, inverse_b)), low), high)
            hq_a, hq_b = simd.mul(h, q_a), simd.mul(h, q_b)
            wq_a, wq_b = simd.fma(hq_a, w, wq_a), simd.fma(hq_b, w, wq_b)
            qq_a, qq_b = simd.fma(hq_a, q_a, qq_a), simd.fma(hq_b, q_b, qq_b)
        simd.store(wq_K, k, wq_a)
        simd.store(wq_K, k + 16, wq_b)
        simd.store(qq_K, k, qq_a)
        simd.store(qq_K, k + 16, qq_b)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _int4_loss(w_N: F32, h_N: F32, scale: np.float32, zero: np.float32) -> np.float32:
    loss = np.float32(0)
    for i in range(w_N.size):
        d = w_N[i] - round_int4(w_N[i], scale, zero)
        loss += h_N[i] * d * d
    return loss


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _e2m1_loss(w_N: F32, h_N: F32, scale: np.float32) -> np.float32:
    loss = np.float32(0)
    for i in range(w_N.size):
        d = w_N[i] - round_e2m1(w_N[i], scale)
        loss += h_N[i] * d * d
    return loss


@njit(nogil=True, cache=True, error_model="numpy")
def _group(w_I: F32, h_I: F32, start: int, w_N: F32, h_N: F32) -> tuple[np.float32, np.float32, np.float32]:
    """Copy a group in units of its largest weight and of its largest h; returns the largest, lowest and highest weight.

    In those units no sum leaves float32. `largest` is 0 for a group of zeros, of which the copies are not valid.
    """
    low, high, most = np.float32(0), np.float32(0), np.float32(0)
    for i in range(w_N.size):
        low, high = min(low, w_I[start + i]), max(high, w_I[start + i])
        most = max(most, h_I[start + i])
    largest = max(high, -low)
    for i in range(w_N.size):
        w_N[i] = w_I[start + i] / largest
        h_N[i] = h_I[start + i] / most if most > 0 else np.float32(1)
    return largest, low, high


@njit(nogil=True, cache=True, error_model="numpy")
def int4_scales(w_RI: F32, h_I: F32, group: int, half: bool, scale_RG: F32) -> None:
    """Values of the stored signed scales of symmetric int4; finite weights, h >= 0."""
    w_N, h_N = np.empty(group, np.float32), np.empty(group, np.float32)
    tried = np.empty((3, 2 * _STEPS.size), np.float32)
    inverse_K, wq_K, qq_K = tried[0], tried[1], tried[2]
    tries = np.empty(3, np.float32)
    for r in range(w_RI.shape[0]):
        for g in range(scale_RG.shape[1]):
            largest, _, high = _group(w_RI[r], h_I, g * group, w_N, h_N)
            if largest == 0:
                scale_RG[r, g] = 1
                continue
            start = np.float32(-0.125) if high == largest else np.float32(0.125)
            for k in range(_STEPS.size):
                inverse_K[2 * k] = np.float32(1) / (start * _STEPS[k])
                inverse_K[2 * k + 1] = -inverse_K[2 * k]
            _fits(w_N, h_N, inverse_K, wq_K, qq_K)
            score, fitted = np.float32(-1), start
            for k in range(inverse_K.size):
                if qq_K[k] > 0 and wq_K[k] * wq_K[k] / qq_K[k] > score:
                    score, fitted = wq_K[k] * wq_K[k] / qq_K[k], wq_K[k] / qq_K[k]
            tries[0], tries[1], tries[2] = largest / np.float32(7.5), start * largest, fitted * largest
            best, scale_RG[r, g] = np.float32(np.inf), stored_scale(tries[0], half)
            for k in range(3):
                scale = stored_scale(tries[k], half)
                loss = _int4_loss(w_N, h_N, scale / largest, np.float32(0))
                if loss < best:
                    best, scale_RG[r, g] = loss, scale


@njit(nogil=True, cache=True, error_model="numpy")
def int4_scales_asym(w_RI: F32, h_I: F32, group: int, half: bool, scale_RG: F32, zero_RG: I8) -> None:
    """Values of the stored scales, and zero points -8..7."""
    w_N, h_N = np.empty(group, np.float32), np.empty(group, np.float32)
    for r in range(w_RI.shape[0]):
        for g in range(scale_RG.shape[1]):
            largest, low, high = _group(w_RI[r], h_I, g * group, w_N, h_N)
            scale_RG[r, g], zero_RG[r, g] = np.float32(1), np.int8(-8)
            if largest == 0:
                continue
            best = np.float32(np.inf)
            for k in range(_DRAWN_IN):
                shrink = np.float32(1.0 - 0.05 * k)
                width = (high * shrink - low * shrink) / np.float32(15)
                scale = stored_scale(width, half)
                exact = width if 0 < width < np.inf else scale
                zero = min(max(np.rint(np.float32(-8) - low * shrink / exact), np.float32(-8)), np.float32(7))
                loss = _int4_loss(w_N, h_N, scale / largest, zero)
                if loss < best:
                    best, scale_RG[r, g], zero_RG[r, g] = loss, scale, np.int8(zero)


@njit(nogil=True, cache=True, error_model="numpy")
def nvfp4_scales(w_RI: F32, h_I: F32, scale_2: np.float32, code_RG: U8) -> None:
    """e4m3 codes of the block scales under the multiplier `scale_2`."""
    w_N, h_N = np.empty(16, np.float32), np.empty(16, np.float32)
    for r in range(w_RI.shape[0]):
        for g in range(code_RG.shape[1]):
            largest, _, _ = _group(w_RI[r], h_I, g * 16, w_N, h_N)
            base = min(max(largest / (np.float32(6) * scale_2), np.float32(2.0**-9)), np.float32(448))
            plain = np.int32(0x38) if largest == 0 else f32_to_e4m3_code(base)
            code_RG[r, g] = plain
            best = _e2m1_loss(w_N, h_N, e4m3_code_to_f32(plain) * scale_2 / largest)
            for k in range(15):
                code = min(max(plain + np.int32(k - 6), np.int32(1)), np.int32(126))
                loss = _e2m1_loss(w_N, h_N, e4m3_code_to_f32(code) * scale_2 / largest)
                if loss < best:
                    best, code_RG[r, g] = loss, code


@njit(nogil=True, cache=True, error_model="numpy")
def mxfp4_scales(w_RI: F32, h_I: F32, code_RG: U8) -> None:
    """e8m0 codes of the block scales."""
    w_N, h_N = np.empty(32, np.float32), np.empty(32, np.float32)
    for r in range(w_RI.shape[0]):
        for g in range(code_RG.shape[1]):
            largest, _, _ = _group(w_RI[r], h_I, g * 32, w_N, h_N)
            exponent = (bits_of_f32(largest) + np.int32(1 << 21)) >> np.int32(23)
            plain = np.int32(127) if largest == 0 else max(exponent - np.int32(2), np.int32(1))
            code_RG[r, g] = plain
            best = _e2m1_loss(w_N, h_N, f32_of_bits(plain << np.int32(23)) / largest)
            for k in range(4):
                code = min(max(plain + np.int32(k - 2), np.int32(1)), np.int32(254))
                loss = _e2m1_loss(w_N, h_N, f32_of_bits(code << np.int32(23)) / largest)
                if loss < best:
                    best, code_RG[r, g] = loss, code
