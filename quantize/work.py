"""One step of a plan: from source bytes to output bytes.

A matrix is worked through in blocks of rows (what is read and written at once, bounded by the memory budget) and each
block in chunks (what is decoded and quantised at once, small enough for the processor's cache). Neither size changes
the output: a row's codes depend on that row, on the scales of its block, and on what a first pass finds over all rows:
the largest weight of the step, the tails of its columns.

Letters: R rows of a chunk, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from quantkit.export.sources.rows import Buffers, RowSource, row_source
from quantkit.kernels.cpu.convert import f32_to_bf16
from quantkit.kernels.cpu.nvfp4 import amax_f32, nvfp4_global_divisor
from quantkit.kernels.cpu.rows import (
    RowParts,
    codes_shape,
    global_scale,
    needs_tails,
    quantize_rows,
    scale_dtype,
    scale_shape,
)
from quantkit.kernels.cpu.tails import Moments, add_moments, tail_weights
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import BLOCK, QuantScheme
from quantkit.quantize.blocks import blocks_of, chunk_rows, chunks_of
from quantkit.quantize.int4_writer import Int4Writer
from quantkit.quantize.passing import INPUT_SCALES, pass_through, stored_input_scale
from quantkit.quantize.plan import Matrix, Out, Step, Task
from quantkit.quantize.target import Target


class Measured(NamedTuple):
    """Sum over a layer of (w - w_hat)^2 and of w^2, w_hat being what the written bytes decode to."""

    sq_err: float
    sq_norm: float


class Seen(NamedTuple):
    """What a first pass over a matrix found: its largest absolute weight, moments of its columns for `tails`."""

    amax: float
    moments: Moments | None


def run_step(step: Step, target: Target) -> dict[str, Measured]:
    """Carry out the tasks of a step; returns what was measured of each quantised layer."""
    quantized = [t for t in step.tasks if t.fate == "quantize"]
    sources = {t.name: _rows(t, target, target.buffers.part(i)) for i, t in enumerate(quantized)}
    seen: dict[str, Seen] = {}
    shared: float | None = None
    whole = False
    if any(t.scheme is not None and (t.scheme.shares_scale or needs_tails(t.method)) for t in quantized):
        # what is known of all rows comes first: what fits is read once and held, what does not is read twice
        whole = sum(t.weight.nbytes * t.share for t in quantized) <= target.memory // 2
        seen = {t.name: _first_pass(t, sources[t.name], whole, target) for t in quantized}
        shared = max(s.amax for s in seen.values())
    # matrices of a step share their inputs; in the order of names v is the last of q, k, v, and up of gate and up
    moments = [m for name in sorted(seen) if (m := seen[name].moments) is not None]
    h_I = tail_weights(moments) if moments else None
    measured = {}
    for task in step.tasks:
        if task.fate == "quantize":
            own_I = h_I if needs_tails(task.method) else None
            measured[task.name] = _quantize(task, sources[task.name], whole, shared, own_I, target)
        elif task.fate == "decode":
            _decode(task, target)
        else:
            pass_through(task, target)
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


def _rows(task: Task, target: Target, buffers: Buffers) -> RowSource:
    assert task.matrix is not None
    matrix = task.matrix
    expert = matrix.expert if matrix.transposed else None
    at = (matrix.rows, matrix.inputs, matrix.first_row, expert)
    return row_source(matrix.weight, *at, target.reader, buffers)


def _blocks(matrix: Matrix, whole: bool, target: Target) -> Iterable[tuple[int, int]]:
    return [(0, matrix.rows)] if whole else blocks_of(matrix.rows, matrix.inputs, target.memory)


def _first_pass(task: Task, source: RowSource, whole: bool, target: Target) -> Seen:
    """Look at every row of a layer; `whole`: all of it is loaded, and stays."""
    assert task.matrix is not None
    matrix = task.matrix
    w_RI = target.buffers.take("w", (chunk_rows(matrix.inputs, 1), matrix.inputs), np.float32)
    moments = Moments.none(matrix.rows, matrix.inputs) if needs_tails(task.method) else None
    amax = 0.0
    for first, rows in _blocks(matrix, whole, target):
        source.load(first, rows)
        for at, n in chunks_of(rows, matrix.inputs, 1):
            source.decode(first + at, n, w_RI[:n])
            found = float(amax_f32(w_RI[:n]))
            if not np.isfinite(found):
                bad = int(np.argmin(np.isfinite(w_RI[:n]).all(axis=1)))
                raise _not_finite(task, first + at + bad)
            amax = max(amax, found)
            if moments is not None:
                add_moments(w_RI[:n], moments.square_I, moments.fourth_I)
    return Seen(amax, moments)


def _quantize(
    task: Task, source: RowSource, whole: bool, shared: float | None, h_I: NDArray[np.float32] | None, target: Target
) -> Measured:
    assert task.matrix is not None
    assert task.scheme is not None
    matrix, scheme = task.matrix, task.scheme
    outs = {out.kind: out for out in task.outs}
    multiple = BLOCK if scheme.granularity == "block" else 1
    w_RI = target.buffers.take("w", (chunk_rows(matrix.inputs, multiple), matrix.inputs), np.float32)
    sq_err_R = np.empty(matrix.rows, np.float64)  # summed over the whole matrix at once: independent of the blocks
    sq_norm_R = np.empty(matrix.rows, np.float64)
    int4 = Int4Writer(outs, matrix.rows, matrix.inputs, target) if scheme.element == "int4" else None
    for first, rows in _blocks(matrix, whole, target):
        if not whole:
            source.load(first, rows)
        block = _row_parts(scheme, rows, matrix.inputs, target.buffers)
        for at, n in chunks_of(rows, matrix.inputs, multiple):
            source.decode(first + at, n, w_RI[:n])
            part = share_of(block, at, n, multiple, sq_err_R[first + at :], sq_norm_R[first + at :])
            bad = quantize_rows(w_RI[:n], scheme, task.method, shared, target.half, part, h_I)
            if bad >= 0:
                raise _not_finite(task, first + at + bad)
        if int4 is not None:
            int4.block(first, block.codes, block.scale, block.zero)
            continue
        target.write(outs["codes"], block.codes, first * (outs["codes"].nbytes // matrix.rows))
        if "scale" in outs:
            scales = block.scale
            target.write(outs["scale"], scales, first // multiple * (scales.nbytes // scales.shape[0]))
    if int4 is not None:
        int4.finish()
    _write_constants(outs, task, shared, target)
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


def _write_constants(outs: dict[str, Out], task: Task, shared: float | None, target: Target) -> None:
    """The tensors of a layer that are one small value."""
    assert task.scheme is not None
    if "divisor" in outs:
        target.write(outs["divisor"], np.array([nvfp4_global_divisor(shared or 0.0)], np.float32))
    for kind in ("multiplier", "tensor_scale"):
        if kind in outs:
            target.write(outs[kind], np.array([global_scale(task.scheme, shared or 0.0)], np.float32))
    for kind in INPUT_SCALES & outs.keys():
        target.write(outs[kind], stored_input_scale(task, kind))


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
    source = _rows(task, target, target.buffers)
    source.load(0, matrix.rows)
    w_OI = np.empty((matrix.rows, matrix.inputs), np.float32)
    source.decode(0, matrix.rows, w_OI)
    if not np.isfinite(amax_f32(w_OI)):
        raise _not_finite(task, int(np.argmin(np.isfinite(w_OI).all(axis=1))))
    out_IO = np.empty((matrix.inputs, matrix.rows), np.uint16)
    f32_to_bf16(np.ascontiguousarray(w_OI.T), out_IO)
    target.write(task.outs[0], out_IO)
