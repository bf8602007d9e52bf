"""`jit` of Triton with types, and whether it compiles for a GPU or interprets on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from quantkit.kernels.errors import QuantkitError
from torch import Tensor


class Kernel(Protocol):
    """A Triton function: launched as kernel[grid](...), or called by another one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """A launcher over a grid of programs."""
        ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A call within a kernel."""
        ...


jit: Callable[[Callable[..., Any]], Kernel] = triton.jit
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# Operands of products on tensor cores. The interpreter multiplies bf16 as if it were integers, so there the same
# values, which all have bf16's 8 significant bits, stay in float32.
BF16 = tl.float32 if INTERPRETED else tl.bfloat16
F16 = tl.float16
F32 = tl.float32


def check_device(x: Tensor) -> None:
    """Raise QuantkitError unless kernels can read the tensor: on a GPU, or on the CPU in the interpreter."""
    if x.device.type != ("cpu" if INTERPRETED else "cuda"):
        raise QuantkitError(
            "no kernel can read this tensor", value=f"a tensor on {x.device}", allowed="a tensor on cuda",
            hint="the CPU has kernels of its own in kernels/cpu",
        )  # fmt: skip


def processors(x: Tensor) -> int:
    """Streaming multiprocessors of the tensor's GPU; 4 in the interpreter, so that small cases are split as well."""
    if x.device.type == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def has_e4m3(x: Tensor) -> bool:
    """True where the GPU converts E4M3 by itself (compute capability 8.9 and up)."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)
