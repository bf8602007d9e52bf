"""Tensors whose numbers do not change: copied byte for byte, renamed, or laid out anew."""

from __future__ import annotations

import errno
import os

import numpy as np
from numpy.typing import NDArray
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.rows import KMajorRows
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.blocks import blocks_of
from quantkit.quantize.plan import Out, Task
from quantkit.quantize.target import NUMPY, Target

COPY_BYTES = 8 << 20
INPUT_SCALES = frozenset({"input_scale", "input_divisor"})  # of activations: numbers of the plan, not of the source


def pass_through(task: Task, target: Target) -> None:
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
        elif out.kind in INPUT_SCALES:
            target.write(out, stored_input_scale(task, out.kind))
        elif out.kind == "shape":
            target.write(out, np.array(task.weight.shape, NUMPY[out.dtype]))
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
