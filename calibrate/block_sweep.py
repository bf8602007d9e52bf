"""All samples through one block whose experts do not fit: every expert is read once, not once a batch.

A batch alone would read nearly all experts of its layer again. So the sweep has three parts: every batch runs up to the
router, and what enters the experts is put aside; the experts come in waves that fit, each wave taking every batch;
every batch runs again, with the experts' output given. The attention is computed twice, which is little beside reading
10 GB a batch. Experts are added up in their order as ever: the outputs are the same bits.

Letters: T tokens of a batch, K experts of a token, D hidden size, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.observe import Cache, Compare, Observer

if TYPE_CHECKING:
    from quantkit.calibrate.block import Block


class _Routed(Exception):  # noqa: N818  (leaves the model's forward, no error)
    """The router has chosen: what enters the experts is known."""

    def __init__(self, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        super().__init__()
        self.state = State(hidden_TD, (index_TK, weight_TK, torch.zeros_like(hidden_TD)))


def _stop(module: Any, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    raise _Routed(hidden_TD, index_TK, weight_TK)


def _before_experts(block: Block, state: State, cache: Cache | None) -> State:
    """What enters the experts, [T, D] with the choices and zeros to add to."""
    try:
        block.run(state, cache=cache, experts=_stop)
    except _Routed as routed:
        return routed.state
    raise AssertionError("a block with experts that calls none")


def sweep(
    block: Block, states: Activations, observe: Observer | None, cache: Cache | None, compare: Compare | None,
    memory: int, folder: Path | None,
) -> Iterator[tuple[int, State]]:  # fmt: skip
    """(number of the state, what enters the next block), in order; `memory` bytes for what is put aside.

    The observer sees the experts first, wave by wave, each expert its batches in order, then everything else.
    """
    (path, store), *more = block.streamed.items()
    assert not more
    with Activations((_before_experts(block, s, cache) for s in states), memory=memory, folder=folder) as aside:
        for first in range(0, store.count, store.room):
            store.hold(range(first, min(first + store.room, store.count)))
            for i in range(len(aside)):
                aside[i] = block.add_experts(path, aside[i], observe)
        for i, state in enumerate(states):
            out = aside[i].rest[2]  # type: ignore[index]
            yield i, block.run(state, observe, cache, compare, experts=lambda module, x, *_, out=out: out.to(x.device))
