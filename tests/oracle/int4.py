"""INT4 group quantisation by brute force, one group at a time, errors in float64. Shares no code with the product."""

import ml_dtypes
import numpy as np

STORED = {"bf16": (ml_dtypes.bfloat16, 2.0**-126, 2.0**128 - 2.0**120), "f16": (np.float16, 2.0**-14, 65504.0)}


def stored_scale(scale, kind):
    """The float32 value of a scale after rounding to its stored format, never subnormal, zero or infinite."""
    dtype, smallest, largest = STORED[kind]
    with np.errstate(over="ignore"):
        value = float(np.float32(abs(scale)).astype(dtype).astype(np.float32))
    value = min(max(value, smallest), largest)
    return np.float32(-value if scale < 0 else value)


def codes(w_N, scale, zero=0):
    """The code nearest to each weight, halves to the even code."""
    with np.errstate(over="ignore"):
        ratio = w_N.astype(np.float32) / np.float32(scale) + np.float32(zero)
    return np.clip(np.rint(ratio), -8, 7).astype(int)


def loss(w_N, scale, zero=0):
    """Squared error of a group under a stored scale."""
    w_hat = (codes(w_N, scale, zero) - zero) * np.float64(scale)
    return float(((w_N.astype(np.float64) - w_hat) ** 2).sum())


def plain_scale(w_N, kind):
    largest = np.abs(w_N).max()
    return stored_scale(largest / np.float32(7.5) if largest else np.float32(1), kind)


def asym_parameters(w_N, kind):
    """Scale and zero point of the range of a group, 0 inside."""
    low, high = min(w_N.min(), np.float32(0)), max(w_N.max(), np.float32(0))
    scale = (high - low) / np.float32(15) if high > low else np.float32(1)
    return stored_scale(scale, kind), int(np.clip(np.rint(np.float32(-8) - low / scale), -8, 7))


def exhaustive_loss(w_N, kind):
    """Least error over the scales s0 * t of both signs, s0 = max |w| / 8, t = 1.1, 1.095, ... 0.4."""
    start = np.abs(w_N).max() / np.float32(8)
    scales = [stored_scale(sign * start * np.float32(t), kind) for t in np.linspace(1.1, 0.4, 141) for sign in (1, -1)]
    return min(loss(w_N, s) for s in scales)
