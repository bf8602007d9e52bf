"""Activations as an engine that quantises them multiplies them: to codes and back, in float32.

    NVFP4 (e2m1)  blocks of 16 inputs of a token, each under e4m3(amax / (6 scale)), all under the one stored scale
    FP8 (e4m3)    under a stored scale, values beyond 448 times it clipped; else every `group` inputs of a token (0: all
                  of them) under their own amax / 448

A token with NaN or infinity is NaN as a whole under NVFP4, whose codes have none.

Shape suffixes: T tokens, I inputs, G groups.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from quantkit.kernels.cpu import activations as cpu
from quantkit.kernels.cpu.workers import share
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.float8 import dequantize, encode, quantize_channel
from quantkit.kernels.gemm import quantize_activations
from torch import Tensor
from torch.nn.functional import pad

_ROWS = 256  # of a thread's share at least


def served_inputs(x: Tensor, element: Literal["e4m3", "e2m1"], group: int, scale: float | None) -> Tensor:
    """Inputs [..., I] of any float dtype after quantisation, in their dtype.

    scale  stored for the tensor; NVFP4 needs one, FP8 has None for scales made of the inputs

    Raises QuantkitError when the inputs are no whole blocks of NVFP4.
    """
    x_TI = x.reshape(-1, x.shape[-1]).float()
    if element == "e2m1":
        assert scale is not None
        out_TI = _nvfp4(x_TI, scale)
    elif scale is not None:
        one = torch.tensor(scale, dtype=torch.float32, device=x.device)
        out_TI = dequantize(encode(x_TI, one), one)
    else:
        width = group or x_TI.shape[1]
        whole_TI = pad(x_TI, (0, -x_TI.shape[1] % width))
        out_RG = dequantize(*quantize_channel(whole_TI.reshape(-1, width)))
        out_TI = out_RG.reshape(whole_TI.shape)[:, : x_TI.shape[1]]
    return out_TI.reshape(x.shape).to(x.dtype)


def _nvfp4(x_TI: Tensor, scale: float) -> Tensor:
    if x_TI.shape[1] % cpu.GROUP:
        raise QuantkitError(
            "inputs that are no whole blocks of NVFP4", value=x_TI.shape[1], allowed=f"a multiple of {cpu.GROUP}"
        )
    if x_TI.device.type != "cpu":
        out_TI = quantize_activations(x_TI, scale)
    else:
        x, out = x_TI.contiguous().numpy(), np.empty(x_TI.shape, np.float32)
        workers = max(1, min(torch.get_num_threads(), len(x) // _ROWS))
        ends = [len(x) * i // workers for i in range(workers + 1)]

        def part(i: int) -> None:
            rows = slice(ends[i], ends[i + 1])
            cpu.quantize_activations(x[rows], np.float32(scale), out[rows])

        share(part, workers)
        out_TI = torch.from_numpy(out) * torch.tensor(scale, dtype=torch.float32)
    bad_T = ~x_TI.isfinite().all(1)
    return out_TI.masked_fill_(bad_T[:, None], torch.nan) if bool(bad_T.any()) else out_TI
