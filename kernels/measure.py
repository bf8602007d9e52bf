"""How far decoded weights are from their source."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def relative_error(sq_err: float, sq_norm: float) -> float:
    """sqrt(sum of squared errors / sum of squared weights): 0 for an exact tensor, infinity for errors on zeros."""
    if sq_err == 0:
        return 0.0
    return math.sqrt(sq_err / sq_norm) if sq_norm > 0 else math.inf


def sqnr_db(error: float) -> float:
    """Signal to quantisation noise in decibels for a relative error: infinity for an exact tensor."""
    if error == 0:
        return math.inf
    return -20.0 * math.log10(error) if error < math.inf else -math.inf


def differing_codes(a: NDArray[np.uint8], b: NDArray[np.uint8], bits: int) -> int:
    """Number of codes that differ between two arrays of one shape; `bits` is 8, or 4 for two codes in each byte."""
    if bits == 8:
        return int(np.count_nonzero(a != b))
    changed = a ^ b
    return int(np.count_nonzero(changed & 15) + np.count_nonzero(changed >> 4))
