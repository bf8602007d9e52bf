"""Hidden states of all samples between two blocks: in memory up to a budget, the rest in files.

Letters: N samples of one batch, L tokens of a sample, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class State:
    """What enters a block: hidden states [N, L, D] of samples of equal length, and what else the family passes on.

    `rest` is None for a family whose layers return a tensor, else the other members of their tuple (GLM-DSA: the token
    indices that its next layers share).
    """

    hidden: torch.Tensor
    rest: tuple[torch.Tensor | None, ...] | None = None
