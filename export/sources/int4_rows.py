"""INT4 of any layout as rows of compressed-tensors: codes by blocks of rows, scales and zero points as a whole.

The numbers stay as they are; only their places change. This is how codes go from one dialect into another.

Letters: O outputs (rows), I inputs, G groups, R rows of a block, B bytes of a row, L lines of a file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.kernels import layouts
from quantkit.kernels.cpu import decode
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.packed import unpack_zero_points

ENCODINGS = ("int4-ct", "int4-pairs", "gptq-v1", "gptq-v2", "awq")
ONES = {"BF16": 0x3F80, "F16": 0x3C00}  # bits of 1.0


def columns(info: TensorInfo, first: int, end: int, reader: Reader) -> NDArray[np.int32]:
    """Columns `first` to `end` of an int32 tensor [L, C]."""
    lines, width = info.shape
    if (first, end) == (0, width):
        return reader.read(info).view(np.int32).reshape(lines, width)
    words = np.empty((lines, end - first), np.int32)
    for line in range(lines):
        reader.read_into(info, (line * width + first) * 4, words[line])
    return words


def int4_codes(weight: Weight, first: int, rows: int, reader: Reader) -> NDArray[np.uint8]:
    """Rows `first` to `first + rows` as bytes of compressed-tensors words."""
    info, inputs = weight.parts["codes"], weight.shape[-1]
    end = first + rows
    if weight.encoding == "int4-pairs":
        pairs = np.empty((-(-end // 2) - first // 2, inputs), np.uint8)
        reader.read_into(info, first // 2 * inputs, pairs)
        return np.ascontiguousarray(layouts.rows_from_row_pairs(pairs)[first % 2 :][:rows])
    codes_RB = np.empty((rows, -(-inputs // 8) * 4), np.uint8)
    if weight.encoding == "int4-ct":
        reader.read_into(info, first * codes_RB.shape[1], codes_RB)
    elif weight.encoding == "awq":
        decode.awq_to_int4(columns(info, first // 8, -(-end // 8), reader), first % 8, codes_RB)
    else:
        decode.gptq_to_int4(columns(info, first, end, reader), codes_RB)
    return codes_RB


def int4_scales(weight: Weight, reader: Reader) -> NDArray[Any]:
    """Scales [O, G] as stored: bits of BF16 and FP16 as uint16, or float32."""
    info = weight.parts["scale"]
    scale = reader.read(info).view(np.float32 if info.dtype == "F32" else np.uint16).reshape(info.shape)
    if weight.encoding in ("int4-ct", "int4-pairs"):
        return scale.reshape(weight.shape[0], -1)
    return np.ascontiguousarray(scale.T)


def int4_zeros(weight: Weight, reader: Reader) -> NDArray[np.int8] | None:
    """Zero points -8..7 [O, G]; None for a weight that is symmetric by its scheme.

    Raises QuantkitError when the tensors are not what the scheme says: other zero points, groups in another order,
    inputs with a factor.
    """
    _check_plain(weight, reader)
    info, outputs = weight.parts.get("zero"), weight.shape[0]
    if info is None:
        return None
    words = reader.read(info).view(np.int32).reshape(info.shape)
    if weight.encoding == "int4-ct":
        return unpack_zero_points(words, outputs)
    zero_OG = np.ascontiguousarray(kmajor_zeros(weight.encoding, words, outputs).T).astype(np.int8) - np.int8(8)
    if weight.scheme is not None and weight.scheme.symmetric:
        if zero_OG.any():
            raise _lie(weight, "zero")
        return None
    return zero_OG


def kmajor_zeros(encoding: str, words: NDArray[np.int32], outputs: int) -> NDArray[np.uint8]:
    """Zero points 0..15 [G, O] of a GPTQ (v1 stores one less) or AWQ weight."""
    if encoding == "awq":
        return np.ascontiguousarray(layouts.awq_unpack_zeros(words)[:, :outputs])
    return layouts.gptq_unpack_zeros(words, outputs, v2=encoding == "gptq-v2")


def has_factor(weight: Weight, reader: Reader) -> bool:
    """True when the inputs have to be multiplied before they meet the codes (ModelOpt's `pre_quant_scale`)."""
    info = weight.parts.get("ones")
    return info is not None and bool((reader.read(info).view(np.uint16) != ONES[info.dtype]).any())


def _check_plain(weight: Weight, reader: Reader) -> None:
    inputs = weight.shape[-1]
    order = weight.parts.get("g_idx")
    if order is not None and order.nbytes:
        group = inputs // weight.parts["scale"].shape[0]
        if (reader.read(order).view(np.int32) != np.arange(inputs) // group).any():
            raise _lie(weight, "g_idx")
    if has_factor(weight, reader):
        raise _lie(weight, "ones")


def _lie(weight: Weight, kind: str) -> QuantkitError:
    info = weight.parts[kind]
    return QuantkitError(
        f"the configuration says symmetric and in the order of the inputs, {info.name} does not",
        file=info.file, tensor=weight.name,
        hint="give the layers `scheme: bf16`, or another group, to go by the tensors",
    )  # fmt: skip
