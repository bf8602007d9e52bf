"""A histogram of magnitudes on a logarithmic axis: fixed size, exact counts; those of parts add up to the whole's.

A bin is a range of float32 bit patterns: the exponent and the upper 5 bits of the mantissa, so an octave has 32 bins
and a value's bin is found without a logarithm. Bins reach from 2^-40 to 2^40; the first also holds everything smaller,
the last everything larger. Zeros are counted apart. NVIDIA's ModelOpt has 512 bins over the same range, 6.4 an octave.

What is read off errs to the safe side by less than one bin, a part in 32 of the value: a percentile is never below the
true one, a share of values beyond a limit never smaller than the true share. Counts are exact integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.kernels.elements import E4M3_VALUES, encode_e4m3
from torch import Tensor

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

PER_OCTAVE = 32
LOWEST, HIGHEST = -40, 40  # exponents of two where the bins begin and end
BINS = PER_OCTAVE * (HIGHEST - LOWEST)

SHIFT = 23 - 5  # mantissa bits that a bin does not see
FIRST_BITS = (LOWEST + 127) * PER_OCTAVE
_POINTS = (np.arange(8) + 0.5) / 8  # where in a bin its values are taken to lie, for an error

# lower edge of every bin, and the end of the last one
_EDGES: F64 = np.ldexp(1 + np.arange(BINS + 1) % PER_OCTAVE / PER_OCTAVE, np.arange(BINS + 1) // PER_OCTAVE + LOWEST)


def count(x: Tensor) -> I64:
    """Counts of the finite float32 values of `x`, any shape and device: [0] zeros, [1 + b] magnitudes in bin b."""
    bits = x.abs().contiguous().view(torch.int32).flatten()
    place = ((bits >> SHIFT) - (FIRST_BITS - 1)).clamp_(1, BINS).masked_fill_(bits == 0, 0)
    found: I64 = torch.bincount(place, minlength=BINS + 1).cpu().numpy()
    return found


@dataclass(frozen=True, slots=True)
class Histogram:
    """`zeros` and the counts of consecutive bins, from bin `first`; the bins before and after are empty."""

    zeros: int
    first: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, counted: I64) -> Histogram:
        """What `count` returned, or a sum of several."""
        filled = np.flatnonzero(counted[1:])
        if not filled.size:
            return cls(int(counted[0]), 0, ())
        first, last = int(filled[0]), int(filled[-1])
        return cls(int(counted[0]), first, tuple(counted[1 + first : 2 + last].tolist()))

    def counted(self) -> I64:
        """The dense form that `count` returns."""
        out = np.zeros(BINS + 1, np.int64)
        out[0] = self.zeros
        out[1 + self.first : 1 + self.first + len(self.counts)] = self.counts
        return out

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values."""
        return Histogram.of(self.counted() + other.counted())

    def above(self, limit: float) -> Histogram:
        """What is left without zeros and magnitudes below `limit`; the bin that holds `limit` stays whole."""
        counts = self.counted()
        counts[0] = 0
        counts[1:][_EDGES[1:] <= limit] = 0
        return Histogram.of(counts)

    @property
    def total(self) -> int:
        """Number of values."""
        return self.zeros + sum(self.counts)

    def _edges(self) -> tuple[F64, F64]:
        """Lower and upper edges of the stored bins: 0 below the first of all, infinity above the last."""
        stop = self.first + len(self.counts)
        low, high = _EDGES[self.first : stop].copy(), _EDGES[self.first + 1 : stop + 1].copy()
        if self.first == 0 and self.counts:
            low[0] = 0.0
        if stop == BINS:
            high[-1] = np.inf
        return low, high

    def percentile(self, share: float) -> float:
        """At least the smallest magnitude m for which `share` of all values are <= m, less than 1/32 above it.

        Infinite where only the last bin's values are large enough: the caller knows the largest. 0.0 without values.
        """
        upto = self.zeros + np.cumsum(self.counts, dtype=np.int64)
        wanted = share * self.total
        if not self.counts or self.zeros >= wanted:
            return 0.0
        return float(self._edges()[1][min(int(np.searchsorted(upto, wanted)), len(self.counts) - 1)])

    def share_below(self, limit: float) -> float:
        """Share of all values with 0 < magnitude < limit; those in the bin that holds `limit` are all counted."""
        return self._share(self._edges()[0] < limit)

    def share_above(self, limit: float) -> float:
        """Share of all values with magnitude > limit; those in the bin that holds `limit` are all counted."""
        return self._share(self._edges()[1] > limit)

    def _share(self, bins: NDArray[np.bool_]) -> float:
        return int(np.array(self.counts, np.int64)[bins].sum()) / max(self.total, 1)

    def e4m3_error(self, scale: float) -> float:
        """Mean square error of values stored as e4m3(clamp(x / scale)), each bin's values spread evenly over it."""
        if not self.counts:
            return 0.0
        stop = self.first + len(self.counts)
        low, high = _EDGES[self.first : stop], _EDGES[self.first + 1 : stop + 1]
        x = low[:, None] + (high - low)[:, None] * _POINTS
        stored = E4M3_VALUES[encode_e4m3((x / scale).astype(np.float32))].astype(np.float64) * scale
        squares = ((x - stored) ** 2).mean(1)
        return float(squares @ np.array(self.counts, np.float64)) / self.total

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` of them is equal."""
        return {"zeros": self.zeros, "first": self.first, "counts": list(self.counts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Histogram:
        """Raises KeyError, TypeError or ValueError on anything that `to_json` did not write."""
        numbers = [data["zeros"], data["first"], *data["counts"]]
        if any(type(n) is not int or n < 0 for n in numbers) or data["first"] + len(data["counts"]) > BINS:
            raise ValueError("counts of a histogram are whole numbers, at most as many as it has bins")
        return cls(data["zeros"], data["first"], tuple(data["counts"]))
