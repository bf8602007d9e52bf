"""Random and adversarial packed weights of every scheme, as raw bytes that no encoder of ours wrote."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from quantkit.kernels.matrix import PackedMatrix, ScaleBits, code_bytes, scale_shape
from quantkit.kernels.scheme import SCHEMES

KINDS: list[tuple[str, ScaleBits]] = [
    *((f"{p}-{g}", "bf16") for p in ("int4", "int4a") for g in ("g32", "g64", "g128", "channel")),
    ("int4-g128", "f16"),
    ("nvfp4", "e4m3"),
    ("mxfp4", "e8m0"),
    ("fp8-tensor", "f32"),
    ("fp8-channel", "f32"),
    ("fp8-block", "f32"),
    ("fp8-block-ue8m0", "e8m0"),
]

# Rows that are no whole blocks of the kernels: scheme, format of the scales, inputs.
ODD_INPUTS: list[tuple[str, ScaleBits, int]] = [
    ("int4-g32", "bf16", 32),
    ("int4-g32", "f16", 416),
    ("int4-g64", "bf16", 192),
    ("int4-channel", "bf16", 1),
    ("int4-channel", "bf16", 37),
    ("int4a-channel", "bf16", 205),
    ("int4a-g32", "bf16", 96),
    ("nvfp4", "e4m3", 16),
    ("nvfp4", "e4m3", 144),
    ("mxfp4", "e8m0", 160),
    ("fp8-tensor", "f32", 1),
    ("fp8-channel", "f32", 131),
    ("fp8-block", "f32", 200),
    ("fp8-block-ue8m0", "e8m0", 576),
]


def random_matrix(name: str, outputs: int, inputs: int, scale_format: ScaleBits, seed: int = 0) -> PackedMatrix:
    """Any code may occur but the two NaN of E4M3; scales are positive and within a factor of ten of 0.01."""
    rng = np.random.default_rng(seed)
    scheme = SCHEMES[name]
    codes = rng.integers(0, 256, (outputs, code_bytes(scheme, inputs)), dtype=np.uint8)
    if scheme.element == "e4m3":
        codes[(codes & 0x7F) == 0x7F] -= 1
    elif scheme.element == "int4" and inputs % 8:
        nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(outputs, -1)
        nibbles[:, inputs:] = 0
        codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    wanted = np.exp(rng.uniform(np.log(0.002), np.log(0.05), scale_shape(scheme, outputs, inputs))).astype(np.float32)
    zero = None
    if not scheme.symmetric:
        zero = rng.integers(-(2**31), 2**31, (-(-outputs // 8), scheme.groups(inputs))).astype(np.int32)
    return PackedMatrix(
        scheme=scheme,
        outputs=outputs,
        inputs=inputs,
        codes=np.ascontiguousarray(codes),
        scale=to_bits(wanted * (1000 if scheme.has_global else 1), scale_format),
        scale_format=scale_format,
        zero=zero,
        global_scale=float(np.float32(1.7e-3)) if scheme.has_global else 1.0,
    )


def to_bits(values: np.ndarray, scale_format: ScaleBits) -> np.ndarray:
    """Values rounded to a scale format, in the dtype that carries its bits."""
    if scale_format == "f32":
        return values.astype(np.float32)
    if scale_format == "f16":
        return values.astype(np.float16).view(np.uint16)
    if scale_format == "bf16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    dtype = ml_dtypes.float8_e4m3fn if scale_format == "e4m3" else ml_dtypes.float8_e8m0fnu
    return values.astype(dtype).view(np.uint8)


def with_all_codes(w: PackedMatrix, byte: int) -> PackedMatrix:
    """The same matrix with one byte everywhere."""
    return replace(w, codes=np.full_like(w.codes, byte))
