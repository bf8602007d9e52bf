"""FP4 blocks by exhaustion, in float64: every code for every weight, every scale for every block.

Written from the format tables alone and as slowly as that takes; shares no code with the product.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(code: int) -> float:
    """Value of a positive finite e4m3 code 0..126."""
    exponent, mantissa = divmod(code, 8)
    return (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest_e4m3(x: float) -> int:
    """Code 0..126 nearest to x >= 0, the even one of two."""
    return min(range(127), key=lambda code: (abs(e4m3(code) - x), code % 2))


def nearest_e2m1(quotient: float) -> int:
    """Code 0..15 nearest to a quotient: ties to the even magnitude, sign kept on a rounded zero, 0 for -0.0."""
    held = min(abs(quotient), 6.0)
    magnitude = min(range(8), key=lambda code: (abs(E2M1[code] - held), code % 2))
    return magnitude + (8 if quotient < 0 else 0)


def codes_of(block_K: NDArray[np.float32], scale: np.float32) -> list[int]:
    """The codes of a block under a float32 scale: nearest to the float32 quotient; a negative weight keeps its sign."""
    codes = []
    for w in block_K:
        magnitude = nearest_e2m1(float(np.abs(w) / scale))
        codes.append(magnitude + (8 if w < 0 else 0))
    return codes


def loss(block_K: NDArray[np.float32], scale: np.float32) -> float:
    """Sum of squared distances of a block to the nearest values under a scale, chosen freely for each weight."""
    values = np.array(E2M1) * float(scale)
    distance = np.abs(block_K.astype(np.float64)[:, None] - values[None, :]).min(1)
    return float((distance**2).sum())


def pack(codes: list[int]) -> list[int]:
    """Two codes a byte, the even one low."""
    return [codes[k] | codes[k + 1] << 4 for k in range(0, len(codes), 2)]


def unpack(codes_RB: U8) -> F64:
    """Values [R, 2 B] of packed codes."""
    return np.array([[E2M1[c] for byte in row for c in (int(byte) & 15, int(byte) >> 4)] for row in codes_RB])


def nvfp4_plain_scale(block_K: NDArray[np.float32], scale_2: np.float32) -> int:
    """The e4m3 code of amax / (6 scale_2), formed in float32 and held to [2^-9, 448]; 1.0 for a block of zeros."""
    amax = np.abs(block_K).max()
    if amax == 0:
        return 0x38
    return nearest_e4m3(float(np.clip(amax / (np.float32(6) * scale_2), 2.0**-9, 448.0)))


def nvfp4_best_loss(block_K: NDArray[np.float32], scale_2: np.float32) -> float:
    """The smallest loss over all 126 positive e4m3 scales."""
    return min(loss(block_K, np.float32(e4m3(code)) * scale_2) for code in range(1, 127))


def mxfp4_plain_scale(block_K: NDArray[np.float32]) -> int:
    """The smallest power of two under which no weight lies at 7 or above (7 is the tie between 6 and a missing 8).

    That is the exponent of amax after rounding up at 1.75, minus 2, put in another way. 2^0 for a block of zeros.
    """
    amax = float(np.abs(block_K).max())
    if amax == 0:
        return 127
    return next(code for code in range(255) if amax / 2.0 ** (code - 127) < 7)
