"""Quantisation schemes as data: how the numbers of one weight matrix are stored.

A scheme says which element holds a weight (int4, e2m1, e4m3, bf16), over which weights a scale is shared, and how that
scale is stored. It says nothing about files: `export/` turns a scheme into tensor names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Element = Literal["int4", "e2m1", "e4m3", "float"]
Granularity = Literal["none", "tensor", "channel", "group", "block"]
ScaleFormat = Literal["none", "model", "f32", "e4m3", "e8m0"]

BLOCK = 128  # side of the FP8 weight blocks every engine reads


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How one weight w_OI of shape [outputs, inputs] is stored.

    element      int4 (codes -8..7), e2m1 (FP4), e4m3 (FP8), or float (not quantised: decoded to the model's dtype)
    granularity  weights that share one scale: the tensor, an output channel (row), a group of `group_size` consecutive
                 inputs of one row, or a `BLOCK` x `BLOCK` block
    scale        how a scale is stored: the model's dtype (bf16 or fp16), f32, e4m3 (NVFP4) or e8m0 (a power of two)
    symmetric    False: an integer zero point per group as well
    """

    name: str
    element: Element
    granularity: Granularity
    group_size: int
    scale: ScaleFormat
    symmetric: bool = True

    @property
    def has_global(self) -> bool:
        """True when a float32 scale of the whole tensor stands over the group scales (NVFP4)."""
        return self.scale == "e4m3"

    @property
    def shares_scale(self) -> bool:
        """True when tensors that an engine fuses must agree on a scale of the whole tensor."""
        return self.has_global or (self.element == "e4m3" and self.granularity == "tensor")

    def groups(self, inputs: int) -> int:
        """Number of scales in one row of `inputs` weights."""
        if self.granularity == "group":
            return inputs // self.group_size
        return -(-inputs // BLOCK) if self.granularity == "block" else 1


def _table() -> dict[str, QuantScheme]:
    schemes = [QuantScheme("bf16", "float", "none", 0, "none")]
    for prefix, symmetric in (("int4", True), ("int4a", False)):
        schemes += [QuantScheme(f"{prefix}-g{g}", "int4", "group", g, "model", symmetric) for g in (32, 64, 128)]
        schemes.append(QuantScheme(f"{prefix}-channel", "int4", "channel", 0, "model", symmetric))
    schemes += [
        QuantScheme("nvfp4", "e2m1", "group", 16, "e4m3"),
        QuantScheme("mxfp4", "e2m1", "group", 32, "e8m0"),
        QuantScheme("fp8-tensor", "e4m3", "tensor", 0, "f32"),
        QuantScheme("fp8-channel", "e4m3", "channel", 0, "f32"),
        QuantScheme("fp8-block", "e4m3", "block", BLOCK, "f32"),
        QuantScheme("fp8-block-ue8m0", "e4m3", "block", BLOCK, "e8m0"),
    ]
    return {s.name: s for s in schemes}


SCHEMES: dict[str, QuantScheme] = _table()
