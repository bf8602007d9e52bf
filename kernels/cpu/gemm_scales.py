"""Stored scales of a chunk of rows as float32, one line a row, ready for the inner loops of the packed GEMM.

Letters: R rows of the chunk, G scales of a row, S lines of stored scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd

F32 = NDArray[np.float32]

# Which of the two formats of one dtype a scale has: bf16 or f16 bits (uint16), e4m3 or e8m0 codes (uint8).
SECOND = {"f32": False, "bf16": False, "f16": True, "e4m3": False, "e8m0": True}


def _load(stored: Any, at: int, second: bool) -> Any:
    """16 scales from index `at` of a flat array."""
    raise NotImplementedError


@overload(_load, strict=False)
def _load_of(stored: Any, at: Any, second: Any) -> Any:
    if stored.dtype == types.float32:
        return lambda stored, at, second: simd.load_f32(stored, at)
    if stored.dtype == types.uint16:
        return lambda stored, at, second: simd.load_f16(stored, at) if second else simd.load_bf16(stored, at)
    return lambda stored, at, second: simd.load_e8m0(stored, at) if second else simd.load_e4m3(stored, at)


@njit(nogil=True, cache=True, error_model="numpy")
def _to_f32(stored: Any, second: bool, out: F32) -> None:
    """Flat arrays of one size."""
    whole = out.size // simd.LANES * simd.LANES
    for i in range(0, whole, simd.LANES):
        simd.store(out, i, _load(stored, i, second))
    if whole < out.size:
        few = np.zeros(simd.LANES, stored.dtype)
        few[: out.size - whole] = stored[whole:]
        values = np.empty(simd.LANES, np.float32)
        simd.store(values, 0, _load(few, 0, second))
        out[whole:] = values[: out.size - whole]


@njit(nogil=True, cache=True, error_model="numpy")
def scales_of_chunk(stored_SG: Any, second: bool, rows_per_scale: int, first: int, out_RG: F32) -> None:
    """Scales of the rows `first`, `first` + 1, ...; columns of `out_RG` beyond the stored ones are left as they are.

    rows_per_scale  1, the 128 of FP8 blocks, or 0 when all rows share the only line
    """
    rows, columns = out_RG.shape[0], stored_SG.shape[1]
    if rows_per_scale == 1 and out_RG.shape[1] == columns:
        _to_f32(stored_SG[first : first + rows].reshape(-1), second, out_RG.reshape(-1))
        return
    for r in range(rows):
        line = (first + r) // rows_per_scale if rows_per_scale else 0
        _to_f32(stored_SG[line], second, out_RG[r, :columns])
