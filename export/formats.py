"""Output formats as modules: which tensors a scheme becomes, under which names, and what `config.json` says of them.

A format is a module with
    SCHEMES                        the schemes it can hold
    parts(scheme, rows, inputs, half)   -> the tensors of one linear layer
    config(layers, ignore)         -> files: name -> JSON object to merge or write
One line in `FORMATS` adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme

# codes, scale, zero: written row by row. The others are one small value for the whole layer:
#   shape [O, I] as integers; multiplier and divisor: NVFP4's global scale and its reciprocal;
#   tensor_scale: amax/448 of an FP8 tensor; input_scale and input_divisor: that of the activations, its reciprocal.
#   g_idx: the group of each input, in order; ones: a factor for each input that is not used.
PartKind = Literal[
    "codes", "scale", "zero", "shape", "multiplier", "divisor", "tensor_scale", "input_scale", "input_divisor",
    "g_idx", "ones",
]  # fmt: skip
# How INT4 codes, scales and zero points lie in their tensors: by rows, in pairs of rows, or with the inputs first as in
# GPTQ (v1 stores one less than the zero point) and AWQ; `kernels/packed.py` and `kernels/layouts.py` have the details.
Layout = Literal["rows", "pairs", "gptq-v1", "gptq-v2", "awq"]


# What every reader accepts for an FP8 KV cache with a scale for the tensor; each key is required by one of them.
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a stored layer: `name` is what follows the module's name and a dot."""

    kind: PartKind
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout = "rows"


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer of the output, as the configuration has to describe it."""

    module: str
    scheme: QuantScheme | None  # None: not quantised
    static_input: bool = False  # its activations are quantised under a stored scale


class Format(Protocol):
    """What a format module, or an object in its place, offers."""

    @property
    def SCHEMES(self) -> Sequence[str]:  # noqa: N802 - a constant of the module
        """Names of the schemes it can hold."""
        ...

    def parts(self, scheme: QuantScheme, rows: int, inputs: int, *, half: bool, input_scale: bool) -> list[Part]:
        """Tensors of a layer of `rows` outputs.

        half         the model's dtype is fp16, not bf16
        input_scale  a scale for the activations is stored as well
        """
        ...

    def config(self, layers: Sequence[Layer], ignore: Sequence[str], *, fp8_kv: bool) -> Mapping[str, Any]:
        """File name -> JSON content; the content of `config.json` is what its `quantization_config` becomes.

        fp8_kv  the checkpoint carries scales for an FP8 KV cache, which engines use only when the configuration says so
        """
        ...


def format_module(name: str) -> Format:
    """The module of a format by name; raises QuantkitError with the known names."""
    from quantkit.export import awq, compressed_tensors, fp8_block, gptoss, modelopt
    from quantkit.export.gptq import Gptq

    formats: dict[str, Format] = {
        "compressed-tensors": compressed_tensors,
        "gptq": Gptq(v2=False),
        "gptq-v2": Gptq(v2=True),
        "awq": awq,
        "modelopt": modelopt,
        "fp8": fp8_block,
        "mxfp4": gptoss,
    }
    if name not in formats:
        raise QuantkitError("unknown format", value=name, allowed=", ".join(formats))
    return formats[name]
