"""Where the steps of a thread read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import write_all
from quantkit.export.sources.rows import Buffers
from quantkit.quantize.plan import Out

# numpy's dtypes of what is written; numpy has no bfloat16: its bits are handled as integers
NUMPY = {"BF16": np.uint16, "F16": np.uint16, "F32": np.float32, "I32": np.int32, "I64": np.int64}


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

    def write_columns(self, out: Out, data_LC: NDArray[Any], first: int) -> None:
        """Write columns `first` and on of an output tensor of L lines, of which `data_LC` holds all."""
        line = out.nbytes // len(data_LC)
        if data_LC.nbytes == out.nbytes:
            self.write(out, data_LC)
            return
        for at, data_C in enumerate(data_LC):
            self.write(out, data_C, at * line + first * data_LC.itemsize)
