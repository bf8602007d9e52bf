"""Rows of a quantised weight as the operand of the packed kernels: the bytes of the file, nothing decoded.

Beside `rows.py`, which decodes the same tensors, this is the second reading of them that a verifier compares. Scales of
FP8 that are stored in 16 bits or as powers of two come as float32: their values are the same.

Letters: O outputs (rows), I inputs, G groups, R rows of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.int4_rows import ENCODINGS, has_factor, int4_codes, int4_scales, int4_zeros
from quantkit.export.sources.rows import GROUP_OF, global_scale, scale_values
from quantkit.kernels.matrix import PackedMatrix, ScaleBits, code_bytes, scale_shape
from quantkit.kernels.packed import pack_zero_points
from quantkit.kernels.scheme import BLOCK, SCHEMES, QuantScheme


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A weight of `rows` rows from row `first_row` of its tensors on; `scale` and `zero` are those of the whole tensor.

    multiple  where a block of rows may begin: scales of 128 rows, zero points of 8
    codes     all codes of a weight that does not lie by rows in its file
    """

    scheme: QuantScheme
    weight: Weight
    inputs: int
    first_row: int
    scale: NDArray[Any]
    scale_format: ScaleBits
    zero: NDArray[np.int32] | None
    global_scale: float
    multiple: int
    codes: NDArray[np.uint8] | None = None

    def read(self, first: int, rows: int, reader: Reader) -> PackedMatrix:
        """Rows `first` to `first + rows`; `first` is a multiple of `multiple`."""
        at = self.first_row + first
        width = code_bytes(self.scheme, self.inputs)
        if self.codes is not None:
            codes = self.codes[at : at + rows]
        else:
            codes = np.empty((rows, width), np.uint8)
            reader.read_into(self.weight.parts["codes"], at * width, codes)
        lines = slice(at, at + rows)
        if self.scheme.granularity == "tensor":
            lines = slice(0, 1)
        elif self.scheme.granularity == "block":
            lines = slice(at // BLOCK, -(-(at + rows) // BLOCK))
        zero = None if self.zero is None else self.zero[at // 8 : -(-(at + rows) // 8)]
        return PackedMatrix(
            self.scheme, rows, self.inputs, codes, self.scale[lines], self.scale_format, zero, self.global_scale
        )


def _scheme_of(weight: Weight) -> QuantScheme | None:
    """The scheme that a kernel exists for, whatever the scales are stored in; None when there is none."""
    if weight.scheme is not None:
        return weight.scheme
    if weight.encoding != "int4-ct":
        return None if weight.encoding in ENCODINGS else SCHEMES.get(weight.encoding)
    groups = weight.parts["scale"].shape[-1]
    group = "channel" if groups == 1 else f"g{weight.shape[-1] // groups}"
    return SCHEMES.get(f"int4{'a' if 'zero' in weight.parts else ''}-{group}")


def packed_rows(weight: Weight, first_row: int, reader: Reader) -> PackedRows | None:
    """The rows from `first_row` of the flattened weight on, or None for an encoding without a packed kernel."""
    scheme = _scheme_of(weight)
    if scheme is None or weight.encoding not in (*GROUP_OF, *ENCODINGS, "fp8-tensor", "fp8-channel", "fp8-block"):
        return None
    if has_factor(weight, reader):
        return None
    outputs, inputs = math.prod(weight.shape[:-1]), weight.shape[-1]
    info = weight.parts["scale"]
    raw = reader.read(info)
    scale_format: ScaleBits = "f32"
    if scheme.element == "int4":
        scale_format = "f16" if info.dtype == "F16" else "bf16"
        if info.dtype == "F32":
            return None
        scale: NDArray[Any] = int4_scales(weight, reader)
    elif scheme.element == "e2m1":
        scale_format = "e4m3" if scheme.scale == "e4m3" else "e8m0"
        scale = raw
    else:
        scheme = SCHEMES["fp8-block"] if scheme.granularity == "block" else scheme
        scale = scale_values(info, raw)
    by_rows = scheme.element != "int4" or weight.encoding == "int4-ct"
    zeros = int4_zeros(weight, reader) if scheme.element == "int4" else None
    return PackedRows(
        scheme=scheme,
        weight=weight,
        inputs=inputs,
        first_row=first_row,
        scale=scale.reshape(scale_shape(scheme, outputs, inputs)),
        scale_format=scale_format,
        zero=None if zeros is None else pack_zero_points(zeros),
        global_scale=float(global_scale(weight, reader)),
        multiple=BLOCK if scheme.granularity == "block" else 8,
        codes=None if by_rows else int4_codes(weight, 0, outputs, reader),
    )


def input_scale_tensor(weight: Weight) -> TensorInfo | None:
    """The stored scale of a layer's activations, in either dialect: `input_global_scale` is a divisor."""
    return next((t for t in weight.extra if t.name.endswith((".input_scale", ".input_global_scale"))), None)


def input_scale(weight: Weight, reader: Reader) -> float | None:
    """The multiplier under which a layer's activations are quantised; None where the checkpoint stores none."""
    info = input_scale_tensor(weight)
    if info is None:
        return None
    value = scale_values(info, reader.read(info))[0]
    return float(np.float32(1) / value if info.name.endswith(".input_global_scale") else value)
