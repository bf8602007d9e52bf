"""Tensors whose numbers do not change: copied byte for byte, renamed, or laid out anew."""

from __future__ import annotations

import errno
import os

import numpy as np
from numpy.typing import NDArray
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.int4_rows import ENCODINGS, int4_codes, int4_scales, int4_zeros
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.blocks import blocks_of
from quantkit.quantize.int4_writer import Int4Writer
from quantkit.quantize.plan import Out, Task
from quantkit.quantize.target import Target

COPY_BYTES = 8 << 20
INPUT_SCALES = frozenset({"input_scale", "input_divisor"})  # of activations: numbers of the plan, not of the source


def pass_through(task: Task, target: Target) -> None:
    """Bytes as published, under the names of the plan; NVFP4's global scale changes between divisor and multiplier."""
    layout = next((out.layout for out in task.outs if out.kind == "codes"), "rows")
    if task.fate == "pass" and (layout != "rows" or task.weight.encoding in ENCODINGS[1:]):
        _lay_out_anew(task, target)
        return
    named = dict(task.weight.parts) | {f"extra{i}": t for i, t in enumerate(task.weight.extra)}
    for out in task.outs:
        source = named.get(out.kind)
        if source is None and out.kind == "tensor_scale":
            source = named.get("scale")
        if source is not None and source.nbytes == out.nbytes:
            copy_tensor(source, out, target)
        elif out.kind in INPUT_SCALES:
            target.write(out, stored_input_scale(task, out.kind))
        elif out.kind in ("divisor", "multiplier"):
            other = named["multiplier" if out.kind == "divisor" else "divisor"]
            value = target.reader.read(other).view(np.float32)
            target.write(out, (np.float32(1) / value).astype(np.float32))
        else:
            raise QuantkitError("internal: no source for a tensor of the plan", tensor=out.name, value=out.kind)


def stored_input_scale(task: Task, kind: str) -> NDArray[np.float32]:
    """The scale of a layer's activations as a tensor: a multiplier or, as `input_divisor`, its reciprocal."""
    assert isinstance(task.input_scale, float), task.name  # a rule was refused before (`run.py`)
    value = np.array([task.input_scale], np.float32)
    return value if kind == "input_scale" else np.float32(1) / value


def _lay_out_anew(task: Task, target: Target) -> None:
    """INT4 codes, scales and zero points in the layout of another format: the same numbers."""
    weight = task.weight
    outputs, inputs = weight.shape
    scale_OG, zero_OG = int4_scales(weight, target.reader), int4_zeros(weight, target.reader)
    writer = Int4Writer({out.kind: out for out in task.outs}, outputs, inputs, target)
    for first, rows in blocks_of(outputs, inputs, target.memory):
        codes_RB = int4_codes(weight, first, rows, target.reader)
        lines = slice(first, first + rows)
        writer.block(first, codes_RB, scale_OG[lines], None if zero_OG is None else zero_OG[lines])
    writer.finish()


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
