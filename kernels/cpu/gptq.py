"""GPTQ's inner loops on the CPU: one block of columns of many rows at a time.

A block of at most a few hundred columns is worked through column by column, 64 rows side by side: a tile holds weight c
of row r at `tile[c * LANES + r]`. A column is corrected for all before it when its turn comes, in four registers. What
the block does to all columns beyond it is one matrix product, which the caller leaves to BLAS.

    gptq_block     E. Frantar et al., GPTQ (arXiv 2210.17323): round a column, pass its error on to the columns not yet
                   rounded, by a row of the upper Cholesky factor of the inverse Hessian
    descend_block  coordinate descent on the same loss afterwards: each weight in turn moves to the grid value that is
                   best while all others stay

Both round to a grid that is fixed beforehand: int4, code * scale with codes -8..7 minus the zero point, or e2m1, each
by the very rule of `requantize_rows`, so that its codes give back these values. No sum is reordered.
Shape suffixes: R rows, C columns of a block, G groups, L lanes (rows of a tile).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd
from quantkit.kernels.cpu.convert import bits_of_f32, f32_of_bits

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

LANES = 64
_ONE = np.int32(127 << 23)
_EXPONENT = np.int32(0x7F800000)
_MAGIC = np.int32(22 << 23)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def round_int4(w: np.float32, scale: np.float32, zero: np.float32) -> np.float32:
    """The value of the int4 code nearest to `w`."""
    q = min(max(np.rint(w / scale + zero), np.float32(-8)), np.float32(7))
    return np.float32((q - zero) * scale)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def round_e2m1(w: np.float32, scale: np.float32) -> np.float32:
    """The value of the e2m1 code nearest to `w`, ties to the even code, saturating."""
    a = min(abs(w) / scale, np.float32(6))
    magic = f32_of_bits((max(bits_of_f32(a), _ONE) & _EXPONENT) + _MAGIC)
    y = ((a + magic) - magic) * scale
    return -y if w < np.float32(0) else y


@njit(nogil=True, cache=True, error_model="numpy")
def _round(w_L: F32, scale_L: F32, zero_L: F32, fp4: bool, out_L: F32) -> None:
    if fp4:
        for r in range(LANES):
            out_L[r] = round_e2m1(w_L[r], scale_L[r])
    else:
        for r in range(LANES):
            out_L[r] = round_int4(w_L[r], scale_L[r], zero_L[r])


@njit(nogil=True, cache=True, error_model="numpy")
def _load(x_RC: F32, first: int, lanes: int, tile: F32) -> None:
    """Rows first, first + 1, ... transposed; lanes without a row hold zeros."""
    tile[:] = 0.0
    for r in range(lanes):
        for c in range(x_RC.shape[1]):
            tile[c * LANES + r] = x_RC[first + r, c]


@njit(nogil=True, cache=True, error_model="numpy")
def _store(tile: F32, first: int, lanes: int, x_RC: F32) -> None:
    for r in range(lanes):
        for c in range(x_RC.shape[1]):
            x_RC[first + r, c] = tile[c * LANES + r]


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(x_RG: F32, first: int, lanes: int, group: int, fill: np.float32, out_L: F32) -> None:
    out_L[:] = fill
    for r in range(lanes):
        out_L[r] = x_RG[first + r, group]


@njit(nogil=True, cache=True, error_model="numpy")
def _catch_up(tile: F32, column: int, factor_C: F32, before: F32) -> None:
    """What the columns before this one do to it: minus factor_C[k] * column k of `before`, one after another."""
    at = column * LANES
    a, b = simd.load_f32(tile, at), simd.load_f32(tile, at + 16)
    c, d = simd.load_f32(tile, at + 32), simd.load_f32(tile, at + 48)
    for k in range(column):
        f, e = simd.splat(factor_C[k]), k * LANES
        a = simd.sub(a, simd.mul(f, simd.load_f32(before, e)))
        b = simd.sub(b, simd.mul(f, simd.load_f32(before, e + 16)))
        c = simd.sub(c, simd.mul(f, simd.load_f32(before, e + 32)))
        d = simd.sub(d, simd.mul(f, simd.load_f32(before, e + 48)))
    simd.store(tile, at, a)
    simd.store(tile, at + 16, b)
    simd.store(tile, at + 32, c)
    simd.store(tile, at + 48, d)


@njit(nogil=True, cache=True, error_model="numpy")
def gptq_block(
    w_RC: F32, upper_CC: F32, scale_RG: F32, zero_RG: F32, group_C: I64, fp4: bool, hat_RC: F32, error_RC: F32
) -> None:
    """Round a block of columns, each after the errors of those before it.

    w_RC      float32 [R, C], corrected for all earlier blocks; not changed
    upper_CC  the block on the diagonal of U, inverse of the damped Hessian = U^T U
    scale_RG, zero_RG  float32 values of the stored scales (never zero) and zero points of all groups
    group_C   group of each column
    hat_RC    out: what the codes stand for
    error_RC  out: (w - hat) / U_cc; the caller lets W_later -= error @ U[block, later]
    """
    columns = w_RC.shape[1]
    factor_CC = upper_CC.T.copy()
    work = np.empty((3, columns * LANES), np.float32)
    tile, hats, errors = work[0], work[1], work[2]  # unpacked, they would no longer be known to be contiguous
    scale_L, zero_L = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, w_RC.shape[0], LANES):
        lanes = min(LANES, w_RC.shape[0] - first)
        _load(w_RC, first, lanes, tile)
        for c in range(columns):
            if c == 0 or group_C[c] != group_C[c - 1]:
                _gather(scale_RG, first, lanes, group_C[c], np.float32(1), scale_L)
                _gather(zero_RG, first, lanes, group_C[c], np.float32(0), zero_L)
            here = slice(c * LANES, (c + 1) * LANES)
            w_L, hat_L, e_L = tile[here], hats[here], errors[here]
            _catch_up(tile, c, factor_CC[c], errors)
            _round(w_L, scale_L, zero_L, fp4, hat_L)
            for r in range(LANES):
                e_L[r] = (w_L[r] - hat_L[r]) / upper_CC[c, c]
        _store(hats, first, lanes, hat_RC)
        _store(errors, first, lanes, error_RC)


@njit(nogil=True, cache=True, error_model="numpy")
def descend_block(
    slope_RC: F32, h_CC: F32, scale_RG: F32, zero_RG: F32, group_C: I64, fp4: bool, hat_RC: F32, moved_RC: F32
) -> None:
    """Let each weight of a block move to its best grid value while the others stay.

    slope_RC  (w - hat) @ H in these columns, H the damped Hessian; not changed
    h_CC      the block on the diagonal of H, which is symmetric
    hat_RC    in and out;  moved_RC  out: new minus old, of which slope -= moved @ H[block]
    Others as `gptq_block`.
    """
    columns = hat_RC.shape[1]
    work = np.empty((3, columns * LANES), np.float32)
    tile, hats, moved = work[0], work[1], work[2]  # unpacked, they would no longer be known to be contiguous
    scale_L, zero_L = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    goal_L, new_L = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, hat_RC.shape[0], LANES):
        lanes = min(LANES, hat_RC.shape[0] - first)
        _load(slope_RC, first, lanes, tile)
        _load(hat_RC, first, lanes, hats)
        for c in range(columns):
            if c == 0 or group_C[c] != group_C[c - 1]:
                _gather(scale_RG, first, lanes, group_C[c], np.float32(1), scale_L)
                _gather(zero_RG, first, lanes, group_C[c], np.float32(0), zero_L)
            here = slice(c * LANES, (c + 1) * LANES)
            slope_L, hat_L, moved_L = tile[here], hats[here], moved[here]
            _catch_up(tile, c, h_CC[c], moved)
            for r in range(LANES):
                goal_L[r] = hat_L[r] + slope_L[r] / h_CC[c, c]
            _round(goal_L, scale_L, zero_L, fp4, new_L)
            for r in range(LANES):
                moved_L[r] = new_L[r] - hat_L[r]
                hat_L[r] = new_L[r]
        _store(hats, first, lanes, hat_RC)
        _store(moved, first, lanes, moved_RC)
