"""Rows of any source weight as float32: read a block of rows, decode any chunk of it.

The whole weight is never decoded at once and nothing decoded goes to the disk. Scales are small and read once.

Letters: O outputs (rows), I inputs, G groups, R rows of a block, B bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import ITEMSIZE, TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.int4_rows import columns, int4_codes, kmajor_zeros
from quantkit.kernels.cpu import decode
from quantkit.kernels.cpu.convert import bf16_to_f32, f16_to_f32
from quantkit.kernels.elements import E4M3_VALUES, E8M0_VALUES
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.packed import unpack_zero_points

F32 = NDArray[np.float32]
GROUP_OF = {"nvfp4": 16, "mxfp4": 32}


class RowSource(Protocol):
    """A matrix [rows, inputs] that is read in blocks."""

    def load(self, first: int, rows: int) -> None:
        """Read rows `first` to `first + rows` of the matrix into memory."""
        ...

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        """Rows of the loaded block as float32, into `out_RI` [rows, inputs]."""
        ...


def scale_values(info: TensorInfo, raw: NDArray[np.uint8]) -> F32:
    """The bytes of a scale tensor as float32, flattened. U8 and F8_E8M0 are powers of two."""
    if info.dtype == "F32":
        return raw.view(np.float32)
    if info.dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if info.dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return np.asarray(E4M3_VALUES if info.dtype == "F8_E4M3" else E8M0_VALUES, np.float32)[raw]


def global_scale(weight: Weight, reader: Reader) -> np.float32:
    """The float32 multiplier over NVFP4's block scales, whichever dialect stores it; 1 for other encodings."""
    if "divisor" in weight.parts:
        return np.float32(np.float32(1) / reader.read(weight.parts["divisor"]).view(np.float32)[0])
    if "multiplier" in weight.parts:
        return np.float32(reader.read(weight.parts["multiplier"]).view(np.float32)[0])
    return np.float32(1)


class Buffers:
    """Arrays that one thread fills again and again: fresh memory would cost a page fault for every 4 KB."""

    def __init__(self) -> None:
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        self._parts: dict[int, Buffers] = {}

    def part(self, number: int) -> Buffers:
        """Buffers of their own for one of several sources that are held at the same time."""
        return self._parts.setdefault(number, Buffers())

    def take(self, use: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array; it is good until the next call for the same use."""
        need = math.prod(shape) * np.dtype(dtype).itemsize
        if use not in self._bytes or self._bytes[use].nbytes < need:
            self._bytes[use] = np.empty(need, np.uint8)
        return self._bytes[use][:need].view(dtype).reshape(shape)


@dataclass(slots=True)
class _Block:
    """Bytes of the loaded rows of one tensor."""

    info: TensorInfo
    reader: Reader
    buffers: Buffers
    row_bytes: int
    offset: int  # bytes of the tensor before the matrix
    use: str = "source codes"
    first: int = 0
    data: NDArray[np.uint8] | None = None

    def load(self, first: int, rows: int) -> None:
        self.data = self.buffers.take(self.use, (rows * self.row_bytes,), np.uint8)
        self.first = first
        self.reader.read_into(self.info, self.offset + first * self.row_bytes, self.data)

    def rows(self, first: int, rows: int) -> NDArray[np.uint8]:
        assert self.data is not None
        begin = (first - self.first) * self.row_bytes
        return self.data[begin : begin + rows * self.row_bytes].reshape(rows, self.row_bytes)


class PlainRows:
    """BF16, FP16 or FP32."""

    def __init__(self, info: TensorInfo, inputs: int, first_row: int, reader: Reader, buffers: Buffers) -> None:
        if info.dtype not in ("BF16", "F16", "F32"):
            raise QuantkitError(
                "a tensor that is not a float cannot be quantised",
                file=info.file, tensor=info.name, value=info.dtype, allowed="BF16, F16, F32",
            )  # fmt: skip
        width = inputs * ITEMSIZE[info.dtype]
        self._block = _Block(info, reader, buffers, width, first_row * width)

    def load(self, first: int, rows: int) -> None:
        self._block.load(first, rows)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        raw = self._block.rows(first, rows)
        dtype = self._block.info.dtype
        if dtype == "F32":
            out_RI[:] = raw.view(np.float32)
        else:
            (bf16_to_f32 if dtype == "BF16" else f16_to_f32)(raw.view(np.uint16), out_RI)


class TransposedRows:
    """One expert of a fused tensor [E, I, O] in BF16 or FP16: the expert is read whole, rows are its columns."""

    def __init__(self, info: TensorInfo, rows: int, inputs: int, expert: int, reader: Reader, buffers: Buffers) -> None:
        self._plain = PlainRows(info, rows, expert * inputs, reader, buffers)
        self._shape = (inputs, rows)
        self._w_IO: F32 | None = None

    def load(self, first: int, rows: int) -> None:
        if self._w_IO is None:
            inputs, outputs = self._shape
            self._w_IO = np.empty((inputs, outputs), np.float32)
            self._plain.load(0, inputs)
            self._plain.decode(0, inputs, self._w_IO)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        assert self._w_IO is not None
        out_RI[:] = self._w_IO[:, first : first + rows].T


class Fp8Rows:
    """FP8 E4M3 codes with a scale for the tensor, each channel, each 128 x 128 block, or 32 inputs (MXFP8)."""

    def __init__(self, weight: Weight, inputs: int, first_row: int, reader: Reader, buffers: Buffers) -> None:
        self._block = _Block(weight.parts["codes"], reader, buffers, inputs, first_row * inputs)
        info = weight.parts["scale"]
        values = scale_values(info, reader.read(info))
        outputs = weight.shape[0]
        self._kind = weight.encoding
        if self._kind == "fp8-block":
            self._scale = values.reshape(-(-outputs // 128), -(-inputs // 128))
        elif self._kind == "fp8-tensor":
            self._scale = np.full((outputs, 1), values[0], np.float32)
        else:
            self._scale = values.reshape(outputs, -1)

    def load(self, first: int, rows: int) -> None:
        self._block.load(first, rows)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        codes = self._block.rows(first, rows)
        if self._kind == "fp8-block":
            decode.fp8_block_to_f32(codes, self._scale, first, out_RI)
        else:
            decode.fp8_group_to_f32(codes, self._scale[first : first + rows], out_RI)


class Int4Rows:
    """compressed-tensors INT4 words, symmetric or with zero points packed along the outputs."""

    def __init__(self, weight: Weight, inputs: int, first_row: int, reader: Reader, buffers: Buffers) -> None:
        codes, scale = weight.parts["codes"], weight.parts["scale"]
        width = codes.nbytes // weight.shape[0]
        self._block = _Block(codes, reader, buffers, width, first_row * width)
        self._scale = scale_values(scale, reader.read(scale)).reshape(scale.shape)
        zero = weight.parts.get("zero")
        self._zero: NDArray[np.int8] | None = None
        if zero is not None:
            self._zero = unpack_zero_points(reader.read(zero).view(np.int32).reshape(zero.shape), weight.shape[0])

    def load(self, first: int, rows: int) -> None:
        self._block.load(first, rows)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        scale = self._scale[first : first + rows]
        zero = np.zeros(scale.shape, np.int8) if self._zero is None else self._zero[first : first + rows]
        decode.int4_to_f32(self._block.rows(first, rows), scale, zero, out_RI)


class Fp4Rows:
    """FP4 nibbles with E4M3 scales per 16 inputs and a global scale (NVFP4), or E8M0 scales per 32 (MXFP4)."""

    def __init__(self, weight: Weight, inputs: int, first_row: int, reader: Reader, buffers: Buffers) -> None:
        group = GROUP_OF[weight.encoding]
        codes, self._scale_info = weight.parts["codes"], weight.parts["scale"]
        self._block = _Block(codes, reader, buffers, inputs // 2, first_row * inputs // 2)
        self._scales = _Block(
            self._scale_info, reader, buffers, inputs // group, first_row * (inputs // group), "source scale"
        )
        self._group = group
        self._global = global_scale(weight, reader)

    def load(self, first: int, rows: int) -> None:
        self._block.load(first, rows)
        self._scales.load(first, rows)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        scale = scale_values(self._scale_info, self._scales.rows(first, rows)) * self._global
        decode.fp4_to_f32(self._block.rows(first, rows), scale, self._group, out_RI)


class KMajorRows:
    """GPTQ [I/8, O] and AWQ [I, O/8]: outputs lie along the columns, so a block of rows is a slice of columns."""

    def __init__(self, weight: Weight, inputs: int, first_row: int, reader: Reader, buffers: Buffers) -> None:
        assert first_row == 0
        self._weight, self._reader, self._inputs = weight, reader, inputs
        outputs = weight.shape[0]
        scale, zero = weight.parts["scale"], weight.parts["zero"]
        self._scale_GO = scale_values(scale, reader.read(scale)).reshape(scale.shape)
        words = reader.read(zero).view(np.int32).reshape(zero.shape)
        self._zero_GO = kmajor_zeros(weight.encoding, words, outputs)
        g_idx = weight.parts.get("g_idx")
        group = inputs // scale.shape[0]
        sequential = (np.arange(inputs) // group).astype(np.int32)
        self._g_idx = sequential if g_idx is None or g_idx.nbytes == 0 else reader.read(g_idx).view(np.int32)
        self._first = 0
        self._words: NDArray[np.int32] | None = None

    def load(self, first: int, rows: int) -> None:
        share = 8 if self._weight.encoding == "awq" else 1
        begin, end = first // share, -(-(first + rows) // share)
        self._words = columns(self._weight.parts["codes"], begin, end, self._reader)
        self._first = begin * share

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        assert self._words is not None
        at = first - self._first
        scale, zero = self._scale_GO[:, first : first + rows], self._zero_GO[:, first : first + rows]
        if self._weight.encoding == "awq":
            decode.awq_to_f32(self._words, at, scale, zero, self._g_idx, out_RI)
        else:
            decode.gptq_to_f32(self._words[:, at : at + rows], scale, zero, self._g_idx, out_RI)


class PairRows:
    """ModelOpt's INT4 in pairs of rows; its inputs may have a factor, which is part of the weight."""

    def __init__(self, weight: Weight, reader: Reader) -> None:
        self._weight, self._reader = weight, reader
        scale, factor = weight.parts["scale"], weight.parts.get("ones")
        self._scale_OG = scale_values(scale, reader.read(scale)).reshape(scale.shape)
        self._factor_I = None if factor is None else scale_values(factor, reader.read(factor))
        self._first, self._codes = 0, np.empty((0, 0), np.uint8)

    def load(self, first: int, rows: int) -> None:
        self._first, self._codes = first, int4_codes(self._weight, first, rows, self._reader)

    def decode(self, first: int, rows: int, out_RI: F32) -> None:
        at, scale = first - self._first, self._scale_OG[first : first + rows]
        decode.int4_to_f32(self._codes[at : at + rows], scale, np.zeros(scale.shape, np.int8), out_RI)
        if self._factor_I is not None:
            out_RI *= self._factor_I


def row_source(
    weight: Weight,
    rows: int,
    inputs: int,
    first_row: int,
    transposed_expert: int | None,
    reader: Reader,
    buffers: Buffers,
) -> RowSource:
    """Rows of the matrix that begins at `first_row` of a weight, or of one expert of a transposed fused tensor."""
    if weight.encoding == "plain":
        codes = weight.parts["codes"]
        if transposed_expert is not None:
            return TransposedRows(codes, rows, inputs, transposed_expert, reader, buffers)
        return PlainRows(codes, inputs, first_row, reader, buffers)
    if weight.encoding in ("fp8-block", "fp8-tensor", "fp8-channel", "mxfp8"):
        return Fp8Rows(weight, inputs, first_row, reader, buffers)
    if weight.encoding in GROUP_OF:
        return Fp4Rows(weight, inputs, first_row, reader, buffers)
    if weight.encoding in ("int4-ct", "int4-pairs"):
        by_row = weight.encoding == "int4-ct"
        return Int4Rows(weight, inputs, first_row, reader, buffers) if by_row else PairRows(weight, reader)
    return KMajorRows(weight, inputs, first_row, reader, buffers)
