"""What an attention kernel or a cache write is asked to do, checked before any memory is touched.

Kernels index the cache with numbers from block tables and slot lists and do not look twice. A wrong number would read
another request's keys or write over them, so every one that will be used is checked here, and only those.

Shape suffixes as in `kv.py`: R requests, T tokens, H heads, D values of a head, L logical pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, KVCache, LatentCache, check_array, check_cache, k_dim, pages_and_slots, v_dim

if TYPE_CHECKING:
    from quantkit.kernels.kv import Array

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def float_dtypes(array: Array) -> tuple[str, ...]:
    """Dtypes of queries, keys and values: bfloat16 travels as uint16 in numpy."""
    return ("float32", "float16", "uint16" if isinstance(array, np.ndarray) else "bfloat16")


def host(array: Array) -> NDArray[Any]:
    """The array as numpy, copied from its device where needed."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def _check_slots(cache: KVCache | LatentCache, slots_T: Array, first: Array) -> None:
    pages, size = pages_and_slots(cache)
    check_array("slots", slots_T, ("int32", "int64"), ("T",), first)
    slots = host(slots_T)
    bad = (slots < -1) | (slots >= pages * size)
    if bad.any():
        raise QuantkitError(
            f"slot of token {int(np.argmax(bad))} is outside the cache", value=int(slots[np.argmax(bad)]),
            allowed=f"0 to {pages * size - 1}, or -1 to skip the token",
        )  # fmt: skip
    used = np.sort(slots[slots >= 0])
    twice = used[1:][used[1:] == used[:-1]]
    if twice.size:
        raise QuantkitError("two tokens are written to one slot", value=int(twice[0]), allowed="each slot once")


def check_write(cache: KVCache, slots_T: Array, k_THD: Array, v_THD: Array) -> None:
    """Raise unless the keys and values of T tokens fit the cache and each slot is inside it and used once."""
    check_cache(cache)
    _check_slots(cache, slots_T, cache.k)
    tokens, heads = int(slots_T.shape[0]), int(cache.k.shape[2])
    check_array("k", k_THD, float_dtypes(cache.k), (tokens, heads, k_dim(cache)), cache.k)
    check_array("v", v_THD, float_dtypes(cache.k), (tokens, heads, v_dim(cache)), cache.k)


def check_write_latent(cache: LatentCache, slots_T: Array, latent_TR: Array, rope_TD: Array) -> None:
    """Raise unless the latent rows of T tokens fit the cache and each slot is inside it and used once."""
    check_cache(cache)
    _check_slots(cache, slots_T, cache.rows)
    tokens = int(slots_T.shape[0])
    check_array("latent", latent_TR, float_dtypes(cache.rows), (tokens, cache.rank), cache.rows)
    check_array("rope", rope_TD, float_dtypes(cache.rows), (tokens, cache.rope), cache.rows)


def _check_lengths(start: I64, lengths: I64, table: I32, slots: int, tokens: int) -> None:
    queries = np.diff(start)
    if start[0] != 0 or start[-1] != tokens or (queries < 0).any():
        shown = start.tolist() if start.size <= 16 else f"{start[0]} ... {start[-1]}"
        raise QuantkitError("query_start does not divide the queries", value=shown, allowed=f"0 rising to {tokens}")
    short = lengths < queries
    if short.any():
        r = int(np.argmax(short))
        raise QuantkitError(
            f"request {r} has more queries than tokens in the cache", value=int(lengths[r]),
            allowed=f"at least {int(queries[r])}",
        )  # fmt: skip
    room = table.shape[1] * slots
    if (lengths > room).any():
        r = int(np.argmax(lengths > room))
        raise QuantkitError(
            f"request {r} is longer than its block table", value=int(lengths[r]),
            allowed=f"at most {room}: {table.shape[1]} pages of {slots}",
        )  # fmt: skip


def _check_pages(start: I64, lengths: I64, table: I32, slots: int, pages: int, window: int) -> None:
    """Every page that some query sees; with a window, the first ones may be gone."""
    queries = np.diff(start)
    seen = np.maximum(lengths - queries - min(window, 1 << 40) + 1, 0) if window else np.zeros_like(lengths)
    first_R, last_R = seen // slots, -(-lengths // slots)
    logical_L = np.arange(table.shape[1])
    used_RL = (logical_L >= first_R[:, None]) & (logical_L < last_R[:, None]) & (queries > 0)[:, None]
    bad_RL = used_RL & ((table < 0) | (table >= pages))
    if bad_RL.any():
        r, page = (int(n) for n in np.argwhere(bad_RL)[0])
        raise QuantkitError(
            f"page {page} of request {r} is outside the cache", value=int(table[r, page]), allowed=f"0 to {pages - 1}"
        )


def check_batch(
    cache: KVCache | LatentCache, batch: Batch, q_THD: Array,
    *, softmax_scale: float, window: int = 0, sinks_H: Array | None = None,
) -> None:  # fmt: skip
    """Raise unless T queries of the batch can be answered from the cache; arguments as those of `attend`."""
    check_cache(cache)
    first = cache.k if isinstance(cache, KVCache) else cache.rows
    check_array("q", q_THD, float_dtypes(first), ("T", "heads", k_dim(cache)), first)
    heads = int(q_THD.shape[1])
    kv_heads = int(cache.k.shape[2]) if isinstance(cache, KVCache) else 1
    if heads == 0 or heads % kv_heads:
        raise QuantkitError("query heads do not share the KV heads evenly", value=heads, allowed=f"{kv_heads} x n")
    if not 0 < softmax_scale < float(np.finfo(np.float32).max):
        raise QuantkitError("the softmax scale is not usable", value=softmax_scale, allowed="finite and positive")
    if not isinstance(window, int) or window < 0:
        raise QuantkitError("the window is not usable", value=window, allowed="0 (everything) or a number of tokens")
    if sinks_H is not None:
        check_array("sinks", sinks_H, ("float32",), (heads,), first)
    check_array("block_table", batch.block_table, ("int32",), ("R", "pages"), first)
    requests = int(batch.block_table.shape[0])
    check_array("query_start", batch.query_start, ("int32",), (requests + 1,), first)
    check_array("lengths", batch.lengths, ("int32",), (requests,), first)
    pages, slots = pages_and_slots(cache)
    start, lengths = host(batch.query_start).astype(np.int64), host(batch.lengths).astype(np.int64)
    table = host(batch.block_table)
    _check_lengths(start, lengths, table, slots, int(q_THD.shape[0]))
    _check_pages(start, lengths, table, slots, pages, window)
