"""Hessians and mean magnitudes of what enters linear layers, for methods that scale channels before codes are chosen.

What enters the experts of a layer as a whole is seen without running them: `before_experts` takes their place.

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C values of a latent row, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from quantkit.calibrate.stats import AbsMax, Hessian, HessianSum, InputRange
from torch import Tensor

EXPERTS = "experts"  # stands for the input that all routed experts of a block have


class InputWatch:
    """An observer of one block. `widths`: the inputs of each module, or of EXPERTS, that is wanted."""

    def __init__(self, widths: Mapping[str, int], device: str = "cpu") -> None:
        self._sums = {name: (HessianSum(width, device), AbsMax(width)) for name, width in widths.items()}

    def linear(self, modules: tuple[str, ...], x_TI: Tensor) -> None:
        """Inputs of one set of layers."""
        for name in modules:
            for record in self._sums.get(name, ()):
                record.update(x_TI)

    def before_experts(self, module: Any, x_TI: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Stands in for the routed experts, which give nothing."""
        self.linear((EXPERTS,), x_TI)
        return torch.zeros_like(x_TI)

    def kv(self, layer: int, q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Not wanted."""

    def latent(self, layer: int, row_TC: Tensor) -> None:
        """Not wanted."""

    def result(self, name: str) -> tuple[Hessian, InputRange]:
        """What was seen of one module's input."""
        hessian, size = self._sums[name]
        return hessian.finish(), size.finish()
