"""Coordinate descent after GPTQ: codes and scales move, one at a time, to where the loss of the whole matrix is least.

With D = W - W_hat the loss of a row is d H d^T. `slope` = D H is kept up to date, so that

    a group's scale  times a = 1 + <slope, w_hat> / (w_hat H_gg w_hat^T), over the group's inputs, is the best one for
                     codes and other groups as they are; it is rounded to its stored format and kept if that still helps
    a code           w_hat_c + slope_c / H_cc is the best value, of which the grid's nearest is taken

GPTQ fixes a column before it knows those to its right; here each weight sees all others.
Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import numpy as np
import torch
from quantkit.kernels.cpu.gptq import descend_block
from quantkit.quantize.methods.grid import Grid
from torch import Tensor


def sweep(h_II: Tensor, added_I: Tensor, grid: Grid, hat_OI: Tensor, slope_OI: Tensor, block: int) -> None:
    """One pass over all scales, then one over all weights; `grid`, `hat_OI` and `slope_OI` change.

    h_II, added_I  symmetric, and what is added to its diagonal, which is positive then: the H of all this is their sum
    block          columns between two matrix products
    """
    for g in range(grid.stored_OG.shape[1]):
        _refit(g, h_II, added_I, grid, hat_OI, slope_OI)
    scale, zero = grid.scale_OG.numpy(), grid.zero_OG.numpy()
    group_I = np.arange(len(h_II)) // grid.group
    for at in range(0, len(h_II), block):
        here = slice(at, min(at + block, len(h_II)))
        slope, part = slope_OI[:, here].cpu().contiguous().numpy(), hat_OI[:, here].cpu().contiguous()
        moved = torch.empty_like(part)
        corner = _corner(h_II, added_I, here).cpu().numpy()
        descend_block(slope, corner, scale, zero, group_I[here], grid.fp4, part.numpy(), moved.numpy())
        hat_OI[:, here] = part.to(hat_OI.device)
        _follow(slope_OI, moved.to(hat_OI.device), h_II, added_I, here)


def _corner(h_II: Tensor, added_I: Tensor, here: slice) -> Tensor:
    corner_II = h_II[here, here].clone(memory_format=torch.contiguous_format)
    corner_II.diagonal().add_(added_I[here])
    return corner_II


def _follow(slope_OI: Tensor, moved_OI: Tensor, h_II: Tensor, added_I: Tensor, here: slice) -> None:
    """The slopes after the weights of some columns moved."""
    slope_OI -= moved_OI @ h_II[here]
    slope_OI[:, here] -= moved_OI * added_I[here]


def _refit(g: int, h_II: Tensor, added_I: Tensor, grid: Grid, hat_OI: Tensor, slope_OI: Tensor) -> None:
    """Scale group `g` of every row anew; rows that gain nothing keep their scale."""
    here = slice(g * grid.group, (g + 1) * grid.group)
    part_OI, corner_II = hat_OI[:, here], _corner(h_II, added_I, here)
    power_O = ((part_OI @ corner_II) * part_OI).sum(1)
    wanted_O = 1 + (slope_OI[:, here] * part_OI).sum(1) / power_O.clamp(min=torch.finfo(torch.float32).tiny)
    old_O, scale_O = grid.stored_OG[:, g], grid.scale_OG[:, g]
    new_O = grid.rounded(scale_O * wanted_O.cpu())
    usable_O = torch.isfinite(wanted_O).cpu() & (wanted_O > 0).cpu() & (power_O > 0).cpu()
    new_O = torch.where(usable_O, new_O, old_O)
    # from codes, not by the ratio of scales: the result has to be what the codes decode to, to the bit
    codes_OI = (part_OI.cpu() / scale_O[:, None] * 2).round() / 2
    new_OI = (codes_OI * grid.value(new_O)[:, None]).to(h_II.device)
    change_OI = new_OI - part_OI
    gain_O = 2 * (slope_OI[:, here] * change_OI).sum(1) - ((change_OI @ corner_II) * change_OI).sum(1)
    better_O = gain_O > 0
    grid.stored_OG[:, g] = torch.where(better_O.cpu(), new_O, old_O)
    hat_OI[:, here] = torch.where(better_O[:, None], new_OI, part_OI)
    _follow(slope_OI, change_OI * better_O[:, None], h_II, added_I, here)
