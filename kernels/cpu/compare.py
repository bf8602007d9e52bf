"""Sums for the verifier: how far decoded weights are from their source, and what products with them are.

Letters: T tokens, R rows, I inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd

F32 = NDArray[np.float32]


# Only sums are reordered (they are compared with a tolerance); NaN and infinity keep their meaning.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def sq_difference(w_RI: F32, hat_RI: F32) -> tuple[float, float]:
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


@njit(nogil=True, cache=True, error_model="numpy")
def products(x_TI: F32, w_RI: F32, y_TR: F32, size_TR: F32) -> None:
    """Products of tokens and rows into `y_TR`, and the sums of their magnitudes into `size_TR`, in float32.

    On the calling thread alone: BLAS would start threads of its own in every worker.
    """
    x, w, inputs = x_TI.reshape(-1), w_RI.reshape(-1), x_TI.shape[1]
    whole = inputs // simd.LANES * simd.LANES
    for r in range(w_RI.shape[0]):
        for t in range(x_TI.shape[0]):
            sums = simd.zeros(1)
            sizes = simd.zeros(1)
            for i in range(0, whole, simd.LANES):
                a, b = simd.load_f32(x, t * inputs + i), simd.load_f32(w, r * inputs + i)
                sums = simd.fma(a, b, sums)
                sizes = simd.fma(simd.magnitude(a), simd.magnitude(b), sizes)
            y, size = simd.total(sums), simd.total(sizes)
            for i in range(whole, inputs):
                y += x_TI[t, i] * w_RI[r, i]
                size += abs(x_TI[t, i] * w_RI[r, i])
            y_TR[t, r] = y
            size_TR[t, r] = size
