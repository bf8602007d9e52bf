"""Sums of squares for the verifier: how far decoded weights are from their source.

Letters: R rows, I inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


# Only sums are reordered (they are compared with a tolerance); NaN and infinity keep their meaning.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def sq_difference(w_RI: NDArray[np.float32], hat_RI: NDArray[np.float32]) -> tuple[float, float]:
    """(sum (w - w_hat)^2, sum w^2) of two float32 arrays, in float64."""
    sq_err = 0.0
    sq_norm = 0.0
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            w = np.float64(w_RI[r, i])
            d = w - np.float64(hat_RI[r, i])
            sq_err += d * d
            sq_norm += w * w
    return sq_err, sq_norm
