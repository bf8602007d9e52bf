"""Write an INT4 layer in the layout of its format, from blocks of rows as the kernels and the readers make them.

Formats that store the inputs first cannot be written row by row: a block of rows is a block of columns there. A tensor
that fits a quarter of the memory budget is gathered and written at once, a larger one line by line at its offsets. Both
give the same bytes.

Letters: R rows of a block, B bytes of a row of codes, G groups, O outputs, L lines of a file, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.sources.int4_rows import ONES
from quantkit.kernels import layouts
from quantkit.kernels.packed import pack_zero_points
from quantkit.quantize.plan import Out
from quantkit.quantize.target import NUMPY, Target


class Int4Writer:
    """The tensors of one layer [rows, inputs] by kind; `block` for each block in order, then `finish`."""

    def __init__(self, outs: Mapping[str, Out], rows: int, inputs: int, target: Target) -> None:
        self._outs, self._shape, self._target = outs, (rows, inputs), target
        self._layout = outs["codes"].layout
        self._gathered: dict[str, NDArray[Any]] = {}
        self._zeros: list[NDArray[np.int8]] = []
        self._groups = 0

    def block(
        self, first: int, codes_RB: NDArray[np.uint8], scale_RG: NDArray[Any], zero_RG: NDArray[np.int8] | None
    ) -> None:  # fmt: skip
        """Rows from `first` on: compressed-tensors bytes, stored scales, zero points -8..7 (not copied) or None."""
        self._groups = scale_RG.shape[1]
        if zero_RG is not None:
            self._zeros.append(zero_RG)
        if self._layout in ("gptq-v1", "gptq-v2", "awq"):
            awq = self._layout == "awq"
            codes = layouts.awq_from_rows(codes_RB) if awq else layouts.gptq_from_rows(codes_RB)
            self._columns("codes", codes, first // 8 if awq else first)
            self._columns("scale", np.ascontiguousarray(scale_RG.T), first)
            return
        if self._layout == "pairs":
            pairs = layouts.row_pairs_from_rows(codes_RB)[:, : self._shape[1]]
            self._target.write(self._outs["codes"], pairs, first // 2 * self._shape[1])
        else:
            self._target.write(self._outs["codes"], codes_RB, first * codes_RB.shape[1])
        self._target.write(self._outs["scale"], scale_RG, first * scale_RG.shape[1] * scale_RG.itemsize)

    def _columns(self, kind: str, data_LC: NDArray[Any], first: int) -> None:
        out = self._outs[kind]
        if data_LC.nbytes == out.nbytes or out.nbytes > self._target.memory // 4:
            self._target.write_columns(out, data_LC, first)
            return
        if kind not in self._gathered:
            self._gathered[kind] = np.empty(out.shape, data_LC.dtype)
        self._gathered[kind][:, first : first + data_LC.shape[1]] = data_LC

    def finish(self) -> None:
        """What was gathered, and the tensors that are one value for the whole layer or small."""
        for kind, data_LC in self._gathered.items():
            self._target.write(self._outs[kind], data_LC)
        rows, inputs = self._shape
        for kind, out in self._outs.items():
            if kind == "zero":
                self._target.write(out, self._packed_zeros())
            elif kind == "shape":
                self._target.write(out, np.array([rows, inputs], NUMPY[out.dtype]))
            elif kind == "g_idx":
                self._target.write(out, np.arange(inputs, dtype=np.int32) // np.int32(inputs // self._groups))
            elif kind == "ones":
                self._target.write(out, np.full(inputs, ONES[out.dtype], np.uint16))

    def _packed_zeros(self) -> NDArray[np.int32]:
        zero_OG = np.concatenate(self._zeros) if self._zeros else np.zeros((self._shape[0], self._groups), np.int8)
        if self._layout == "rows":
            return pack_zero_points(zero_OG)
        zero_GO = np.ascontiguousarray(zero_OG.T + np.int8(8)).astype(np.uint8)
        if self._layout == "awq":
            return layouts.awq_pack_zeros(zero_GO)
        return layouts.gptq_pack_zeros(zero_GO, v2=self._layout == "gptq-v2")
