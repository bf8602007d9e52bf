"""Rows of a matrix, shared out over the threads that torch may use: no row knows of another, kernels free the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_MULTIPLE = 64  # rows that the inner loops take side by side


def by_rows(rows: int, work: Callable[[slice], None]) -> None:
    """Call `work` with slices that make up all rows; raises what it raises."""
    threads = torch.get_num_threads()
    size = -(-rows // (threads * _MULTIPLE)) * _MULTIPLE
    shares = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
    if len(shares) == 1:
        work(shares[0])
        return
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(work, shares))
