"""GPTQ and AWQ checkpoints: their packed tensors to codes and back, as numpy arrays.

Both store the transpose of what the rest of this project calls a weight: inputs come first. Codes and zeros are
unsigned 0..15 and w = (code - zero) * scale.

    GPTQ  qweight int32 [I / 8, O]   8 inputs in a word, lowest nibble first
          qzeros  int32 [G, O / 8]   8 outputs in a word, lowest nibble first; `gptq` (v1) files store
                                     (zero - 1) & 15, `gptq_v2` files the zero itself
          scales  [G, O], g_idx int32 [I]: the group of each input
    AWQ   qweight int32 [I, O / 8]   8 outputs in a word; nibble n holds output 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[n]
          qzeros  int32 [G, O / 8]   the same order
          scales  [G, O]

compressed-tensors stores the transpose of GPTQ: `weight_packed` is `qweight.T`, `weight_zero_point` is v2's `qzeros.T`.
The functions `..._rows` go from and to its rows of bytes, all that lies between the layouts of a run.
Shape suffixes: O outputs, I inputs, G groups, W words, B bytes of a row (I / 2, I a multiple of 8).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.packed import I32, U8, pack_words, unpack_words

_LOW, _HALF = np.uint8(15), np.uint8(4)
_SIGNS = np.uint8(0x88)  # code + 8 to two's complement and back, in both nibbles of a byte
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ_ORDER[n] is the output that nibble n of a word holds


def gptq_unpack(qweight_WO: I32) -> U8:
    """Codes 0..15 [O, I] of a GPTQ `qweight`."""
    return unpack_words(np.ascontiguousarray(qweight_WO.T), 8 * len(qweight_WO))


def gptq_pack(codes_OI: U8) -> I32:
    """GPTQ `qweight` [I / 8, O] of codes 0..15 [O, I]; I must be a multiple of 8."""
    return np.ascontiguousarray(pack_words(codes_OI).T)


def gptq_unpack_zeros(qzeros_GW: I32, outputs: int, *, v2: bool) -> U8:
    """Zeros 0..15 [G, outputs] of a GPTQ `qzeros`, of a `gptq_v2` file or of an older one."""
    return (unpack_words(qzeros_GW, outputs) + np.uint8(not v2)) & np.uint8(15)


def gptq_pack_zeros(zeros_GO: U8, *, v2: bool) -> I32:
    """GPTQ `qzeros` [G, ceil(O / 8)] of zeros 0..15 [G, O]."""
    return pack_words(zeros_GO - np.uint8(not v2))


def awq_unpack(qweight_IW: I32) -> U8:
    """Codes 0..15 [O, I] of an AWQ `qweight`."""
    return np.ascontiguousarray(awq_unpack_zeros(qweight_IW).T)


def awq_pack(codes_OI: U8) -> I32:
    """AWQ `qweight` [I, O / 8] of codes 0..15 [O, I]; O must be a multiple of 8."""
    return awq_pack_zeros(np.ascontiguousarray(codes_OI.T))


def awq_unpack_zeros(qzeros_GW: I32) -> U8:
    """Zeros 0..15 [G, O] of an AWQ `qzeros`."""
    nibbles = unpack_words(qzeros_GW, 8 * qzeros_GW.shape[1])
    return _reorder(nibbles, np.argsort(AWQ_ORDER))


def awq_pack_zeros(zeros_GO: U8) -> I32:
    """AWQ `qzeros` [G, O / 8] of zeros 0..15 [G, O]; O must be a multiple of 8."""
    return pack_words(_reorder(zeros_GO, np.array(AWQ_ORDER)))


def gptq_from_rows(codes_OB: U8) -> I32:
    """Rows of compressed-tensors INT4 as columns of a GPTQ `qweight` [I / 8, O]."""
    return np.ascontiguousarray(np.ascontiguousarray(codes_OB).view(np.int32).T)


def awq_from_rows(codes_OB: U8) -> I32:
    """Rows of compressed-tensors INT4 as columns of an AWQ `qweight` [I, O / 8]; O is a multiple of 8."""
    outputs, width = codes_OB.shape
    pairs_BO = np.ascontiguousarray(codes_OB.T)
    nibbles_IO = np.stack((pairs_BO & _LOW, pairs_BO >> _HALF), axis=1).reshape(2 * width, outputs // 8, 8)
    low, high = (nibbles_IO[:, :, AWQ_ORDER[n::2]] for n in (0, 1))
    return np.ascontiguousarray(low | (high << _HALF)).reshape(2 * width, -1).view(np.int32)


def row_pairs_from_rows(codes_OB: U8) -> U8:
    """Rows of compressed-tensors INT4 as ModelOpt's bytes [O / 2, I] of two rows (`packed.py`); O is even."""
    signed_OB = codes_OB ^ _SIGNS
    even, odd = signed_OB[0::2], signed_OB[1::2]
    pairs = np.stack(((even & _LOW) | (odd << _HALF), (even >> _HALF) | (odd & ~_LOW)), axis=2)
    return pairs.reshape(len(even), -1)


def rows_from_row_pairs(bytes_BI: U8) -> U8:
    """The inverse of `row_pairs_from_rows`."""
    first, second = bytes_BI[:, 0::2], bytes_BI[:, 1::2]
    even, odd = (first & _LOW) | (second << _HALF), (first >> _HALF) | (second & ~_LOW)
    return np.stack((even, odd), axis=1).reshape(2 * len(bytes_BI), -1) ^ _SIGNS


def _reorder(nibbles: U8, order_N: NDArray[np.intp]) -> U8:
    """Permute each run of 8 along the last axis."""
    return nibbles.reshape(len(nibbles), -1, 8)[:, :, order_N].reshape(len(nibbles), -1)
