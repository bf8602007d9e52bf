"""Which channels of a block can be scaled: sets of weights that read one tensor, what makes it, and what has to follow.

The weights that read a tensor are of two kinds. Those whose codes are chosen afterwards take any scale. Those that stay
as published (routers, layers that a rule keeps or quantises without data) have to carry the scale without error, so all
scales of their set are powers of two. The same holds for a projection that makes the tensor, and for its bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.calibrate.block import Block
from quantkit.calibrate.block_load import Piece
from quantkit.calibrate.input_watch import EXPERTS
from quantkit.calibrate.producers import Producer, Source
from quantkit.export.sources.detect import FLOATS, Weight
from quantkit.quantize.plan import Task

FOLLOWS = ("awq", "gptq")  # methods that choose codes for what a block holds after the folds


@dataclass(frozen=True, slots=True)
class SmoothingSet:
    """Modules are those of the checkpoint.

    module    what makes the tensor, from row `first` on where it is a projection;  bias  its bias, by the tensor's name
    readers   all modules that read the tensor;  calibrated  those whose codes are chosen afterwards
    late      `calibrated`, and `module` where its codes are chosen afterwards as well
    seen      the module whose input is watched, or EXPERTS
    expert    the tensor lies inside a routed expert
    powers    scales have to be powers of two
    """

    producer: Producer
    module: str
    first: int
    bias: str | None
    readers: tuple[str, ...]
    calibrated: tuple[str, ...]
    late: frozenset[str]
    seen: str
    expert: bool
    powers: bool


def smoothing_sets(
    block: Block, tasks: Mapping[str, Task], weights: Mapping[str, Weight]
) -> tuple[list[SmoothingSet], dict[str, str]]:
    """(sets to be scaled, why the other layers of the method `awq` are not).

    tasks    layers of the block whose codes a calibration run chooses, by module
    weights  of the source, by name
    """
    asked = {n for n, t in tasks.items() if t.method == "awq"}
    reasons = dict.fromkeys(asked, "the forward of this family cannot be traced")
    found = []
    for source in block.sources:
        for maker, readers in _by_expert(block, source):
            mine = asked & readers.keys()
            made = _set(block, source, maker, readers, tasks, weights) if mine else ""
            if isinstance(made, SmoothingSet):
                found.append(made)
            reasons |= dict.fromkeys(mine, made if isinstance(made, str) else "")
    return found, {n: r for n, r in reasons.items() if r}


def _by_expert(block: Block, source: Source) -> Iterator[tuple[str | None, dict[str, Piece]]]:
    """(module that makes the tensor, modules that read it): one pair, or one an expert."""
    readers = {n: p for parameter in source.readers for n, p in block.pieces(parameter).items()}
    if source.producer is None:
        yield None, readers
        return
    makers: dict[int | None, str] = {}
    first = source.producer.first
    for name, piece in block.pieces(source.producer.weight).items():
        if piece.first <= first and (piece.rows is None or first < piece.first + piece.rows):
            makers[piece.expert] = name
    for expert, maker in makers.items():
        yield maker, {n: p for n, p in readers.items() if expert in (None, p.expert)}


def _set(
    block: Block, source: Source, maker: str | None, readers: Mapping[str, Piece], tasks: Mapping[str, Task],
    weights: Mapping[str, Weight],
) -> SmoothingSet | str:  # fmt: skip
    """The set, or why it is not scaled."""
    producer = source.producer
    if producer is None or maker is None:
        return source.reason or "what scales its input is not a tensor of the checkpoint"
    late = {n for n in (*readers, maker) if n in tasks and tasks[n].method in FOLLOWS}
    bias = None if producer.bias is None else next(iter(block.pieces(producer.bias)))
    fixed = [n for n in (*readers, maker, *([bias] if bias else [])) if n not in late]
    for name in fixed:
        weight = weights.get(logical(name, weights))
        plain = weight is not None and weight.encoding == "plain" and weight.parts["codes"].dtype in FLOATS
        if name in tasks or not plain:
            return f"{name} would have to be scaled as well, and is not stored as plain numbers"
    calibrated = tuple(n for n in readers if n in late)
    if len({tasks[n].scheme for n in calibrated}) > 1:
        return "layers that read its input have other schemes"
    inside = not producer.vector and readers[calibrated[0]].expert is not None
    watched = {n for names in block.linears() for n in names}
    direct = [n for n, p in readers.items() if n in watched and (inside or p.expert is None)]
    return SmoothingSet(
        producer,
        maker,
        producer.first - block.pieces(producer.weight)[maker].first,
        bias,
        tuple(readers),
        calibrated,
        frozenset(late),
        seen=direct[0] if direct else EXPERTS,
        expert=inside,
        powers=any(n != maker or not producer.vector for n in fixed),
    )


def logical(name: str, weights: Mapping[str, Weight]) -> str:
    """The name of a module's tensor: with `.weight`, unless it is a tensor's name already or a matrix inside of one."""
    fused, _, expert = name.rpartition(".")
    if expert.isdigit() and fused in weights:
        return fused
    return name if name in weights else f"{name}.weight"
