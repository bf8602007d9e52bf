"""The compressed-tensors formats: `pack-quantized`, `nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `float-quantized`.

Read by vLLM, SGLang and transformers. Tensor layouts and configuration keys: compressed-tensors 0.20. NVFP4 stores the
global scale, and that of activations, as a divisor (448 * 6 / amax), the opposite of ModelOpt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.export.formats import FP8_KV, Layer, Part
from quantkit.export.targets import target_patterns
from quantkit.kernels.scheme import SCHEMES as ALL_SCHEMES
from quantkit.kernels.scheme import QuantScheme

SCHEMES = tuple(name for name in ALL_SCHEMES if name not in ("bf16", "fp8-block-ue8m0"))


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one layer w_OI of shape [rows, inputs]."""
    groups = scheme.groups(inputs)
    if scheme.element == "int4":
        out = [
            Part("codes", "weight_packed", "I32", (rows, -(-inputs // 8))),
            Part("scale", "weight_scale", "F16" if half else "BF16", (rows, groups)),
            Part("shape", "weight_shape", "I64", (2,)),
        ]
        return out if scheme.symmetric else [*out, Part("zero", "weight_zero_point", "I32", (-(-rows // 8), groups))]
    if scheme.element == "e2m1":
        codes = Part("codes", "weight_packed", "U8", (rows, inputs // 2))
        if not scheme.has_global:
            return [codes, Part("scale", "weight_scale", "U8", (rows, groups))]
        out = [
            codes,
            Part("scale", "weight_scale", "F8_E4M3", (rows, groups)),
            Part("divisor", "weight_global_scale", "F32", (1,)),
        ]
        return [*out, Part("input_divisor", "input_global_scale", "F32", (1,))] if input_scale else out
    codes = Part("codes", "weight", "F8_E4M3", (rows, inputs))
    if scheme.granularity == "tensor":
        out = [codes, Part("tensor_scale", "weight_scale", "F32", (1,))]
        return [*out, Part("input_scale", "input_scale", "F32", (1,))] if input_scale else out
    shape = (-(-rows // 128), groups) if scheme.granularity == "block" else (rows, 1)
    return [codes, Part("scale", "weight_scale", "F32", shape)]


def _args(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _scheme(scheme: QuantScheme, static_input: bool) -> dict[str, Any]:
    """`weights`, `input_activations` and `format` of one config group."""
    if scheme.element == "int4":
        strategy = "channel" if scheme.granularity == "channel" else "group"
        weights = _args(4, "int", strategy, group_size=scheme.group_size or None, actorder=None)
        weights["symmetric"] = scheme.symmetric
        return {"weights": weights, "input_activations": None, "format": "pack-quantized"}
    if scheme.has_global:
        weights = _args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
        # block scales are made as the activations come, under the stored scale of the tensor
        inputs = {**weights, "dynamic": "local"} if static_input else None
        return {"weights": weights, "input_activations": inputs, "format": "nvfp4-pack-quantized"}
    if scheme.element == "e2m1":
        weights = _args(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
        return {"weights": weights, "input_activations": None, "format": "mxfp4-pack-quantized"}
    if scheme.granularity == "tensor":
        inputs = _args(8, "float", "tensor")
        inputs["dynamic"] = not static_input
        weights = _args(8, "float", "tensor")
    elif scheme.granularity == "channel":
        inputs = _args(8, "float", "token")
        inputs["dynamic"] = True
        weights = _args(8, "float", "channel")
    else:
        inputs = _args(8, "float", "group", group_size=128)
        inputs["dynamic"] = True
        weights = _args(8, "float", "block", block_structure=[128, 128])
    return {"weights": weights, "input_activations": inputs, "format": "float-quantized"}


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """`quantization_config`: one group a scheme; names of all layers that stay as they are, in full, one per shard.

    With a single scheme the group targets the class `Linear`. With several, SGLang would let `Linear` take the fused
    layers of the other groups, so every group then lists patterns that match its own layers and no other.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    schemes: dict[str, QuantScheme] = {}
    for layer in layers:
        if layer.scheme is not None:
            groups.setdefault((layer.scheme.name, layer.static_input), []).append(layer.module)
            schemes[layer.scheme.name] = layer.scheme
    plain = [layer.module for layer in layers if layer.scheme is None]
    if len(groups) == 1:
        targets = [["Linear"]]
    else:
        targets = target_patterns(list(groups.values()), plain)
    described = {
        f"group_{i}": {"targets": target, **_scheme(schemes[name], static), "output_activations": None}
        for i, ((name, static), target) in enumerate(zip(groups, targets, strict=True))
    }
    formats = {group["format"] for group in described.values()}
    return {
        "config.json": {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else ("mixed-precision" if formats else "dense"),
            "quantization_status": "compressed",
            "config_groups": described,
            "ignore": list(ignore),
            "kv_cache_scheme": FP8_KV if fp8_kv else None,
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.20.1",
        }
    }
