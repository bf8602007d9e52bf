"""A checkpoint as it will be: tensors that are copied, renamed, rescaled or new, and the changes to report.

A `TensorInfo` of the draft points at the bytes of the old file; its name and dtype are those of the new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.rows import scale_values
from quantkit.kernels.errors import QuantkitError

NEEDS_SOURCE = "make the checkpoint again from its source: nothing here says what is missing"


@dataclass(frozen=True, slots=True)
class Change:
    """What was mended, and what it costs: the relative error ||w - w'|| / ||w|| of the layers; None: nothing."""

    what: str
    error: float | None = None


@dataclass(slots=True)
class Draft:
    """`fresh` has the float32 numbers of new and replaced scales; `factors` what E4M3 block scales are multiplied by.

    files    JSON files to write;  left_out  files of the folder that are not taken along
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    changes: list[Change]
    fresh: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def checkpoint(self, folder: Path | None = None) -> Checkpoint:
        """The draft as a checkpoint, for what reads one; numbers in `fresh` and `factors` are not in it."""
        files = tuple(dict.fromkeys(t.file for t in self.tensors.values()))
        return Checkpoint(folder or self.folder, self.config, self.tensors, files, ())

    def number(self, name: str, reader: Reader) -> float:
        """The single number of a scale tensor."""
        if name in self.fresh:
            return float(self.fresh[name][0])
        info = self.tensors[name]
        values = scale_values(info, reader.read(info))
        if values.size != 1 or not np.isfinite(values[0]) or not values[0] > 0:
            raise QuantkitError(
                "the scale is no positive number", file=info.file, tensor=name, value=values[:4].tolist(),
                hint=NEEDS_SOURCE,
            )  # fmt: skip
        return float(values[0])

    def set_number(self, name: str, value: float, like: TensorInfo) -> None:
        """Give a tensor a number; a new one goes into the file of `like`, as float32 [1]."""
        old = self.tensors.get(name)
        shape = old.shape if old is not None and old.dtype == "F32" else (1,)
        self.tensors[name] = TensorInfo(name, "F32", shape, like.file, 0, 4)
        self.fresh[name] = np.array([value], np.float32)
