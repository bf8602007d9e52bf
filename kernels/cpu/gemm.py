"""Packed GEMM on the CPU: y = x W^T from the bytes of a quantised weight, float32 accumulation.

For up to 95 tokens the inner loops of `gemm_rows.py` run over chunks of rows, decoding every weight in registers. With
more tokens arithmetic outweighs decoding: chunks of weights are decoded into a buffer of a few MB and multiplied by the
BLAS library of numpy (which uses its own threads). The whole weight is never held as floats.

The order of additions differs from a plain loop, and the last bits may depend on the number of tokens; the error is
that of a float32 dot product.

Shape suffixes: T tokens, I inputs, O outputs, G scales of a row, B bytes, R rows of a chunk, S lines of stored
scales, W words of zero points, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from quantkit.kernels.cpu import gemm_rows, lanes, simd
from quantkit.kernels.cpu.activations import quantize_activations
from quantkit.kernels.cpu.convert import as_f32
from quantkit.kernels.cpu.gemm_scales import SECOND, scales_of_chunk
from quantkit.kernels.cpu.workers import share
from quantkit.kernels.elements import E2M1_VALUES, INT4_VALUES
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.matrix import PackedMatrix, check_experts, check_input_scale, check_inputs, check_matrix
from quantkit.kernels.scheme import BLOCK

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_CHUNK = 64  # rows that one thread takes at a time
_BLAS_TOKENS = 96
_BLAS_BYTES = 16 << 20
_STEP = 8  # blocks of inputs at a time when there are many tokens: for 8 tokens they fill 32 kB
_ALL = 30  # as a shift: every block shares one scale


@njit(nogil=True, cache=True, error_model="numpy")
def _whole_blocks(codes_RB: U8, size: int) -> U8:
    """The same codes in rows of whole blocks: what follows a row is read and multiplied by zero."""
    if codes_RB.shape[1] % size == 0:
        return codes_RB
    padded = np.zeros((codes_RB.shape[0], -(-codes_RB.shape[1] // size) * size), np.uint8)
    padded[:, : codes_RB.shape[1]] = codes_RB
    return padded


def _runners(tokens_a_tile: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The GEMM for one width of a tile, on one thread and on several; compiled for the dtypes that it meets.

    The two have names of their own: Numba's cache tells functions apart by name and captured values alone.
    """

    @njit(nogil=True, cache=True, error_model="numpy")
    def chunk(
        number: int, x: F32, tokens: int, codes_OB: U8, scale_SG: Any, second: bool, rows_per_scale: int, zero_WG: Any,
        table: Any, each: int, shift: int, columns: int, step: int, out_TO: F32,
    ) -> None:  # fmt: skip
        first = number * _CHUNK
        last = min(first + _CHUNK, codes_OB.shape[0])
        scale_RG = np.zeros((last - first, columns), np.float32)
        scales_of_chunk(scale_SG, second, rows_per_scale, first, scale_RG)
        gemm_rows.chunk_of_rows(
            x, tokens, _whole_blocks(codes_OB[first:last], gemm_rows.block_bytes(table)), scale_RG,
            gemm_rows.zeros_of_chunk(zero_WG, first, last, columns), first, last, each, shift, step,
            gemm_rows.values_of(table), simd.zeros(tokens_a_tile), out_TO,
        )  # fmt: skip

    @njit(nogil=True, cache=True, error_model="numpy")
    def serial(
        x: F32, tokens: int, codes_OB: U8, scale_SG: Any, second: bool, rows_per_scale: int, zero_WG: Any, table: Any,
        each: int, shift: int, columns: int, step: int, out_TO: F32,
    ) -> None:  # fmt: skip
        for number in range(-(-codes_OB.shape[0] // _CHUNK)):
            chunk(number, x, tokens, codes_OB, scale_SG, second, rows_per_scale, zero_WG, table, each, shift, columns,
                  step, out_TO)  # fmt: skip

    @njit(nogil=True, cache=True, error_model="numpy", parallel=True)
    def parallel(
        x: F32, tokens: int, codes_OB: U8, scale_SG: Any, second: bool, rows_per_scale: int, zero_WG: Any, table: Any,
        each: int, shift: int, columns: int, step: int, out_TO: F32,
    ) -> None:  # fmt: skip
        for number in prange(-(-codes_OB.shape[0] // _CHUNK)):
            chunk(number, x, tokens, codes_OB, scale_SG, second, rows_per_scale, zero_WG, table, each, shift, columns,
                  step, out_TO)  # fmt: skip

    return serial, parallel


_RUNNERS = {t: _runners(t) for t in (1, 2, 4, 8)}


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_row(
    row: int, codes_OB: U8, scale_SG: Any, second: bool, rows_per_scale: int, zero_WG: Any, table: Any, each: int,
    shift: int, columns: int, out_I: F32,
) -> None:  # fmt: skip
    """Row `row` as float32, the inputs in the order of `lay_out`."""
    scale_1G = np.zeros((1, columns), np.float32)
    scales_of_chunk(scale_SG, second, rows_per_scale, row, scale_1G)
    gemm_rows.decode_row(
        _whole_blocks(codes_OB[row : row + 1], gemm_rows.block_bytes(table)).reshape(-1), scale_1G.reshape(-1),
        gemm_rows.zeros_of_chunk(zero_WG, row, row + 1, columns), each, shift, gemm_rows.values_of(table), out_I,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_rows(
    start: int, codes_OB: U8, scale_SG: Any, second: bool, rows_per_scale: int, zero_WG: Any, table: Any, each: int,
    shift: int, columns: int, out_RI: F32,
) -> None:  # fmt: skip
    for r in range(out_RI.shape[0]):
        _decode_row(start + r, codes_OB, scale_SG, second, rows_per_scale, zero_WG, table, each, shift, columns,
                    out_RI[r])  # fmt: skip


class _Layout(NamedTuple):
    """How the loops walk through a matrix.

    blocks, columns  blocks of 128 inputs, and scales, of a row; the last ones may be padding
    each, shift      lanes of a block that share a scale, and log2 of the blocks that do
    """

    nibbles: bool
    table: F32 | None
    rows_per_scale: int
    blocks: int
    columns: int
    each: int
    shift: int


def _layout(w: PackedMatrix) -> _Layout:
    s = w.scheme
    blocks = -(-w.inputs // gemm_rows.BLOCK)
    group = {"group": s.group_size, "block": BLOCK}.get(s.granularity, 0)
    each = simd.LANES * group // gemm_rows.BLOCK if group else simd.LANES
    return _Layout(
        nibbles=s.element != "e4m3",
        table={"int4": INT4_VALUES, "e2m1": E2M1_VALUES}.get(s.element),
        rows_per_scale={"tensor": 0, "block": BLOCK}.get(s.granularity, 1),
        blocks=blocks,
        columns=blocks * (simd.LANES // each) if group else 1,
        each=each,
        shift=0 if group else _ALL,
    )


def matmul(x_TI: NDArray[Any], w: PackedMatrix, *, input_scale: float | None = None, threads: int = 1) -> F32:
    """Activations [T, I] times the transposed weight [O, I]: float32 [T, O].

    x_TI         float32, float16, or bfloat16 bits (uint16); contiguous
    input_scale  NVFP4 only: the activations are quantised to NVFP4 under this second-level scale first (W4A4)
    threads      that share the rows; with 96 tokens or more BLAS decides for the product itself

    Raises QuantkitError, before anything is read, when an array does not fit.
    """
    check_matrix(w)
    check_inputs(x_TI, w)
    x = as_f32(x_TI)
    if input_scale is not None:
        check_input_scale(w, input_scale)
        if not np.isfinite(x).all():
            raise QuantkitError("activations that are quantised must be finite", value="NaN or infinity")
        quantized = np.empty_like(x)
        quantize_activations(x, np.float32(input_scale), quantized)
        x = quantized
    out = np.empty((len(x), w.outputs), np.float32)
    if len(x):
        (_with_blas if len(x) >= _BLAS_TOKENS else _in_tiles)(x, w, out, threads)
    scale = np.float32(w.global_scale) * np.float32(1.0 if input_scale is None else input_scale)
    return out if scale == 1 else out * scale


def _in_tiles(x: F32, w: PackedMatrix, out: F32, threads: int) -> None:
    """Whole tiles of 8 tokens, then one for the rest."""
    whole = len(x) // 8 * 8
    rest = len(x) - whole
    if rest >= 5:
        whole, rest = len(x), 0
    for first, last, width in ((0, whole, 8), (whole, len(x), 4 if rest > 2 else rest)):
        if first < last:
            _run(x[first:last], w, width, threads, out[first:last])


def _run(x: F32, w: PackedMatrix, width: int, threads: int, out: F32) -> None:
    m = _layout(w)
    tiles = -(-len(x) // width)
    laid_out = lanes.aligned_zeros(tiles * width * m.blocks * gemm_rows.BLOCK)
    gemm_rows.lay_out(x, width, m.nibbles, laid_out)
    step = m.blocks if tiles == 1 else _STEP
    parallel = threads > 1 and w.outputs > _CHUNK
    run = _RUNNERS[width][parallel]
    args = (laid_out, len(x), w.codes, w.scale, SECOND[w.scale_format], m.rows_per_scale, w.zero, m.table)
    before = numba.get_num_threads()
    if parallel:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    try:
        run(*args, m.each, m.shift, m.columns, step, out)
    finally:
        numba.set_num_threads(before)


def _with_blas(x: F32, w: PackedMatrix, out: F32, threads: int) -> None:
    m = _layout(w)
    codes: Any = w.codes
    inputs = m.blocks * gemm_rows.BLOCK
    laid_out = np.zeros((len(x), inputs), np.float32)
    gemm_rows.lay_out(x, 1, m.nibbles, laid_out.reshape(-1))
    rows = max(_CHUNK, _BLAS_BYTES // (4 * inputs))
    decoded = np.empty((min(rows, w.outputs), inputs), np.float32)
    for first in range(0, w.outputs, rows):
        last = min(first + rows, w.outputs)
        part = decoded[: last - first]
        share_rows = -(-(last - first) // threads)

        def decode(worker: int, first: int = first, part: F32 = part, share_rows: int = share_rows) -> None:
            at = worker * share_rows
            _decode_rows(first + at, codes, w.scale, SECOND[w.scale_format], m.rows_per_scale, w.zero, m.table,
                         m.each, m.shift, m.columns, part[at : at + share_rows])  # fmt: skip

        share(decode, threads)  # plain threads: those of a parallel loop would go on spinning under BLAS
        out[:, first:last] = laid_out @ part.T


def grouped_matmul(
    x_TI: NDArray[Any],
    starts_E1: NDArray[np.int32],
    experts: Sequence[PackedMatrix],
    *,
    input_scale: float | None = None,
    threads: int = 1,
) -> F32:
    """Tokens sorted by expert, each times the weight of its expert: float32 [T, O].

    starts_E1  int32 [E + 1]: expert e has the tokens starts[e] to starts[e + 1]; starts at 0 and ends at T
    experts    E matrices of one shape and scheme

    Raises QuantkitError, before anything is read, when an array does not fit.
    """
    check_experts(x_TI, starts_E1, experts)
    out = np.empty((len(x_TI), experts[0].outputs), np.float32)
    for e, w in enumerate(experts):
        first, last = int(starts_E1[e]), int(starts_E1[e + 1])
        if first < last:
            out[first:last] = matmul(x_TI[first:last], w, input_scale=input_scale, threads=threads)
    return out
