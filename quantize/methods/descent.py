"""Coordinate descent after GPTQ: codes and scales move, one at a time, to where the loss of the whole matrix is least.

With D = W - W_hat the loss of a row is d H d^T. `slope` = D H is kept up to date, so that

    a group's scale  times a = 1 + <slope, w_hat> / (w_hat H_gg w_hat^T), over the group's inputs, is the best one for
                     codes and other groups as they are; it is rounded to its stored format and kept if that still helps
    a code           w_hat_c + slope_c / H_cc is the best value, of which the grid's nearest is taken

GPTQ fixes a column before it knows those to its right; here each weight sees all others. Columns are worked on in
blocks of whole groups, scales first, so that one matrix product a block tells all other columns what has moved.
Shape suffixes: O outputs, I inputs (of the matrix, or of a block or group where a function is given one).
"""

from __future__ import annotations

import numpy as np
import torch
from quantkit.kernels.cpu.gptq import descend_block
from quantkit.quantize.methods.grid import Grid
from torch import Tensor


def sweep(h_II: Tensor, added_I: Tensor, grid: Grid, hat_OI: Tensor, slope_OI: Tensor, block: int) -> None:
    """One pass over all scales and weights; `grid`, `hat_OI` and `slope_OI` change.

    h_II, added_I  symmetric, and what is added to its diagonal, which is positive then: the H of all this is their sum
    block          columns of a block, rounded up to whole groups
    """
    width = -(-block // grid.group) * grid.group
    for at in range(0, len(h_II), width):
        here = slice(at, min(at + width, len(h_II)))
        corner_II = h_II[here, here].clone(memory_format=torch.contiguous_format)
        corner_II.diagonal().add_(added_I[here])
        part_OI, part_slope_OI = hat_OI[:, here].clone(), slope_OI[:, here].clone()
        for g in range(at // grid.group, here.stop // grid.group):
            inside = slice(g * grid.group - at, (g + 1) * grid.group - at)
            new_OI = _refit(g, corner_II[inside, inside], grid, part_OI[:, inside], part_slope_OI[:, inside])
            part_slope_OI -= (new_OI - part_OI[:, inside]) @ corner_II[inside]
            part_OI[:, inside] = new_OI
        _descend(corner_II, grid, np.arange(at, here.stop) // grid.group, part_OI, part_slope_OI, block)
        moved_OI = part_OI - hat_OI[:, here]
        hat_OI[:, here] = part_OI
        slope_OI -= moved_OI @ h_II[here]
        slope_OI[:, here] -= moved_OI * added_I[here]


def _descend(
    corner_II: Tensor, grid: Grid, group_I: np.ndarray[tuple[int], np.dtype[np.int64]], part_OI: Tensor,
    slope_OI: Tensor, block: int,
) -> None:  # fmt: skip
    """Move each weight of a block to its best value; `part_OI` and `slope_OI` change."""
    scale, zero = grid.scale_OG.numpy(), grid.zero_OG.numpy()
    for at in range(0, len(corner_II), block):
        here = slice(at, at + block)
        slope, part = slope_OI[:, here].cpu().contiguous().numpy(), part_OI[:, here].cpu().contiguous()
        moved = torch.empty_like(part)
        square = corner_II[here, here].cpu().contiguous().numpy()
        descend_block(slope, square, scale, zero, group_I[here], grid.fp4, part.numpy(), moved.numpy())
        part_OI[:, here] = part.to(part_OI.device)
        if at + block < len(corner_II):
            slope_OI -= moved.to(slope_OI.device) @ corner_II[here]


def _refit(g: int, corner_II: Tensor, grid: Grid, part_OI: Tensor, slope_OI: Tensor) -> Tensor:
    """Scale group `g` of every row anew; what its codes stand for then. Rows that gain nothing keep their scale."""
    power_O = ((part_OI @ corner_II) * part_OI).sum(1)
    wanted_O = 1 + (slope_OI * part_OI).sum(1) / power_O.clamp(min=torch.finfo(torch.float32).tiny)
    old_O, scale_O = grid.stored_OG[:, g], grid.scale_OG[:, g]
    new_O = grid.rounded(scale_O * wanted_O.cpu())
    usable_O = torch.isfinite(wanted_O).cpu() & (wanted_O > 0).cpu() & (power_O > 0).cpu()
    new_O = torch.where(usable_O, new_O, old_O)
    # from codes, not by the ratio of scales: the result has to be what the codes decode to, to the bit
    codes_OI = (part_OI.cpu() / scale_O[:, None] * 2).round() / 2
    new_OI = (codes_OI * grid.value(new_O)[:, None]).to(corner_II.device)
    change_OI = new_OI - part_OI
    gain_O = 2 * (slope_OI * change_OI).sum(1) - ((change_OI @ corner_II) * change_OI).sum(1)
    better_O = gain_O > 0
    grid.stored_OG[:, g] = torch.where(better_O.cpu(), new_O, old_O)
    return torch.where(better_O[:, None], new_OI, part_OI)
