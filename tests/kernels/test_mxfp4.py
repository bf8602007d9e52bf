"""MXFP4: compressed-tensors' bytes and exponents, the torch reference, exhaustive oracles, the law of the search."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import microscale as oracle
from quantkit.kernels import microscale
from quantkit.kernels.cpu import mxfp4
from weights import SHAPES, VALUES, weights

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vectors.json").read_text())["mxfp4_weight_2x64"]


def quantize(w_RI, search):
    rows, inputs = w_RI.shape
    codes, scale = np.full((rows, inputs // 2), 0xAA, np.uint8), np.full((rows, inputs // 32), 0xAA, np.uint8)
    sq_err, sq_norm = np.full(rows, np.nan), np.full(rows, np.nan)
    assert mxfp4.quantize_mxfp4(w_RI, search, codes, scale, sq_err, sq_norm) == -1
    return codes, scale, sq_err, sq_norm


def decoded(codes, scale):
    return microscale.dequantize_mxfp4(torch.from_numpy(codes), torch.from_numpy(scale)).numpy().astype(np.float64)


def block_losses(w_RI, codes, scale):
    return ((w_RI - decoded(codes, scale)) ** 2).reshape(len(w_RI), -1, 32).sum(-1)


def test_plain_writes_the_published_bytes():
    bits = np.frombuffer(bytes.fromhex(GOLDEN["W_bf16_bytes"]), np.uint16).reshape(2, 64)
    codes, scale, _, _ = quantize((bits.astype(np.uint32) << 16).view(np.float32), search=False)
    assert codes.tobytes().hex() == GOLDEN["ct"]["weight_packed_bytes"]
    assert scale.tolist() == GOLDEN["ct"]["weight_scale_u8"]


def test_modelopt_chooses_other_exponents_and_its_codes_are_nearest_under_them():
    """Save for one tie, 0.1875 / 0.25 = 0.75, which ModelOpt's MXFP4 rounds down to 0.5 and its NVFP4 to the even 1."""
    bits = np.frombuffer(bytes.fromhex(GOLDEN["W_bf16_bytes"]), np.uint16).reshape(2, 64)
    w_RI = (bits.astype(np.uint32) << 16).view(np.float32)
    codes = np.zeros((2, 32), np.uint8)
    mxfp4.requantize_mxfp4(w_RI, np.array(GOLDEN["modelopt"]["weight_scale_u8"], np.uint8), codes)
    theirs = np.frombuffer(bytes.fromhex(GOLDEN["modelopt"]["weight_bytes"]), np.uint8).reshape(2, 32)
    assert np.argwhere(codes != theirs).tolist() == [[1, 30]]
    assert (w_RI[1, 61], codes[1, 30], theirs[1, 30]) == (0.1875, 0x29, 0x19)


def test_plain_exponents_are_those_of_compressed_tensors():
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    amax = np.array([1.0, 1.5, 1.74, 1.75, 1.99, 2.0, 3.0, 3.4999, 3.5, 3.999, 6.0, 7.0, 1e-5, 1e5], np.float32)
    w_RI = np.zeros((len(amax), 32), np.float32)
    w_RI[:, 5] = -amax
    _, scale, _, _ = quantize(w_RI, search=False)
    assert scale[:, 0].tolist() == generate_mx_scales(torch.from_numpy(amax)).to(torch.uint8).tolist()


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numba_equals_torch(shape, values, search):
    rows, blocks = SHAPES[shape]
    w_RI = weights(values, rows, 32 * blocks)
    codes, scale, sq_err, sq_norm = quantize(w_RI, search)
    their_codes, their_scale = microscale.quantize_mxfp4(torch.from_numpy(w_RI), search)
    assert np.array_equal(scale, their_scale.numpy())
    assert np.array_equal(codes, their_codes.numpy())
    np.testing.assert_allclose(sq_err, ((w_RI - decoded(codes, scale)) ** 2).sum(1), rtol=1e-6, atol=0)
    np.testing.assert_allclose(sq_norm, (w_RI.astype(np.float64) ** 2).sum(1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("values", VALUES)
def test_search_never_loses_to_plain_in_any_block(values):
    w_RI = weights(values, 40, 160)
    plain, best = (block_losses(w_RI, *quantize(w_RI, search)[:2]) for search in (False, True))
    assert (best <= plain * (1 + 1e-6)).all()


def test_search_gains_on_weights_with_tails():
    w_RI = weights("t5", 256, 256)
    assert quantize(w_RI, search=True)[2].sum() < 0.985 * quantize(w_RI, search=False)[2].sum()


def check_against_oracle(w_RI):
    _, plain, _, _ = quantize(w_RI, search=False)
    _, best, _, _ = quantize(w_RI, search=True)
    for r, g in np.ndindex(plain.shape):
        block = w_RI[r, 32 * g : 32 * g + 32]
        assert plain[r, g] == oracle.mxfp4_plain_scale(block)
        tried = [int(np.clip(int(plain[r, g]) + step, 0, 254)) for step in (-1, 0, 1)]
        loss = {code: oracle.loss(block, np.ldexp(1.0, code - 127)) for code in tried}
        assert int(best[r, g]) in tried
        assert loss[int(best[r, g])] <= min(loss.values()) * (1 + 1e-6)
    for search in (False, True):
        codes, scale, _, _ = quantize(w_RI, search)
        again = np.zeros_like(codes)
        mxfp4.requantize_mxfp4(w_RI, scale, again)
        assert np.array_equal(again, codes)
        for r, g in np.ndindex(scale.shape):
            step = np.float32(np.ldexp(1.0, int(scale[r, g]) - 127))
            expected = oracle.pack(oracle.codes_of(w_RI[r, 32 * g : 32 * g + 32], step))
            assert codes[r, 16 * g : 16 * g + 16].tolist() == expected


@pytest.mark.parametrize("values", VALUES)
def test_scales_and_codes_are_the_nearest_by_exhaustion(values):
    check_against_oracle(weights(values, 2, 96))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
grid = st.sampled_from([0.0, -0.0, 0.25, 1.25, -1.75, 2.5, -3.5, 5.0, 7.0, 1e-45, -1e-38, 3.4e38, 2.0**-126])


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, (1, 64), elements=finite | grid))
def test_any_finite_weights(w_RI):
    check_against_oracle(w_RI)
    for search in (False, True):
        codes, scale, _, _ = quantize(w_RI, search)
        their_codes, their_scale = microscale.quantize_mxfp4(torch.from_numpy(w_RI), search)
        assert np.array_equal(scale, their_scale.numpy())
        assert np.array_equal(codes, their_codes.numpy())


def test_a_block_of_zeros_has_scale_one():
    w_RI = np.zeros((1, 64), np.float32)
    w_RI[0, 32:] = -0.0
    codes, scale, sq_err, sq_norm = quantize(w_RI, search=True)
    assert scale.tolist() == [[127, 127]]
    assert not codes.any()
    assert sq_err[0] == sq_norm[0] == 0


@pytest.mark.parametrize("column", [0, 17, 2080])
def test_the_first_row_that_is_not_finite_is_named(column):
    w_RI = weights("gauss", 5, 2112)
    w_RI[3, column] = -np.inf
    w_RI[4, 0] = np.nan
    out = np.empty((5, 1056), np.uint8), np.empty((5, 66), np.uint8), np.empty(5), np.empty(5)
    assert mxfp4.quantize_mxfp4(w_RI, False, *out) == 3
