"""Independent pieces of work on the threads that torch may use.

A thread has one BLAS thread: how a matrix product is split up changes its sums, and the number of threads must not show
in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def side_by_side(work: Sequence[Callable[[], T]]) -> list[T]:
    """The result of each piece, in order; raises what one raises."""
    threads = torch.get_num_threads()

    def alone(piece: Callable[[], T]) -> T:
        torch.set_num_threads(1)
        return piece()

    try:
        with ThreadPoolExecutor(min(threads, len(work))) as pool:
            return list(pool.map(alone, work))
    finally:
        torch.set_num_threads(threads)
