"""Attention of a batch: every piece of the plan worked through by one of several threads, spans put together.

Shape suffixes: T tokens, H query heads, V values of an output, M rows of a head in a piece,
N pieces, F fields of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import lanes, simd
from quantkit.kernels.cpu.attention_plan import ROWS, Piece, piece_of, plan, seen_from
from quantkit.kernels.cpu.attention_tile import add_scores, add_softmax, add_values
from quantkit.kernels.cpu.kv_tile import STRIDE, TILE, Rows, decode_rows, find_rows, prefetch_rows
from quantkit.kernels.cpu.workers import share

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

_LANES = simd.LANES


class Task(NamedTuple):
    """What all pieces share. `group` is query heads a KV head, `shared` says that V is the first part of K's row."""

    q: F32  # [T, H, D]
    start: I32  # query_start, lengths and block_table of the batch
    lengths: I32
    table: I32
    slots: int
    group: int
    window: int
    scale: float  # of the scores: softmax scale times the scale of K
    v_scale: float
    shared: bool


class Scratch(NamedTuple):
    """What one thread works with: rows of queries, a tile of K and of V, scores, running results, bounds of rows."""

    q: F32
    k: F32
    v: F32
    s: F32
    o: F32
    top: F32
    sum: F32
    first: I64
    last: I64
    row: I64
    next_row: I64


class Partial(NamedTuple):
    """Running maximum, sum and weighted values of every row of every span of the requests that are split."""

    top: F32
    sum: F32
    o: F32


@njit(nogil=True, cache=True, error_model="numpy")
def _scratch(k_chunks: int, v_chunks: int, shared: bool) -> Scratch:
    k = lanes.aligned_zeros(k_chunks * STRIDE)
    return Scratch(
        q=lanes.aligned_zeros(ROWS * k_chunks * _LANES),
        k=k,
        v=k if shared else lanes.aligned_zeros(v_chunks * STRIDE),
        s=lanes.aligned_zeros(ROWS * TILE),
        o=lanes.aligned_zeros(ROWS * v_chunks * _LANES),
        top=np.empty(ROWS, np.float32),
        sum=np.empty(ROWS, np.float32),
        first=np.empty(ROWS, np.int64),
        last=np.empty(ROWS, np.int64),
        row=np.empty(TILE, np.int64),
        next_row=np.empty(TILE, np.int64),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _start(task: Task, piece: Piece, padded: int, scratch: Scratch) -> None:
    """The queries of a piece into scratch, and nothing seen so far."""
    q, q_THD, group = scratch.q, task.q, task.group
    scratch.top[:] = -np.inf
    scratch.sum[:] = 0
    scratch.o[: piece.heads * piece.rows * (scratch.o.size // ROWS)] = 0
    to = 0
    for head in range(piece.head, piece.head + piece.heads):
        for row in range(piece.row, piece.row + piece.rows):
            t, h = task.start[piece.request] + row // group, head * group + row % group
            for d in range(q_THD.shape[2]):
                q[to + d] = q_THD[t, h, d]
            to += padded


@njit(nogil=True, cache=True, error_model="numpy")
def _bounds(task: Task, piece: Piece, tile: int, scratch: Scratch) -> None:
    """Which tokens of the tile that begins at token `tile` each row of the piece sees."""
    length = int(task.lengths[piece.request])
    queries = int(task.start[piece.request + 1]) - int(task.start[piece.request])
    first_M, last_M, group, window = scratch.first, scratch.last, task.group, task.window
    for m in range(piece.rows):
        query = (piece.row + m) // group
        first = max(seen_from(query, length, queries, window), piece.first)
        last = min(length - queries + query + 1, piece.last)
        first_M[m] = min(max(first - tile, 0), TILE)
        last_M[m] = min(max(last - tile, 0), TILE)


@njit(nogil=True, cache=True, error_model="numpy")
def _go_through(task: Task, k_rows: Rows, v_rows: Rows, piece: Piece, k_chunks: int, scratch: Scratch) -> None:
    """All tokens of a piece, tile by tile; while it works on one, the memory of the next is on its way."""
    table_L, slots, rows, width = task.table[piece.request], task.slots, piece.rows, scratch.o.size // ROWS
    row, next_row, first, last = scratch.row, scratch.next_row, piece.first, piece.last
    q, k, v, s, o, top, total = scratch.q, scratch.k, scratch.v, scratch.s, scratch.o, scratch.top, scratch.sum
    first_M, last_M = scratch.first, scratch.last
    find_rows(table_L, slots, k_rows.heads, piece.head, first, min((first // TILE + 1) * TILE, last), row)
    for tile in range(first // TILE * TILE, last, TILE):
        a, b = max(first - tile, 0), min(last - tile, TILE)
        ahead = max(min(last - tile - TILE, TILE), 0)
        find_rows(table_L, slots, k_rows.heads, piece.head, tile + TILE, tile + TILE + ahead, next_row)
        _bounds(task, piece, tile, scratch)
        for i in range(piece.heads):
            share = ahead * i // piece.heads, ahead * (i + 1) // piece.heads
            prefetch_rows(k_rows, next_row, piece.heads, share[0], share[1])
            decode_rows(k_rows, row, i, a, b, k)
            add_scores(q, i * rows, rows, k_chunks, k, first_M, last_M, s)
            add_softmax(s, i * rows, rows, first_M, last_M, np.float32(task.scale), top, total, o, width)
            if not task.shared:
                prefetch_rows(v_rows, next_row, piece.heads, share[0], share[1])
                decode_rows(v_rows, row, i, a, b, v)
            add_values(s, i * rows, rows, v, first_M, last_M, o, width)
        row, next_row = next_row, row


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(
    task: Task, sinks_H: F32, request: int, head: int, row: int, top: np.float32, total: np.float32,
    o_V: F32, out_THV: F32,
) -> None:  # fmt: skip
    """Divide a row's weighted values by the sum of the weights, its sink among them, into the output."""
    t, h = task.start[request] + row // task.group, head * task.group + row % task.group
    factor = np.float32(task.v_scale)
    if sinks_H.size:
        new = max(top, sinks_H[h])
        shrink = np.float32(math.exp(top - new))
        total = total * shrink + np.float32(math.exp(sinks_H[h] - new))
        factor *= shrink
    for d in range(out_THV.shape[2]):
        out_THV[t, h, d] = o_V[d] / total * factor


@njit(nogil=True, cache=True, error_model="numpy")
def _work(
    worker: int, workers: int, task: Task, k_rows: Rows, v_rows: Rows, sinks_H: F32, plan_NF: I64, part: Partial,
    out_THV: F32,
) -> None:  # fmt: skip
    """Every piece whose number is `worker` modulo `workers`."""
    k_chunks, v_chunks = -(-k_rows.width // _LANES), -(-out_THV.shape[2] // _LANES)
    scratch, width = _scratch(k_chunks, v_chunks, task.shared), v_chunks * _LANES
    for n in range(worker, len(plan_NF), workers):
        piece = piece_of(plan_NF[n])
        _start(task, piece, k_chunks * _LANES, scratch)
        _go_through(task, k_rows, v_rows, piece, k_chunks, scratch)
        count, at = piece.heads * piece.rows, piece.part
        if piece.spans > 1:
            part.top[at : at + count] = scratch.top[:count]
            part.sum[at : at + count] = scratch.sum[:count]
            part.o[at * width : (at + count) * width] = scratch.o[: count * width]
        else:
            for m in range(count):
                head, row = piece.head + m // piece.rows, piece.row + m % piece.rows
                o_V = scratch.o[m * width : (m + 1) * width]
                _finish(task, sinks_H, piece.request, head, row, scratch.top[m], scratch.sum[m], o_V, out_THV)


@njit(nogil=True, cache=True, error_model="numpy")
def _merge(task: Task, sinks_H: F32, plan_NF: I64, part: Partial, out_THV: F32) -> None:
    """Put the spans of each split block together, in the order of the tokens."""
    width = -(-out_THV.shape[2] // _LANES) * _LANES
    o_V = np.empty(width, np.float32)
    for n in range(len(plan_NF)):
        piece = piece_of(plan_NF[n])
        if piece.spans == 1 or piece.span > 0:
            continue
        count = piece.heads * piece.rows
        for m in range(count):
            top, total = np.float32(-np.inf), np.float32(0)
            for i in range(piece.spans):
                top = max(top, part.top[piece.part + i * count + m])
            shift = top if top > -np.inf else np.float32(0)
            o_V[:] = 0
            for i in range(piece.spans):
                at = piece.part + i * count + m
                weight = np.float32(math.exp(part.top[at] - shift))
                total += weight * part.sum[at]
                for d in range(width):
                    o_V[d] += weight * part.o[at * width + d]
            head, row = piece.head + m // piece.rows, piece.row + m % piece.rows
            _finish(task, sinks_H, piece.request, head, row, top, total, o_V, out_THV)


def run(task: Task, k_rows: Rows, v_rows: Rows, sinks_H: F32 | None, out_THV: F32, threads: int) -> None:
    """Attention of all queries of the task into out_THV float32 [T, H, V]; `v_rows` is ignored where V is shared."""
    sinks = np.empty(0, np.float32) if sinks_H is None else sinks_H
    pieces = plan(task.start, task.lengths, k_rows.heads, task.group, task.window)
    if len(pieces) == 0:
        return
    last, width = Piece(*pieces[-1].tolist()), -(-out_THV.shape[2] // _LANES) * _LANES
    rows = last.part + last.heads * last.rows
    part = Partial(np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows * width, np.float32))
    workers = max(min(threads, len(pieces)), 1)
    share(lambda worker: _work(worker, workers, task, k_rows, v_rows, sinks, pieces, part, out_THV), workers)
    _merge(task, sinks, pieces, part, out_THV)
