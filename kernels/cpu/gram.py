"""X^T X of bfloat16 inputs with the processor's bfloat16 dot product (AVX512-BF16): twice as fast as float32.

A product of two bfloat16 is exact in float32, and sums are float32: of the same quality as a float32 product. Inputs
are laid out anew as panels of 48 columns, in which a word holds one column of two tokens that follow each other; a
tile of 8 x 48 sums then stays in 24 registers for all tokens. Only tiles on and above the diagonal are computed.

Shape suffixes: T tokens, I inputs, P panels, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numpy.typing import NDArray
from quantkit.kernels.cpu import simd, widen
from quantkit.kernels.cpu.workers import share

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]

_WIDTH = 48  # columns of a panel
_ROWS = 8  # of a tile
_STEP = 128 * _WIDTH  # words of a panel that are summed up at once: 256 tokens, whose sums lose less than those of all
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), simd.LANES), ir.VectorType(ir.IntType(32), simd.LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * simd.LANES)


def available() -> bool:
    """Whether this processor has the instruction; without it `add_gram` is right, and slower than float32."""
    return "+avx512bf16" in widen.features()


def _dot_instruction(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    pairs = [builder.bitcast(x, _PAIRS) for x in (a, b)]
    return simd.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [sums, *pairs])


def _dot_plain(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """For every other CPU: right, not fast."""
    half, high = (ir.Constant(_WORDS, [n] * simd.LANES) for n in (16, 0xFFFF0000))
    for widen_, by in ((builder.shl, half), (builder.and_, high)):
        factors = [builder.bitcast(widen_(x, by), _FLOATS) for x in (a, b)]
        sums = simd.call(builder, "llvm.fma.v16f32", _FLOATS, [*factors, sums])
    return sums


@simd.operation
def _dot(typing: Any, sums: Any, a: Any, b: Any) -> Any:
    """Add a * b to sums, of the two bfloat16 in each word, lane by lane: 16 float32, two times 16 words."""
    floats, words = simd.Vector("f", simd.LANES), simd.Vector("i", simd.LANES)
    dot = _dot_instruction if available() else _dot_plain
    return floats(floats, words, words), lambda context, builder, sig, args: dot(builder, *args)


@simd.operation
def _load(typing: Any, array: Any, at: Any) -> Any:
    """16 words of an int32 array."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(simd.pointer(context, builder, sig.args[0], args[0], args[1], _WORDS), align=4)

    return simd.Vector("i", simd.LANES)(array, types.intp), build


@njit(nogil=True, cache=True, error_model="numpy")
def _lay_out(x_TI: U16, first: int, last: int, panels_PW: I32) -> None:
    """Panels first .. last - 1; columns and a last token that are not there are zeros."""
    tokens, inputs = x_TI.shape
    none_I = np.zeros(inputs, np.uint16)
    for p in range(first, last):
        panel_W = panels_PW[p]
        start, here = p * _WIDTH, min(_WIDTH, inputs - p * _WIDTH)
        for t in range(0, tokens, 2):
            low_I, high_I = x_TI[t], x_TI[t + 1] if t + 1 < tokens else none_I
            at = t // 2 * _WIDTH
            for i in range(here):
                panel_W[at + i] = np.int32(low_I[start + i]) | (np.int32(high_I[start + i]) << np.int32(16))
            for i in range(here, _WIDTH):
                panel_W[at + i] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _tile(a_W: I32, b_W: I32, row: int, first: int, last: int, out: F32) -> None:
    """Add the sums of columns row .. row + 7 of one panel with all of another, [8, 48], over words from `first` on."""
    zero = simd.splat(np.float32(0))
    s00 = s01 = s02 = s10 = s11 = s12 = s20 = s21 = s22 = s30 = s31 = s32 = zero
    s40 = s41 = s42 = s50 = s51 = s52 = s60 = s61 = s62 = s70 = s71 = s72 = zero
    for at in range(first, last, _WIDTH):
        b0, b1, b2 = _load(b_W, at), _load(b_W, at + 16), _load(b_W, at + 32)
        r = at + row
        a = simd.splat_i32(a_W[r])
        s00, s01, s02 = _dot(s00, a, b0), _dot(s01, a, b1), _dot(s02, a, b2)
        a = simd.splat_i32(a_W[r + 1])
        s10, s11, s12 = _dot(s10, a, b0), _dot(s11, a, b1), _dot(s12, a, b2)
        a = simd.splat_i32(a_W[r + 2])
        s20, s21, s22 = _dot(s20, a, b0), _dot(s21, a, b1), _dot(s22, a, b2)
        a = simd.splat_i32(a_W[r + 3])
        s30, s31, s32 = _dot(s30, a, b0), _dot(s31, a, b1), _dot(s32, a, b2)
        a = simd.splat_i32(a_W[r + 4])
        s40, s41, s42 = _dot(s40, a, b0), _dot(s41, a, b1), _dot(s42, a, b2)
        a = simd.splat_i32(a_W[r + 5])
        s50, s51, s52 = _dot(s50, a, b0), _dot(s51, a, b1), _dot(s52, a, b2)
        a = simd.splat_i32(a_W[r + 6])
        s60, s61, s62 = _dot(s60, a, b0), _dot(s61, a, b1), _dot(s62, a, b2)
        a = simd.splat_i32(a_W[r + 7])
        s70, s71, s72 = _dot(s70, a, b0), _dot(s71, a, b1), _dot(s72, a, b2)
    for n, (x, y, z) in enumerate((
        (s00, s01, s02), (s10, s11, s12), (s20, s21, s22), (s30, s31, s32),
        (s40, s41, s42), (s50, s51, s52), (s60, s61, s62), (s70, s71, s72),
    )):  # fmt: skip
        at = n * _WIDTH
        simd.store(out, at, simd.add(simd.load_f32(out, at), x))
        simd.store(out, at + 16, simd.add(simd.load_f32(out, at + 16), y))
        simd.store(out, at + 32, simd.add(simd.load_f32(out, at + 32), z))


@njit(nogil=True, cache=True, error_model="numpy")
def _tiles(panels_PW: I32, number: int, step: int, keep: np.float32, share: np.float32, h_II: F32) -> None:
    """Every `step`-th pair of panels from `number` on: h = keep * h + share * sums, on and above their diagonal."""
    inputs = h_II.shape[0]
    out = np.empty(_ROWS * _WIDTH, np.float32)
    pair = 0
    for q in range(panels_PW.shape[0]):
        for p in range(q + 1):
            pair += 1
            if pair % step != number:
                continue
            for row in range(0, min(_WIDTH, inputs - p * _WIDTH), _ROWS):
                out[:] = 0
                for first in range(0, panels_PW.shape[1], _STEP):
                    last = min(first + _STEP, panels_PW.shape[1])
                    _tile(panels_PW[p], panels_PW[q], row, first, last, out)
                for n in range(min(_ROWS, inputs - p * _WIDTH - row)):
                    h_I = h_II[p * _WIDTH + row + n]
                    for i in range(min(_WIDTH, inputs - q * _WIDTH)):
                        h_I[q * _WIDTH + i] = keep * h_I[q * _WIDTH + i] + share * out[n * _WIDTH + i]


def add_gram(x_TI: U16, keep: float, part: float, h_II: F32, threads: int) -> None:
    """Make h to keep * h + part * X^T X, on and above the diagonal; what is below it loses its meaning.

    x_TI  bits of finite bfloat16, C-contiguous;  h_II  float32, C-contiguous

    The number of threads does not show in the result.
    """
    tokens, inputs = x_TI.shape
    panels = -(-inputs // _WIDTH)
    panels_PW = np.empty((panels, -(-tokens // 2) * _WIDTH), np.int32)
    share(lambda n: _lay_out(x_TI, panels * n // threads, panels * (n + 1) // threads, panels_PW), threads)
    share(lambda n: _tiles(panels_PW, n, threads, np.float32(keep), np.float32(part), h_II), threads)
