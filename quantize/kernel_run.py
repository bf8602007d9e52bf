"""Run the packed kernel on the bytes of a written weight, against the decoded weight and against the source.

Two readings of the same bytes must agree: the packed GEMM, which is what an engine does, and the decoder that the other
checks use. The distance to the product with the source weight is what the layer's outputs lose.

Letters: T tokens, R rows, I inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.sources.packed import input_scale, packed_rows
from quantkit.export.sources.rows import Buffers, row_source
from quantkit.kernels.cpu.activations import quantize_activations
from quantkit.kernels.cpu.compare import products, sq_difference
from quantkit.kernels.cpu.gemm import matmul
from quantkit.quantize.blocks import blocks_of, chunk_rows, chunks_of
from quantkit.quantize.pairs import Pair
from quantkit.quantize.recorded import Inputs

F32 = NDArray[np.float32]

MEMORY = 64 << 20
# Difference of two float32 sums of the same numbers, relative to the sum of magnitudes. One wrong 4-bit code among
# 8192 moves an output by some ten times as much.
AGREES = 2.0**-18


@dataclass(frozen=True, slots=True)
class KernelRun:
    """Outputs of one layer: `off` of `count` differ between kernel and decoded weight.

    sq_err, sq_norm      sums of squares of the outputs' error against the source weight, and of the source's outputs
    sq_w_err, sq_w_norm  the same of the weights themselves
    """

    name: str
    scheme: str
    count: int
    off: int
    recorded: bool
    sq_err: float
    sq_norm: float
    sq_w_err: float
    sq_w_norm: float


def outputs_off(y_TR: F32, x_TI: F32, hat_RI: F32) -> int:
    """How many outputs of a kernel are not the product of inputs and decoded weights; NaN never is."""
    decoded_TR, size_TR = np.empty_like(y_TR), np.empty_like(y_TR)
    products(x_TI, hat_RI, decoded_TR, size_TR)
    return int(np.count_nonzero(~(np.abs(y_TR - decoded_TR) <= AGREES * size_TR)))


def _quantized(x_TI: F32, scale: float) -> F32:
    """Activations as a W4A4 kernel sees them."""
    seen_TI = np.empty_like(x_TI)
    quantize_activations(x_TI, np.float32(scale), seen_TI)
    return seen_TI * np.float32(scale)


def run_kernel(pair: Pair, inputs_of: Inputs, reader: Reader) -> KernelRun | None:
    """The run of one pair; None when the output is not packed, or in an encoding without a kernel."""
    out = pair.output
    if out.encoding == "plain":
        return None
    rows, inputs = (math.prod(out.shape[:-1]) if pair.out_expert is None else out.shape[-2]), out.shape[-1]
    out_row = (pair.out_expert or 0) * rows
    packed = packed_rows(out, out_row, reader)
    if packed is None:
        return None
    source = row_source(pair.source, rows, inputs, pair.first_row, pair.expert, reader, Buffers())
    decoded = row_source(out, rows, inputs, out_row, None, reader, Buffers())
    x_TI, recorded = inputs_of(out.module if pair.out_expert is None else f"{out.module}.{pair.out_expert}", inputs)
    # W4A4 on what was recorded: a measured scale says nothing of random inputs
    scale = input_scale(out, reader) if recorded and packed.scheme.has_global else None
    seen_TI = x_TI if scale is None else _quantized(x_TI, scale)
    w_RI, hat_RI = (np.empty((chunk_rows(inputs, packed.multiple), inputs), np.float32) for _ in range(2))
    off, sums, sums_w = 0, np.zeros(2, np.float64), np.zeros(2, np.float64)
    for first, n_rows in blocks_of(rows, inputs, MEMORY):
        source.load(first, n_rows)
        decoded.load(first, n_rows)
        for at, n in chunks_of(n_rows, inputs, packed.multiple):
            source.decode(first + at, n, w_RI[:n])
            decoded.decode(first + at, n, hat_RI[:n])
            y_TR = matmul(x_TI, packed.read(first + at, n, reader), input_scale=scale)
            off += outputs_off(y_TR, seen_TI, hat_RI[:n])
            exact_TR, size_TR = np.empty_like(y_TR), np.empty_like(y_TR)
            products(x_TI, w_RI[:n], exact_TR, size_TR)
            sums += (np.sum((y_TR - exact_TR) ** 2, dtype=np.float64), np.sum(exact_TR**2, dtype=np.float64))
            sums_w += sq_difference(w_RI[:n], hat_RI[:n])
    errors = [float(e) for e in (*sums, *sums_w)]
    return KernelRun(out.name, packed.scheme.name, len(x_TI) * rows, off, recorded, *errors)
