"""AWQ: scale input channels before rounding, so that those which carry large activations lose less, and undo it before.

J. Lin et al., AWQ (arXiv 2306.00978), with the scale of its "duo" search: for the matrices W that read one input x,

    s_c = (mean |x_c|)^a / (mean |W_:c| / group max)^(1 - a),   clamped to >= 1e-4, divided by sqrt(max s * min s)

for a = 0, 0.05, ... 0.95; kept is the one whose W_hat = Q(W s) / s changes the outputs least, tr(D H D^T) summed over
the matrices, or s = 1 where none is better. The paper recomputes outputs of a sample of tokens; the Hessian gives the
same sum over all of them. The magnitudes are absolute values: signed means would cancel.

1 / s goes into whatever makes x: a norm (`fold_norm`) or the rows of a projection (`fold_rows`). A folded norm is
rounded to its stored dtype first and the s that it really applies goes into W, so that nothing is lost by the fold.
Powers of two are exact in any float, for weights that are scaled and stay as they are. An input that was always zero
keeps s = 1. Codes are chosen by `gptq.quantize`, with or without compensation; the paper's clip search is `clip.py`.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.methods.best import losses
from quantkit.quantize.methods.grid import make_grid, nearest_to
from torch import Tensor

STEPS = 20  # values of the exponent
_SMALLEST = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Smoothing:
    """The scales of one set, float32 on the CPU; `exponent` is None where s = 1 was best. Losses are tr(D H D^T)."""

    s_I: Tensor  # noqa: N815
    exponent: float | None
    loss: float
    loss_plain: float


def search(
    hessian_II: Tensor, mean_I: Tensor, weights: Sequence[Tensor], scheme: QuantScheme, *, half: bool,
    rows_I: Tensor | None = None, powers: bool = False,
) -> Smoothing:  # fmt: skip
    """Scales for the matrices [O, I] that read one input.

    hessian_II, mean_I  of `calibrate/stats.py`: 2 / n X^T X and mean |x| by channel, all tokens real ones
    rows_I  what makes each channel: those that one row makes (query heads of one KV head) get one scale
    powers  scales are powers of two
    Raises QuantkitError, naming the channels, where no exponent gives a finite loss.
    """
    h_II, mean_I = hessian_II.float(), mean_I.float().to(hessian_II.device)
    matrices = [w.to(h_II.device, torch.float32) for w in weights]
    size_I = _relative_size(matrices, scheme)
    if rows_I is not None:
        mean_I, size_I = _tied(mean_I, rows_I), _tied(size_I, rows_I)
    plain = _loss(h_II, matrices, torch.ones_like(mean_I), scheme, half)
    best = Smoothing(torch.ones(len(h_II)), None, plain, plain)
    finite = 0
    for k in range(STEPS):
        s_I = _scales(mean_I, size_I, k / STEPS)
        if powers:
            s_I = torch.exp2(torch.log2(s_I).round())
        loss = _loss(h_II, matrices, s_I, scheme, half)
        finite += loss < float("inf")
        if loss < best.loss:
            best = Smoothing(s_I.cpu(), k / STEPS, loss, plain)
    if not finite:
        bad_I = ~torch.isfinite(h_II).all(1) | ~torch.isfinite(mean_I)
        channels = torch.nonzero(bad_I).flatten().tolist()
        raise QuantkitError(
            "no AWQ scale gives a finite error", value=f"inputs {channels[:20]}", allowed="finite activations"
        )
    return best


def _tied(values_I: Tensor, rows_I: Tensor) -> Tensor:
    """Each value replaced by the mean of those with its row."""
    rows_I = rows_I.to(values_I.device)
    count = int(rows_I.max()) + 1
    sums = torch.zeros(count, device=values_I.device).index_add_(0, rows_I, values_I)
    return (sums / torch.bincount(rows_I, minlength=count))[rows_I]


def fold_norm(
    norm_I: Tensor, s_I: Tensor, *, dtype: torch.dtype | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm's weight divided by s, rounded to its stored dtype, and the float32 s that this norm really applies.

    dtype   as stored, by default that of `norm_I`;  offset  what the model adds to the weight (1 in Gemma's norms)
    A channel whose gain is zero, or would become so, keeps its weight and s = 1. Multiply W's columns by the second.
    """
    dtype = dtype or norm_I.dtype
    gain_I = norm_I.float() + offset
    folded_I = (gain_I / s_I.to(norm_I.device) - offset).to(dtype)
    exact_I = gain_I / (folded_I.float() + offset)
    usable_I = torch.isfinite(exact_I) & (exact_I > 0)
    folded_I = torch.where(usable_I, folded_I, norm_I.to(dtype))
    return folded_I, torch.where(usable_I, exact_I, 1.0)


def fold_rows(w_OI: Tensor, bias_O: Tensor | None, s_O: Tensor) -> tuple[Tensor, Tensor | None]:
    """The projection whose outputs are the channels that s scales, float32: rows, and bias, divided by s."""
    s_O = s_O.to(w_OI.device)
    return w_OI.float() / s_O[:, None], None if bias_O is None else bias_O.float() / s_O


def _relative_size(weights: Sequence[Tensor], scheme: QuantScheme) -> Tensor:
    """Mean over all rows of |w| / (largest |w| of its group), by input."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for w_OI in weights:
        grouped = w_OI.abs().reshape(len(w_OI), -1, scheme.group_size or w_OI.shape[1])
        relative = grouped / grouped.amax(2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total += relative.flatten(1).sum(0)
        rows += len(w_OI)
    return total / rows


def _scales(mean_I: Tensor, size_I: Tensor, exponent: float) -> Tensor:
    s_I = (mean_I**exponent / (size_I ** (1 - exponent) + _SMALLEST)).clamp(min=_SMALLEST)
    live_I = mean_I > 0
    if bool(live_I.any()):
        s_I = s_I / (s_I[live_I].max() * s_I[live_I].min()).sqrt()
    return torch.where(torch.isfinite(s_I) & live_I, s_I, 1.0)


def _loss(h_II: Tensor, weights: Sequence[Tensor], s_I: Tensor, scheme: QuantScheme, half: bool) -> float:
    scaled = [w * s_I for w in weights]
    amax = max(float(w.abs().max()) for w in scaled) if scheme.has_global else None
    loss = 0.0
    for w_OI, scaled_OI in zip(weights, scaled, strict=True):
        grid = make_grid(scaled_OI.cpu().contiguous().numpy(), scheme, "search", None, half=half, amax=amax)
        d_OI = w_OI - nearest_to(grid, scaled_OI) / s_I
        loss += float(losses(d_OI, h_II)[0].sum())
    return loss
