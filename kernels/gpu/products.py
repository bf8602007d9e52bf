"""Sums of products on tensor cores without loss: float32 accuracy from operands of 16 bits.

Codes of 4 and 8 bits are exact in float16 and bfloat16, but activations and probabilities in float32 are not. So the
latter are cut into pieces that are, and each piece multiplies the codes in a product of its own. Products of two
16-bit floats are exact in float32, where the sums are kept:

    3 pieces of bfloat16   8 + 8 + 8 = the 24 bits of a float32, the range of a float32
    2 pieces of float16    11 + 11 bits; for numbers up to 1 in magnitude: the second piece is scaled by 2^11

Operands that already have the type of the codes are one piece. TF32 is never used.
"""

from __future__ import annotations

import triton.language as tl
from quantkit.kernels.gpu.jit import jit


@jit
def _leading(x: tl.tensor) -> tl.tensor:
    """float32 cut to bfloat16's 8 significant bits; NaN stays NaN."""
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, cut, x)


@jit
def _rest(x: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.where(tl.abs(x) < float("inf"), x - high, 0.0)


@jit
def exact_dot(a: tl.tensor, b: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """float32 [M, K] @ [K, N] in the type of b; float32 sums. An infinite value in `a` stays infinite.

    PIECES  1: every value of `a` is exact in the type of b; 2: b is float16; 3: b holds bfloat16 values
    """
    if PIECES == 1:
        total = tl.dot(a.to(b.dtype), b, input_precision="ieee")
    elif PIECES == 2:
        high = a.to(tl.float16)
        low = tl.dot((_rest(a, high.to(tl.float32)) * 2048.0).to(tl.float16), b)
        total = tl.dot(high, b, low * 0.00048828125)
    else:
        high = _leading(a)
        rest = _rest(a, high)
        middle = _leading(rest)
        total = tl.dot((rest - middle).to(b.dtype), b, input_precision="ieee")
        total = tl.dot(middle.to(b.dtype), b, total, input_precision="ieee")
        total = tl.dot(high.to(b.dtype), b, total, input_precision="ieee")
    return total
