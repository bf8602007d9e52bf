"""Decode attention over every cache format, beside torch's `scaled_dot_product_attention` on plain keys and values.

One request of `context` cached tokens, one query token. Two layers: grouped-query attention with 32 query heads, 8 KV
heads of 128 values (kv-*), and latent attention with 64 heads over rows of 512 + 64 values (mla-*). Pages of 64 tokens
lie in random order. torch reads contiguous keys and values in bfloat16 and (on a CPU) float32; query heads that share a
KV head go in as queries of one head, which is several times faster than its `enable_gqa`. For latent attention, where
two products and a softmax are faster than `scaled_dot_product_attention`, both are there. On a GPU FlashInfer is a
baseline where it is installed.

Shape suffixes: T tokens, H heads, D values of a head, C values of a latent row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from quantkit.kernels.cpu.attention import write, write_latent
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, KVCache, LatentCache, new_cache, new_latent_cache, token_bytes
from quantkit.quantize.bench.device import Device, with_copies
from quantkit.quantize.bench.timing import Candidate, copies_for
from torch import Tensor
from torch.nn import functional

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LATENT_HEADS, RANK, ROPE = 64, 512, 64

Run = Callable[[int], Any]  # a call that works on copy c

_PAGE = 64
_BYTES_PER_VALUE = 24  # at most, of all caches of a kind and what is needed to make them
_KV_SCALE = 6.0 / 448  # for values within +-6
_SCALED = ("e4m3", "e5m2", "nvfp4")


@dataclass(frozen=True, slots=True)
class Layer:
    """The caches of one kind of attention: `caches` by the name of the kernel; `others` are the baselines found."""

    latent: bool
    context: int
    copies: int
    total_bytes: int
    caches: dict[str, list[KVCache | LatentCache]]
    others: dict[str, Run]
    batch: Batch
    query: Tensor


def check(names: Sequence[str], context: int, device: Device) -> None:
    """Raise QuantkitError unless the caches fit into memory; `names` are all of one kind of attention."""
    if names:
        values = RANK + ROPE if names[0].startswith("mla-") else 2 * KV_HEADS * HEAD_DIM
        most = 2 * device.room // (_BYTES_PER_VALUE * values)
        if context > most:
            allowed = f"up to {most:,} tokens here"
            raise QuantkitError("the context does not fit into memory", value=context, allowed=allowed)


def make_layer(names: Sequence[str], context: int, device: Device, *, latent: bool) -> Layer:
    """Caches of the same tokens in each format, in as many copies as keep them out of the processor's caches."""
    pages = -(-context // _PAGE)
    rng = np.random.default_rng(0)
    table = rng.permutation(pages).astype(np.int32)
    at = np.arange(context)
    slots_T = table[at // _PAGE].astype(np.int64) * _PAGE + at % _PAGE
    shape = (context, RANK + ROPE) if latent else (2, context, KV_HEADS, HEAD_DIM)
    x = rng.standard_normal(shape, np.float32).clip(-5, 5)
    caches = {n: _latent(n, x, pages, slots_T) if latent else _kv(n, x, pages, slots_T) for n in names}
    once = sum(token_bytes(c) * pages * _PAGE for c in caches.values()) + x.size * (6 if device.kind == "cpu" else 2)
    copies = copies_for(once, device.cache_bytes, device.room) if device.kind == "cpu" else 1
    heads, width = (LATENT_HEADS, RANK + ROPE) if latent else (QUERY_HEADS, HEAD_DIM)
    query = torch.from_numpy(rng.standard_normal((1, heads, width), np.float32)).bfloat16()
    others = dict((_latent_baselines if latent else _baselines)(x, query, device, copies))
    batch = Batch(np.array([0, 1], np.int32), table[None], np.array([context], np.int32))
    placed = {n: [device.place(c) for c in with_copies(c, copies)] for n, c in caches.items()}
    return Layer(latent, context, copies, copies * once, placed, others, device.place(batch), query)


def _kv(name: str, x: Any, pages: int, slots_T: Any) -> KVCache:
    format: Any = name.removeprefix("kv-")
    scale = _KV_SCALE if format in _SCALED else 1.0
    cache = new_cache(format, pages, _PAGE, KV_HEADS, HEAD_DIM, k_scale=scale, v_scale=scale)
    write(cache, slots_T, x[0], x[1])
    return cache


def _latent(name: str, x_TC: Any, pages: int, slots_T: Any) -> LatentCache:
    format: Any = name.removeprefix("mla-")
    cache = new_latent_cache(format, pages, _PAGE, RANK, ROPE, scale=_KV_SCALE if format == "e4m3" else 1.0)
    latent, rope = (np.ascontiguousarray(part) for part in (x_TC[:, :RANK], x_TC[:, RANK:]))
    write_latent(cache, slots_T, latent, rope)
    return cache


def _dense(x: Any, device: Device, copies: int) -> Iterator[tuple[str, list[Tensor]]]:
    """The plain values in each dtype that torch computes in; float32 on the CPU only."""
    if device.kind == "cpu":
        yield "f32", [torch.from_numpy(x.copy()) for _ in range(copies)]
    bits = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    yield "bf16", [device.tensor(bits.copy()).view(torch.bfloat16) for _ in range(copies)]


def _baselines(x: Any, query: Tensor, device: Device, copies: int) -> Iterator[tuple[str, Run]]:
    heads_first = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    for dtype, dense in _dense(heads_first, device, copies):
        yield f"torch {dtype} sdpa", _sdpa(query.to(dense[0]).view(KV_HEADS, -1, HEAD_DIM), dense)
    if device.kind == "cuda" and find_spec("flashinfer") is not None:
        k, v = torch.from_numpy(x).to(device.where, torch.bfloat16)
        yield "flashinfer bf16", _flashinfer(query[0].to(k), k, v)


def _sdpa(q_HND: Tensor, copies: list[Tensor]) -> Run:
    def run(c: int) -> Tensor:
        k, v = copies[c % len(copies)]
        return functional.scaled_dot_product_attention(q_HND[None], k[None], v[None])

    return run


def _flashinfer(q_HD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Run:
    def run(_: int) -> Any:
        import flashinfer

        return flashinfer.single_decode_with_kv_cache(q_HD, k_THD, v_THD)

    return run


def _latent_baselines(x_TC: Any, query: Tensor, device: Device, copies: int) -> Iterator[tuple[str, Run]]:
    for dtype, dense in _dense(x_TC, device, copies):
        q_HC = query[0].to(dense[0])
        yield f"torch {dtype} sdpa", _latent_sdpa(q_HC, dense)
        yield f"torch {dtype} products", _latent_products(q_HC, dense)


def _latent_sdpa(q_HC: Tensor, copies: list[Tensor]) -> Run:
    def run(c: int) -> Tensor:
        k_TC = copies[c % len(copies)][None, None]
        return functional.scaled_dot_product_attention(q_HC[None, None], k_TC, k_TC[..., :RANK])

    return run


def _latent_products(q_HC: Tensor, copies: list[Tensor]) -> Run:
    def run(c: int) -> Tensor:
        k_TC = copies[c % len(copies)]
        return torch.softmax(q_HC @ k_TC.T * q_HC.shape[1] ** -0.5, 1) @ k_TC[:, :RANK]

    return run


def candidates(layer: Layer, device: Device) -> tuple[list[Candidate], list[Candidate]]:
    """Attention over each cache, and the baselines."""
    attend = device.twin("attention", "attend_latent" if layer.latent else "attend")
    q, scale = device.activations(layer.query), layer.query.shape[2] ** -0.5

    def ours(name: str, copies: list[Any]) -> Candidate:
        return Candidate(name, lambda c: attend(q, copies[c % len(copies)], layer.batch, softmax_scale=scale))

    return (
        [ours(name, copies) for name, copies in layer.caches.items()],
        [Candidate(name, run) for name, run in layer.others.items()],
    )


def row(name: str, layer: Layer) -> dict[str, Any]:
    """Sizes and operations: m query heads of one token, n cached tokens, k values of a key."""
    heads, width = int(layer.query.shape[1]), int(layer.query.shape[2])
    return {
        "kernel": name, "m": heads, "n": layer.context, "k": width,
        "packed_bytes": token_bytes(layer.caches[name][0]) * layer.context,
        "operations": 2 * heads * layer.context * (width + (RANK if layer.latent else width)),
    }  # fmt: skip
