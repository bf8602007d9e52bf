"""Attention over a paged KV cache: what it computes, in plain torch, and the choice of a fast twin by device.

Decode, prefill and any mix: query i of a request with n queries and L cached tokens stands at position L - n + i and
sees the positions up to its own, with a window of w only the last w of them. With p = softmax(scale * q k) over those,
o = sum p v. A sink is one more logit a head that takes part in the softmax and has no value (GPT-OSS).
`attend_latent` is the absorbed form of multi-head latent attention: all heads share the row of a token, whose first
`rank` values are V.

The reference goes through the cache a run of pages at a time and keeps the running maximum and sum of the online
softmax (Milakov and Gimelshein 2018, FlashAttention 2022); codes become float32 in that loop, sums are float32. A token
that a query does not see has no part in it at all, even if it is not a number. The twins, `cpu/attention.py` (Numba)
and `gpu/attention.py` (Triton), do the same in other orders.

Shape suffixes: T tokens, H heads (K KV heads, N query heads sharing one), D values, S slots, X queries of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, KVCache, LatentCache, pages_and_slots, v_dim
from quantkit.kernels.kv_check import check_batch, check_write, check_write_latent
from quantkit.kernels.kv_rows import decode_latent, decode_rows, encode_latent, encode_rows
from torch import Tensor

_RUN = 256  # tokens that the reference decodes at a time, rounded up to pages
Rows = Callable[[Tensor], tuple[Tensor, Tensor]]  # pages -> k [slots, K, D] and v [slots, K, V] of all their slots


def _scatter(target: Any, slots_T: Tensor, rows: Tensor) -> None:
    """Put rows into the slots of a cache array [P, S, ...]; slot -1 is nowhere."""
    flat = target.view(target.shape[0] * target.shape[1], *target.shape[2:])
    if flat.dtype == torch.uint16:  # torch has few operations on it
        flat, rows = flat.view(torch.int16), rows.view(torch.int16)
    used = slots_T >= 0
    flat[slots_T[used].long()] = rows[used]


def reference_write(cache: KVCache, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """See `write`."""
    check_write(cache, slots_T, k_THD, v_THD)
    parts = (
        (k_THD, cache.k, cache.k_scale, cache.k_block_scale),
        (v_THD, cache.v, cache.v_scale, cache.v_block_scale),
    )
    for x, target, scale, target_scale in parts:
        codes, block_scale = encode_rows(x.float(), cache.format, scale)
        _scatter(target, slots_T, codes)
        if block_scale is not None:
            _scatter(target_scale, slots_T, block_scale)


def reference_write_latent(cache: LatentCache, slots_T: Tensor, latent_TR: Tensor, rope_TD: Tensor) -> None:
    """See `write_latent`."""
    check_write_latent(cache, slots_T, latent_TR, rope_TD)
    _scatter(cache.rows, slots_T, encode_latent(latent_TR.float(), rope_TD.float(), cache.format, cache.scale))


def _runs(table: Tensor, first: int, last: int, slots: int) -> Iterator[tuple[int, Tensor]]:
    """(position of the first slot, pages) of runs of pages that hold the positions first .. last - 1."""
    step = max(_RUN // slots, 1)
    for page in range(first // slots, -(-last // slots), step):
        yield page * slots, table[page : min(page + step, -(-last // slots))].long()


def _groups(first: int, queries: int, start: int, end: int, window: int) -> Iterator[tuple[slice, slice]]:
    """(queries, tokens they see of positions start .. end - 1): all at once where they see the same, else one by one.

    `first` is the position of the first query.
    """
    seen = []
    for x in range(first, first + queries):
        oldest = max(x + 1 - window, 0) if window else 0
        seen.append((max(oldest, start) - start, min(x + 1, end) - start))
    if all(s == seen[0] for s in seen):
        yield slice(0, queries), slice(*seen[0])
    else:
        yield from ((slice(i, i + 1), slice(*s)) for i, s in enumerate(seen) if s[0] < s[1])


def _add_tokens(q_XKND: Tensor, k_SKD: Tensor, v_SKV: Tensor, top: Tensor, total: Tensor, o_XKNV: Tensor) -> None:
    """One step of the online softmax, in place: `top` running maximum, `total` sum of p, both [X, K, N]."""
    s_XKNS = torch.einsum("xknd,skd->xkns", q_XKND, k_SKD)
    new = torch.maximum(top, s_XKNS.amax(-1))
    shift = new.masked_fill(new == -torch.inf, 0.0)  # else the difference below is not a number
    p_XKNS = torch.exp(s_XKNS - shift[..., None])
    rescale = torch.exp(top - shift)
    total.mul_(rescale).add_(p_XKNS.sum(-1))
    o_XKNV.mul_(rescale[..., None]).add_(torch.einsum("xkns,skv->xknv", p_XKNS, v_SKV))
    top.copy_(new)


def _attend_request(
    q_XKND: Tensor, rows: Rows, table: Tensor, length: int, slots: int, window: int, sinks_KN: Tensor | None, width: int
) -> Tensor:
    """Outputs [X, K, N, width] of the last X tokens of one request; q is scaled already."""
    queries = q_XKND.shape[0]
    top = q_XKND.new_full(q_XKND.shape[:3], -torch.inf)
    total = torch.zeros_like(top)
    o_XKNV = q_XKND.new_zeros(*q_XKND.shape[:3], width)
    oldest = max(length - queries + 1 - window, 0) if window else 0
    for start, pages in _runs(table, oldest, length, slots):
        k_SKD, v_SKV = rows(pages)
        end = min(start + len(k_SKD), length)
        for x, s in _groups(length - queries, queries, start, end, window):
            _add_tokens(q_XKND[x], k_SKD[s], v_SKV[s], top[x], total[x], o_XKNV[x])
    return _finish(o_XKNV, top, total, sinks_KN)


def _finish(o_XKNV: Tensor, top: Tensor, total: Tensor, sinks_KN: Tensor | None) -> Tensor:
    if sinks_KN is None:
        return o_XKNV / total[..., None]
    new = torch.maximum(top, sinks_KN)
    rescale = torch.exp(top - new)
    total = total * rescale + torch.exp(sinks_KN - new)
    return o_XKNV * (rescale / total)[..., None]


def _attend(
    q_TKND: Tensor, rows: Rows, batch: Batch, slots: int, window: int, sinks_KN: Tensor | None, width: int
) -> Tensor:
    start, lengths = (x.tolist() for x in (batch.query_start, batch.lengths))
    out = q_TKND.new_empty(*q_TKND.shape[:3], width)
    for r, length in enumerate(lengths):
        if start[r + 1] > start[r]:
            own = slice(start[r], start[r + 1])
            table: Any = batch.block_table[r]
            out[own] = _attend_request(q_TKND[own], rows, table, length, slots, window, sinks_KN, width)
    return out.flatten(1, 2)


def reference_attend(
    q_THD: Tensor, cache: KVCache, batch: Batch,
    *, softmax_scale: float, window: int = 0, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `attend`."""
    check_batch(cache, batch, q_THD, softmax_scale=softmax_scale, window=window, sinks_H=sinks_H)
    heads = int(cache.k.shape[2])

    def rows(pages: Tensor) -> tuple[Tensor, Tensor]:
        k = decode_rows(_take(cache.k, pages), cache.format, cache.k_scale, _take(cache.k_block_scale, pages))
        v = decode_rows(_take(cache.v, pages), cache.format, cache.v_scale, _take(cache.v_block_scale, pages))
        return k.flatten(0, 1), v.flatten(0, 1)

    q_TKND = (q_THD.float() * softmax_scale).view(len(q_THD), heads, q_THD.shape[1] // heads, q_THD.shape[2])
    sinks_KN = None if sinks_H is None else sinks_H.view(heads, -1)
    return _attend(q_TKND, rows, batch, pages_and_slots(cache)[1], window, sinks_KN, v_dim(cache))


def reference_attend_latent(q_THC: Tensor, cache: LatentCache, batch: Batch, *, softmax_scale: float) -> Tensor:
    """See `attend_latent`."""
    check_batch(cache, batch, q_THC, softmax_scale=softmax_scale)

    def rows(pages: Tensor) -> tuple[Tensor, Tensor]:
        k = decode_latent(_take(cache.rows, pages), cache.format, cache.scale).flatten(0, 1)[:, None]
        return k, k[..., : cache.rank]

    q_TKND = (q_THC.float() * softmax_scale)[:, None]
    return _attend(q_TKND, rows, batch, pages_and_slots(cache)[1], 0, None, cache.rank)


def _take(array: Any, pages: Tensor) -> Any:
    """Pages of a cache array, copied; torch cannot index uint16."""
    if array is None:
        return None
    return array.view(torch.int16)[pages].view(torch.uint16) if array.dtype == torch.uint16 else array[pages]


def _as_numpy(value: Any) -> Any:
    """A tensor on the CPU as the numpy array over the same memory, bfloat16 as uint16; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        raise QuantkitError("tensors lie on different devices", value=str(value.device), allowed="cpu, as the cache")
    value = value.detach()
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()


def _record_as_numpy(record: Any) -> Any:
    return type(record)(**{f.name: _as_numpy(getattr(record, f.name)) for f in fields(record)})


def _on_cpu(cached: Any) -> bool:
    """True if the cache lies in the memory of the CPU, False for a GPU."""
    device = cached.device.type if isinstance(cached, Tensor) else type(cached).__name__
    if device not in ("cpu", "cuda"):
        raise QuantkitError("no attention kernel for this device", value=device, allowed="tensors on cpu or cuda")
    return bool(device == "cpu")


def write(cache: KVCache, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """Store the keys and values of T tokens in their slots (page * S + offset; -1: the token is skipped).

    slots_T int32 or int64, each slot once; k_THD [T, KV heads, D] and v_THD float32, float16 or bfloat16. Rounding as
    in `kv_rows.py`. Raises QuantkitError before anything is written.
    """
    if _on_cpu(cache.k):
        from quantkit.kernels.cpu import attention as cpu

        cpu.write(
            _record_as_numpy(cache), *(_as_numpy(x) for x in (slots_T, k_THD, v_THD)), threads=torch.get_num_threads()
        )
    else:
        from quantkit.kernels.gpu import attention as gpu

        gpu.write(cache, slots_T, k_THD, v_THD)


def write_latent(cache: LatentCache, slots_T: Tensor, latent_TR: Tensor, rope_TD: Tensor) -> None:
    """Store the latent rows of T tokens; latent_TR [T, rank] and rope_TD [T, rope], otherwise as `write`."""
    if _on_cpu(cache.rows):
        from quantkit.kernels.cpu import attention as cpu

        cpu.write_latent(
            _record_as_numpy(cache),
            *(_as_numpy(x) for x in (slots_T, latent_TR, rope_TD)),
            threads=torch.get_num_threads(),
        )
    else:
        from quantkit.kernels.gpu import attention as gpu

        gpu.write_latent(cache, slots_T, latent_TR, rope_TD)


def attend(
    q_THD: Tensor, cache: KVCache, batch: Batch,
    *, softmax_scale: float, window: int = 0, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the T queries of a batch: float32 [T, heads, V width].

    q_THD float32, float16 or bfloat16 [T, heads, D]; query heads h * n .. h * n + n - 1 share KV head h. window: a
    query sees its last `window` tokens, itself included; 0 means all. sinks_H float32 [heads]: a logit that joins the
    softmax and has no value. Raises QuantkitError before the cache is read.
    """
    if _on_cpu(cache.k):
        from quantkit.kernels.cpu import attention as cpu

        on_cpu = cpu.attend(
            _as_numpy(q_THD), _record_as_numpy(cache), _record_as_numpy(batch), softmax_scale=softmax_scale,
            window=window, sinks_H=_as_numpy(sinks_H), threads=torch.get_num_threads(),
        )  # fmt: skip
        return torch.from_numpy(on_cpu)
    from quantkit.kernels.gpu import attention as gpu

    o_THV: Tensor = gpu.attend(q_THD, cache, batch, softmax_scale=softmax_scale, window=window, sinks_H=sinks_H)
    return o_THV


def attend_latent(q_THC: Tensor, cache: LatentCache, batch: Batch, *, softmax_scale: float) -> Tensor:
    """Absorbed latent attention: float32 [T, heads, rank] of q_THC [T, heads, rank + rope]; otherwise as `attend`."""
    if _on_cpu(cache.rows):
        from quantkit.kernels.cpu import attention as cpu

        on_cpu = cpu.attend_latent(
            _as_numpy(q_THC), _record_as_numpy(cache), _record_as_numpy(batch), softmax_scale=softmax_scale,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        return torch.from_numpy(on_cpu)
    from quantkit.kernels.gpu import attention as gpu

    o_THV: Tensor = gpu.attend_latent(q_THC, cache, batch, softmax_scale=softmax_scale)
    return o_THV
