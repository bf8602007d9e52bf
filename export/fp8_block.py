"""The `fp8` format of DeepSeek, GLM and Qwen releases: E4M3 weights with one float32 scale per 128 x 128 block.

`weight_scale_inv` is a multiplier in spite of its name: w = weight * weight_scale_inv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.export.formats import Layer, Part
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme

SCHEMES = ("fp8-block", "fp8-block-ue8m0")


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one layer w_OI of shape [rows, inputs]; ue8m0 scales are powers of two stored as float32."""
    return [
        Part("codes", "weight", "F8_E4M3", (rows, inputs)),
        Part("scale", "weight_scale_inv", "F32", (-(-rows // 128), scheme.groups(inputs))),
    ]


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """`quantization_config` with the names of the layers that stay as they are."""
    names = {layer.scheme.name for layer in layers if layer.scheme}
    if len(names) > 1:
        raise QuantkitError(
            "the `fp8` format has one scale format for all layers",
            value=", ".join(sorted(names)),
            allowed="one of them",
        )
    ue8m0 = {"scale_fmt": "ue8m0"} if names == {"fp8-block-ue8m0"} else {}
    return {
        "config.json": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            **ue8m0,
            "modules_to_not_convert": list(ignore),
        }
    }
