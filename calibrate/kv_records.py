"""What calibration keeps of the KV cache of each layer: plain records, written to calibration.json and read from it.

Letters: H KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.calibrate.log2_histogram import Histogram
from quantkit.kernels.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of keys, values, latents or roped keys.

    head_amax   largest magnitude of each KV head (one entry for rows of MLA), a float32
    head_bound  the same at any position: >= amax, at most sqrt(2) times it. Equal to amax where nothing is rotated
    histogram   magnitudes of all heads
    """

    head_amax: tuple[float, ...]
    head_bound: tuple[float, ...]
    histogram: Histogram

    @property
    def amax(self) -> float:
        """Over all heads."""
        return max(self.head_amax)

    @property
    def bound(self) -> float:
        """Over all heads, at any position."""
        return max(self.head_bound)

    def percentile(self, share: float) -> float:
        """Of all magnitudes: never below the true one, less than 1/32 above it, at most amax."""
        return min(self.histogram.percentile(share), self.amax)

    def beside(self, other: Seen) -> Seen:
        """What was seen of rows that hold both, one after the other, under one scale."""
        bound = max(self.bound, other.bound)
        return Seen((max(self.amax, other.amax),), (bound,), self.histogram.merge(other.histogram))

    def to_json(self) -> dict[str, Any]:
        """Plain values; p99.99 is there for a reader."""
        heads = {"amax": list(self.head_amax), "rope_bound": list(self.head_bound)}
        return {**heads, "p99.99": self.percentile(0.9999), **self.histogram.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seen:
        """Raises KeyError, TypeError or ValueError on anything that `to_json` did not write."""
        amax, bound = (tuple(map(float, data[key])) for key in ("amax", "rope_bound"))
        if not amax or len(amax) != len(bound):
            raise ValueError("amax and rope_bound have one number a head")
        return cls(amax, bound, Histogram.from_json(data))


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer.

    tokens   measured;  dropped: left out for a NaN or infinity;  longest: tokens of the longest run
    k        keys, or the latents of MLA
    v        values; None for MLA, whose values are a view of the row
    pe       roped keys of MLA; None elsewhere, and where the rank was not known (then `k` holds whole rows)
    """

    layer: int
    tokens: int
    dropped: int
    longest: int
    k: Seen
    v: Seen | None = None
    pe: Seen | None = None

    @property
    def latent(self) -> bool:
        """True for MLA."""
        return self.v is None

    @property
    def keys(self) -> Seen:
        """What k_scale has to hold: keys, or whole rows of MLA."""
        return self.k if self.pe is None else self.k.beside(self.pe)

    def to_json(self) -> dict[str, Any]:
        """One layer of calibration.json."""
        numbers = {"layer": self.layer, "tokens": self.tokens, "dropped": self.dropped, "longest": self.longest}
        parts = {"k": self.k, "v": self.v, "pe": self.pe}
        return {**numbers, **{name: seen.to_json() for name, seen in parts.items() if seen is not None}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerKV:
        """The record that `to_json` wrote, equal to it; raises QuantkitError on anything else."""
        try:
            layer, tokens, dropped, longest = (_whole(data[key]) for key in ("layer", "tokens", "dropped", "longest"))
            v, pe = (Seen.from_json(data[key]) if key in data else None for key in ("v", "pe"))
            return cls(layer, tokens, dropped, longest, Seen.from_json(data["k"]), v, pe)
        except (KeyError, TypeError, ValueError) as e:
            raise QuantkitError(
                "the KV statistics of a layer cannot be read", value=f"{type(e).__name__}: {e}",
                hint="run `quantkit calibrate` again",
            ) from e  # fmt: skip


def _whole(n: Any) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"not a count: {n!r}")
    return n
