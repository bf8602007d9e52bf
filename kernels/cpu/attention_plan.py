"""Attention of a batch as independent pieces of work, shared by threads.

A piece is a block of up to ROWS rows of queries of one request (a row is a query of one head), over all tokens they see
or, where a request has few rows, over a span of them: with one query the length of the cache is all there is to share
(flash-decoding). Spans begin at multiples of their size, which depends on the length of the request alone, and are put
together in order afterwards, so that results do not depend on the batch or the threads. A piece with few rows a KV head
takes several heads, which lie side by side in memory: a tile of tokens is read from one end to the other.

Shape suffixes: R requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.kv_tile import TILE

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

ROWS = 64  # of queries in a piece, those of all its heads
_SPLIT_ROWS = 256  # a request with more rows a KV head has pieces enough
_SPAN, _SPANS = 512, 32  # least tokens of a span, most spans of a request


class Piece(NamedTuple):
    """The heads head .. head + heads - 1 and their rows row .. row + rows - 1, over the tokens first .. last - 1.

    A row of a KV head is query row // group, query head row % group of the group. part: where the partial results of
    the first of `spans` spans go, one row after the other, head by head; with one span results are final.
    """

    request: int
    head: int
    heads: int
    row: int
    rows: int
    first: int
    last: int
    span: int
    spans: int
    part: int


@njit(nogil=True, cache=True, error_model="numpy")
def seen_from(query: int, length: int, queries: int, window: int) -> int:
    """First token that query number `query` of a request sees."""
    return max(length - queries + query + 1 - window, 0) if window else 0


@njit(nogil=True, cache=True, error_model="numpy")
def _span(length: int, rows: int) -> int:
    """Tokens of a span of a request."""
    if rows > _SPLIT_ROWS:
        return length
    return max(_SPAN, -(-length // (_SPANS * TILE)) * TILE)


@njit(nogil=True, cache=True, error_model="numpy")
def _pieces(start_R: I32, lengths_R: I32, heads: int, group: int, window: int) -> list[Piece]:
    pieces = [Piece(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]  # tells the compiler the type of the list
    pieces.pop()
    part = 0
    for r in range(lengths_R.size):
        length, queries = int(lengths_R[r]), int(start_R[r + 1]) - int(start_R[r])
        span = max(_span(length, queries * group), 1)
        for row in range(0, queries * group, ROWS):
            rows = min(ROWS, queries * group - row)
            first = seen_from(row // group, length, queries, window)
            last = length - queries + (row + rows - 1) // group + 1
            spans = -(-last // span) - first // span
            together = max(ROWS // rows, 1)
            for head in range(0, heads, together):
                count = min(together, heads - head)
                for i in range(spans):
                    edge = (first // span + i) * span
                    a, b = max(first, edge), min(last, edge + span)
                    pieces.append(Piece(r, head, count, row, rows, a, b, i, spans, part))
                    part += count * rows if spans > 1 else 0
    return pieces


@njit(nogil=True, cache=True, error_model="numpy")
def plan(start_R: I32, lengths_R: I32, heads: int, group: int, window: int) -> I64:
    """The pieces of a batch, one a line with the fields of `Piece`; the spans of a block follow one another."""
    pieces = _pieces(start_R, lengths_R, heads, group, window)
    table = np.empty((len(pieces), 10), np.int64)
    for n in range(len(pieces)):
        for i, number in enumerate(pieces[n]):
            table[n, i] = number
    return table


@njit(nogil=True, cache=True, error_model="numpy")
def piece_of(line: I64) -> Piece:
    """A line of the plan by name."""
    return Piece(line[0], line[1], line[2], line[3], line[4], line[5], line[6], line[7], line[8], line[9])
