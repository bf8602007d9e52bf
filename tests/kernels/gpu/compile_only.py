"""Compile every kernel for a GPU that is not there: `python compile_only.py 90` (compute capability times ten).

A driver that launches nothing takes the place of CUDA's, so the host code runs as it would and each launch goes through
Triton's whole compiler and ptxas. One line a binary is printed: kernel, registers, bytes of shared memory, bytes of stack
(registers that did not fit).
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
import triton
from packed_matrices import random_matrix
from quantkit.kernels.gemm import as_tensors
from quantkit.kernels.gpu import attention, gemm, tags
from quantkit.kernels.kv import Batch, new_cache, new_latent_cache
from triton.backends.compiler import GPUTarget

SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448}  # bytes a program may have
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Driver:
    """What Triton asks of a driver, for a GPU of a compute capability."""

    def __init__(self, capability):
        self.capability = capability
        self.utils = self

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.capability]}

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None

    def load_binary(self, name, binary, shared, device):
        """Registers come from the binary; the rest are handles that nobody uses."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            said = subprocess.run(
                [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        registers, stack = re.search(rf"Function {name}:\s*REG:(\d+) STACK:(\d+)", said.stdout).groups()
        print(name, registers, shared, stack, flush=True)
        return None, None, int(registers), 0, 1024


def tensors(record):
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{n: torch.from_numpy(v) for n, v in values.items() if isinstance(v, np.ndarray)})


def products():
    cases = [
        ("int4-g128", "bf16", 1, torch.bfloat16),
        ("int4a-g32", "bf16", 17, torch.float16),
        ("nvfp4", "e4m3", 4, torch.bfloat16),
    ]
    cases += [
        ("nvfp4", "e4m3", 256, torch.bfloat16),
        ("mxfp4", "e8m0", 2, torch.float32),
        ("fp8-block", "f32", 256, torch.float32),
    ]
    for name, scale_format, tokens, dtype in cases:
        w = as_tensors(random_matrix(name, 256, 1024, scale_format))
        gemm.matmul(torch.zeros(tokens, 1024, dtype=dtype), w)
        if name == "nvfp4":
            starts = torch.tensor([0, 1, tokens], dtype=torch.int32)
            gemm.grouped_matmul(torch.zeros(tokens, 1024, dtype=dtype), starts, [w, w], input_scale=0.5)
    one = as_tensors(random_matrix("int4a-channel", 1, 1, "bf16"))  # integers that are 1 become constants
    gemm.matmul(torch.zeros(1, 1), one)


def attentions():
    table = torch.arange(64, dtype=torch.int32)[None]
    for format, dtype, width, queries in [
        ("e4m3", torch.bfloat16, 128, 1),
        ("bf16", torch.bfloat16, 128, 64),
        ("f16", torch.float32, 256, 1),
        ("nvfp4", torch.float16, 64, 3),
        ("mxfp4", torch.float32, 32, 1),
    ]:
        batch = Batch(torch.tensor([0, queries], dtype=torch.int32), table, torch.tensor([1024], dtype=torch.int32))
        cache = tensors(new_cache(format, 64, 16, 2, width))
        q = torch.zeros(queries, 8, width, dtype=dtype)
        attention.attend(q, cache, batch, softmax_scale=0.1, window=0, sinks_H=torch.zeros(8))
        k = torch.zeros(4, 2, width, dtype=dtype)
        attention.write(cache, torch.arange(4), k, k)
    for format, dtype in (("e4m3", torch.bfloat16), ("dsa", torch.float32)):
        cache = tensors(new_latent_cache(format, 64, 16))
        batch = Batch(torch.tensor([0, 1], dtype=torch.int32), table, torch.tensor([1024], dtype=torch.int32))
        attention.attend_latent(torch.zeros(1, 16, 576, dtype=dtype), cache, batch, softmax_scale=0.1)
        attention.write_latent(
            cache, torch.arange(4), torch.zeros(4, 512, dtype=dtype), torch.zeros(4, 64, dtype=dtype)
        )
    cache, none = tensors(new_cache("e5m2", 1, 1, 1, 1)), torch.zeros(1, 1, 1)
    single = Batch(torch.tensor([0, 1], dtype=torch.int32), table[:, :1], torch.tensor([1], dtype=torch.int32))
    attention.attend(none, cache, single, softmax_scale=0.1, window=1)
    attention.write(cache, torch.arange(1), none, none)
    tags.check_tags(torch.zeros(1, 1, dtype=torch.int64), table[:, :1], torch.zeros(1, dtype=torch.int64))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    triton.runtime.driver.set_active(Driver(int(sys.argv[1])))
    for module in (gemm, attention):  # tensors are on the CPU here and stand for those of the GPU
        module.check_device = lambda tensor: None
        module.processors = lambda tensor: 132
        module.has_e4m3 = lambda tensor: int(sys.argv[1]) >= 89
    tags.check_device = lambda tensor: None
    products()
    attentions()
