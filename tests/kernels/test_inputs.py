"""Activations to codes and back, against one number at a time.

    pytest tests/kernels/test_inputs.py

Shape suffixes: T tokens, I inputs.
"""

import numpy as np
import pytest
import torch
from oracle.float8 import nearest, scale_of, value
from oracle.packed_product import nvfp4_activations
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.inputs import served_inputs

SIZES = [(1, 16), (5, 48), (3, 160)]


def drawn(tokens, inputs):
    x_TI = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)) * 3
    x_TI[0, :16] = 0
    x_TI[-1, -1] = 200
    return x_TI


def by_one(x: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.array([value(nearest(w, scale)) * np.float64(scale) for w in x.ravel()]).reshape(x.shape)


@pytest.mark.parametrize("size", SIZES)
def test_nvfp4(size):
    x_TI = drawn(*size)
    got = served_inputs(x_TI, "e2m1", 16, 0.01)
    np.testing.assert_allclose(got.numpy(), nvfp4_activations(x_TI.numpy(), 0.01), rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_fp8_under_a_stored_scale(size, scale):
    x_TI = drawn(*size)
    got = served_inputs(x_TI, "e4m3", 0, scale)
    np.testing.assert_allclose(got.numpy(), by_one(x_TI.numpy(), np.float32(scale)), rtol=1e-6)
    assert (got.abs().max() < 5) == (scale == 0.01), "the small scale clips"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("group", [0, 128])
def test_fp8_by_token_or_by_inputs_of_a_token(size, group):
    x_TI = drawn(*size)
    want = np.empty(size)
    for t in range(size[0]):
        for i in range(0, size[1], group or size[1]):
            part = x_TI[t, i : i + (group or size[1])].numpy()
            want[t, i : i + len(part)] = by_one(part, scale_of(np.abs(part).max(), False))
    np.testing.assert_allclose(served_inputs(x_TI, "e4m3", group, None).numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("how", [("e2m1", 16, 0.02), ("e4m3", 0, 0.02), ("e4m3", 0, None), ("e4m3", 128, None)])
def test_any_shape_dtype_and_number_of_threads(how):
    x = drawn(1100, 64).reshape(2, 550, 64)
    whole = served_inputs(x, *how)
    assert whole.shape == x.shape
    half = x.bfloat16()
    assert torch.equal(served_inputs(half, *how), served_inputs(half.float(), *how).bfloat16())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(served_inputs(x, *how), whole)
    finally:
        torch.set_num_threads(threads)
    assert served_inputs(x[:, :0], *how).shape == (2, 0, 64)


@pytest.mark.parametrize("how", [("e2m1", 16, 0.02), ("e4m3", 0, 0.02), ("e4m3", 0, None)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_seen(how, bad):
    x_TI = drawn(4, 32)
    x_TI[2, 5] = bad
    got = served_inputs(x_TI, *how)
    clipped = how == ("e4m3", 0, 0.02) and bad == torch.inf
    assert got[2].isfinite().all() == clipped, "an infinity is clipped under a stored scale, as engines do"
    assert got[[0, 1, 3]].isfinite().all()


def test_inputs_that_are_no_whole_blocks():
    with pytest.raises(QuantkitError, match="no whole blocks"):
        served_inputs(torch.zeros(2, 24), "e2m1", 16, 1.0)
