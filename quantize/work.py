"""One step of a plan: from source bytes to output bytes.

A matrix is worked through in blocks of rows (what is read and written at once, bounded by the memory budget) and each
block in chunks (what is decoded and quantised at once, small enough for the processor's cache). Neither size changes
the output: a row's codes depend on that row, on the scales of its block, and on the largest weight of its step.

Letters: R rows of a chunk, I inputs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo, write_all
from quantkit.export.sources.rows import Buffers, KMajorRows, RowSource, row_source
from quantkit.kernels.cpu.convert import f32_to_bf16
from quantkit.kernels.cpu.nvfp4 import amax_f32, nvfp4_global_divisor
from quantkit.kernels.cpu.rows import RowParts, codes_shape, global_scale, quantize_rows, scale_dtype, scale_shape
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.packed import pack_zero_points
from quantkit.kernels.scheme import BLOCK, QuantScheme
from quantkit.quantize.plan import Matrix, Out, Step, Task

CHUNK_WEIGHTS = 1 << 18  # float32 weights decoded at once: 1 MB, half of a core's level-2 cache
BLOCK_BYTES = 16 << 20  # most that is read at once, however large the budget
COPY_BYTES = 8 << 20
NUMPY = {"BF16": np.uint16, "F16": np.uint16, "F32": np.float32, "I32": np.int32, "I64": np.int64}


class Measured(NamedTuple):
    """Sum over a layer of (w - w_hat)^2 and of w^2, w_hat being what the written bytes decode to."""

    sq_err: float
    sq_norm: float


@dataclass(frozen=True, slots=True)
class Target:
    """Where the steps of one thread read and write, and how many bytes its buffers may take."""

    fds: Sequence[int]
    reader: Reader
    memory: int
    half: bool
    buffers: Buffers

    def write(self, out: Out, data: NDArray[Any], at: int = 0) -> None:
        """Write the bytes of `data` at byte `at` of an output tensor."""
        write_all(self.fds[out.shard], np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, out.start + at)


def blocks_of(rows: int, inputs: int, memory: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of blocks that are multiples of 128 rows and fit the budget (at least 128 rows)."""
    fit = max(1, min(memory // 4, BLOCK_BYTES) // max(1, 4 * inputs * BLOCK)) * BLOCK
    for first in range(0, rows, fit):
        yield first, min(fit, rows - first)


def chunks_of(rows: int, inputs: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of chunks of a block: multiples of `multiple` rows, sized for the cache."""
    size = chunk_rows(inputs, multiple)
    for first in range(0, rows, size):
        yield first, min(size, rows - first)


def run_step(step: Step, target: Target) -> dict[str, Measured]:
    """Carry out the tasks of a step; returns what was measured of each quantised layer."""
    quantized = [t for t in step.tasks if t.fate == "quantize"]
    shared: float | None = None
    if any(t.scheme is not None and t.scheme.shares_scale for t in quantized):
        shared = max(_amax(t, target) for t in quantized)
    measured = {}
    for task in step.tasks:
        if task.fate == "quantize":
            measured[task.name] = _quantize(task, shared, target)
        elif task.fate == "decode":
            _decode(task, target)
        else:
            _copy(task, target)
    return measured


def _not_finite(task: Task, row: int) -> QuantkitError:
    file = next(iter(task.weight.parts.values())).file
    return QuantkitError(
        "a weight is not a finite number",
        file=file,
        tensor=task.weight.name,
        value=f"NaN or infinity in row {row}",
        allowed="finite weights",
        hint="the source is damaged, or its scales are; `keep` the tensor to copy it as it is",
    )


def _rows(task: Task, matrix: Matrix, target: Target) -> RowSource:
    expert = matrix.expert if matrix.transposed else None
    at = (matrix.rows, matrix.inputs, matrix.first_row, expert)
    return row_source(matrix.weight, *at, target.reader, target.buffers)


def _amax(task: Task, target: Target) -> float:
    """Largest absolute weight of a layer."""
    assert task.matrix is not None
    matrix = task.matrix
    source = _rows(task, matrix, target)
    w_RI = target.buffers.take("w", (chunk_rows(matrix.inputs, 1), matrix.inputs), np.float32)
    amax = 0.0
    for first, rows in blocks_of(matrix.rows, matrix.inputs, target.memory):
        source.load(first, rows)
        for at, n in chunks_of(rows, matrix.inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            found = float(amax_f32(w_RI[:n]))
            if not np.isfinite(found):
                bad = int(np.argmin(np.isfinite(w_RI[:n]).all(axis=1)))
                raise _not_finite(task, first + at + bad)
            amax = max(amax, found)
    return amax


def chunk_rows(inputs: int, multiple: int) -> int:
    """Rows of a chunk: a multiple of `multiple` that fits the cache."""
    return max(1, CHUNK_WEIGHTS // max(1, inputs * multiple)) * multiple


def _quantize(task: Task, shared: float | None, target: Target) -> Measured:
    assert task.matrix is not None
    assert task.scheme is not None
    matrix, scheme = task.matrix, task.scheme
    outs = {out.kind: out for out in task.outs}
    multiple = BLOCK if scheme.granularity == "block" else 1
    source = _rows(task, matrix, target)
    w_RI = target.buffers.take("w", (chunk_rows(matrix.inputs, multiple), matrix.inputs), np.float32)
    sq_err_R = np.empty(matrix.rows, np.float64)  # summed over the whole matrix at once: independent of the blocks
    sq_norm_R = np.empty(matrix.rows, np.float64)
    zeros: list[NDArray[np.int8]] = []
    for first, rows in blocks_of(matrix.rows, matrix.inputs, target.memory):
        source.load(first, rows)
        block = _row_parts(scheme, rows, matrix.inputs, target.buffers)
        for at, n in chunks_of(rows, matrix.inputs, multiple):
            source.decode(first + at, n, w_RI[:n])
            part = share_of(block, at, n, multiple, sq_err_R[first + at :], sq_norm_R[first + at :])
            bad = quantize_rows(w_RI[:n], scheme, task.method, shared, target.half, part)
            if bad >= 0:
                raise _not_finite(task, first + at + bad)
        target.write(outs["codes"], block.codes, first * (outs["codes"].nbytes // matrix.rows))
        if "scale" in outs:
            scales = block.scale
            target.write(outs["scale"], scales, first // multiple * (scales.nbytes // scales.shape[0]))
        if block.zero is not None:
            zeros.append(block.zero)
    if zeros:
        target.write(outs["zero"], pack_zero_points(np.concatenate(zeros)))
    _write_constants(outs, matrix.rows, matrix.inputs, task, shared, target)
    return Measured(float(np.sum(sq_err_R)), float(np.sum(sq_norm_R)))


def _row_parts(scheme: QuantScheme, rows: int, inputs: int, buffers: Buffers) -> RowParts:
    """The arrays of a block, in memory that the thread has used before."""
    scale = scale_shape(scheme, rows, inputs)
    return RowParts(
        buffers.take("codes", codes_shape(scheme, rows, inputs), np.uint8),
        buffers.take("scale", scale, scale_dtype(scheme)),
        None if scheme.symmetric else np.empty(scale, np.int8),  # zeros of all blocks are kept to the end
        buffers.take("sq_err", (rows,), np.float64),
        buffers.take("sq_norm", (rows,), np.float64),
    )


def share_of(
    block: RowParts, at: int, rows: int, multiple: int, sq_err_R: NDArray[np.float64], sq_norm_R: NDArray[np.float64]
) -> RowParts:
    """The share of a block's arrays that a chunk fills."""
    scale = block.scale
    if scale.ndim == 2:
        scale = scale[at // multiple : -(-(at + rows) // multiple)]
    zero = None if block.zero is None else block.zero[at : at + rows]
    return RowParts(block.codes[at : at + rows], scale, zero, sq_err_R[:rows], sq_norm_R[:rows])


def _write_constants(
    outs: dict[str, Out], rows: int, inputs: int, task: Task, shared: float | None, target: Target
) -> None:
    """The tensors of a layer that are one small value."""
    assert task.scheme is not None
    if "shape" in outs:
        target.write(outs["shape"], np.array([rows, inputs], NUMPY[outs["shape"].dtype]))
    if "divisor" in outs:
        target.write(outs["divisor"], np.array([nvfp4_global_divisor(shared or 0.0)], np.float32))
    for kind in ("multiplier", "tensor_scale"):
        if kind in outs:
            target.write(outs[kind], np.array([global_scale(task.scheme, shared or 0.0)], np.float32))
    if "input_scale" in outs:
        target.write(outs["input_scale"], np.array([task.input_scale], np.float32))


def _decode(task: Task, target: Target) -> None:
    """A quantised weight [O, I] as BF16, rounded to nearest even."""
    if task.matrix is not None:
        _decode_transposed(task, task.matrix, target)
        return
    rows, inputs = task.weight.shape
    source = row_source(task.weight, rows, inputs, 0, None, target.reader, target.buffers)
    w_RI = np.empty((chunk_rows(inputs, 1), inputs), np.float32)
    (out,) = task.outs
    for first, n_rows in blocks_of(rows, inputs, target.memory):
        source.load(first, n_rows)
        block = np.empty((n_rows, inputs), np.uint16)
        for at, n in chunks_of(n_rows, inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            if not np.isfinite(amax_f32(w_RI[:n])):
                bad = int(np.argmin(np.isfinite(w_RI[:n]).all(axis=1)))
                raise _not_finite(task, first + at + bad)
            f32_to_bf16(w_RI[:n], block[at : at + n])
        target.write(out, block, first * inputs * 2)


def _decode_transposed(task: Task, matrix: Matrix, target: Target) -> None:
    """One fused expert [O, I], as BF16 [I, O]."""
    source = _rows(task, matrix, target)
    source.load(0, matrix.rows)
    w_OI = np.empty((matrix.rows, matrix.inputs), np.float32)
    source.decode(0, matrix.rows, w_OI)
    if not np.isfinite(amax_f32(w_OI)):
        raise _not_finite(task, int(np.argmin(np.isfinite(w_OI).all(axis=1))))
    out_IO = np.empty((matrix.inputs, matrix.rows), np.uint16)
    f32_to_bf16(np.ascontiguousarray(w_OI.T), out_IO)
    target.write(task.outs[0], out_IO)


def _copy(task: Task, target: Target) -> None:
    """Bytes as published, under the names of the plan; NVFP4's global scale changes between divisor and multiplier."""
    if task.fate == "pass" and task.weight.encoding.startswith("gptq"):
        _repack_gptq(task, target)
        return
    named = dict(task.weight.parts) | {f"extra{i}": t for i, t in enumerate(task.weight.extra)}
    for out in task.outs:
        source = named.get(out.kind)
        if source is None and out.kind == "tensor_scale":
            source = named.get("scale")
        if source is not None and source.nbytes == out.nbytes:
            copy_tensor(source, out, target)
        elif out.kind == "shape":
            target.write(out, np.array(task.weight.shape, NUMPY[out.dtype]))
        elif out.kind in ("divisor", "multiplier"):
            other = named["multiplier" if out.kind == "divisor" else "divisor"]
            value = target.reader.read(other).view(np.float32)
            target.write(out, (np.float32(1) / value).astype(np.float32))
        else:
            raise QuantkitError("internal: no source for a tensor of the plan", tensor=out.name, value=out.kind)


def _repack_gptq(task: Task, target: Target) -> None:
    """Symmetric GPTQ codes and scales in the layout of compressed-tensors: the same numbers, transposed."""
    outs = {out.kind: out for out in task.outs}
    outputs, inputs = task.weight.shape
    source = KMajorRows(task.weight, inputs, 0, target.reader, target.buffers)
    if not source.plain_int4():
        raise QuantkitError(
            "the configuration says symmetric and in order, the zero points or g_idx do not",
            file=task.weight.parts["zero"].file,
            tensor=task.weight.name,
            hint="give the layers `scheme: bf16`, or another group, to go by the tensors",
        )
    width = outs["codes"].nbytes // outputs
    for first, rows in blocks_of(outputs, inputs, target.memory):
        source.load(first, rows)
        codes_RB = np.empty((rows, width), np.uint8)
        source.int4_codes(codes_RB)
        target.write(outs["codes"], codes_RB, first * width)
    scale = task.weight.parts["scale"]
    scale_GO = target.reader.read(scale).view(np.uint16).reshape(scale.shape)
    target.write(outs["scale"], np.ascontiguousarray(scale_GO.T))
    target.write(outs["shape"], np.array(task.weight.shape, NUMPY[outs["shape"].dtype]))


def copy_tensor(source: TensorInfo, out: Out, target: Target) -> None:
    """Copy a tensor inside the kernel where the file systems can, through a small buffer where they cannot."""
    done = 0
    fd_in, fd_out = target.reader.descriptor(source), target.fds[out.shard]
    while done < source.nbytes:
        try:
            n = os.copy_file_range(
                fd_in, fd_out, min(source.nbytes - done, 1 << 30), source.start + done, out.start + done
            )
        except OSError as e:
            if e.errno in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EIO):
                break
            raise
        if n == 0:
            break
        done += n
    buffer = np.empty(min(COPY_BYTES, source.nbytes - done), np.uint8)
    while done < source.nbytes:
        share = buffer[: min(COPY_BYTES, source.nbytes - done)]
        target.reader.read_into(source, done, share)
        target.write(out, share, done)
        done += share.nbytes
