"""Attention over a paged KV cache on the CPU: the numpy face of the Numba twin of `kernels/attention.py`.

Codes become float32 a tile of tokens at a time, once for all query heads that share them; no decoded copy of the cache
exists. Accumulation is float32. Importing this loads numpy and Numba only.

Shape suffixes: T tokens, H heads, D values of a head, R latent values, C values of a latent row.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.cpu.attention_run import Task, run
from quantkit.kernels.cpu.convert import as_f32
from quantkit.kernels.cpu.kv_tile import CODES, E4M3_UNIT, Rows
from quantkit.kernels.cpu.kv_write import write, write_latent
from quantkit.kernels.kv import Batch, KVCache, LatentCache, k_dim, pages_and_slots, v_dim
from quantkit.kernels.kv_check import check_batch

__all__ = ["attend", "attend_latent", "write", "write_latent"]

F32 = NDArray[np.float32]


def _bytes(array: Any) -> NDArray[np.uint8]:
    return np.empty(0, np.uint8) if array is None else array.reshape(-1).view(np.uint8)


def _rows(format: str, codes: Any, block_scale: Any, heads: int, width: int) -> Rows:
    row = codes.shape[-1] * codes.itemsize
    return Rows(_bytes(codes), _bytes(block_scale), CODES[format], heads, width, row)


def attend(
    q_THD: NDArray[Any], cache: KVCache, batch: Batch,
    *, softmax_scale: float, window: int = 0, sinks_H: F32 | None = None, threads: int = 1,
) -> F32:  # fmt: skip
    """Attention of the T queries of a batch: float32 [T, heads, V width]; the rest as `kernels/attention.py` says.

    q_THD is float32, float16 or uint16 (bits of bfloat16). The result does not depend on `threads`.
    """
    check_batch(cache, batch, q_THD, softmax_scale=softmax_scale, window=window, sinks_H=sinks_H)
    heads = cache.k.shape[2]
    k_rows = _rows(cache.format, cache.k, cache.k_block_scale, heads, k_dim(cache))
    v_rows = _rows(cache.format, cache.v, cache.v_block_scale, heads, v_dim(cache))
    unit = float(E4M3_UNIT) if cache.format == "e4m3" else 1.0
    task = _task(q_THD, cache, batch, window, softmax_scale * cache.k_scale * unit, cache.v_scale * unit, False)
    out_THD = np.empty((*q_THD.shape[:2], v_rows.width), np.float32)
    run(task, k_rows, v_rows, sinks_H, out_THD, threads)
    return out_THD


def attend_latent(
    q_THC: NDArray[Any], cache: LatentCache, batch: Batch, *, softmax_scale: float, threads: int = 1
) -> F32:
    """Absorbed latent attention: float32 [T, heads, rank]; q_THC [T, heads, rank + rope], otherwise as `attend`."""
    check_batch(cache, batch, q_THC, softmax_scale=softmax_scale)
    rows = _rows(cache.format, cache.rows, None, 1, k_dim(cache))
    unit = cache.scale * (float(E4M3_UNIT) if cache.format == "e4m3" else 1.0)
    task = _task(q_THC, cache, batch, 0, softmax_scale * unit, unit, True)
    out_THR = np.empty((*q_THC.shape[:2], cache.rank), np.float32)
    run(task, rows, rows, None, out_THR, threads)
    return out_THR


def _task(
    q: NDArray[Any], cache: KVCache | LatentCache, batch: Batch, window: int, scale: float, v_scale: float, shared: bool
) -> Task:
    group = q.shape[1] // (cache.k.shape[2] if isinstance(cache, KVCache) else 1)
    start, lengths, table = (cast(NDArray[np.int32], a) for a in (batch.query_start, batch.lengths, batch.block_table))
    slots, held = pages_and_slots(cache)[1], min(window, 1 << 40)
    return Task(as_f32(q), start, lengths, table, slots, group, held, float(scale), float(v_scale), shared)
