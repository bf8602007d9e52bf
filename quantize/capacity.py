"""Sizes of a plan and of a checkpoint, as plain data: bytes, bits per weight, memory, disk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from quantkit.export.checkpoint import Checkpoint, quantization_config
from quantkit.export.sources.detect import Weight, weights_of
from quantkit.quantize.plan import Plan, Step
from quantkit.quantize.roles import roles_of

BASE_MEMORY = 220_000_000  # interpreter, numpy and compiled kernels, measured
PER_TENSOR = 1_200  # bytes that one tensor of source and plan takes in memory, measured on 119,000 of them


def _parameters(weights: Iterable[Weight]) -> int:
    return sum(math.prod(w.shape) for w in weights)


def step_bytes(step: Step) -> int:
    """Source bytes a step reads."""
    return sum(int(t.weight.nbytes * t.share) for t in step.tasks)


def fates_of(plan: Plan) -> list[dict[str, Any]]:
    """One row for each role and fate."""
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for task in plan.tasks:
        scheme = task.scheme.name if task.scheme else ""
        key = (task.role, task.fate, scheme, task.method)
        row = rows.setdefault(
            key,
            {"role": task.role, "fate": task.fate, "scheme": scheme, "method": task.method, "layers": 0,
             "parameters": 0, "bytes_in": 0, "bytes_out": 0, "reason": task.reason},
        )  # fmt: skip
        row["layers"] += 1
        row["parameters"] += int(math.prod(task.weight.shape) * task.share)
        row["bytes_in"] += int(task.weight.nbytes * task.share)
        row["bytes_out"] += sum(o.nbytes for o in task.outs)
    return sorted(rows.values(), key=lambda r: -r["bytes_in"])


def plan_facts(plan: Plan, jobs: int, memory: int) -> dict[str, Any]:
    """The plan as one JSON object: `quantkit plan --json`."""
    tasks = plan.tasks
    parameters = _parameters({id(t.weight): t.weight for t in tasks}.values())
    tensors = len(plan.source.tensors) + sum(len(s.slots) for s in plan.shards)
    return {
        "source": str(plan.source.folder),
        "recipe": plan.recipe.name,
        "format": plan.format,
        "family": plan.family.name,
        "known_family": plan.family.known,
        "assumptions": list(plan.family.assumptions),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "disk_bytes": plan.file_bytes,
        "tensors_in": len(plan.source.tensors),
        "tensors_out": sum(len(s.slots) for s in plan.shards),
        "shards": len(plan.shards),
        "parameters": parameters,
        "bits_per_weight": 8 * plan.bytes_out / parameters if parameters else 0.0,
        "memory_bytes": BASE_MEMORY + PER_TENSOR * tensors + memory,
        "jobs": jobs,
        "tp": {str(n): why or "loads" for n, why in plan.tp.items()},
        "fates": fates_of(plan),
        "steps": len(plan.steps),
    }


def checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint is: `quantkit inspect --json`."""
    weights = weights_of(checkpoint)
    placed, family = roles_of({n: w.shape for n, w in weights.items()}, checkpoint.config)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, weight in weights.items():
        stored = weight.scheme.name if weight.scheme else weight.encoding
        if weight.encoding == "plain":
            stored = weight.parts["codes"].dtype
        row = rows.setdefault(
            (placed[name].role, stored),
            {"role": placed[name].role, "stored": stored, "tensors": 0, "parameters": 0, "bytes": 0, "example": name},
        )
        row["tensors"] += len(weight.parts) + len(weight.extra)
        row["parameters"] += math.prod(weight.shape)
        row["bytes"] += weight.nbytes
    quant = quantization_config(checkpoint.config)
    parameters = _parameters(weights.values())
    return {
        "folder": str(checkpoint.folder),
        "family": family.name,
        "known_family": family.known,
        "assumptions": list(family.assumptions),
        "architectures": checkpoint.config.get("architectures") or [],
        "quant_method": quant.get("quant_method"),
        "quant_format": quant.get("format") or quant.get("quant_algo"),
        "bytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "files": len(checkpoint.files),
        "parameters": parameters,
        "bits_per_weight": 8 * checkpoint.nbytes / parameters if parameters else 0.0,
        "stored": sorted(rows.values(), key=lambda r: -r["bytes"]),
    }
