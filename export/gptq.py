"""GPTQ's format: symmetric INT4 with the inputs first, read by vLLM, SGLang and GPTQModel.

    qweight int32 [I / 8, O]   scales bf16 or f16 [G, O]   qzeros int32 [G, O / 8]   g_idx int32 [I]

Engines take symmetric codes in the order of the inputs alone: zero points are 8 (stored as 7 by `gptq`, as 8 by
`gptq_v2`), `g_idx` is k // group. Attention has no place for KV scales under this configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.export.formats import Layer, Layout, Part
from quantkit.export.targets import target_patterns, with_fused_names
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme


def kmajor_parts(scheme: QuantScheme, rows: int, inputs: int, layout: Layout, *, half: bool) -> list[Part]:
    """Codes, zero points and scales with the inputs first; raises QuantkitError for sizes that are no multiple of 8."""
    if rows % 8 or inputs % 8:
        raise QuantkitError(
            "GPTQ and AWQ pack 8 outputs or inputs into a word", value=[rows, inputs], allowed="multiples of 8",
            hint="keep the layer, or --format compressed-tensors",
        )  # fmt: skip
    groups = scheme.groups(inputs)
    codes = (inputs, rows // 8) if layout == "awq" else (inputs // 8, rows)
    return [
        Part("codes", "qweight", "I32", codes, layout),
        Part("zero", "qzeros", "I32", (groups, rows // 8), layout),
        Part("scale", "scales", "F16" if half else "BF16", (groups, rows), layout),
    ]


def the_scheme(layers: Sequence[Layer], name: str, *, fp8_kv: bool) -> QuantScheme:
    """The one scheme of all quantised layers; raises QuantkitError for several, and for scales of an FP8 KV cache."""
    schemes = {layer.scheme.name: layer.scheme for layer in layers if layer.scheme}
    if len(schemes) > 1:
        raise QuantkitError(
            f"the {name} format has one scheme for all layers", value=", ".join(sorted(schemes)), allowed="one of them",
            hint="--format compressed-tensors holds a mix",
        )  # fmt: skip
    if fp8_kv or not schemes:
        raise QuantkitError(
            f"engines have no place for KV-cache scales beside {name} weights",
            allowed="compressed-tensors, modelopt or fp8 for a checkpoint with scales of an FP8 KV cache",
        )
    return next(iter(schemes.values()))


@dataclass(frozen=True, slots=True)
class Gptq:
    """The format, in the version that stores one less than the zero point (v1) or the zero point itself (v2)."""

    v2: bool

    @property
    def SCHEMES(self) -> Sequence[str]:  # noqa: N802 - a constant of other formats
        """Symmetric INT4: engines refuse the others."""
        return ("int4-g32", "int4-g64", "int4-g128", "int4-channel")

    def parts(self, scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
        """Tensors of one layer w_OI of shape [rows, inputs]."""
        made = kmajor_parts(scheme, rows, inputs, "gptq-v2" if self.v2 else "gptq-v1", half=half)
        return [*made, Part("g_idx", "g_idx", "I32", (inputs,))]

    def config(self, layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
        """`quantization_config`; `dynamic` takes out the layers that stay as they are.

        vLLM finds those by the dtypes in the headers; SGLang and GPTQModel go by `dynamic`.
        """
        scheme = the_scheme(layers, "gptq", fp8_kv=fp8_kv)
        quantized = [layer.module for layer in layers if layer.scheme]
        # `ignore` has the names of fused layers: without theirs, a pattern of one layer would take that of every layer
        (patterns,) = target_patterns([ignore], with_fused_names(quantized)) if ignore else ([],)
        return {
            "config.json": {
                "quant_method": "gptq",
                "checkpoint_format": "gptq_v2" if self.v2 else "gptq",
                "bits": 4,
                "group_size": scheme.group_size or -1,
                "sym": True,
                "desc_act": False,
                "lm_head": "lm_head" in quantized,
                "pack_dtype": "int32",
                "dynamic": {"-:" + pattern.removeprefix("re:"): {} for pattern in patterns},
            }
        }
