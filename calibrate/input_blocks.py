"""What calibration keeps of the inputs of a layer whose activations will be quantised under a fixed scale.

NVFP4 quantises a token's inputs in blocks of 16, each under its own E4M3 scale, and all of them under one scale of the
tensor, which has to be chosen beforehand. What matters for it is how large blocks are: the largest magnitude (amax) of
each goes into a histogram. Static FP8 needs the largest of all only. Tokens that hold a NaN or infinity are left out
and counted.

Shape suffixes: T tokens, I inputs, G blocks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.calibrate.log2_histogram import BINS, Histogram, count
from quantkit.calibrate.stats import finite_rows
from torch import Tensor

BLOCK = 16


@dataclass(frozen=True, slots=True)
class InputBlocks:
    """Inputs of one layer: the largest magnitude, a float32, and the histogram of the amax of every block of 16.

    tokens   measured;  dropped: left out for a NaN or infinity
    """

    amax: float
    histogram: Histogram
    tokens: int
    dropped: int = 0


@dataclass(slots=True)
class InputBlocksSum:
    """Adds up InputBlocks; counts and amax are exact, so no order of tokens changes the result."""

    tokens: int = 0
    dropped: int = 0
    amax: float = 0.0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS + 1, np.int64))

    def update(self, x_TI: Tensor) -> None:
        """Add tokens of any float dtype. Inputs that are no whole blocks are filled up with zeros."""
        x_TI, dropped = finite_rows(x_TI.float())
        self.dropped += dropped
        if not len(x_TI):
            return
        if x_TI.shape[1] % BLOCK:
            x_TI = torch.nn.functional.pad(x_TI, (0, -x_TI.shape[1] % BLOCK))
        amax_TG = x_TI.reshape(len(x_TI), -1, BLOCK).abs().amax(2)
        self.tokens += len(x_TI)
        self.amax = max(self.amax, float(amax_TG.max()))
        self.counts += count(amax_TG)

    def merge(self, other: InputBlocksSum) -> None:
        """Add what another record has seen."""
        self.tokens += other.tokens
        self.dropped += other.dropped
        self.amax = max(self.amax, other.amax)
        self.counts = self.counts + other.counts

    def finish(self) -> InputBlocks:
        """The result; an empty histogram when no token was seen."""
        return InputBlocks(self.amax, Histogram.of(self.counts), self.tokens, self.dropped)
