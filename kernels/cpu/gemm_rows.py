"""The inner loops of the packed GEMM: dot products of packed rows with tiles of tokens.

A row is read in blocks of 128 inputs, and a block as 8 vectors of 16 weights ("planes"). In 4-bit codes a block is 16
words, and plane p holds the p-th nibble of each word: lane l is input 8 l + p. In FP8 codes plane p is bytes 16 p to
16 p + 15. The activations are laid out to match, once per call (`lay_out`), so that a plane of weights meets its inputs
with plain loads. Codes become float32 in registers: a 4-bit code by one table lookup, an E4M3 code through its float16
form. A code times its scale is exact in float32 (4 and 8, 2 and 4, 4 and 24 significant bits; the last is rounded).

A tile is 1, 2, 4 or 8 tokens; every weight is decoded once for a tile, and two rows (four with a single token) share
the loads of activations.

Functions that depend on a type (a table or None) are overloads.

Letters: T tokens, I inputs, O outputs, B bytes of a row, G scales of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from quantkit.kernels.cpu import kv_lanes, lanes, simd

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

BLOCK = 128  # inputs
PLANES = 8


@njit(nogil=True, cache=True, error_model="numpy")
def lay_out(x_TI: F32, width: int, nibbles: bool, out: F32) -> None:
    """Activations as [tiles, blocks, planes, width, 16]; `out` is flat, and zero where tokens or inputs are missing."""
    tokens, inputs = x_TI.shape
    blocks = (inputs + BLOCK - 1) // BLOCK
    tile_size = blocks * BLOCK * width
    for t in range(tokens):
        start = (t // width) * tile_size + (t % width) * simd.LANES
        for i in range(inputs):
            at = i % BLOCK
            plane, lane = (at % PLANES, at // PLANES) if nibbles else (at // simd.LANES, at % simd.LANES)
            out[start + ((i // BLOCK) * PLANES + plane) * width * simd.LANES + lane] = x_TI[t, i]


def block_bytes(table: Any) -> int:
    """Bytes of a block of codes; with a table they are 4-bit codes."""
    raise NotImplementedError


def _plane(codes: U8, at: int, plane: int, table: Any) -> Any:
    """16 weights of the block that begins at byte `at`, as float32."""
    raise NotImplementedError


def values_of(table: Any) -> Any:
    """The 16 values as a vector, or None."""
    raise NotImplementedError


def zeros_of_chunk(words: Any, first: int, last: int, columns: int) -> Any:
    """Zero points of the rows `first` to `last` as flat float32 [rows, columns], or None."""
    raise NotImplementedError


def _less_zero(w: Any, zero: Any, at: int, each: int) -> Any:
    """Weights less their zero points."""
    raise NotImplementedError


@overload(block_bytes, strict=False)
def _block_bytes_of(table: Any) -> Any:
    size = BLOCK if isinstance(table, types.NoneType) else BLOCK // 2
    return lambda table: size


@overload(_plane, strict=False)
def _plane_of(codes: Any, at: Any, plane: Any, table: Any) -> Any:
    if isinstance(table, types.NoneType):
        return lambda codes, at, plane, table: simd.load_e4m3(codes, at + simd.LANES * plane)
    return lambda codes, at, plane, table: lanes.lookup(table, simd.shift_right(simd.load_words(codes, at), 4 * plane))


@overload(values_of, strict=False)
def _values_of_table(table: Any) -> Any:
    if isinstance(table, types.NoneType):
        return lambda table: None
    return lambda table: simd.load_f32(table, 0)


@overload(zeros_of_chunk, strict=False)
def _zeros_of_words(words: Any, first: Any, last: Any, columns: Any) -> Any:
    if isinstance(words, types.NoneType):
        return lambda words, first, last, columns: None

    def unpack(words: Any, first: int, last: int, columns: int) -> F32:
        out = np.zeros((last - first) * columns, np.float32)
        for r in range(first, last):
            for g in range(words.shape[1]):
                nibble = (np.uint32(words[r // 8, g]) >> np.uint32(4 * (r % 8))) & np.uint32(15)
                out[(r - first) * columns + g] = np.float32(np.int32(nibble) - 8)
        return out

    return unpack


@overload(_less_zero, strict=False)
def _less_zero_of(w: Any, zero: Any, at: Any, each: Any) -> Any:
    if isinstance(zero, types.NoneType):
        return lambda w, zero, at, each: w
    return lambda w, zero, at, each: simd.sub(w, lanes.repeat(zero, at, each))


@njit(nogil=True, cache=True, error_model="numpy")
def pair_of_rows(
    x: F32, x_at: int, codes: U8, at_0: int, at_1: int, scale: F32, scale_0: int, scale_1: int, zero: Any, each: int,
    shift: int, first: int, last: int, table: Any, like: Any, sums: F32,
) -> None:  # fmt: skip
    """Dot products of two rows with a tile, over blocks `first` to `last`: `sums` gets row 0's tokens, then row 1's.

    x_at, at_0, at_1      where the tile and the rows begin in the flat activations and codes
    scale_0, scale_1      where the rows' scales begin in the flat `scale` (and zeros in `zero`, None if symmetric)
    each, shift           lanes of a block that share one scale (16: all); 2^shift blocks share one
    table                 values of the 16 codes, or None for E4M3
    like                  any vector of 16 lanes for each token of a tile
    """
    width = simd.width(like)
    few = width <= 4 * simd.LANES
    none = simd.tile(simd.splat(np.float32(0)), like)
    sum_0 = none
    sum_1 = none
    size = block_bytes(table)
    for b in range(first, last):
        code_0, code_1 = at_0 + b * size, at_1 + b * size
        kv_lanes.prefetch(codes, 2 * at_1 - at_0 + b * size)  # the next two rows
        kv_lanes.prefetch(codes, 3 * at_1 - 2 * at_0 + b * size)
        g = (b >> shift) * (simd.LANES // each)
        s_0, s_1 = lanes.repeat(scale, scale_0 + g, each), lanes.repeat(scale, scale_1 + g, each)
        dot_0 = none
        dot_1 = none
        for p in range(PLANES):
            v = simd.load_tile(x, x_at + (b * PLANES + p) * width, like)
            w_0 = _less_zero(_plane(codes, code_0, p, table), zero, scale_0 + g, each)
            w_1 = _less_zero(_plane(codes, code_1, p, table), zero, scale_1 + g, each)
            if few:  # scale the block's sums
                dot_0 = simd.fma(simd.tile(w_0, like), v, dot_0)
                dot_1 = simd.fma(simd.tile(w_1, like), v, dot_1)
            else:  # scale the weights: they are fewer than sums, and there are not enough registers for both
                sum_0 = simd.fma(simd.tile(simd.mul(w_0, s_0), like), v, sum_0)
                sum_1 = simd.fma(simd.tile(simd.mul(w_1, s_1), like), v, sum_1)
        if few:
            sum_0 = simd.fma(dot_0, simd.tile(s_0, like), sum_0)
            sum_1 = simd.fma(dot_1, simd.tile(s_1, like), sum_1)
    simd.store_totals(sums, 0, sum_0)
    simd.store_totals(sums, width // simd.LANES, sum_1)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def four_rows(
    x: F32, codes: U8, at: tuple[int, int, int, int], scale: F32, scale_at: tuple[int, int, int, int], zero: Any,
    each: int, shift: int, blocks: int, table: Any, sums: F32,
) -> None:  # fmt: skip
    """Dot products of four rows with one token: with so little work for a load, four rows share the activations."""
    sum_0 = sum_1 = sum_2 = sum_3 = simd.zeros(1)
    size = block_bytes(table)
    ahead = 4 * blocks * size  # the next four rows, where memory is the limit
    for b in range(blocks):
        for n in range(4):
            kv_lanes.prefetch(codes, at[n] + ahead + b * size)
        g = (b >> shift) * (simd.LANES // each)
        dot_0 = dot_1 = dot_2 = dot_3 = simd.zeros(1)
        for p in range(PLANES):
            v = simd.load_f32(x, (b * PLANES + p) * simd.LANES)
            w_0 = _less_zero(_plane(codes, at[0] + b * size, p, table), zero, scale_at[0] + g, each)
            w_1 = _less_zero(_plane(codes, at[1] + b * size, p, table), zero, scale_at[1] + g, each)
            w_2 = _less_zero(_plane(codes, at[2] + b * size, p, table), zero, scale_at[2] + g, each)
            w_3 = _less_zero(_plane(codes, at[3] + b * size, p, table), zero, scale_at[3] + g, each)
            dot_0, dot_1 = simd.fma(w_0, v, dot_0), simd.fma(w_1, v, dot_1)
            dot_2, dot_3 = simd.fma(w_2, v, dot_2), simd.fma(w_3, v, dot_3)
        sum_0 = simd.fma(dot_0, lanes.repeat(scale, scale_at[0] + g, each), sum_0)
        sum_1 = simd.fma(dot_1, lanes.repeat(scale, scale_at[1] + g, each), sum_1)
        sum_2 = simd.fma(dot_2, lanes.repeat(scale, scale_at[2] + g, each), sum_2)
        sum_3 = simd.fma(dot_3, lanes.repeat(scale, scale_at[3] + g, each), sum_3)
    simd.store_totals(sums, 0, sum_0)
    simd.store_totals(sums, 1, sum_1)
    simd.store_totals(sums, 2, sum_2)
    simd.store_totals(sums, 3, sum_3)


@njit(nogil=True, cache=True, error_model="numpy")
def _one_token(
    x: F32, codes_OB: U8, scale_OG: F32, zero: Any, first: int, each: int, shift: int, table: Any, out_O: F32
) -> None:
    """The rows of a chunk, four by four, times one token; of the last four some may be the same row again."""
    codes, scale = codes_OB.reshape(-1), scale_OG.reshape(-1)
    rows, width, columns = codes_OB.shape[0], codes_OB.shape[1], scale_OG.shape[1]
    sums = np.empty(4, np.float32)
    for r in range(0, rows, 4):
        row = (r, min(r + 1, rows - 1), min(r + 2, rows - 1), min(r + 3, rows - 1))
        at = (row[0] * width, row[1] * width, row[2] * width, row[3] * width)
        scale_at = (row[0] * columns, row[1] * columns, row[2] * columns, row[3] * columns)
        blocks = width // block_bytes(table)
        if each == simd.LANES:  # said once more for the compiler, which then leaves the other cases out of the loop
            four_rows(x, codes, at, scale, scale_at, zero, simd.LANES, shift, blocks, table, sums)
        else:
            four_rows(x, codes, at, scale, scale_at, zero, each, shift, blocks, table, sums)
        for n in range(min(4, rows - r)):
            out_O[first + r + n] = sums[n]


@njit(nogil=True, cache=True, error_model="numpy")
def chunk_of_rows(
    x: F32, tokens: int, codes_OB: U8, scale_OG: F32, zero: Any, first: int, last: int, each: int, shift: int,
    step: int, table: Any, like: Any, out_TO: F32,
) -> None:  # fmt: skip
    """Rows `first` to `last` of the product, for all tokens, `step` blocks at a time (activations stay in the cache).

    codes_OB and scale_OG hold these rows alone, in whole blocks, `zero` is flat; `out_TO` is the whole result.
    """
    width = simd.width(like) // simd.LANES
    if width == 1:
        _one_token(x, codes_OB, scale_OG, zero, first, each, shift, table, out_TO[0])
        return
    blocks = codes_OB.shape[1] // block_bytes(table)
    codes, scale = codes_OB.reshape(-1), scale_OG.reshape(-1)
    sums = np.empty(2 * width, np.float32)
    for begin in range(0, blocks, step):
        for t in range(0, tokens, width):
            for r in range(0, last - first, 2):
                other = min(r + 1, last - first - 1)
                pair_of_rows(
                    x, t * blocks * BLOCK, codes, r * codes_OB.shape[1], other * codes_OB.shape[1], scale,
                    r * scale_OG.shape[1], other * scale_OG.shape[1], zero, each, shift, begin,
                    min(begin + step, blocks), table, like, sums,
                )  # fmt: skip
                for i in range(min(width, tokens - t)):
                    for n in range(2):
                        row = first + (r if n == 0 else other)
                        if n == 1 and other == r:
                            continue
                        y = sums[n * width + i]
                        out_TO[t + i, row] = y if begin == 0 else out_TO[t + i, row] + y


@njit(nogil=True, cache=True, error_model="numpy")
def decode_row(codes: U8, scale: F32, zero: Any, each: int, shift: int, table: Any, out: F32) -> None:
    """One row of whole blocks as float32, inputs in the order of `lay_out` with tiles of one token."""
    size = block_bytes(table)
    for b in range(codes.size // size):
        g = (b >> shift) * (simd.LANES // each)
        s = lanes.repeat(scale, g, each)
        for p in range(PLANES):
            w = _less_zero(_plane(codes, b * size, p, table), zero, g, each)
            simd.store(out, (b * PLANES + p) * simd.LANES, simd.mul(w, s))
