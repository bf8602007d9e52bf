"""From statistics to the fixed scale under which the inputs of a layer are quantised.

    amax                largest magnitude x headroom
    nvfp4_act_headroom  max(rho P1, P99.99) of the amax of the blocks, rho = 16384: the rule of NVIDIA's ModelOpt 0.47.
                        Of the blocks those of zeros are left out, and for P1 those below P99.99 / 10^6

    scale = amax / 2688 for NVFP4, whose block scales end at 448 and codes at 6;  amax / 448 for FP8

A block of NVFP4 is stored under e4m3(its amax / (6 scale)). E4M3 has its full precision from 2^-6 to 448: blocks
between amax / 28672 and amax lose nothing. The second rule puts the smallest blocks near the lower end, where all else
is room for activations that the text did not show; blocks beyond P99.99 may be clipped, rather than that one freak
block makes all others vanish.

Layers that run as one (an engine's fused set, the experts of a layer) share a scale: the largest of their amax. One
that saw nothing takes its peers'. Scales are rounded up to float32, so that the amax itself is never clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.calibrate.input_blocks import InputBlocks
from quantkit.calibrate.kv_scales import round_up
from quantkit.kernels.elements import ELEMENTS

InputRule = Literal["nvfp4_act_headroom", "amax"]
Source = Literal["own", "fused", "peer"]

RHO = 16384.0  # below 28672, the range of block scales with full precision
ANCHOR, UPPER = 0.01, 0.9999
FLOOR = 1e-6  # of the upper percentile: smaller blocks are noise, and would pull the anchor down
LARGEST = {"e2m1": ELEMENTS["e2m1"].max * ELEMENTS["e4m3"].max, "e4m3": ELEMENTS["e4m3"].max}
# of what a scale stands for, the part that is stored with fewer bits: block scales of NVFP4, values of FP8
_NORMAL = 2.0**-6 / ELEMENTS["e4m3"].max


@dataclass(frozen=True, slots=True)
class InputShares:
    """What a scale does to the blocks that were seen: a share of them is clipped, a share loses bits to underflow.

    From a histogram: never below the truth, above it by blocks within 1/32 of the limit. A block of an FP8 tensor
    counts as lost to underflow when all its values are.
    """

    saturated: float
    underflow: float


def input_amax(seen: InputBlocks, rule: InputRule, headroom: float = 1.0) -> float:
    """The amax that a scale has to hold: 0.0 when nothing but zeros was seen. `headroom` is for the rule amax."""
    if rule == "amax" or not seen.amax:
        return seen.amax * headroom
    blocks = seen.histogram.above(0.0)
    upper = min(blocks.percentile(UPPER), seen.amax)
    anchor = min(blocks.above(upper * FLOOR).percentile(ANCHOR), seen.amax)
    return max(RHO * anchor, upper)


def shared_amax(
    peers: Sequence[InputBlocks], rule: InputRule, headroom: float = 1.0
) -> tuple[float, tuple[Source, ...]]:
    """(the one amax of layers that share a scale, where each of them has it from); 0.0 when none saw anything.

    A peer's is `own` where it is the largest, `fused` where another one's is, `peer` where it saw nothing itself.
    """
    each = [input_amax(seen, rule, headroom) for seen in peers]
    largest = max(each, default=0.0)
    return largest, tuple("peer" if not a else "own" if a == largest else "fused" for a in each)


def input_scale(amax: float, element: str) -> float:
    """The scale, a positive normal float32; `amax` is positive and finite."""
    if not (math.isfinite(amax) and amax > 0):
        raise ValueError(f"no scale holds an amax of {amax}")
    return round_up(amax / LARGEST[element])


def input_shares(seen: InputBlocks, scale: float, element: str) -> InputShares:
    """What a scale does to the inputs that were seen."""
    limit = scale * LARGEST[element]
    saturated = 0.0 if limit >= seen.amax else seen.histogram.share_above(limit)
    return InputShares(saturated, seen.histogram.share_below(limit * _NORMAL))
