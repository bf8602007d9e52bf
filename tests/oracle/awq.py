"""AWQ's search by brute force in float64, with outputs of every token. Shares no code with the product."""

import numpy as np


def scales(x, weights, group, exponent):
    """The "duo" scale of every input."""
    inputs = x.shape[1]
    size = np.zeros(inputs)
    rows = 0
    for w in weights:
        for row in np.asarray(w, np.float64):
            for g in range(0, inputs, group):
                size[g : g + group] += np.abs(row[g : g + group]) / np.abs(row[g : g + group]).max()
            rows += 1
    mean = np.abs(np.asarray(x, np.float64)).mean(0)
    s = np.maximum(mean**exponent / ((size / rows) ** (1 - exponent) + 1e-4), 1e-4)
    return s / np.sqrt(s.max() * s.min())


def output_error(x, weights, s, rounded):
    """2 / n sum over tokens, matrices and outputs of the squared error; `rounded(w)` is the quantiser's w_hat."""
    x = np.asarray(x, np.float64)
    total = 0.0
    for matrix in weights:
        w = np.asarray(matrix, np.float64)
        w_hat = np.asarray(rounded((w * s).astype(np.float32)), np.float64) / s
        total += float((((w - w_hat) @ x.T) ** 2).sum())
    return 2 * total / len(x)


def search(x, weights, group, rounded):
    """(exponent, scales, error) of the best of 20 exponents; None and ones where no scaling is better."""
    best = (None, np.ones(x.shape[1]), output_error(x, weights, np.ones(x.shape[1]), rounded))
    for k in range(20):
        s = scales(x, weights, group, k / 20)
        error = output_error(x, weights, s, rounded)
        if error < best[2]:
            best = (k / 20, s, error)
    return best
