"""INT4 in plain torch: what the kernels compute, to read and to test them by.

A weight is (q - zero) * scale with codes q in -8..7; scale and zero belong to a group of consecutive inputs of one row.
Sources: compressed-tensors for the default scales; the signed full-range scale is AutoRound's, the least-squares refit
of a scale to given codes is in every book on scalar quantisation.

    plain          scale = max |w| / 7.5
    signed         scale = max |w| / 8 with the sign that puts that weight at code -8, where that beats `plain`
    searched       the signed scale of least squared error, where that beats `plain`
    plain_asym     scale = (max - min) / 15 with 0 inside, zero = round(-8 - min / scale), before the scale is rounded
    searched_asym  the best of `plain_asym` with both ends drawn in by 0, 5, ... 35 %

Scales are rounded to `dtype` (bfloat16 or float16) before codes are chosen and kept normal and finite; a group of zeros
gets scale 1. Codes are round-half-even(w / scale + zero) in float32, clipped. Weights must be finite: the kernels look.

Errors and scores are sums of integers that float64 holds exactly, so that no order of summation is part of the
definition; `kernels/cpu/int4_search.py` has the reasons, and the candidates.
Shape suffixes: O outputs, I inputs, G groups, N inputs of a group.
"""

from __future__ import annotations

import torch
from quantkit.kernels.cpu.int4_search import STEPS, candidates
from torch import Tensor

SMALLEST = 2.0**-100  # a group whose largest weight is below this is not searched
BETTER = 0.9999  # error that a searched scale may have, relative to the plain one


def plain(w_OI: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [O, I] and scales [O, G] of float32 weights; `group` divides the inputs."""
    w_OGN = _groups(w_OI, group)
    scale_OG = _plain_scale(w_OGN, dtype)
    return _codes(w_OGN, scale_OG.float()).flatten(1), scale_OG


def signed(w_OI: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `plain`, with the largest weight at code -8 where that has the smaller error."""
    w_OGN = _groups(w_OI, group)
    largest_OG = w_OGN.abs().amax(2)
    factor_OG = 2.0**14 / largest_OG.clamp(min=SMALLEST)
    factor_OG = torch.where(w_OGN.amax(2) == largest_OG, -factor_OG, factor_OG)
    return _keep_better(w_OGN, (2048.0 / factor_OG.double()).float(), dtype)


def searched(w_OI: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `plain`, with a signed scale where its error is smaller, both as stored."""
    w_OGN = _groups(w_OI, group)
    largest_OG = w_OGN.abs().amax(2)
    factor_OG = 2.0**14 / largest_OG.clamp(min=SMALLEST)
    factor_OG = torch.where(w_OGN.amax(2) == largest_OG, -factor_OG, factor_OG)
    best_OG = _search((w_OGN * factor_OG[..., None]).round())
    return _keep_better(w_OGN, (best_OG / factor_OG.double()).float(), dtype)


def _keep_better(w_OGN: Tensor, found_OG: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and stored scales: the scale found, or the plain one where that is as good, both as stored."""
    plain_OG, scale_OG = _plain_scale(w_OGN, dtype), _stored(found_OG, dtype)
    better_OG = _error(w_OGN, scale_OG.float()) < _error(w_OGN, plain_OG.float()) * BETTER
    scale_OG = torch.where(better_OG & (w_OGN.abs().amax(2) >= SMALLEST), scale_OG, plain_OG)
    return _codes(w_OGN, scale_OG.float()).flatten(1), scale_OG


def plain_asym(w_OI: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 [O, I], scales [O, G] and zero points int8 [O, G] of float32 weights."""
    w_OGN = _groups(w_OI, group)
    scale_OG, zero_OG = _asym_parameters(w_OGN, 0, dtype)
    return _codes(w_OGN, scale_OG.float(), zero_OG).flatten(1), scale_OG, zero_OG.to(torch.int8)


def searched_asym(w_OI: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain_asym`, with the range drawn in where that makes the error smaller."""
    w_OGN = _groups(w_OI, group)
    scale_OG, zero_OG = _asym_parameters(w_OGN, 0, dtype)
    best_OG = _error(w_OGN, scale_OG.float(), zero_OG)
    for k in range(1, 8):
        trial_OG, trial_zero_OG = _asym_parameters(w_OGN, k, dtype)
        error_OG = _error(w_OGN, trial_OG.float(), trial_zero_OG)
        better_OG = error_OG < best_OG * BETTER
        scale_OG, zero_OG = torch.where(better_OG, trial_OG, scale_OG), torch.where(better_OG, trial_zero_OG, zero_OG)
        best_OG = torch.where(better_OG, error_OG, best_OG)
    return _codes(w_OGN, scale_OG.float(), zero_OG).flatten(1), scale_OG, zero_OG.to(torch.int8)


def dequantize(q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None) -> Tensor:
    """float32 weights of codes and stored scales."""
    q_OGN = _groups(q_OI.float(), q_OI.shape[1] // scale_OG.shape[1])
    zero = 0 if zero_OG is None else zero_OG.float()[..., None]
    return ((q_OGN - zero) * scale_OG.float()[..., None]).flatten(1)


def _groups(w_OI: Tensor, group: int) -> Tensor:
    return w_OI.reshape(len(w_OI), -1, group)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even, then keep the magnitude normal and finite."""
    info = torch.finfo(dtype)
    magnitude = scale.abs().to(dtype).float().clamp(info.smallest_normal, info.max)
    return torch.where(scale < 0, -magnitude, magnitude).to(dtype)


def _plain_scale(w_OGN: Tensor, dtype: torch.dtype) -> Tensor:
    largest_OG = w_OGN.abs().amax(2)
    return _stored(torch.where(largest_OG > 0, largest_OG / 7.5, 1.0), dtype)


def _asym_parameters(w_OGN: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero of the range drawn in by 5 k %."""
    shrink = torch.tensor(1.0 - 0.05 * k, dtype=torch.float32)
    low_OG, high_OG = w_OGN.amin(2).clamp(max=0) * shrink, w_OGN.amax(2).clamp(min=0) * shrink
    any_OG = w_OGN.abs().amax(2) > 0
    width_OG = (high_OG - low_OG) / 15
    scale_OG = _stored(torch.where(any_OG, width_OG, 1.0), dtype)
    exact_OG = torch.where((width_OG > 0) & (width_OG < torch.inf), width_OG, scale_OG.float())
    return scale_OG, (-8 - low_OG / exact_OG).round().clamp(-8, 7)


def _codes(w_OGN: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None) -> Tensor:
    zero = 0 if zero_OG is None else zero_OG[..., None]
    return (w_OGN / scale_OG[..., None] + zero).round().clamp(-8, 7).to(torch.int8)


def _error(w_OGN: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None) -> Tensor:
    """Sum of the squares of what is lost, each first rounded to a very small part of the largest weight."""
    unit_OG = 2.0 ** (22 if w_OGN.shape[2] <= 128 else 18) / w_OGN.abs().amax(2).clamp(min=SMALLEST)
    zero = 0 if zero_OG is None else zero_OG[..., None]
    lost_OGN = w_OGN - (_codes(w_OGN, scale_OG, zero_OG).float() - zero) * scale_OG[..., None]
    return (lost_OGN * unit_OG[..., None]).round().double().square().sum(2)


def _score(x_OGN: Tensor, k_OG: Tensor, low: int) -> tuple[Tensor, Tensor]:
    """<x, q>^2 / <q, q> and <x, q> / <q, q> of integers x and their codes low..low + 15 under candidate k."""
    q_OGN = (x_OGN * torch.from_numpy(STEPS)[k_OG][..., None]).round().clamp(low, low + 15).double()
    xq_OG, qq_OG = (x_OGN.double() * q_OGN).sum(2), q_OGN.square().sum(2)
    return xq_OG * xq_OG / qq_OG, xq_OG / qq_OG


def _search(x_OGN: Tensor) -> Tensor:
    """The best scale of groups of integers whose largest magnitude is negative; the first of equals wins."""
    first, count, reach = (int(n) for n in candidates(x_OGN.shape[2]))
    k_OG = torch.full(x_OGN.shape[:2], first)
    coarse = [_score(x_OGN, k_OG + 4 * j, -8) for j in range(count)]
    centre_OG = first + 4 * torch.stack([score for score, _ in coarse]).argmax(0)
    centre = _score(x_OGN, centre_OG, -8)
    fine = [_score(x_OGN, centre_OG + j, -8) for j in (-2, -1, 1, 2)]
    other = [_score(x_OGN, centre_OG + j, -7) for j in range(-reach, reach + 1)]
    other = [(score, -scale) for score, scale in other]
    scores, scales = (torch.stack(part) for part in zip(centre, *fine, *other, strict=True))
    return scales.gather(0, scores.argmax(0, keepdim=True))[0]
