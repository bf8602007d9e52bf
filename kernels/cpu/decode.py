"""Rows of quantised weights to float32, for every layout a source checkpoint comes in.

The caller turns scales into float32 first (they are few); a weight is then its code's value times the scale, rounded
once to float32, and most such products are exact. NaN codes of FP8 stay NaN. Codes and outputs are C-contiguous, scales
may be any view; nothing is allocated beyond a row, and the GIL is released.

Shape suffixes: R rows (outputs), I inputs, G groups along the inputs, B bytes, N blocks of 128 rows, M blocks of 128
inputs, W words. The K-major layouts of GPTQ and AWQ have inputs first: IW, WR, GR.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import e2m1_code_to_f32, e4m3_code_to_f32

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]

_BLOCK = 128
# Shift, within an AWQ word, of the nibble that holds output 8 w + n.
_AWQ_SHIFT = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)


@njit(nogil=True, cache=True, error_model="numpy")
def _fp8_run(codes_I: U8, scale: np.float32, out_I: F32) -> None:
    for i in range(codes_I.size):
        out_I[i] = e4m3_code_to_f32(codes_I[i]) * scale


@njit(nogil=True, cache=True, error_model="numpy")
def fp8_group_to_f32(codes_RI: U8, scale_RG: F32, out_RI: F32) -> None:
    """FP8 E4M3 with one scale for each run of I / G inputs: a channel (G = 1) or MXFP8 (I / 32)."""
    group = codes_RI.shape[1] // scale_RG.shape[1]
    for r in range(codes_RI.shape[0]):
        for g in range(scale_RG.shape[1]):
            run = slice(g * group, (g + 1) * group)
            _fp8_run(codes_RI[r, run], scale_RG[r, g], out_RI[r, run])


@njit(nogil=True, cache=True, error_model="numpy")
def fp8_block_to_f32(codes_RI: U8, scale_NM: F32, first_row: int, out_RI: F32) -> None:
    """FP8 E4M3 with a scale for each 128 x 128 block, partial at the lower and right edge.

    `first_row` is where the chunk starts in the matrix that the scales describe; any row will do.
    """
    for r in range(codes_RI.shape[0]):
        n = (first_row + r) // _BLOCK
        for m in range(scale_NM.shape[1]):
            run = slice(m * _BLOCK, min((m + 1) * _BLOCK, codes_RI.shape[1]))
            _fp8_run(codes_RI[r, run], scale_NM[n, m], out_RI[r, run])


@njit(nogil=True, cache=True, error_model="numpy")
def _int4_row(codes_B: U8, out_I: F32) -> None:
    """Raw nibbles 0..15 of a row, as floats."""
    pairs = out_I.size // 2
    for b in range(pairs):
        code = np.int32(codes_B[b])
        out_I[2 * b] = np.float32(np.int32(code & np.int32(15)))
        out_I[2 * b + 1] = np.float32(np.int32(code >> np.int32(4)))
    if out_I.size % 2:
        out_I[2 * pairs] = np.float32(np.int32(codes_B[pairs] & np.uint8(15)))


@njit(nogil=True, cache=True, error_model="numpy")
def _affine_run(out_I: F32, zero: np.float32, scale: np.float32) -> None:
    for i in range(out_I.size):
        out_I[i] = (out_I[i] - zero) * scale


@njit(nogil=True, cache=True, error_model="numpy")
def int4_to_f32(codes_RB: U8, scale_RG: F32, zero_RG: I8, out_RI: F32) -> None:
    """compressed-tensors INT4: (nibble - 8 - zero) * scale, a scale and a zero for each run of I / G inputs.

    The nibbles of a whole row come first: runs of 32 are too short for a vectorised loop over bytes.
    """
    group = out_RI.shape[1] // scale_RG.shape[1]
    for r in range(out_RI.shape[0]):
        _int4_row(codes_RB[r], out_RI[r])
        for g in range(scale_RG.shape[1]):
            zero = np.float32(np.int32(zero_RG[r, g]) + 8)
            _affine_run(out_RI[r, g * group : (g + 1) * group], zero, scale_RG[r, g])


@njit(nogil=True, cache=True, error_model="numpy")
def _fp4_row(codes_B: U8, out_I: F32) -> None:
    for b in range(codes_B.size):
        code = np.int32(codes_B[b])
        out_I[2 * b] = e2m1_code_to_f32(np.int32(code & np.int32(15)))
        out_I[2 * b + 1] = e2m1_code_to_f32(np.int32(code >> np.int32(4)))


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_run(out_I: F32, scale: np.float32) -> None:
    for i in range(out_I.size):
        out_I[i] *= scale


@njit(nogil=True, cache=True, error_model="numpy")
def fp4_to_f32(codes_RB: U8, scale_RG: F32, group: int, out_RI: F32) -> None:
    """FP4 E2M1 pairs with a scale for each `group` inputs (16 NVFP4, 32 MXFP4); the caller multiplies the global in."""
    for r in range(out_RI.shape[0]):
        _fp4_row(codes_RB[r], out_RI[r])
        for g in range(scale_RG.shape[1]):
            _scale_run(out_RI[r, g * group : (g + 1) * group], scale_RG[r, g])


@njit(nogil=True, cache=True, error_model="numpy")
def _scaled_row(code_I: U8, scale_G: F32, zero_G: F32, g_idx_I: I32, out_I: F32) -> None:
    for i in range(code_I.size):
        g = np.uint32(g_idx_I[i])
        out_I[i] = (np.float32(np.int32(code_I[i])) - zero_G[g]) * scale_G[g]


@njit(nogil=True, cache=True, error_model="numpy")
def gptq_to_f32(words_WR: I32, scale_GR: F32, zero_GR: U8, g_idx_I: I32, out_RI: F32) -> None:
    """GPTQ columns: (code - zero) * scale, R columns of `qweight` [I / 8, O], of the scales and of the unpacked zeros.

    g_idx_I  group of each input, in 0..G - 1 (the caller checks it)
    """
    code_I = np.empty(out_RI.shape[1], np.uint8)
    for r in range(out_RI.shape[0]):
        for k in range(words_WR.shape[0]):
            word = np.uint32(words_WR[k, r])
            for n in range(8):
                code_I[8 * k + n] = np.uint8((word >> np.uint32(4 * n)) & np.uint32(15))
        _scaled_row(code_I, scale_GR[:, r].copy(), zero_GR[:, r].astype(np.float32), g_idx_I, out_RI[r])


@njit(nogil=True, cache=True, error_model="numpy")
def awq_to_f32(words_IW: I32, first: int, scale_GR: F32, zero_GR: U8, g_idx_I: I32, out_RI: F32) -> None:
    """AWQ columns: (code - zero) * scale, the R outputs that begin at output `first` of the words `qweight` [I, W]."""
    code_I = np.empty(out_RI.shape[1], np.uint8)
    for r in range(out_RI.shape[0]):
        column, shift = (first + r) // 8, _AWQ_SHIFT[(first + r) % 8]
        for i in range(code_I.size):
            code_I[i] = np.uint8((np.uint32(words_IW[i, column]) >> shift) & np.uint32(15))
        _scaled_row(code_I, scale_GR[:, r].copy(), zero_GR[:, r].astype(np.float32), g_idx_I, out_RI[r])


@njit(nogil=True, cache=True, error_model="numpy")
def gptq_to_int4(words_WR: I32, codes_RB: U8) -> None:
    """R columns of a GPTQ `qweight` as compressed-tensors rows: the same words, transposed."""
    for r in range(codes_RB.shape[0]):
        for k in range(words_WR.shape[0]):
            word = np.uint32(words_WR[k, r])
            for n in range(4):
                codes_RB[r, 4 * k + n] = np.uint8((word >> np.uint32(8 * n)) & np.uint32(255))


@njit(nogil=True, cache=True, error_model="numpy")
def awq_to_int4(words_IW: I32, first: int, codes_RB: U8) -> None:
    """The R outputs that begin at output `first` of an AWQ `qweight` [I, W] as compressed-tensors rows; I is even."""
    for r in range(codes_RB.shape[0]):
        column, shift = (first + r) // 8, _AWQ_SHIFT[(first + r) % 8]
        codes_RB[r] = 0
        for b in range(words_IW.shape[0] // 2):
            low = (np.uint32(words_IW[2 * b, column]) >> shift) & np.uint32(15)
            high = (np.uint32(words_IW[2 * b + 1, column]) >> shift) & np.uint32(15)
            codes_RB[r, b] = np.uint8(low | (high << np.uint32(4)))
