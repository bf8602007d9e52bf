"""What a twin reads: configuration and headers, of a checkpoint or of a plan, and a few single numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import INDEX, NESTED, Checkpoint, Reader, quantization_config, read_json, text_config
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.rows import scale_values


class Header(Protocol):
    """Of one tensor: the dtype by its safetensors name, and the shape."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Files:
    """`nested` is hf_quant_config.json; without a `reader` (a plan) no value is known. `stray`: files of no index."""

    config: Mapping[str, Any]
    nested: Mapping[str, Any] | None
    headers: Mapping[str, Header]
    folder: Path | None = None
    stray: tuple[str, ...] = ()
    reader: Reader | None = field(default=None, compare=False)

    @property
    def quant(self) -> Mapping[str, Any]:
        """`quantization_config` of config.json; that of hf_quant_config.json where config.json has none."""
        found = quantization_config(self.config)
        if found or self.nested is None:
            return found
        inner: Mapping[str, Any] = self.nested.get("quantization") or {}
        return {"quant_method": "modelopt", **inner}

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        return text_config(self.config)

    def _start(self, name: str, size: int) -> NDArray[np.uint8] | None:
        """The first bytes of a tensor; None where there is nothing to read."""
        info = self.headers.get(name)
        if self.reader is None or not isinstance(info, TensorInfo) or info.nbytes < size:
            return None
        data = np.empty(size, np.uint8)
        self.reader.read_into(info, 0, data)
        return data

    def number(self, name: str) -> float | None:
        """The first number of a float tensor; None where it is not known."""
        info = self.headers.get(name)
        size = {"F32": 4, "BF16": 2, "F16": 2}.get(info.dtype) if isinstance(info, TensorInfo) else None
        data = self._start(name, size) if size else None
        return float(scale_values(info, data)[0]) if data is not None and isinstance(info, TensorInfo) else None

    def word(self, name: str) -> int | None:
        """The first 32-bit word of a tensor, unsigned; None where it is not known."""
        data = self._start(name, 4)
        return None if data is None else int.from_bytes(data.tobytes(), "little")


def files_of(checkpoint: Checkpoint, reader: Reader) -> Files:
    """Those of an opened checkpoint."""
    folder = checkpoint.folder
    nested = folder / NESTED
    # with an index engines read only the files it names
    stray = [] if (folder / INDEX).is_file() else [p for p in folder.glob("*.safetensors") if p not in checkpoint.files]
    return Files(
        checkpoint.config,
        read_json(nested) if nested.is_file() else None,
        checkpoint.tensors,
        folder,
        tuple(sorted(p.name for p in stray)),
        reader,
    )
