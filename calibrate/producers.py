"""What scales the channels of a linear layer's input, and who else reads that input: found by tracing, for any family.

A method that divides a channel by s and multiplies the weights that read it by s has to know what makes the channel:
the vector of a norm, or the rows of a projection (`up_proj` for `down_proj`, `v_proj` for `o_proj`). A run of two
tokens on the meta device shows every operation on every tensor, so nothing is assumed of names: what is found is a fact
of the forward, and a tensor that anything but a linear layer reads is never scaled.

    T = vector * x                the vector's elements scale the channels of T
    T = y * z                     so do y's, where nothing else reads y: SwiGLU, gates of attention
    y = x W^T + b                 rows of W, and b, scale y; y may be some of the rows
    T = attention(q, k, y)        channels of a head are those of the values

Letters: E experts, O outputs (rows), I inputs, T tokens, H KV heads, Q query heads, D values of a head, L tokens of a
sample, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantkit.calibrate.observe import bound
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = ("_to_copy", "clone", "_unsafe_view", "_reshape_copy")
_SHAPES = ("empty_like", "new_empty", "zeros_like", "new_zeros", "ones_like", "full_like")  # no value is read


@dataclass(frozen=True, slots=True)
class Producer:
    """Parameters, by their names inside the layer, whose elements (of a vector) or rows scale a tensor's channels.

    bias   of the norm or projection: it is scaled with it
    first  the row that makes channel 0
    heads  (H, Q / H, D) where a row serves the channels of several query heads, else None
    """

    weight: str
    vector: bool
    bias: str | None = None
    first: int = 0
    heads: tuple[int, int, int] | None = None

    def rows(self, channels: int) -> Tensor:
        """The row, counted from `first`, that makes each channel."""
        rows = torch.arange(channels if self.heads is None else self.heads[0] * self.heads[2])
        if self.heads is None:
            return rows
        kv, copies, values = self.heads
        return rows.reshape(kv, 1, values).expand(kv, copies, values).reshape(-1)


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor: the linear weights that read it, by names inside the layer; what scales it, or why that is not known.

    An `experts` parameter stands for the matrices of all experts: of the same expert where its producer is one too.
    """

    readers: tuple[str, ...]
    producer: Producer | None
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Op:
    name: str
    inputs: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A tensor times a matrix of a layer."""

    x: Tensor
    w: Tensor
    weight: str
    bias: str | None


class _Trace(TorchDispatchMode):
    """Every operation of a run: what made a tensor, and what read it. Views are the tensor they show."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters  # storage -> name
        self.made: dict[int, _Op] = {}
        self.uses: dict[int, list[_Op]] = {}
        self._same: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an address is not given away while its tensor lives

    def key(self, x: Tensor) -> int:
        """What views and copies of one tensor have in common."""
        own = _storage(x)
        return self._same.get(own, own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        for made in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            self._record(func.overloadpacket.__name__, inputs, made, changes=func._schema.is_mutable)
        return out

    def _record(self, name: str, inputs: tuple[Tensor, ...], out: Tensor, *, changes: bool) -> None:
        self._alive.append(out)
        if not changes and any(_storage(out) == _storage(x) for x in inputs):
            return
        if name in _COPIES and _whole(inputs[0]):
            self._same[_storage(out)] = self.key(inputs[0])
        elif name not in _SHAPES:
            self.add(_Op(name, inputs, out))

    def add(self, op: _Op) -> None:
        """Record one operation."""
        self._alive.append(op.out)
        self.made[self.key(op.out)] = op
        for x in op.inputs:
            self.uses.setdefault(self.key(x), []).append(op)

    def name(self, x: Tensor) -> str | None:
        """The parameter that a tensor is, or is a part of."""
        return self._parameters.get(self.key(x))

    def product(self, op: _Op) -> _Product | None:
        """The operation as the product with a matrix of a layer, rows of which are outputs, or None."""
        order = {"mm": (0, 1, 2), "linear": (0, 1, 2), "addmm": (1, 2, 0)}.get(op.name)
        if order is None:
            return None
        x, w, *bias = (op.inputs[i] for i in order if i < len(op.inputs))
        names = [self.name(p) for p in (w, *bias)]
        sideways = op.name != "linear" and w.stride(0) != 1 and w.numel() == _size(w)  # stored [I, O]
        if names[0] is None or None in names or sideways:
            return None
        return _Product(x, w, names[0], names[1] if bias else None)

    def producer(self, x: Tensor) -> Producer | None:
        """What scales the channels of a tensor, the last axis of `x`."""
        op = self.made.get(self.key(x))
        if op is None:
            return None
        if op.name == "mul" and len(op.inputs) == 2 and _whole(x):
            return self._of_product(op)
        if op.name == "native_layer_norm" and len(op.inputs) == 3 and _whole(x):
            return self._vector(op.inputs[1], op.inputs[2])
        if op.name == "attention" and _whole(x):
            return self._of_attention(op)
        found = self.product(op)
        if found is None or x.stride(-1) != 1 or len(self.uses[self.key(found.w)]) != 1:
            return None
        return Producer(found.weight, False, found.bias, int(x.storage_offset()) % op.out.shape[-1])

    def _of_product(self, op: _Op) -> Producer | None:
        for x, other in (op.inputs, op.inputs[::-1]):
            if x.ndim == 1 and other.shape == op.out.shape and self._vector(x, None) is not None:
                return self._vector(x, None)
        for x in op.inputs:
            if x.shape == op.out.shape and self._read_once(x):
                found = self.producer(x)
                if found is not None:
                    return found
        return None

    def _of_attention(self, op: _Op) -> Producer | None:
        v_NHLD = op.inputs[2]
        _, kv, _, values = v_NHLD.shape
        heads = op.out.shape[2]
        laid_out = v_NHLD.stride(3) == 1 and v_NHLD.stride(1) == values and v_NHLD.numel() == _size(v_NHLD)
        if not laid_out or heads % kv or len(self.uses[self.key(v_NHLD)]) != 1:
            return None
        made = self.made.get(self.key(v_NHLD))
        found = None if made is None else self.producer(made.out)
        if found is None or found.heads is not None:
            return None
        return found if heads == kv else replace(found, heads=(kv, heads // kv, values))

    def _vector(self, w_I: Tensor, bias_I: Tensor | None) -> Producer | None:
        name = self.name(w_I)
        if name is None or len(self.uses[self.key(w_I)]) != 1:
            return None
        return Producer(name, True, None if bias_I is None else self.name(bias_I))

    def _read_once(self, x: Tensor) -> bool:
        """Whether one operation alone reads these channels."""
        rows = self.made[self.key(x)].out.shape[-1] if self.key(x) in self.made else x.shape[-1]
        mine = _channels(x, rows)
        reads = [y for op in self.uses[self.key(x)] for y in op.inputs if self.key(y) == self.key(x)]
        return sum(bool(mine & _channels(y, rows)) for y in reads) == 1


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _size(x: Tensor) -> int:
    """Elements of all of a tensor's storage."""
    return x.untyped_storage().nbytes() // x.element_size()


def _whole(x: Tensor) -> bool:
    return x.is_contiguous() and x.numel() == _size(x)


def _channels(x: Tensor, rows: int) -> set[int]:
    """Channels of the tensor with `rows` of them that the view `x` shows."""
    first = int(x.storage_offset()) % rows
    return set(range(first, min(first + x.shape[-1], rows)) if x.stride(-1) == 1 else range(rows))


def find_sources(model: Any, layers: Sequence[torch.nn.Module], run: Callable[[], None]) -> list[list[Source]]:
    """For each layer the tensors that its linear weights read, in the order they are read.

    run  runs two tokens through the meta `model`; where it fails nothing is found
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    trace = _Trace({_storage(p): f"{i}.{n}" for i, layer in enumerate(layers) for n, p in layer.named_parameters()})

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        out_NLQD = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        trace.add(_Op("attention", (q, k, v), out_NLQD))
        return out_NLQD, None

    with ExitStack() as stack:
        stack.enter_context(bound(ALL_EXPERTS_FUNCTIONS, "eager", _one_expert))
        stack.enter_context(bound(ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation, attention))
        stack.enter_context(torch.no_grad())
        stack.enter_context(trace)
        try:
            run()
        except (NotImplementedError, RuntimeError):
            return [[] for _ in layers]
    found: list[list[Source]] = [[] for _ in layers]
    for key, uses in trace.uses.items():
        products = [trace.product(op) for op in uses]
        readers = [p for p in products if p is not None and trace.key(p.x) == key]
        if readers:
            strange = [op.name for op, p in zip(uses, products, strict=True) if p not in readers]
            layer = readers[0].weight.partition(".")[0]
            found[int(layer)].append(_source(trace, f"{layer}.", readers, strange))
    return found


def _source(trace: _Trace, layer: str, readers: list[_Product], strange: list[str]) -> Source:
    """One tensor; `strange` are the other operations that read it."""
    names = tuple(dict.fromkeys(p.weight.removeprefix(layer) for p in readers))
    if strange:
        return Source(names, None, f"its input is read by something else as well ({strange[0]})")
    if len(names) != len(readers) or not all(_whole(p.x) and len(trace.uses[trace.key(p.w)]) == 1 for p in readers):
        return Source(names, None, "a part of a tensor is its input, or a weight is used twice")
    producer = trace.producer(readers[0].x)
    if producer is None or not producer.weight.startswith(layer):
        return Source(names, None, "no norm and no projection scales its input")
    bias = None if producer.bias is None else producer.bias.removeprefix(layer)
    return Source(names, replace(producer, weight=producer.weight.removeprefix(layer), bias=bias))


def _one_expert(module: Any, x_TI: Tensor, *_: Any) -> Tensor:
    """Expert 0 on all tokens, as transformers' loop has it: traced, it stands for every expert."""

    def project(name: str, x: Tensor) -> Tensor:
        w = getattr(module, name)[0]
        bias = getattr(module, f"{name}_bias")[0] if module.has_bias else None
        return torch.nn.functional.linear(x, w.T if module.is_transposed else w, bias)

    x = project("gate_up_proj" if module.has_gate else "up_proj", x_TI)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    project("down_proj", x)
    return torch.empty_like(x_TI)
