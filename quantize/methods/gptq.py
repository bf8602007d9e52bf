"""GPTQ: round a weight so that the output of the layer changes least on the inputs that calibration saw.

E. Frantar et al., GPTQ (arXiv 2210.17323): columns are rounded one by one, and the error of each is made up for by the
columns still to come, as far as the inputs are correlated. What is minimised is tr(D H D^T) with D = W - W_hat and H
the Hessian of `calibrate/stats.py`. What is added to the paper, each measured:

    static act-order   columns are taken by descending diag H, but groups and scales are those of the original layout:
                       nothing but codes changes in the file, there is no g_idx
    scales             chosen twice, by the data-free search and with the weight 1 / U_cc^2 on column c, which is what
                       an error there costs after all later columns have made up for it; each row keeps the better
    sweeps             coordinate descent over codes, and a least-squares refit of each group's scale, on the same loss

A row that none of this makes better than the data-free search keeps that. Where H cannot be factorised even with the
strongest damping, so does the whole matrix, and `fallback` says why. Columns of inputs that were never different from
zero (`dead`) are rounded to nearest.

Rows do not know of one another once there is a factor: they are worked on in chunks of a fixed size, which keeps
the memory small and the result the same on any number of threads. The matrix products run on the
device of the Hessian, the inner loops on the CPU.
Shape suffixes: O outputs (of a chunk, where a function is given one), I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from quantkit.kernels.cpu.gptq import gptq_block
from quantkit.kernels.cpu.rows import RowParts
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.linalg import LADDER, damped_factor
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.methods.best import Best, least, losses
from quantkit.quantize.methods.clip import clipped
from quantkit.quantize.methods.grid import F32, Grid, Rule, decoded, make_grid, nearest_to, parts_of, saturated
from quantkit.quantize.methods.threads import side_by_side
from torch import Tensor

ROWS = 320  # of a chunk at most: fewer are done before the matrix products are efficient


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """compensate  False: each weight is rounded by itself, and what follows is the choice of scales
    damp       first share of the mean diagonal that is added to H; the ladder of `linalg.py` goes on from there
    act_order  take columns by descending diag H, rather than from left to right
    block      columns rounded between two matrix products; changes sums in the last bit only
    sweeps     rounds of coordinate descent and scale refit at the end
    rules      the scales that are tried; the second alone takes a sixth less time and loses 1.6 % more
    """

    compensate: bool = True
    damp: float = LADDER[0]
    act_order: bool = True
    block: int = 128
    sweeps: int = 1
    rules: tuple[Rule, ...] = ("search", "weighted")


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """What all matrices that see the same inputs share. `upper_II` and `order_I` are None where `failed` says why."""

    h_II: Tensor  # the Hessian, float32; zeros in the rows and columns of dead inputs, which cost nothing  # noqa: N815
    upper_II: Tensor | None  # U of the damped Hessian in processing order  # noqa: N815
    order_I: Tensor | None  # noqa: N815
    damp: float
    dead_I: Tensor  # noqa: N815
    added_I: Tensor  # what the damped matrix has on its diagonal beyond H  # noqa: N815
    failed: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A quantised matrix, and what it cost.

    parts       codes and scales as they are stored
    w_hat_OI    float32, on the CPU: exactly what `parts` decode to
    loss, loss_plain, norm  tr(D H D^T) of this result and of data-free rounding with the searched scale; tr(W H W^T)
    kept_rows   rows that data-free rounding serves better, and that keep it
    saturated   codes at an end of the range
    dead        inputs that were zero in all of the calibration
    """

    parts: RowParts
    w_hat_OI: Tensor  # noqa: N815
    loss: float
    loss_plain: float
    norm: float
    damp: float
    fallback: str | None
    kept_rows: int
    saturated: int
    dead: int


def factorise(hessian_II: Tensor, options: GptqOptions = GptqOptions()) -> Factor:
    """Order the columns and factorise: once for all matrices with these inputs. Never raises for bad numbers."""
    h_II = hessian_II.float()
    if not bool(torch.isfinite(h_II).all()):
        return _unfactored(torch.zeros_like(h_II), "the Hessian holds NaN or infinity", dead=False)
    dead_I = h_II.diagonal() <= 0
    if bool(dead_I.all()):
        return _unfactored(h_II, "the layer saw no input")
    if not options.compensate:
        return _unfactored(h_II, None)
    if bool(dead_I.any()):
        h_II = h_II.clone()
        h_II[dead_I, :] = 0
        h_II[:, dead_I] = 0
    fill_I = dead_I * h_II.diagonal()[~dead_I].mean()
    order_I = torch.arange(len(h_II), device=h_II.device)
    if options.act_order:
        order_I = torch.argsort(h_II.diagonal() + fill_I, descending=True, stable=True)
    ladder = (options.damp, *(d for d in LADDER if d > options.damp))
    ordered_II = h_II[order_I[:, None], order_I]
    ordered_II.diagonal().add_(fill_I[order_I])
    found = damped_factor(ordered_II, ladder)
    if found is None:
        return _unfactored(h_II, f"the Hessian has no Cholesky factor with damping up to {ladder[-1]}")
    return Factor(h_II, found[0], order_I, found[1], dead_I, fill_I + found[1] * ordered_II.diagonal().mean())


def _unfactored(h_II: Tensor, reason: str | None, *, dead: bool = True) -> Factor:
    """Without a factor, for `reason` or because none is wanted; `dead` False: no input counts as dead."""
    diagonal_I = h_II.diagonal()
    return Factor(h_II, None, None, 0.0, (diagonal_I <= 0) & dead, torch.zeros_like(diagonal_I), reason)


def quantize(
    w_OI: Tensor,
    factor: Factor,
    scheme: QuantScheme,
    *,
    half: bool,
    amax: float | None = None,
    options: GptqOptions = GptqOptions(),
) -> Quantized:
    """Quantise finite float weights [O, I] to a 4-bit scheme; groups must divide I.

    half  int4 scales are float16, not bfloat16;  amax  largest weight of the fused set, where the scheme needs it
    Raises QuantkitError for another width than the Hessian's, for NaN or infinity, and as `make_grid`.
    """
    if w_OI.ndim != 2 or w_OI.shape[1] != len(factor.h_II):
        raise QuantkitError(
            "a weight of another width than its Hessian", value=list(w_OI.shape), allowed=len(factor.h_II)
        )
    # a copy: how a view lies in memory shows in the last bits of matrix products
    w_OI = w_OI.to(factor.h_II.device, torch.float32, copy=True, memory_format=torch.contiguous_format)
    bad_O = ~torch.isfinite(w_OI).all(1)
    if bool(bad_O.any()):
        raise QuantkitError(
            "a weight is not a finite number", value=f"NaN or infinity in row {int(bad_O.nonzero()[0])}"
        )
    args = (factor, scheme, half, amax, options)
    pieces = 2 * -(-len(w_OI) // (2 * ROWS))  # an even number: two threads end together
    chunks = torch.split(w_OI, -(-len(w_OI) // pieces))
    return _joined(side_by_side([partial(_rows, chunk_OI, *args) for chunk_OI in chunks]))


def _rows(
    w_OI: Tensor, factor: Factor, scheme: QuantScheme, half: bool, amax: float | None, options: GptqOptions
) -> Quantized:
    """Quantise the rows of one chunk."""
    w = w_OI.cpu().numpy()
    searched = make_grid(w, scheme, "search", None, half=half, amax=amax)
    best = Best(w_OI, factor.h_II, searched)
    best.offer(nearest_to(searched, w_OI), searched)
    plain_O = best.loss_O
    costs = _costs(factor)
    tried: list[tuple[Tensor, Tensor, Grid]] = []
    for rule in options.rules:
        if rule == "search":
            grid = searched
        elif rule == "clip":
            grid = clipped(w_OI, factor.h_II, make_grid(w, scheme, "plain", None, half=half, amax=amax), best.grid)
        elif costs is None:
            continue
        else:
            grid = make_grid(w, scheme, rule, costs, half=half, amax=amax)
        if factor.upper_II is None:
            best.offer(nearest_to(grid, w_OI), grid)
        else:
            tried.append((*_compensated(w_OI, factor, grid, options.block), grid))
    if tried:
        best.offer(*least(tried))
    for _ in range(0 if factor.upper_II is None else options.sweeps):
        best.sweep(factor.added_I, options.block)
    parts = parts_of(best.grid, w, best.hat_OI.cpu().contiguous().numpy())
    return Quantized(
        parts=parts,
        w_hat_OI=torch.from_numpy(decoded(best.grid, parts.codes, w.shape[1])),
        loss=float(best.loss_O.sum()),
        loss_plain=float(plain_O.sum()),
        norm=float(losses(w_OI, factor.h_II)[0].sum()),
        damp=factor.damp,
        fallback=factor.failed,
        kept_rows=int((best.loss_O == plain_O).sum()),
        saturated=saturated(best.grid, parts.codes, w.shape[1]),
        dead=int(factor.dead_I.sum()),
    )


def _joined(chunks: Sequence[Quantized]) -> Quantized:
    """Chunks of rows as the matrix they are of."""
    parts = [c.parts for c in chunks]
    zeros = [p.zero for p in parts if p.zero is not None]
    return replace(
        chunks[0],
        parts=RowParts(
            codes=np.concatenate([p.codes for p in parts]),
            scale=np.concatenate([p.scale for p in parts]),
            zero=np.concatenate(zeros) if zeros else None,
            sq_err_R=np.concatenate([p.sq_err_R for p in parts]),
            sq_norm_R=np.concatenate([p.sq_norm_R for p in parts]),
        ),
        w_hat_OI=torch.cat([c.w_hat_OI for c in chunks]),
        loss=sum(c.loss for c in chunks),
        loss_plain=sum(c.loss_plain for c in chunks),
        norm=sum(c.norm for c in chunks),
        kept_rows=sum(c.kept_rows for c in chunks),
        saturated=sum(c.saturated for c in chunks),
    )


def _costs(factor: Factor) -> F32 | None:
    """What an error costs in each column: after compensation where there is a factor, else by itself."""
    if factor.upper_II is None or factor.order_I is None:
        diagonal_I = factor.h_II.diagonal().clamp(min=0).cpu()
        return diagonal_I.contiguous().numpy() if bool(diagonal_I.any()) else None
    costs_I = torch.empty_like(factor.h_II.diagonal())
    costs_I[factor.order_I] = factor.upper_II.diagonal().square().reciprocal()
    return costs_I.cpu().numpy()


def _compensated(w_OI: Tensor, factor: Factor, grid: Grid, block: int) -> tuple[Tensor, Tensor]:
    """The weights rounded to a grid by GPTQ, and the loss of each row: the damped one is the sum of squared errors."""
    upper_II, order_I = factor.upper_II, factor.order_I
    assert upper_II is not None
    assert order_I is not None
    left_OI = w_OI[:, order_I]
    hat_OI = torch.empty_like(left_OI)
    loss_O = torch.zeros_like(left_OI[:, 0])
    scale, zero = grid.scale_OG.numpy(), grid.zero_OG.numpy()
    group_I = (order_I // grid.group).cpu().numpy()
    for at in range(0, len(order_I), block):
        here, rest = slice(at, min(at + block, len(order_I))), slice(at + block, None)
        part = left_OI[:, here].cpu().contiguous()
        hat, error = torch.empty_like(part), torch.empty_like(part)
        corner = upper_II[here, here].cpu().contiguous().numpy()
        arrays = part.numpy(), corner, scale, zero, group_I[here], grid.fp4
        gptq_block(*arrays, hat.numpy(), error.numpy())
        error = error.to(hat_OI.device)
        hat_OI[:, here] = hat.to(hat_OI.device)
        left_OI[:, rest] -= error @ upper_II[here, rest]
        loss_O += error.square().sum(1)
    found_OI = torch.empty_like(hat_OI)
    found_OI[:, order_I] = hat_OI
    return found_OI, loss_O - (w_OI - found_OI).square() @ factor.added_I
