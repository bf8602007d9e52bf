"""How a matrix is cut: blocks of rows are read and written at once, chunks of a block decoded and quantised at once.

Neither size changes the output.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.scheme import BLOCK

CHUNK_WEIGHTS = 1 << 18  # float32 weights decoded at once: 1 MB, half of a core's level-2 cache
BLOCK_BYTES = 16 << 20  # most that is read at once, however large the budget


def blocks_of(rows: int, inputs: int, memory: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of blocks that are multiples of 128 rows and fit the budget (at least 128 rows)."""
    fit = max(1, min(memory // 4, BLOCK_BYTES) // max(1, 4 * inputs * BLOCK)) * BLOCK
    for first in range(0, rows, fit):
        yield first, min(fit, rows - first)


def chunks_of(rows: int, inputs: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of chunks of a block: multiples of `multiple` rows, sized for the cache."""
    size = chunk_rows(inputs, multiple)
    for first in range(0, rows, size):
        yield first, min(size, rows - first)


def chunk_rows(inputs: int, multiple: int) -> int:
    """Rows of a chunk: a multiple of `multiple` that fits the cache."""
    return max(1, CHUNK_WEIGHTS // max(1, inputs * multiple)) * multiple
