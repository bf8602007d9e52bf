"""How far a decoded weight is from its source, from per-row sums so that the cut into chunks does not show.

`math.fsum` adds exactly and rounds once: any order and any chunking of the same rows gives the same number.
Shape suffixes: R rows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def relative_error(sq_err_R: F64, sq_norm_R: F64) -> float:
    """sqrt(sum of squared errors / sum of squared weights): 0 for an exact tensor, infinity for errors on zeros."""
    error, norm = math.fsum(sq_err_R), math.fsum(sq_norm_R)
    if error == 0:
        return 0.0
    return math.sqrt(error / norm) if norm > 0 else math.inf


def sqnr_db(sq_err_R: F64, sq_norm_R: F64) -> float:
    """Signal to quantisation noise in decibels, infinity for an exact tensor."""
    error = relative_error(sq_err_R, sq_norm_R)
    return math.inf if error == 0 else -20.0 * math.log10(error) if error < math.inf else -math.inf


def differing_codes(a: NDArray[np.uint8], b: NDArray[np.uint8], bits: int) -> int:
    """Number of codes that differ between two arrays of one shape; `bits` is 8, or 4 for two codes in each byte."""
    if bits == 8:
        return int(np.count_nonzero(a != b))
    changed = a ^ b
    return int(np.count_nonzero(changed & 15) + np.count_nonzero(changed >> 4))
