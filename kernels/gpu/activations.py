"""Activations as NVFP4 (W4A4): the values that FP4 tensor cores would multiply.

A run of 16 inputs of a token has the scale e4m3(clamp(amax / (6 input_scale), 2^-9, 448)), 1.0 if all are 0, and codes
e2m1(x / (scale * input_scale)). What is written is e2m1 * e4m3 without `input_scale`: 6 significant bits, exact in
bfloat16. Divisions are rounded float32 divisions.

Shape suffixes: T tokens, I inputs, G runs of 16, N = 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from quantkit.kernels.gpu.decode import e2m1_to_f32, e4m3_to_f32, float_to_f32
from quantkit.kernels.gpu.encode import f32_to_bf16, f32_to_e2m1, f32_to_e4m3, largest
from quantkit.kernels.gpu.jit import jit
from torch import Tensor

_RUNS = 64  # runs that one program quantises


def quantize_nvfp4(x_TI: Tensor, input_scale: float) -> Tensor:
    """bfloat16 [T, I] of activations whose inputs are whole runs of 16; times input_scale it is what they become."""
    q_TI = torch.empty(x_TI.shape, dtype=torch.bfloat16, device=x_TI.device)
    if x_TI.numel():
        runs = x_TI.numel() // 16
        quantize_runs[(triton.cdiv(runs, _RUNS),)](
            x_TI, q_TI.view(torch.uint16), input_scale, runs, BLOCK=_RUNS, num_warps=1
        )
    return q_TI


@jit
def nvfp4_scale(amax_G: tl.tensor, outer: tl.tensor) -> tl.tensor:
    """e4m3 codes (int32) of the block scales for amax [G] under the second-level scale `outer`."""
    wanted = tl.div_rn(amax_G, tl.full(amax_G.shape, 6.0, tl.float32) * outer)
    held = tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)
    held = tl.where(amax_G == amax_G, held, amax_G)
    return f32_to_e4m3(tl.where(amax_G == 0, 1.0, held))


@jit
def quantize_runs(x_ptr: tl.tensor, q_ptr: tl.tensor, outer: tl.tensor, runs: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Runs of 16 values of x to the bits (uint16) of their quantised values."""
    run_G = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = run_G[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_GN = float_to_f32(tl.load(x_ptr + at, mask=(run_G < runs)[:, None], other=0.0))
    scale_G = e4m3_to_f32(nvfp4_scale(largest(x_GN), outer))
    value_GN = tl.div_rn(x_GN, (scale_G * outer)[:, None].broadcast_to(x_GN.shape))
    q_GN = e2m1_to_f32(f32_to_e2m1(value_GN)) * scale_G[:, None]
    tl.store(q_ptr + at, f32_to_bf16(q_GN).to(tl.uint16), mask=(run_G < runs)[:, None])
