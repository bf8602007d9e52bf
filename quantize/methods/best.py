"""Results of a method, measured by the loss d H d^T of each row: each row keeps the one that loses least.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from quantkit.quantize.methods.descent import sweep
from quantkit.quantize.methods.grid import Grid
from torch import Tensor


class Best:
    """The best result so far, row by row."""

    def __init__(self, w_OI: Tensor, h_II: Tensor, grid: Grid) -> None:
        self.w_OI, self.h_II, self.grid = w_OI, h_II, grid.copy()
        self.hat_OI = self.slope_OI = torch.zeros_like(w_OI)  # slope: (W - W_hat) H
        self.loss_O = torch.full((len(w_OI),), torch.inf, device=w_OI.device)

    def offer(self, hat_OI: Tensor, grid: Grid) -> None:
        """Measure a result and take the rows that lose less; one whose loss is not a number does not."""
        self._take(hat_OI, grid, *losses(self.w_OI - hat_OI, self.h_II))

    def sweep(self, added_I: Tensor, block: int) -> None:
        """One more round of coordinate descent, which keeps the slopes up to date: they are not computed anew."""
        hat_OI, grid = self.hat_OI.clone(), self.grid.copy()
        slope_OI = self.slope_OI + (self.w_OI - hat_OI) * added_I
        sweep(self.h_II, added_I, grid, hat_OI, slope_OI, block)
        d_OI = self.w_OI - hat_OI
        slope_OI -= d_OI * added_I
        self._take(hat_OI, grid, torch.linalg.vecdot(slope_OI, d_OI), slope_OI)

    def _take(self, hat_OI: Tensor, grid: Grid, loss_O: Tensor, slope_OI: Tensor) -> None:
        better_O = loss_O < self.loss_O
        self.loss_O = torch.where(better_O, loss_O, self.loss_O)
        self.hat_OI = torch.where(better_O[:, None], hat_OI, self.hat_OI)
        self.slope_OI = torch.where(better_O[:, None], slope_OI, self.slope_OI)
        self.grid.take(better_O, grid)


def losses(d_OI: Tensor, h_II: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every row, d H d^T, and D H."""
    slope_OI = d_OI @ h_II
    return torch.linalg.vecdot(slope_OI, d_OI), slope_OI


def least(tried: Sequence[tuple[Tensor, Tensor, Grid]]) -> tuple[Tensor, Grid]:
    """Of results with the loss of their rows and their grids, each row of the one that loses least."""
    hat_OI, loss_O, grid = tried[0]
    grid = grid.copy()
    for other_OI, other_O, other in tried[1:]:
        better_O = ~(loss_O <= other_O)  # also where the first is not a number
        loss_O = torch.where(better_O, other_O, loss_O)
        hat_OI = torch.where(better_O[:, None], other_OI, hat_OI)
        grid.take(better_O, other)
    return hat_OI, grid
