"""The torch reference of the packed GEMM against float64, and its choice of a twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle.packed_product import bound, nvfp4_activations, product, values
from packed_matrices import KINDS, random_matrix
from quantkit.kernels.cpu import gemm as cpu
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gemm import (
    as_tensors,
    dequantize,
    grouped_matmul,
    matmul,
    quantize_activations,
    reference,
    reference_grouped,
)


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_reference_decodes_and_multiplies(name: str, scale_format: str) -> None:
    for outputs, inputs in ((1, 128), (130, 384)):
        w = random_matrix(name, outputs, inputs, scale_format)
        np.testing.assert_allclose(dequantize(as_tensors(w)).numpy(), values(w), rtol=2.0**-22)
        x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0))
        for given in (x, x.half(), x.bfloat16()):
            seen = given.float().numpy()
            y = reference(given, as_tensors(w)).numpy()
            assert (np.abs(y - product(seen, w)) <= bound(seen, w)).all()


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cpu_tensors_go_to_the_numba_twin(name: str, scale_format: str, dtype: torch.dtype) -> None:
    w = random_matrix(name, 70, 256, scale_format)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = matmul(x, as_tensors(w))
    np.testing.assert_array_equal(y.numpy(), cpu.matmul(x.float().numpy(), w, threads=2))


def test_activations_quantised_as_in_the_twin() -> None:
    w = random_matrix("nvfp4", 40, 96, "e4m3")
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    np.testing.assert_allclose(quantize_activations(x, 0.01).numpy(), nvfp4_activations(x.numpy(), 0.01), rtol=2.0**-22)
    seen = nvfp4_activations(x.numpy(), 0.01)
    for y in (reference(x, as_tensors(w), input_scale=0.01), matmul(x, as_tensors(w), input_scale=0.01)):
        assert (np.abs(y.numpy() - product(seen, w)) <= bound(seen, w)).all()


def test_grouped_forms_agree() -> None:
    experts = [as_tensors(random_matrix("mxfp4", 24, 64, "e8m0", seed=e)) for e in range(3)]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    torch.testing.assert_close(grouped_matmul(x, starts, experts), reference_grouped(x, starts, experts))


def test_refuses_what_does_not_fit() -> None:
    w = random_matrix("int4-g128", 4, 128, "bf16")
    x = torch.zeros(1, 128)
    with pytest.raises(QuantkitError, match="different devices"):
        matmul(x, w)
    with pytest.raises(QuantkitError, match="different devices"):
        matmul(x.to("meta"), as_tensors(w))
    for product_of in (matmul, reference):
        with pytest.raises(QuantkitError, match="the codes"):
            product_of(x, replace(as_tensors(w), codes=torch.zeros(4, 60, dtype=torch.uint8)))
        with pytest.raises(QuantkitError, match="wrong dtype"):
            product_of(x.double(), as_tensors(w))
        with pytest.raises(QuantkitError, match="NVFP4 weights only"):
            product_of(x, as_tensors(w), input_scale=1.0)
