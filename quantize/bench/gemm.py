"""The packed GEMM of every scheme beside what else the machine has for the same product.

CPU: torch's float32 and bfloat16 linear, and ATen's INT4 kernel (`_weight_int4pack_mm_for_cpu`, groups of 128). GPU:
torch's bfloat16 linear, ATen's INT4 kernel (`_weight_int4pack_mm`), `_scaled_mm` in FP8 with one scale. Each has its
own packing, which is not timed. Activations are bfloat16; float32 for the float32 linear.

Weights are random codes, the same for the packed INT4 kernel and ATen's; the dense ones are those of an FP8 matrix.
Shape suffixes: T tokens, O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gemm import as_tensors, dequantize
from quantkit.kernels.matrix import PackedMatrix, check_matrix, code_bytes, packed_bytes, scale_shape
from quantkit.kernels.packed import unpack_words
from quantkit.kernels.scheme import SCHEMES, QuantScheme
from quantkit.quantize.bench.device import Device, with_copies
from quantkit.quantize.bench.names import A4
from quantkit.quantize.bench.timing import Candidate, attempt, copies_for
from torch import Tensor

_INPUT_SCALE = 5.0 / (6 * 448)  # for activations within +-5
_ATEN_GROUP = 128
_BYTES_PER_WEIGHT = 16  # at most, of all matrices of one shape and what is needed to make them

Linear = Callable[[Any], Callable[[int], Any]]  # activations -> a call that works on copy c


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices of one shape: `packed` by the name of the kernel, `others` are the baselines found."""

    outputs: int
    inputs: int
    copies: int
    total_bytes: int
    packed: dict[str, list[PackedMatrix]]
    others: dict[str, Linear]


def _scheme(name: str) -> QuantScheme:
    return SCHEMES[name.removesuffix("-a4")]


def check(names: Sequence[str], shapes: Sequence[tuple[int, int]], device: Device) -> None:
    """Raise QuantkitError unless every scheme divides every shape, and the weights of each fit into memory."""
    for outputs, inputs in shapes:
        for name in names:
            group = _scheme(name).group_size if _scheme(name).granularity == "group" else 1
            if inputs % group:
                raise QuantkitError(
                    f"{name} does not divide the inputs of a shape", value=f"{outputs}x{inputs}",
                    allowed=f"inputs that are a multiple of {group}", hint="--schemes chooses others",
                )  # fmt: skip
        if _BYTES_PER_WEIGHT * outputs * inputs > 2 * device.room:
            raise QuantkitError(
                "the shape does not fit into memory", value=f"{outputs}x{inputs}",
                allowed=f"up to {2 * device.room // _BYTES_PER_WEIGHT:,} weights here",
            )  # fmt: skip


def random_matrix(name: str, outputs: int, inputs: int, seed: int = 0) -> PackedMatrix:
    """Random codes (no NaN) and scales that bring the weights near +-1; checked."""
    scheme, rng = _scheme(name), np.random.default_rng(seed)
    codes = rng.integers(0, 256, (outputs, code_bytes(scheme, inputs)), dtype=np.uint8)
    if scheme.element == "e4m3":
        codes &= 0xBF  # the values up to 1.875: no NaN
    zero = None
    if not scheme.symmetric:
        words = (-(-outputs // 8), scheme.groups(inputs))
        zero = rng.integers(-(2**31), 2**31, words, dtype=np.int64).astype(np.int32)
    scale, scale_format = _scales(scheme, rng.uniform(1, 2, scale_shape(scheme, outputs, inputs)))
    w = PackedMatrix(scheme, outputs, inputs, codes, scale, scale_format, zero, 0.1 if scheme.has_global else 1.0)
    check_matrix(w)
    return w


def _scales(scheme: QuantScheme, draw: NDArray[Any]) -> tuple[NDArray[Any], Any]:
    """Stored scales between 0.125 and 0.25 (NVFP4: 1 and 2, above its global scale) and their format."""
    if scheme.scale == "e4m3":
        return torch.from_numpy(draw.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), "e4m3"
    if scheme.scale == "e8m0":
        return np.full(draw.shape, 127 - 3, np.uint8), "e8m0"
    scale = (draw / 8).astype(np.float32)
    if scheme.scale == "f32":
        return scale, "f32"
    return torch.from_numpy(scale).bfloat16().view(torch.uint16).numpy(), "bf16"


def make_weights(
    names: Sequence[str], outputs: int, inputs: int, device: Device, note: Callable[[str], None]
) -> Weights:
    """All matrices of a shape, in as many copies as keep them out of the caches."""
    packed = {n: random_matrix(n, outputs, inputs) for n in names}
    dense = dequantize(as_tensors(random_matrix("fp8-channel", outputs, inputs)))
    once = sum(packed_bytes(w) for w in packed.values()) + dense.numel() * 7
    copies = copies_for(once, device.cache_bytes, device.room) if device.kind == "cpu" else 1
    placed = {n: [device.place(w) for w in with_copies(w, copies)] for n, w in packed.items()}
    made = {name: attempt(name, make, note) for name, make in _baselines(dense, device, copies)}
    others = {name: call for name, call in made.items() if call is not None}
    return Weights(outputs, inputs, copies, copies * once, placed, others)


def _baselines(dense: Tensor, device: Device, copies: int) -> Iterator[tuple[str, Callable[[], Linear]]]:
    """Name of each baseline that the shape admits, and how to make it."""
    outputs, inputs = dense.shape
    if device.kind == "cpu":
        yield "torch f32 linear", lambda: linear([_own(dense) for _ in range(copies)])
    yield "torch bf16 linear", lambda: linear([_own(dense.bfloat16()).to(device.where) for _ in range(copies)])
    if inputs % _ATEN_GROUP == 0 and outputs % 16 == 0:
        yield "ATen int4", lambda: aten_int4(random_matrix("int4-g128", outputs, inputs), device.where, copies)
    if device.kind == "cuda" and inputs % 16 == 0 and outputs % 16 == 0:
        yield "torch fp8 scaled_mm", lambda: _scaled_mm(dense.to(device.where))


def _own(x: Tensor) -> Tensor:
    """A copy in memory that numpy allocated: for large arrays it asks for huge pages, torch does not."""
    flat = x.contiguous().view(torch.uint8).numpy().copy()
    return torch.from_numpy(flat).view(x.dtype)


def linear(weights: list[Tensor]) -> Linear:
    """The linear layer of torch, activations in the dtype of the weights."""

    def on(x_TI: Tensor) -> Callable[[int], Any]:
        x = x_TI.to(weights[0].device, weights[0].dtype)
        return lambda c: torch.nn.functional.linear(x, weights[c % len(weights)])

    return on


def aten_int4(w: PackedMatrix, where: str, copies: int = 1) -> Linear:
    """ATen's INT4 kernel on the codes and scales of an INT4 g128 matrix: (code - 8) * scale + 0."""
    codes_OI = torch.from_numpy(unpack_words(np.asarray(w.codes).view(np.int32), w.inputs).astype(np.int32))
    scale_OG = torch.from_numpy(np.asarray(w.scale)).view(torch.bfloat16)
    scales = torch.stack((scale_OG, torch.zeros_like(scale_OG)), 2).transpose(0, 1).contiguous().to(where)
    ops: Any = torch.ops.aten
    if where == "cpu":
        packed, product = ops._convert_weight_to_int4pack_for_cpu(codes_OI, 1), ops._weight_int4pack_mm_for_cpu
        every = [(_own(packed), _own(scales)) for _ in range(copies)]
    else:
        pairs = (codes_OI[:, 0::2] << 4 | codes_OI[:, 1::2]).to(torch.uint8)
        every = [(ops._convert_weight_to_int4pack(pairs.to(where), 8), scales)]
        product = ops._weight_int4pack_mm

    def on(x_TI: Tensor) -> Callable[[int], Any]:
        x = x_TI.to(where, torch.bfloat16)
        return lambda c: product(x, every[c % len(every)][0], _ATEN_GROUP, every[c % len(every)][1])

    return on


def _scaled_mm(dense: Tensor) -> Linear:
    """FP8 x FP8 on tensor cores, one scale each; quantising the activations is not timed."""
    w, one = dense.to(torch.float8_e4m3fn), torch.ones((), device=dense.device)

    def on(x_TI: Tensor) -> Callable[[int], Any]:
        x = x_TI.to(w.device).to(torch.float8_e4m3fn)
        return lambda _: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return on


def candidates(weights: Weights, tokens: int, device: Device) -> tuple[list[Candidate], list[Candidate]]:
    """Packed kernels and baselines for so many tokens."""
    x_TI = torch.randn(tokens, weights.inputs, generator=torch.Generator().manual_seed(0)).clamp(-5, 5).bfloat16()
    x, matmul = device.activations(x_TI), device.twin("gemm", "matmul")

    def ours(name: str, copies: list[PackedMatrix]) -> Candidate:
        scale = _INPUT_SCALE if name == A4 else None
        return Candidate(name, lambda c: matmul(x, copies[c % len(copies)], input_scale=scale))

    return (
        [ours(name, copies) for name, copies in weights.packed.items()],
        [Candidate(name, on(x_TI)) for name, on in weights.others.items()],
    )


def row(name: str, weights: Weights, tokens: int) -> dict[str, Any]:
    """What the result says about the work of a kernel: sizes and operations."""
    return {
        "kernel": name, "m": tokens, "n": weights.outputs, "k": weights.inputs,
        "packed_bytes": packed_bytes(weights.packed[name][0]),
        "operations": 2 * tokens * weights.outputs * weights.inputs,
    }  # fmt: skip
