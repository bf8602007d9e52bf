"""What packed weights stand for and what a product with them is, in float64, from the description of each layout.

Shape suffixes: O outputs, I inputs, G groups, T tokens.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
CARRIED = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def scales(w: Any) -> np.ndarray:
    """float64 scales [O, I] of every weight."""
    stored = w.scale.view(CARRIED[w.scale_format]).astype(np.float64)
    if w.scheme.granularity == "block":
        full = np.repeat(np.repeat(stored, 128, axis=0), 128, axis=1)
        return full[: w.outputs, : w.inputs]
    spread = np.repeat(stored, w.inputs // stored.shape[1], axis=1)
    return np.broadcast_to(spread, (w.outputs, w.inputs))


def values(w: Any) -> np.ndarray:
    """float64 weights [O, I] of a PackedMatrix of numpy arrays."""
    if w.scheme.element == "e4m3":
        numbers = w.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        nibbles = np.empty((w.outputs, 2 * w.codes.shape[1]), np.int64)
        nibbles[:, 0::2], nibbles[:, 1::2] = w.codes & 15, w.codes >> 4
        nibbles = nibbles[:, : w.inputs]
        numbers = np.array(E2M1)[nibbles] if w.scheme.element == "e2m1" else nibbles - 8.0
    if w.zero is not None:
        zero = np.array([[(int(word) >> (4 * i)) & 15 for word in line] for line in w.zero for i in range(8)]) - 8
        numbers = numbers - np.repeat(zero[: w.outputs], w.inputs // zero.shape[1], axis=1)
    return numbers * scales(w) * np.float64(np.float32(w.global_scale))


def product(x_TI: np.ndarray, w: Any) -> np.ndarray:
    """float64 [T, O]."""
    return x_TI.astype(np.float64) @ values(w).T


def bound(x_TI: np.ndarray, w: Any) -> np.ndarray:
    """Allowed error [T, O]: twice the largest of a plain float32 product, and the last bit of the sum of magnitudes."""
    w_OI = values(w)
    exact = product(x_TI, w)
    plain = np.zeros(exact.shape, np.float32)
    for i in range(w.inputs):
        plain += x_TI[:, i : i + 1].astype(np.float32) * w_OI[:, i].astype(np.float32)
    worst = np.abs(plain - exact).max()
    return 2 * worst + 2.0**-23 * (np.abs(x_TI.astype(np.float64)) @ np.abs(w_OI).T)


def nvfp4_activations(x_TI: np.ndarray, input_scale: float) -> np.ndarray:
    """float64 values of activations that a W4A4 kernel quantises; ties between codes go to the even code."""
    out = np.zeros(x_TI.shape)
    grid = np.array(E2M1[:8])
    for t in range(x_TI.shape[0]):
        for i in range(0, x_TI.shape[1], 16):
            x = x_TI[t, i : i + 16].astype(np.float32)
            amax = np.abs(x).max()
            if amax == 0:
                continue
            wanted = amax / (np.float32(6) * np.float32(input_scale))
            scale = np.float32(np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn))
            ratio = x / (scale * np.float32(input_scale))
            for k, r in enumerate(ratio):
                distance = np.abs(np.abs(np.float64(r)) - grid)
                nearest = np.flatnonzero(distance == distance.min())
                code = next(int(n) for n in nearest if len(nearest) == 1 or n % 2 == 0)
                out[t, i + k] = np.sign(r) * grid[code] * np.float64(scale) * np.float64(np.float32(input_scale))
    return out
