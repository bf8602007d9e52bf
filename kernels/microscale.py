"""NVFP4 and MXFP4 in plain torch: the readable definition that `cpu/nvfp4.py` and `cpu/mxfp4.py` equal.

Codes and scales agree bit for bit, a test holds both to it. Nothing on the export path imports this module (torch takes
seconds to load). Sources: NVIDIA's NVFP4 as ModelOpt and
compressed-tensors write it; OCP Microscaling Formats 1.0 with compressed-tensors' choice of the exponent. The rules are
stated in the two twins; the order of every float32 sum is part of them (`_block_loss`).

Shape suffixes: R rows, I inputs, G blocks of a row, K weights of a block (16 or 32), B bytes of two codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quantkit.kernels.errors import QuantkitError
from torch import Tensor

NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
NVFP4_METHODS = ("plain", "four-over-six", "sweep")  # index = `method` of the Numba twin
_SWEEP = (0, 1, 2, 3, 4, 5, 6, 7, -1, -2)  # steps in e4m3 codes, in the order tried
_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1_index(a: Tensor) -> Tensor:
    """Index 0..7 of the e2m1 magnitude nearest to `a` >= 0, ties to the even index, saturating."""
    index = torch.zeros(a.shape, dtype=torch.int64)
    for k in range(7):
        middle = (_GRID[k] + _GRID[k + 1]) / 2
        index += (a > middle) if k % 2 == 0 else (a >= middle)
    return index


def _pack(w_RGK: Tensor, scale_RG: Tensor) -> Tensor:
    """Codes by true division, two to a byte, the even input low. A weight of exactly -0.0 gets code 0."""
    code = e2m1_index(w_RGK.abs() / scale_RG[..., None]) + 8 * (w_RGK < 0)
    code_RI = code.flatten(1)
    return (code_RI[:, 0::2] | (code_RI[:, 1::2] << 4)).to(torch.uint8)


def _unpack(codes_RB: Tensor) -> Tensor:
    """float32 values of packed codes, [R, 2 B]; code 8 is -0.0."""
    code_RI = torch.stack((codes_RB & 15, codes_RB >> 4), dim=-1).flatten(1).long()
    return torch.where(code_RI >= 8, -1.0, 1.0) * _GRID[code_RI & 7]


def _block_loss(size_RGK: Tensor, scale_RG: Tensor) -> Tensor:
    """float32 loss of every block of magnitudes under one scale each; codes by the reciprocal of the scale.

    Order of the sum: four weights in turn make a quad, (quad 0 + quad 1) + (quad 2 + quad 3) a half, half 0 + half 1.
    """
    reciprocal = torch.ones_like(scale_RG) / scale_RG
    error = size_RGK - _GRID[e2m1_index(size_RGK * reciprocal[..., None])] * scale_RG[..., None]
    square = (error * error).reshape(*scale_RG.shape, -1, 4, 4)  # half, quad, weight
    quad = ((square[..., 0] + square[..., 1]) + square[..., 2]) + square[..., 3]
    half = (quad[..., 0] + quad[..., 1]) + (quad[..., 2] + quad[..., 3])
    return half.select(-1, 0) if half.shape[-1] == 1 else half.select(-1, 0) + half.select(-1, 1)


def _best(size_RGK: Tensor, candidates: list[Tensor], value: Callable[[Tensor], Tensor]) -> Tensor:
    """The candidate scale codes with the smallest loss; the earlier candidate stays on a tie.

    Magnitudes and values are in a power-of-two unit near the scale, which keeps their squares inside float32.
    """
    code, loss = candidates[0], _block_loss(size_RGK, value(candidates[0]))
    for other in candidates[1:]:
        other_loss = _block_loss(size_RGK, value(other))
        better = other_loss < loss
        code, loss = torch.where(better, other, code), torch.where(better, other_loss, loss)
    return code


def _e4m3_code(x: Tensor) -> Tensor:
    return x.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).int()


def _e4m3_value(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _e8m0_value(code: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(code.shape, dtype=torch.float64), code - 127).float()


def _blocks(w_RI: Tensor, block: int) -> Tensor:
    if w_RI.dtype != torch.float32 or w_RI.ndim != 2 or w_RI.shape[1] % block:
        shape = tuple(w_RI.shape)
        raise QuantkitError(
            "weights must be float32, inputs in whole blocks", value=shape, allowed=f"[rows, {block} n]"
        )
    return w_RI.reshape(w_RI.shape[0], -1, block)


def quantize_nvfp4(w_RI: Tensor, scale_2: float, method: str) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [R, I / 2] and e4m3 scale codes uint8 [R, I / 16] of finite float32 weights.

    scale_2 is the float32 multiplier of the tensor, `cpu.nvfp4.nvfp4_scale_2` of the amax of the fused set; method is
    one of NVFP4_METHODS. Scales are rounded to e4m3 before codes are chosen.
    """
    w_RGK = _blocks(w_RI, NVFP4_BLOCK)
    second = torch.tensor(scale_2, dtype=torch.float32)
    amax_RG = w_RGK.abs().amax(-1)
    base_RG = amax_RG / (second * 6.0)
    plain = torch.where(amax_RG == 0, 0x38, _e4m3_code(base_RG))
    candidates = [plain]
    if method == "four-over-six":
        candidates.append(_e4m3_code(base_RG * 1.5))
    elif method == "sweep":
        candidates += [(plain + step).clamp(1, 126) for step in _SWEEP[1:]]
    elif method != "plain":
        raise QuantkitError("unknown method for nvfp4", value=method, allowed=", ".join(NVFP4_METHODS))
    unit = torch.ldexp(torch.tensor(1.0), 1 - torch.frexp(second).exponent)  # second * unit lies in [1, 2)
    code_RG = _best(w_RGK.abs() * unit, candidates, lambda code: _e4m3_value(code) * (second * unit))
    return _pack(w_RGK, _e4m3_value(code_RG) * second), code_RG.to(torch.uint8)


def dequantize_nvfp4(codes_RB: Tensor, scale_RG: Tensor, scale_2: float) -> Tensor:
    """float32 [R, I]: e2m1 * (e4m3 * scale_2), the bracket rounded first."""
    scale = _e4m3_value(scale_RG) * torch.tensor(scale_2, dtype=torch.float32)
    return _unpack(codes_RB) * scale.repeat_interleave(NVFP4_BLOCK, dim=1)


def quantize_mxfp4(w_RI: Tensor, search: bool) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [R, I / 2] and e8m0 scale codes uint8 [R, I / 32] of finite float32 weights."""
    w_RGK = _blocks(w_RI, MXFP4_BLOCK)
    amax_RG = w_RGK.abs().amax(-1)
    exponent = (amax_RG.contiguous().view(torch.int32) + (1 << 21)) >> 23
    plain = torch.where(amax_RG == 0, 127, (exponent - 2).clamp(min=0))
    candidates = [plain] + ([(plain + step).clamp(0, 254) for step in (1, -1)] if search else [])
    unit_RG = _e8m0_value(254 - plain)  # blocks in units of their plain scale
    code_RG = _best(w_RGK.abs() * unit_RG[..., None], candidates, lambda code: _e8m0_value(127 + code - plain))
    return _pack(w_RGK, _e8m0_value(code_RG)), code_RG.to(torch.uint8)


def dequantize_mxfp4(codes_RB: Tensor, scale_RG: Tensor) -> Tensor:
    """float32 [R, I]: e2m1 * 2^(code - 127), exact."""
    return _unpack(codes_RB) * _e8m0_value(scale_RG.int()).repeat_interleave(MXFP4_BLOCK, dim=1)
