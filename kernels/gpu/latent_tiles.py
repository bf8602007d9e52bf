"""The kernel of absorbed latent attention (DeepSeek's MLA): the row of a token is key and value of all heads.

A row has `rank` latent values, which are also the values of the token, and `rope` rotated ones. The same decoded
operand serves both products. A scale of a dsa row is a power of two, so code times scale is exact in bfloat16.

Otherwise as `attention_tiles.py`. Shape suffixes: M rows of a tile, N tokens of a run, R latent values, P rope values.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.attention_tiles import (
    add_values,
    finish,
    load_rows,
    place,
    seen_by,
    slots_of,
    soften,
    span,
)
from quantkit.kernels.gpu.decode import float_to_f32
from quantkit.kernels.gpu.jit import jit
from quantkit.kernels.gpu.products import exact_dot


@jit
def _latents(
    rows_ptr: tl.tensor, words_ptr: tl.tensor, slot_N: tl.tensor, rank: tl.tensor, stride: tl.tensor,
    word_stride: tl.tensor, FORMAT: tl.constexpr, BLOCK_R: tl.constexpr, OPERAND: tl.constexpr, NATIVE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[N, R] latent values, without the outer scale."""
    if FORMAT == "dsa":
        codes = load_rows(rows_ptr, None, slot_N, slot_N >= 0, rank, stride, "e4m3", BLOCK_R, tl.float32, NATIVE)
        GROUPS: tl.constexpr = BLOCK_R // 128
        at = words_ptr + slot_N[:, None] * word_stride + (rank // 4 + tl.arange(0, GROUPS))[None, :]
        scale = tl.load(at, mask=(slot_N >= 0)[:, None], other=0.0)[:, :, None]
        values = codes * scale.broadcast_to(scale.shape[0], GROUPS, 128).reshape(codes.shape)
    else:
        values = load_rows(rows_ptr, None, slot_N, slot_N >= 0, rank, stride, FORMAT, BLOCK_R, OPERAND, NATIVE)
    return values.to(OPERAND)


@jit
def _run(
    n0: tl.tensor, state: tl.tuple, q_latent: tl.tensor, q_rope: tl.tensor,
    rows_ptr: tl.tensor, words_ptr: tl.tensor, ropes_ptr: tl.tensor, table_ptr: tl.tensor, request: tl.tensor,
    position_M: tl.tensor, hi: tl.tensor, scale: tl.tensor, rank: tl.tensor, rope: tl.tensor, stride: tl.tensor,
    word_stride: tl.tensor, rope_stride: tl.tensor, pages: tl.tensor, slots: tl.tensor, FORMAT: tl.constexpr,
    ROPE_FORMAT: tl.constexpr, OPERAND: tl.constexpr, K_PIECES: tl.constexpr, V_PIECES: tl.constexpr,
    NATIVE: tl.constexpr, MASKED: tl.constexpr, TILE_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state (sums [M, R], running maximum, running sum) after the tokens n0 .. n0 + TILE_N - 1."""
    sums, top_M, total_M = state
    t_N = n0 + tl.arange(0, TILE_N)
    slot_N = slots_of(table_ptr, request, pages, slots, t_N, hi)
    latent = _latents(rows_ptr, words_ptr, slot_N, rank, stride, word_stride, FORMAT, BLOCK_R, OPERAND, NATIVE)
    turned = load_rows(ropes_ptr, None, slot_N, slot_N >= 0, rope, rope_stride, ROPE_FORMAT, BLOCK_P, OPERAND, NATIVE)
    s = exact_dot(q_latent, tl.trans(latent), K_PIECES) + exact_dot(q_rope, tl.trans(turned), K_PIECES)
    seen = seen_by(position_M, t_N, hi, 0)
    s = tl.where(seen, s * scale, float("-inf")) if MASKED else s * scale
    p, top_M, total_M, shrink_M = soften(s, top_M, total_M)
    return add_values(sums * shrink_M[:, None], p, latent, seen, V_PIECES, MASKED), top_M, total_M


@jit
def _queries(
    q_ptr: tl.tensor, row_M: tl.tensor, inside_M: tl.tensor, first: tl.tensor, width: tl.tensor, stride: tl.tensor,
    BLOCK: tl.constexpr, OPERAND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[M, BLOCK]: `width` values of each query from value `first` on."""
    d_D = tl.arange(0, BLOCK)
    inside = inside_M[:, None] & (d_D < width)[None, :]
    q = tl.load(q_ptr + row_M[:, None] * stride + first + d_D[None, :], mask=inside, other=0.0)
    if q.dtype != OPERAND:
        q = float_to_f32(q)
    return q


@jit
def latent_attention(
    q_ptr: tl.tensor, rows_ptr: tl.tensor, words_ptr: tl.tensor, ropes_ptr: tl.tensor, out_ptr: tl.tensor,
    stats_ptr: tl.tensor, start_ptr: tl.tensor, length_ptr: tl.tensor, table_ptr: tl.tensor, tile_ptr: tl.tensor,
    scale: tl.tensor, v_scale: tl.tensor, rows: tl.tensor, heads: tl.tensor, rank: tl.tensor, rope: tl.tensor,
    stride: tl.tensor, word_stride: tl.tensor, rope_stride: tl.tensor, pages: tl.tensor, slots: tl.tensor,
    FORMAT: tl.constexpr, ROPE_FORMAT: tl.constexpr, OPERAND: tl.constexpr, K_PIECES: tl.constexpr,
    V_PIECES: tl.constexpr, NATIVE: tl.constexpr, SPLITS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of the queries q [tokens, heads, rank + rope]; the grid is (tiles, 1, SPLITS).

    words_ptr  the same rows as float32, for the scales of dsa; ropes_ptr: the first rope value of the cache
    scale      softmax scale * scale of the cache * log2(e); rows: tokens * heads; pages: columns of the block table
    """
    request, token_M, head_M, position_M, last = place(tile_ptr, start_ptr, length_ptr, heads, TILE_M)
    inside_M = token_M >= 0
    row_M = token_M.to(tl.int64) * heads + head_M
    q_latent = _queries(q_ptr, row_M, inside_M, 0, rank, rank + rope, BLOCK_R, OPERAND)
    q_rope = _queries(q_ptr, row_M, inside_M, rank, rope, rank + rope, BLOCK_P, OPERAND)
    top_M = tl.full((TILE_M,), float("-inf"), tl.float32)
    state = tl.zeros((TILE_M, BLOCK_R), tl.float32), top_M, tl.zeros((TILE_M,), tl.float32)
    lo, hi, masked_from = span(position_M, last, 0, SPLITS, TILE_N)
    for n0 in range(lo, masked_from, TILE_N):
        state = _run(
            n0, state, q_latent, q_rope, rows_ptr, words_ptr, ropes_ptr, table_ptr, request, position_M, hi, scale,
            rank, rope, stride, word_stride, rope_stride, pages, slots, FORMAT, ROPE_FORMAT, OPERAND, K_PIECES,
            V_PIECES, NATIVE, False, TILE_N, BLOCK_R, BLOCK_P,
        )  # fmt: skip
    for n0 in range(masked_from, hi, TILE_N):
        state = _run(
            n0, state, q_latent, q_rope, rows_ptr, words_ptr, ropes_ptr, table_ptr, request, position_M, hi, scale,
            rank, rope, stride, word_stride, rope_stride, pages, slots, FORMAT, ROPE_FORMAT, OPERAND, K_PIECES,
            V_PIECES, NATIVE, True, TILE_N, BLOCK_R, BLOCK_P,
        )  # fmt: skip
    finish(out_ptr, stats_ptr, state[0], state[1], state[2], row_M, inside_M, rows, rank, v_scale, SPLITS, BLOCK_R)
