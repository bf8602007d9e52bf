"""All samples through one block in step: each layer's input is known for every sample before the layer runs for any.

So a layer's codes can be chosen and put in its place on the way, from inputs that the layers before it give as they
will be served, and every sample runs through the block once. A run of a batch is a greenlet that stands still where it
comes to an input or to keys and values; what it holds meanwhile (a residual, the input itself) has to fit the memory.
Batches that do not fit start anew for each set of layers and stop there: more time, the same bits.

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C values of a latent row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from greenlet import getcurrent, greenlet
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.observe import Observer
from torch import Tensor

if TYPE_CHECKING:
    from quantkit.calibrate.block import Block

HELD = 6  # hidden states that a batch holds beside the widest input: residual, norm, queries, keys, values, output

Names = tuple[str, ...]


Show = Callable[[Observer], None]  # shows an observer what there is to see


class _Reports:
    """The observer of the model's forward: hands what it is shown, as a call on an observer, to whoever runs it."""

    def linear(self, modules: Names, x_TI: Tensor) -> None:
        _report(modules, lambda observe: observe.linear(modules, x_TI))

    def kv(self, layer: int, q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        _report(None, lambda observe: observe.kv(layer, q_TQD, k_THD, v_THD))

    def latent(self, layer: int, row_TC: Tensor) -> None:
        _report(None, lambda observe: observe.latent(layer, row_TC))


def _report(at: Names | None, show: Show) -> None:
    getcurrent().parent.switch((at, show))  # type: ignore[union-attr]


class _Run:
    """One batch on its way through the block."""

    def __init__(self, block: Block, state: State) -> None:
        self._greenlet = greenlet(lambda: block.step(state))
        self.at: Names = ()  # the set that is next; none when the block is left
        self.output = state  # what leaves the block, then

    def to(self, sets: Collection[Names], observe: Observer | None) -> Show | None:
        """Go on until one of the sets is next, and return what shows its input; None: the block is left.

        What comes before it is shown to `observe`.
        """
        while True:
            got = self._greenlet.switch()
            if self._greenlet.dead:
                self.at, self.output = (), got
                return None
            at: Names | None
            show: Show
            at, show = got
            if at in sets:
                self.at = at
                return show
            if observe is not None:
                show(observe)

    def close(self) -> None:
        self._greenlet.throw()  # raises GreenletExit inside, which ends it


def stages(
    block: Block, states: Activations, sets: Collection[Names], observe: Observer, memory: int
) -> Iterator[Names]:
    """Yield each of `sets` (of `Block.linears`, none inside experts) when the observer was shown its input in full.

    What the caller puts into the block then is what runs. The observer is shown everything else as well, once, and the
    states are what leaves the block at the end. `memory` bytes may be held by batches that stand still. Until the last
    set no other model of transformers may run in this process.
    """
    left = list(sets)
    room = max(1, memory // _held(block, states[0], sets))
    with torch.no_grad(), block.observed(_Reports()):
        runs = [_Run(block, states[i]) for i in range(min(room, len(states)))]
        passed: list[Names] = []
        try:
            while True:
                for i, run in enumerate(runs):
                    show = run.to(sets, observe)
                    if show is not None:
                        show(observe)
                    else:
                        states[i] = run.output
                if not runs[0].at:
                    break
                passed.append(runs[0].at)
                for i in range(len(runs), len(states)):
                    _show_again(block, states[i], passed, observe)
                yield passed[-1]
                left.remove(passed[-1])
            for i in range(len(runs), len(states)):
                run = _Run(block, states[i])
                while run.to(sets, observe) is not None:
                    pass
                states[i] = run.output
        finally:
            for run in runs:
                run.close()
    yield from left  # a forward that never comes there


def _show_again(block: Block, state: State, way: Sequence[Names], observe: Observer) -> None:
    """Start a batch anew and show the input of the last set of the way."""
    run = _Run(block, state)
    show = None
    for names in way:
        show = run.to((names,), None)
    assert show is not None
    show(observe)
    run.close()


def _held(block: Block, state: State, sets: Collection[Names]) -> int:
    """Bytes that a batch holds where it stands still, roughly."""
    widest = max((block.shape(names[0])[1] for names in sets), default=0)
    return state.nbytes * HELD + state.hidden.nbytes // state.hidden.shape[-1] * widest
