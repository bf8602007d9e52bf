"""One loaded decoder block: run it, watch it, read its weights and overwrite them.

Layers go by the names of the checkpoint, without `.weight`: `model.layers.3.mlp.experts.5.gate_proj` is half of a
matrix inside a 3-D parameter of the model, and stays a layer of its own here. Matrix 5 of experts that a checkpoint
itself keeps fused (gpt-oss) is `model.layers.3.mlp.experts.gate_up_proj.5`, as outputs by inputs with gate and up rows
interleaved.

Letters: T tokens, O outputs (rows), I inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.block_load import Experts, Piece, pieces_of
from quantkit.calibrate.block_names import Target
from quantkit.calibrate.block_sweep import sweep
from quantkit.calibrate.observe import (
    AllSeen,
    Cache,
    Compare,
    Observer,
    attention_watched,
    bound,
    experts_forward,
    inputs_served,
    linears_watched,
)
from quantkit.calibrate.producers import Source
from quantkit.kernels.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.calibrate.blocks import BlockModel


class Block:
    """Block `index` of a model, inside `with model.block(index)`. `module` is the live layer with its weights."""

    def __init__(
        self, owner: BlockModel, index: int, targets: Mapping[str, Target], streamed: Mapping[str, Experts],
        memory: int | None,
    ) -> None:  # fmt: skip
        self.index = index
        self.module: torch.nn.Module = owner.layers[index]
        self._owner, self.streamed = owner, streamed
        self._memory = memory
        self._pieces: dict[str, Piece] = {}
        self._experts: dict[int, str] = {}  # id of an experts module -> its name
        self._names: dict[tuple[str, int], tuple[str, ...]] = {}  # (parameter, expert) -> checkpoint modules
        self._plain: dict[str, str] = {}  # linear layer of the model -> checkpoint module
        for name, target in targets.items():
            path, _, leaf = name.rpartition(".")
            parent = owner.model.get_submodule(path)
            routed = hasattr(parent, "is_transposed")
            flip = routed and bool(parent.is_transposed)
            pieces = pieces_of(target, owner.loader.weights, experts=routed, flip=flip)
            self._pieces |= pieces
            if routed:
                self._experts[id(parent)] = path
            elif leaf == "weight":
                self._plain[path] = next(iter(pieces))
            for module, piece in pieces.items():
                if piece.expert is not None:
                    key = (name, piece.expert)
                    self._names[key] = (*self._names.get(key, ()), module)

    def linears(self) -> list[tuple[str, ...]]:
        """Checkpoint modules in sets that see the same input, routers left out; routed experts after the others."""
        return [names for _, names in self._sets()] + [
            self._names[f"{path}.{leaf}", e]
            for path in self._experts.values()
            for e in range(self._owner.model.get_submodule(path).num_experts)
            for leaf in ("gate_up_proj", "up_proj", "down_proj")
            if (f"{path}.{leaf}", e) in self._names
        ]

    def comes_to(self, sets: Collection[tuple[str, ...]]) -> bool:
        """Whether every sample comes to all these sets of `linears`: none is inside the experts."""
        return {names for _, names in self._sets()}.issuperset(sets)

    def run_all(
        self, states: Activations, observe: Observer | None = None, cache: Cache | None = None,
        compare: Compare | None = None,
    ) -> Iterator[tuple[int, State]]:  # fmt: skip
        """`run` on every state: (its number, what enters the next block), in order. A state may be overwritten then.

        Where experts do not fit into memory, each is read once in all; as many bytes again as the block's budget may
        then hold what enters and leaves the experts, and more waits in files.
        """
        if len(self.streamed) == 1 and self._memory is not None:
            yield from sweep(self, states, observe, cache, compare, self._memory, self._owner.scratch)
            return
        for i, state in enumerate(states):
            yield i, self.run(state, observe, cache, compare)

    def show_all(self, states: Activations, observe: Observer, sets: Collection[tuple[str, ...]]) -> Iterator[State]:
        """Show the observer the inputs of these sets of `linears`, for every state, which is given back as it was.

        A block without experts among them is run only as far as that takes.
        """
        if not self.comes_to(sets):
            yield from (states[i] for i, _ in self.run_all(states, observe))
            return
        for state in states:
            with contextlib.suppress(AllSeen):
                self.run(state, observe, only=sets)
            yield state

    def run(
        self, state: State, observe: Observer | None = None, cache: Cache | None = None,
        compare: Compare | None = None, *,
        experts: Callable[..., torch.Tensor] | None = None, only: Collection[tuple[str, ...]] | None = None,
    ) -> State:  # fmt: skip
        """The state that enters the next block; raises AllSeen once the observer was shown the sets `only`.

        `observe` is shown the inputs of every set of `linears` and what the attention caches; `cache` replaces the keys
        and values that the attention of this block reads, and `compare` may run it again under others; `experts` stands
        in for its routed experts.
        """
        with torch.no_grad(), self.observed(observe, cache, compare, experts=experts, only=only):
            return self.step(state)

    @contextmanager
    def observed(
        self, observe: Observer | None = None, cache: Cache | None = None, compare: Compare | None = None, *,
        experts: Callable[..., torch.Tensor] | None = None, only: Collection[tuple[str, ...]] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Everything that `run` sets up for its one `step`."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        config = self._owner.model.config
        with ExitStack() as stack:
            if self._experts:
                stack.enter_context(bound(ALL_EXPERTS_FUNCTIONS, "eager", experts or self._routed(observe)))
            if observe is not None:
                path = self._owner.layer_name(self.index)
                sets = [(self._owner.model.get_submodule(f"{path}.{first}"), names) for first, names in self._sets()]
                stack.enter_context(linears_watched(sets, observe, only))
            if any(x is not None for x in (observe, cache, compare)):
                kind = config._attn_implementation
                stack.enter_context(attention_watched(self.module, kind, self.index, observe, cache, compare))
            served = self._owner.served
            layers = [(self._owner.model.get_submodule(p), served[n]) for p, n in self._plain.items() if n in served]
            stack.enter_context(inputs_served(layers))
            stack.enter_context(self._owner.running(self.index))
            yield

    def step(self, state: State) -> State:
        """The state that enters the next block, inside `observed`."""
        return self._owner.run_layer(self.index, state)

    def add_experts(self, path: str, state: State, observe: Observer | None) -> State:
        """The experts that are held, of the module `path`, added to what `sweep` put aside."""
        assert state.rest is not None
        hidden, (index, weights, out) = state.hidden, state.rest
        assert index is not None
        assert weights is not None
        store, device = self.streamed[path], self._owner.device
        module = self._owner.model.get_submodule(path)
        with torch.no_grad():
            added = experts_forward(
                module, hidden.to(device), index.to(device), weights.to(device), store.matrix,
                self._entering(path, observe), only=store.held, out_TD=None if out is None else out.to(device),
            )  # fmt: skip
        return State(hidden, (index, weights, added))

    @property
    def sources(self) -> list[Source]:
        """The tensors that linear weights of the block read, and what scales them."""
        return self._owner.sources[self.index]

    def pieces(self, parameter: str) -> dict[str, Piece]:
        """Checkpoint modules that lie in a parameter of the block, which goes by its name inside the block."""
        whole = f"{self._owner.layer_name(self.index)}.{parameter}"
        return {module: piece for module, piece in self._pieces.items() if piece.target.name == whole}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of `weight(name)`, without reading it."""
        piece = self._piece(name)
        whole = piece.target.shape if piece.expert is None else piece.target.shape[1:]
        return tuple(piece.of(torch.empty(whole, device="meta")).shape)

    def weight(self, name: str) -> torch.Tensor:
        """The live weight of a checkpoint module as float32: [O, I] of a linear layer, [D] of a norm.

        It may share the memory that is run: change it by `replace` only. Raises QuantkitError for an unknown name.
        """
        return self._piece(name).of(self._tensor(self._piece(name))).float()

    def replace(self, name: str, w_OI: torch.Tensor) -> None:
        """Overwrite the weight of a checkpoint module, rounded to the dtype of the run; later runs use it."""
        piece = self._piece(name)
        matrix = self._tensor(piece)
        view = piece.of(matrix)
        if view.shape != w_OI.shape:
            raise QuantkitError(
                "a weight of another shape", tensor=name, value=list(w_OI.shape), allowed=list(view.shape)
            )
        with torch.no_grad():
            view.copy_(w_OI)
        path, _, leaf = piece.target.name.rpartition(".")
        if path in self.streamed and piece.expert is not None:
            self.streamed[path].overwrite(leaf, piece.expert, matrix)

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise QuantkitError("no such layer in this block", tensor=name, value=f"block {self.index}")
        return self._pieces[name]

    def _tensor(self, piece: Piece) -> torch.Tensor:
        """The parameter a piece lies in, or the matrix of its expert."""
        path, _, leaf = piece.target.name.rpartition(".")
        if piece.expert is not None and path in self.streamed:
            return self.streamed[path].matrix(leaf, piece.expert)
        tensor: torch.Tensor = getattr(self._owner.model.get_submodule(path), leaf)
        return tensor if piece.expert is None else tensor[piece.expert]

    def _sets(self) -> list[tuple[str, tuple[str, ...]]]:
        """(the set's first layer inside the block, checkpoint modules of the set)."""
        path = self._owner.layer_name(self.index)
        return [(s[0], tuple(self._plain[f"{path}.{n}"] for n in s)) for s in self._owner.sets[self.index]]

    def _routed(self, observe: Observer | None) -> Callable[..., torch.Tensor]:
        """The experts function of a run."""

        def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            path = self._experts[id(module)]
            store = self.streamed.get(path)

            def matrix(leaf: str, e: int) -> torch.Tensor:
                return store.matrix(leaf, e) if store is not None else getattr(module, leaf)[e]

            return experts_forward(module, hidden, index, weights, matrix, self._entering(path, observe))

        return forward

    def _entering(self, path: str, observe: Observer | None) -> Callable[[str, int, torch.Tensor], torch.Tensor]:
        """What a matrix of the experts module `path` multiplies; an observer is shown what comes to it."""

        def entering(leaf: str, e: int, x_TI: torch.Tensor) -> torch.Tensor:
            names = self._names[f"{path}.{leaf}", e]
            if observe is not None:
                observe.linear(names, x_TI)
            served = self._owner.served.get(names[0])
            return x_TI if served is None else served(x_TI)

        return entering
