"""GPTQ as in the paper, one weight at a time in float64: invert the Hessian, factor the inverse, round, pass on.

Follows E. Frantar et al. (arXiv 2210.17323), algorithm 1 without its blocks. Shares no code with the product.
"""

import ml_dtypes
import numpy as np

INT4 = [float(q) for q in range(-8, 8)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def loss(w, w_hat, h):
    """tr(D H D^T), D = w - w_hat."""
    d = np.asarray(w, np.float64) - np.asarray(w_hat, np.float64)
    return float(np.einsum("oi,ij,oj->", d, np.asarray(h, np.float64), d))


def hessian(x):
    """2 / n sum of x x^T."""
    total = np.zeros((x.shape[1], x.shape[1]))
    for row in np.asarray(x, np.float64):
        total += np.outer(row, row)
    return 2 * total / len(x)


def descending(h):
    """Columns by descending diagonal, the earlier of equals first."""
    return sorted(range(len(h)), key=lambda c: (-h[c, c], c))


def nearest(value, scale, zero, levels):
    """The value (level - zero) * scale nearest to `value`."""
    return min(((level - zero) * scale for level in levels), key=lambda v: abs(v - value))


def quantize(w, h, scale, zero, levels, damp, order):
    """Values of the codes. scale and zero are given for each weight [O, I]; order lists the columns."""
    h = np.asarray(h, np.float64)
    damped = h[np.ix_(order, order)] + damp * np.mean(np.diag(h)) * np.eye(len(h))
    inverse = np.linalg.inv(damped)
    upper = np.linalg.cholesky(inverse).T
    w_hat = np.zeros(w.shape)
    for o in range(len(w)):
        left = np.asarray(w[o], np.float64)[order]
        for k, c in enumerate(order):
            w_hat[o, c] = nearest(left[k], float(scale[o, c]), float(zero[o, c]), levels)
            left[k:] -= (left[k] - w_hat[o, c]) / upper[k, k] * upper[k, k:]
    return w_hat


def descended(w, w_hat, h, scale, zero, levels, damp):
    """Whether no single weight can move to another level and lose less on the damped Hessian (by more than rounding)."""
    h = np.asarray(h, np.float64) + damp * np.mean(np.diag(h)) * np.eye(len(h))
    d = np.asarray(w, np.float64) - w_hat
    worst = 0.0
    for o in range(len(w)):
        start = d[o] @ h @ d[o]
        for c in range(w.shape[1]):
            for level in levels:
                trial = d[o].copy()
                trial[c] = w[o, c] - (level - zero[o, c]) * scale[o, c]
                worst = max(worst, (start - trial @ h @ trial) / start)
    return worst


def read(codes, scale, zero, kind, inputs, *, half=False, scale_2=1.0):
    """(levels, scales, zeros) of every weight [O, inputs] from packed codes and stored scales; kind as scheme families."""
    nibbles = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(codes), -1)[:, :inputs]
    if kind == "int4":
        levels = nibbles.astype(np.float64) - 8
        stored = scale.view(np.float16 if half else ml_dtypes.bfloat16).astype(np.float64)
    else:
        levels = np.array([*E2M1[:8], -0.0, *E2M1[8:]])[nibbles]
        stored = (
            np.ldexp(1.0, scale.astype(int) - 127)
            if kind == "mxfp4"
            else (scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale_2)).astype(np.float64)
        )
    repeat = inputs // scale.shape[1]
    zeros = np.zeros(scale.shape) if zero is None else zero.astype(np.float64)
    return levels, np.repeat(stored, repeat, axis=1), np.repeat(zeros, repeat, axis=1)
