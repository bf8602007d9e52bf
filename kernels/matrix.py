"""A quantised weight matrix as it lies in a checkpoint: the operand of the packed kernels.

Nothing is repacked or dequantised: `codes`, `scale` and `zero` are the bytes of the file, so what a kernel computes is
what an engine would compute from that file. All formats of `scheme.py` but the unquantised one:

    element  codes, uint8                                  scale
    int4     [O, 4 ceil(I / 8)], bytes of the int32 words  [O, G] bf16 or f16
    e2m1     [O, I / 2], the even input in the low nibble  [O, G] e4m3 (NVFP4, times global_scale) or e8m0 (MXFP4)
    e4m3     [O, I]                                        f32 [1, 1] tensor, [O, 1] channel, [N, M] 128 x 128 blocks;
                                                           blocks may be e8m0

Arrays are numpy arrays (for the Numba twin) or torch tensors (for the torch reference and the Triton twin) of the same
dtypes; bf16 and f16 travel as uint16, FP8 and E8M0 as uint8.

Shape suffixes: O outputs, I inputs, G groups of a row, N and M blocks of 128 along outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import BLOCK, QuantScheme

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor

ScaleBits = Literal["bf16", "f16", "f32", "e4m3", "e8m0"]

# Which stored scales a scheme's scale format admits, and the dtype that carries their bits.
_SCALE_BITS: dict[str, tuple[ScaleBits, ...]] = {
    "model": ("bf16", "f16"),
    "f32": ("f32",),
    "e4m3": ("e4m3",),
    "e8m0": ("e8m0",),
}
_CARRIER: dict[ScaleBits, str] = {"bf16": "uint16", "f16": "uint16", "f32": "float32", "e4m3": "uint8", "e8m0": "uint8"}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One weight [outputs, inputs] in `scheme`, as stored; see the table above.

    zero          asymmetric INT4: compressed-tensors' int32 words [ceil(O / 8), G], zero + 8 packed along the outputs
    global_scale  NVFP4's second-level multiplier (the inverse of compressed-tensors' divisor); 1.0 elsewhere
    """

    scheme: QuantScheme
    outputs: int
    inputs: int
    codes: Array
    scale: Array
    scale_format: ScaleBits
    zero: Array | None = None
    global_scale: float = 1.0


def scale_shape(scheme: QuantScheme, outputs: int, inputs: int) -> tuple[int, int]:
    """Shape of the scales of a weight [outputs, inputs]."""
    if scheme.granularity == "tensor":
        return (1, 1)
    if scheme.granularity == "block":
        return (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return (outputs, scheme.groups(inputs))


def code_bytes(scheme: QuantScheme, inputs: int) -> int:
    """Bytes of the codes of one row."""
    if scheme.element == "int4":
        return -(-inputs // 8) * 4
    return inputs // 2 if scheme.element == "e2m1" else inputs


def packed_bytes(w: PackedMatrix) -> int:
    """Bytes that a kernel has to read: codes, scales and zero points."""
    parts = [w.codes, w.scale] + ([] if w.zero is None else [w.zero])
    return sum(int(p.nbytes) for p in parts)


def _check_array(what: str, array: Array, dtype: str, shape: tuple[int, ...]) -> None:
    if str(array.dtype).removeprefix("torch.") != dtype:
        raise QuantkitError(f"{what} of a packed product have the wrong dtype", value=str(array.dtype), allowed=dtype)
    if tuple(array.shape) != shape:
        raise QuantkitError(
            f"{what} of a packed product have the wrong shape", value=list(array.shape), allowed=list(shape)
        )
    flat = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if not flat:
        raise QuantkitError(f"{what} of a packed product must be contiguous", value=f"strides {_strides(array)}")


def _strides(array: Array) -> tuple[int, ...]:
    return tuple(array.strides) if isinstance(array, np.ndarray) else tuple(array.stride())


def check_matrix(w: PackedMatrix) -> None:
    """Raise QuantkitError unless every array has the dtype, shape and layout that the scheme asks for."""
    s = w.scheme
    if s.element == "float":
        raise QuantkitError("a packed matrix needs a quantised scheme", value=s.name)
    if w.outputs < 1 or w.inputs < 1:
        raise QuantkitError("a packed matrix needs rows and columns", value=[w.outputs, w.inputs])
    if s.granularity == "group" and w.inputs % s.group_size:
        raise QuantkitError(
            "the inputs are not whole groups", value=w.inputs, allowed=f"a multiple of {s.group_size} for {s.name}"
        )
    if w.scale_format not in _SCALE_BITS[s.scale]:
        raise QuantkitError(
            f"{s.name} has no scales in this format", value=w.scale_format, allowed=list(_SCALE_BITS[s.scale])
        )
    _check_array("the codes", w.codes, "uint8", (w.outputs, code_bytes(s, w.inputs)))
    _check_array("the scales", w.scale, _CARRIER[w.scale_format], scale_shape(s, w.outputs, w.inputs))
    if (w.zero is None) != s.symmetric:
        raise QuantkitError(f"{s.name} {'takes no' if s.symmetric else 'needs'} zero points", value=s.name)
    if w.zero is not None:
        _check_array("the zero points", w.zero, "int32", (-(-w.outputs // 8), s.groups(w.inputs)))
    if not (np.isfinite(w.global_scale) and w.global_scale > 0) or (w.global_scale != 1.0 and not s.has_global):
        raise QuantkitError(
            "the global scale does not fit",
            value=w.global_scale,
            allowed="finite and positive" if s.has_global else "1.0: the scheme has none",
        )


def check_inputs(x: Array, w: PackedMatrix) -> None:
    """Raise QuantkitError unless activations [T, I] fit: contiguous float32, float16 or bfloat16 (bits in numpy)."""
    if len(x.shape) != 2 or int(x.shape[1]) != w.inputs:
        raise QuantkitError("activations do not fit the matrix", value=list(x.shape), allowed=f"[tokens, {w.inputs}]")
    allowed = ("float32", "float16", "uint16") if isinstance(x, np.ndarray) else ("float32", "float16", "bfloat16")
    if str(x.dtype).removeprefix("torch.") not in allowed:
        raise QuantkitError("activations have the wrong dtype", value=str(x.dtype), allowed=list(allowed))
    flat = x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous()
    if not flat:
        raise QuantkitError("activations must be contiguous", value=f"strides {_strides(x)}")


def check_input_scale(w: PackedMatrix, input_scale: float) -> None:
    """Raise QuantkitError unless activations can be quantised with this scale: NVFP4, finite, positive."""
    if w.scheme.scale != "e4m3":
        raise QuantkitError("activations are quantised for NVFP4 weights only", value=w.scheme.name, allowed="nvfp4")
    if not (np.isfinite(input_scale) and input_scale > 0):
        raise QuantkitError("the scale of the activations does not fit", value=input_scale, allowed="a positive number")


def check_experts(x: Array, starts: Array, experts: Sequence[PackedMatrix]) -> None:
    """Raise QuantkitError unless tokens sorted by expert fit the experts, all of one shape and scheme."""
    if not experts:
        raise QuantkitError("a grouped product needs experts", value=0)
    first = experts[0]
    for e, w in enumerate(experts):
        check_matrix(w)
        if (w.scheme, w.outputs, w.inputs, w.scale_format) != (
            first.scheme,
            first.outputs,
            first.inputs,
            first.scale_format,
        ):
            raise QuantkitError(
                f"expert {e} differs from expert 0",
                value=f"{w.scheme.name} [{w.outputs}, {w.inputs}], {w.scale_format} scales",
                allowed=f"{first.scheme.name} [{first.outputs}, {first.inputs}], {first.scale_format} scales",
            )
    check_inputs(x, first)
    _check_array("the expert offsets", starts, "int32", (len(experts) + 1,))
    offsets = [int(s) for s in starts]
    if offsets[0] != 0 or offsets[-1] != int(x.shape[0]) or any(a > b for a, b in pairwise(offsets)):
        raise QuantkitError(
            "the expert offsets do not divide the tokens", value=offsets, allowed=f"ascending from 0 to {x.shape[0]}"
        )
