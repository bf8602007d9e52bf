"""A causal language model run one decoder block at a time, with the memory of one block.

Masks, rotary embeddings and positions are not rebuilt here. The model's own forward makes them: every decoder layer but
one passes a stored state through, the one that is loaded computes, and its output stops the forward. So any causal
model of transformers 5 runs, and the hidden states are those of its ordinary forward, bit for bit.

Not for threads: attention and experts functions are bound in transformers' tables while a block runs.

Letters: N samples of one batch, L tokens of a sample, T = N x L tokens, D hidden size, V vocabulary, O outputs (rows),
I inputs.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.block import Block
from quantkit.calibrate.block_load import Experts, Loader
from quantkit.calibrate.block_names import Names, Target, name_plan
from quantkit.calibrate.meta_model import build, find_layers, input_sets, materialise_buffers, run_on_meta
from quantkit.calibrate.mtp import joined, projected
from quantkit.calibrate.observe import Served
from quantkit.calibrate.producers import find_sources
from quantkit.calibrate.weights import Weights


class _Stop(Exception):  # noqa: N818  (leaves the model's forward, no error)
    """The block has run: norm, head and later layers are not wanted."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def open_model(
    folder: Path,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    trust_remote_code: bool = False,
    scratch: Path | None = None,
    served: Mapping[str, Served] | None = None,
    mtp: bool = False,
) -> BlockModel:
    """Build the model of `folder`'s config.json on the meta device and find a tensor for every parameter.

    Nothing of `weights` is read yet. `scratch` is where overwritten experts go that do not fit into memory (default:
    the system's temporary folder). `served` says, by module of the checkpoint, what an engine makes of the input of a
    layer of a block. `mtp`: where the checkpoint holds an MTP layer of a kind that is known, it is one more block
    behind the last. Raises QuantkitError for a model that cannot run block by block, needs remote code
    without `trust_remote_code`, or does not fit its checkpoint.
    """
    model, nested, last = build(folder, dtype, trust_remote_code, weights.names() if mtp else ())
    layers, found = find_layers(model)
    names = name_plan(model, weights, layers=layers, count=len(found), nested=nested, mtp=last)
    where = torch.device(device)
    return BlockModel(
        model, layers, names, weights, dtype=dtype, device=where, scratch=scratch, served=served or {}, mtp=last
    )


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16 on a GPU and on a CPU that multiplies bfloat16 in hardware (elsewhere it is slower), else float32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


class BlockModel:
    """A model whose weights come and go.

    unused  tensors of the checkpoint outside its forward (MTP, vision)
    mtp     the number of the block that is an MTP layer, or None
    """

    def __init__(
        self, model: Any, layers: str, names: Names, weights: Weights, *, dtype: torch.dtype, device: torch.device,
        scratch: Path | None, served: Mapping[str, Served], mtp: int | None,
    ) -> None:  # fmt: skip
        self.config, self.served = model.config, served
        self.unused = names.unused
        self.mtp = mtp
        self.device, self.dtype, self.scratch = device, dtype, scratch
        self.model, self.prefix, self.targets = model, layers, names.targets
        self.layers = list(model.get_submodule(layers))
        self.sets = input_sets(model, model.get_submodule(layers))
        self.sources = find_sources(model, self.layers, lambda: run_on_meta(model))
        materialise_buffers(model, device)
        self.loader = Loader(weights, dtype, device, tuple(model._get_dtype_plan(dtype)))
        self._state: State | None = None
        self._loaded: dict[str, int] = {}
        for layer in self.layers:
            layer.__dict__["forward"] = self._passed  # an attribute of this one object, before its class's method

    @property
    def num_blocks(self) -> int:
        """Decoder layers, and the MTP layer where the model has one."""
        return len(self.layers)

    def layer_name(self, index: int) -> str:
        """The name of layer `index` in the model of transformers."""
        return f"{self.prefix}.{index}"

    def blocks_of_tensors(self) -> dict[str, int]:
        """The block that every tensor of the checkpoint is part of; those outside of blocks are left out."""
        inside = re.compile(re.escape(self.prefix) + r"\.(\d+)\.")
        found = ((inside.match(n), t) for n, t in self.targets.items())
        return {tensor: int(m[1]) for m, t in found if m for group in t.sources for tensor in group}

    def start(self, ids: torch.Tensor) -> State:
        """Token ids [L], or [N, L] of samples of one length, to what enters block 0."""
        with self.embeddings(), torch.no_grad(), self._stopping(self.layers[0]):
            return self._stopped(input_ids=ids.reshape(-1, ids.shape[-1]).to(self.device))

    @contextmanager
    def embeddings(self) -> Iterator[None]:
        """Keep the embedding loaded for many calls of `start`."""
        with self._holding([n for n in self.targets if self._outside(n) and self._embeds(n)]):
            yield

    def enter_mtp(self, states: Activations, ids: Sequence[torch.Tensor]) -> None:
        """Turn what left the last decoder layer into what enters the MTP layer; `ids` are the [N, L] of each state."""
        backbone = getattr(self.model, self.model.base_model_prefix)
        with self.embeddings(), self._holding([f"{self.model.base_model_prefix}.norm.weight"]), torch.no_grad():
            for i, ids_NL in enumerate(ids):
                state = State(states[i].hidden.to(self.device), states[i].rest)
                states[i] = joined(state, ids_NL.to(self.device), backbone.norm, self.model.get_input_embeddings())

    @contextmanager
    def head(self) -> Iterator[None]:
        """Keep the last norm and the head loaded for many calls of `logits`."""
        with self._holding([n for n in self.targets if self._outside(n) and not self._embeds(n)]):
            yield

    def logits(self, state: State) -> torch.Tensor:
        """What the model says after its last block: [T, V] float32, samples after one another."""
        with self.head(), torch.no_grad():
            self._state = State(state.hidden.to(self.device), state.rest)
            try:
                out = self.model(inputs_embeds=self._state.hidden, use_cache=False)
            finally:
                self._state = None
        return torch.as_tensor(out.logits).flatten(0, 1).float()

    @contextmanager
    def block(self, index: int, *, memory: int | None = None) -> Iterator[Block]:
        """Load block `index`, and free it at the end.

        With `memory` (bytes) and a block whose weights need more, routed experts that do not fit are read from the
        checkpoint when they are run: by `Block.run` each time, by `Block.run_all` once for all samples. The outputs are
        the same bits.
        """
        inside = f"{self.prefix}.{index}."
        targets = {n: t for n, t in self.targets.items() if n.startswith(inside)}
        experts = self._streamed(targets, memory)
        streamed = {n for e in experts.values() for n in e[0]}
        try:
            with self._holding([n for n in targets if n not in streamed]):
                yield Block(self, index, targets, {n: s for n, (_, s) in experts.items()}, memory)
        finally:
            for _, store in experts.values():
                store.close()
            _return_memory()

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Let the loaded layer `index` compute in `run_layer`; the others pass a state on."""
        layer = self.layers[index]
        with self._stopping(layer):
            del layer.__dict__["forward"]
            try:
                yield
            finally:
                layer.__dict__["forward"] = self._passed

    def run_layer(self, index: int, state: State) -> State:
        """The layer that is `running` on one state; use `Block.run`."""
        hidden = state.hidden.to(self.device)
        hidden = projected(self.layers[index], hidden) if index == self.mtp else hidden
        self._state = State(hidden, _moved(state.rest, self.device))
        return self._stopped(inputs_embeds=hidden)

    def _passed(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of every layer that is not running."""
        state = self._state
        assert state is not None  # `start` stops before its first layer
        return state.hidden if state.rest is None else (state.hidden, *state.rest)

    @contextmanager
    def _stopping(self, layer: torch.nn.Module) -> Iterator[None]:
        """Give the stored state to `layer` and leave the forward with its output; without one, with its input."""

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = self._state
            if state is None:
                raise _Stop(args[0] if args else kwargs["hidden_states"])
            if args:
                return (state.hidden, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": state.hidden}

        def after(_: Any, args: Any, output: Any) -> None:
            raise _Stop(output)

        handles = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
        try:
            yield
        finally:
            self._state = None
            for handle in handles:
                handle.remove()

    def _stopped(self, **inputs: Any) -> State:
        """Run the backbone until it is left. Another run may begin while this one stands still inside its layer."""
        out: Any = None
        try:
            getattr(self.model, self.model.base_model_prefix)(use_cache=False, **inputs)
        except _Stop as stop:
            out = stop.output
        return State(out[0], tuple(out[1:])) if isinstance(out, tuple) else State(out)

    def _outside(self, name: str) -> bool:
        return not name.startswith(self.prefix + ".")

    def _embeds(self, name: str) -> bool:
        return self.model.get_submodule(name.rpartition(".")[0]) is self.model.get_input_embeddings()

    @contextmanager
    def _holding(self, names: list[str]) -> Iterator[None]:
        """Real tensors in these places; back to the meta device when the last holder leaves."""
        meta: dict[str, torch.Tensor] = {}
        try:
            for name in names:
                self._loaded[name] = self._loaded.get(name, 0) + 1
                if self._loaded[name] == 1:
                    meta[name] = self._put(name, None)
            yield
        finally:
            for name in names:
                self._loaded[name] = self._loaded.get(name, 0) - 1
                if name in meta and not self._loaded[name]:
                    self._put(name, meta[name])

    def _put(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """Set a parameter or buffer, None: to its values in the checkpoint; returns what was there."""
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        places = module._parameters if leaf in module._parameters else module._buffers
        old: torch.Tensor = places[leaf]
        if tensor is None:
            target = self.targets[name]
            tensor = self.loader.value(target, self.loader.dtype_of(target, old))
            if isinstance(old, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
        places[leaf] = tensor
        return old

    def _streamed(self, targets: dict[str, Target], memory: int | None) -> dict[str, tuple[dict[str, Target], Experts]]:
        """Experts modules of a block over the budget, by module name: their matrices, and who reads them."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        total = sum(math.prod(t.shape) for t in targets.values()) * size
        if memory is None or total <= memory:
            return {}
        found: dict[str, dict[str, Target]] = {}
        for name, target in targets.items():
            module, _, leaf = name.rpartition(".")
            if len(target.shape) == 3 and hasattr(self.model.get_submodule(module), "is_transposed"):
                found.setdefault(module, {})[leaf] = target
        routed = sum(math.prod(t.shape) for m in found.values() for t in m.values()) * size
        left = max(memory - (total - routed), 0) // max(len(found), 1)
        return {
            m: ({f"{m}.{leaf}": t for leaf, t in inner.items()}, Experts(self.loader, inner, left, self.scratch))
            for m, inner in found.items()
        }


def _return_memory() -> None:
    """Give what a block has freed back to the system: else holes between blocks add up, 0.1 GB in a model of 30."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _moved(rest: tuple[Any, ...] | None, device: torch.device) -> tuple[Any, ...] | None:
    if rest is None:
        return None
    return tuple(r.to(device) if isinstance(r, torch.Tensor) else r for r in rest)
