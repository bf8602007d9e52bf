"""Clip: scales below the largest weight of a group, each group for itself, by what an error there costs.

AWQ (J. Lin et al., arXiv 2306.00978) tries to cut the largest weights of each group to 1, 0.95, ... 0.5 of their size
and keeps what changes the outputs least. The paper measures outputs of a sample of tokens; the block of the Hessian
that belongs to the group gives the same sum over all tokens. Zero points stay: both ends of a group are cut alike.

Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from quantkit.quantize.methods.grid import Grid, nearest_to
from torch import Tensor

RATIOS = tuple(1 - 0.05 * k for k in range(11))


def clipped(w_OI: Tensor, h_II: Tensor, plain: Grid, best: Grid) -> Grid:
    """In each group the scale that costs least: that of `best`, or a share of that of `plain`.

    plain  scales by the largest weight of a group;  h_II  symmetric, on the weights' device
    """
    groups, size = plain.stored_OG.shape[1], plain.group
    blocks_GII = torch.stack([h_II[i : i + size, i : i + size] for i in range(0, groups * size, size)])
    found = best.copy()
    cost_OG = _costs(w_OI, blocks_GII, found)
    for ratio in RATIOS:
        grid = replace(plain, stored_OG=plain.rounded(plain.scale_OG * ratio))
        tried_OG = _costs(w_OI, blocks_GII, grid)
        less_OG = tried_OG < cost_OG
        cost_OG = torch.where(less_OG, tried_OG, cost_OG)
        found.stored_OG = torch.where(less_OG.cpu(), grid.stored_OG, found.stored_OG)
        found.zero_OG = torch.where(less_OG.cpu(), grid.zero_OG, found.zero_OG)
    return found


def _costs(w_OI: Tensor, blocks_GII: Tensor, grid: Grid) -> Tensor:
    """The loss d H d^T of every group under a grid, rounded to nearest."""
    d_OI = w_OI - nearest_to(grid, w_OI)
    d_GOI = d_OI.reshape(len(d_OI), -1, grid.group).transpose(0, 1)
    return ((d_GOI @ blocks_GII) * d_GOI).sum(2).T
