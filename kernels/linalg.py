"""The factor that GPTQ corrects by: U, upper triangular, with (H + damp * mean(diag H) * 1)^-1 = U^T U.

E. Frantar et al., GPTQ (arXiv 2210.17323), invert H and take the Cholesky factor of the inverse. The same U is the
inverse of R in H = R R^T with R upper triangular, which is a Cholesky factorisation of H read from its last row to its
first: one factorisation and one triangular inverse instead of two factorisations and an inverse, and less rounding.
Computed in float64, on the device of H; the caller orders the columns first.

Shape suffixes: I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SMALL = 256  # inputs whose triangle is inverted at once
LADDER = (0.01, 0.03, 0.09, 0.27, 0.81, 1.0)


def inverse_factor(h_II: Tensor, damp: float) -> Tensor | None:
    """U as float32, or None where the damped matrix is not positive definite or U is not finite.

    h_II  float32 or float64, symmetric, no dead columns (a zero on the diagonal);  damp  a share of the mean diagonal
    """
    # of these matrices no more than two are in memory at once, and quarters
    damped_II = h_II.flip(0, 1).double()
    damped_II.diagonal().add_(damp * float(h_II.diagonal().double().mean()))
    factor_II, failed = torch.linalg.cholesky_ex(damped_II)
    del damped_II
    if int(failed):
        return None
    factor_II = factor_II.flip(0, 1)
    invert_upper(factor_II)
    upper_II = factor_II.float()
    usable = bool(torch.isfinite(upper_II).all()) and bool((upper_II.diagonal() > 0).all())
    return upper_II if usable else None


def invert_upper(r_II: Tensor) -> None:
    """Put the inverse of an upper triangular matrix in its place, by halves: the work is in matrix products."""
    size = len(r_II)
    if size <= SMALL:
        one_II = torch.eye(size, dtype=r_II.dtype, device=r_II.device)
        r_II.copy_(torch.linalg.solve_triangular(r_II, one_II, upper=True))
        return
    first, last = slice(0, size // 2), slice(size // 2, size)
    invert_upper(r_II[first, first])
    invert_upper(r_II[last, last])
    r_II[first, last] = r_II[first, first] @ r_II[first, last] @ r_II[last, last].neg()


def damped_factor(h_II: Tensor, ladder: Iterable[float] = LADDER) -> tuple[Tensor, float] | None:
    """U and the damping it took: the first of the ladder that serves; None when none does (H holds a NaN, say)."""
    for damp in ladder:
        upper_II = inverse_factor(h_II, damp)
        if upper_II is not None:
            return upper_II, damp
    return None
