"""Packed GEMM on a GPU: y_TO = x_TI @ W^T from the bytes of a checkpoint, without a dequantised copy (Triton).

The kernels are in `gemm_tiles.py`, the accuracy is that of float32 (`products.py`). Tiles are chosen by the number of
tokens: 16 tokens and up to 8 splits of the inputs for decoding, which is bound by memory, up to 128 x 128 for prefill.

W4A4 (NVFP4): a first kernel quantises the activations as an FP4 tensor core would read them, and writes the products of
code and block scale, which have 6 significant bits, as bfloat16; `input_scale` multiplies the result.

Shape suffixes: T tokens, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gpu.activations import quantize_nvfp4
from quantkit.kernels.gpu.gemm_tiles import add_splits, packed_gemm
from quantkit.kernels.gpu.jit import BF16, F16, check_device, has_e4m3, processors
from quantkit.kernels.matrix import PackedMatrix, check_experts, check_input_scale, check_inputs, check_matrix
from quantkit.kernels.scheme import BLOCK
from torch import Tensor

_MAX_SPLITS = 8


def matmul(x_TI: Tensor, w: PackedMatrix, *, input_scale: float | None = None) -> Tensor:
    """float32 [T, O] of activations [T, I] in float32, float16 or bfloat16 and one packed matrix on the same device.

    input_scale  W4A4, for NVFP4 only: multiplier amax / (6 * 448) of the activations, which are quantised with it

    Raises QuantkitError before anything is launched.
    """
    check_matrix(w)
    check_inputs(x_TI, w)
    _check_place(x_TI, [w])
    multiplier = w.global_scale
    if input_scale is not None:
        check_input_scale(w, input_scale)
        x_TI, multiplier = quantize_nvfp4(x_TI, input_scale), multiplier * input_scale
    tile = _token_tile(x_TI.shape[0], x_TI, w)
    return _launch(x_TI, w, multiplier, triton.cdiv(x_TI.shape[0], tile), tile, (None, None, None))


def grouped_matmul(
    x_TI: Tensor, starts_E1: Tensor, experts: Sequence[PackedMatrix], *, input_scale: float | None = None
) -> Tensor:
    """float32 [T, O] of tokens sorted by expert: tokens starts[e] .. starts[e + 1] - 1 meet matrix e, in one launch.

    starts_E1 int32 [E + 1] from 0 to T. The experts have one scheme and shape; their arrays may lie anywhere on the
    device. Otherwise as `matmul`.
    """
    check_experts(x_TI, starts_E1, experts)
    _check_place(x_TI, experts)
    if input_scale is not None:
        check_input_scale(experts[0], input_scale)
    starts: list[int] = starts_E1.tolist()
    multipliers = [w.global_scale * (1.0 if input_scale is None else input_scale) for w in experts]
    if input_scale is not None:
        x_TI = quantize_nvfp4(x_TI, input_scale)
    tile = _token_tile(max(b - a for a, b in pairwise(starts)), x_TI, experts[0])
    tiles = [(e, t, starts[e + 1]) for e in range(len(experts)) for t in range(starts[e], starts[e + 1], tile)]
    offsets = _offsets(experts)
    aligned = all(row[0] % 16 == 0 for row in offsets)
    tables = (
        torch.tensor(tiles, dtype=torch.int32, device=x_TI.device),
        torch.tensor(offsets, dtype=torch.int64, device=x_TI.device),
        torch.tensor(multipliers, dtype=torch.float32, device=x_TI.device),
    )
    return _launch(x_TI, experts[0], 1.0, len(tiles), tile, tables, aligned)


def _check_place(x_TI: Tensor, matrices: Sequence[PackedMatrix]) -> None:
    check_device(x_TI)
    for w in matrices:
        for what, array in (("codes", w.codes), ("scales", w.scale), ("zero points", w.zero)):
            place = array.device if isinstance(array, Tensor) else type(array).__name__
            if array is not None and place != x_TI.device:
                raise QuantkitError(f"{what} lie elsewhere", value=str(place), allowed=str(x_TI.device))


def _offsets(experts: Sequence[PackedMatrix]) -> list[list[int]]:
    """How many elements the arrays of each expert lie behind those of the first: memory may be anywhere."""

    def behind(array: Any, first: Any) -> int:
        return 0 if array is None else int(array.data_ptr() - first.data_ptr()) // int(array.element_size())

    first = experts[0]
    return [[behind(w.codes, first.codes), behind(w.scale, first.scale), behind(w.zero, first.zero)] for w in experts]


def _token_tile(tokens: int, x_TI: Tensor, w: PackedMatrix) -> int:
    """Tokens of a tile: a power of two from 16 on; three pieces of each activation need the room of two tiles."""
    most = 128 if _operands(x_TI, w)["PIECES"] == 1 else 64
    return min(max(int(triton.next_power_of_2(max(tokens, 1))), 16), most)


def _operands(x_TI: Tensor, w: PackedMatrix) -> dict[str, Any]:
    """Type of the product and pieces of an activation; powers of two of MXFP4 leave the range of float16."""
    if x_TI.dtype == torch.bfloat16:
        return {"OPERAND": BF16, "PIECES": 1}
    if x_TI.dtype == torch.float16 and w.scale_format != "e8m0":
        return {"OPERAND": F16, "PIECES": 1}
    return {"OPERAND": BF16, "PIECES": 3}


def _geometry(w: PackedMatrix, longest_step: int) -> dict[str, Any]:
    """How codes and scales of a scheme lie, as constants of the kernel."""
    s = w.scheme
    group = {"group": s.group_size, "block": BLOCK}.get(s.granularity, 0)
    return {
        "ELEMENT": s.element,
        "SCALE": w.scale_format,
        "GROUP": group,
        "ROWS": {"tensor": 0, "block": BLOCK}.get(s.granularity, 1),
        "ASYMMETRIC": not s.symmetric,
        "STEP": min(group, longest_step) if s.element == "int4" and group else longest_step,
    }


def _launch(
    x_TI: Tensor,
    w: PackedMatrix,
    multiplier: float,
    token_tiles: int,
    tile_t: int,
    tables: tuple[Any, Any, Any],
    aligned: bool = True,
) -> Tensor:
    tokens, device = x_TI.shape[0], x_TI.device
    y_TO = torch.empty(tokens, w.outputs, dtype=torch.float32, device=device)
    if tokens == 0:
        return y_TO
    operands = _operands(x_TI, w)
    geometry = _geometry(w, 128 if tile_t <= 32 and operands["PIECES"] == 1 else 64)
    tile_o = 64 if tile_t <= 32 else 128
    tiles_o, steps = triton.cdiv(w.outputs, tile_o), triton.cdiv(w.inputs, geometry["STEP"])
    wanted = 4 * processors(x_TI) // (tiles_o * token_tiles)
    splits = max(min(1 << max(wanted, 1).bit_length() - 1, _MAX_SPLITS, steps // 2), 1)
    parts = y_TO if splits == 1 else torch.empty(splits, tokens, w.outputs, dtype=torch.float32, device=device)
    packed_gemm[(tiles_o, token_tiles, splits)](
        x_TI, w.codes, w.scale, w.zero, parts, multiplier, tokens, w.outputs, w.inputs, w.codes.shape[1],
        w.scheme.groups(w.inputs), *tables, **geometry, **operands, NATIVE=has_e4m3(x_TI),
        GROUPED=tables[0] is not None, ALIGNED=aligned, TILE_T=tile_t, TILE_O=tile_o, SPLITS=splits,
        num_warps=4 if tile_t <= 32 else 8, num_stages=4 if tile_t <= 32 else 2,
    )  # fmt: skip
    if splits > 1:
        add_splits[(triton.cdiv(y_TO.numel(), 1024),)](parts, y_TO, y_TO.numel(), SPLITS=splits, BLOCK=1024)
    return y_TO
