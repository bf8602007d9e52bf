"""AWQ's format in its `gemm` order: INT4 with the inputs first and outputs interleaved, read by vLLM and SGLang.

    qweight int32 [I, O / 8]   scales bf16 or f16 [G, O]   qzeros int32 [G, O / 8]

Symmetric codes are written with zero points of 8: vLLM reads codes as unsigned and, told that there are no zero points,
would subtract none. `sym` is our own key, for readers that want to know it. The name is the format's: how codes were
chosen does not matter. Attention has no place for KV scales under this configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.export.formats import Layer, Part
from quantkit.export.gptq import kmajor_parts, the_scheme
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme

SCHEMES = ("int4-g32", "int4-g64", "int4-g128", "int4a-g32", "int4a-g64", "int4a-g128")


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one layer w_OI of shape [rows, inputs]."""
    return kmajor_parts(scheme, rows, inputs, "awq", half=half)


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """`quantization_config` with the names of the layers that stay as they are.

    Engines look for each of them anywhere in a layer's name, so a name inside that of a quantised layer is refused.
    """
    scheme = the_scheme(layers, "awq", fp8_kv=fp8_kv)
    quantized = "\n".join(layer.module for layer in layers if layer.scheme)
    hidden = [name for name in ignore if name in quantized]
    if hidden:
        raise QuantkitError(
            "engines would take a quantised layer for one that is not: AWQ's list matches parts of names",
            tensor=hidden[0], value=next(n for n in quantized.split("\n") if hidden[0] in n),
            hint="quantise both or keep both, or --format compressed-tensors",
        )  # fmt: skip
    return {
        "config.json": {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": scheme.group_size,
            "zero_point": True,
            "sym": scheme.symmetric,
            "lm_head": "lm_head" in quantized.split("\n"),
            "modules_to_not_convert": list(ignore),
        }
    }
