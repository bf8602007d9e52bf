"""The weights of a checkpoint as torch tensors, decoded on the fly: what a calibration or evaluation run loads.

Satisfies the protocol of `calibrate/weights.py`. One tensor at a time is decoded, from any encoding of
`export/sources`, so a source in FP8 or INT4 and a checkpoint that we wrote are run by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.safetensors_file import nbytes_of
from quantkit.export.sources.detect import Weight, weights_of
from quantkit.export.sources.rows import Buffers, row_source
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.blocks import blocks_of, chunks_of

MEMORY = 64 << 20  # bytes of codes that are read at a time
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class DecodedWeights:
    """Decoded tensors by logical name; safe to use from several threads."""

    def __init__(self, checkpoint: Checkpoint, reader: Reader) -> None:
        self._weights = weights_of(checkpoint)
        self._reader = reader

    def names(self) -> Iterable[str]:
        """`X.weight` for a linear layer however it is stored, else the tensor's own name."""
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._weights[name].shape

    def quantized(self, name: str) -> bool:
        """Whether the bytes are codes."""
        return self._weights[name].encoding != "plain"

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own memory: float32 when it was quantised, else in the dtype it is stored in."""
        weight = self._weights[name]
        if weight.encoding == "plain":
            return self._plain(weight, 0, weight.shape)
        rows = math.prod(weight.shape[:-1])
        return self._rows(weight, 0, rows).reshape(weight.shape)

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        """Matrix `expert` of a fused tensor [E, ., .]: the rest is not read."""
        weight = self._weights[name]
        experts, rows, _ = weight.shape
        if not 0 <= expert < experts:
            raise QuantkitError("no such expert", tensor=name, value=expert, allowed=f"0 to {experts - 1}")
        if weight.encoding == "plain":
            return self._plain(weight, expert, weight.shape[1:])
        return self._rows(weight, expert * rows, rows)

    def _rows(self, weight: Weight, first_row: int, rows: int) -> torch.Tensor:
        inputs = weight.shape[-1]
        w_RI = np.empty((rows, inputs), np.float32)
        source = row_source(weight, rows, inputs, first_row, None, self._reader, Buffers())
        for first, n_rows in blocks_of(rows, inputs, MEMORY):
            source.load(first, n_rows)
            for at, n in chunks_of(n_rows, inputs, 1):
                source.decode(first + at, n, w_RI[first + at : first + at + n])
        return torch.from_numpy(w_RI)

    def _plain(self, weight: Weight, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Part number `index`, of this shape, of a stored tensor."""
        info = weight.parts["codes"]
        if info.dtype not in _DTYPES:
            raise QuantkitError(
                "a tensor of this dtype cannot be run", file=info.file, tensor=info.name, value=info.dtype,
                allowed=", ".join(_DTYPES),
            )  # fmt: skip
        raw = np.empty(nbytes_of(info.dtype, shape), np.uint8)
        if raw.nbytes:
            self._reader.read_into(info, index * raw.nbytes, raw)
        return torch.from_numpy(raw).view(_DTYPES[info.dtype]).reshape(shape)
