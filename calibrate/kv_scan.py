"""One pass over keys or values: largest magnitudes by head, rotated pairs, and histogram counts.

Two twins with equal results: Numba for tensors in CPU memory, where single torch operations take 30 times as long, and
torch for those on a GPU.

Letters: T tokens, H KV heads, D head values, N values of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from quantkit.calibrate.log2_histogram import BINS, FIRST_BITS, SHIFT, count
from quantkit.kernels.errors import QuantkitError
from torch import Tensor

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_CHUNK = 1 << 22  # values that a GPU looks at together
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Rope:
    """Which values of a key RoPE rotates together.

    width        the first `width` values of a key are rotated, None: all. Of an MLA row its RoPE part always is, whole
    interleaved  pairs are (0, 1), (2, 3) ..., else (0, width / 2), (1, width / 2 + 1) ...
    """

    width: int | None = None
    interleaved: bool = False


@dataclass(slots=True)
class Sums:
    """Of each head the largest magnitude and the largest hypot of a pair (>= the first); counts as `count` gives."""

    head_amax: F64
    head_bound: F64
    counts: I64

    def add(self, other: Sums) -> None:
        """Make this the sums of both."""
        self.head_amax = np.maximum(self.head_amax, other.head_amax)
        self.head_bound = np.maximum(self.head_bound, other.head_bound)
        self.counts = self.counts + other.counts


def nothing(heads: int) -> Sums:
    """The sums of no tokens."""
    return Sums(np.zeros(heads), np.zeros(heads), np.zeros(BINS + 1, np.int64))


def finite_tokens(x: Tensor) -> Tensor:
    """Bool [T], where `x` is [T, ...]: no NaN or infinity among the token's values; on the device of `x`."""
    rows = x.flatten(1)
    if x.device.type != "cpu":
        return rows.isfinite().all(1)
    return torch.from_numpy(_finite(rows.float().contiguous().numpy().view(np.uint32)))


def scan(x_THD: Tensor, rope: Rope | None) -> Sums:
    """The sums of one text, every value finite; squares of pairs are added in float64, where they are exact."""
    heads, width = x_THD.shape[1:]
    rotated = 0 if rope is None else min(rope.width or width, width)
    if rotated % 2:
        raise QuantkitError("RoPE rotates pairs: an odd number of values cannot be", value=rotated)
    interleaved = rope is not None and rope.interleaved
    total = nothing(heads)
    if not x_THD.numel():
        return total
    if x_THD.device.type == "cpu":
        x = x_THD.float().contiguous().numpy()
        bits_H, pairs_H = np.zeros(heads, np.uint32), np.zeros(heads)
        _scan(x.view(np.uint32), bits_H, total.counts)
        if rotated:
            _pairs(x, rotated, interleaved, pairs_H)
        total.head_amax = bits_H.view(np.float32).astype(np.float64)
        total.head_bound = np.maximum(total.head_amax, np.sqrt(pairs_H))
        return total
    for part in torch.split(x_THD, max(1, _CHUNK // (heads * width))):
        total.add(scan_torch(part.float(), rotated, interleaved))
    return total


def scan_torch(x_THD: Tensor, rotated: int, interleaved: bool) -> Sums:
    """The sums of finite float32 values by torch operations, on any device; `rotated` values of a key form pairs."""
    head_amax = x_THD.abs().amax((0, 2)).double()
    head_bound = head_amax
    if rotated:
        x = x_THD[..., :rotated].double()
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        head_bound = torch.maximum(head_amax, (a * a + b * b).amax((0, 2)).sqrt())
    return Sums(head_amax.cpu().numpy(), head_bound.cpu().numpy(), count(x_THD))


@njit(nogil=True, cache=True)
def _finite(bits_TN: NDArray[np.uint32]) -> NDArray[np.bool_]:
    out_T = np.empty(len(bits_TN), np.bool_)
    for t in range(len(bits_TN)):
        largest = np.uint32(0)
        for i in range(bits_TN.shape[1]):
            largest = max(largest, bits_TN[t, i] & _MAGNITUDE)
        out_T[t] = largest < _INFINITY
    return out_T


@njit(nogil=True, cache=True)
def _scan(bits_THD: NDArray[np.uint32], largest_H: NDArray[np.uint32], counts: I64) -> None:
    """Magnitudes order like their bits. The bin is that of `count`."""
    tokens, heads, width = bits_THD.shape
    for t in range(tokens):
        for h in range(heads):
            largest = largest_H[h]
            for i in range(width):
                magnitude = bits_THD[t, h, i] & _MAGNITUDE
                largest = max(largest, magnitude)
                place = np.int64(magnitude >> SHIFT) - (FIRST_BITS - 1)
                if place < 1:
                    place = np.int64(magnitude > 0)
                elif place > BINS:
                    place = np.int64(BINS)
                counts[place] += 1
            largest_H[h] = largest


@njit(nogil=True, cache=True)
def _pairs(x_THD: F32, rotated: int, interleaved: bool, squares_H: F64) -> None:
    half = rotated // 2
    step, apart = (2, 1) if interleaved else (1, half)
    for t in range(x_THD.shape[0]):
        for h in range(x_THD.shape[1]):
            largest = squares_H[h]
            for i in range(half):
                a, b = np.float64(x_THD[t, h, step * i]), np.float64(x_THD[t, h, step * i + apart])
                largest = max(largest, a * a + b * b)
            squares_H[h] = largest
