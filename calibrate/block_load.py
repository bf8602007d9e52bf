"""Reads the tensors of one block, and the experts of a block that is larger than the budget as they are needed.

A parameter lives on the meta device until its block is loaded and goes back there afterwards. Of a block whose float
weights exceed the budget, as many experts as fit stay in memory; the others are read again when they are needed, and
those that were overwritten meanwhile are kept in a scratch file.

Letters: E experts, O outputs (rows), I inputs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantkit.calibrate.block_names import Target
from quantkit.calibrate.weights import Weights


@dataclass(frozen=True, slots=True)
class Loader:
    """Values of targets in the dtype and on the device of the run; buffers and what `keep` names stay float32."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    keep: tuple[str, ...] = ()

    def dtype_of(self, target: Target, like: torch.Tensor) -> torch.dtype:
        """Buffers keep their own dtype, `keep` is what transformers never lowers."""
        if any(f".{k}." in f".{target.name}." for k in self.keep):
            return torch.float32
        return self.dtype if isinstance(like, torch.nn.Parameter) else like.dtype

    def value(self, target: Target, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor as the model holds it."""
        if not target.stacked and len(target.shape) != 3:
            return self.weights.read(target.sources[0][0]).to(self.device, dtype)
        out = torch.empty(target.shape, dtype=dtype, device=self.device)
        for e in range(target.shape[0]):
            self._expert_into(target, e, out[e])
        return out

    def expert(self, target: Target, e: int, dtype: torch.dtype) -> torch.Tensor:
        """Matrix `e` of a 3-D target as the model holds it: [O, I], or [I, O] in a transposed family."""
        out = torch.empty(target.shape[1:], dtype=dtype, device=self.device)
        self._expert_into(target, e, out)
        return out

    def _expert_into(self, target: Target, e: int, out: torch.Tensor) -> None:
        if not target.stacked:
            matrix = self.weights.read_expert(target.sources[0][0], e)
            out.copy_(matrix.T if target.transposed else matrix)
            return
        row = 0
        for group in target.sources:
            matrix = self.weights.read(group[e])
            out[row : row + matrix.shape[0]].copy_(matrix)
            row += matrix.shape[0]


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a checkpoint module lives: rows of a parameter, or of matrix `expert` of one. `flip`: stored [I, O]."""

    target: Target
    expert: int | None = None
    first: int = 0
    rows: int | None = None
    flip: bool = False

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """A view [O, I] of this piece in its parameter's tensor, or in its expert's matrix."""
        view = matrix.T if self.flip else matrix
        return view if self.rows is None else view[self.first : self.first + self.rows]


def pieces_of(target: Target, weights: Weights, *, experts: bool, flip: bool) -> dict[str, Piece]:
    """Checkpoint modules (without `.weight`) in one parameter; matrix E of fused experts `X` is the module `X.E`."""
    if not target.stacked:
        module = target.sources[0][0].removesuffix(".weight")
        if not experts or len(target.shape) != 3:
            return {module: Piece(target)}
        return {f"{module}.{e}": Piece(target, e, flip=flip) for e in range(target.shape[0])}
    found: dict[str, Piece] = {}
    first = 0
    for group in target.sources:
        rows = weights.shape(group[0])[0]
        found |= {n.removesuffix(".weight"): Piece(target, e, first, rows) for e, n in enumerate(group)}
        first += rows
    return found


class Experts:
    """The matrices of the routed experts of one block that does not fit: some are held, the others read when needed.

    room  how many experts fit at once. While batches run one by one, all but one of them are the first experts, which
          stay, and the last place is for the one in use; `hold` gives every place to a wave of them.
    """

    def __init__(self, loader: Loader, targets: Mapping[str, Target], memory: int, folder: Path | None) -> None:
        self._loader, self._targets, self._folder = loader, targets, folder
        size = torch.empty(0, dtype=loader.dtype).element_size()
        each = sum(math.prod(t.shape[1:]) for t in targets.values()) * size
        self.count = next(iter(targets.values())).shape[0]
        self.room = min(max(memory // each, 1), self.count)
        self.held = range(self.room if self.room == self.count else self.room - 1)
        self._changed: set[tuple[str, int]] = set()  # of the held ones: not yet in the scratch file
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._scratch: dict[tuple[str, int], int] = {}
        self._file: Any = None

    def matrix(self, name: str, e: int) -> torch.Tensor:
        """Matrix `e` of the parameter `name`, as the model would hold it."""
        key = (name, e)
        if key in self._kept:
            return self._kept[key]
        if key in self._scratch:
            found = self._read(key)
        else:
            found = self._loader.expert(self._targets[name], e, self._loader.dtype)
        if e in self.held:
            self._kept[key] = found
        return found

    def hold(self, experts: range) -> None:
        """Keep these experts from now on, and no others."""
        self.held = experts
        for key in [k for k in self._kept if k[1] not in experts]:
            matrix = self._kept.pop(key)
            if key in self._changed:
                self._changed.remove(key)
                self._write(key, matrix)

    def overwrite(self, name: str, e: int, matrix: torch.Tensor) -> None:
        """What `matrix` returns from now on."""
        if e in self.held:
            self._kept[name, e] = matrix
            self._changed.add((name, e))
        else:
            self._write((name, e), matrix)

    def close(self) -> None:
        """Free the resident experts and the scratch file."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, key: tuple[str, int], matrix: torch.Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (closed with the block)
        at = self._scratch.get(key)
        if at is None:
            at = self._scratch[key] = self._file.seek(0, 2)
        self._file.seek(at)
        self._file.write(matrix.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())

    def _read(self, key: tuple[str, int]) -> torch.Tensor:
        shape = self._targets[key[0]].shape[1:]
        raw = np.empty(math.prod(shape) * torch.empty(0, dtype=self._loader.dtype).element_size(), np.uint8)
        self._file.seek(self._scratch[key])
        self._file.readinto(raw)
        return torch.from_numpy(raw).view(self._loader.dtype).reshape(shape).to(self._loader.device)
