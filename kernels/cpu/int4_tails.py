"""Signed INT4 scales for the loss of `tails.py`: sum_c h_c |w_c|^0.5 (w_c - w_hat_c)^2 over the inputs of a group.

For the codes q of a candidate the best scale is <w, q> / <q, q>, sums weighted, which leaves least where
<w, q>^2 / <q, q> is most. Candidates are t = |scale| * 8 / max |w|: 12 from 1.3 down to 0.37 with both signs, whose
codes are made together; 6 % to both sides of the best; and the codes under the scale that the best of all these has led
to. The result stands where it beats the plain scale, both as stored. On groups of 32, 64, 128 and 576 weights of
SmolLM2 the loss is 1.000, 1.002, 1.002 and 1.002 times that of 600 values of t with both signs.

Groups stand side by side, one a lane: weight i of group j is at `tile[i * LANES + j]`. So a sum over a group runs in
the order of its inputs, with multiply-adds that are rounded once, and is the same on every CPU.
Shape suffixes: R rows, I inputs, G groups, L lanes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.int4 import stored_bits, stored_value
from quantkit.kernels.cpu.simd import LANES, fma, load_f32, maximum, minimum, mul, nearest, splat, store, sub, zeros

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

_INVERSE = (8 / 1.3 * 1.12 ** np.arange(12)).astype(np.float32)  # 1 / scale where the largest weight is 1
_NEAR = np.array([1.12**-0.5, 1.12**0.5], np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _load(w_K: F32, h_I: F32, first: int, lanes: int, size: int, w: F32, h: F32, largest_L: F32) -> None:
    """Transpose groups `first` ... of all weights into tiles, in units of their largest weight; h becomes h |w|^0.5.

    Lanes without a group, and groups of zeros, hold zeros; their largest weight is 0.
    """
    inputs = h_I.size
    unit_L = np.ones(LANES, np.float32)
    for j in range(lanes):
        at = (first + j) * size
        column = at % inputs
        largest = np.float32(0)
        for i in range(size):
            w[i * LANES + j] = w_K[at + i]
            h[i * LANES + j] = h_I[column + i]
            largest = max(largest, abs(w_K[at + i]))
        largest_L[j] = largest
        unit_L[j] = largest if largest > 0 else np.float32(1)
    for j in range(lanes, LANES):
        largest_L[j] = 0
        for i in range(size):
            w[i * LANES + j] = 0
            h[i * LANES + j] = 0
    for i in range(size):
        for j in range(LANES):
            x = w[i * LANES + j] / unit_L[j]
            w[i * LANES + j] = x
            h[i * LANES + j] *= np.sqrt(abs(x))


@njit(nogil=True, cache=True, error_model="numpy")
def _fit(w: F32, h: F32, size: int, inverse_L: F32, sums: F32) -> None:
    """<w, q> to sums[:LANES] and <q, q> behind it, q being the codes under a scale of each lane."""
    inverse, low, high = load_f32(inverse_L, 0), splat(np.float32(-8)), splat(np.float32(7))
    wq, qq = zeros(1), zeros(1)
    for i in range(size):
        x = load_f32(w, i * LANES)
        q = minimum(maximum(nearest(mul(x, inverse)), low), high)
        hq = mul(load_f32(h, i * LANES), q)
        wq, qq = fma(hq, x, wq), fma(hq, q, qq)
    store(sums, 0, wq)
    store(sums, LANES, qq)


@njit(nogil=True, cache=True, error_model="numpy")
def _fit_both(w: F32, h: F32, size: int, inverse_scale: np.float32, sums: F32, mirrored: F32) -> None:
    """As `_fit` under one scale for all lanes; to `mirrored` the sums of the codes -8..7 of its negative, negated."""
    inverse = splat(inverse_scale)
    low, lower, high, higher = splat(np.float32(-7)), splat(np.float32(-8)), splat(np.float32(7)), splat(np.float32(8))
    wq, qq, wp, pp = zeros(1), zeros(1), zeros(1), zeros(1)
    for i in range(size):
        x, weight = load_f32(w, i * LANES), load_f32(h, i * LANES)
        code = nearest(mul(x, inverse))
        q, p = minimum(maximum(code, lower), high), minimum(maximum(code, low), higher)
        hq, hp = mul(weight, q), mul(weight, p)
        wq, qq, wp, pp = fma(hq, x, wq), fma(hq, q, qq), fma(hp, x, wp), fma(hp, p, pp)
    store(sums, 0, wq)
    store(sums, LANES, qq)
    store(mirrored, 0, wp)
    store(mirrored, LANES, pp)


@njit(nogil=True, cache=True, error_model="numpy")
def _keep(sums: F32, sign: np.float32, inverse_L: F32, score_L: F32, centre_L: F32, scale_L: F32) -> None:
    """Where a lane's candidate beats its best: that score, the candidate's 1 / scale, the scale that fits its codes."""
    for j in range(LANES):
        wq, qq = sums[j], sums[LANES + j]
        score = wq * wq / qq if qq > 0 else np.float32(0)
        better = score > score_L[j]
        score_L[j] = score if better else score_L[j]
        centre_L[j] = sign * inverse_L[j] if better else centre_L[j]
        scale_L[j] = sign * (wq / qq) if better else scale_L[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _search(w: F32, h: F32, size: int, scale_L: F32, scratch: F32) -> None:
    """The best scale of each lane, in units of its largest weight; scratch float32 [7, LANES]."""
    score_L, centre_L, inverse_L = scratch[0], scratch[1], scratch[2]
    sums, mirrored = scratch[3:5].reshape(2 * LANES), scratch[5:7].reshape(2 * LANES)
    score_L[:], centre_L[:], scale_L[:] = 0, 8, 0.125
    for k in range(_INVERSE.size):
        inverse_L[:] = _INVERSE[k]
        _fit_both(w, h, size, _INVERSE[k], sums, mirrored)
        _keep(sums, np.float32(1), inverse_L, score_L, centre_L, scale_L)
        _keep(mirrored, np.float32(-1), inverse_L, score_L, centre_L, scale_L)
    best_L = centre_L.copy()
    for k in range(3):
        for j in range(LANES):
            inverse_L[j] = best_L[j] * _NEAR[k] if k < 2 else np.float32(1) / scale_L[j]
        _fit(w, h, size, inverse_L, sums)
        _keep(sums, np.float32(1), inverse_L, score_L, centre_L, scale_L)


@njit(nogil=True, cache=True, error_model="numpy")
def _losses(w: F32, h: F32, size: int, largest_L: F32, stored_L: F32, scratch: F32, loss_L: F32) -> None:
    """The loss of each lane under its stored scale, in units of its largest weight; nothing of lanes of zeros."""
    unit_L, inverse_L = scratch[0], scratch[1]
    for j in range(LANES):
        unit_L[j] = stored_L[j] / largest_L[j]
        inverse_L[j] = largest_L[j] / stored_L[j]
    scale, inverse = load_f32(unit_L, 0), load_f32(inverse_L, 0)
    low, high, loss = splat(np.float32(-8)), splat(np.float32(7)), zeros(1)
    for i in range(size):
        x = load_f32(w, i * LANES)
        d = sub(x, mul(minimum(maximum(nearest(mul(x, inverse)), low), high), scale))
        loss = fma(mul(load_f32(h, i * LANES), d), d, loss)
    store(loss_L, 0, loss)


@njit(nogil=True, cache=True, error_model="numpy")
def _in_units(h_I: F32, group: int) -> F32:
    """Weights of inputs in units of the largest of their group: no sum leaves float32; 1 in a group of zeros."""
    unit_I = np.empty_like(h_I)
    for start in range(0, h_I.size, group):
        most = np.float32(0)
        for i in range(start, start + group):
            most = max(most, h_I[i])
        for i in range(start, start + group):
            unit_I[i] = h_I[i] / most if most > 0 else np.float32(1)
    return unit_I


@njit(nogil=True, cache=True, error_model="numpy")
def tail_scales(w_RI: F32, h_I: F32, group: int, half: bool, scale_RG: U16) -> None:
    """Bits of the stored scales of symmetric INT4 groups; 1 for a group of zeros. Not valid where w is not finite.

    h_I  weights >= 0 of the inputs; a group whose weights are all 0 is searched with 1
    """
    w_K, bits_K, unit_I = w_RI.reshape(w_RI.size), scale_RG.reshape(scale_RG.size), _in_units(h_I, group)
    w, h = np.empty(group * LANES, np.float32), np.empty(group * LANES, np.float32)
    lane, scratch = np.empty((6, LANES), np.float32), np.empty((7, LANES), np.float32)
    largest_L, scale_L, plain_L, found_L, plain_loss_L, loss_L = lane[0], lane[1], lane[2], lane[3], lane[4], lane[5]
    for first in range(0, bits_K.size, LANES):
        lanes = min(LANES, bits_K.size - first)
        _load(w_K, unit_I, first, lanes, group, w, h, largest_L)
        _search(w, h, group, scale_L, scratch)
        for j in range(LANES):
            plain_L[j] = stored_value(stored_bits(largest_L[j] / np.float32(7.5), half), half)
            found_L[j] = stored_value(stored_bits(scale_L[j] * largest_L[j], half), half)
        _losses(w, h, group, largest_L, plain_L, scratch, plain_loss_L)
        _losses(w, h, group, largest_L, found_L, scratch, loss_L)
        for j in range(lanes):
            scale = found_L[j] if loss_L[j] < plain_loss_L[j] else plain_L[j]
            bits_K[first + j] = stored_bits(scale if largest_L[j] > 0 else np.float32(1), half)
