"""Choose the codes of one step's layers from what was seen of their inputs; lay them out as the run folder holds them.

Letters: O outputs (rows), I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from quantkit.calibrate.block import Block
from quantkit.calibrate.stats import Hessian
from quantkit.export import compressed_tensors
from quantkit.export.formats import Part
from quantkit.kernels.cpu.nvfp4 import nvfp4_global_divisor
from quantkit.kernels.cpu.rows import RowParts
from quantkit.kernels.packed import pack_zero_points
from quantkit.kernels.scheme import QuantScheme
from quantkit.quantize.methods import from_amax, gptq
from quantkit.quantize.methods.modelopt import Found
from quantkit.quantize.plan import Plan, Step, Task
from quantkit.quantize.recipe_method import CALIBRATED, Method
from quantkit.quantize.run_folder import Stored
from torch import Tensor

_UNCLIPPED = ("q", "k", "qkv", "q_a")  # errors of queries and keys enter a softmax: what AWQ leaves out

Factors = dict[gptq.GptqOptions, gptq.Factor]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Layers of one block: tensors to store, and by layer what is to be told of it and its unpacked weight."""

    tensors: dict[str, Stored]
    facts: dict[str, Any]
    weights: dict[str, Tensor]

    def add(self, other: Chosen) -> None:
        """Take in other layers of the block."""
        self.tensors.update(other.tensors)
        self.facts.update(other.facts)
        self.weights.update(other.weights)


def choose_codes(
    step: Step, block: Block, hessian: Hessian, plan: Plan, methods: dict[str, Method], factors: Factors,
    foreign: Mapping[str, Found],
) -> Chosen:  # fmt: skip
    """The codes of the layers of one step; the block is left as it is.

    hessian  of the input that all layers of the step have
    factors  of that Hessian so far, by the options they were made with: siblings share one
    foreign  what ModelOpt found for layers whose method it is
    """
    tasks = [t for t in step.tasks if t.fate == "quantize" and t.method in CALIBRATED and t.scheme is not None]
    weights = {t.name: block.weight(t.name).contiguous() for t in tasks}
    amax = max(float(w.abs().max()) for w in weights.values())
    stored: dict[str, Stored] = {}
    facts: dict[str, Any] = {}
    unpacked: dict[str, Tensor] = {}
    for task in tasks:
        assert task.scheme is not None
        w_OI = weights[task.name]
        if task.name in foreign:
            theirs = foreign[task.name]
            found = from_amax.encode(
                w_OI, theirs.w_OI, theirs.amax, task.scheme, hessian.h_II, half=plan.half, largest=amax
            )
        else:
            options = _options(methods[task.name], task.role)
            if options not in factors:
                factors[options] = gptq.factorise(hessian.h_II, options)
            found = gptq.quantize(w_OI, factors[options], task.scheme, half=plan.half, amax=amax, options=options)
        unpacked[task.name] = found.w_hat_OI
        stored |= layer_tensors(task.name, task.scheme, tuple(w_OI.shape), found.parts, amax, half=plan.half)
        facts[task.name] = _facts(task, methods[task.name], hessian, found)
    return Chosen(stored, facts, unpacked)


def _options(method: Method, role: str) -> gptq.GptqOptions:
    if method.name == "awq":
        clip = method.clip and role.rpartition(".")[2] not in _UNCLIPPED
        rules = gptq.GptqOptions().rules
        return gptq.GptqOptions(compensate=method.gptq, rules=(*rules, "clip") if clip else rules)
    return gptq.GptqOptions(damp=method.damp, act_order=method.act_order == "static")


def _facts(task: Task, method: Method, hessian: Hessian, found: gptq.Quantized) -> dict[str, Any]:
    """What the run folder says of one layer. Losses are relative to tr(W H W^T)."""
    norm = found.norm or 1.0
    return {
        "scheme": task.scheme.name if task.scheme else "",
        "role": task.role,
        "method": str(method) if found.fallback is None else "search",
        "tokens": hessian.tokens,
        "dropped_tokens": hessian.dropped,
        "coverage": hessian.coverage,
        "loss": found.loss / norm,
        "loss_data_free": found.loss_plain / norm,
        "damp": found.damp,
        "fallback": found.fallback,
        "rows_data_free": found.kept_rows,
        "saturated": found.saturated,
        "dead_inputs": found.dead,
    }


def layer_tensors(
    module: str, scheme: QuantScheme, shape: tuple[int, ...], parts: RowParts, amax: float, *, half: bool
) -> dict[str, Stored]:
    """The tensors of one layer under compressed-tensors names, from codes and scales as the kernels lay them out."""
    rows, inputs = shape
    made = compressed_tensors.parts(scheme, rows, inputs, half=half, input_scale=False)
    return {f"{module}.{p.name}": (p.dtype, p.shape, _content(p, shape, parts, amax)) for p in made}


def fused_tensors(stored: dict[str, Stored], steps: Sequence[Step]) -> dict[str, Stored]:
    """Tensors of a block's layers, those of experts that the source keeps in one tensor X as `X_blocks`, `X_scales`."""
    found = dict(stored)
    experts: dict[str, list[Task]] = {}
    for task in (t for s in steps for t in s.tasks):
        if len(task.weight.shape) == 3:
            experts.setdefault(task.weight.name, []).append(task)
    for name, tasks in experts.items():
        codes = np.stack([found.pop(f"{t.name}.weight_packed")[2] for t in tasks])
        scales = np.stack([found.pop(f"{t.name}.weight_scale")[2] for t in tasks])
        blocks = codes.reshape(*scales.shape, -1)
        found |= {f"{name}_blocks": ("U8", blocks.shape, blocks), f"{name}_scales": ("U8", scales.shape, scales)}
    return found


def _content(part: Part, shape: tuple[int, ...], parts: RowParts, amax: float) -> np.ndarray[Any, Any]:
    if part.kind == "codes":
        return parts.codes
    if part.kind == "scale":
        return parts.scale
    if part.kind == "zero":
        assert parts.zero is not None
        return pack_zero_points(parts.zero)
    if part.kind == "divisor":
        return np.array([nvfp4_global_divisor(amax)], np.float32)
    if part.kind == "tensor_scale":
        return parts.scale
    assert part.kind == "shape", part.kind
    return np.array(shape, np.int64)
