"""Quantised *source* checkpoints in FP8 and INT4, made from a plain one in every layout that publishers use.

Every writer takes a folder written by `families.py`, quantises the weights whose names fit `only` by plain rounding,
sets `quantization_config`, and returns {logical weight name: float32 array} of the quantised weights: the exact product
of stored code and stored scales, rounded once to float32. Written in torch from the formats' descriptions; shares no
code with the product.

Shape suffixes: O outputs, I inputs, G groups of a row, g inputs of a group.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from families import LINEAR, Tensors, load_tensors, read_config, save_tensors, write_config

Oracle = dict[str, np.ndarray]
Encoded = tuple[Tensors, torch.Tensor]  # {suffix after the module's name: tensor}, decoded values in float64
Dialect = Literal["compressed-tensors", "modelopt", "fp8"]

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def rewrite(
    src: Path,
    dst: Path,
    only: re.Pattern[str],
    encode: Callable[[str, torch.Tensor], Encoded],
    describe: Callable[[list[str]], dict[str, Any]],
) -> Oracle:
    """Copy `src`, replacing each fitting weight by its encoded parts; `describe` gets the modules left alone."""
    shutil.copytree(src, dst)
    out: Tensors = {}
    oracle: Oracle = {}
    left: list[str] = []
    for name, tensor in load_tensors(src).items():
        if only.fullmatch(name):
            parts, exact = encode(name, tensor.float())
            out |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
            oracle[name] = exact.float().numpy()
        else:
            out[name] = tensor
            if name.endswith(".weight") and tensor.ndim == 2 and "embed_tokens" not in name:
                left.append(name.removesuffix(".weight"))
    assert oracle, f"no weight of {src} fits {only.pattern}"
    save_tensors(dst, out, 2 if (src / "model.safetensors.index.json").exists() else 1)
    config = read_config(src)
    config.get("text_config", config)["quantization_config"] = describe(left)
    write_config(dst, config)
    return oracle


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit codes of the last axis per int32, the first in the lowest bits."""
    eights = nibbles.long().unflatten(-1, (-1, 8))
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def ct_config(
    fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Callable[[list[str]], dict[str, Any]]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    rest = {"format": fmt, "quantization_status": "compressed", "kv_cache_scheme": None}
    head = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return lambda left: {**head, **rest, "ignore": left}


# --- FP8 -------------------------------------------------------------------------------------------------------------


def as_fp8_block(
    src: Path,
    dst: Path,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    only: re.Pattern[str] = LINEAR,
) -> Oracle:
    """DeepSeek's layout: `weight` E4M3 and `weight_scale_inv` (a multiplier) per 128x128 block, the last ones partial.

    `ue8m0`: scales are powers of two. `scale_dtype` float32 as in DeepSeek and GLM, bfloat16 as in Qwen3, or
    float8_e8m0fnu as transformers writes ue8m0.
    """

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        rows, cols = w_OI.shape

        def spread(s: torch.Tensor) -> torch.Tensor:
            return s.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]

        padded = torch.nn.functional.pad(w_OI.abs(), (0, -cols % 128, 0, -rows % 128))
        scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3)).clamp_min(1e-6) / 448
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if ue8m0 else scale
        stored = scale.to(scale_dtype)
        codes = _to_e4m3(w_OI / spread(stored.float()))
        return {"weight": codes, "weight_scale_inv": stored}, codes.double() * spread(stored.double())

    fixed = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    fixed |= {"scale_fmt": "ue8m0"} if ue8m0 else {}
    return rewrite(src, dst, only, encode, lambda left: {**fixed, "modules_to_not_convert": left})


def as_fp8_tensor(
    src: Path, dst: Path, dialect: Dialect = "compressed-tensors", only: re.Pattern[str] = LINEAR
) -> Oracle:
    """One float32 scale a tensor: shape [1] (compressed-tensors, dynamic inputs) or [] with an `input_scale`."""
    shape = (1,) if dialect == "compressed-tensors" else ()

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        scale = w_OI.abs().amax() / 448
        codes = _to_e4m3(w_OI / scale)
        parts = {"weight": codes, "weight_scale": scale.reshape(shape)}
        parts |= {} if dialect == "compressed-tensors" else {"input_scale": torch.tensor(0.125)}
        return parts, codes.double() * scale.double()

    return rewrite(src, dst, only, encode, _fp8_config(dst, dialect, "tensor"))


def as_fp8_channel(
    src: Path, dst: Path, dialect: Dialect = "compressed-tensors", only: re.Pattern[str] = LINEAR
) -> Oracle:
    """One float32 scale an output: shape [O, 1] (compressed-tensors) or [O] (ModelOpt); inputs scaled per token."""

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        scale = w_OI.abs().amax(1, keepdim=True).clamp_min(1e-6) / 448
        codes = _to_e4m3(w_OI / scale)
        stored = scale if dialect == "compressed-tensors" else scale[:, 0]
        return {"weight": codes, "weight_scale": stored}, codes.double() * scale.double()

    return rewrite(src, dst, only, encode, _fp8_config(dst, dialect, "channel"))


def _fp8_config(dst: Path, dialect: Dialect, strategy: str) -> Callable[[list[str]], dict[str, Any]]:
    if dialect == "fp8":
        return lambda left: {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": left}
    if dialect == "modelopt":
        return modelopt_config(dst, "FP8" if strategy == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN", None)
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {**eight, "strategy": "token" if strategy == "channel" else "tensor", "dynamic": True}
    return ct_config("float-quantized", {**eight, "strategy": strategy, "dynamic": False}, inputs)


def modelopt_config(dst: Path, algo: str, group: int | None) -> Callable[[list[str]], dict[str, Any]]:
    """ModelOpt says it twice: nested in hf_quant_config.json, flat in config.json."""

    def describe(left: list[str]) -> dict[str, Any]:
        producer = {"name": "modelopt", "version": "0.47.0"}
        nested = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": left}
        nested |= {"group_size": group} if group else {}
        (dst / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": nested}))
        weights: dict[str, Any] = {"dynamic": False, "num_bits": 4 if group else 8, "type": "float"}
        weights |= {"group_size": group} if group else {}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        flat = {"quant_method": "modelopt", "quant_algo": algo, "config_groups": groups, "ignore": left}
        return {**flat, "producer": producer}

    return describe


# --- INT4 ------------------------------------------------------------------------------------------------------------


def _affine(w_OI: torch.Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes 0..15 [O, I], stored scales [O, G], zero points 1..15 [O, G]; value = (code - zero) * scale."""
    w_OGg = w_OI.unflatten(1, (-1, group))
    low, high = w_OGg.amin(-1).clamp_max(0), w_OGg.amax(-1).clamp_min(0)
    spread = 2 * torch.maximum(-low, high) if symmetric else high - low
    scale = (spread.clamp_min(1e-6) / 15).to(dtype)
    zero = torch.full_like(low, 8) if symmetric else torch.round(-low / scale.float()).clamp(1, 15)
    codes = torch.round(w_OGg / scale.float()[..., None] + zero[..., None]).clamp(0, 15)
    return codes.flatten(1), scale, zero


def _undo(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    step = codes.shape[1] // scale.shape[1]
    wide = [t.double().repeat_interleave(step, 1) for t in (scale, zero)]
    return (codes.double() - wide[1]) * wide[0]


def as_ct_int4(
    src: Path,
    dst: Path,
    group: int = 32,
    symmetric: bool = True,
    only: re.Pattern[str] = LINEAR,
    shape_dtype: torch.dtype = torch.int64,
) -> Oracle:
    """`pack-quantized`: `weight_packed`, `weight_scale`, `weight_shape`, and `weight_zero_point` where asymmetric.

    `group` 0: one scale an output channel. `shape_dtype` int32 as in Kimi's own files.
    """

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        codes, scale, zero = _affine(w_OI, group or w_OI.shape[1], symmetric, torch.bfloat16)
        parts = {"weight_packed": _words(codes), "weight_scale": scale}
        parts["weight_shape"] = torch.tensor(w_OI.shape, dtype=shape_dtype)
        if not symmetric:
            parts["weight_zero_point"] = _words(zero.T).T
        return parts, _undo(codes, scale, zero)

    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return rewrite(src, dst, only, encode, ct_config("pack-quantized", weights))


def as_gptq(
    src: Path, dst: Path, v2: bool = False, group: int = 64, symmetric: bool = True, only: re.Pattern[str] = LINEAR
) -> Oracle:
    """GPTQ: `qweight` [I/8, O], `qzeros` [G, O/8] (v1 stores zero - 1), `scales` [G, O] fp16, `g_idx` [I]."""

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        codes, scale, zero = _affine(w_OI, group, symmetric, torch.float16)
        parts = {"qweight": _words(codes).T, "qzeros": _words(zero.T - (0 if v2 else 1)), "scales": scale.T}
        parts["g_idx"] = torch.arange(w_OI.shape[1], dtype=torch.int32) // group
        return parts, _undo(codes, scale, zero)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False}
    config |= {"lm_head": False, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return rewrite(src, dst, only, encode, lambda left: config)


def as_awq(src: Path, dst: Path, group: int = 64, only: re.Pattern[str] = LINEAR) -> Oracle:
    """AWQ gemm: `qweight` [I, O/8] and `qzeros` [G, O/8] in AWQ's nibble order, `scales` [G, O] fp16."""

    def interleave(nibbles: torch.Tensor) -> torch.Tensor:
        return _words(nibbles.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2))

    def encode(name: str, w_OI: torch.Tensor) -> Encoded:
        codes, scale, zero = _affine(w_OI, group, False, torch.float16)
        parts = {"qweight": interleave(codes.T), "qzeros": interleave(zero.T), "scales": scale.T}
        return parts, _undo(codes, scale, zero)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return rewrite(src, dst, only, encode, lambda left: {**config, "modules_to_not_convert": left})
