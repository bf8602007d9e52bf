"""What an FP8 KV cache does to numbers, and its statistics, by plain numpy in float64. Shares no code with the product."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def smallest_covering(x: F64, share: float) -> float:
    """The smallest magnitude m of `x` for which a `share` of all magnitudes are <= m."""
    ordered = np.sort(np.abs(x).ravel())
    return float(ordered[int(np.ceil(share * ordered.size)) - 1])


def stored_e4m3(x: F64, scale: float) -> F64:
    """clamp(x / scale) rounded to the nearest number of 3 mantissa bits, steps of 2^-9 at the smallest; times scale."""
    q = np.clip(x / scale, -448.0, 448.0)
    exponent = np.floor(np.log2(np.maximum(np.abs(q), 2.0**-30)))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.rint(q / step) * step * scale


def longest_pair(x: F64, width: int, interleaved: bool) -> float:
    """The largest length of two values that RoPE rotates together, or magnitude of one that stays."""
    best = 0.0
    for row in x.reshape(-1, x.shape[-1]):
        for i in range(width // 2):
            a, b = (row[2 * i], row[2 * i + 1]) if interleaved else (row[i], row[i + width // 2])
            best = max(best, float(np.hypot(a, b)))
        best = max([best, *np.abs(row[width:])])
    return best
