"""What a block-by-block forward asks of a checkpoint: its tensors by logical name, decoded, one at a time.

`calibrate` opens no file of a model's weights. Whoever drives it hands over an object of this shape, so that the same
forward runs a BF16, FP8, INT4 or MXFP4 source and the checkpoint that was made from it.

Letters: O outputs (rows), I inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class Weights(Protocol):
    """The decoded tensors of one checkpoint. A linear layer is `X.weight` [O, I] however it is stored."""

    def names(self) -> Iterable[str]:
        """Every logical tensor: `X.weight` for a quantised layer (its scales are part of it), else its own name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, from the headers alone."""
        ...

    def quantized(self, name: str) -> bool:
        """Whether the bytes are codes.

        Codes of fused experts are [E, O, I]. Plain fused experts have the layout of their family, which for gpt-oss and
        Llama 4 is [E, I, O]; with gpt-oss's square `down_proj` the shape alone cannot tell the two apart.
        """
        ...

    def read(self, name: str) -> torch.Tensor:
        """The values on the CPU, in memory of their own: float32 when decoded, else the stored 16- or 32-bit dtype."""
        ...

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        """Matrix `expert` of the fused tensor `name` [E, ., .]: `read(name)[expert]` without reading the rest."""
        ...
