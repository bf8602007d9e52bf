"""The kernels of paged attention: a tile of queries meets the cache of its request, a run of tokens at a time.

A row of a tile is one query token and one of the query heads that share the KV head, so that decoding fills a tile with
the heads of one token. Codes become 16-bit operands in registers; q k and p v are sums of float32 accuracy
(`products.py`); the softmax is online (Milakov and Gimelshein 2018, FlashAttention 2022), in base 2.

Runs that all rows see in full go without masks. In the others a token that a row does not see has no part in it, even
if it is not a number: such values are taken out of the product, and rows that do see them become NaN.

Few tiles and many tokens (decoding) are divided among SPLITS programs (Flash-Decoding); `merge_splits` joins them.
An infinite value in the cache makes its sum NaN or infinite.

Shape suffixes: M rows of a tile, N tokens of a run, D values of a key, V values of a value vector.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.decode import e2m1_to_f32, float_to_f32, nibbles, stored_to_f32
from quantkit.kernels.gpu.jit import jit
from quantkit.kernels.gpu.products import exact_dot


@jit
def place(
    tile_ptr: tl.tensor, start_ptr: tl.tensor, length_ptr: tl.tensor, share: tl.tensor, TILE_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Request of this tile; token (-1: no such row), head within the KV head, and position of each row; last position.

    `share` query heads have one KV head; tile_ptr int32 [tiles, 2] says the request and the first row of a tile.
    """
    request, first = tl.load(tile_ptr + 2 * tl.program_id(0)), tl.load(tile_ptr + 2 * tl.program_id(0) + 1)
    start, end = tl.load(start_ptr + request), tl.load(start_ptr + request + 1)
    row_M = first + tl.arange(0, TILE_M)
    token_M = start + row_M // share
    before = tl.load(length_ptr + request) - end  # position of a token = before + its place among all queries
    last = tl.minimum((first + TILE_M - 1) // share + start, end - 1)
    return request, tl.where(token_M < end, token_M, -1), row_M % share, before + token_M, before + last


@jit
def span(
    position_M: tl.tensor, last: tl.tensor, window: tl.tensor, SPLITS: tl.constexpr, TILE_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Tokens lo .. hi - 1 that this split looks at, and the end of the runs from lo on that all rows see in full."""
    first = tl.min(position_M, 0)
    oldest = tl.where(window > 0, tl.maximum(first + 1 - window, 0), 0)
    size = tl.cdiv(tl.cdiv(last + 1 - oldest, SPLITS), TILE_N) * TILE_N
    lo = oldest + tl.program_id(2) * size
    hi = tl.minimum(lo + size, last + 1)
    whole = tl.maximum(tl.minimum(hi, first + 1) - lo, 0) // TILE_N * TILE_N
    return lo, hi, lo + tl.where((last > first) & (window > 0), 0, whole)


@jit
def slots_of(
    table_ptr: tl.tensor, request: tl.tensor, pages: tl.tensor, slots: tl.tensor, t_N: tl.tensor, hi: tl.tensor
) -> tl.tensor:
    """Physical slots (int64) of the tokens t of a request, -1 from `hi` on; the table has `pages` columns."""
    page_N = tl.load(table_ptr + request.to(tl.int64) * pages + t_N // slots, mask=t_N < hi, other=0)
    return tl.where(t_N < hi, page_N.to(tl.int64) * slots + t_N % slots, -1)


@jit
def load_rows(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, row_N: tl.tensor, inside_N: tl.tensor, width: tl.tensor,
    stride: tl.tensor, FORMAT: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, NATIVE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[N, BLOCK] values of stored rows of `width` values as operands, without the outer scale; 0 elsewhere.

    Rows are `stride` elements of the array of codes apart.
    """
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        HALF_GROUP: tl.constexpr = 8 if FORMAT == "nvfp4" else 16
        b_B = tl.arange(0, BLOCK // 2)
        inside = inside_N[:, None] & (2 * b_B < width)[None, :]
        pairs = tl.load(codes_ptr + row_N[:, None] * stride + b_B[None, :], mask=inside, other=0)
        at = scales_ptr + row_N[:, None] * (width // (2 * HALF_GROUP)) + (b_B // HALF_GROUP)[None, :]
        scale = stored_to_f32(tl.load(at, mask=inside, other=0), "e4m3" if FORMAT == "nvfp4" else "e8m0", NATIVE)
        values = e2m1_to_f32(nibbles(pairs)) * tl.join(scale, scale).reshape(scale.shape[0], BLOCK)
    else:
        d_D = tl.arange(0, BLOCK)
        inside = inside_N[:, None] & (d_D < width)[None, :]
        bits = tl.load(codes_ptr + row_N[:, None] * stride + d_D[None, :], mask=inside, other=0)
        if (FORMAT == "bf16" and OPERAND == tl.bfloat16) or (FORMAT == "f16" and OPERAND == tl.float16):
            values = bits.to(OPERAND, bitcast=True)
        else:
            values = stored_to_f32(bits, FORMAT, NATIVE)
    return values.to(OPERAND)


@jit
def seen_by(position_M: tl.tensor, t_N: tl.tensor, hi: tl.tensor, window: tl.tensor) -> tl.tensor:
    """[M, N] which tokens each row sees."""
    age = position_M[:, None] - t_N[None, :]
    return (age >= 0) & (t_N < hi)[None, :] & ((window <= 0) | (age < window))


@jit
def soften(s: tl.tensor, top_M: tl.tensor, total_M: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Probabilities of scores [M, N] (base 2), new maximum, new sum, and the factor by which earlier sums shrink."""
    new_M = tl.maximum(top_M, tl.max(s, 1))
    shift_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p = tl.exp2(s - shift_M[:, None])
    shrink_M = tl.exp2(top_M - shift_M)
    return p, new_M, total_M * shrink_M + tl.sum(p, 1), shrink_M


@jit
def add_values(
    sums: tl.tensor, p: tl.tensor, v: tl.tensor, seen: tl.tensor, PIECES: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Add p [M, N] @ v [N, V] to sums [M, V]; with MASKED, values that are not finite count only where `seen`."""
    if MASKED:
        odd = (v - v) != 0.0
        if tl.max(tl.max(odd.to(tl.int32), 1), 0) > 0:
            hit = tl.dot(seen.to(tl.float16), odd.to(tl.float16))
            sums = tl.where(hit > 0, float("nan"), sums)
        v = tl.where(odd, 0.0, v).to(v.dtype)
    return sums + exact_dot(p, v, PIECES)


@jit
def first_state(sinks_ptr: tl.tensor, head_M: tl.tensor, SINKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Running maximum and sum before any token: a sink is a score of its own, in the first split."""
    top_M = tl.full(head_M.shape, float("-inf"), tl.float32)
    total_M = tl.zeros(head_M.shape, tl.float32)
    if SINKS:
        here = tl.program_id(2) == 0
        top_M = tl.where(here, tl.load(sinks_ptr + head_M) * 1.4426950408889634, top_M)
        total_M = tl.where(here, 1.0, total_M)
    return top_M, total_M


@jit
def finish(
    out_ptr: tl.tensor, stats_ptr: tl.tensor, sums: tl.tensor, top_M: tl.tensor, total_M: tl.tensor, row_M: tl.tensor,
    inside_M: tl.tensor, rows: tl.tensor, width: tl.tensor, v_scale: tl.tensor,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store outputs, or what `merge_splits` needs: sums [SPLITS, rows, width], maximum and sum [SPLITS, rows, 2]."""
    if SPLITS == 1:
        sums = sums / total_M[:, None] * v_scale
    else:
        row_M += tl.program_id(2) * rows
        tl.store(stats_ptr + 2 * row_M, top_M, mask=inside_M)
        tl.store(stats_ptr + 2 * row_M + 1, total_M, mask=inside_M)
    v_V = tl.arange(0, BLOCK)
    at = out_ptr + row_M[:, None] * width + v_V[None, :]
    tl.store(at, sums, mask=inside_M[:, None] & (v_V < width)[None, :])


@jit
def merge_splits(
    parts_ptr: tl.tensor, stats_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, width: tl.tensor,
    v_scale: tl.tensor, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Join the splits of one row of out [rows, width]: each weighs 2^(its maximum - the largest)."""
    row = tl.program_id(0).to(tl.int64)
    v_V = tl.arange(0, BLOCK)
    split_P = tl.arange(0, SPLITS).to(tl.int64) * rows
    top_P = tl.load(stats_ptr + 2 * (split_P + row))
    weight_P = tl.exp2(top_P - tl.max(top_P, 0))
    total = tl.sum(weight_P * tl.load(stats_ptr + 2 * (split_P + row) + 1), 0)
    at = parts_ptr + (split_P + row)[:, None] * width + v_V[None, :]
    parts = tl.load(at, mask=(v_V < width)[None, :], other=0.0)
    tl.store(out_ptr + row * width + v_V, tl.sum(weight_P[:, None] * parts, 0) / total * v_scale, mask=v_V < width)


@jit
def _run(
    n0: tl.tensor, state: tl.tuple, q: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor,
    k_scales_ptr: tl.tensor, v_scales_ptr: tl.tensor, table_ptr: tl.tensor, request: tl.tensor, position_M: tl.tensor,
    hi: tl.tensor, scale: tl.tensor, kv_heads: tl.tensor, k_width: tl.tensor, v_width: tl.tensor, pages: tl.tensor,
    slots: tl.tensor, window: tl.tensor, FORMAT: tl.constexpr, K_OPERAND: tl.constexpr, K_PIECES: tl.constexpr,
    V_OPERAND: tl.constexpr, V_PIECES: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state (sums [M, V], running maximum, running sum) after the tokens n0 .. n0 + TILE_N - 1."""
    PER_CODE: tl.constexpr = 2 if FORMAT == "nvfp4" or FORMAT == "mxfp4" else 1
    sums, top_M, total_M = state
    t_N = n0 + tl.arange(0, TILE_N)
    slot_N = slots_of(table_ptr, request, pages, slots, t_N, hi)
    row_N = slot_N * kv_heads + tl.program_id(1)
    k = load_rows(
        k_ptr, k_scales_ptr, row_N, slot_N >= 0, k_width, k_width // PER_CODE, FORMAT, BLOCK_K, K_OPERAND, NATIVE
    )
    s = exact_dot(q, tl.trans(k), K_PIECES) * scale
    seen = seen_by(position_M, t_N, hi, window)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    p, top_M, total_M, shrink_M = soften(s, top_M, total_M)
    v = load_rows(
        v_ptr, v_scales_ptr, row_N, slot_N >= 0, v_width, v_width // PER_CODE, FORMAT, BLOCK_V, V_OPERAND, NATIVE
    )
    return add_values(sums * shrink_M[:, None], p, v, seen, V_PIECES, MASKED), top_M, total_M


@jit
def paged_attention(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, k_scales_ptr: tl.tensor, v_scales_ptr: tl.tensor,
    sinks_ptr: tl.tensor, out_ptr: tl.tensor, stats_ptr: tl.tensor, start_ptr: tl.tensor, length_ptr: tl.tensor,
    table_ptr: tl.tensor, tile_ptr: tl.tensor, scale: tl.tensor, v_scale: tl.tensor, rows: tl.tensor, share: tl.tensor,
    kv_heads: tl.tensor, k_width: tl.tensor, v_width: tl.tensor, pages: tl.tensor, slots: tl.tensor, window: tl.tensor,
    FORMAT: tl.constexpr, K_OPERAND: tl.constexpr, K_PIECES: tl.constexpr, V_OPERAND: tl.constexpr,
    V_PIECES: tl.constexpr, NATIVE: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of the queries q [tokens, kv_heads * share, k_width]; the grid is (tiles, kv_heads, SPLITS).

    scale  softmax scale * k_scale * log2(e); rows: tokens * heads; pages: columns of the block table
    """
    request, token_M, inner_M, position_M, last = place(tile_ptr, start_ptr, length_ptr, share, TILE_M)
    inside_M = token_M >= 0
    head_M = tl.program_id(1) * share + inner_M
    row_M = token_M.to(tl.int64) * (kv_heads * share) + head_M
    d_D = tl.arange(0, BLOCK_K)
    q = tl.load(
        q_ptr + row_M[:, None] * k_width + d_D[None, :], mask=inside_M[:, None] & (d_D < k_width)[None, :], other=0.0
    )
    if q.dtype != K_OPERAND:
        q = float_to_f32(q)
    top_M, total_M = first_state(sinks_ptr, head_M, SINKS)
    state = tl.zeros((TILE_M, BLOCK_V), tl.float32), top_M, total_M
    lo, hi, masked_from = span(position_M, last, window, SPLITS, TILE_N)
    for n0 in range(lo, masked_from, TILE_N):
        state = _run(
            n0, state, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, request, position_M, hi, scale, kv_heads,
            k_width, v_width, pages, slots, window, FORMAT, K_OPERAND, K_PIECES, V_OPERAND, V_PIECES, NATIVE, False,
            TILE_N, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    for n0 in range(masked_from, hi, TILE_N):
        state = _run(
            n0, state, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, request, position_M, hi, scale, kv_heads,
            k_width, v_width, pages, slots, window, FORMAT, K_OPERAND, K_PIECES, V_OPERAND, V_PIECES, NATIVE, True,
            TILE_N, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    finish(out_ptr, stats_ptr, state[0], state[1], state[2], row_M, inside_M, rows, v_width, v_scale, SPLITS, BLOCK_V)
