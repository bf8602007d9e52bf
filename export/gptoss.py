"""gpt-oss's own `mxfp4` format: the fused experts as blocks, everything else as published.

`X_blocks` U8 [E, O, I/32, 16] and `X_scales` U8 [E, O, I/32] (E8M0), gate and up rows interleaved. Engines read it for
`model_type: gpt_oss` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.export.formats import Layer, Part
from quantkit.kernels.scheme import QuantScheme

SCHEMES = ("mxfp4",)


def parts(scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
    """Tensors of one expert's matrix [rows, inputs]; the plan puts the experts' axis in front."""
    return [
        Part("codes", "blocks", "U8", (rows, inputs // 32, 16)),
        Part("scale", "scales", "U8", (rows, inputs // 32)),
    ]


def config(layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
    """`quantization_config`; the list is the one of the published gpt-oss checkpoints, extended by other layers."""
    return {"config.json": {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}}
