"""INT4 weights on the CPU: scales, codes and nibbles of a chunk of rows.

What each function computes is written plainly in `kernels/affine.py`; the loops here give the same scales and codes bit
for bit. The scale of a group comes from its largest weight, max |w| / 7.5 or, with a zero point, (max - min) / 15, as
compressed-tensors chooses it; or from a search (signed scales: `int4_search.py`; with a zero point: both ends drawn in
by up to 35 %), whose result must beat the first by more than the error sums can be wrong, both with scales as stored.

Scales are rounded to bfloat16 or float16 before codes are chosen, and never subnormal, infinite or zero. A group of
zeros gets scale 1. Codes are round-half-even(w / scale + zero), clipped to -8..7, with a true float32 division.

Errors are summed as integers, weights scaled by 2^22 / max |w| (2^18 in groups above 128), for the reasons given in
`int4_search.py`; the sums of a row of ordinary weights are right to 1e-5 of their value.

Nibbles are those of compressed-tensors: code + 8, even input in the low nibble, rows padded with raw 0 to 32-bit words.
Arrays are C-contiguous and the GIL is released. Starts and sizes of groups are unsigned: an index that might count from
the end would keep a loop from being vectorised. Shape suffixes: R rows, I inputs, G groups, B bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import (
    bf16_bits_to_f32,
    f16_bits_to_f32,
    f32_of_bits,
    f32_to_bf16_bits,
    f32_to_f16_bits,
)
from quantkit.kernels.cpu.int4_search import INTEGER, SMALLEST, best_scales, square_sum, to_integers

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
U16 = NDArray[np.uint16]

_BETTER = 0.9999  # error that a searched scale may have, relative to the plain one


@njit(nogil=True, cache=True, error_model="numpy")
def stored_bits(scale: np.float32, half: bool) -> np.uint16:
    """Bits of a scale in bfloat16 or float16, its magnitude kept between the smallest normal and the largest one."""
    if half:
        bits = min(max(f32_to_f16_bits(abs(scale)), np.int32(0x0400)), np.int32(0x7BFF))
    else:
        bits = min(max(f32_to_bf16_bits(abs(scale)), np.int32(0x0080)), np.int32(0x7F7F))
    return np.uint16(bits | np.int32(0x8000)) if scale < 0 else np.uint16(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def stored_value(bits: np.uint16, half: bool) -> np.float32:
    """The scale that bits of float16 (`half`) or bfloat16 stand for."""
    return f16_bits_to_f32(bits) if half else bf16_bits_to_f32(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _ends(bits_I: NDArray[np.int32], start: np.uint64, size: np.uint64) -> tuple[np.float32, np.float32, np.float32]:
    """Return max |x|, min(0, min x) and max(0, max x) of a group, from its bits; the first shows NaN and infinity.

    Compared as integers, of which a loop may take the largest in any order.
    """
    magnitude, low, high = np.int32(0), np.int32(0), np.int32(0)
    for i in range(size):
        bits = bits_I[start + i]
        absolute = np.int32(bits & np.int32(0x7FFFFFFF))
        magnitude = max(magnitude, absolute)
        low = max(low, absolute if bits < 0 else np.int32(0))
        high = max(high, bits)
    return f32_of_bits(magnitude), -f32_of_bits(low), f32_of_bits(high)


@njit(nogil=True, cache=True, error_model="numpy")
def _error_unit(group: int) -> np.float32:
    """What the largest weight of a group is scaled to in error sums: squares must add up to less than 2^53."""
    return np.float32(2.0**22) if group <= 128 else np.float32(2.0**18)


@njit(nogil=True, cache=True, error_model="numpy")
def _codes(
    x_I: F32, start: np.uint64, size: np.uint64, scale: np.float32, zero: np.float32, unit: np.float32, q_I: U8,
    error_I: F32,
) -> np.floating[Any]:  # fmt: skip
    """Codes + 8 of a group under its stored scale; returns the sum of squares of what is lost, times unit^2."""
    for i in range(size):
        x = x_I[start + i]
        q = min(max(np.rint(x / scale + zero), np.float32(-8)), np.float32(7))
        q_I[start + i] = np.uint8(np.int32(q + np.float32(8)))
        error_I[start + i] = np.rint((x - (q - zero) * scale) * unit)
    return square_sum(error_I, start, size)


@njit(nogil=True, cache=True, error_model="numpy")
def _copy(from_I: U8, to_I: U8, start: np.uint64, size: np.uint64) -> None:
    for i in range(size):
        to_I[start + i] = from_I[start + i]


@njit(nogil=True, cache=True, error_model="numpy")
def _pack(q_I: U8, codes_B: U8) -> None:
    """Codes + 8 of a row to nibbles; what is left of the row is raw 0."""
    pairs = q_I.size // 2
    for b in range(pairs):
        codes_B[b] = q_I[2 * b] | (q_I[2 * b + 1] << np.uint8(4))
    if q_I.size % 2:
        codes_B[pairs] = q_I[q_I.size - 1]
    for b in range((q_I.size + 1) // 2, codes_B.size):
        codes_B[b] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_int4(
    w_RI: F32, group: int, method: int, half: bool, codes_RB: U8, scale_RG: U16, sq_err_R: F64, sq_norm_R: F64
) -> int:
    """Symmetric INT4 of a chunk of rows; the first row with a NaN or infinity (nothing else is valid then), else -1.

    group     inputs that share a scale: even and a divisor of the inputs, or all of them (one scale a row)
    method    0 plain: max |w| / 7.5; 1 signed: the largest weight at code -8, so it is not clipped; 2 search: the best
              signed scale. Both fall back to plain where that has the smaller error
    half      store scales as float16 instead of bfloat16
    codes_RB  out, [rows, ceil(inputs / 8) * 4] packed nibbles
    scale_RG  out, bits of the stored scales
    sq_err_R, sq_norm_R  out, sums of (w - w_hat)^2 and of w^2
    """
    (rows, inputs), size, groups, zero = w_RI.shape, np.uint64(group), scale_RG.shape[1], np.float32(0)
    bits_RI = w_RI.view(np.int32)
    q_I, trial_I = np.empty(inputs, np.uint8), np.empty(inputs, np.uint8)
    integer_I, error_I = np.empty(inputs, np.float32), np.empty(inputs, np.float32)
    largest_G, factor_G, unit_G = np.empty((3, groups), np.float32)
    error_G, best_G, score_G = np.empty((3, groups))
    centre_G = np.empty(groups, np.int64)
    for r in range(rows):
        x_I, bits_I = w_RI[r], bits_RI[r]
        sq_err_R[r], sq_norm_R[r] = 0.0, 0.0
        for g in range(groups):
            start = np.uint64(g) * size
            largest, _, high = _ends(bits_I, start, size)
            if not np.isfinite(largest):
                return r
            unit, factor = _error_unit(group) / max(largest, SMALLEST), INTEGER / max(largest, SMALLEST)
            factor = -factor if high == largest else factor
            norm = to_integers(x_I, start, size, unit, error_I)
            sq_norm_R[r] += norm / (np.float64(unit) * np.float64(unit))
            if method == 2:
                to_integers(x_I, start, size, factor, integer_I)
            best_G[g] = INTEGER / np.float32(8)  # in units of the integers, of which the largest magnitude is -INTEGER
            stored = stored_bits(largest / np.float32(7.5) if largest > 0 else np.float32(1), half)
            error_G[g] = _codes(x_I, start, size, stored_value(stored, half), zero, unit, q_I, error_I)
            scale_RG[r, g] = stored
            largest_G[g], factor_G[g], unit_G[g] = largest, factor, unit
        if method == 2:
            best_scales(integer_I, size, score_G, best_G, centre_G)
        if method > 0:
            for g in range(groups):
                start = np.uint64(g) * size
                stored = stored_bits(np.float32(best_G[g] / np.float64(factor_G[g])), half)
                error = _codes(x_I, start, size, stored_value(stored, half), zero, unit_G[g], trial_I, error_I)
                if error < error_G[g] * _BETTER and largest_G[g] >= SMALLEST:
                    scale_RG[r, g], error_G[g] = stored, error
                    _copy(trial_I, q_I, start, size)
        for g in range(groups):
            sq_err_R[r] += error_G[g] / (np.float64(unit_G[g]) * np.float64(unit_G[g]))
        _pack(q_I, codes_RB[r])
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_int4_asym(
    w_RI: F32, group: int, search: bool, half: bool, codes_RB: U8, scale_RG: U16, zero_RG: I8, sq_err_R: F64,
    sq_norm_R: F64,
) -> int:  # fmt: skip
    """INT4 with a zero point -8..7 for each group: w_hat = (code - zero) * scale. Else as `quantize_int4`.

    scale = (max - min) / 15 with 0 inside, zero = round-half-even(-8 - min / scale) with the scale not yet rounded, as
    in compressed-tensors. `search`: the best of both ends drawn in by 0, 5, ... 35 %.
    """
    (rows, inputs), size, bits_RI = w_RI.shape, np.uint64(group), w_RI.view(np.int32)
    q_I, trial_I = np.empty(inputs, np.uint8), np.empty(inputs, np.uint8)
    error_I = np.empty(inputs, np.float32)
    for r in range(rows):
        x_I, bits_I = w_RI[r], bits_RI[r]
        sq_err_R[r], sq_norm_R[r] = 0.0, 0.0
        for g in range(scale_RG.shape[1]):
            start = np.uint64(g) * size
            largest, low, high = _ends(bits_I, start, size)
            if not np.isfinite(largest):
                return r
            unit = _error_unit(group) / max(largest, SMALLEST)
            norm = to_integers(x_I, start, size, unit, error_I)
            sq_norm_R[r] += norm / (np.float64(unit) * np.float64(unit))
            best: np.floating[Any] = np.float64(0)
            for k in range(8 if search else 1):
                shrink = np.float32(1.0 - 0.05 * k)
                width = (high * shrink - low * shrink) / np.float32(15)
                stored = stored_bits(width if largest > 0 else np.float32(1), half)
                scale = stored_value(stored, half)
                exact = width if 0 < width < np.inf else scale
                zero = min(max(np.rint(np.float32(-8) - low * shrink / exact), np.float32(-8)), np.float32(7))
                error = _codes(x_I, start, size, scale, zero, unit, trial_I, error_I)
                if k == 0 or error < best * _BETTER:
                    best = error
                    _copy(trial_I, q_I, start, size)
                    scale_RG[r, g], zero_RG[r, g] = stored, np.int8(zero)
            sq_err_R[r] += best / (np.float64(unit) * np.float64(unit))
        _pack(q_I, codes_RB[r])
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def requantize_int4_asym(w_RI: F32, group: int, half: bool, scale_RG: U16, zero_RG: I8, codes_RB: U8) -> None:
    """Nibbles of the codes nearest to `w_RI` under scales (their bits) and zero points that a file holds."""
    inputs, size = w_RI.shape[1], np.uint64(group)
    q_I, error_I = np.empty(inputs, np.uint8), np.empty(inputs, np.float32)
    for r in range(w_RI.shape[0]):
        for g in range(scale_RG.shape[1]):
            scale, zero = stored_value(scale_RG[r, g], half), np.float32(zero_RG[r, g])
            _codes(w_RI[r], np.uint64(g) * size, size, scale, zero, np.float32(0), q_I, error_I)
        _pack(q_I, codes_RB[r])


@njit(nogil=True, cache=True, error_model="numpy")
def encode_int4(w_RI: F32, group: int, half: bool, scale_RG: U16, codes_RB: U8, sq_err_R: F64, sq_norm_R: F64) -> int:
    """As `quantize_int4`, under scales (their bits) that are given."""
    inputs, size, bits_RI = w_RI.shape[1], np.uint64(group), w_RI.view(np.int32)
    q_I, error_I = np.empty(inputs, np.uint8), np.empty(inputs, np.float32)
    for r in range(w_RI.shape[0]):
        sq_err_R[r], sq_norm_R[r] = 0.0, 0.0
        for g in range(scale_RG.shape[1]):
            start, scale = np.uint64(g) * size, stored_value(scale_RG[r, g], half)
            largest, _, _ = _ends(bits_RI[r], start, size)
            if not np.isfinite(largest):
                return r
            unit = _error_unit(group) / max(largest, SMALLEST)
            square = np.float64(unit) * np.float64(unit)
            sq_norm_R[r] += to_integers(w_RI[r], start, size, unit, error_I) / square
            sq_err_R[r] += _codes(w_RI[r], start, size, scale, np.float32(0), unit, q_I, error_I) / square
        _pack(q_I, codes_RB[r])
    return -1


def requantize_int4(w_RI: F32, group: int, half: bool, scale_RG: U16, codes_RB: U8) -> None:
    """As `requantize_int4_asym`, without zero points."""
    requantize_int4_asym(w_RI, group, half, scale_RG, np.zeros(scale_RG.shape, np.int8), codes_RB)
