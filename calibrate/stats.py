"""What calibration keeps of the inputs of linear layers: Hessians for GPTQ, ranges and mean magnitudes for AWQ.

A statistic is a record with `update` (more tokens), `merge` (another worker's record) and `finish` (the result). Tokens
that hold a NaN or infinity are left out and counted; whether there were too many is for the caller to judge.

    H = 2 / n sum_t x_t x_t^T        a running mean, so that no number of tokens overflows it

is the Hessian of a layer's squared output error in each row of its weight (E. Frantar et al., GPTQ, arXiv 2210.17323).
It is symmetric: only blocks on and above the diagonal are added up, in float32; of bfloat16 inputs by the processor's
own dot product where it has one. A routed expert sees few tokens, too
few for d x d numbers; `blend` mixes what it saw with what all experts of its layer saw, as `kappa` tokens of those.

Shape suffixes: T tokens, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from quantkit.kernels.cpu.gram import add_gram, available
from quantkit.kernels.errors import QuantkitError
from torch import Tensor

Coverage = Literal["none", "low", "full"]

_BLOCK = 512  # columns whose products are added up at once


@dataclass(frozen=True, slots=True, eq=False)
class Hessian:
    """2 / n X^T X of the `tokens` finite inputs of one layer, float32, symmetric; zeros when there were none."""

    h_II: Tensor  # noqa: N815
    tokens: int
    dropped: int = 0  # tokens left out for a NaN or infinity

    @property
    def coverage(self) -> Coverage:
        """`none` without tokens; `low` with fewer than an eighth of the inputs: the estimate is mostly noise."""
        if self.tokens == 0:
            return "none"
        return "low" if 8 * self.tokens < len(self.h_II) else "full"


@dataclass(slots=True, eq=False)
class _Rows:
    """Tokens that wait: an expert sees few at a time, and a sum takes as long to read and write for few as for many."""

    inputs: int
    held: list[Tensor] = field(default_factory=list)
    count: int = 0

    def put(self, x_TI: Tensor) -> None:
        """Keep some more; the caller does not change them."""
        self.held.append(x_TI)
        self.count += len(x_TI)

    def enough(self) -> bool:
        """Whether they are worth a product: a quarter of the inputs, which takes an eighth of the sum's memory."""
        return 4 * self.count >= self.inputs

    def take(self) -> Tensor:
        """All of them, [T, I]; none wait any more."""
        x_TI = self.held[0] if len(self.held) == 1 else torch.cat(self.held)
        self.held, self.count = [], 0
        return x_TI


@dataclass(slots=True, eq=False)
class HessianSum:
    """Adds up a Hessian; `device` is where it is kept and where inputs are sent for the products."""

    inputs: int
    device: str = "cpu"
    tokens: int = 0
    dropped: int = 0
    _rows: _Rows = field(init=False)
    _upper_II: Tensor = field(init=False)  # blocks below the diagonal are not meaningful  # noqa: N815

    def __post_init__(self) -> None:
        self._rows = _Rows(self.inputs)
        self._upper_II = torch.zeros(self.inputs, self.inputs, dtype=torch.float32, device=self.device)

    def update(self, x_TI: Tensor) -> None:
        """Add tokens, which are not changed afterwards; any float dtype, products in float32."""
        _check_width(x_TI, self.inputs)
        x_TI, dropped = finite_rows(x_TI.to(self.device))
        self.dropped += dropped
        self.tokens += len(x_TI)
        self._rows.put(x_TI)
        if self._rows.enough():
            self._add()

    def _add(self) -> None:
        """Put what waits into the sum."""
        if not self._rows.count:
            return
        keep = (self.tokens - self._rows.count) / self.tokens
        x_TI, part = self._rows.take(), 2 / self.tokens
        if x_TI.dtype == torch.bfloat16 and x_TI.device.type == "cpu" and available():
            bits_TI = x_TI.contiguous().view(torch.int16).numpy().view(np.uint16)
            add_gram(bits_TI, keep, part, self._upper_II.numpy(), torch.get_num_threads())
            return
        x_TI = x_TI.float()
        for at in range(0, self.inputs, _BLOCK):
            rows = self._upper_II[at : at + _BLOCK, at:]
            rows.addmm_(x_TI[:, at : at + _BLOCK].T, x_TI[:, at:], beta=keep, alpha=part)

    def merge(self, other: HessianSum) -> None:
        """Add what another record has seen."""
        if other.inputs != self.inputs:
            raise QuantkitError("Hessians of different layers", value=other.inputs, allowed=self.inputs)
        self._add()
        other._add()
        self.dropped += other.dropped
        self.tokens += other.tokens
        if other.tokens:
            self._upper_II.lerp_(other._upper_II.to(self.device), other.tokens / self.tokens)

    def finish(self) -> Hessian:
        """The symmetric matrix."""
        self._add()
        return Hessian(_symmetric(self._upper_II), self.tokens, self.dropped)


@dataclass(slots=True, eq=False)
class PeerHessianSum:
    """Adds up the Hessian of all experts of a layer in float64, few tokens of each.

    Which expert comes first depends on how many fit into memory: products of 16-bit inputs and their sums are exact in
    float64 but for rare ones of very different size, so that the order does not show.
    """

    inputs: int
    device: str = "cpu"
    tokens: int = 0
    _rows: _Rows = field(init=False)
    _sum_II: Tensor = field(init=False)  # noqa: N815

    def __post_init__(self) -> None:
        self._rows = _Rows(self.inputs)
        self._sum_II = torch.zeros(self.inputs, self.inputs, dtype=torch.float64, device=self.device)

    def update(self, x_TI: Tensor) -> None:
        """Add tokens of any float dtype, which are not changed afterwards."""
        _check_width(x_TI, self.inputs)
        x_TI, _ = finite_rows(x_TI.to(self.device))
        self.tokens += len(x_TI)
        self._rows.put(x_TI)
        if self._rows.enough():
            self._add()

    def _add(self) -> None:
        if self._rows.count:
            x_TI = self._rows.take().double()
            self._sum_II.addmm_(x_TI.T, x_TI)

    def finish(self) -> Hessian:
        """The symmetric matrix."""
        self._add()
        return Hessian(_symmetric(self._sum_II.mul(2 / max(self.tokens, 1)).float()), self.tokens)


def _symmetric(h_II: Tensor) -> Tensor:
    """A matrix from what stands on and above its diagonal."""
    h_II = h_II.triu()
    h_II += h_II.triu(1).T
    return h_II


def blend(own: Hessian, layer: Hessian, kappa: float | None = None) -> Hessian:
    """An expert's Hessian with that of all experts of its layer: (n H_own + kappa H_layer) / (n + kappa).

    `kappa` is a number of tokens, by default a quarter of the inputs. `tokens` and `coverage` stay the expert's own.
    """
    if own.h_II.shape != layer.h_II.shape:
        shapes = (list(own.h_II.shape), list(layer.h_II.shape))
        raise QuantkitError("an expert's Hessian of another width", value=shapes[0], allowed=shapes[1])
    weight = len(own.h_II) / 4 if kappa is None else kappa
    if not layer.tokens or own.tokens + weight == 0:
        return own
    share = weight / (own.tokens + weight)
    return Hessian(own.h_II * (1 - share) + layer.h_II.to(own.h_II.device) * share, own.tokens, own.dropped)


@dataclass(frozen=True, slots=True, eq=False)
class InputRange:
    """Inputs of one layer: the largest magnitude, and by channel the largest and the mean magnitude (float32)."""

    amax: float
    amax_I: Tensor  # noqa: N815
    mean_I: Tensor  # noqa: N815
    tokens: int
    dropped: int = 0


@dataclass(slots=True, eq=False)
class AbsMax:
    """Adds up an InputRange, on the CPU; sums of magnitudes in float64."""

    inputs: int
    tokens: int = 0
    dropped: int = 0
    _amax_I: Tensor = field(init=False)  # noqa: N815
    _sum_I: Tensor = field(init=False)  # noqa: N815

    def __post_init__(self) -> None:
        self._amax_I = torch.zeros(self.inputs, dtype=torch.float32)
        self._sum_I = torch.zeros(self.inputs, dtype=torch.float64)

    def update(self, x_TI: Tensor) -> None:
        """Add tokens of any float dtype."""
        _check_width(x_TI, self.inputs)
        x_TI, dropped = finite_rows(x_TI.float())
        self.dropped += dropped
        if len(x_TI):
            size_TI = x_TI.abs()
            self._amax_I = torch.maximum(self._amax_I, size_TI.amax(0).cpu())
            self._sum_I += size_TI.sum(0, dtype=torch.float64).cpu()
            self.tokens += len(x_TI)

    def merge(self, other: AbsMax) -> None:
        """Add what another record has seen."""
        if other.inputs != self.inputs:
            raise QuantkitError("ranges of different layers", value=other.inputs, allowed=self.inputs)
        self._amax_I = torch.maximum(self._amax_I, other._amax_I)
        self._sum_I = self._sum_I + other._sum_I
        self.tokens += other.tokens
        self.dropped += other.dropped

    def finish(self) -> InputRange:
        """The range; zeros when no token was seen."""
        mean_I = (self._sum_I / max(self.tokens, 1)).float()
        amax = float(self._amax_I.max()) if self.inputs else 0.0
        return InputRange(amax, self._amax_I.clone(), mean_I, self.tokens, self.dropped)


def finite_rows(x_TI: Tensor) -> tuple[Tensor, int]:
    """The tokens without a NaN or infinity, and how many had one; the tensor itself when none had."""
    if bool(torch.isfinite(x_TI.sum())):
        return x_TI, 0  # a sum is finite only when all its terms are
    good_T = torch.isfinite(x_TI).all(dim=1)
    return x_TI[good_T], int((~good_T).sum())


def _check_width(x_TI: Tensor, inputs: int) -> None:
    if x_TI.ndim != 2 or x_TI.shape[1] != inputs:
        raise QuantkitError(
            "activations of another width", value=list(x_TI.shape), allowed=f"[tokens, {inputs}]",
        )  # fmt: skip
