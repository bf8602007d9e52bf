"""INT4 weights on the CPU: scales, codes and nibbles in one pass over a chunk of rows.

What each function computes is written plainly in `kernels/affine.py`; the loops here give the same scales and codes bit
for bit. Two ways to choose the scale of a group x with a = max |x|:

    plain     a / 7.5, the symmetric default of compressed-tensors
    search    the scale of least squared error, of either sign: code -8 reaches further than 7, so the longer tail of a
              group belongs on -8, with a negative scale if it is the positive one (as AutoRound exports; every reader
              computes code * scale). Candidates are spread over t = |scale| * 8 / a, first 8 % and then 2 % apart. For the
              codes q of a candidate the best scale is <x, q> / <q, q> and leaves |x|^2 - <x, q>^2 / <q, q>, so that
              few candidates do the work of many. The winner must beat `plain` with both scales as stored.

Scales are rounded to bfloat16 or float16 before codes are chosen, and never subnormal, infinite or zero. A group of zeros
gets scale 1. Codes are round-half-even(x / scale + zero), clipped to -8..7, with a true float32 division.

Every sum here is one of integers that float32 or float64 holds exactly: weights are scaled to +-2^14 (search) or +-2^18
(error) and rounded. So the order of summation and fused multiply-add cannot change a result, the two fastmath helpers
below are exact, loops vectorise, and output does not depend on the CPU. Errors are right to about 1e-5 of their value.

Nibbles are those of compressed-tensors: code + 8, even input in the low nibble, rows padded with raw 0 to 32-bit words.
Everything is C-contiguous and releases the GIL. Shape suffixes: R rows, I inputs, G groups, B bytes, N inputs of a group.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from quantkit.kernels.cpu.convert import bf16_bits_to_f32, f16_bits_to_f32, f32_to_bf16_bits, f32_to_f16_bits

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

_ROUND = np.float32(1.5 * 2**23)  # adding it leaves no fraction bits: rounds half to even
_SUM = 128  # inputs whose products with codes add up below 2^24
_SMALLEST = np.float32(2.0**-100)  # a group below this is not searched
_WORSE = 0.9999  # a searched scale must be this much better: more than the error sums can be wrong


def _reciprocal_steps() -> F32:
    """1 / (2048 t) for t = 1.32 / 1.02^k: what turns weights scaled to +-2^14 into codes, with 10 bits.

    Few bits make the products with 14-bit weights exact. 1.02 is the spacing of the search; the last t is 0.2.
    """
    steps, r = [], 1024 / 1.32
    while len(steps) < 97:
        grain = 1 if r < 1024 else 2 if r < 2048 else 4 if r < 4096 else 8
        steps.append(round(r / grain) * grain / 2**21)
        r *= 1.02
    return np.array(steps, np.float32)


_STEPS = _reciprocal_steps()


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _exact_madd(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """x * y + z where x * y is exact, so that a fused operation changes nothing."""
    return x * y + z


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _exact_sum(total: np.float64, x: np.float64, y: np.float64) -> np.float64:
    """total + x * y where all sums are exact, so that their order changes nothing."""
    return total + x * y


@njit(nogil=True, cache=True, error_model="numpy")
def _stored_bits(scale: np.float32, half: bool) -> np.uint16:
    """bfloat16 or float16 bits of a scale, its magnitude kept between the smallest normal and the largest finite one."""
    magnitude = abs(scale)
    if half:
        bits = min(max(f32_to_f16_bits(magnitude), np.int32(0x0400)), np.int32(0x7BFF))
    else:
        bits = min(max(f32_to_bf16_bits(magnitude), np.int32(0x0080)), np.int32(0x7F7F))
    return np.uint16(bits | np.int32(0x8000)) if scale < 0 else np.uint16(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _stored_value(bits: np.uint16, half: bool) -> np.float32:
    return f16_bits_to_f32(bits) if half else bf16_bits_to_f32(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(x_N: F32) -> tuple[np.int32, np.int32]:
    """Bits of max |x| and of the largest x (negative when there is no positive one); NaN and infinity are largest."""
    bits_N = x_N.view(np.int32)
    magnitude, positive = np.int32(0), np.int32(-1)
    for i in range(bits_N.size):
        magnitude = max(magnitude, np.int32(bits_N[i] & np.int32(0x7FFFFFFF)))
        positive = max(positive, bits_N[i])
    return magnitude, positive


@njit(nogil=True, cache=True, error_model="numpy")
def _codes_error(x_N: F32, scale: np.float32, zero: np.float32, unit: np.float32, q_N: U8) -> tuple[float, float]:
    """Offset codes of a group under its stored scale; sums of ((w - w_hat) * unit)^2 and (w * unit)^2, as integers."""
    error, norm = np.float64(0), np.float64(0)
    for i in range(x_N.size):
        x = x_N[i]
        q = min(max(np.rint(x / scale + zero), np.float32(-8)), np.float32(7))
        q_N[i] = np.uint8(np.int32(q + np.float32(8)))
        d = np.float64(np.rint((x - (q - zero) * scale) * unit))
        w = np.float64(np.rint(x * unit))
        error = _exact_sum(error, d, d)
        norm = _exact_sum(norm, w, w)
    return error, norm


@njit(nogil=True, cache=True, error_model="numpy")
def _score_block(x_N: F32, step: np.float32, low: np.float32, high: np.float32) -> tuple[np.float32, np.float32]:
    """<x, q> and <q, q> of at most `_SUM` integer weights and their codes."""
    xq, qq = np.float32(0), np.float32(0)
    for i in range(x_N.size):
        q = _exact_madd(x_N[i], step, _ROUND) - _ROUND
        q = min(max(q, low), high)
        xq = _exact_sum(xq, x_N[i], q)
        qq = _exact_sum(qq, q, q)
    return xq, qq


@njit(nogil=True, cache=True, error_model="numpy")
def _score(x_N: F32, step: np.float32, other: bool) -> tuple[float, float, float]:
    """What a candidate explains of |x|^2, <x, q>^2 / <q, q>, with <x, q> and <q, q>; `other` swaps the longer side."""
    low, high = (np.float32(-7), np.float32(8)) if other else (np.float32(-8), np.float32(7))
    xq, qq = np.float64(0), np.float64(0)
    for start in range(0, x_N.size, _SUM):
        block_xq, block_qq = _score_block(x_N[start : start + _SUM], step, low, high)
        xq += np.float64(block_xq)
        qq += np.float64(block_qq)
    return xq * xq / qq, xq, qq


@njit(nogil=True, cache=True, error_model="numpy")
def _search(x_N: F32, magnitude: np.float32, positive: bool, scaled_N: F32) -> np.float32:
    """The scale, not yet rounded, of the best candidate; `positive` when the largest magnitude is a positive weight."""
    to_integer = np.float32(16384) / magnitude
    to_integer = -to_integer if positive else to_integer
    for i in range(x_N.size):
        scaled_N[i] = np.rint(x_N[i] * to_integer)
    first, last = 2, 26
    if x_N.size > 32:
        first, last = 6, 30
    if x_N.size > 128:
        first, last = 10, 94
    best, best_xq, best_qq, centre, sign = 0.0, 0.0, 1.0, first, 1.0
    for k in range(first, last + 1, 4):
        score, xq, qq = _score(scaled_N, _STEPS[k], False)
        if score > best:
            best, best_xq, best_qq, centre = score, xq, qq, k
    for k in range(7):
        offset, other = (k - 2 if k < 2 else k - 1, False) if k < 4 else (k - 5, True)
        score, xq, qq = _score(scaled_N, _STEPS[centre + offset], other)
        if score > best:
            best, best_xq, best_qq = score, xq, qq
            sign = -1.0 if other else 1.0
    sign = -sign if positive else sign
    return np.float32(sign * np.float64(magnitude) * best_xq / (best_qq * 16384.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_row(q_I: U8, codes_B: U8) -> None:
    """Offset codes of a row to nibbles; the rest of the row is raw 0."""
    pairs = q_I.size // 2
    for b in range(pairs):
        codes_B[b] = q_I[2 * b] | (q_I[2 * b + 1] << 4)
    if q_I.size % 2:
        codes_B[pairs] = q_I[q_I.size - 1]
    for b in range((q_I.size + 1) // 2, codes_B.size):
        codes_B[b] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_int4(
    w_RI: F32,
    group: int,
    search: bool,
    half: bool,
    codes_RB: U8,
    scale_RG: NDArray[np.uint16],
    sq_err_R: F64,
    sq_norm_R: F64,
) -> int:
    """Symmetric INT4 of a chunk of rows; returns the first row with a NaN or infinity (nothing else is valid then) or -1.

    group     inputs that share a scale; divides the inputs, or equals them (one scale a row)
    search    look for the best signed scale instead of taking max |w| / 7.5
    half      store scales as float16 instead of bfloat16
    codes_RB  out, [rows, ceil(inputs / 8) * 4] packed nibbles
    scale_RG  out, bits of the stored scales
    sq_err_R, sq_norm_R  out, sums of (w - w_hat)^2 and of w^2
    """
    rows, inputs = w_RI.shape
    q_I, trial_N, scaled_N = np.empty(inputs, np.uint8), np.empty(group, np.uint8), np.empty(group, np.float32)
    zero = np.float32(0)
    for r in range(rows):
        sq_err_R[r], sq_norm_R[r] = 0.0, 0.0
        for g in range(inputs // group):
            x_N, q_N = w_RI[r, g * group : (g + 1) * group], q_I[g * group : (g + 1) * group]
            bits, positive_bits = _largest(x_N)
            if bits >= 0x7F800000:
                return r
            magnitude = np.int32(bits).view(np.float32)
            stored = _stored_bits(magnitude / np.float32(7.5) if bits else np.float32(1), half)
            scale = _stored_value(stored, half)
            unit = np.float32(2.0**18) / max(magnitude, _SMALLEST)
            error, norm = _codes_error(x_N, scale, zero, unit, q_N)
            if search and magnitude >= _SMALLEST:
                trial = _stored_bits(_search(x_N, magnitude, positive_bits == bits, scaled_N), half)
                trial_error, _ = _codes_error(x_N, _stored_value(trial, half), zero, unit, trial_N)
                if trial_error < error * _WORSE:
                    stored, error = trial, trial_error
                    q_N[:] = trial_N
            scale_RG[r, g] = stored
            size = 1.0 / np.float64(unit)
            sq_err_R[r] += error * size * size
            sq_norm_R[r] += norm * size * size
        _pack_row(q_I, codes_RB[r])
    return -1
