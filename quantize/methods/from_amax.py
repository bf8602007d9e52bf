"""Codes and scales of a weight from an amax for each scale, as other tools calibrate them.

A scale is amax over the largest number of the element (7, 6, 448), rounded to the format that it is stored in; each
code is then the nearest under the stored scale.

Shape suffixes: O outputs, I inputs, G scales of a row, N and M blocks of 128 outputs and inputs.
"""

from __future__ import annotations

import numpy as np
import torch
from quantkit.kernels.cpu.rows import (
    DEFAULT_METHOD,
    RowParts,
    family,
    quantize_rows,
    requantize_rows,
    row_parts,
    scale_shape,
)
from quantkit.kernels.float8 import dequantize, spread_blocks
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.methods.best import losses
from quantkit.quantize.methods.gptq import Quantized
from quantkit.quantize.methods.grid import Grid, decoded, make_grid, nearest_to, parts_of, saturated
from torch import Tensor

LARGEST = {"int4": 7.0, "e2m1": 6.0, "e4m3": 448.0}


def encode(
    w_OI: Tensor, moved_OI: Tensor, amax: Tensor, scheme: QuantScheme, hessian_II: Tensor, *, half: bool,
    largest: float,
) -> Quantized:  # fmt: skip
    """Round `moved_OI` under scales from `amax`; errors and losses are against the float32 weights `w_OI`.

    amax      one for each scale, in the order of the scales of a matrix: [O * G], [N * M] or one number
    largest   the largest weight of the fused set, for schemes with a scale of the whole tensor
    The losses are those of `gptq.py` on the same Hessian; `loss_plain` is data-free rounding in the scheme's best way.
    """
    w_OI = w_OI.cpu().float().contiguous()
    shape = scale_shape(scheme, *w_OI.shape)
    scale = amax.cpu().float().reshape(shape) / LARGEST[scheme.element]
    given = (w_OI, moved_OI.cpu().float().contiguous(), scale, scheme)
    parts, hat_OI, plain_OI, ends = _fp8(*given, largest) if scheme.element == "e4m3" else _fp4(*given, half, largest)
    h_II = hessian_II.cpu().float()
    loss, plain, norm = (float(losses(d_OI, h_II)[0].sum()) for d_OI in (w_OI - hat_OI, w_OI - plain_OI, w_OI))
    dead = int((h_II.diagonal() <= 0).sum())
    return Quantized(parts, hat_OI, loss, plain, norm, 0.0, None, 0, ends, dead)


def _fp4(
    w_OI: Tensor, moved_OI: Tensor, scale_OG: Tensor, scheme: QuantScheme, half: bool, largest: float
) -> tuple[RowParts, Tensor, Tensor, int]:
    """4-bit codes: (parts, their values, those of data-free rounding, codes at an end of the range)."""
    w = w_OI.numpy()
    searched = make_grid(w, scheme, "search", None, half=half, amax=largest)
    grid = Grid(scheme, half, searched.group, searched.stored_OG, torch.zeros_like(scale_OG), searched.scale_2)
    grid.stored_OG = grid.rounded(scale_OG)
    parts = parts_of(grid, w, nearest_to(grid, moved_OI).numpy())
    hat = decoded(grid, parts.codes, w.shape[1])
    return parts, torch.from_numpy(hat), nearest_to(searched, w_OI), saturated(grid, parts.codes, w.shape[1])


def _fp8(
    w_OI: Tensor, moved_OI: Tensor, scale: Tensor, scheme: QuantScheme, largest: float
) -> tuple[RowParts, Tensor, Tensor, int]:
    """The same for FP8. A scale of zero stands for a part without weights: 1.0 is stored, as everywhere."""
    w = w_OI.numpy()
    parts, free = (row_parts(scheme, *w.shape) for _ in range(2))
    parts.scale[:] = torch.where(scale > 0, scale.clamp(min=2.0**-126), 1.0).numpy()
    requantize_rows(moved_OI.numpy(), scheme, False, parts.scale, None, None, parts.codes)
    hat_OI = fp8_values(parts, scheme)
    parts.sq_err_R[:] = (w_OI - hat_OI).double().square().sum(1).numpy()
    parts.sq_norm_R[:] = w_OI.double().square().sum(1).numpy()
    quantize_rows(w, scheme, DEFAULT_METHOD[family(scheme)], largest, False, free)
    ends = int(np.count_nonzero((parts.codes & 0x7F) == 0x7E))
    return parts, hat_OI, fp8_values(free, scheme), ends


def fp8_values(parts: RowParts, scheme: QuantScheme) -> Tensor:
    """float32 [O, I] that FP8 codes under their scales stand for."""
    codes_OI, scale = torch.from_numpy(parts.codes), torch.from_numpy(parts.scale)
    return dequantize(codes_OI, spread_blocks(scale, *codes_OI.shape) if scheme.granularity == "block" else scale)
