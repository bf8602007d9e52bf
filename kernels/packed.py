"""4-bit codes in bytes and words, as numpy arrays: what the published layouts are, written plainly.

    compressed-tensors INT4   int32 words of 8 codes along the inputs, lowest nibble first, stored as code + 8; a row
                              whose length is no multiple of 8 ends in raw 0 nibbles. Zero points the same way, but
                              packed along the outputs
    FP4 (NVFP4, MXFP4)        bytes of 2 codes along the inputs, the even input in the low nibble
    ModelOpt INT4             bytes of 2 codes along the *outputs*, the even row in the low nibble, two's complement

GPTQ's and AWQ's layouts are in `layouts.py`, the fast loops in `cpu/`. Words are little endian in memory, as in a file.
Shape suffixes: O outputs, I inputs, G groups, W words, B bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError

I8 = NDArray[np.int8]
U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]

_LOW = np.uint8(15)
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)  # of the 8 nibbles of a word, lowest first


def pack_words(nibbles_OI: U8) -> I32:
    """Raw nibbles 0..15 [O, I] to int32 words [O, ceil(I / 8)], lowest nibble first, the last word filled with 0."""
    outputs, inputs = nibbles_OI.shape
    padded = np.zeros((outputs, -(-inputs // 8) * 8), np.uint32)
    padded[:, :inputs] = nibbles_OI & 15
    words = np.bitwise_or.reduce(padded.reshape(outputs, -1, 8) << _SHIFTS, axis=2)
    return np.ascontiguousarray(words, np.uint32).view(np.int32)


def unpack_words(words_OW: I32, inputs: int) -> U8:
    """The first `inputs` raw nibbles 0..15 of each row of words; the inverse of `pack_words`."""
    outputs, words = words_OW.shape
    if not words * 8 - 8 < inputs <= words * 8:
        raise QuantkitError(
            "a row of packed words has the wrong length",
            value=f"{words} words for {inputs} codes",
            allowed=-(-inputs // 8),
        )
    nibbles = (np.ascontiguousarray(words_OW, np.int32).view(np.uint32)[:, :, None] >> _SHIFTS) & 15
    return nibbles.reshape(outputs, -1)[:, :inputs].astype(np.uint8)


def pack_codes(q_OI: I8) -> I32:
    """compressed-tensors `weight_packed`: codes -8..7 [O, I] to int32 [O, ceil(I / 8)]."""
    return pack_words((q_OI.astype(np.int16) + 8).astype(np.uint8))


def unpack_codes(words_OW: I32, inputs: int) -> I8:
    """Codes -8..7 [O, inputs] of a compressed-tensors `weight_packed`."""
    return unpack_words(words_OW, inputs).astype(np.int8) - np.int8(8)


def pack_zero_points(zero_OG: I8) -> I32:
    """compressed-tensors `weight_zero_point`: zeros -8..7 [O, G] to int32 [ceil(O / 8), G]."""
    return np.ascontiguousarray(pack_codes(np.ascontiguousarray(zero_OG.T)).T)


def unpack_zero_points(words_WG: I32, outputs: int) -> I8:
    """Zeros -8..7 [outputs, G] of a compressed-tensors `weight_zero_point`."""
    return np.ascontiguousarray(unpack_codes(np.ascontiguousarray(words_WG.T), outputs).T)


def pack_pairs(codes_OI: U8) -> U8:
    """FP4 codes 0..15 [O, I] to bytes [O, I / 2], the even input in the low nibble. I must be even."""
    if codes_OI.shape[1] % 2:
        raise QuantkitError(
            "FP4 codes are stored in pairs of inputs", value=codes_OI.shape[1], allowed="an even number"
        )
    return (codes_OI[:, 0::2] & _LOW) | (codes_OI[:, 1::2] << np.uint8(4))


def unpack_pairs(bytes_OB: U8) -> U8:
    """FP4 codes 0..15 [O, 2 B]; the inverse of `pack_pairs`."""
    return np.stack([bytes_OB & 15, bytes_OB >> 4], axis=2).reshape(len(bytes_OB), -1)


def pack_row_pairs(q_OI: I8) -> U8:
    """ModelOpt INT4: codes -8..7 [O, I] to bytes [O / 2, I], the even row in the low nibble. O must be even."""
    if len(q_OI) % 2:
        raise QuantkitError("ModelOpt's INT4 is stored in pairs of rows", value=len(q_OI), allowed="an even number")
    nibbles = q_OI.view(np.uint8)
    return (nibbles[0::2] & _LOW) | (nibbles[1::2] << np.uint8(4))


def unpack_row_pairs(bytes_BI: U8) -> I8:
    """Codes -8..7 [2 B, I]; the inverse of `pack_row_pairs`."""
    nibbles = np.stack([bytes_BI & 15, bytes_BI >> 4], axis=1).reshape(-1, bytes_BI.shape[1])
    return ((nibbles ^ 8).astype(np.int8)) - np.int8(8)
