"""The kernels of the packed GEMM: one tile of y_TO = x_TI @ W^T from codes that are decoded in registers.

A program walks along the inputs in steps. Codes become numbers that are exact in the 16-bit type of the product (see
`products.py`), and scales go where they cost no accuracy:

    INT4 groups, FP8 blocks   one scale a row and step: multiplies the float32 sums of the step
    FP4 blocks                e2m1 times e4m3 (6 bits) or a power of two is still exact: multiplies the operand
    a row or matrix           multiplies the sums at the end

With few tokens there are few tiles, so the inputs are divided among SPLITS programs, whose sums `add_splits` adds in
order: the result does not depend on timing. Experts are tiles of their own, with pointers that are offset.

Shape suffixes: T tokens, O outputs, I inputs of a step.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.decode import (
    e2m1_to_f32,
    e4m3_to_f32,
    float_to_f32,
    int4_to_f32,
    nibbles,
    stored_to_f32,
)
from quantkit.kernels.gpu.jit import jit
from quantkit.kernels.gpu.products import exact_dot


@jit
def _codes(
    codes_ptr: tl.tensor, o_O: tl.tensor, start: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, row_bytes: tl.tensor,
    PACKED: tl.constexpr, STEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Codes [O, STEP] from input `start` on; 0 outside of the matrix."""
    PER_BYTE: tl.constexpr = 2 if PACKED else 1
    byte_B = start // PER_BYTE + tl.arange(0, STEP // PER_BYTE)
    inside = (o_O < outputs)[:, None] & (byte_B * PER_BYTE < inputs)[None, :]
    codes = tl.load(codes_ptr + o_O.to(tl.int64)[:, None] * row_bytes + byte_B[None, :], mask=inside, other=0)
    return nibbles(codes) if PACKED else codes


@jit
def _zeros(
    zero_ptr: tl.tensor, o_O: tl.tensor, group: tl.tensor, groups: tl.tensor, outputs: tl.tensor,
    ASYMMETRIC: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Nibble that stands for 0 in each row, as float32: 8, or what the words packed along the outputs say."""
    if ASYMMETRIC:
        word_O = tl.load(zero_ptr + (o_O // 8).to(tl.int64) * groups + group, mask=o_O < outputs, other=0)
        return ((word_O >> (4 * (o_O % 8))) & 15).to(tl.float32)
    return tl.full(o_O.shape, 8.0, tl.float32)


@jit
def _scales(
    scale_ptr: tl.tensor, o_O: tl.tensor, group: tl.tensor, groups: tl.tensor, outputs: tl.tensor,
    SCALE: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 scale of each row in a group; a scale serves ROWS rows, 0 for all of them."""
    row_O = o_O // ROWS if ROWS else o_O * 0
    return stored_to_f32(tl.load(scale_ptr + row_O.to(tl.int64) * groups + group, mask=o_O < outputs, other=0), SCALE)


@jit
def _block_scales(
    scale_ptr: tl.tensor, o_O: tl.tensor, start: tl.tensor, groups: tl.tensor, outputs: tl.tensor,
    SCALE: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 scales [O, STEP], each one GROUP times."""
    group_G = start // GROUP + tl.arange(0, STEP // GROUP)
    inside = (o_O < outputs)[:, None] & (group_G < groups)[None, :]
    codes = tl.load(scale_ptr + o_O.to(tl.int64)[:, None] * groups + group_G[None, :], mask=inside, other=0)
    scale = stored_to_f32(codes, SCALE)[:, :, None]
    return scale.broadcast_to(scale.shape[0], STEP // GROUP, GROUP).reshape(scale.shape[0], STEP)


@jit
def _step(
    total: tl.tensor, x: tl.tensor, codes: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor, o_O: tl.tensor,
    start: tl.tensor, groups: tl.tensor, outputs: tl.tensor,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    OPERAND: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr, STEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add x [T, STEP] @ the decoded weights [O, STEP] transposed to total [T, O]."""
    group = start // GROUP if GROUP else 0
    if ELEMENT == "int4":
        w = int4_to_f32(codes, _zeros(zero_ptr, o_O, group, groups, outputs, ASYMMETRIC)[:, None])
    elif ELEMENT == "e2m1":
        w = e2m1_to_f32(codes) * _block_scales(scale_ptr, o_O, start, groups, outputs, SCALE, GROUP, STEP)
    else:
        w = e4m3_to_f32(codes, NATIVE)
    product = exact_dot(x, tl.trans(w.to(OPERAND)), PIECES)
    if GROUP and ELEMENT != "e2m1":
        product *= _scales(scale_ptr, o_O, group, groups, outputs, SCALE, ROWS)[None, :]
    return total + product


@jit
def packed_gemm(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, zero_ptr: tl.tensor, y_ptr: tl.tensor,
    multiplier: tl.tensor, tokens: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, row_bytes: tl.tensor,
    groups: tl.tensor, tile_ptr: tl.tensor, expert_ptr: tl.tensor, multiplier_ptr: tl.tensor,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    OPERAND: tl.constexpr, PIECES: tl.constexpr, NATIVE: tl.constexpr, GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE_T: tl.constexpr, TILE_O: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute y [SPLITS, tokens, outputs] (float32); the grid is (tiles of outputs, tiles of tokens, SPLITS).

    GROUP, ROWS  inputs and rows that share a scale, 0 for all of them
    GROUPED      tile_ptr int32 [tiles, 3] names the expert, the first token and the end of each tile, expert_ptr int64
                 [E, 3] how many elements codes, scales and zeros of an expert lie behind those of the first, and
                 multiplier_ptr float32 [E] stands in for `multiplier`; ALIGNED: the codes lie multiples of 16 apart
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    first, end = tile * TILE_T, tokens
    if GROUPED:
        expert, first = tl.load(tile_ptr + 3 * tile), tl.load(tile_ptr + 3 * tile + 1)
        end = tl.load(tile_ptr + 3 * tile + 2)
        offset = tl.load(expert_ptr + 3 * expert)
        codes_ptr += tl.multiple_of(offset, 16) if ALIGNED else offset
        scale_ptr += tl.load(expert_ptr + 3 * expert + 1)
        if ASYMMETRIC:
            zero_ptr += tl.load(expert_ptr + 3 * expert + 2)
        multiplier = tl.load(multiplier_ptr + expert)
    t_T = first + tl.arange(0, TILE_T)
    o_O = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    x_T = x_ptr + t_T.to(tl.int64) * inputs
    total = tl.zeros((TILE_T, TILE_O), tl.float32)
    steps = tl.cdiv(tl.cdiv(inputs, STEP), SPLITS)
    for start in range(split * steps * STEP, tl.minimum((split + 1) * steps * STEP, inputs), STEP):
        i_I = start + tl.arange(0, STEP)
        inside = (t_T < end)[:, None] & (i_I < inputs)[None, :]
        x = tl.load(x_T[:, None] + i_I[None, :], mask=inside, other=0.0)
        if x.dtype != OPERAND:
            x = float_to_f32(x)
        codes = _codes(codes_ptr, o_O, start, outputs, inputs, row_bytes, ELEMENT != "e4m3", STEP)
        total = _step(
            total, x, codes, scale_ptr, zero_ptr, o_O, start, groups, outputs,
            ELEMENT, SCALE, GROUP, ROWS, ASYMMETRIC, OPERAND, PIECES, NATIVE, STEP,
        )  # fmt: skip
    if not GROUP:
        total *= _scales(scale_ptr, o_O, 0, 1, outputs, SCALE, ROWS)[None, :]
    out = y_ptr + (split * tokens + t_T).to(tl.int64)[:, None] * outputs + o_O[None, :]
    tl.store(out, total * multiplier, mask=(t_T < end)[:, None] & (o_O < outputs)[None, :])


@jit
def add_splits(
    parts_ptr: tl.tensor, y_ptr: tl.tensor, size: tl.tensor, SPLITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store y [size], the sum of parts [SPLITS, size], float32, in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(SPLITS):
        total += tl.load(parts_ptr + at, mask=at < size, other=0.0)
        parts_ptr += size
    tl.store(y_ptr + at, total, mask=at < size)
