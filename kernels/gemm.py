"""Packed GEMM: what it computes, in plain torch, and the choice of a fast twin by device.

y_TO = x_TI W^T, with W the weight that the bytes of a PackedMatrix stand for, in float32. The reference decodes the
whole weight and multiplies; the twins `cpu/gemm.py` (Numba) and `gpu/gemm.py` (Triton) never hold it.

Arrays of a PackedMatrix are torch tensors here. Shape suffixes: T tokens, I inputs, O outputs, G scales of a row,
E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.kernels.elements import E2M1_VALUES, E8M0_VALUES
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.matrix import PackedMatrix, check_experts, check_input_scale, check_inputs, check_matrix
from quantkit.kernels.microscale import e2m1_index
from quantkit.kernels.scheme import BLOCK
from torch import Tensor

_CARRIED = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}


def as_tensors(w: PackedMatrix, device: str | torch.device = "cpu") -> PackedMatrix:
    """The same matrix with its numpy arrays as torch tensors on a device."""
    parts = {n: torch.as_tensor(getattr(w, n)).to(device) for n in ("codes", "scale")}
    zero = None if w.zero is None else torch.as_tensor(w.zero).to(device)
    return replace(w, codes=parts["codes"], scale=parts["scale"], zero=zero)


def _scales(w: PackedMatrix) -> Tensor:
    """float32 scales [O, I], without the global one."""
    stored = torch.as_tensor(w.scale)
    if w.scale_format == "e8m0":
        scale = torch.tensor(E8M0_VALUES, device=stored.device)[stored.long()]
    else:
        scale = stored.view(_CARRIED[w.scale_format]).float()
    if w.scheme.granularity == "block":
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return spread[: w.outputs, : w.inputs]
    return scale.repeat_interleave(w.inputs // scale.shape[1], 1).expand(w.outputs, w.inputs)


def dequantize(w: PackedMatrix) -> Tensor:
    """float32 [O, I]: (code - zero point) * scale * global scale, each product rounded."""
    check_matrix(w)
    codes = torch.as_tensor(w.codes)
    if w.scheme.element == "e4m3":
        numbers = codes.view(torch.float8_e4m3fn).float()
    else:
        nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, : w.inputs].long()
        if w.scheme.element == "e2m1":
            numbers = torch.tensor(E2M1_VALUES, device=codes.device)[nibbles]
        else:
            numbers = (nibbles - 8).float()
    if w.zero is not None:
        shifts = torch.arange(0, 32, 4, device=codes.device)
        zero = ((torch.as_tensor(w.zero)[:, None, :] >> shifts[:, None]) & 15).flatten(0, 1)[: w.outputs] - 8
        numbers = numbers - zero.repeat_interleave(w.inputs // zero.shape[1], 1)
    return numbers * _scales(w) * w.global_scale


def quantize_activations(x_TI: Tensor, input_scale: float) -> Tensor:
    """float32 values of activations that were quantised to NVFP4 under a given second-level scale (W4A4)."""
    x_TGK = x_TI.float().reshape(len(x_TI), -1, 16)
    amax_TG = x_TGK.abs().amax(2)
    scale_TG = (amax_TG / (torch.tensor(6.0) * torch.tensor(input_scale))).clamp(2.0**-9, 448)
    scale_TG = scale_TG.to(torch.float8_e4m3fn).float()
    index = e2m1_index((x_TGK / (scale_TG * torch.tensor(input_scale))[..., None]).abs())
    value = torch.tensor(E2M1_VALUES, device=x_TI.device)[index] * x_TGK.sign()
    exact: Tensor = (value * scale_TG[..., None]).flatten(1)
    return exact * input_scale


def reference(x_TI: Tensor, w: PackedMatrix, *, input_scale: float | None = None) -> Tensor:
    """See `matmul`; runs on the CPU."""
    check_matrix(w)
    check_inputs(x_TI, w)
    x = x_TI.float()
    if input_scale is not None:
        check_input_scale(w, input_scale)
        x = quantize_activations(x, input_scale)
    return x @ dequantize(w).T


def reference_grouped(
    x_TI: Tensor, starts_E1: Tensor, experts: Sequence[PackedMatrix], *, input_scale: float | None = None
) -> Tensor:
    """See `grouped_matmul`."""
    check_experts(x_TI, starts_E1, experts)
    parts = [x_TI[first:last] for first, last in pairwise(starts_E1.tolist())]
    return torch.cat([reference(x, w, input_scale=input_scale) for x, w in zip(parts, experts, strict=True)])


def matmul(x_TI: Tensor, w: PackedMatrix, *, input_scale: float | None = None) -> Tensor:
    """Activations [T, I] (float32, float16, bfloat16) times the transposed weight: float32 [T, O].

    input_scale  NVFP4 only: the activations are quantised to NVFP4 under this second-level scale first (W4A4)

    Raises QuantkitError, before anything is read, when an array does not fit.
    """
    _check_devices(x_TI, [w])
    if x_TI.is_cuda:
        from quantkit.kernels.gpu import gemm as gpu

        return gpu.matmul(x_TI, w, input_scale=input_scale)
    from quantkit.kernels.cpu import gemm as cpu

    y = cpu.matmul(_bits(x_TI), _as_numpy(w), input_scale=input_scale, threads=torch.get_num_threads())
    return torch.from_numpy(y)


def grouped_matmul(
    x_TI: Tensor, starts_E1: Tensor, experts: Sequence[PackedMatrix], *, input_scale: float | None = None
) -> Tensor:
    """Tokens sorted by expert, each times the weight of its expert: float32 [T, O].

    starts_E1  int32 [E + 1]: expert e has the tokens starts[e] to starts[e + 1]; starts at 0 and ends at T
    """
    _check_devices(x_TI, experts)
    if x_TI.is_cuda:
        from quantkit.kernels.gpu import gemm as gpu

        return gpu.grouped_matmul(x_TI, starts_E1, experts, input_scale=input_scale)
    from quantkit.kernels.cpu import gemm as cpu

    matrices = [_as_numpy(w) for w in experts]
    threads = torch.get_num_threads()
    y = cpu.grouped_matmul(_bits(x_TI), starts_E1.numpy(), matrices, input_scale=input_scale, threads=threads)
    return torch.from_numpy(y)


def _check_devices(x_TI: Tensor, matrices: Sequence[PackedMatrix]) -> None:
    for w in matrices:
        for part in (w.codes, w.scale, *([] if w.zero is None else [w.zero])):
            place = part.device if isinstance(part, Tensor) else "a numpy array"
            if place != x_TI.device:
                raise QuantkitError(
                    "activations and weight are on different devices",
                    value=f"{x_TI.device} and {place}",
                    hint="as_tensors(w, device) moves a weight",
                )


def _bits(x_TI: Tensor) -> NDArray[Any]:
    return x_TI.view(torch.uint16).numpy() if x_TI.dtype == torch.bfloat16 else x_TI.numpy()


def _as_numpy(w: PackedMatrix) -> PackedMatrix:
    zero = None if w.zero is None else np.asarray(w.zero)
    return replace(w, codes=np.asarray(w.codes), scale=np.asarray(w.scale), zero=zero)
