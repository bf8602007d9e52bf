"""Scales that keep what heavy tails stand for: the weighted search of `weighted.py` where no activations were measured.

The inputs that carry a model's few very large activations are those whose weights have heavy tails over the outputs
(kurtosis n sum w^4 / (sum w^2)^2), and weights are small where activations are large. So the loss of a group is

    sum_c h_c |w_c|^0.5 (w_c - w_hat_c)^2        h_c = kurtosis_c^2 / mean(w_c^2)

with |w|^0.5 so that what is large is kept well. KL to BF16 of SmolLM2-135M on 10 x 512 tokens of wikitext-2, by h:

                least squared error    kurtosis^2    kurtosis^2 / mean(w^2)
    NVFP4       0.182                  0.124         0.113
    INT4 g64    0.408                  0.280         0.276

Exponents were tried on that text alone.

The statistics are those of the whole matrix, so rows are read twice: `add_moments` over all of them, then the search.
In this loss no group is worse than under the plain scale of its format; in the plain squared error it may be.

Shape suffixes: R rows, I inputs, G groups, B bytes of packed codes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import int4, nvfp4, weighted
from quantkit.kernels.cpu.decode import fp4_to_f32, int4_to_f32
from quantkit.kernels.elements import E4M3_VALUES

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]


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
    """The loss of some rows that `quantize_int4_tails` and `quantize_nvfp4_tails` minimise, in float64."""
    weight_RI = np.sqrt(np.abs(w_RI.astype(np.float64))) * h_I
    return float((weight_RI * np.square(w_RI.astype(np.float64) - w_hat_RI)).sum())


def quantize_int4_tails(
    w_RI: F32, h_I: F32, group: int, half: bool, codes_RB: U8, scale_RG: U16, sq_err_R: F64, sq_norm_R: F64
) -> int:
    """As `int4.quantize_int4`, with scales by `tail_weights` of the whole matrix and the size of each weight."""
    bad_row = _not_finite(w_RI)
    if bad_row >= 0:
        return bad_row
    scale_RS, w_hat_RI = np.empty(scale_RG.shape, np.float32), np.empty_like(w_RI)
    weighted.int4_scales(w_RI, h_I, group, half, True, scale_RS)
    scale_RG[:] = scale_RS.astype(np.float16).view(np.uint16) if half else scale_RS.view(np.uint32) >> 16
    int4.requantize_int4(w_RI, group, half, scale_RG, codes_RB)
    int4_to_f32(codes_RB, scale_RS, np.zeros(scale_RG.shape, np.int8), w_hat_RI)
    _errors(w_RI, w_hat_RI, sq_err_R, sq_norm_R)
    return -1


def quantize_nvfp4_tails(
    w_RI: F32, h_I: F32, scale_2: np.float32, codes_RB: U8, scale_RG: U8, sq_err_R: F64, sq_norm_R: F64
) -> int:
    """As `nvfp4.quantize_nvfp4`, with scales by `tail_weights` of the whole matrix and the size of each weight."""
    bad_row = _not_finite(w_RI)
    if bad_row >= 0:
        return bad_row
    w_hat_RI = np.empty_like(w_RI)
    weighted.nvfp4_scales(w_RI, h_I, scale_2, True, scale_RG)
    nvfp4.requantize_nvfp4(w_RI, scale_2, scale_RG, codes_RB)
    fp4_to_f32(codes_RB, E4M3_VALUES[scale_RG] * scale_2, 16, w_hat_RI)
    _errors(w_RI, w_hat_RI, sq_err_R, sq_norm_R)
    return -1


def _not_finite(w_RI: F32) -> int:
    """The first row with a NaN or infinity, else -1."""
    finite_R = np.isfinite(w_RI).all(axis=1)
    return -1 if finite_R.all() else int(np.argmin(finite_R))


def _errors(w_RI: F32, w_hat_RI: F32, sq_err_R: F64, sq_norm_R: F64) -> None:
    sq_err_R[:] = np.square(w_RI.astype(np.float64) - w_hat_RI).sum(1)
    sq_norm_R[:] = np.square(w_RI.astype(np.float64)).sum(1)
