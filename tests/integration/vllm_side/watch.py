"""Watches vLLM's loader: which checkpoint tensors it uses, and which elements of which parameters it writes.

vLLM's own check knows names only, and is off for quantised models: a checkpoint that fills half of a fused parameter
loads without a word. This one listens below the autograd layer, where every write is an operator with its destination:
a byte per element counts the writes, so holes (0) and overlaps (2 or more) are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Watch(TorchDispatchMode):
    """Record, while active, what happens to the tensors of a checkpoint and to the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.given: set[str] = set()
        self.used: set[str] = set()
        self._origin: dict[int, set[str]] = {}  # storage -> the checkpoint tensors whose values it holds
        self._writes: dict[int, Tensor] = {}  # storage of a parameter -> writes to each of its elements
        self._alive: list[Tensor] = []  # a storage that is freed could come back as another tensor
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            count = storage.nbytes() // parameter.element_size()
            self._writes[storage.data_ptr()] = torch.zeros(count, dtype=torch.uint8)

    def checkpoint(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the checkpoint's tensors on, each in a storage of its own by which it is known from then on."""
        for name, tensor in weights:
            self.given.add(name)
            own = tensor.clone()
            self._mark(own, {name})
            yield name, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names = set().union(*(self._origin.get(key(t), set()) for t in tensors((args, kwargs))))
        written = self._destinations(func, args, kwargs)
        for destination in written:
            counts = self._writes.get(key(destination))
            if counts is not None:
                view = counts.as_strided(destination.size(), destination.stride(), destination.storage_offset())
                view.add_(1)
                self.used |= names
        if names and not written:
            for tensor in tensors(result):
                if key(tensor) not in self._origin:
                    self._mark(tensor, names)
        return result

    def _mark(self, tensor: Tensor, names: set[str]) -> None:
        self._alive.append(tensor)
        self._origin[key(tensor)] = names

    @staticmethod
    def _destinations(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an operator writes into, by its schema."""
        out = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                out += tensors(value)
        return out

    def report(self, model: nn.Module) -> dict[str, Any]:
        """What was left over, half filled or written twice; call it before the weights are post-processed."""
        half, twice = [], []
        for name, parameter in model.named_parameters():
            counts = self._writes[key(parameter)]
            mine = counts.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())
            if bool((mine == 0).any()):
                half.append([name, int((mine > 0).sum()), mine.numel()])
            if bool((mine > 1).any()):
                twice.append(name)
        return {
            "given": len(self.given),
            "not_consumed": sorted(self.given - self.used),
            "half_filled": sorted(half),
            "written_twice": sorted(twice),
        }


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]
