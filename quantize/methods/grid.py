"""The grid that a calibrated method rounds to: the stored scales of a matrix, and the values they stand for.

Scales are chosen before any code, in one of several ways (`Rule`), and rounded to their stored format at once. A grid
then rounds weights to values; codes and bytes come last, from `parts_of`: the kernel of the scheme finds in each value
the code it came from.

Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.kernels.cpu import weighted
from quantkit.kernels.cpu.decode import fp4_to_f32, int4_to_f32
from quantkit.kernels.cpu.rows import (
    DEFAULT_METHOD,
    RowParts,
    codes_shape,
    family,
    global_scale,
    quantize_rows,
    requantize_rows,
    row_parts,
    scale_dtype,
)
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme
from torch import Tensor

Rule = Literal["plain", "search", "weighted", "clip"]

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Grid:
    """Scales of one matrix. The value of a code is (code - zero) * scale, of an FP4 code code * scale.

    stored_OG  what is stored, as float32: the scale; for NVFP4 the e4m3 number that `scale_2` multiplies
    zero_OG    zero points as float32; zeros for a symmetric scheme
    """

    scheme: QuantScheme
    half: bool  # int4 scales are float16, not bfloat16
    group: int  # inputs that share a scale
    stored_OG: Tensor  # noqa: N815
    zero_OG: Tensor  # noqa: N815
    scale_2: float

    @property
    def scale_OG(self) -> Tensor:  # noqa: N802
        """float32 values of the scales."""
        return self.value(self.stored_OG)

    def value(self, stored: Tensor) -> Tensor:
        """float32 scale of a stored one."""
        return stored * torch.tensor(self.scale_2, dtype=torch.float32)

    @property
    def fp4(self) -> bool:
        """True for e2m1 codes, False for int4."""
        return self.scheme.element == "e2m1"

    def rounded(self, scale: Tensor) -> Tensor:
        """The `stored_OG` nearest to wanted scales of any shape, never zero and never above the format's largest."""
        if self.scheme.scale == "model":
            dtype = torch.float16 if self.half else torch.bfloat16
            info = torch.finfo(dtype)
            size = scale.abs().to(dtype).float().clamp(info.smallest_normal, info.max)
            return torch.where(scale < 0, -size, size)
        size = scale.abs() / self.scale_2
        if self.scheme.scale == "e4m3":
            return size.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
        return torch.ldexp(torch.ones_like(size), torch.log2(size.clamp(min=2.0**-126)).round().clamp(-126, 127).int())

    def copy(self) -> Grid:
        """Scales and zero points of its own."""
        return replace(self, stored_OG=self.stored_OG.clone(), zero_OG=self.zero_OG.clone())

    def take(self, rows_O: Tensor, other: Grid) -> None:
        """Scales and zero points of another grid of this scheme, in the rows marked."""
        mark = rows_O.cpu()[:, None]
        self.stored_OG = torch.where(mark, other.stored_OG, self.stored_OG)
        self.zero_OG = torch.where(mark, other.zero_OG, self.zero_OG)


def make_grid(w_OI: F32, scheme: QuantScheme, rule: Rule, h_I: F32 | None, *, half: bool, amax: float | None) -> Grid:
    """Choose the scales of finite float32 weights.

    rule   plain: the scale of the format's plainest method; search: the least unweighted error (the data-free default);
           weighted: the least error with the weight `h_I` >= 0 of each input
    amax   the largest weight of the fused set, for schemes with a scale of the whole tensor
    Raises QuantkitError for a scheme without 4-bit codes and for weights that are not finite.
    """
    if scheme.element not in ("int4", "e2m1"):
        raise QuantkitError("this method is for 4-bit codes", value=scheme.name, allowed="int4, nvfp4, mxfp4")
    if scheme.has_global and amax is None:
        raise QuantkitError(f"{scheme.name} needs the largest absolute weight of the fused set")
    scale_2 = global_scale(scheme, float(amax or 0.0)) if scheme.has_global else np.float32(1)
    group = scheme.group_size or w_OI.shape[1]
    if rule == "weighted":
        assert h_I is not None
        stored, zero = _weighted(w_OI, scheme, group, half, scale_2, h_I)
    else:
        method = DEFAULT_METHOD[family(scheme)] if rule == "search" else "plain"
        parts = row_parts(scheme, *w_OI.shape)
        bad_row = quantize_rows(w_OI, scheme, method, amax, half, parts)
        if bad_row >= 0:
            raise QuantkitError("a weight is not a finite number", value=f"NaN or infinity in row {bad_row}")
        stored = _values(parts.scale, scheme, half)
        zero = np.zeros(stored.shape, np.float32) if parts.zero is None else parts.zero.astype(np.float32)
    return Grid(scheme, half, group, torch.from_numpy(stored), torch.from_numpy(zero), float(scale_2))


def nearest_to(grid: Grid, w_OI: Tensor) -> Tensor:
    """Each weight rounded to the grid by itself, on the weights' device."""
    return torch.from_numpy(decoded(grid, _codes(grid, w_OI.cpu().numpy()), w_OI.shape[1])).to(w_OI.device)


def decoded(grid: Grid, codes: U8, inputs: int) -> F32:
    """float32 values [O, `inputs`] of packed codes."""
    hat_OI = np.empty((len(codes), inputs), np.float32)
    if grid.fp4:
        fp4_to_f32(codes, grid.scale_OG.numpy(), grid.group, hat_OI)
    else:
        int4_to_f32(codes, grid.scale_OG.numpy(), grid.zero_OG.numpy().astype(np.int8), hat_OI)
    return hat_OI


def parts_of(grid: Grid, w_OI: F32, hat_OI: F32) -> RowParts:
    """Codes and scales as stored, of values that `grid` rounded to; errors against the weights they stand for."""
    scheme, (rows, inputs) = grid.scheme, w_OI.shape
    parts = row_parts(scheme, rows, inputs)
    parts.scale[:] = _stored(grid)
    if parts.zero is not None:
        parts.zero[:] = grid.zero_OG.numpy()
    parts.codes[:] = _codes(grid, hat_OI)
    parts.sq_err_R[:] = np.square(w_OI.astype(np.float64) - hat_OI).sum(1)
    parts.sq_norm_R[:] = np.square(w_OI.astype(np.float64)).sum(1)
    return parts


def saturated(grid: Grid, codes: U8, inputs: int) -> int:
    """Codes at an end of their range: -8 or 7, of FP4 a magnitude of 6."""
    if grid.fp4:
        pair = codes & 0x77
        return int(np.count_nonzero(pair & 7 == 7) + np.count_nonzero(pair >> 4 == 7))
    nibbles = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(codes), -1)[:, :inputs]
    return int(np.count_nonzero((nibbles == 0) | (nibbles == 15)))


def _codes(grid: Grid, w_OI: F32) -> U8:
    """Packed codes nearest to `w_OI` under the scales of the grid."""
    zero = None if grid.scheme.symmetric else grid.zero_OG.numpy().astype(np.int8)
    codes = np.empty(codes_shape(grid.scheme, *w_OI.shape), np.uint8)
    requantize_rows(np.ascontiguousarray(w_OI), grid.scheme, grid.half, _stored(grid), zero, grid.scale_2, codes)
    return codes


def _weighted(w_OI: F32, scheme: QuantScheme, group: int, half: bool, scale_2: np.float32, h_I: F32) -> tuple[F32, F32]:
    shape = (len(w_OI), w_OI.shape[1] // group)
    zero = np.zeros(shape, np.int8)
    if scheme.element == "int4":
        scale = np.empty(shape, np.float32)
        if scheme.symmetric:
            weighted.int4_scales(w_OI, h_I, group, half, scale)
        else:
            weighted.int4_scales_asym(w_OI, h_I, group, half, scale, zero)
        return scale, zero.astype(np.float32)
    code = np.empty(shape, np.uint8)
    if scheme.has_global:
        weighted.nvfp4_scales(w_OI, h_I, scale_2, code)
    else:
        weighted.mxfp4_scales(w_OI, h_I, code)
    return _values(code, scheme, half), zero.astype(np.float32)


def _values(scale: NDArray[np.uint8] | NDArray[np.uint16], scheme: QuantScheme, half: bool) -> F32:
    """float32 of stored scales."""
    codes = torch.from_numpy(scale)
    if scheme.scale == "model":
        found = codes.view(torch.float16 if half else torch.bfloat16).float()
    elif scheme.scale == "e4m3":
        found = codes.view(torch.float8_e4m3fn).float()
    else:
        found = torch.ldexp(torch.ones(codes.shape), codes.int() - 127)
    values: F32 = found.numpy()
    return values


def _stored(grid: Grid) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """The inverse of `_values`."""
    if grid.scheme.scale == "model":
        bits = grid.stored_OG.to(torch.float16 if grid.half else torch.bfloat16).view(torch.int16).numpy()
        return bits.view(scale_dtype(grid.scheme))
    if grid.scheme.scale == "e4m3":
        codes: NDArray[np.uint8] = grid.stored_OG.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return codes
    exponent = torch.frexp(grid.stored_OG).exponent - 1
    return (exponent + 127).to(torch.uint8).numpy()
