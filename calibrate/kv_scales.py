"""From statistics to scales of an FP8 KV cache: stored = e4m3(clamp(x / scale, -448, 448)), read as stored * scale.

    amax        largest magnitude x headroom / 448; what every vendor ships, with 1.25 against unseen text. The default
    rope        the same of the bound that holds at any position; for text much shorter than what will be served
    percentile  of all magnitudes (99.99 %) x headroom / 448
    mse         the scale of least mean square error over the histogram

Why not the last two: E4M3 is a floating-point format, so over five octaves below the largest value its relative error
does not depend on the scale, and a smaller one gains nothing. It only clips the largest keys, which are those of
attention sinks: on keys with a few strong channels amax and twice amax have the same error, 99.99 % twice and 99.9 %
twenty times as much. They are the right tools for INT8; here they serve to show that.

Scales are computed in float64 and rounded up to float32, so that 448 * scale >= amax holds exactly and nothing that was
seen is clipped; never below the smallest normal float32. Only zeros seen: 1.0, which engines take for a missing scale.

Letters: H KV heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from quantkit.calibrate.kv_records import LayerKV, Seen
from quantkit.kernels.elements import ELEMENTS
from quantkit.kernels.errors import QuantkitError, join_errors

Rule = Literal["amax", "rope", "percentile", "mse"]

HEADROOM = 1.25
PERCENTILE = 0.9999
MIN_TOKENS = 4096  # of text that a scale may rest on
MAX_DROPPED = 1e-3  # share of tokens with NaN or infinity
LARGEST = ELEMENTS["e4m3"].max
NORMAL = 2.0**-6  # below this times the scale, E4M3 loses bits
_TINY = float(np.finfo(np.float32).tiny)
_MSE_STEPS = np.exp2(-np.arange(65) / 16)  # sixteenths of an octave, from amax / 448 down to a sixteenth of it


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the measured values under a scale: lost to underflow (0 < |x| < 2^-6 scale: fewer bits), and clipped.

    From a histogram: never below the truth, above it by the values within 1/32 of the limit. Clipped is exactly 0 where
    448 * scale >= amax.
    """

    underflow: float
    clipped: float


@dataclass(frozen=True, slots=True)
class KVScale:
    """Scales of one layer, each a float32: of keys and of values (equal for MLA), and of each head where asked for."""

    k: float
    v: float
    k_shares: Shares
    v_shares: Shares
    head_k: tuple[float, ...] = ()
    head_v: tuple[float, ...] = ()


def amax_scale(amax: float, headroom: float = HEADROOM) -> float:
    """The amax x headroom / 448, rounded up to float32; 1.0 for an amax of 0."""
    return round_up(amax * headroom / LARGEST) if amax else 1.0


def percentile_scale(seen: Seen, headroom: float = HEADROOM, share: float = PERCENTILE) -> float:
    """The magnitude that `share` of the values do not pass x headroom / 448; 1.0 where that is 0."""
    return amax_scale(seen.percentile(share), headroom)


def mse_scale(seen: Seen) -> float:
    """The best of 65 scales from amax / 448 down to a sixteenth of it, the larger where two are equal."""
    top = amax_scale(seen.amax, 1.0)
    scales = [round_up(top * float(step)) for step in _MSE_STEPS]
    return min(scales, key=lambda scale: (seen.histogram.e4m3_error(scale), -scale)) if seen.amax else 1.0


def round_up(value: float) -> float:
    """The smallest normal float32 that is not below a value."""
    nearest = np.float32(max(value, _TINY))
    return float(nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf)))


def shares(seen: Seen, scale: float) -> Shares:
    """What a scale does to the values that were seen: of the layer's own scale, of 1.0, of any other."""
    limit = LARGEST * scale
    clipped = 0.0 if limit >= seen.amax else seen.histogram.share_above(limit)
    return Shares(seen.histogram.share_below(NORMAL * scale), clipped)


def _scale(seen: Seen, rule: Rule, headroom: float, share: float) -> float:
    if rule == "amax":
        return amax_scale(seen.amax, headroom)
    if rule == "rope":
        return amax_scale(seen.bound, headroom)
    return percentile_scale(seen, headroom, share) if rule == "percentile" else mse_scale(seen)


def choose_scales(
    layers: Sequence[LayerKV], rule: Rule = "amax", headroom: float = HEADROOM, per_head: bool = False,
    *, share: float = PERCENTILE, min_tokens: int = MIN_TOKENS,
) -> dict[int, KVScale]:  # fmt: skip
    """A scale for every layer. `mse` has no headroom; `per_head` (amax and rope) adds one for each KV head.

    A head that saw only zeros gets the layer's scale. Raises QuantkitError, all reasons at once, when a layer saw fewer
    than `min_tokens` tokens, lost more than 1 in 1000 to NaN or infinity, or has an amax that is not finite, and when
    more than half of three or more layers have one and the same scale for keys, or for values.
    """
    _check_request(rule, headroom, per_head, share)
    if not layers:
        raise QuantkitError("no keys or values were recorded", hint="a KV scale needs a layer with attention")
    wrong = [e for layer in layers for e in _wrong_with(layer, min_tokens)]
    if wrong:
        raise join_errors("KV scales cannot rest on these statistics", wrong)
    chosen: dict[int, KVScale] = {}
    for layer in layers:
        keys = layer.keys
        values = layer.v or keys
        k, v = _scale(keys, rule, headroom, share), _scale(values, rule, headroom, share)
        heads = [_of_heads(seen, s, rule, headroom) if per_head else () for seen, s in ((keys, k), (values, v))]
        chosen[layer.layer] = KVScale(k, v, shares(keys, k), shares(values, v), heads[0], heads[1])
    for name, scales in (("k_scale", [s.k for s in chosen.values()]), ("v_scale", [s.v for s in chosen.values()])):
        _check_different(name, scales)
    return chosen


def _of_heads(seen: Seen, whole: float, rule: Rule, headroom: float) -> tuple[float, ...]:
    tops = seen.head_amax if rule == "amax" else seen.head_bound
    return tuple(amax_scale(top, headroom) if top else whole for top in tops)


def _check_request(rule: Rule, headroom: float, per_head: bool, share: float) -> None:
    if rule not in get_args(Rule):
        raise QuantkitError("unknown rule for KV scales", value=rule, allowed=", ".join(get_args(Rule)))
    if not 1.0 <= headroom <= 64.0:  # a false comparison for NaN as well
        raise QuantkitError(
            "the headroom of KV scales is out of range", value=headroom, allowed="1.0 (clips what is larger than any "
            "calibrated value) to 64.0 (values lose bits to underflow)",
        )  # fmt: skip
    if not 0.5 < share <= 1.0:
        raise QuantkitError("no such percentile", value=share, allowed="a share above 0.5, up to 1.0")
    if per_head and rule not in ("amax", "rope"):
        raise QuantkitError("scales per head follow the rules amax and rope", value=rule, allowed="amax, rope")


def _wrong_with(layer: LayerKV, min_tokens: int) -> Iterable[QuantkitError]:
    """Why no scale can rest on what was seen of a layer."""
    name = f"layer {layer.layer}"
    if layer.dropped > MAX_DROPPED * (layer.tokens + layer.dropped):
        yield QuantkitError(
            "too many tokens have NaN or infinity in their keys or values", tensor=name,
            value=f"{layer.dropped} of {layer.tokens + layer.dropped} tokens", allowed=f"a share of {MAX_DROPPED}",
            hint="calibrate in float32 or bfloat16: float16 overflows",
        )  # fmt: skip
    elif layer.tokens < min_tokens:
        yield QuantkitError(
            "the calibration text is too short for KV scales", tensor=name, value=f"{layer.tokens} tokens",
            allowed=f"at least {min_tokens}", hint="give more text, or --samples and --seq-len that take more of it",
        )  # fmt: skip
    for part, seen in (("k", layer.k), ("v", layer.v), ("pe", layer.pe)):
        numbers = (*seen.head_amax, *seen.head_bound) if seen is not None else ()
        if not all(math.isfinite(a) and a >= 0 for a in numbers):
            yield QuantkitError("the amax of a layer is not finite", tensor=f"{name} {part}", value=list(numbers))


def _check_different(name: str, scales: Sequence[float]) -> None:
    """Layers differ; many equal scales mean that something else than keys and values was measured."""
    value, times = Counter(scales).most_common(1)[0]
    if len(scales) >= 3 and times > len(scales) / 2:
        raise QuantkitError(
            f"more than half of the layers have the same {name}", value=f"{value} in {times} of {len(scales)} layers",
            allowed="scales that were measured layer by layer",
            hint="the values recorded are constant, zero or not those of the cache",
        )  # fmt: skip
