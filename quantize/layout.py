"""Lay a plan out: which tasks belong together, which shard and which byte each tensor gets.

Tensors fill shards in the order of the tasks. Experts of a fused tensor are separate tasks that share one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantkit.export.formats import Part
from quantkit.export.safetensors_file import layout, nbytes_of
from quantkit.kernels.cpu.rows import needs_tails
from quantkit.quantize.plan import Out, Shard, Step, Task
from quantkit.quantize.roles import Placed


def grouped(tasks: Sequence[Task], placed: Mapping[str, Placed]) -> list[tuple[str, list[Task]]]:
    """Tasks that share a scale or tail weights come together, at the place of the first; every other stands alone."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        key = task.name
        shared = task.scheme is not None and (task.scheme.shares_scale or needs_tails(task.method))
        if task.fate == "quantize" and shared:
            key = placed[task.weight.name].fused or key
            if task.matrix and len(task.weight.shape) == 3:  # gate and up of one expert lie in one fused tensor
                key = f"{task.weight.name}.{task.matrix.expert}"
        groups.setdefault(key, []).append(task)
    return list(groups.items())


def tensor_of(task: Task, part: Part) -> tuple[str, tuple[int, ...]]:
    """Name and full shape of the output tensor that holds a part of a task."""
    weight = task.weight
    if task.fate == "keep":
        return part.name, part.shape
    experts = weight.shape[:1] if task.matrix is not None and len(weight.shape) == 3 else ()
    if task.fate == "decode":
        return weight.name, (*experts, *part.shape)
    if part.name in ("blocks", "scales") and part.layout == "rows":  # gpt-oss: experts in one tensor, joined by `_`
        return f"{weight.name}_{part.name}", (*experts, *part.shape)
    return f"{weight.module if task.fate == 'pass' else task.name}.{part.name}", part.shape


def lay_out(
    groups: Sequence[tuple[str, list[Task]]], parts: Mapping[int, Sequence[Part]], limit: int
) -> tuple[list[Step], list[Shard]]:
    """Give every task its bytes; `parts` are those of each task by `id`, `limit` is the size of a shard in bytes.

    The tensors of one task stay in one shard. A shard grows over the limit only for a task that is larger.
    """
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    where: dict[str, tuple[int, int]] = {}  # tensor -> (shard, position in it)
    for _, tasks in groups:
        for task in tasks:
            entries = []
            for part in parts[id(task)]:
                name, shape = tensor_of(task, part)
                if name not in where:
                    where[name] = (-1, -1)
                    entries.append((name, part.dtype, shape))
            need = sum(nbytes_of(d, s) for _, d, s in entries)
            if size and size + need > limit:
                shards.append([])
                size = 0
            for entry in entries:
                where[entry[0]] = (len(shards) - 1, len(shards[-1]))
                shards[-1].append(entry)
            size += need
    laid = [layout(entries) for entries in shards]
    steps = []
    for key, tasks in groups:
        settled = []
        for task in tasks:
            outs = []
            for part in parts[id(task)]:
                shard, position = where[tensor_of(task, part)[0]]
                slot = laid[shard][1][position]
                share = nbytes_of(part.dtype, part.shape)
                index = task.matrix.expert if task.matrix and slot.nbytes != share else 0
                outs.append(Out(part.kind, slot.name, part.dtype, part.shape, shard, slot.start + index * share, share,
                                part.layout))  # fmt: skip
            settled.append(replace(task, outs=tuple(outs)))
        steps.append(Step(key, tuple(settled)))
    count = len(laid)
    names = [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for i in range(count)
    ]
    return steps, [Shard(n, h, tuple(s), z) for n, (h, s, z) in zip(names, laid, strict=True)]
