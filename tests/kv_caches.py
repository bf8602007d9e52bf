"""Caches for the attention tests: requests in pages of random order, everything else poisoned.

A slot that no request owns holds NaN, and so do whole spare pages; block tables end in numbers outside the cache. If any
of it is looked at, a result is not a number or the process dies.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from oracle import attention as oracle
from quantkit.kernels.cpu import attention as cpu
from quantkit.kernels.kv import Batch, KVCache, LatentCache, new_cache, new_latent_cache

SCALES = {"e4m3": (0.021, 0.017), "e5m2": (0.003, 0.5), "nvfp4": (0.011, 0.23)}
POISON = {"bf16": 0x7FFF, "f16": 0x7E01, "e4m3": 0x7F, "e5m2": 0xFE, "nvfp4": 0x77, "mxfp4": 0xF7, "dsa": 0xFF}
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}


def torch_of(record: Any, device: str = "cpu") -> Any:
    """The same record with tensors; on the CPU over the same memory."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return type(record)(
        **{n: torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for n, v in values.items()}
    )


def poisoned(format: str, pages: int, slots: int, heads: int, k_dim: int, v_dim: int) -> KVCache:
    k_scale, v_scale = SCALES.get(format, (1.0, 1.0))
    cache = new_cache(format, pages, slots, heads, k_dim, v_dim, k_scale=k_scale, v_scale=v_scale)
    for codes, scales in ((cache.k, cache.k_block_scale), (cache.v, cache.v_block_scale)):
        codes[...] = POISON[format]
        if scales is not None:
            scales[...] = NAN_SCALE[format]
    return cache


def paged(rng: np.random.Generator, lengths: list[int], queries: list[int], slots: int) -> tuple[Batch, int]:
    """A batch over pages in random order, and how many pages the cache needs (three more than are used)."""
    counts = [-(-n // slots) for n in lengths]
    pages = sum(counts) + 3
    order = rng.permutation(pages)
    table = np.full((len(lengths), max([*counts, 1]) + 1), 2**31 - 1, np.int32)
    for r, count in enumerate(counts):
        table[r, :count] = order[:count]
        order = order[count:]
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Batch(start, table, np.array(lengths, np.int32)), pages


def slots_of(batch: Batch, request: int, slots: int) -> np.ndarray:
    """The slot of each token of a request."""
    t = np.arange(batch.lengths[request])
    return batch.block_table[request, t // slots].astype(np.int64) * slots + t % slots


def filled(format: str, batch: Batch, pages: int, slots: int, k: list[np.ndarray], v: list[np.ndarray]) -> KVCache:
    """A poisoned cache with the keys and values [length, H, D] of each request written into it."""
    cache = poisoned(format, pages, slots, k[0].shape[1], k[0].shape[2], v[0].shape[2])
    for r in range(len(k)):
        cpu.write(cache, slots_of(batch, r, slots), k[r], v[r])
    return cache


def filled_latent(format: str, batch: Batch, pages: int, slots: int, rows: list[np.ndarray], rank: int) -> LatentCache:
    scale = 0.013 if format == "e4m3" else 1.0
    cache = new_latent_cache(format, pages, slots, rank, rows[0].shape[1] - rank, scale=scale)
    cache.rows[...] = POISON[format]
    for r, row in enumerate(rows):
        latent, rope = np.ascontiguousarray(row[:, :rank]), np.ascontiguousarray(row[:, rank:])
        cpu.write_latent(cache, slots_of(batch, r, slots), latent, rope)
    return cache


def decoded(cache: KVCache | LatentCache, batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values [length, H, D] of each request as the oracle reads them, float64."""
    out = []
    for table, length in zip(batch.block_table, batch.lengths, strict=True):

        def of(array, table=table, length=length):
            return None if array is None else oracle.tokens_of(array, table, length)

        if isinstance(cache, LatentCache):
            rows = oracle.latent_values(cache.format, of(cache.rows), cache.scale)[:, None]
            out.append((rows, rows[..., : cache.rank]))
        else:
            k = oracle.values(cache.format, of(cache.k), cache.k_scale, of(cache.k_block_scale))
            out.append((k, oracle.values(cache.format, of(cache.v), cache.v_scale, of(cache.v_block_scale))))
    return out


def exact(q: np.ndarray, cache, batch: Batch, scale: float, window: int = 0, sinks=None) -> np.ndarray:
    """Outputs in float64."""
    start = batch.query_start
    parts = [
        oracle.attend_one(q[start[r] : start[r + 1]].astype(np.float64), k, v, scale, window, sinks)
        for r, (k, v) in enumerate(decoded(cache, batch))
    ]
    return np.concatenate(parts)


def plain(q: np.ndarray, cache, batch: Batch, scale: float, window: int = 0, sinks=None) -> np.ndarray:
    """The same in plain float32 torch: values decoded beforehand, one softmax over all tokens, matrix products."""
    out = []
    for r, (k, v) in enumerate(decoded(cache, batch)):
        rows = torch.from_numpy(q[batch.query_start[r] : batch.query_start[r + 1]]).float()
        k_HLD, v_HLD = (torch.from_numpy(x).float().transpose(0, 1) for x in (k, v))
        q_HXND = rows.unflatten(1, (len(k_HLD), -1)).transpose(0, 1)
        s = torch.einsum("hxnd,hld->hxnl", q_HXND, k_HLD) * scale
        behind = torch.arange(len(rows))[:, None] + len(k) - len(rows) - torch.arange(len(k))
        unseen = (behind < 0) | ((behind >= window) if window else torch.zeros_like(behind, dtype=torch.bool))
        s = s.masked_fill(unseen[:, None, :], -torch.inf)
        if sinks is not None:
            logits = torch.from_numpy(sinks).view(len(k_HLD), 1, -1, 1).expand(-1, len(rows), -1, -1)
            s = torch.cat([s, logits], -1)
        p = torch.softmax(s, -1)[..., : len(k)]
        out.append(torch.einsum("hxnl,hlv->xhnv", p, v_HLD).flatten(1, 2).numpy())
    return np.concatenate(out)


def assert_close(
    got: np.ndarray, q: np.ndarray, cache, batch: Batch, scale: float, window: int = 0, sinks=None
) -> None:
    """At most twice the error of the plain float32 computation, measured against float64 (FlashAttention's rule).

    Four units in the last place of the largest output are allowed for: with few tokens, or equal ones, the plain error
    is a matter of luck and often zero.
    """
    expected = exact(q, cache, batch, scale, window, sinks)
    error = np.abs(got - expected).max(initial=0)
    bound = np.abs(plain(q, cache, batch, scale, window, sinks) - expected).max(initial=0)
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    assert error <= 2 * bound + 2.0**-21 * np.abs(expected).max(initial=0), (error, bound)


def problem(
    seed: int, format: str, *, slots: int, heads: int, group: int, k_dim: int, v_dim: int, lengths: list[int],
    queries: list[int],
) -> tuple[np.ndarray, KVCache, Batch]:  # fmt: skip
    """Random queries, a filled cache and the batch over it."""
    rng = np.random.default_rng(seed)
    batch, pages = paged(rng, lengths, queries, slots)
    k = [rng.standard_normal((n, heads, k_dim), np.float32) for n in lengths]
    v = [rng.standard_normal((n, heads, v_dim), np.float32) for n in lengths]
    q = rng.standard_normal((sum(queries), heads * group, k_dim), np.float32)
    return q, filled(format, batch, pages, slots, k, v), batch
