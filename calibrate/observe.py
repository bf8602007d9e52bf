"""What is watched while a block runs: inputs of linear layers, and the keys and values an engine would cache.

Nothing foreign is patched. Linear layers get forward pre-hooks; attention and experts are functions that transformers 5
looks up by name, and the name in use is bound to ours for the time of one run. (A *new* name would lose the mask
silently: transformers makes none for a name it does not know, and GLM-DSA's sparse mask knows only `eager` and `sdpa`.)

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C latent + RoPE values of an MLA cache row,
N samples of one batch, L tokens of a sample, R RoPE values of an MLA key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from greenlet import getcurrent

# (layer, keys [T, H, D], values [T, H, D]) -> the same as they come back from a quantised cache
Cache = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# inputs [..., I] of a layer -> the same as an engine that quantises activations multiplies them
Served = Callable[[torch.Tensor], torch.Tensor]
# a cache, or None for keys and values as they are -> what the attention gives then, [N, L, Q, D]
Attend = Callable[[Cache | None], torch.Tensor]
# (layer, what the attention gave, a way to run it once more on the same queries, keys and values)
Compare = Callable[[int, torch.Tensor, Attend], None]


class AllSeen(Exception):  # noqa: N818  (leaves the model's forward, no error)
    """What was to be observed has been: the rest of the block need not run."""


class Observer(Protocol):
    """Called while a block runs, in the order of its layers. Tensors are detached and hold real tokens only."""

    def linear(self, modules: tuple[str, ...], x_TI: torch.Tensor) -> None:
        """The input of layers that see the same one; of a routed expert only its tokens, and no call without any."""
        ...

    def kv(self, layer: int, q_TQD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """What an engine caches, and its queries: after RoPE and q/k norm, before KV heads are repeated."""
        ...

    def latent(self, layer: int, row_TC: torch.Tensor) -> None:
        """MLA, in place of `kv`: normalised latent and roped k_pe in one row.

        transformers turns interleaved RoPE pairs into halves first, so k_pe has the values of an engine's cache in
        another order.
        """
        ...


@contextmanager
def bound(interface: Any, key: str, function: Callable[..., Any]) -> Iterator[None]:
    """Bind `key` of one of transformers' function tables to `function`, in this process, until the end of the block."""
    interface[key] = function
    try:
        yield
    finally:
        del interface[key]


def _by_token(x_NHLD: torch.Tensor) -> torch.Tensor:
    return x_NHLD.transpose(1, 2).flatten(0, 1)


def _by_head(x_THD: torch.Tensor, like_NHLD: torch.Tensor) -> torch.Tensor:
    n, _, length, _ = like_NHLD.shape
    return x_THD.to(like_NHLD.dtype).reshape(n, length, *x_THD.shape[1:]).transpose(1, 2)


class _Attention:
    """Stands where transformers looks its attention function up, and calls the one that was there."""

    def __init__(
        self, inner: Callable[..., Any] | None, layer: int, observe: Observer | None, cache: Cache | None,
        compare: Compare | None,
    ) -> None:  # fmt: skip
        self.inner, self.layer = inner, layer
        self.observe, self.cache, self.compare = observe, cache, compare
        self._latents: dict[Any, tuple[torch.nn.Module, torch.Tensor]] = {}  # by the greenlet that is on its way here

    def expanding(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Forward pre-hook of MLA's `kv_b_proj`, which expands the latent: normalised, as it is cached."""
        if getcurrent() in self._latents:
            return None  # expanded once more for a comparison
        self._latents[getcurrent()] = (module, args[0])
        return None if self.cache is None else (self._row(self.cache, args[0]),)

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inner = self.inner or sys.modules[type(module).__module__].eager_attention_forward
        latent = self._latents.get(getcurrent())

        def attend(cache: Cache | None) -> torch.Tensor:
            if latent is not None:
                stored = self._expanded(module, cache, k, *latent)
            else:
                stored = self._stored(cache, k, v)
            out: torch.Tensor = inner(module, q, *stored, mask, *args, **kwargs)[0]
            return out

        if self.observe is not None and latent is not None:
            pe_NLR = k[:, 0, :, module.qk_nope_head_dim :]
            self.observe.latent(self.layer, torch.cat((latent[1], pe_NLR), -1).flatten(0, -2))
        elif self.observe is not None:
            self.observe.kv(self.layer, _by_token(q), _by_token(k), _by_token(v))
        stored = self._stored(self.cache, k, v) if latent is None else (self._roped(module, self.cache, k), v)
        out = inner(module, q, *stored, mask, *args, **kwargs)
        if self.compare is not None:
            self.compare(self.layer, out[0], attend)
        self._latents.pop(getcurrent(), None)
        return out

    def _stored(
        self, cache: Cache | None, k_NHLD: torch.Tensor, v_NHLD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they come back from the cache."""
        if cache is None:
            return k_NHLD, v_NHLD
        k_THD, v_THD = cache(self.layer, _by_token(k_NHLD), _by_token(v_NHLD))
        return _by_head(k_THD, k_NHLD), _by_head(v_THD, v_NHLD)

    def _row(self, cache: Cache, x_NLC: torch.Tensor) -> torch.Tensor:
        """A part of MLA's row as it comes back: keys of one head, values of no width."""
        row_T1C = x_NLC.flatten(0, -2)[:, None]
        return cache(self.layer, row_T1C, row_T1C[..., :0])[0].to(x_NLC.dtype).reshape(x_NLC.shape)

    def _roped(self, module: Any, cache: Cache | None, k_NHLD: torch.Tensor) -> torch.Tensor:
        """MLA: every head's key ends in the same roped k_pe, which the cache holds once."""
        if cache is None:
            return k_NHLD
        nope = module.qk_nope_head_dim
        pe_NLR = self._row(cache, k_NHLD[:, 0, :, nope:])
        return torch.cat((k_NHLD[..., :nope], pe_NLR[:, None].expand(-1, k_NHLD.shape[1], -1, -1)), -1)

    def _expanded(
        self, module: Any, cache: Cache | None, k_NHLD: torch.Tensor, expand: torch.nn.Module, latent_NLC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MLA: keys and values of all heads, expanded anew from the latent as it comes back."""
        latent_NLC = latent_NLC if cache is None else self._row(cache, latent_NLC)
        both_NHLD = expand(latent_NLC).unflatten(-1, (k_NHLD.shape[1], -1)).transpose(1, 2)
        nope = module.qk_nope_head_dim
        k = torch.cat((both_NHLD[..., :nope], k_NHLD[..., nope:]), -1)
        return self._roped(module, cache, k), both_NHLD[..., nope:]


@contextmanager
def attention_watched(
    layer_module: torch.nn.Module, implementation: str, layer: int, observe: Observer | None, cache: Cache | None,
    compare: Compare | None = None,
) -> Iterator[None]:  # fmt: skip
    """Show the observer what the attention of one block caches, and pass it through `cache`.

    For MLA `cache` is called twice, with the latent and with k_pe as keys of one head, and values of no width.
    `compare` is called after each attention; an observer may be shown the input of MLA's `kv_b_proj` again by it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner = None if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    attention = _Attention(inner, layer, observe, cache, compare)
    with ExitStack() as stack:
        stack.enter_context(bound(ALL_ATTENTION_FUNCTIONS, implementation, attention))
        for name, module in layer_module.named_modules():
            if name.endswith("kv_b_proj"):
                stack.callback(module.register_forward_pre_hook(attention.expanding).remove)
        yield


@contextmanager
def linears_watched(
    sets: Sequence[tuple[torch.nn.Module, tuple[str, ...]]], observe: Observer, only: Collection[tuple[str, ...]] | None
) -> Iterator[None]:
    """Show the observer the input of each set; the module is the one of the set that runs first.

    With `only`, AllSeen leaves the model's forward once these sets have been shown.
    """
    missing = None if only is None else set(only)
    with ExitStack() as stack:
        for module, names in sets:

            def hook(_: torch.nn.Module, args: tuple[Any, ...], names: tuple[str, ...] = names) -> None:
                x_TI = args[0].reshape(-1, args[0].shape[-1])
                if len(x_TI):
                    observe.linear(names, x_TI)
                if missing is not None:
                    missing.discard(names)
                    if not missing:
                        raise AllSeen

            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


@contextmanager
def inputs_served(layers: Sequence[tuple[torch.nn.Module, Served]]) -> Iterator[None]:
    """Put in place of each layer's input what an engine makes of it; layers that see one tensor share the result."""
    last: dict[Served, tuple[torch.Tensor, torch.Tensor]] = {}
    with ExitStack() as stack:
        for module, served in layers:

            def hook(_: torch.nn.Module, args: tuple[Any, ...], served: Served = served) -> tuple[Any, ...]:
                if served not in last or last[served][0] is not args[0]:
                    last[served] = (args[0], served(args[0]))
                return (last[served][1], *args[1:])

            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


def experts_forward(
    module: Any,
    hidden_TD: torch.Tensor,
    index_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    matrix: Callable[[str, int], torch.Tensor],
    entering: Callable[[str, int, torch.Tensor], torch.Tensor],
    *,
    only: range | None = None,
    out_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts of one layer, expert by expert as transformers' own loop does it: the same bits.

    `matrix(name, e)` gives the matrix of a parameter when it is needed; `entering(name, e, x)` what it multiplies where
    `x` comes to it. Of a wave, the experts `only` add what they give to `out_TD`.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    out_TD = torch.zeros_like(hidden_TD) if out_TD is None else out_TD

    def project(name: str, e: int, x: torch.Tensor) -> torch.Tensor:
        x = entering(name, e, x)
        w = matrix(name, e)
        bias = getattr(module, f"{name}_bias")[e] if module.has_bias else None
        if module.is_transposed:
            return x @ w if bias is None else x @ w + bias
        return torch.nn.functional.linear(x, w, bias)

    for e in torch.unique(index_TK).tolist():
        if e not in (range(module.num_experts) if only is None else only):
            continue  # of another wave, or the mark of a token that no expert of this machine takes
        position, token = torch.where(index_TK.T.eq(e))
        x = project(first, e, hidden_TD[token])
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = project("down_proj", e, x) * weight_TK[token, position, None]
        out_TD.index_add_(0, token, x.to(out_TD.dtype))
    return out_TD
