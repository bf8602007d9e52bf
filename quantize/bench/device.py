"""Where a benchmark runs, the CPU or a GPU: how to time there, how fast memory is, and how arrays get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.bench import machine
from quantkit.quantize.bench.timing import Turn, cpu_turn, cuda_turn
from torch import Tensor

_GPU_BUFFER = 4 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """Where kernels run.

    kind    whose kernels run; where: torch's name of the place of tensors
    room    bytes that weights and caches may take
    """

    kind: Literal["cpu", "cuda"]
    where: str
    name: str
    threads: int
    cache_bytes: int
    room: int
    turn: Turn

    def twin(self, module: str, function: str) -> Callable[..., Any]:
        """The kernel `function` of `kernels/<cpu or gpu>/<module>.py`."""
        folder = "cpu" if self.kind == "cpu" else "gpu"
        twin: Callable[..., Any] = getattr(import_module(f"quantkit.kernels.{folder}.{module}"), function)
        return partial(twin, threads=self.threads) if self.kind == "cpu" else twin

    def place(self, record: Any) -> Any:
        """A record of numpy arrays as the twin of this device takes it: unchanged, or as tensors on the GPU."""
        if self.kind == "cpu":
            return record
        arrays = {f.name: getattr(record, f.name) for f in fields(record)}
        return replace(record, **{n: self.tensor(a) for n, a in arrays.items() if isinstance(a, np.ndarray)})

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A numpy array as a tensor: over the same memory, or on the GPU."""
        return torch.from_numpy(array).to(self.where)

    def activations(self, x: Tensor) -> Any:
        """bfloat16 activations as the twin takes them: their bits in numpy, or a tensor on the GPU."""
        return x.view(torch.uint16).numpy() if self.kind == "cpu" else x.to(self.where)


class Bandwidth(NamedTuple):
    """Bytes a second, reading a buffer of so many bytes."""

    rate: float
    buffer_bytes: int


def open_device(kind: str, threads: int) -> Device:
    """The device of that kind; torch is told the number of threads."""
    if kind == "cpu":
        torch.set_num_threads(threads)
        room = machine.available_memory() // 4
        return Device("cpu", "cpu", machine.processor(), threads, machine.cache_bytes(), room, cpu_turn)
    if kind != "cuda":
        raise QuantkitError("no such device", value=kind, allowed="cpu, cuda")
    if not torch.cuda.is_available():
        raise QuantkitError(
            "torch finds no CUDA device", value=f"torch {torch.__version__}", hint="--device cpu needs no GPU"
        )
    if find_spec("triton") is None:
        raise QuantkitError("kernels for a GPU need Triton", hint="it comes with the CUDA builds of torch")
    about = torch.cuda.get_device_properties(0)
    room = torch.cuda.mem_get_info()[0] // 4
    return Device("cuda", "cuda", about.name, 0, about.L2_cache_size, room, cuda_turn)


def read_bandwidth(device: Device) -> Bandwidth:
    """The fastest of several sums of one buffer, on the device; see `machine.read_bandwidth` for the CPU."""
    if device.kind == "cpu":
        return Bandwidth(*machine.read_bandwidth(device.threads))
    buffer = torch.ones(min(_GPU_BUFFER, 2 * device.room) // 4, dtype=torch.float32, device=device.where)
    seconds = min(s for n in range(5) for s in cuda_turn(lambda _: buffer.sum(), n))
    return Bandwidth(buffer.nbytes / seconds, buffer.nbytes)


def with_copies(record: Any, copies: int) -> list[Any]:
    """The record and copies of it whose arrays lie in memory of their own."""
    found = [record]
    for _ in range(copies - 1):
        arrays = {f.name: getattr(record, f.name) for f in fields(record)}
        found.append(replace(record, **{n: a.copy() for n, a in arrays.items() if isinstance(a, np.ndarray)}))
    return found
