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

The matrix products run on the device of the Hessian, the inner loops on the CPU.
Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from quantkit.kernels.cpu.gptq import gptq_block
from quantkit.kernels.cpu.rows import RowParts
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.linalg import LADDER, damped_factor
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.methods.descent import sweep
from quantkit.quantize.methods.grid import F32, Grid, Rule, decoded, make_grid, nearest_to, parts_of, saturated
from quantkit.quantize.methods.threads import by_rows
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """damp       first share of the mean diagonal that is added to H; the ladder of `linalg.py` goes on from there
    act_order  take columns by descending diag H, rather than from left to right
    block      columns rounded between two matrix products; changes sums in the last bit only
    sweeps     rounds of coordinate descent and scale refit at the end
    rules      the scales that are tried; the second alone takes a sixth less time and loses 1.6 % more
    """

    damp: float = LADDER[0]
    act_order: bool = True
    block: int = 128
    sweeps: int = 1
    rules: tuple[Rule, ...] = ("search", "weighted")


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """What all matrices that see the same inputs share. `upper_II` and `order_I` are None where `failed` says why."""

    h_II: Tensor  # the Hessian, float32  # noqa: N815
    upper_II: Tensor | None  # U of the damped Hessian in processing order  # noqa: N815
    order_I: Tensor | None  # noqa: N815
    damp: float
    dead_I: Tensor  # noqa: N815
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
    diagonal_I = h_II.diagonal()
    if not bool(torch.isfinite(h_II).all()):
        zeros = torch.zeros_like(h_II)
        return Factor(zeros, None, None, 0.0, zeros.diagonal() > 0, "the Hessian holds NaN or infinity")
    dead_I = diagonal_I <= 0
    if bool(dead_I.all()):
        return Factor(h_II, None, None, 0.0, dead_I, "the layer saw no input")
    filled_II = h_II.clone()
    filled_II[dead_I, :] = 0
    filled_II[:, dead_I] = 0
    filled_II.diagonal()[dead_I] = diagonal_I[~dead_I].mean()
    order_I = torch.arange(len(h_II), device=h_II.device)
    if options.act_order:
        order_I = torch.argsort(filled_II.diagonal(), descending=True, stable=True)
    ladder = (options.damp, *(d for d in LADDER if d > options.damp))
    found = damped_factor(filled_II[order_I][:, order_I], ladder)
    if found is None:
        return Factor(
            h_II, None, None, 0.0, dead_I, f"the Hessian has no Cholesky factor with damping up to {ladder[-1]}"
        )
    return Factor(filled_II, found[0], order_I, found[1], dead_I)


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
    device = factor.h_II.device
    w_OI = w_OI.to(device, torch.float32).contiguous()
    w = w_OI.cpu().numpy()
    searched = make_grid(w, scheme, "search", None, half=half, amax=amax)
    h_II = factor.h_II * (~factor.dead_I)[:, None]  # dead inputs cost nothing
    best = _Best(w_OI, h_II, searched)
    best.offer(nearest_to(searched, w_OI), searched)
    plain_O = best.loss_O
    costs = _costs(factor)
    for rule in options.rules:
        if rule != "weighted" or costs is not None:
            grid = searched if rule == "search" else make_grid(w, scheme, rule, costs, half=half, amax=amax)
            best.offer(_compensated(w_OI, factor, grid, options.block), grid)
    for _ in range(0 if factor.upper_II is None else options.sweeps):
        best.sweep(factor, options.block)
    parts = parts_of(best.grid, w, best.hat_OI.cpu().contiguous().numpy())
    return Quantized(
        parts=parts,
        w_hat_OI=torch.from_numpy(decoded(best.grid, parts.codes, w.shape[1])),
        loss=float(best.loss_O.sum()),
        loss_plain=float(plain_O.sum()),
        norm=float(losses(w_OI, h_II)[0].sum()),
        damp=factor.damp,
        fallback=factor.failed,
        kept_rows=int((best.loss_O == plain_O).sum()),
        saturated=saturated(best.grid, parts.codes, w.shape[1]),
        dead=int(factor.dead_I.sum()),
    )


def round_to_nearest(
    w_OI: Tensor, hessian_II: Tensor, scheme: QuantScheme, *, half: bool, amax: float | None = None
) -> Quantized:
    """Rounding without compensation, each row under the better of the searched and the weighted scales; as `quantize`.

    hessian_II  finite; its diagonal weighs the inputs
    """
    h_II = hessian_II.float()
    return quantize(w_OI, Factor(h_II, None, None, 0.0, h_II.diagonal() <= 0), scheme, half=half, amax=amax)


class _Best:
    """The best result so far, row by row."""

    def __init__(self, w_OI: Tensor, h_II: Tensor, grid: Grid) -> None:
        self.w_OI, self.h_II, self.grid = w_OI, h_II, grid.copy()
        self.hat_OI = self.slope_OI = torch.zeros_like(w_OI)  # slope: (W - W_hat) H
        self.loss_O = torch.full((len(w_OI),), torch.inf, dtype=torch.float64, device=w_OI.device)

    def offer(self, hat_OI: Tensor, grid: Grid) -> None:
        """Measure a result and take the rows that lose less; one whose loss is not a number does not."""
        self._take(hat_OI, grid, *losses(self.w_OI - hat_OI, self.h_II))

    def sweep(self, factor: Factor, block: int) -> None:
        """One more round of coordinate descent, which keeps the slopes up to date: they are not computed anew."""
        hat_OI, grid = self.hat_OI.clone(), self.grid.copy()
        extra = factor.damp * float(factor.h_II.diagonal().mean())
        added_I = factor.h_II.diagonal() * factor.dead_I + extra  # what the damped matrix has on its diagonal beyond H
        damped_II = self.h_II.clone()
        damped_II.diagonal().add_(added_I)
        slope_OI = self.slope_OI + (self.w_OI - hat_OI) * added_I
        sweep(damped_II, grid, hat_OI, slope_OI, block)
        d_OI = self.w_OI - hat_OI
        slope_OI -= d_OI * added_I
        self._take(hat_OI, grid, (slope_OI.double() * d_OI).sum(1), slope_OI)

    def _take(self, hat_OI: Tensor, grid: Grid, loss_O: Tensor, slope_OI: Tensor) -> None:
        better_O = loss_O < self.loss_O
        self.loss_O = torch.where(better_O, loss_O, self.loss_O)
        self.hat_OI = torch.where(better_O[:, None], hat_OI, self.hat_OI)
        self.slope_OI = torch.where(better_O[:, None], slope_OI, self.slope_OI)
        self.grid.take(better_O, grid)


def losses(d_OI: Tensor, h_II: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every row, d H d^T, and D H: products in float32, the sums of the losses in float64."""
    slope_OI = d_OI @ h_II
    return (slope_OI.double() * d_OI).sum(1), slope_OI


def _costs(factor: Factor) -> F32 | None:
    """What an error costs in each column: after compensation where there is a factor, else by itself."""
    if factor.upper_II is None or factor.order_I is None:
        diagonal_I = factor.h_II.diagonal().clamp(min=0).cpu()
        return diagonal_I.contiguous().numpy() if bool(diagonal_I.any()) else None
    costs_I = torch.empty_like(factor.h_II.diagonal())
    costs_I[factor.order_I] = factor.upper_II.diagonal().square().reciprocal()
    return costs_I.cpu().numpy()


def _compensated(w_OI: Tensor, factor: Factor, grid: Grid, block: int) -> Tensor:
    """The weights rounded to a grid by GPTQ, or to nearest where there is no factor."""
    if factor.upper_II is None or factor.order_I is None:
        return nearest_to(grid, w_OI)
    upper_II, order_I = factor.upper_II, factor.order_I
    left_OI = w_OI[:, order_I]
    hat_OI = torch.empty_like(left_OI)
    scale, zero = grid.scale_OG.numpy(), grid.zero_OG.numpy()
    group_I = (order_I // grid.group).cpu().numpy()
    for at in range(0, len(order_I), block):
        here, rest = slice(at, min(at + block, len(order_I))), slice(at + block, None)
        part = left_OI[:, here].cpu().contiguous()
        hat, error = torch.empty_like(part), torch.empty_like(part)
        corner = upper_II[here, here].cpu().contiguous().numpy()

        def share(o: slice) -> None:
            arrays = part[o].numpy(), corner, scale[o], zero[o], group_I[here], grid.fp4  # noqa: B023
            gptq_block(*arrays, hat[o].numpy(), error[o].numpy())  # noqa: B023

        by_rows(len(w_OI), share)
        hat_OI[:, here] = hat.to(hat_OI.device)
        left_OI[:, rest] -= error.to(hat_OI.device) @ upper_II[here, rest]
    found_OI = torch.empty_like(hat_OI)
    found_OI[:, order_I] = hat_OI
    return found_OI
