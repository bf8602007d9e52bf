"""Paged attention and cache writes on a GPU (Triton): the twins of `kernels/attention.py`, with its signatures.

Checks read lengths, block tables and slots on the host, so a call waits for the device once. Kernels are in
`attention_tiles.py`, `latent_tiles.py` and `cache_write.py`; this module chooses tiles, operands and splits.

Shape suffixes: T tokens, H query heads, D values of a query and key, R rank of a latent row, C its whole width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from quantkit.kernels.gpu.attention_tiles import merge_splits, paged_attention
from quantkit.kernels.gpu.cache_write import write_dsa, write_rows
from quantkit.kernels.gpu.jit import BF16, F16, F32, check_device, has_e4m3, processors
from quantkit.kernels.gpu.latent_tiles import latent_attention
from quantkit.kernels.kv import Batch, KVCache, LatentCache, k_dim, pages_and_slots, v_dim
from quantkit.kernels.kv_check import check_batch, check_write, check_write_latent, host
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64
_TILE_N, _LATENT_TILE_N = 32, 16  # tokens of a run


def write(cache: KVCache, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """Store keys and values of T tokens in their slots; see `kernels/attention.py`."""
    check_write(cache, slots_T, k_THD, v_THD)
    check_device(slots_T)
    parts: tuple[tuple[Tensor, Any, Any, float], ...] = (
        (k_THD, cache.k, cache.k_block_scale, cache.k_scale),
        (v_THD, cache.v, cache.v_block_scale, cache.v_scale),
    )
    for x, codes, scales, outer in parts:
        tokens, heads, width = x.shape
        if tokens:
            row = codes.shape[2] * codes.shape[3]
            write_rows[(tokens, heads)](
                x, codes, scales, slots_T, outer, heads, width, row, FORMAT=cache.format, BLOCK=_block(width)
            )


def write_latent(cache: LatentCache, slots_T: Tensor, latent_TR: Tensor, rope_TD: Tensor) -> None:
    """Store latent rows of T tokens; see `kernels/attention.py`."""
    check_write_latent(cache, slots_T, latent_TR, rope_TD)
    check_device(slots_T)
    tokens, rank = latent_TR.shape
    if tokens == 0:
        return
    rows, words, ropes, rope_format, rope_stride = _latent_views(cache)
    stride = rows.shape[2]
    if cache.format == "dsa":
        write_dsa[(tokens,)](latent_TR, rows, words, slots_T, stride, words.shape[2], RANK=rank)
    else:
        write_rows[(tokens, 1)](
            latent_TR, rows, None, slots_T, cache.scale, 1, rank, stride, FORMAT=cache.format, BLOCK=_block(rank)
        )
    if cache.rope:
        write_rows[(tokens, 1)](
            rope_TD, ropes, None, slots_T, cache.scale, 1, cache.rope, rope_stride, FORMAT=rope_format,
            BLOCK=_block(cache.rope),
        )  # fmt: skip


def attend(
    q_THD: Tensor, cache: KVCache, batch: Batch,
    *, softmax_scale: float, window: int = 0, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """float32 [T, heads, V width]: attention of the T queries of a batch; see `kernels/attention.py`."""
    check_batch(cache, batch, q_THD, softmax_scale=softmax_scale, window=window, sinks_H=sinks_H)
    check_device(q_THD)
    heads, kv_heads = q_THD.shape[1], int(cache.k.shape[2])
    block_k, block_v = _block(k_dim(cache)), _block(v_dim(cache))
    k_operand, k_pieces, v_operand, v_pieces = _operands(cache.format, q_THD.dtype)
    wide = max(block_k, block_v) > 128 or k_pieces == 3 or k_operand is F32
    plan = _plan(batch, heads // kv_heads, kv_heads, _TILE_N, 32 if wide else 64, q_THD)
    few = plan["TILE_M"] <= 16 and not wide
    out, parts, stats = _outputs(q_THD, v_dim(cache), plan["SPLITS"])
    if q_THD.shape[0] == 0:
        return out
    tiles = plan.pop("tiles")
    paged_attention[(tiles.shape[0], kv_heads, plan["SPLITS"])](
        q_THD, cache.k, cache.v, cache.k_block_scale, cache.v_block_scale, sinks_H, parts, stats, batch.query_start,
        batch.lengths, batch.block_table, tiles, softmax_scale * cache.k_scale * _LOG2_E, cache.v_scale,
        q_THD.shape[0] * heads, heads // kv_heads, kv_heads, k_dim(cache), v_dim(cache), batch.block_table.shape[1],
        pages_and_slots(cache)[1], min(window, 1 << 30), FORMAT=cache.format, K_OPERAND=k_operand, K_PIECES=k_pieces,
        V_OPERAND=v_operand, V_PIECES=v_pieces, NATIVE=has_e4m3(q_THD), SINKS=sinks_H is not None, TILE_N=_TILE_N,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4 if few else 8, num_stages=5 if few else 2, **plan,
    )  # fmt: skip
    _merge(out, parts, stats, cache.v_scale, plan["SPLITS"])
    return out


def attend_latent(q_THC: Tensor, cache: LatentCache, batch: Batch, *, softmax_scale: float) -> Tensor:
    """float32 [T, heads, rank]: absorbed latent attention; see `kernels/attention.py`."""
    check_batch(cache, batch, q_THC, softmax_scale=softmax_scale)
    check_device(q_THC)
    heads = q_THC.shape[1]
    rows, words, ropes, rope_format, rope_stride = _latent_views(cache)
    native = q_THC.dtype == torch.float16 and cache.format == "e4m3"
    operand, k_pieces = (F16, 1) if native else (BF16, 1 if q_THC.dtype == torch.bfloat16 else 3)
    plan = _plan(batch, heads, 1, _LATENT_TILE_N, 16 if k_pieces == 3 else 32, q_THC)
    out, parts, stats = _outputs(q_THC, cache.rank, plan["SPLITS"])
    if q_THC.shape[0] == 0:
        return out
    tiles = plan.pop("tiles")
    latent_attention[(tiles.shape[0], 1, plan["SPLITS"])](
        q_THC, rows, words, ropes, parts, stats, batch.query_start, batch.lengths, batch.block_table, tiles,
        softmax_scale * cache.scale * _LOG2_E, cache.scale, q_THC.shape[0] * heads, heads, cache.rank, cache.rope,
        rows.shape[2], 0 if words is None else words.shape[2], rope_stride, batch.block_table.shape[1],
        pages_and_slots(cache)[1], FORMAT=cache.format, ROPE_FORMAT=rope_format, OPERAND=operand, K_PIECES=k_pieces,
        V_PIECES=2 if native else 3, NATIVE=has_e4m3(q_THC), TILE_N=_LATENT_TILE_N, BLOCK_R=_block(cache.rank),
        BLOCK_P=_block(cache.rope), num_warps=8, num_stages=2, **plan,
    )  # fmt: skip
    _merge(out, parts, stats, cache.scale, plan["SPLITS"])
    return out


def _block(width: int) -> int:
    """Power of two that holds `width` values, at least what a tensor core takes."""
    return max(int(triton.next_power_of_2(width)), 16)


def _operands(format: str, q_dtype: torch.dtype) -> tuple[Any, int, Any, int]:
    """Types of the products q k and p v in which stored values are exact, and the pieces of q and of p.

    FP8 and NVFP4 values are exact in both 16-bit types, those of MXFP4 need the range of bfloat16.
    """
    if format == "f16":
        return (F16, 1, F16, 2) if q_dtype == torch.float16 else (F32, 1, F16, 2)
    if format in ("bf16", "mxfp4"):
        return BF16, 1 if q_dtype == torch.bfloat16 else 3, BF16, 3
    if q_dtype == torch.float16:
        return F16, 1, F16, 2
    return BF16, 1 if q_dtype == torch.bfloat16 else 3, F16, 2


def _plan(batch: Batch, share: int, kv_heads: int, tile_n: int, most_rows: int, like: Tensor) -> dict[str, Any]:
    """Rows of a tile, the tiles (int32 [tiles, 2]: request, first row), and how many programs share the tokens."""
    rows = np.diff(host(batch.query_start)) * share
    most = int(rows.max(initial=0))
    tile_m = min(max(int(triton.next_power_of_2(max(most, 1))), 16), most_rows)
    tiles = [(r, first) for r, n in enumerate(rows.tolist()) for first in range(0, n, tile_m)]
    longest = int(host(batch.lengths).max(initial=0))
    wanted = min(4 * processors(like) // max(len(tiles) * kv_heads, 1), longest // (4 * tile_n), _MAX_SPLITS)
    return {
        "TILE_M": tile_m,
        "tiles": torch.tensor(tiles, dtype=torch.int32, device=like.device),
        "SPLITS": 1 << max(wanted, 1).bit_length() - 1,
    }


def _outputs(q_THD: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs, and what the kernel writes: the same, or the parts of each split with their maxima and sums."""
    shape = (*q_THD.shape[:2], width)
    out = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    if splits == 1:
        return out, out, None
    parts = torch.empty((splits, *shape), dtype=torch.float32, device=q_THD.device)
    return out, parts, torch.empty((splits, *shape[:2], 2), dtype=torch.float32, device=q_THD.device)


def _merge(out: Tensor, parts: Tensor, stats: Tensor | None, v_scale: float, splits: int) -> None:
    if stats is not None:
        rows, width = out.shape[0] * out.shape[1], out.shape[2]
        merge_splits[(rows,)](parts, stats, out, rows, width, v_scale, SPLITS=splits, BLOCK=_block(width))


def _latent_views(cache: LatentCache) -> tuple[Any, Any, Any, str, int]:
    """Rows of codes, of float32 words (dsa), and of rope values: array from the first on, format, stride."""
    rows: Any = cache.rows
    if cache.format != "dsa":
        return rows, None, rows.view(-1)[cache.rank :], cache.format, rows.shape[2]
    halves = rows.view(torch.uint16)
    return rows, rows.view(torch.float32), halves.view(-1)[(cache.rank + 16) // 2 :], "bf16", halves.shape[2]
