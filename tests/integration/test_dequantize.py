"""The oracle of the integration tests against checkpoints whose meaning another test helper wrote down as it made them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, load_tensors
from oracle.dequantize import dequantize
from quantised import Oracle, as_ct_int4, as_fp8_block, as_fp8_channel, as_fp8_tensor
from quantised_fp4 import as_mxfp4_ct, as_nvfp4

WRITERS: dict[str, Callable[[Path, Path], Oracle]] = {
    "int4": as_ct_int4,
    "int4 asymmetric": partial(as_ct_int4, symmetric=False),
    "nvfp4": as_nvfp4,
    "nvfp4 modelopt": partial(as_nvfp4, dialect="modelopt"),
    "mxfp4": as_mxfp4_ct,
    "fp8 tensor": as_fp8_tensor,
    "fp8 tensor modelopt": partial(as_fp8_tensor, dialect="modelopt"),
    "fp8 channel": as_fp8_channel,
    "fp8 channel modelopt": partial(as_fp8_channel, dialect="modelopt"),
    "fp8 block": as_fp8_block,
    "fp8 block ue8m0": partial(as_fp8_block, ue8m0=True, scale_dtype=torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("name", WRITERS)
def test_meaning(name: str, tmp_path: Path) -> None:
    source = FAMILIES["deepseek_v3"](tmp_path / "source")  # with a matrix of one and a half blocks
    expected = WRITERS[name](source, tmp_path / "quantised")
    meaning = dequantize(tmp_path / "quantised")
    plain = load_tensors(source)
    assert set(meaning) == set(plain)
    for tensor_name, tensor in meaning.items():
        exact = expected.get(tensor_name)
        np.testing.assert_array_equal(tensor.numpy(), plain[tensor_name].float().numpy() if exact is None else exact)
