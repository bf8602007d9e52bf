"""Keys and values into a paged KV cache: the Numba twin of the writes in `kernels/attention.py`, bit for bit.

Rounding is that of `kernels/kv_rows.py`. Shape suffixes: T tokens, H heads, D values of a head, N slots of the cache,
R latent values; a row is what one token stores in one array, its values flat.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import (
    as_f32,
    bits_of_f32,
    e4m3_code_to_f32,
    f32_of_bits,
    f32_to_bf16_bits,
    f32_to_e2m1_code,
    f32_to_e4m3_code,
    f32_to_f16_bits,
)
from quantkit.kernels.cpu.workers import share
from quantkit.kernels.kv import KVCache, LatentCache, pages_and_slots
from quantkit.kernels.kv_check import check_write, check_write_latent

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_E5M2_SUBNORMAL = np.float32(128.0)  # its last bit is 2^-16, the step of subnormal e5m2


@njit(nogil=True, cache=True, error_model="numpy")
def f32_to_e5m2_code(x: np.float32) -> np.int32:
    """E5M2 code (int32, 0..255). Saturates to 57344, infinity too; NaN becomes 0x7e or 0xfe; -0.0 becomes 0x80."""
    bits = bits_of_f32(x)
    sign = (bits >> np.int32(24)) & np.int32(0x80)
    a = bits & _MAGNITUDE
    normal = (a + np.int32(0xFFFFF) + ((a >> np.int32(21)) & np.int32(1)) - np.int32(112 << 23)) >> np.int32(21)
    tiny = bits_of_f32(f32_of_bits(a) + _E5M2_SUBNORMAL) - bits_of_f32(_E5M2_SUBNORMAL)
    special = np.int32(0x7E) if a > _INF else np.int32(0x7B)
    finite = tiny if a < np.int32(113 << 23) else normal
    return (special if a >= np.int32(0x47600000) else finite) | sign


@njit(nogil=True, cache=True, error_model="numpy")
def _amax_bits(x: F32, at: int, size: int) -> np.int32:
    """Largest magnitude of a run of a row, as the bits of a float32; infinity and NaN sort above every number."""
    most = np.int32(0)
    for i in range(at, at + size):
        most = max(most, bits_of_f32(x[i]) & _MAGNITUDE)
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def _write_half(x_TD: F32, slots_T: I64, f16: bool, out_ND: U16) -> None:
    for t in range(slots_T.size):
        if slots_T[t] >= 0:
            row = out_ND[slots_T[t]]
            for d in range(row.size):
                row[d] = f32_to_f16_bits(x_TD[t, d]) if f16 else f32_to_bf16_bits(x_TD[t, d])


@njit(nogil=True, cache=True, error_model="numpy")
def _write_fp8(x_TD: F32, slots_T: I64, e5m2: bool, scale: np.float32, out_ND: U8) -> None:
    for t in range(slots_T.size):
        if slots_T[t] >= 0:
            row = out_ND[slots_T[t]]
            for d in range(row.size):
                x = x_TD[t, d] / scale
                row[d] = f32_to_e5m2_code(x) if e5m2 else f32_to_e4m3_code(x)


@njit(nogil=True, cache=True, error_model="numpy")
def _nvfp4_scale(amax: np.int32, outer: np.float32) -> np.int32:
    """The e4m3 code of a block scale; 1.0 for zeros, NaN for a NaN."""
    wanted = f32_of_bits(amax) / (np.float32(6) * outer)
    held = min(max(wanted, np.float32(2.0**-9)), np.float32(448))
    code = np.int32(0x38) if amax == 0 else f32_to_e4m3_code(held)
    return np.int32(0x7F) if amax > _INF else code


@njit(nogil=True, cache=True, error_model="numpy")
def _mxfp4_scale(amax: np.int32) -> np.int32:
    """The e8m0 code of a block scale; 2^0 for zeros, NaN for a NaN."""
    code = max(((amax + np.int32(1 << 21)) >> np.int32(23)) - np.int32(2), np.int32(0))
    code = np.int32(127) if amax == 0 else code
    return np.int32(255) if amax > _INF else code


@njit(nogil=True, cache=True, error_model="numpy")
def _power(code: np.int32) -> np.float32:
    """2^(code - 127), NaN for 255."""
    bits = np.int32(0x7FC00000) if code == 255 else code << np.int32(23)
    return f32_of_bits(np.int32(1 << 22) if code == 0 else bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _write_fp4(x_TD: F32, slots_T: I64, block: int, outer: np.float32, out_NB: U8, scale_NG: U8) -> None:
    """Blocks of 16 are NVFP4 under the outer scale, blocks of 32 MXFP4."""
    scale_D, code_D = np.empty(x_TD.shape[1], np.float32), np.empty(x_TD.shape[1], np.int32)
    for t in range(slots_T.size):
        if slots_T[t] < 0:
            continue
        x, row, scales = x_TD[t], out_NB[slots_T[t]], scale_NG[slots_T[t]]
        for g in range(scales.size):
            amax = _amax_bits(x, g * block, block)
            code = _nvfp4_scale(amax, outer) if block == 16 else _mxfp4_scale(amax)
            scale_D[g * block : (g + 1) * block] = e4m3_code_to_f32(code) * outer if block == 16 else _power(code)
            scales[g] = code
        for d in range(x.size):  # a loop over the whole row is vectorised, one over a block is not
            code_D[d] = f32_to_e2m1_code(x[d] / scale_D[d])
        for d in range(row.size):
            row[d] = code_D[2 * d] | (code_D[2 * d + 1] << np.int32(4))


@njit(nogil=True, cache=True, error_model="numpy")
def _write_dsa(latent_TR: F32, rope_TD: F32, slots_T: I64, out_NB: U8) -> None:
    """512 e4m3 codes, 4 float32 scales, 64 bf16, little endian."""
    for t in range(slots_T.size):
        if slots_T[t] < 0:
            continue
        row = out_NB[slots_T[t]]
        for g in range(4):
            most = np.int32(0)
            for i in range(128 * g, 128 * g + 128):
                a = bits_of_f32(latent_TR[t, i]) & _MAGNITUDE
                most = max(most, np.int32(0) if a > _INF else min(a, _INF - np.int32(1)))
            least = max(f32_of_bits(most) / np.float32(448), np.float32(1e-4))
            power = (bits_of_f32(least) + np.int32(0x7FFFFF)) & _INF  # the next power of two
            for i in range(128 * g, 128 * g + 128):
                row[i] = f32_to_e4m3_code(latent_TR[t, i] / f32_of_bits(power))
            for b in range(4):
                row[512 + 4 * g + b] = (power >> np.int32(8 * b)) & np.int32(255)
        for i in range(64):
            bits = f32_to_bf16_bits(rope_TD[t, i])
            row[528 + 2 * i] = bits & np.int32(255)
            row[529 + 2 * i] = bits >> np.int32(8)


def _write_rows(format: str, x_TD: F32, slots_T: I64, scale: float, out_ND: Any, scale_NG: Any) -> None:
    if format in ("bf16", "f16"):
        _write_half(x_TD, slots_T, format == "f16", out_ND)
    elif format in ("e4m3", "e5m2"):
        _write_fp8(x_TD, slots_T, format == "e5m2", np.float32(scale), out_ND)
    else:
        _write_fp4(x_TD, slots_T, 16 if format == "nvfp4" else 32, np.float32(scale), out_ND, scale_NG)


def _chunk(worker: int, workers: int, tokens: int) -> slice:
    return slice(tokens * worker // workers, tokens * (worker + 1) // workers)


def write(cache: KVCache, slots_T: NDArray[Any], k_THD: NDArray[Any], v_THD: NDArray[Any], *, threads: int = 1) -> None:
    """Store the keys and values of T tokens in their slots (page * S + offset; -1: the token is skipped).

    slots_T int32 or int64, each slot once; k_THD [T, KV heads, D] and v_THD float32, float16 or uint16 (bits of
    bfloat16). Raises QuantkitError before anything is written.
    """
    check_write(cache, slots_T, k_THD, v_THD)
    pages, size = pages_and_slots(cache)
    parts: Any = (
        (k_THD, cache.k, cache.k_scale, cache.k_block_scale),
        (v_THD, cache.v, cache.v_scale, cache.v_block_scale),
    )
    slots = slots_T.astype(np.int64, copy=False)
    workers = max(min(threads, len(slots)), 1)

    def write_chunk(worker: int) -> None:
        own = _chunk(worker, workers, len(slots))
        for x, target, scale, scales in parts:
            flat = None if scales is None else scales.reshape(pages * size, -1)
            x_TD = as_f32(x[own]).reshape(-1, x.shape[1] * x.shape[2])
            _write_rows(cache.format, x_TD, slots[own], scale, target.reshape(pages * size, -1), flat)

    share(write_chunk, workers)


def write_latent(
    cache: LatentCache, slots_T: NDArray[Any], latent_TR: NDArray[Any], rope_TD: NDArray[Any], *, threads: int = 1
) -> None:
    """Store the latent rows of T tokens; latent_TR [T, rank] and rope_TD [T, rope], otherwise as `write`."""
    check_write_latent(cache, slots_T, latent_TR, rope_TD)
    pages, size = pages_and_slots(cache)
    rows: Any = cache.rows
    flat = rows.reshape(pages * size, -1)
    slots = slots_T.astype(np.int64, copy=False)
    workers = max(min(threads, len(slots)), 1)

    def write_chunk(worker: int) -> None:
        own = _chunk(worker, workers, len(slots))
        latent, rope = as_f32(latent_TR[own]), as_f32(rope_TD[own])
        if cache.format == "dsa":
            _write_dsa(latent, rope, slots[own], flat)
        else:
            _write_rows(cache.format, np.concatenate([latent, rope], 1), slots[own], cache.scale, flat, None)

    share(write_chunk, workers)
