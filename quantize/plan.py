"""The plan: one fate for every tensor of the source, and the place of every byte of the output, from headers alone.

    keep      bytes as published                      decode    a quantised weight becomes BF16
    pass      already in the target scheme: codes and scales are copied bit for bit, names follow the target format
    quantize  decode, search scales, round, pack      drop      left out, by a rule that says why

The plan is data and it is complete: printing, checking, sizing, writing and resuming all read this one object.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.export.checkpoint import Checkpoint
from quantkit.export.formats import Layer, Layout
from quantkit.export.safetensors_file import Slot
from quantkit.export.sources.detect import Weight
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.recipe import InputScale, Recipe
from quantkit.quantize.roles import Family, Placed

Fate = Literal["keep", "pass", "decode", "quantize", "drop"]
VERSION = 2  # raised when the same recipe would give other bytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, inputs] inside a source weight: all of it, or one expert's share of a fused tensor.

    first_row   its first row when the weight's leading axes are flattened
    expert      index along the experts' axis, for a transposed weight
    transposed  stored as [inputs, rows]
    """

    weight: Weight
    rows: int
    inputs: int
    first_row: int = 0
    expert: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Out:
    """Bytes that a task writes: a tensor of the output, or its share of a fused one, from byte `start` of the file."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    start: int
    nbytes: int
    layout: Layout = "rows"


@dataclass(frozen=True, slots=True)
class Task:
    """What happens to one tensor, or to one matrix of a linear layer.

    input_scale  the fixed scale of its inputs, or the rule by which a calibration run has yet to measure one
    """

    name: str
    fate: Fate
    role: str
    weight: Weight
    matrix: Matrix | None = None
    scheme: QuantScheme | None = None
    method: str = ""
    input_scale: float | InputScale | None = None
    reason: str = ""
    outs: tuple[Out, ...] = ()

    @property
    def module(self) -> str:
        """The linear layer that is written."""
        return self.name if self.fate == "quantize" else self.weight.module

    @property
    def share(self) -> float:
        """The part of the source weight that this task stands for: 1, or less for one matrix of a fused tensor."""
        if self.matrix is None:
            return 1.0
        return self.matrix.rows * self.matrix.inputs / math.prod(self.weight.shape)


@dataclass(frozen=True, slots=True)
class Step:
    """The tasks that share a scale or tail weights (q, k, v of a layer, gate and up of an expert), or a single task."""

    name: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the output: its finished header, and the slot of every tensor."""

    name: str
    header: bytes
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything known before the first weight is read."""

    source: Checkpoint
    recipe: Recipe
    format: str  # or "as published" when nothing but copies is asked for
    family: Family
    placed: Mapping[str, Placed]
    steps: tuple[Step, ...]
    shards: tuple[Shard, ...]
    layers: tuple[Layer, ...]
    ignore: tuple[str, ...]
    files: Mapping[str, Any]  # JSON files to write: config.json as a whole, and those of the format
    half: bool  # scales of the model's dtype are fp16, not bf16
    tp: Mapping[int, str] = field(default_factory=dict)  # size -> "" when it loads, else why not
    calibration: Mapping[str, Any] = field(default_factory=dict)  # text, versions and digests of the run it comes from

    @property
    def tasks(self) -> list[Task]:
        """All tasks in the order of the output."""
        return [t for s in self.steps for t in s.tasks]

    @property
    def bytes_in(self) -> int:
        """Tensor bytes of the source."""
        return self.source.nbytes

    @property
    def bytes_out(self) -> int:
        """Tensor bytes of the output: `total_size` of its index."""
        return sum(slot.nbytes for shard in self.shards for slot in shard.slots)

    @property
    def file_bytes(self) -> int:
        """Bytes of the output's shards, headers counted: what the disk has to hold."""
        return sum(shard.size for shard in self.shards)

    @property
    def index(self) -> dict[str, Any]:
        """Content of `model.safetensors.index.json`."""
        weight_map = {slot.name: shard.name for shard in self.shards for slot in shard.slots}
        return {"metadata": {"total_size": self.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}

    def identity(self) -> dict[str, str]:
        """What decides the bytes of the output, each as text or a digest: equal identities give equal bytes."""

        def digest(data: bytes) -> str:
            return hashlib.sha256(data).hexdigest()

        source = "\n".join(
            f"{t.name} {t.dtype} {t.shape} {t.file.name} {t.start}" for t in self.source.tensors.values()
        ).encode()
        run = {"calibration": digest(json.dumps(self.calibration, sort_keys=True).encode())} if self.calibration else {}
        work = "\n".join(
            f"{t.name} {t.fate} {t.scheme.name if t.scheme else ''} {t.method} {t.input_scale}" for t in self.tasks
        ).encode()
        return {
            "plan version": str(VERSION),
            "source tensors": digest(source),
            "source config": digest(json.dumps(self.source.config, sort_keys=True).encode()),
            "recipe": self.recipe.model_dump_json(by_alias=True, exclude_none=True),
            "format": self.format,
            "methods": digest(work),
            "layout of the shards": digest(b"".join(s.name.encode() + s.header for s in self.shards)),
            "configuration": digest(json.dumps(self.files, sort_keys=True).encode()),
            **run,
        }
