"""How a configuration has the activations of each quantised layer quantised, in one form for every dialect.

What is quantised at all is told by the bytes, never by an ignore list. A group that names a layer comes before one that
names the class `Linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.export.checkpoint import quantization_config
from quantkit.export.engines.matching import names, whole
from quantkit.export.engines.schemes import modelopt_scheme
from quantkit.export.sources.detect import Weight
from quantkit.kernels.scheme import BLOCK

MICRO = 16  # values of a block of NVFP4


@dataclass(frozen=True, slots=True)
class Activations:
    """How the input of a layer is quantised.

    element  e4m3; e2m1: NVFP4, with e4m3 scales of blocks; other: a form that is not computed here
    group    inputs of a token that share a scale made as they come; 0 for all of them
    fixed    a scale is stored: that of the tensor, above the blocks of NVFP4
    title    in words
    """

    element: Literal["e4m3", "e2m1", "other"]
    group: int
    fixed: bool
    title: str


_FP8_FIXED = Activations("e4m3", 0, True, "FP8 under a stored scale")
_FP8_TOKEN = Activations("e4m3", 0, False, "FP8 by token")
_FP8_BLOCK = Activations("e4m3", BLOCK, False, "FP8 by 128 inputs of a token")
_NVFP4 = Activations("e2m1", MICRO, True, "NVFP4")


def activations_of(config: Mapping[str, Any], weights: Mapping[str, Weight]) -> dict[str, Activations]:
    """By weight, those whose activations are quantised. `config` is config.json as read."""
    quant = quantization_config(config)
    quantized = {name: w.module for name, w in weights.items() if w.encoding != "plain"}
    method = quant.get("quant_method")
    if method == "fp8":
        return dict.fromkeys(quantized, _of_fp8(quant))
    if method == "modelopt" or "quant_algo" in quant:
        return _some({name: _of_modelopt(quant, module) for name, module in quantized.items()})
    groups = [(names(g.get("targets")), _of_group(g)) for g in (quant.get("config_groups") or {}).values()]
    by_class = [a for targets, a in groups if "Linear" in targets.exact]
    found = {}
    for name, module in quantized.items():
        by_name = [a for targets, a in groups if whole(targets, module)]
        found[name] = next(iter([*by_name, *by_class]), None)
    return _some(found)


def _some(found: Mapping[str, Activations | None]) -> dict[str, Activations]:
    return {name: a for name, a in found.items() if a is not None}


def _of_fp8(quant: Mapping[str, Any]) -> Activations:
    if quant.get("activation_scheme") == "static":
        return _FP8_FIXED
    return _FP8_BLOCK if quant.get("weight_block_size") else _FP8_TOKEN


def _of_modelopt(quant: Mapping[str, Any], module: str) -> Activations | None:
    algorithm = quant.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        algorithm = ((quant.get("quantized_layers") or {}).get(module) or {}).get("quant_algo")
    stated = modelopt_scheme(str(algorithm), quant)
    if stated.inputs == "none":
        return None
    if stated.kind == "nvfp4":
        return _NVFP4
    if stated.kind == "fp8-block":
        return _FP8_BLOCK
    if stated.kind in ("fp8-tensor", "fp8-channel"):
        return _FP8_FIXED if stated.inputs == "static" else _FP8_TOKEN
    return Activations("other", 0, stated.inputs == "static", str(algorithm))


def _of_group(group: Mapping[str, Any]) -> Activations | None:
    """`input_activations` of compressed-tensors.

    A dynamic scale of the whole tensor is that of a token: what an engine has that decodes one request.
    """
    a = group.get("input_activations") or {}
    if not a:
        return None
    form = (a.get("num_bits"), a.get("type"), a.get("strategy"), a.get("group_size") or 0)
    fixed = a.get("dynamic", False) in (False, "local")
    if form == (4, "float", "tensor_group", MICRO) and fixed:
        return _NVFP4
    if form[:3] == (8, "float", "tensor"):
        return _FP8_FIXED if fixed else _FP8_TOKEN
    if form[:3] == (8, "float", "token") and not fixed:
        return _FP8_TOKEN
    if form == (8, "float", "group", BLOCK) and not fixed:
        return _FP8_BLOCK
    return Activations("other", 0, fixed, " ".join(str(x) for x in form if x))
