"""Decoded weights of a checkpoint: the stored tensors exactly, and the quantised ones as their codes say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantised
import quantised_fp4
import torch
from families import FAMILIES, load_tensors
from quantkit.export.checkpoint import Reader, open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.decoded import DecodedWeights


def test_plain_tensors_are_the_stored_ones(tmp_path: Path) -> None:
    source = FAMILIES["glm_moe_dsa"](tmp_path / "s")
    stored = load_tensors(source)
    with Reader() as reader:
        weights = DecodedWeights(open_checkpoint(source), reader)
        assert set(weights.names()) == set(stored)
        for name, tensor in stored.items():
            got = weights.read(name)
            assert weights.shape(name) == tuple(tensor.shape) and got.dtype == tensor.dtype
            assert torch.equal(got, tensor), name


def test_quantised_tensors_are_decoded(tmp_path: Path) -> None:
    source = FAMILIES["deepseek_v3"](tmp_path / "s")
    for i, write in enumerate((quantised.as_fp8_block, quantised.as_awq, quantised_fp4.as_mxfp4_ct)):
        exact = write(source, tmp_path / str(i))
        with Reader() as reader:
            weights = DecodedWeights(open_checkpoint(tmp_path / str(i)), reader)
            for name, values in exact.items():
                got = weights.read(name)
                assert got.dtype == torch.float32
                np.testing.assert_array_equal(got.numpy(), values, err_msg=name)


def test_one_expert_of_a_fused_tensor(tmp_path: Path) -> None:
    source = FAMILIES["gpt_oss"](tmp_path / "s")
    with Reader() as reader:
        weights = DecodedWeights(open_checkpoint(source), reader)
        fused = [n for n in weights.names() if len(weights.shape(n)) == 3]
        assert fused
        for name in fused:
            assert torch.equal(weights.read_expert(name, 1), weights.read(name)[1])
        with pytest.raises(QuantkitError, match="no such expert"):
            weights.read_expert(fused[0], 999)
