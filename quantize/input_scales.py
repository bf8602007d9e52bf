"""The fixed scales of activations in a calibration run: which layers of a block are watched, and what they get.

A rule with a measured `input_scale` asks for one number a layer. Layers that see one tensor have one statistic; the
experts of a layer share the largest of their numbers, gate and up one, down another, since engines keep one for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.calibrate.block import Block
from quantkit.calibrate.input_blocks import InputBlocks
from quantkit.calibrate.input_scales import input_scale, input_shares, shared_amax
from quantkit.calibrate.watch import Watch, peers_key
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.plan import Plan, Task
from quantkit.quantize.recipe import InputScale


def measured_tasks(plan: Plan) -> dict[str, Task]:
    """The layers of a plan whose input scale has to be measured, by name."""
    return {t.module: t for t in plan.tasks if isinstance(t.input_scale, InputScale)}


def measured_sets(block: Block, measured: Iterable[str]) -> list[tuple[str, ...]]:
    """The sets of layers with one input, in a block, that hold one of these layers."""
    wanted = set(measured)
    return [names for names in block.linears() if wanted.intersection(names)]


def block_scales(sets: Iterable[tuple[str, ...]], tasks: Mapping[str, Task], watch: Watch) -> dict[str, Any]:
    """What the run folder says of each layer: its input scale, and what that does to the inputs that were seen.

    Raises QuantkitError for a layer whose input was never seen, or only zeros, when its peers give none either.
    """
    peers: dict[str, list[tuple[str, ...]]] = {}
    for names in sets:
        peers.setdefault(peers_key(names[0]), []).append(names)
    found: dict[str, Any] = {}
    for group in peers.values():
        seen = [watch.input_blocks(names) for names in group]
        for names, own in zip(group, seen, strict=True):
            for name in names:
                if name in tasks:
                    found[name] = _layer(tasks[name], own, seen)
    return dict(sorted(found.items()))


def _layer(task: Task, own: InputBlocks, peers: list[InputBlocks]) -> dict[str, Any]:
    rule, scheme = task.input_scale, task.scheme
    assert isinstance(rule, InputScale)
    assert scheme is not None
    amax, sources = shared_amax(peers, rule.rule, rule.factor)
    if not amax:
        tokens = sum(p.tokens for p in peers)
        raise QuantkitError(
            "no input scale can be measured for a layer: it and its peers saw no input other than zero",
            tensor=task.module, value=f"{tokens} tokens", allowed="1 token or more with a value",
            hint="give more text, or give the layer a number: `input_scale: 1.0` holds blocks up to 2688",
        )  # fmt: skip
    scale = input_scale(amax, scheme.element)
    shares = input_shares(own, scale, scheme.element)
    return {
        "input_scale": scale,
        "amax": amax,
        "rule": rule.rule,
        "source": sources[next(i for i, p in enumerate(peers) if p is own)],
        "tokens": own.tokens,
        "dropped_tokens": own.dropped,
        "seen_amax": own.amax,
        "saturated": shares.saturated,
        "underflow": shares.underflow,
    }


def gathered(plan: Plan, blocks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The layers of all blocks; raises QuantkitError unless they are those of the plan."""
    found = {name: facts for block in blocks for name, facts in block["inputs"].items()}
    wanted = measured_tasks(plan)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise QuantkitError(
            "input scales of the plan were not measured", tensor=missing[0], value=f"{len(found)} layers",
            allowed=len(wanted),
        )  # fmt: skip
    return found
