"""ModelOpt's unified checkpoint: NVFP4 (weight only, or with activations) and FP8, for TensorRT-LLM, vLLM and SGLang;
INT4 and mixtures (`MIXED_PRECISION`, the algorithm of each layer in `quantized_layers`), INT4 for TensorRT-LLM alone.

`hf_quant_config.json` and the `quantization_config` of `config.json` say the same (engines differ on which one wins).
NVFP4 stores the global scale, and that of activations, as a multiplier (amax / (448 * 6)), the opposite of
compressed-tensors'. Layouts and keys: ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.export.formats import FP8_KV, Layer, Part
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme

INT4 = ("int4-g32", "int4-g64", "int4-g128")
SCHEMES = (*INT4, "nvfp4", "fp8-tensor", "fp8-channel", "fp8-block")
ALGORITHM = {
    **dict.fromkeys(INT4, "W4A16_AWQ"),
    "nvfp4": "W4A16_NVFP4",
    "fp8-tensor": "FP8",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-block": "FP8_PB_WO",
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # readers choose their rules by this version of the layout


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one layer w_OI of shape [rows, inputs]."""
    if scheme.element == "int4":
        if rows % 2:
            raise QuantkitError("ModelOpt stores INT4 in pairs of rows", value=rows, allowed="an even number of rows")
        dtype = "F16" if half else "BF16"
        return [
            Part("codes", "weight", "U8", (rows // 2, inputs), "pairs"),
            Part("scale", "weight_scale", dtype, (rows, scheme.groups(inputs))),
            Part("ones", "pre_quant_scale", dtype, (inputs,)),  # TensorRT-LLM does not load a layer without
        ]
    if scheme.name == "nvfp4":
        out = [
            Part("codes", "weight", "U8", (rows, inputs // 2)),
            Part("scale", "weight_scale", "F8_E4M3", (rows, inputs // 16)),
            Part("multiplier", "weight_scale_2", "F32", ()),
        ]
        return [*out, Part("input_scale", "input_scale", "F32", ())] if input_scale else out
    codes = Part("codes", "weight", "F8_E4M3", (rows, inputs))
    if scheme.name == "fp8-tensor":
        if not input_scale:
            raise QuantkitError(
                "ModelOpt's per-tensor FP8 needs a static input scale, which only calibration can measure",
                allowed="fp8-channel or fp8-block; `input_scale: amax` in the rule, or a number",
                hint="input_scale 1.0 holds activations up to 448",
            )
        return [codes, Part("tensor_scale", "weight_scale", "F32", ()), Part("input_scale", "input_scale", "F32", ())]
    shape = (rows,) if scheme.name == "fp8-channel" else (-(-rows // 128), 1, -(-inputs // 128), 1)
    return [codes, Part("scale", "weight_scale", "F32", shape)]


def _group(scheme: QuantScheme, static_input: bool, targets: list[str]) -> dict[str, Any]:
    if scheme.element == "int4":
        weights = {"dynamic": False, "num_bits": 4, "type": "int", "group_size": scheme.group_size}
        return {"weights": weights, "input_activations": None, "targets": targets}
    base: dict[str, Any] = {"dynamic": False, "num_bits": 4 if scheme.element == "e2m1" else 8, "type": "float"}
    if scheme.name == "nvfp4":
        blocks = base | {"group_size": 16}
        return {"weights": blocks, "input_activations": blocks if static_input else None, "targets": targets}
    inputs = base | {"dynamic": scheme.name != "fp8-tensor"}
    return {"weights": base, "input_activations": inputs, "targets": targets}


def _said(scheme: QuantScheme, static_input: bool) -> str:
    """ModelOpt's name for a scheme and what is done to the activations."""
    return "NVFP4" if scheme.name == "nvfp4" and static_input else ALGORITHM[scheme.name]


def _described(scheme: QuantScheme, static_input: bool) -> dict[str, Any]:
    """What is said of one layer: the algorithm and its options."""
    said: dict[str, Any] = {"quant_algo": _said(scheme, static_input)}
    if scheme.element == "int4":
        said |= {"group_size": scheme.group_size, "has_zero_point": False, "pre_quant_scale": True}
    return said | {"group_size": 16} if scheme.name == "nvfp4" else said


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """Both configuration files. With several algorithms `quantized_layers` names that of each layer in full."""
    groups: dict[tuple[QuantScheme, bool], list[str]] = {}
    for layer in layers:
        if layer.scheme is not None:
            groups.setdefault((layer.scheme, layer.static_input), []).append(layer.module)
    kinds = {key: _described(*key) for key in groups}
    mixed = len(groups) > 1
    said = {"quant_algo": "MIXED_PRECISION", "group_size": None} if mixed else next(iter(kinds.values()), {})
    by_layer = {module: kinds[key] for key, modules in groups.items() for module in modules} if mixed else {}
    listed = {"quantized_layers": by_layer} if mixed else {}
    targets = [modules if mixed else ["Linear"] for modules in groups.values()]
    described = {f"group_{i}": _group(*key, names) for i, (key, names) in enumerate(zip(groups, targets, strict=True))}
    return {
        "config.json": {
            "quant_method": "modelopt",
            "quant_algo": said.get("quant_algo"),
            "config_groups": described,
            "ignore": list(ignore),
            "producer": PRODUCER,
            **({"kv_cache_scheme": FP8_KV} if fp8_kv else {}),
            **listed,
        },
        "hf_quant_config.json": {
            "producer": PRODUCER,
            "quantization": {
                "group_size": None,
                **said,
                "kv_cache_quant_algo": "FP8" if fp8_kv else None,
                "exclude_modules": list(ignore),
                **listed,
            },
        },
    }
