"""Checks of a plan from shapes alone: groups that divide, and the tensor-parallel sizes that engines will load.

Every rank holds a share of each weight: columns of w_OI are cut for `row` layers (o_proj, down_proj), rows for `column`
layers. A scale group or block that straddles two shares cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.export.engines.kernels import cut_fault
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import BLOCK, QuantScheme
from quantkit.quantize.plan import Task
from quantkit.quantize.roles import Placed, shared_inputs, tp_facts

TP_SIZES = (1, 2, 4, 8, 16)
GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all layers of one shape have in common; `example` is the first of them."""

    example: str
    role: str
    split: str
    joined: bool  # an engine joins it with other layers: a partial last block would shift those (kv_a comes last)
    rows: int
    inputs: int
    scheme: QuantScheme


def _kinds(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> dict[_Kind, int]:
    """Distinct layer shapes among the quantised layers, with their counts."""
    first: dict[tuple[Any, ...], _Kind] = {}
    counts: dict[_Kind, int] = {}
    for task in tasks:
        if task.scheme is None or task.scheme.element == "float" or task.fate not in ("quantize", "pass"):
            continue
        p = placed[task.weight.name]
        rows, inputs = (task.matrix.rows, task.matrix.inputs) if task.matrix else task.weight.shape[-2:]
        joined = p.fused is not None and p.role.rpartition(".")[2] != "kv_a"
        key = (p.role, p.part, rows, inputs, task.scheme.name)
        kind = first.setdefault(key, _Kind(task.name, p.role, p.split, joined, rows, inputs, task.scheme))
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def step_of(scheme: QuantScheme, inputs: int) -> int:
    """Smallest run of inputs that can be cut off a row: whole scale groups, whole packed words."""
    if scheme.granularity == "group":
        return scheme.group_size
    if scheme.granularity == "block":
        return BLOCK
    return 8 if scheme.element == "int4" else 1


def _blocked(kind: _Kind, tp: int, kv_heads: int) -> str:
    """Why a layer shape cannot be loaded over `tp` ranks, or an empty string."""
    scheme = kind.scheme
    # each KV head is held by several ranks when there are more of these
    few = kind.role in ("attention.k", "attention.v") and kv_heads and tp > kv_heads
    why = cut_fault(
        kind.split, kind.rows, kind.inputs, ranks=tp, holders=kv_heads if few else tp,
        unit=step_of(scheme, kind.inputs),
        unit_name={"group": "group", "block": "block"}.get(scheme.granularity, "packed word"),
        block=scheme.granularity == "block", joined=kind.joined,
    )  # fmt: skip
    return f"{kind.example}: {why}" if why else ""


def tensor_parallel(
    tasks: Sequence[Task], placed: Mapping[str, Placed], config: Mapping[str, Any], wanted: Sequence[int]
) -> tuple[dict[int, str], list[QuantkitError]]:
    """(size -> "" or why it does not load) for the usual sizes and those `wanted`, which are faults when they fail."""
    facts = tp_facts(config)
    kinds = _kinds(tasks, placed)
    table: dict[int, str] = {}
    for tp in sorted({*TP_SIZES, *wanted}):
        reasons = [r for kind in kinds if (r := _blocked(kind, tp, facts.kv_heads))]
        if facts.heads and facts.heads % tp:
            reasons.insert(0, f"{facts.heads} attention heads do not divide by {tp}")
        elif not facts.mla and facts.kv_heads and facts.kv_heads % tp and tp % facts.kv_heads:
            reasons.insert(0, f"{facts.kv_heads} KV heads and {tp} ranks do not divide")
        table[tp] = reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "") if reasons else ""
    faults = [
        QuantkitError(
            f"a tensor-parallel size that was asked for will not load: {tp}",
            value=table[tp],
            allowed="sizes that load: " + (", ".join(str(n) for n, why in table.items() if not why) or "none"),
        )
        for tp in wanted
        if table[tp]
    ]
    if table[1] and kinds and 1 not in wanted:
        faults.append(QuantkitError("no engine could load this output, not even on one GPU", value=table[1]))
    return table, faults


def _stored(task: Task) -> str:
    """How a layer is stored, and its activations quantised, in words."""
    if task.scheme is None or task.fate == "decode":
        return "as published"
    rule = task.input_scale
    return task.scheme.name if rule is None else f"{task.scheme.name} with input_scale {rule}"


def check_fused(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> list[QuantkitError]:
    """Sets that an engine fuses into one layer must be stored in one way, and so must the experts of a layer."""
    sets: dict[str, dict[str, Task]] = {}
    keys = shared_inputs(placed)
    for task in tasks:
        key = keys.get(task.weight.name)
        if key is not None and placed[task.weight.name].linear and task.fate != "drop":
            sets.setdefault(key, {}).setdefault(_stored(task), task)
    return [
        QuantkitError(
            "layers that engines fuse would be stored in different ways",
            tensor=next(iter(stored.values())).weight.name,
            value=", ".join(f"{t.module.rpartition('.')[2]}: {how}" for how, t in stored.items()),
            allowed="one scheme for all layers of the set",
            hint="name the whole set in the rule",
        )
        for stored in sets.values()
        if len(stored) > 1
    ]


def check_engines(tasks: Sequence[Task], format_name: str) -> list[QuantkitError]:
    """Combinations that no engine loads, whatever the shapes; one fault for each kind."""
    faults: dict[str, QuantkitError] = {}
    for task in tasks:
        if task.scheme is None or task.fate not in ("quantize", "pass"):
            continue
        role = task.role.removeprefix("mtp.")
        if format_name == "modelopt" and role == "routed_experts" and task.scheme.name in ("fp8-channel", "fp8-block"):
            faults.setdefault(
                "experts",
                QuantkitError(
                    "engines read FP8 experts in the modelopt format per tensor only",
                    tensor=task.name,
                    value=task.scheme.name,
                    allowed="fp8-tensor, nvfp4",
                    hint="--format compressed-tensors or fp8 holds them",
                ),
            )
        if role == "indexer" and task.scheme.element in ("int4", "e2m1"):
            faults.setdefault(
                "indexer",
                QuantkitError(
                    "engines fuse the indexer into a layer that takes BF16 and FP8 only",
                    tensor=task.name,
                    value=task.scheme.name,
                    allowed="keep, bf16, fp8-block, fp8-channel",
                ),
            )
    return list(faults.values())


def check_shapes(tasks: Sequence[Task], table: Mapping[int, str], recipe: str) -> list[QuantkitError]:
    """Faults of layers whose inputs are not whole groups, one per scheme and number of inputs."""
    faults: dict[tuple[str, int], tuple[Task, int]] = {}
    for task in tasks:
        if task.fate != "quantize" or task.scheme is None or task.matrix is None:
            continue
        step = (
            task.scheme.group_size if task.scheme.granularity == "group" else 8 if task.scheme.element == "int4" else 1
        )
        if task.matrix.inputs % step:
            key = (task.scheme.name, task.matrix.inputs)
            first, count = faults.get(key, (task, 0))
            faults[key] = (first, count + 1)
    return [_group_fault(task, count, table, recipe) for task, count in faults.values()]


def _group_fault(task: Task, count: int, table: Mapping[int, str], recipe: str) -> QuantkitError:
    assert task.scheme is not None
    assert task.matrix is not None
    inputs, scheme = task.matrix.inputs, task.scheme
    fits = [g for g in GROUPS if inputs % g == 0]
    hint = f"{inputs} inputs fit no {scheme.name} group: keep these layers, or choose fp8-channel"
    if scheme.element == "int4":
        sizes = {g: [n for n in TP_SIZES if inputs % n == 0 and inputs // n % g == 0] for g in fits}
        told = [f"--group {g} (tensor-parallel sizes {', '.join(map(str, sizes[g]))})" for g in fits]
        hint = (" or ".join(told) if told else "--group channel") + " fits; --group auto chooses"
    broken = ", ".join(str(n) for n in table if n == 1 or inputs % n or inputs // n % max(1, scheme.group_size))
    unit = scheme.group_size or "channel in words of 8"
    return QuantkitError(
        f"the group does not divide the inputs of {count} layer{'s' if count > 1 else ''}",
        file=recipe,
        tensor=task.name,
        value=f"{inputs} inputs, group {unit} (breaks tensor-parallel sizes {broken})",
        allowed=f"groups that divide {inputs}: {', '.join(map(str, fits)) or 'none'}",
        hint=hint,
    )
