"""FP4 blocks side by side: the loops that NVFP4 and MXFP4 share, one SIMD lane per block.

A tile holds up to LANES blocks of 16 consecutive weights, transposed: weight i of lane j is at `tile[i * LANES + j]`.
Lane loops are then plain contiguous loops, which LLVM vectorises, and every sum over a block runs in one stated order:

    four weights in order make a quad; a half of 16 weights is (quad 0 + quad 1) + (quad 2 + quad 3); a block of 32 is
    half 0 + half 1

so that vector and scalar code, and the torch reference, agree bit for bit. The 16 steps of a half are written out, not
a loop, because LLVM vectorises only innermost loops; for the same reason their helpers are inlined by force.

Rounding to e2m1 adds and takes away a power of two whose last bit is the step of the grid at that magnitude: nearest,
ties to the even code. Shape suffixes: I inputs, L lanes, W 32-bit words.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import bits_of_f32, f32_of_bits

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

LANES = 64  # 16 x 64 weights are 4 KiB: tile and scratch stay in the first-level cache
_MAX = np.float32(6.0)
_ONE = np.int32(127 << 23)  # bits of 1.0: below 2 the e2m1 grid has one step, 0.5
INF_BITS = np.int32(0x7F800000)  # also the mask of the exponent
_MAGIC = np.int32(22 << 23)  # 2^22 times a power of two 2^e has the last bit 2^(e - 1), the step of e2m1 at 2^e


@njit(nogil=True, cache=True, error_model="numpy")
def load_half(w_I: F32, at: int, stride: int, lanes: int, tile: F32) -> int:
    """Transpose 16 weights per lane into `tile`; lane j reads w_I[at + j * stride ...].

    Returns `lanes` rounded up to whole vectors of 8; the lanes added hold zeros, so that no loop has a scalar rest.
    """
    for j in range(lanes):
        for i in range(16):
            tile[i * LANES + j] = w_I[at + j * stride + i]
    whole = -(-lanes // 8) * 8
    for j in range(lanes, whole):
        for i in range(16):
            tile[i * LANES + j] = 0.0
    return whole


@njit(nogil=True, cache=True, error_model="numpy")
def clear(amax_L: I32, err_L: F64, norm_L: F64) -> None:
    """Zero what the next loops raise and add to."""
    for j in range(LANES):
        amax_L[j] = 0
        err_L[j] = 0.0
        norm_L[j] = 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def amax_bits(tile: F32, lanes: int, amax_L: I32) -> np.int32:
    """Raise amax_L[j] to the largest magnitude of lane j, as the bits of a float32; returns the largest of all.

    Infinity and NaN sort above every number.
    """
    for i in range(16):
        for j in range(lanes):
            amax_L[j] = max(amax_L[j], bits_of_f32(tile[i * LANES + j]) & np.int32(0x7FFFFFFF))
    largest = np.int32(0)
    for j in range(lanes):
        largest = max(largest, amax_L[j])
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def magnitudes(tile: F32, lanes: int, unit_L: F32, size: F32) -> None:
    """Write |w| * unit_L[j] to `size`, laid out as `tile`; units are powers of two: nothing is rounded that matters."""
    for i in range(16):
        for j in range(lanes):
            size[i * LANES + j] = abs(tile[i * LANES + j]) * unit_L[j]


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _grid(a: np.float32) -> np.float32:
    """Value of `a` in [0, 6] rounded to the e2m1 grid."""
    magic = f32_of_bits((max(bits_of_f32(a), _ONE) & INF_BITS) + _MAGIC)
    return (a + magic) - magic


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _loss1(a: np.float32, reciprocal: np.float32, scale: np.float32) -> np.float32:
    d = a - _grid(min(a * reciprocal, _MAX)) * scale
    return d * d


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _loss4(size: F32, at: int, reciprocal: np.float32, scale: np.float32) -> np.float32:
    e = _loss1(size[at], reciprocal, scale)
    e += _loss1(size[at + LANES], reciprocal, scale)
    e += _loss1(size[at + 2 * LANES], reciprocal, scale)
    e += _loss1(size[at + 3 * LANES], reciprocal, scale)
    return e


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def half_loss(size: F32, j: int, reciprocal: np.float32, scale: np.float32) -> np.float32:
    """float32 sum over 16 weights of lane j of (w - w_hat)^2 under one scale; codes by the reciprocal of the scale.

    `size` holds magnitudes in a unit that keeps the squares away from the ends of float32, see `magnitudes`.
    """
    e0 = _loss4(size, j, reciprocal, scale)
    e1 = _loss4(size, j + 4 * LANES, reciprocal, scale)
    e2 = _loss4(size, j + 8 * LANES, reciprocal, scale)
    e3 = _loss4(size, j + 12 * LANES, reciprocal, scale)
    return (e0 + e1) + (e2 + e3)


@njit(nogil=True, cache=True, error_model="numpy")
def weigh_sizes(size: F32, h: F32, lanes: int) -> None:
    """Write h * size^0.5 behind the `size` of a tile, to size[16 * LANES:], laid out as `size`."""
    for k in range(16):
        for j in range(lanes):
            size[(16 + k) * LANES + j] = h[k * LANES + j] * np.sqrt(size[k * LANES + j])


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _weighted4(size: F32, at: int, reciprocal: np.float32, scale: np.float32) -> np.float32:
    e: np.float32 = size[at + 16 * LANES] * _loss1(size[at], reciprocal, scale)
    e += size[at + 17 * LANES] * _loss1(size[at + LANES], reciprocal, scale)
    e += size[at + 18 * LANES] * _loss1(size[at + 2 * LANES], reciprocal, scale)
    e += size[at + 19 * LANES] * _loss1(size[at + 3 * LANES], reciprocal, scale)
    return e


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def weighted_half_loss(size: F32, j: int, reciprocal: np.float32, scale: np.float32) -> np.float32:
    """As `half_loss`, each square times the weight that `weigh_sizes` has put behind the sizes."""
    e0 = _weighted4(size, j, reciprocal, scale)
    e1 = _weighted4(size, j + 4 * LANES, reciprocal, scale)
    e2 = _weighted4(size, j + 8 * LANES, reciprocal, scale)
    e3 = _weighted4(size, j + 12 * LANES, reciprocal, scale)
    return (e0 + e1) + (e2 + e3)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _code1(w: np.float32, scale: np.float32, error: F32, at: int) -> np.int32:
    """e2m1 code of w / scale; writes |w| - |w_hat|. A weight of exactly -0.0 gets code 0."""
    a = min(abs(w) / scale, _MAX)
    exponent = max(bits_of_f32(a), _ONE) & INF_BITS
    magic = exponent + _MAGIC
    y = a + f32_of_bits(magic)
    error[at] = abs(w) - (y - f32_of_bits(magic)) * scale
    code = bits_of_f32(y) - magic + ((exponent - _ONE) >> np.int32(22))
    return code | (np.int32(8) if w < np.float32(0) else np.int32(0))


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _code8(tile: F32, at: int, scale: np.float32, error: F32) -> np.int32:
    """Eight codes of a lane in one word, the first in the low nibble."""
    c = _code1(tile[at], scale, error, at)
    c |= _code1(tile[at + LANES], scale, error, at + LANES) << np.int32(4)
    c |= _code1(tile[at + 2 * LANES], scale, error, at + 2 * LANES) << np.int32(8)
    c |= _code1(tile[at + 3 * LANES], scale, error, at + 3 * LANES) << np.int32(12)
    c |= _code1(tile[at + 4 * LANES], scale, error, at + 4 * LANES) << np.int32(16)
    c |= _code1(tile[at + 5 * LANES], scale, error, at + 5 * LANES) << np.int32(20)
    c |= _code1(tile[at + 6 * LANES], scale, error, at + 6 * LANES) << np.int32(24)
    c |= _code1(tile[at + 7 * LANES], scale, error, at + 7 * LANES) << np.int32(28)
    return c


@njit(nogil=True, cache=True, error_model="numpy")
def encode_half(tile: F32, scale_L: F32, lanes: int, error: F32, words: I32) -> None:
    """Codes of 16 weights per lane by true division: word 0 of lane j to words[j], word 1 to words[LANES + j].

    `error`, laid out as `tile`, receives |w| - |w_hat| in float32.
    """
    for j in range(lanes):
        scale = scale_L[j]
        words[j] = _code8(tile, j, scale, error)
        words[LANES + j] = _code8(tile, j + 8 * LANES, scale, error)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _square4(x: F32, at: int) -> np.float64:
    a = np.float64(x[at])
    b = np.float64(x[at + LANES])
    c = np.float64(x[at + 2 * LANES])
    d = np.float64(x[at + 3 * LANES])
    return ((a * a + b * b) + c * c) + d * d


@njit(nogil=True, cache=True, error_model="numpy")
def sum_squares(x: F32, lanes: int, out_L: F64) -> None:
    """Add to out_L[j] the float64 sum of squares of lane j of a half tile."""
    for j in range(lanes):
        q0 = _square4(x, j)
        q1 = _square4(x, j + 4 * LANES)
        q2 = _square4(x, j + 8 * LANES)
        q3 = _square4(x, j + 12 * LANES)
        out_L[j] += (q0 + q1) + (q2 + q3)


@njit(nogil=True, cache=True, error_model="numpy")
def interleave(words: I32, lanes: int, step: int, at: int, packed: I32) -> None:
    """Two words of each lane to packed[j * step + at] and the next: the bytes of a block side by side."""
    for j in range(lanes):
        packed[j * step + at] = words[j]
        packed[j * step + at + 1] = words[LANES + j]


@njit(nogil=True, cache=True, error_model="numpy")
def copy_bytes(source: NDArray[np.uint8], count: int, target: NDArray[np.uint8], at: int) -> None:
    """target[at : at + count] = source[:count], without the shape checks of a slice assignment, slow to compile."""
    part = target[at : at + count]  # index from 0: LLVM cannot know that `at + b` is not negative
    for b in range(count):
        part[b] = source[b]
