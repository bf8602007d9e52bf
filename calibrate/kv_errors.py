"""What an FP8 KV cache costs where it is read: attention outputs under stored scales and under 1.0, against no cache.

Of every token that a model runs, with the queries, keys and values that it has there. Outputs are what enters the
output projection. The relative error of a layer is the sum of |with cache - without|^2 over all tokens and heads,
divided by the sum of |without|^2. Keys and values are float32 but for the cache, so all of the error is the cache's.
Scale 1.0 is what engines take where a scale is missing or has a name they do not know.

Letters: N samples of a batch, L tokens of a sample, Q query heads, T tokens, H KV heads, D values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantkit.calibrate.observe import Attend, Cache
from quantkit.kernels.elements import ELEMENTS
from quantkit.kernels.kv_rows import decode_rows, encode_rows
from torch import Tensor

Scales = Mapping[int, tuple[float, float]]  # layer -> k_scale, v_scale; of MLA the first is the row's
LARGEST = ELEMENTS["e4m3"].max


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer.

    error      relative squared error of attention outputs under the stored scales;  error_at_one: under 1.0
    k_clipped  share of the keys (of MLA's rows) beyond 448 * k_scale;  v_clipped: of the values, 0 for MLA;
               clipped_at_one: of both beyond 448
    """

    layer: int
    k_scale: float
    v_scale: float
    error: float
    error_at_one: float
    k_clipped: float
    v_clipped: float
    clipped_at_one: float


@dataclass(slots=True)
class _Sums:
    """Squares of outputs, and of what both caches change; numbers of values, those beyond the scale and beyond 1.0."""

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    keys: list[int] = field(default_factory=lambda: [0, 0, 0])
    values: list[int] = field(default_factory=lambda: [0, 0, 0])


def fp8_cache(scales: Scales) -> Cache:
    """An FP8 cache by the encoder and decoder of the attention kernels; a layer without scales has 1.0."""

    def through(layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = scales.get(layer, (1.0, 1.0))
        return _rounded(k_THD, k_scale), _rounded(v_THD, v_scale)

    return through


def _rounded(x_THD: Tensor, scale: float) -> Tensor:
    if not x_THD.numel():  # MLA has no values of its own
        return x_THD
    codes, block_scale = encode_rows(x_THD.float(), "e4m3", scale)
    return decode_rows(codes, "e4m3", scale, block_scale).to(x_THD.dtype)


class CacheErrors:
    """Adds up the errors of each layer; `compare` is called after every attention that ran with `fp8_cache(scales)`."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self._layers: dict[int, _Sums] = {}

    def compare(self, layer: int, out_NLQD: Tensor, attend: Attend) -> None:
        """Run the attention again without a cache and with one of scale 1.0."""
        sums = self._layers.setdefault(layer, _Sums())
        at_one = fp8_cache({})

        def counted(layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
            for x, scale, counts in zip(
                (k_THD, v_THD), self._scales.get(layer, (1.0, 1.0)), (sums.keys, sums.values), strict=True
            ):
                for i, n in enumerate((x.numel(), _beyond(x, scale), _beyond(x, 1.0))):
                    counts[i] += n
            return at_one(layer, k_THD, v_THD)

        exact = attend(None)
        for i, part in enumerate((exact, out_NLQD - exact, attend(counted) - exact)):
            sums.squares[i] += float(part.double().square().sum())

    def finish(self) -> tuple[LayerError, ...]:
        """The layers in their order."""
        return tuple(self._layer(layer, sums) for layer, sums in sorted(self._layers.items()))

    def _layer(self, layer: int, sums: _Sums) -> LayerError:
        (exact, error, at_one), keys, values = sums.squares, sums.keys, sums.values
        return LayerError(
            layer,
            *self._scales.get(layer, (1.0, 1.0)),
            _share(error, exact),
            _share(at_one, exact),
            _share(keys[1], keys[0]),
            _share(values[1], values[0]),
            _share(keys[2] + values[2], keys[0] + values[0]),
        )


def _beyond(x: Tensor, scale: float) -> int:
    return int((x.float().abs() > LARGEST * scale).sum()) if x.numel() else 0


def _share(part: float, whole: float) -> float:
    """Of nothing: none of it, or infinitely many times it."""
    if whole:
        return part / whole
    return math.inf if part else 0.0
