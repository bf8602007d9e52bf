"""Inputs for the kernels of a verifier: activations and caches recorded by a calibration run, else random numbers.

A run folder holds `calibration.safetensors` with samples of what was seen (BF16, FP16 or FP32):

    inputs.MODULE       [T, I]     activations that entered the linear layer MODULE
    kv.LAYER.k, .v      [T, H, D]  keys (after RoPE and norms) and values of H KV heads, as an engine caches them
    kv.LAYER.q          [T, Q, D]  queries of the same tokens, Q a multiple of H
    kv.LAYER.latent     [T, C]     rows of an MLA cache instead: latent and RoPE part

Letters: T tokens, I inputs, H KV heads, Q query heads, D values, C rank + RoPE values of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo, read_header
from quantkit.export.sources.rows import scale_values
from quantkit.kernels.errors import QuantkitError

F32 = NDArray[np.float32]
Inputs = Callable[[str, int], tuple[F32, bool]]

FILE = "calibration.safetensors"
TOKENS = 8  # of a run on random numbers, and at most of one on recorded ones


def recorded_tensors(run: Path) -> Mapping[str, TensorInfo]:
    """The samples of a run folder by name; raises QuantkitError when the file is missing or broken."""
    file = run / FILE
    if not file.is_file():
        raise QuantkitError("a run folder without recorded samples", file=file, hint="`quantkit calibrate` writes it")
    return read_header(file)


def sample(info: TensorInfo, reader: Reader) -> F32:
    """A recorded sample as float32; raises QuantkitError unless it is a finite float tensor."""
    if info.dtype not in ("BF16", "F16", "F32"):
        raise QuantkitError(
            "a recorded sample is not a float tensor", file=info.file, tensor=info.name, value=info.dtype,
            allowed="BF16, F16, F32",
        )  # fmt: skip
    values = scale_values(info, reader.read(info)).reshape(info.shape)
    if not np.isfinite(values).all():
        raise QuantkitError("a recorded sample holds NaN or infinity", file=info.file, tensor=info.name)
    return values


def inputs_from(recorded: Mapping[str, TensorInfo], reader: Reader) -> Inputs:
    """(module, inputs) -> activations [T, inputs], and whether they were recorded; random ones are always the same."""

    def inputs_of(module: str, inputs: int) -> tuple[F32, bool]:
        info = recorded.get(f"inputs.{module}")
        if info is None:
            return np.random.default_rng(inputs).standard_normal((TOKENS, inputs)).astype(np.float32), False
        if len(info.shape) != 2 or info.shape[1] != inputs or not math.prod(info.shape):
            raise QuantkitError(
                "a recorded sample does not fit its layer", file=info.file, tensor=info.name, value=list(info.shape),
                allowed=f"[tokens, {inputs}]",
            )  # fmt: skip
        return np.ascontiguousarray(sample(info, reader)[:TOKENS]), True

    return inputs_of
