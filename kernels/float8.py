"""FP8 E4M3 weights in plain torch: the readable definition that `cpu/fp8.py` must equal bit for bit.

Nothing on the export path imports this module (torch takes seconds to load). Scales are amax / 448 in float32, rounded
before codes are chosen: one for the tensor, for each row, or for each 128 x 128 block (DeepSeek's block FP8, with an
optional power of two rounded up). Codes are e4m3(w / scale) by float32 division, held to +-448, ties to even.

Shape suffixes: R rows, I inputs, N blocks of 128 rows, G blocks of 128 inputs.
"""

from __future__ import annotations

import torch
from quantkit.kernels.scheme import BLOCK
from torch import Tensor
from torch.nn.functional import pad

_SCALE_MIN = 2.0**-126  # the smallest normal float32


def scale_of(amax: Tensor, ue8m0: bool = False) -> Tensor:
    """float32 scales of largest magnitudes: 1.0 for 0; `ue8m0` rounds up to a power of two."""
    scale = torch.where(amax == 0, 1.0, (amax / 448.0).clamp(min=_SCALE_MIN))
    if ue8m0:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def encode(w_RI: Tensor, scale: Tensor) -> Tensor:
    """uint8 e4m3 codes of w / scale; `scale` broadcasts against the weights."""
    return (w_RI / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def spread_blocks(scale_NG: Tensor, rows: int, inputs: int) -> Tensor:
    """Block scales repeated to [rows, inputs]."""
    return scale_NG.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :inputs]


def quantize_tensor(w_RI: Tensor, amax: float) -> tuple[Tensor, Tensor]:
    """Codes uint8 [R, I] and the scale float32 [1], for the amax of the fused set."""
    scale = scale_of(torch.tensor([amax], dtype=torch.float32))
    return encode(w_RI, scale), scale


def quantize_channel(w_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [R, I] and scales float32 [R, 1]."""
    scale_R1 = scale_of(w_RI.abs().amax(1, keepdim=True))
    return encode(w_RI, scale_R1), scale_R1


def quantize_block(w_RI: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Codes uint8 [R, I] and scales float32 [ceil(R / 128), ceil(I / 128)]; edge blocks may be partial."""
    rows, inputs = w_RI.shape
    padded = pad(w_RI.abs(), (0, -inputs % BLOCK, 0, -rows % BLOCK))
    amax_NG = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK).amax((1, 3))
    scale_NG = scale_of(amax_NG, ue8m0)
    return encode(w_RI, spread_blocks(scale_NG, rows, inputs)), scale_NG


def dequantize(codes_RI: Tensor, scale: Tensor) -> Tensor:
    """float32 e4m3 * scale; `scale` broadcasts against the codes."""
    return codes_RI.view(torch.float8_e4m3fn).float() * scale
