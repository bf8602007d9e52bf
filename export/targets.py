r"""Patterns that name the layers of a config group, and no layer of another group.

Rules that come from the readers: patterns are matched at the start only, so they end in `$`; a fused layer (`qkv_proj`)
must be named like its shards; patterns of two groups must be disjoint. Layer names are made general by their numbers: a
number that does not tell groups apart becomes `\d+`, one that does is listed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# A fused module and the shards it is loaded from.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # vLLM
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),  # SGLang
}


def with_fused_names(modules: Sequence[str], *, experts: bool = False) -> list[str]:
    """`modules` and, after the last shard of each set that engines fuse, the name of the fused layer.

    experts  also the name of all experts of a layer, behind the first of them: what readers of ModelOpt's and `fp8`'s
             lists ask for

    vLLM finds the shards of a fused layer through a table of the model class, which lacks `gate_up_proj` for some MoE
    families; without the fused name it would build a layer that stays dense as a quantised one.
    """
    known = set(modules)
    names: list[str] = []
    for module in modules:
        names.append(module)
        stem, _, last = module.rpartition(".")
        if ".experts." in module:
            whole = module.partition(".experts.")[0] + ".experts"
            if experts and whole not in known:
                known.add(whole)
                names.append(whole)
            continue
        for fused, shards in FUSED.items():
            present = [s for s in shards if f"{stem}.{s}" in known]
            if len(present) == len(shards) and last == max(shards):
                names.append(f"{stem}.{fused}")
    return names


def _template(module: str) -> str:
    return _NUMBER.sub("#", module)


def _numbers(module: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(module))


def _pattern(template: str, members: list[tuple[str, ...]], others: set[tuple[str, ...]]) -> list[str]:
    r"""Patterns for one template: `\d+` where that hits no other layer, lists of numbers where it would."""
    pieces = [re.escape(p) for p in template.split("#")]

    def fill(slots: Sequence[str]) -> str:
        return "re:" + "".join(p + s for p, s in zip(pieces, [*slots, "$"], strict=True))

    if not others:
        return [fill([r"\d+"] * (len(pieces) - 1))]
    first = {m[0] for m in members} if members[0] else set()
    if first and not first & {o[0] for o in others}:  # whole layers go to one group
        return [fill([f"({'|'.join(sorted(first, key=int))})", *[r"\d+"] * (len(pieces) - 2)])]
    return [fill([re.escape(n) for n in m]) for m in members]


def target_patterns(groups: Sequence[Sequence[str]], plain: Sequence[str]) -> list[list[str]]:
    """For each group of module names the patterns that match exactly its modules among all groups and `plain`."""
    owners: dict[str, dict[int, list[tuple[str, ...]]]] = {}
    for g, modules in enumerate([*groups, plain]):
        for module in modules:
            owners.setdefault(_template(module), {}).setdefault(g, []).append(_numbers(module))
    targets: list[list[str]] = []
    for g in range(len(groups)):
        patterns: list[str] = []
        for template, by_group in owners.items():
            if g in by_group:
                others = {m for o, members in by_group.items() if o != g for m in members}
                patterns += _pattern(template, by_group[g], others)
        targets.append([_either_name(p) for p in _with_fused(patterns)])
    return targets


def _either_name(pattern: str) -> str:
    """VLLM renames `block_sparse_moe` of MiniMax-M2 to `mlp` but leaves patterns alone; other engines keep the name."""
    return pattern.replace(r"\.block_sparse_moe\.", r"\.(block_sparse_moe|mlp)\.")


def _with_fused(patterns: list[str]) -> list[str]:
    """Add the fused name where a pattern of every shard is there, differing in the last name only."""
    known = set(patterns)
    fused = []
    for pattern in patterns:
        for name, shards in FUSED.items():
            first = re.escape(shards[0]) + "$"
            if pattern.endswith("." + first) or pattern.endswith(r"\." + first):
                stem = pattern[: -len(first)]
                if all(stem + re.escape(s) + "$" in known for s in shards):
                    fused.append(stem + re.escape(name) + "$")
    return patterns + fused
