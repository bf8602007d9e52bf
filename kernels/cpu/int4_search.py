"""The least-squares signed scale of an INT4 group, found with few candidates and exact sums.

The reference, with the same steps in plain torch, is `searched` in `kernels/affine.py`. For a group x with a = max |x|:

    For the codes q of a candidate the best scale is <x, q> / <q, q>, which leaves |x|^2 - <x, q>^2 / <q, q>. Only the
    second term is computed, and one candidate does the work of many neighbours.
    Candidates are t = |scale| * 8 / a = 1.32 / 1.02^k. First every fourth (8 % apart) over the range where the best t
    of a group of that size lies (a long group clips more), with the sign that puts the largest weight on code -8, which
    reaches further than 7. Then 2 and 4 % to both sides of the best, and the other sign.

Measured on Gaussian, Student-t5 and Laplace weights, the loss is 0.995 (groups of 32) to 1.001 (128) times that of 141
values of t from 1.1 to 0.4 with both signs: 11 candidates do as well as 282.

Weights are scaled to integers of at most 2^14 and the factors 1 / (2048 t) have 10 bits, so that every product and
every sum of 128 of them is exact in float32: neither the order of summation nor fused multiply-add can change a result,
loops vectorise, and the output does not depend on the CPU. That is what makes the two fastmath helpers safe.
Shape suffixes: I inputs of a row, G groups of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Float = np.floating[Any]

INTEGER = np.float32(2.0**14)  # what the largest weight of a group is scaled to
SMALLEST = np.float32(2.0**-100)  # a group whose largest weight is below this is not searched
_ROUND = np.float32(1.5 * 2**23)  # adding it leaves no fraction bits: rounds half to even
_ONE = np.uint64(1)
_SUM = np.uint64(128)  # products of integer weights and codes that add up to at most 2^24


def _steps() -> F32:
    """1 / (2048 t) for t = 1.32 / 1.02^k down to 0.2, rounded to 10 bits."""
    steps: list[float] = []
    step = 1024 / 1.32
    while len(steps) < 97:
        grain = 1 if step < 1024 else 2 if step < 2048 else 4 if step < 4096 else 8
        steps.append(round(step / grain) * grain / 2**21)
        step *= 1.02
    return np.array(steps, np.float32)


STEPS = _steps()


def candidates(group: np.uint64 | int) -> tuple[np.int64, np.int64, np.int64]:
    """How a group of this size is searched.

    Returns the first index into STEPS and the number of the coarse candidates, which are 4 apart, and how far to both
    sides of the best of them the other sign is tried: it wins more often in a long group.
    """
    if group <= 32:
        return np.int64(3), np.int64(6), np.int64(0)  # t from 1.24 to 0.84
    if group <= 64:
        return np.int64(6), np.int64(6), np.int64(0)  # 1.17 to 0.79
    if group <= 128:
        return np.int64(8), np.int64(6), np.int64(0)  # 1.13 to 0.76
    return np.int64(10), np.int64(22), np.int64(1)  # 1.08 to 0.205


_candidates = njit(nogil=True, cache=True)(candidates)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _exact_madd(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """Return x * y + z where x * y is exact: fusing changes nothing."""
    return x * y + z


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _exact_sum(total: Float, x: Float, y: Float) -> Float:
    """Return total + x * y where every sum is exact: order and fusing change nothing."""
    return total + x * y


@njit(nogil=True, cache=True, error_model="numpy")
def to_integers(x_I: F32, start: np.uint64, size: np.uint64, factor: np.float32, out_I: F32) -> Float:
    """Multiply a group and round half to even; returns the sum of the squares, exact while it is below 2^53."""
    for i in range(size):
        out_I[start + i] = np.rint(x_I[start + i] * factor)
    return square_sum(out_I, start, size)


@njit(nogil=True, cache=True, error_model="numpy")
def square_sum(x_I: F32, start: np.uint64, size: np.uint64) -> Float:
    """Sum of the squares of a group of integers."""
    total: Float = np.float64(0)
    for i in range(size):
        x = np.float64(x_I[start + i])
        total = _exact_sum(total, x, x)
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _products(x_I: F32, start: np.uint64, count: np.uint64, step: np.float32, low: np.float32) -> tuple[Float, Float]:
    """<x, q> and <q, q> of at most `_SUM` integers and their codes, the smallest of which is `low`."""
    xq, qq, high = np.float32(0), np.float32(0), low + np.float32(15)
    for i in range(count):
        x = x_I[start + i]
        q = _exact_madd(x, step, _ROUND) - _ROUND
        q = min(max(q, low), high)
        xq = _exact_sum(xq, x, q)
        qq = _exact_sum(qq, q, q)
    return xq, qq


@njit(nogil=True, cache=True, error_model="numpy")
def _best_of(
    x_I: F32, start: np.uint64, size: np.uint64, first: np.int64, distance: np.int64, count: np.int64, low: np.float32
) -> tuple[np.float64, np.float64, np.int64]:
    """The first of the best of `count` candidates: <x, q>^2 / <q, q>, the scale <x, q> / <q, q>, its index into STEPS.

    low  the smallest code
    Selects, not branches: one that waits for a score would stall the next. And nothing that may raise, not even a range
    with a step: the references to `x_I` would be counted, atomically. The usual sizes have loops that can be unrolled.
    """
    best, best_xq, best_qq, best_k = np.float64(0), np.float64(0), np.float64(1), first
    for j in range(count):
        k = first + j * distance
        xq, qq = np.float64(0), np.float64(0)
        if size == 128:
            part_xq, part_qq = _products(x_I, start, np.uint64(128), STEPS[k], low)
            xq, qq = np.float64(part_xq), np.float64(part_qq)
        elif size == 32:
            part_xq, part_qq = _products(x_I, start, np.uint64(32), STEPS[k], low)
            xq, qq = np.float64(part_xq), np.float64(part_qq)
        else:
            for b in range((size + _SUM - _ONE) // _SUM):
                done = b * _SUM
                part_xq, part_qq = _products(x_I, start + done, min(_SUM, size - done), STEPS[k], low)
                xq += np.float64(part_xq)
                qq += np.float64(part_qq)
        score = xq * xq / qq
        better = score > best
        best_xq, best_qq = xq if better else best_xq, qq if better else best_qq
        best_k = k if better else best_k
        best = max(score, best)
    return best, best_xq / best_qq, best_k


@njit(nogil=True, cache=True, error_model="numpy")
def best_scales(x_I: F32, size: np.uint64, score_G: F64, scale_G: F64, centre_G: NDArray[np.int64]) -> None:
    """The best scale found of each group of a row of integers, negative where the codes are better mirrored.

    x_I      rounded weights times a factor that makes the largest magnitude of each group -INTEGER
    scale_G  out;  score_G, centre_G  scratch
    All groups go through a stage together: the next group's sums hide the wait for the decisions of the last.
    """
    first, count, reach = _candidates(size)
    low, one, two, four = np.float32(-8), np.int64(1), np.int64(2), np.int64(4)
    for g in range(scale_G.size):
        start = np.uint64(g) * size
        score_G[g], scale_G[g], centre_G[g] = _best_of(x_I, start, size, first, four, count, low)
    for g in range(scale_G.size):
        start, centre = np.uint64(g) * size, centre_G[g]
        below, below_scale, _ = _best_of(x_I, start, size, centre - two, one, two, low)
        above, above_scale, _ = _best_of(x_I, start, size, centre + one, one, two, low)
        # codes -7..8 of a positive scale are codes 7..-8 of a negative one
        other, other_scale, _ = _best_of(x_I, start, size, centre - reach, one, two * reach + one, low + np.float32(1))
        best, scale = score_G[g], scale_G[g]
        scale, best = below_scale if below > best else scale, max(best, below)
        scale, best = above_scale if above > best else scale, max(best, above)
        scale_G[g] = -other_scale if other > best else scale
