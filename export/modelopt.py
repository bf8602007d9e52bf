"""ModelOpt's unified checkpoint: NVFP4 (weight only, or with activations) and FP8, for TensorRT-LLM, vLLM and SGLang.

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

SCHEMES = ("nvfp4", "fp8-tensor", "fp8-channel", "fp8-block")
ALGORITHM = {
    "nvfp4": "W4A16_NVFP4",
    "fp8-tensor": "FP8",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-block": "FP8_PB_WO",
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # readers choose their rules by this version of the layout


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one layer w_OI of shape [rows, inputs]."""
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


def _group(scheme: QuantScheme, static_input: bool) -> dict[str, Any]:
    base: dict[str, Any] = {"dynamic": False, "num_bits": 4 if scheme.element == "e2m1" else 8, "type": "float"}
    if scheme.name == "nvfp4":
        blocks = base | {"group_size": 16}
        return {"weights": blocks, "input_activations": blocks if static_input else None, "targets": ["Linear"]}
    inputs = base | {"dynamic": scheme.name != "fp8-tensor"}
    return {"weights": base, "input_activations": inputs, "targets": ["Linear"]}


def _said(scheme: QuantScheme, static_input: bool) -> str:
    """ModelOpt's name for a scheme and what is done to the activations."""
    return "NVFP4" if scheme.name == "nvfp4" and static_input else ALGORITHM[scheme.name]


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """Both configuration files."""
    schemes = {_said(layer.scheme, layer.static_input): layer for layer in layers if layer.scheme}
    if len(schemes) > 1:
        raise QuantkitError(
            "mixed schemes in the modelopt format",
            value=", ".join(sorted(schemes)),
            allowed="one scheme for all quantised layers",
            hint="use --format compressed-tensors for a mix",
        )
    ((algorithm, layer),) = schemes.items()
    scheme = layer.scheme
    assert scheme is not None
    group = {"group_size": 16} if scheme.name == "nvfp4" else {"group_size": None}
    return {
        "config.json": {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "config_groups": {"group_0": _group(scheme, layer.static_input)},
            "ignore": list(ignore),
            "producer": PRODUCER,
            **({"kv_cache_scheme": FP8_KV} if fp8_kv else {}),
        },
        "hf_quant_config.json": {
            "producer": PRODUCER,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": "FP8" if fp8_kv else None,
                **group,
                "exclude_modules": list(ignore),
            },
        },
    }
