"""Paged attention in float64, one query and one head at a time, from the bits of the cache.

Written from the format tables alone and as slowly as that takes; shares no code with the product. Caches come as plain
numpy arrays; what a slot that no request owns holds must not matter, so nothing else is decoded.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def small_float(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of a sign-exponent-mantissa code without special codes."""
    exponent, mantissa = divmod(code % (1 << (exponent_bits + mantissa_bits)), 1 << mantissa_bits)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    bias = (1 << (exponent_bits - 1)) - 1
    hidden = (1 << mantissa_bits) if exponent else 0
    return sign * math.ldexp(hidden + mantissa, max(exponent, 1) - bias - mantissa_bits)


E4M3 = np.array([math.nan if c % 128 == 127 else small_float(c, 4, 3) for c in range(256)])
E5M2 = np.array([small_float(c, 5, 2) for c in range(256)])
for _c, _value in {0x7C: math.inf, 0xFC: -math.inf}.items():
    E5M2[_c] = _value
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = math.nan
E2M1 = np.array([small_float(c, 2, 1) for c in range(16)])
E8M0 = np.array([math.nan if c == 255 else math.ldexp(1.0, c - 127) for c in range(256)])


def bf16(bits: NDArray[np.uint16]) -> F64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def values(format: str, codes, scale: float, block_scale=None) -> F64:
    """What stored rows [..., D or bytes] stand for; the outer scale is the float32 nearest to `scale`."""
    outer = float(np.float32(scale))
    if format == "bf16":
        return bf16(codes)
    if format == "f16":
        return codes.view(np.float16).astype(np.float64)
    if format in ("e4m3", "e5m2"):
        return (E4M3 if format == "e4m3" else E5M2)[codes] * outer
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if format == "nvfp4":
        return E2M1[nibbles] * np.repeat(E4M3[block_scale] * outer, 16, -1)
    return E2M1[nibbles] * np.repeat(E8M0[block_scale], 32, -1)


def latent_values(format: str, rows, scale: float) -> F64:
    """What latent rows stand for."""
    if format != "dsa":
        return values(format, rows, scale)
    out = np.empty((*rows.shape[:-1], 576))
    for i in np.ndindex(rows.shape[:-1]):
        row = rows[i].tobytes()
        for block in range(4):
            power = float(np.frombuffer(row, "<f4", 1, 512 + 4 * block)[0])
            out[i][128 * block : 128 * block + 128] = E4M3[np.frombuffer(row, np.uint8, 128, 128 * block)] * power
        out[i][512:] = bf16(np.frombuffer(row, "<u2", 64, 528))
    return out


def tokens_of(array, table_row, length: int):
    """The rows [length, ...] of a request, in order, from pages [P, S, ...]."""
    slots = array.shape[1]
    return np.stack([array[table_row[t // slots], t % slots] for t in range(length)]) if length else array[0, :0]


def attend_one(q_XHD: F64, k_LHD: F64, v_LHD: F64, scale: float, window: int = 0, sinks_H=None) -> F64:
    """Outputs of the last X of L tokens. Query heads h n .. h n + n - 1 share KV head h."""
    queries, heads, length = q_XHD.shape[0], q_XHD.shape[1], k_LHD.shape[0]
    group = heads // k_LHD.shape[1]
    out = np.empty((queries, heads, v_LHD.shape[2]))
    for x in range(queries):
        position = length - queries + x
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        for h in range(heads):
            logits = k_LHD[seen, h // group] @ q_XHD[x, h] * scale
            sink = [] if sinks_H is None else [float(sinks_H[h])]
            top = max([*logits.tolist(), *sink])
            p = np.exp(logits - top)
            out[x, h] = p @ v_LHD[seen, h // group] / (p.sum() + sum(math.exp(s - top) for s in sink))
    return out
