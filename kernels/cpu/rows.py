"""One call for every scheme: quantise a chunk of rows into the arrays of its scheme, or again under scales from a file.

The streaming pipeline knows schemes by name and arrays by shape; the kernels know one number format each. This module
is the table between the two. Importing it loads numpy and Numba only.

Shape suffixes: R rows, I inputs, B bytes of packed codes, G scales a row, N blocks of 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.cpu import fp8, int4, int4_tails, mxfp4, nvfp4
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import BLOCK, QuantScheme

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

# methods of each element type, the default last, which leaves the least squared error; int4a is INT4 with zero points
METHODS: dict[str, tuple[str, ...]] = {
    "int4": ("plain", "signed", "tails", "search"),
    "int4a": ("plain", "search"),
    "nvfp4": ("plain", "four-over-six", "tails", "sweep"),
    "mxfp4": ("plain", "search"),
    "fp8": ("plain",),
}
DEFAULT_METHOD: dict[str, str] = {family: methods[-1] for family, methods in METHODS.items()}
# by which `int4.quantize_int4` and `nvfp4.quantize_nvfp4` know them
_NUMBER = {"plain": 0, "signed": 1, "search": 2, "four-over-six": 1, "sweep": 2, "tails": 3}


@dataclass(frozen=True, slots=True, eq=False)
class RowParts:
    """What quantising R rows of I inputs yields; every array is written in place and may be a view of a larger one.

    codes     uint8: [R, 4 * ceil(I / 8)] int4 nibbles, [R, I / 2] FP4 nibbles (even column low), [R, I] FP8
    scale     int4: uint16 [R, G], bits of bfloat16 or float16; nvfp4: uint8 [R, G], e4m3 codes; mxfp4: uint8 [R, G],
              e8m0 codes; fp8 channel: float32 [R, 1]; fp8 block, ue8m0 too: float32 [ceil(R / 128), ceil(I / 128)];
              fp8 tensor: float32 [1]
    zero      int8 [R, G], zero points -8..7 of asymmetric int4; None for every other scheme
    sq_err_R  float64: sum over the row of (w - what the codes decode to)^2
    sq_norm_R float64: sum over the row of w^2
    """

    codes: U8
    scale: NDArray[Any]
    zero: NDArray[np.int8] | None
    sq_err_R: F64  # noqa: N815
    sq_norm_R: F64  # noqa: N815


def family(scheme: QuantScheme) -> str:
    """Key of METHODS and DEFAULT_METHOD: int4, nvfp4, mxfp4 or fp8."""
    if scheme.element == "e2m1":
        return "nvfp4" if scheme.has_global else "mxfp4"
    if scheme.element == "float":
        raise QuantkitError("a scheme that keeps floats has no codes", value=scheme.name, allowed=", ".join(METHODS))
    return "fp8" if scheme.element == "e4m3" else "int4"


def methods_of(scheme: QuantScheme) -> tuple[str, ...]:
    """Names of the methods that choose codes of a scheme from its weights alone."""
    return METHODS["int4" if scheme.symmetric else "int4a"] if scheme.element == "int4" else METHODS[family(scheme)]


def needs_tails(method: str) -> bool:
    """Whether `quantize_rows` asks for the tail weights of the whole matrix."""
    return method == "tails"


def codes_shape(scheme: QuantScheme, rows: int, inputs: int) -> tuple[int, int]:
    """Shape of the uint8 code array of a matrix."""
    return rows, {"int4": -(-inputs // 8) * 4, "nvfp4": inputs // 2, "mxfp4": inputs // 2, "fp8": inputs}[
        family(scheme)
    ]


def scale_shape(scheme: QuantScheme, rows: int, inputs: int) -> tuple[int, ...]:
    """Shape of the scale array of a matrix."""
    if scheme.granularity == "tensor":
        return (1,)
    return (-(-rows // BLOCK) if scheme.granularity == "block" else rows), scheme.groups(inputs)


def scale_dtype(scheme: QuantScheme) -> np.dtype[Any]:
    """Array dtype of the scales: bits (uint16, uint8) where numpy has no such float."""
    return np.dtype({"int4": np.uint16, "nvfp4": np.uint8, "mxfp4": np.uint8, "fp8": np.float32}[family(scheme)])


def row_parts(scheme: QuantScheme, rows: int, inputs: int) -> RowParts:
    """Uninitialised arrays for `rows` x `inputs` weights of this scheme."""
    shape = scale_shape(scheme, rows, inputs)
    return RowParts(
        codes=np.empty(codes_shape(scheme, rows, inputs), np.uint8),
        scale=np.empty(shape, scale_dtype(scheme)),
        zero=None if scheme.symmetric else np.empty(shape, np.int8),
        sq_err_R=np.empty(rows, np.float64),
        sq_norm_R=np.empty(rows, np.float64),
    )


def global_scale(scheme: QuantScheme, amax: float) -> np.float32:
    """The float32 scale of the whole tensor (a multiplier) that follows from the amax of the fused set.

    Only for schemes with `shares_scale`: NVFP4's second-level scale, or the one scale of per-tensor FP8.
    """
    return nvfp4.nvfp4_scale_2(amax) if scheme.has_global else fp8.fp8_scale(amax)


def quantize_rows(
    w_RI: F32, scheme: QuantScheme, method: str, shared: float | None, half: bool, out: RowParts, h_I: F32 | None = None
) -> int:
    """Quantise a chunk of rows; returns the first row that holds a NaN or infinity (then `out` is not valid), else -1.

    w_RI    float32, C-contiguous. Block schemes: chunks are multiples of 128 rows, save the last of a matrix
    method  one of `methods_of(scheme)`
    shared  amax of the fused set where `scheme.shares_scale`, else ignored
    half    int4 only: scales are float16 rather than bfloat16
    h_I     where `needs_tails(method)`: `tails.tail_weights` of the whole matrix, else None
    """
    kind = family(scheme)
    if method not in methods_of(scheme):
        raise QuantkitError(f"unknown method for {scheme.name}", value=method, allowed=", ".join(methods_of(scheme)))
    if scheme.shares_scale and shared is None:
        raise QuantkitError(f"{scheme.name} needs the largest absolute weight of the fused set")
    if needs_tails(method) != (h_I is not None):
        raise QuantkitError(
            "the method `tails`, and no other, takes the tail weights of the whole matrix", value=method
        )
    stats = (out.sq_err_R, out.sq_norm_R)
    searched = method == "search"
    if kind == "int4":
        group = _group(scheme, w_RI)
        if h_I is not None:
            int4_tails.tail_scales(w_RI, h_I, group, half, out.scale)
            return int(int4.encode_int4(w_RI, group, half, out.scale, out.codes, *stats))
        if out.zero is None:
            return int(int4.quantize_int4(w_RI, group, _NUMBER[method], half, out.codes, out.scale, *stats))
        return int(int4.quantize_int4_asym(w_RI, group, searched, half, out.codes, out.scale, out.zero, *stats))
    if kind == "nvfp4":
        scale_2 = global_scale(scheme, float(shared or 0.0))
        return nvfp4.quantize_nvfp4(w_RI, scale_2, _NUMBER[method], out.codes, out.scale, *stats, h_I)
    if kind == "mxfp4":
        return int(mxfp4.quantize_mxfp4(w_RI, searched, out.codes, out.scale, *stats))
    if scheme.granularity == "tensor":
        out.scale[0] = global_scale(scheme, float(shared or 0.0))
        bad_row = fp8.quantize_fp8_tensor(w_RI, out.scale[0], out.codes, *stats)
    elif scheme.granularity == "channel":
        bad_row = fp8.quantize_fp8_channel(w_RI, out.codes, out.scale, *stats)
    else:
        bad_row = fp8.quantize_fp8_block(w_RI, scheme.scale == "e8m0", out.codes, out.scale, *stats)
    return int(bad_row)


def requantize_rows(
    w_RI: F32, scheme: QuantScheme, half: bool, scale: NDArray[Any], zero: NDArray[np.int8] | None,
    scale_2: float | None, codes_out: U8,
) -> None:  # fmt: skip
    """Codes nearest to `w_RI` under the scales found in a file, rounded as `quantize_rows` rounds.

    Shapes and dtypes as RowParts. scale_2 is the float32 multiplier over NVFP4's block scales (1 / divisor for the
    compressed-tensors dialect), ignored by the other schemes.
    """
    kind = family(scheme)
    if kind == "int4":
        group = _group(scheme, w_RI)
        if zero is None:
            int4.requantize_int4(w_RI, group, half, scale, codes_out)
        else:
            int4.requantize_int4_asym(w_RI, group, half, scale, zero, codes_out)
    elif kind == "nvfp4":
        if scale_2 is None:
            raise QuantkitError("nvfp4 codes mean nothing without the scale of the tensor")
        nvfp4.requantize_nvfp4(w_RI, np.float32(scale_2), scale, codes_out)
    elif kind == "mxfp4":
        mxfp4.requantize_mxfp4(w_RI, scale, codes_out)
    elif scheme.granularity == "block":
        fp8.requantize_fp8(w_RI, scale, BLOCK, BLOCK, codes_out)
    else:
        rows = len(w_RI) if scheme.granularity == "tensor" else 1
        fp8.requantize_fp8(w_RI, scale.reshape(-1, 1), rows, w_RI.shape[1], codes_out)


def _group(scheme: QuantScheme, w_RI: F32) -> int:
    """Inputs that share an int4 scale: the group, or the whole row."""
    return scheme.group_size if scheme.granularity == "group" else int(w_RI.shape[1])
