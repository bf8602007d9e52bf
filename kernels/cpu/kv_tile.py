"""A tile of cached tokens as float32: the only place where the Numba attention reads a cache.

A tile holds up to TILE consecutive tokens of one KV head, cut into chunks of 16 values: chunk c of token t lies at
c * STRIDE + 16 t, so that both sums of attention read it with plain vector loads (the one over values for 16 tokens at
a time, the one over tokens for up to 64 values). STRIDE is not a power of two lest all chunks of a token fall into one
set of the cache. Values are those of the codes, of e4m3 a 256th of them: the scale of a tensor is applied later, to
scores and outputs, those of blocks here. The last chunk of a width that is no multiple of 16 keeps the zeros it was
created with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu import kv_lanes, lanes, simd
from quantkit.kernels.cpu.convert import (
    bf16_bits_to_f32,
    e4m3_code_to_f32,
    f16_bits_to_f32,
    f32_of_bits,
)
from quantkit.kernels.elements import E2M1_VALUES
from quantkit.kernels.kv import DSA_ROW

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

BF16, F16, E4M3, E5M2, NVFP4, MXFP4, DSA = range(7)
CODES = {"bf16": BF16, "f16": F16, "e4m3": E4M3, "e5m2": E5M2, "nvfp4": NVFP4, "mxfp4": MXFP4, "dsa": DSA}

E4M3_UNIT = np.float32(256.0)  # tiles of e4m3 hold values divided by this

TILE = 64
STRIDE = (TILE + 1) * simd.LANES
_LANES = simd.LANES


class Rows(NamedTuple):
    """One array of a cache: K, V, or the latent rows.

    codes, block_scale  its bytes and those of its block scales, each flat; block_scale is empty where there are none
    format              one of CODES
    heads, width        KV heads, and values of each
    row                 bytes of a token of a head
    """

    codes: U8
    block_scale: U8
    format: int
    heads: int
    width: int
    row: int


def chunks(width: int) -> int:
    """Chunks of 16 in `width` values."""
    return -(-width // _LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def find_rows(table_L: I32, slots: int, heads: int, head: int, first: int, last: int, row_X: I64) -> None:
    """Numbers of the rows of the tokens first .. last - 1 of a request: (page * slots + offset) * heads + head.

    table_L is the request's row of the block table, slots the size of a page. Token t goes to row_X[t % TILE].
    """
    t = first
    while t < last:
        page = t // slots
        start = np.int64(table_L[page]) * slots - page * slots
        for u in range(t, min((page + 1) * slots, last)):
            row_X[u % TILE] = (start + u) * heads + head
        t = (page + 1) * slots


@njit(nogil=True, cache=True, error_model="numpy")
def _bf16(codes: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    whole = width // _LANES
    for t in range(a, b):
        at, to = (row_X[t] + head) * 2 * width, t * _LANES
        for c in range(whole):
            simd.store(out, to + c * STRIDE, kv_lanes.load_bf16(codes, at + 2 * _LANES * c))
        for i in range(whole * _LANES, width):
            bits = np.uint16(codes[at + 2 * i] + 256 * codes[at + 2 * i + 1])
            out[to + whole * STRIDE + i % _LANES] = bf16_bits_to_f32(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _f16(codes: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    whole = width // _LANES
    for t in range(a, b):
        at, to = (row_X[t] + head) * 2 * width, t * _LANES
        for c in range(whole):
            simd.store(out, to + c * STRIDE, kv_lanes.load_f16(codes, at + 2 * _LANES * c))
        for i in range(whole * _LANES, width):
            bits = np.uint16(codes[at + 2 * i] + 256 * codes[at + 2 * i + 1])
            out[to + whole * STRIDE + i % _LANES] = f16_bits_to_f32(bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _e4m3(codes: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    pairs = width // (2 * _LANES)
    for t in range(a, b):
        at, to = (row_X[t] + head) * width, t * _LANES
        for c in range(pairs):
            v = kv_lanes.load_e4m3_256th(codes, at + 2 * _LANES * c)
            simd.store(out, to + 2 * c * STRIDE, simd.part(v, 0))
            simd.store(out, to + (2 * c + 1) * STRIDE, simd.part(v, 1))
        for i in range(2 * _LANES * pairs, width):
            out[to + i // _LANES * STRIDE + i % _LANES] = e4m3_code_to_f32(codes[at + i]) / E4M3_UNIT


@njit(nogil=True, cache=True, error_model="numpy")
def _e5m2(codes: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    whole = width // _LANES
    for t in range(a, b):
        at, to = (row_X[t] + head) * width, t * _LANES
        for c in range(whole):
            simd.store(out, to + c * STRIDE, simd.load_e5m2(codes, at + _LANES * c))
        for i in range(whole * _LANES, width):
            out[to + whole * STRIDE + i % _LANES] = f16_bits_to_f32(np.uint16(256 * codes[at + i]))


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _power(code: np.uint8) -> np.float32:
    """2^(code - 127), NaN for 255."""
    c = np.int32(code)
    bits = np.int32(0x7FC00000) if c == 255 else c << np.int32(23)
    return f32_of_bits(np.int32(1 << 22) if c == 0 else bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _nvfp4(codes: U8, scales: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    table, blocks = simd.load_f32(E2M1_VALUES, 0), width // 16
    for t in range(a, b):
        row, to = row_X[t] + head, t * _LANES
        at, scale_at = row * (width // 2), row * blocks
        for c in range(blocks):
            values = lanes.lookup(table, kv_lanes.load_nibbles(codes, at + 8 * c))
            scale = simd.splat(e4m3_code_to_f32(scales[scale_at + c]))
            simd.store(out, to + c * STRIDE, simd.mul(values, scale))


@njit(nogil=True, cache=True, error_model="numpy")
def _mxfp4(codes: U8, scales: U8, row_X: I64, head: int, a: int, b: int, width: int, out: F32) -> None:
    table, blocks = simd.load_f32(E2M1_VALUES, 0), width // 32
    for t in range(a, b):
        row, to = row_X[t] + head, t * _LANES
        at, scale_at = row * (width // 2), row * blocks
        for c in range(2 * blocks):
            values = lanes.lookup(table, kv_lanes.load_nibbles(codes, at + 8 * c))
            scale = simd.splat(_power(scales[scale_at + c // 2]))
            simd.store(out, to + c * STRIDE, simd.mul(values, scale))


@njit(nogil=True, cache=True, error_model="numpy")
def _dsa(codes: U8, row_X: I64, a: int, b: int, out: F32) -> None:
    """512 e4m3 codes, 4 float32 scales, 64 bf16."""
    for t in range(a, b):
        at, to = row_X[t] * DSA_ROW, t * _LANES
        for c in range(0, 32, 2):
            scale = simd.splat(kv_lanes.f32_at(codes, at + 512 + 4 * (c // 8)))
            v = kv_lanes.load_e4m3_256th(codes, at + _LANES * c)
            v = simd.mul(v, simd.tile(simd.splat(E4M3_UNIT), v))  # not into the scale, which may be near the largest
            v = simd.mul(v, simd.tile(scale, v))
            simd.store(out, to + c * STRIDE, simd.part(v, 0))
            simd.store(out, to + (c + 1) * STRIDE, simd.part(v, 1))
        for c in range(4):
            simd.store(out, to + (32 + c) * STRIDE, kv_lanes.load_bf16(codes, at + 528 + 2 * _LANES * c))


@njit(nogil=True, cache=True, error_model="numpy")
def prefetch_rows(rows: Rows, row_X: I64, heads: int, a: int, b: int) -> None:
    """Ask for the memory of `heads` heads of the tokens a .. b - 1 of a tile; block scales come when they are read.

    One line of two: processors with a prefetcher for neighbours bring the other, and asking takes time as well.
    """
    codes, size = rows.codes, rows.row
    for t in range(a, b):
        for at in range(row_X[t] * size, (row_X[t] + heads) * size, 128):
            kv_lanes.prefetch(codes, at)


@njit(nogil=True, cache=True, error_model="numpy")
def decode_rows(rows: Rows, row_X: I64, head: int, a: int, b: int, out: F32) -> None:
    """Decode the tokens a .. b - 1 of a tile (0 <= a <= b <= TILE) into `out`: rows row_X[t] + head of the array."""
    if rows.format == E4M3:
        _e4m3(rows.codes, row_X, head, a, b, rows.width, out)
    elif rows.format == BF16:
        _bf16(rows.codes, row_X, head, a, b, rows.width, out)
    elif rows.format == F16:
        _f16(rows.codes, row_X, head, a, b, rows.width, out)
    elif rows.format == E5M2:
        _e5m2(rows.codes, row_X, head, a, b, rows.width, out)
    elif rows.format == NVFP4:
        _nvfp4(rows.codes, rows.block_scale, row_X, head, a, b, rows.width, out)
    elif rows.format == MXFP4:
        _mxfp4(rows.codes, rows.block_scale, row_X, head, a, b, rows.width, out)
    else:
        _dsa(rows.codes, row_X, a, b, out)
