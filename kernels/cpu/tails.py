"""Weights of inputs that keep what heavy tails stand for, to search scales with where no activations were measured.

The inputs that carry a model's few very large activations are those whose weights have heavy tails over the outputs
(kurtosis n sum w^4 / (sum w^2)^2), and weights are small where activations are large. So the loss of a group is

    sum_c h_c |w_c|^0.5 (w_c - w_hat_c)^2        h_c = kurtosis_c^2 / mean(w_c^2)

with |w|^0.5 so that what is large is kept well. KL to BF16 of SmolLM2-135M on 10 x 512 tokens of wikitext-2, by h:

                least squared error    kurtosis^2    kurtosis^2 / mean(w^2)
    NVFP4       0.182                  0.124         0.113
    INT4 g64    0.408                  0.280         0.276

Exponents were tried on that text alone, with another list of INT4 candidates; with the present one INT4 has 0.286.

The statistics are those of the whole matrix, so rows are read twice: `add_moments` over all of them, then the search.
In this loss no group is worse than under the plain scale of its format; in the plain squared error it may be.

The searches are in `int4_tails.py` and `nvfp4.py`. Shape suffixes: R rows, I inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@njit(nogil=True, cache=True, error_model="numpy")
def add_moments(w_RI: F32, square_I: F64, fourth_I: F64) -> None:
    """Add w^2 and w^4 of more rows of a matrix, row after row: chunks of any size give the same sums."""
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            square = np.float64(w_RI[r, i]) * np.float64(w_RI[r, i])
            square_I[i] += square
            fourth_I[i] += square * square


def tail_weights(square_I: F64, fourth_I: F64, rows: int) -> F32:
    """Weights h of all columns from their sums over `rows` rows: float32, the largest is 1; 0 for a column of zeros."""
    used_I = square_I > 0
    safe_I = np.where(used_I, square_I, 1.0)
    h_I = np.where(used_I, np.square(rows * fourth_I / np.square(safe_I)) * (rows / safe_I), 0.0)
    weights: F32 = (h_I / max(h_I.max(), np.finfo(np.float64).tiny)).astype(np.float32)
    return weights


def tail_loss(w_RI: F32, w_hat_RI: F32, h_I: F32) -> float:
    """The loss of some rows that the method minimises, in float64."""
    weight_RI = np.sqrt(np.abs(w_RI.astype(np.float64))) * h_I
    return float((weight_RI * np.square(w_RI.astype(np.float64) - w_hat_RI)).sum())
