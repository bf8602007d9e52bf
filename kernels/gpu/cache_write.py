"""The kernels that write tokens into a paged cache: rounding as `kv_rows.py`, bit for bit.

One program stores one head of one token; slot -1 is nowhere. Divisions are rounded float32 divisions.

Shape suffixes: D values of a row, G blocks with a scale, N values of a block.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.activations import nvfp4_scale
from quantkit.kernels.gpu.decode import e4m3_to_f32, e8m0_to_f32, float_to_f32
from quantkit.kernels.gpu.encode import f32_to_e2m1, f32_to_e4m3, f32_to_stored, largest
from quantkit.kernels.gpu.jit import jit


@jit
def _mxfp4_scale(amax_G: tl.tensor) -> tl.tensor:
    """e8m0 codes (int32): 2^(exponent of amax - 2) after rounding a mantissa of 1.75 and more up."""
    exponent_G = (amax_G.to(tl.int32, bitcast=True) + (1 << 21)) >> 23
    code_G = tl.where(amax_G == 0, 127, tl.maximum(exponent_G - 2, 0))
    return tl.where(amax_G == amax_G, code_G, 255)


@jit
def _write_fp4(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, outer: tl.tensor, width: tl.tensor,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    GROUPS: tl.constexpr = BLOCK // GROUP
    group_G = tl.arange(0, GROUPS)
    at = group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GN = float_to_f32(tl.load(x_ptr + at, mask=at < width, other=0.0))
    if FORMAT == "nvfp4":
        code_G = nvfp4_scale(largest(x_GN), outer)
        scale_G = e4m3_to_f32(code_G) * outer
    else:
        code_G = _mxfp4_scale(largest(x_GN))
        scale_G = e8m0_to_f32(code_G)
    q_GN = f32_to_e2m1(tl.div_rn(x_GN, scale_G[:, None].broadcast_to(x_GN.shape)))
    low, high = tl.split(q_GN.reshape(GROUPS, GROUP // 2, 2))
    byte = group_G[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(codes_ptr + byte, (low | (high << 4)).to(tl.uint8), mask=byte < width // 2)
    tl.store(scales_ptr + group_G, code_G.to(tl.uint8), mask=group_G < width // GROUP)


@jit
def write_rows(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, slots_ptr: tl.tensor, outer: tl.tensor,
    heads: tl.tensor, width: tl.tensor, stride: tl.tensor, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store x [tokens, heads, width]; slots are `stride` elements of codes apart, the grid is (tokens, heads)."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    x_ptr += (token.to(tl.int64) * heads + head) * width
    if slot >= 0:
        if FORMAT == "nvfp4" or FORMAT == "mxfp4":
            GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
            scales_ptr += (slot * heads + head) * (width // GROUP)
            codes_ptr += slot * stride + head * (width // 2)
            _write_fp4(x_ptr, codes_ptr, scales_ptr, outer, width, FORMAT, BLOCK)
        else:
            d_D = tl.arange(0, BLOCK)
            x_D = float_to_f32(tl.load(x_ptr + d_D, mask=d_D < width, other=0.0))
            if FORMAT == "e4m3" or FORMAT == "e5m2":
                x_D = tl.div_rn(x_D, tl.full((BLOCK,), 1.0, tl.float32) * outer)
            codes_D = f32_to_stored(x_D, FORMAT)
            at = codes_ptr + slot * stride + head * width + d_D
            tl.store(at, codes_D.to(codes_ptr.dtype.element_ty), mask=d_D < width)


@jit
def write_dsa(
    x_ptr: tl.tensor, rows_ptr: tl.tensor, words_ptr: tl.tensor, slots_ptr: tl.tensor, stride: tl.tensor,
    word_stride: tl.tensor, RANK: tl.constexpr,
) -> None:  # fmt: skip
    """Latent values x [tokens, RANK] to codes and scales of dsa rows; the grid is (tokens,).

    A scale is the next power of two of max(amax / 448, 1e-4); NaN has no part in it.
    """
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    group_G = tl.arange(0, RANK // 128)
    at = group_G[:, None] * 128 + tl.arange(0, 128)[None, :]
    x_GN = float_to_f32(tl.load(x_ptr + token.to(tl.int64) * RANK + at))
    finite_GN = tl.where(x_GN == x_GN, tl.minimum(tl.abs(x_GN), 3.4028234663852886e38), 0.0)
    least_G = tl.maximum(tl.div_rn(tl.max(finite_GN, 1), tl.full(group_G.shape, 448.0, tl.float32)), 1e-4)
    power_G = ((least_G.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    codes_GN = f32_to_e4m3(tl.div_rn(x_GN, power_G[:, None].broadcast_to(x_GN.shape)))
    if slot >= 0:
        tl.store(rows_ptr + slot * stride + at, codes_GN.to(tl.uint8))
        tl.store(words_ptr + slot * word_stride + RANK // 4 + group_G, power_G)
