"""Quantised *source* checkpoints in FP4: NVFP4 in both dialects, MXFP4, and gpt-oss's fused MXFP4 experts.

Same contract as `quantised.py`: each writer returns the exact decoded weights, rounded once to float32.

Shape suffixes: O outputs, I inputs, G groups of a row, g inputs of a group.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from families import LINEAR, Tensors, load_tensors, read_config, save_tensors, write_config
from quantised import Dialect, Encoded, Oracle, ct_config, modelopt_config, rewrite

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
_SIBLINGS = re.compile(r"(?:[qkv]_proj|q_a_proj|kv_a_proj_with_mqa|gate_proj|up_proj|w1|w3)\.weight")


def _nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 of the nearest E2M1 values."""
    distance = (x.abs().double()[..., None] - _E2M1[:8]).abs()
    return distance.argmin(-1) + 8 * (x < 0)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last axis, the even one low."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def as_nvfp4(
    src: Path,
    dst: Path,
    dialect: Dialect = "compressed-tensors",
    activations: bool = False,
    only: re.Pattern[str] = LINEAR,
) -> Oracle:
    """NVFP4: E2M1, an E4M3 scale per 16 inputs, a float32 scale per tensor which fused siblings share.

    compressed-tensors stores `weight_packed` and `weight_global_scale` [1], a divisor; ModelOpt stores `weight` and
    `weight_scale_2` [], a multiplier. `activations` adds the input's global scale in the same sense.
    """
    amax: dict[str, torch.Tensor] = {}
    for name, tensor in load_tensors(src).items():
        if only.fullmatch(name):
            key = _SIBLINGS.sub("", name)
            amax[key] = torch.maximum(amax.get(key, torch.tensor(0.0)), tensor.abs().amax().float())
    ct = dialect == "compressed-tensors"

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        top = amax[_SIBLINGS.sub("", name)]
        stored = (448 * 6 / top if ct else top / (448 * 6)).float()
        total = 1 / stored.double() if ct else stored.double()
        w_OGg = w_OI.double().unflatten(1, (-1, 16))
        block = (w_OGg.abs().amax(-1) / (6 * total)).clamp(2**-9, 448).float().to(torch.float8_e4m3fn)
        codes = _nearest_e2m1(w_OGg / (block.double() * total)[..., None])
        inner = _E2M1[codes] * block.double()[..., None]
        exact = (inner / stored.double() if ct else inner * stored.double()).flatten(1)
        parts = {"weight_packed" if ct else "weight": _pairs(codes.flatten(1)), "weight_scale": block}
        parts |= {"weight_global_scale": stored.reshape(1)} if ct else {"weight_scale_2": stored}
        if activations:
            parts |= {"input_global_scale": torch.tensor([448.0])} if ct else {"input_scale": torch.tensor(2**-9)}
        return parts, exact

    if not ct:
        return rewrite(src, dst, only, encode, modelopt_config(dst, "NVFP4" if activations else "W4A16_NVFP4", 16))
    four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    inputs = {**four, "dynamic": "local"} if activations else None
    return rewrite(src, dst, only, encode, ct_config("nvfp4-pack-quantized", {**four, "dynamic": False}, inputs))


def _mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, E8M0 bytes per 32 values of the last axis, and decoded values."""
    blocks = w.double().unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(-1).clamp_min(2**-100))) - 2
    codes = _nearest_e2m1(blocks / torch.exp2(power)[..., None])
    exact = (_E2M1[codes] * torch.exp2(power)[..., None]).flatten(-2)
    return codes.flatten(-2), (power + 127).to(torch.uint8), exact


def as_mxfp4_ct(src: Path, dst: Path, only: re.Pattern[str] = LINEAR) -> Oracle:
    """`mxfp4-pack-quantized`: `weight_packed` [O, I/2] and `weight_scale` [O, I/32], E8M0 exponents in bytes."""

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        codes, scale, exact = _mxfp4(w_OI)
        return {"weight_packed": _pairs(codes), "weight_scale": scale}, exact

    four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    return rewrite(src, dst, only, encode, ct_config("mxfp4-pack-quantized", four))


def as_gptoss_mxfp4(src: Path, dst: Path) -> Oracle:
    """gpt-oss as published: `*_blocks` [E, O, I/32, 16] and `*_scales` [E, O, I/32] for gate_up and down.

    The plain tensor is [E, I, O]; blocks run along the inputs, so the decoded weight returned is [E, O, I].
    """
    shutil.copytree(src, dst)
    out: Tensors = {}
    oracle: Oracle = {}
    for name, tensor in load_tensors(src).items():
        if not re.fullmatch(r".*\.experts\.(?:gate_up_proj|down_proj)", name):
            out[name] = tensor
            continue
        codes, out[name + "_scales"], exact = _mxfp4(tensor.float().transpose(1, 2))
        out[name + "_blocks"] = _pairs(codes).unflatten(-1, (-1, 16)).contiguous()
        oracle[name] = exact.float().numpy()
    save_tensors(dst, out)
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    write_config(dst, read_config(src) | {"quantization_config": quantised})
    return oracle
