"""Weight matrices for the kernel tests: one generator of shapes and values, so that kernels meet the same corners.

Shapes are given in blocks of the format: square, tall, odd counts, one row, one block, and rows longer than one tile.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

SHAPES = {  # rows, blocks of a row
    "square": (16, 8),
    "tall": (67, 2),
    "odd": (3, 7),
    "one_row": (1, 13),
    "one_block": (1, 1),
    "long": (2, 150),
}
VALUES = (
    "gauss",
    "t5",
    "bf16",
    "all_equal",
    "one_huge",
    "tiny",
    "subnormal",
    "zeros",
    "zero_blocks",
    "negative_zero",
    "powers",
    "wide",
    "huge",
)


def weights(values: str, rows: int, inputs: int) -> F32:
    """A float32 matrix [rows, inputs] of the named kind; the same arguments give the same numbers."""
    rng = np.random.default_rng(zlib.crc32(f"{values} {rows} {inputs}".encode()))
    gauss = (rng.standard_normal((rows, inputs)) * 0.02).astype(np.float32)
    match values:
        case "gauss":
            w = gauss
        case "t5":
            w = rng.standard_t(5, (rows, inputs)) * 0.02
        case "bf16":
            w = (gauss.view(np.uint32) & 0xFFFF0000).view(np.float32)
        case "all_equal":
            w = np.full((rows, inputs), -0.7)
        case "one_huge":
            w = gauss.copy()
            w[rows // 2, inputs // 3] = 1e4
        case "tiny":
            w = gauss * 1e-20
        case "subnormal":
            w = gauss * 1e-38
        case "zeros":
            w = np.zeros((rows, inputs))
        case "zero_blocks":
            w = gauss.copy()
            w[::2, :16] = 0
            w[:, inputs // 2 :] = 0
        case "negative_zero":
            w = np.where(rng.random((rows, inputs)) < 0.5, np.float32(-0.0), gauss)
        case "powers":
            w = np.ldexp(rng.choice([-1.0, 1.0], (rows, inputs)), rng.integers(-20, 5, (rows, inputs)))
        case "wide":
            w = gauss * np.exp(rng.uniform(-math.log(1e6), 0, (rows, 1))) * np.exp(rng.uniform(-9, 0, (1, inputs)))
        case "huge":
            w = gauss * 1e30
        case _:
            raise ValueError(values)
    return np.ascontiguousarray(w, dtype=np.float32)
