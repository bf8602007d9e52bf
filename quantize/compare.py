"""Compare one weight of a checkpoint with its source, from the bytes on both disks.

Letters: R rows, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.int4_rows import ENCODINGS, int4_codes, int4_scales, int4_zeros
from quantkit.export.sources.rows import Buffers, global_scale, row_source, scale_values
from quantkit.kernels.cpu import decode
from quantkit.kernels.cpu.compare import sq_difference
from quantkit.kernels.cpu.convert import f32_to_bf16
from quantkit.kernels.cpu.rows import RowParts, quantize_rows, requantize_rows, row_parts
from quantkit.kernels.cpu.tails import Moments, add_moments, tail_loss, tail_weights
from quantkit.kernels.elements import E4M3_VALUES
from quantkit.kernels.measure import differing_codes
from quantkit.kernels.scheme import BLOCK, QuantScheme
from quantkit.quantize.blocks import blocks_of, chunk_rows, chunks_of
from quantkit.quantize.pairs import Pair
from quantkit.quantize.work import share_of

MEMORY = 64 << 20  # bytes of a block's buffers
COPY = 8 << 20


@dataclass(frozen=True, slots=True)
class Compared:
    """What came out: `differing` of `count` bytes, values or codes; sums of squares where `scheme` names one.

    Of a layer made by `tails` the sums are those of its loss, in which every weight counts as much as there.
    """

    name: str
    scheme: str
    count: int
    differing: int
    sq_err: float = 0.0
    sq_norm: float = 0.0
    sq_plain: float = 0.0


def compare(pair: Pair, reader: Reader, tails: Sequence[Pair] = ()) -> Compared:
    """Compare one pair; `tails`: the pairs, this one among them, whose tails together weighed its errors."""
    out, src = pair.output, pair.source
    if out.encoding == "plain" and src.encoding == "plain":
        return _bytes(out.name, [(src.parts["codes"], out.parts["codes"])], reader)
    if out.encoding == "plain":
        return _decoded(pair, reader)
    if src.encoding != out.encoding and out.scheme is not None and out.scheme == src.scheme:
        return _values(pair, reader)
    if out.scheme is None or out.scheme == src.scheme:
        same = [(src.parts[k], t) for k, t in out.parts.items() if k in src.parts and k != "shape"]
        return _bytes(out.name, same, reader)
    return _quantized(pair, out.scheme, reader, tails)


def _bytes(name: str, tensors: list[tuple[TensorInfo, TensorInfo]], reader: Reader) -> Compared:
    count = differing = 0
    for a, b in tensors:
        count += max(a.nbytes, b.nbytes)
        differing += abs(a.nbytes - b.nbytes)
        for at in range(0, min(a.nbytes, b.nbytes), COPY):
            n = min(COPY, a.nbytes - at, b.nbytes - at)
            left, right = np.empty(n, np.uint8), np.empty(n, np.uint8)
            reader.read_into(a, at, left)
            reader.read_into(b, at, right)
            differing += int(np.count_nonzero(left != right))
    return Compared(name, "", count, differing)


def _decoded(pair: Pair, reader: Reader) -> Compared:
    """A quantised source that became BF16: every value is the source's value rounded to nearest even."""
    if pair.out_expert is not None:
        return _decoded_expert(pair, pair.out_expert, reader)
    rows, inputs = math.prod(pair.output.shape[:-1]), pair.output.shape[-1]
    source = row_source(pair.source, rows, inputs, 0, None, reader, Buffers())
    w_RI = np.empty((chunk_rows(inputs, 1), inputs), np.float32)
    expected = np.empty(w_RI.shape, np.uint16)
    stored = np.empty(w_RI.shape, np.uint16)
    differing = 0
    for first, n_rows in blocks_of(rows, inputs, MEMORY):
        source.load(first, n_rows)
        for at, n in chunks_of(n_rows, inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            f32_to_bf16(w_RI[:n], expected[:n])
            reader.read_into(pair.output.parts["codes"], (first + at) * inputs * 2, stored[:n])
            differing += int(np.count_nonzero(expected[:n] != stored[:n]))
    return Compared(pair.output.name, "", rows * inputs, differing)


def _values(pair: Pair, reader: Reader) -> Compared:
    """Codes that were laid out anew: every decoded value is the same."""
    rows, inputs = pair.output.shape
    source = row_source(pair.source, rows, inputs, 0, None, reader, Buffers())
    stored = row_source(pair.output, rows, inputs, 0, None, reader, Buffers())
    w_RI, hat_RI = (np.empty((chunk_rows(inputs, 1), inputs), np.float32) for _ in range(2))
    differing = 0
    for first, n_rows in blocks_of(rows, inputs, MEMORY):
        source.load(first, n_rows)
        stored.load(first, n_rows)
        for at, n in chunks_of(n_rows, inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            stored.decode(first + at, n, hat_RI[:n])
            differing += int(np.count_nonzero(w_RI[:n] != hat_RI[:n]))
    return Compared(pair.output.name, "", rows * inputs, differing)


def _decoded_expert(pair: Pair, expert: int, reader: Reader) -> Compared:
    """One fused expert [O, I] of the source against the BF16 output [I, O]."""
    _, rows, inputs = pair.source.shape
    source = row_source(pair.source, rows, inputs, pair.first_row, None, reader, Buffers())
    source.load(0, rows)
    w_OI = np.empty((rows, inputs), np.float32)
    source.decode(0, rows, w_OI)
    expected, stored = np.empty((inputs, rows), np.uint16), np.empty((inputs, rows), np.uint16)
    f32_to_bf16(np.ascontiguousarray(w_OI.T), expected)
    reader.read_into(pair.output.parts["codes"], expert * stored.nbytes, stored)
    return Compared(f"{pair.output.name}.{expert}", "", stored.size, int(np.count_nonzero(expected != stored)))


def _quantized(pair: Pair, scheme: QuantScheme, reader: Reader, tails: Sequence[Pair]) -> Compared:
    """Error, bound and nearest codes of a quantised layer."""
    out = pair.output
    rows, inputs = out.shape[-2:]
    multiple = BLOCK if scheme.granularity == "block" else 1
    source = row_source(pair.source, rows, inputs, pair.first_row, pair.expert, reader, Buffers())
    out_row = (pair.out_expert or 0) * rows
    stored = row_source(out, rows, inputs, out_row, None, reader, Buffers())
    half = out.parts["scale"].dtype == "F16" if "scale" in out.parts else False
    scale = _stored_scale(out, scheme, reader)
    if pair.out_expert is not None:
        scale = scale.reshape(out.shape[0], rows, -1)[pair.out_expert]
    zero = int4_zeros(out, reader) if scheme.element == "int4" else None
    shared, scale_2 = _shared(out, scheme, reader)
    amax = float(shared or 0.0)
    h_I = tail_weights([_moments(p, reader) for p in tails]) if tails else None
    w_RI = np.empty((chunk_rows(inputs, multiple), inputs), np.float32)
    hat_RI = np.empty_like(w_RI)
    sums = np.zeros(3, np.float64)
    differing = 0
    for first, n_rows in blocks_of(rows, inputs, MEMORY):
        source.load(first, n_rows)
        stored.load(first, n_rows)
        plain = row_parts(scheme, chunk_rows(inputs, multiple), inputs)
        on_disk = _stored_codes(out, out_row + first, n_rows, reader)
        for at, n in chunks_of(n_rows, inputs, multiple):
            source.decode(first + at, n, w_RI[:n])
            stored.decode(first + at, n, hat_RI[:n])
            part = share_of(plain, 0, n, multiple, plain.sq_err_R, plain.sq_norm_R)
            quantize_rows(w_RI[:n], scheme, "plain", amax, half, part)
            sums += _losses(w_RI[:n], hat_RI[:n], part, half, scale_2, h_I)
            begin, end = (first + at) // multiple, -(-(first + at + n) // multiple)
            own = scale if scale.ndim < 2 else np.ascontiguousarray(scale[begin:end])
            own_zero = None if zero is None else np.ascontiguousarray(zero[first + at : first + at + n])
            requantize_rows(w_RI[:n], scheme, half, own, own_zero, scale_2, part.codes)
            wrong = differing_codes(part.codes, on_disk[at : at + n], 8 if scheme.element == "e4m3" else 4)
            if wrong and scale_2 is not None:
                wrong = _farther(w_RI[:n], hat_RI[:n], part.codes, own, scale_2)
            differing += wrong
    return Compared(out.name, scheme.name, rows * inputs, differing, *map(float, sums))


def _moments(pair: Pair, reader: Reader) -> Moments:
    """Those of the columns of a whole matrix."""
    rows, inputs = pair.output.shape[-2:]
    source = row_source(pair.source, rows, inputs, pair.first_row, pair.expert, reader, Buffers())
    w_RI = np.empty((chunk_rows(inputs, 1), inputs), np.float32)
    moments = Moments.none(rows, inputs)
    for first, n_rows in blocks_of(rows, inputs, MEMORY):
        source.load(first, n_rows)
        for at, n in chunks_of(n_rows, inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            add_moments(w_RI[:n], moments.square_I, moments.fourth_I)
    return moments


def _losses(
    w_RI: NDArray[np.float32], hat_RI: NDArray[np.float32], plain: RowParts, half: bool, scale_2: float | None,
    h_I: NDArray[np.float32] | None,
) -> tuple[float, float, float]:  # fmt: skip
    """Loss of a chunk as stored, as zeros, and under plain rounding: squares, or with `h_I` those of `tails`."""
    if h_I is None:
        return *sq_difference(w_RI, hat_RI), float(plain.sq_err_R.sum())
    plain_RI = np.empty_like(w_RI)
    if scale_2 is None:
        scale = (
            plain.scale.view(np.float16).astype(np.float32)
            if half
            else (plain.scale.astype(np.uint32) << 16).view(np.float32)
        )
        decode.int4_to_f32(plain.codes, scale, np.zeros(scale.shape, np.int8), plain_RI)
    else:
        decode.fp4_to_f32(plain.codes, E4M3_VALUES[plain.scale] * np.float32(scale_2), 16, plain_RI)
    return tail_loss(w_RI, hat_RI, h_I), tail_loss(w_RI, np.zeros_like(w_RI), h_I), tail_loss(w_RI, plain_RI, h_I)


def _farther(
    w_RI: NDArray[np.float32],
    hat_RI: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scale: NDArray[np.generic],
    scale_2: float,
) -> int:
    """NVFP4 values on disk that are farther from their weight than the nearest code's.

    The divisor on disk is the reciprocal of the multiplier that codes were chosen under, rounded once more. A weight
    that lies half-way between two codes may then fall to either side; both are equally near.
    """
    nearest_RI = np.empty_like(hat_RI)
    decode.fp4_to_f32(codes, E4M3_VALUES[scale.astype(np.uint8)] * np.float32(scale_2), 16, nearest_RI)
    return int(np.count_nonzero(np.abs(w_RI - hat_RI) > np.abs(w_RI - nearest_RI) * (1 + 1e-5)))


def _stored_scale(out: Weight, scheme: QuantScheme, reader: Reader) -> NDArray[np.generic]:
    """The scales on disk in the arrays that the kernels use."""
    if scheme.element == "int4":
        return int4_scales(out, reader)
    info = out.parts["scale"]
    raw = reader.read(info)
    if scheme.element == "e2m1":
        return raw.reshape(math.prod(out.shape[:-1]), -1)
    values = scale_values(info, reader.read(info))
    if scheme.granularity == "tensor":
        return values[:1]
    rows = -(-out.shape[0] // BLOCK) if scheme.granularity == "block" else out.shape[0]
    return values.reshape(rows, -1)


def _stored_codes(out: Weight, first: int, rows: int, reader: Reader) -> NDArray[np.uint8]:
    """Codes of some rows [rows, bytes of a row], as the kernels lay them out."""
    if out.encoding in ENCODINGS:
        return int4_codes(out, first, rows, reader)
    width = out.parts["codes"].nbytes // math.prod(out.shape[:-1])
    codes = np.empty((rows, width), np.uint8)
    reader.read_into(out.parts["codes"], first * width, codes)
    return codes


def _shared(out: Weight, scheme: QuantScheme, reader: Reader) -> tuple[float | None, float | None]:
    """(amax of the fused set that the stored global scale came from, NVFP4's multiplier)."""
    if scheme.has_global:
        multiplier = global_scale(out, reader)
        return float(multiplier) * 448.0 * 6.0, float(multiplier)
    if scheme.granularity == "tensor":
        return float(scale_values(out.parts["scale"], reader.read(out.parts["scale"]))[0]) * 448.0, None
    return None, None
