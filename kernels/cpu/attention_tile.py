"""The arithmetic of attention on one decoded tile of keys and values: scores, online softmax, weighted sum of values.

All sums of a row of queries run in an order that depends on nothing but the row's own tokens: not on the rows beside
it, nor on the number of threads. A request therefore gets the same output whatever else is in the batch.

A call counts references to its arrays, which at this scale costs time: loops over rows are inside the functions, and
the rows of a KV head begin at row `base` of shared arrays. Row m of the head sees the tokens first_M[m] .. last_M[m]
- 1 of the tile; one outside has no part in its results, whatever number it holds.

Tiles lie as `kv_tile.py` says: k and v are tiles; q has rows of 16 * chunks values, s rows of TILE scores, o rows of
`width` values. Shape suffix: M rows of queries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import kv_lanes, lanes, simd
from quantkit.kernels.cpu.kv_tile import STRIDE, TILE

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_LANES = simd.LANES


@njit(nogil=True, cache=True, error_model="numpy")
def add_scores(q: F32, base: int, rows: int, chunks: int, k: F32, first_M: I64, last_M: I64, s: F32) -> None:
    """Dot products of each row with the tokens it sees, and some around them to make whole 16s."""
    for m in range(rows):
        for t in range(first_M[m] // _LANES * _LANES, last_M[m], _LANES):
            sums = simd.zeros(16)  # 16 tokens of 16 lanes
            for c in range(chunks):
                q_chunk = simd.tile(simd.load_f32(q, ((base + m) * chunks + c) * _LANES), sums)
                sums = simd.fma(simd.load_tile(k, c * STRIDE + t * _LANES, sums), q_chunk, sums)
            simd.store(s, (base + m) * TILE + t, kv_lanes.sums(sums))


@njit(nogil=True, cache=True, error_model="numpy")
def add_softmax(
    s: F32, base: int, rows: int, first_M: I64, last_M: I64, scale: np.float32, top: F32, total: F32, o: F32, width: int
) -> None:
    """Scores of each row to p = e^(scale * s - top), in place, `top` raised to the largest scaled score seen so far.

    The sum of p goes to `total`; it and the row of o shrink as the top rises. NaN scores stay NaN and raise nothing.
    """
    for m in range(rows):
        at, row = (base + m) * TILE, base + m
        begin, end = first_M[m] // _LANES * _LANES, -(-last_M[m] // _LANES) * _LANES
        if first_M[m] >= last_M[m]:
            continue
        for t in range(begin, first_M[m]):
            s[at + t] = -np.inf
        for t in range(last_M[m], end):
            s[at + t] = -np.inf
        most = simd.load_f32(s, at + begin)
        for t in range(begin + _LANES, end, _LANES):
            most = simd.maximum(simd.load_f32(s, at + t), most)
        new = kv_lanes.highest(most) * scale
        new = new if new > top[row] else top[row]
        shift = new if new > -np.inf else np.float32(0)
        sums = simd.zeros(1)
        for t in range(begin, end, _LANES):
            p = lanes.exp(simd.fma(simd.load_f32(s, at + t), simd.splat(scale), simd.splat(-shift)))
            simd.store(s, at + t, p)
            sums = simd.add(sums, p)
        if new != top[row]:
            shrink = np.float32(math.exp(top[row] - shift))
            top[row] = new
            total[row] *= shrink
            for d in range(row * width, (row + 1) * width):
                o[d] *= shrink
        total[row] += simd.total(sums)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_row(
    like: Any, p: F32, m: int, v: F32, chunk: int, until: int, first: int, last: int, o: F32, width: int
) -> None:
    """Add p v to one row, for the chunks `chunk` .. `until` - 1, as many at a time as `like` has."""
    for c in range(chunk, until, simd.width(like) // _LANES):
        o_0 = simd.load_tile(o, m * width + c * _LANES, like)
        for t in range(first, last):
            v_t = kv_lanes.load_strided(v, c * STRIDE + t * _LANES, STRIDE, like)
            o_0 = simd.fma(simd.tile(kv_lanes.spread(p, m * TILE + t), like), v_t, o_0)
        simd.store(o, m * width + c * _LANES, o_0)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_rows(
    like: Any, p: F32, m: int, v: F32, chunk: int, until: int, first: int, last: int, o: F32, width: int
) -> None:
    """As `_add_row` for the four rows from m on."""
    for c in range(chunk, until, simd.width(like) // _LANES):
        at = m * width + c * _LANES
        o_0, o_1 = simd.load_tile(o, at, like), simd.load_tile(o, at + width, like)
        o_2, o_3 = simd.load_tile(o, at + 2 * width, like), simd.load_tile(o, at + 3 * width, like)
        for t in range(first, last):
            v_t = kv_lanes.load_strided(v, c * STRIDE + t * _LANES, STRIDE, like)
            o_0 = simd.fma(simd.tile(kv_lanes.spread(p, m * TILE + t), like), v_t, o_0)
            o_1 = simd.fma(simd.tile(kv_lanes.spread(p, (m + 1) * TILE + t), like), v_t, o_1)
            o_2 = simd.fma(simd.tile(kv_lanes.spread(p, (m + 2) * TILE + t), like), v_t, o_2)
            o_3 = simd.fma(simd.tile(kv_lanes.spread(p, (m + 3) * TILE + t), like), v_t, o_3)
        simd.store(o, at, o_0)
        simd.store(o, at + width, o_1)
        simd.store(o, at + 2 * width, o_2)
        simd.store(o, at + 3 * width, o_3)


@njit(nogil=True, cache=True, error_model="numpy")
def add_values(p: F32, base: int, rows: int, v: F32, first_M: I64, last_M: I64, o: F32, width: int) -> None:
    """Add p v over the tokens that each row sees; rows that see the same go four at a time."""
    chunks = width // _LANES
    wide = chunks // 4 * 4
    m = 0
    while m < rows:
        four = m + 4 <= rows
        for i in range(m + 1, min(m + 4, rows)):
            four = four and first_M[i] == first_M[m] and last_M[i] == last_M[m]
        if four:
            _add_rows(simd.zeros(4), p, base + m, v, 0, wide, first_M[m], last_M[m], o, width)
            _add_rows(simd.zeros(1), p, base + m, v, wide, chunks, first_M[m], last_M[m], o, width)
        else:
            _add_row(simd.zeros(4), p, base + m, v, 0, wide, first_M[m], last_M[m], o, width)
            _add_row(simd.zeros(1), p, base + m, v, wide, chunks, first_M[m], last_M[m], o, width)
        m += 4 if four else 1
