"""Which weight of a checkpoint stands for which weight of its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.export.sources.detect import Weight


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight of the output, and the rows of the source it stands for: from `first_row` of the flattened weight."""

    source: Weight
    output: Weight
    first_row: int = 0
    expert: int | None = None  # set when the source holds this matrix transposed
    out_expert: int | None = None  # set when the output is a fused tensor of experts: this one is meant

    @property
    def nbytes(self) -> int:
        """Source bytes that the comparison reads."""
        pairs = 1 if self.out_expert is None else self.output.shape[0]
        share = math.prod(self.output.shape) / max(1, math.prod(self.source.shape) * pairs)
        return int(self.source.nbytes * share)


def pairs_of(
    source: Mapping[str, Weight], output: Mapping[str, Weight], dropped: set[str]
) -> tuple[list[Pair], list[str], list[str]]:
    """(pairs, source weights without a counterpart, output weights without one)."""
    pairs: list[Pair] = []
    missing: list[str] = []
    used: set[str] = set()
    for name, weight in source.items():
        if name in output:
            found = _same_name(weight, output[name])
        else:
            found = _experts(weight, output)
        if found:
            used.update(p.output.name for p in found)
            pairs += found
        elif name not in dropped:
            missing.append(name)
    return pairs, missing, [n for n in output if n not in used]


def _same_name(weight: Weight, out: Weight) -> list[Pair]:
    """One pair, or one an expert where a fused tensor is stored transposed on one side (gpt-oss in BF16)."""
    fused = len(weight.shape) == 3 and len(out.shape) == 3
    if not fused or weight.encoding == out.encoding:
        return [Pair(weight, out)]
    rows = out.shape[1] if weight.encoding == "plain" else weight.shape[1]
    transposed = weight.encoding == "plain"
    return [Pair(weight, out, e * rows, e if transposed else None, e) for e in range(out.shape[0])]


def _experts(weight: Weight, output: Mapping[str, Weight]) -> list[Pair]:
    """The matrices that a fused tensor of experts was split into, or an empty list."""
    if len(weight.shape) != 3:
        return []
    stem, _, last = weight.module.rpartition(".")
    pieces = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    share = weight.shape[1] // len(pieces)
    names = [(e, i, f"{stem}.{e}.{p}.weight") for e in range(weight.shape[0]) for i, p in enumerate(pieces)]
    if not all(n in output for _, _, n in names):
        return []
    return [Pair(weight, output[n], e * weight.shape[1] + i * share) for e, i, n in names]


def tail_sets(
    pairs: Sequence[Pair], layers: Mapping[str, Mapping[str, str]], fused: Mapping[str, str]
) -> dict[str, list[Pair]]:
    """Output weight -> the pairs of its fused set that were made by `tails`, in the order of their names.

    layers  of the manifest, by module;  fused  key of the set of each weight that has one
    """
    sets: dict[str, list[Pair]] = {}
    found = {}
    for pair in sorted(pairs, key=lambda p: p.output.name):
        name = pair.output.name
        if layers.get(pair.output.module, {}).get("method") == "tails":
            found[name] = sets.setdefault(fused.get(name, name), [])
            found[name].append(pair)
    return found
