"""FP8 E4M3 by exhaustion: every code for every quotient, blocks cut by hand. Shares no code with the product."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def value(code: int) -> float:
    """What an e4m3 code 0..255 stands for; 0x7f and 0xff are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = divmod(code & 0x7F, 8)
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * ((mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_MAGNITUDES = np.array([value(code) for code in range(0x7F)])


def nearest(w: np.float32, scale: np.float32) -> int:
    """Code nearest to the float32 quotient, ties to even, at most 448 in magnitude; the sign of the weight is kept."""
    distance = np.abs(_MAGNITUDES - min(abs(float(w / scale)), 448.0))
    ties = np.flatnonzero(distance == distance.min())
    code = next(int(c) for c in ties if c % 2 == 0 or len(ties) == 1)
    return code | (0x80 if np.signbit(w) else 0)


def scale_of(amax: np.float32, power_of_two: bool) -> np.float32:
    """amax / 448 in float32; 1 for 0; rounded up to a power of two on demand."""
    if amax == 0:
        return np.float32(1)
    scale = np.float32(max(amax / np.float32(448), np.float32(2.0**-126)))
    if power_of_two:
        mantissa, exponent = np.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        scale = np.float32(2.0 ** (int(exponent) - (1 if mantissa == 0.5 else 0)))
    return scale


def block(w_RI: F32, power_of_two: bool) -> tuple[NDArray[np.uint8], F32]:
    """Codes and scales of 128 x 128 blocks, partial ones at the edges."""
    rows, inputs = w_RI.shape
    codes_RI = np.zeros((rows, inputs), np.uint8)
    scales = np.zeros((-(-rows // 128), -(-inputs // 128)), np.float32)
    for top in range(0, rows, 128):
        for left in range(0, inputs, 128):
            part = w_RI[top : top + 128, left : left + 128]
            scale = scale_of(np.abs(part).max(), power_of_two)
            scales[top // 128, left // 128] = scale
            for (r, i), w in np.ndenumerate(part):
                codes_RI[top + r, left + i] = nearest(w, scale)
    return codes_RI, scales
