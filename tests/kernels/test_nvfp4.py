"""NVFP4: published bytes, the torch reference, exhaustive oracles, and the laws of the block-scale search."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import microscale as oracle
from quantkit.kernels import microscale
from quantkit.kernels.cpu import nvfp4
from weights import SHAPES, VALUES, weights

METHODS = microscale.NVFP4_METHODS
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden_vectors.json").read_text())["nvfp4_weight_4x64"]


def golden_weights():
    bits = np.frombuffer(bytes.fromhex(GOLDEN["W_bf16_bytes"]), np.uint16).reshape(4, 64)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize(w_RI, scale_2, method):
    rows, inputs = w_RI.shape
    codes, scale = np.full((rows, inputs // 2), 0xAA, np.uint8), np.full((rows, inputs // 16), 0xAA, np.uint8)
    sq_err, sq_norm = np.full(rows, np.nan), np.full(rows, np.nan)
    bad = nvfp4.quantize_nvfp4(w_RI, np.float32(scale_2), METHODS.index(method), codes, scale, sq_err, sq_norm)
    assert bad == -1
    return codes, scale, sq_err, sq_norm


def scale_2_of(w_RI):
    return nvfp4.nvfp4_scale_2(nvfp4.amax_f32(w_RI))


def decoded(codes, scale, scale_2):
    return microscale.dequantize_nvfp4(torch.from_numpy(codes), torch.from_numpy(scale), float(scale_2)).numpy()


def block_losses(w_RI, codes, scale, scale_2):
    error = w_RI.astype(np.float64) - decoded(codes, scale, scale_2)
    return (error**2).reshape(len(w_RI), -1, 16).sum(-1)


def test_plain_writes_the_bytes_of_both_published_dialects():
    w_RI = golden_weights()
    amax = nvfp4.amax_f32(w_RI)
    codes, scale, _, _ = quantize(w_RI, nvfp4.nvfp4_scale_2(amax), "plain")
    for producer, name in (("modelopt", "weight_bytes"), ("ct", "weight_packed_bytes")):
        assert codes.tobytes().hex() == GOLDEN[producer][name]
    assert scale.tobytes().hex() == GOLDEN["modelopt"]["weight_scale_e4m3_bytes"]
    theirs = np.frombuffer(bytes.fromhex(GOLDEN["ct"]["weight_scale_e4m3_bytes"]), np.uint8).reshape(4, 4)
    zero_block = np.zeros((4, 4), bool)
    zero_block[1, 1] = True  # 0.125 there, 1.0 here; its codes are zeros
    assert np.array_equal(scale != theirs, zero_block)
    assert nvfp4.nvfp4_scale_2(amax).tobytes().hex() == GOLDEN["modelopt"]["weight_scale_2_bytes"]
    assert nvfp4.nvfp4_global_divisor(amax).tobytes().hex() == GOLDEN["ct"]["weight_global_scale_bytes"]


def test_compressed_tensors_decodes_and_encodes_the_same():
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8

    w_RI = weights("bf16", 24, 128)
    amax = nvfp4.amax_f32(w_RI)
    divisor = torch.tensor([nvfp4.nvfp4_global_divisor(amax)])
    for method in METHODS:
        codes, scale, _, _ = quantize(w_RI, nvfp4.nvfp4_scale_2(amax), method)
        values = unpack_fp4_from_uint8(torch.from_numpy(codes), 24, 128, dtype=torch.float32)
        block = torch.from_numpy(scale).view(torch.float8_e4m3fn).float()
        theirs = values * (block / divisor).repeat_interleave(16, 1)
        ours = decoded(codes, scale, nvfp4.nvfp4_scale_2(amax))
        np.testing.assert_allclose(theirs.numpy(), ours, rtol=3e-7, atol=0)
        packed = quantize_and_pack_fp4(torch.from_numpy(w_RI), block, global_scale=divisor, group_size=16)
        assert np.array_equal(packed.numpy(), codes)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numba_equals_torch(shape, values):
    rows, blocks = SHAPES[shape]
    w_RI = weights(values, rows, 16 * blocks)
    scale_2 = scale_2_of(w_RI)
    for method in METHODS:
        codes, scale, sq_err, sq_norm = quantize(w_RI, scale_2, method)
        their_codes, their_scale = microscale.quantize_nvfp4(torch.from_numpy(w_RI), float(scale_2), method)
        assert np.array_equal(scale, their_scale.numpy()), method
        assert np.array_equal(codes, their_codes.numpy()), method
        error = (w_RI.astype(np.float64) - decoded(codes, scale, scale_2)) ** 2
        np.testing.assert_allclose(sq_err, error.sum(1), rtol=1e-6, atol=1e-80)
        np.testing.assert_allclose(sq_norm, (w_RI.astype(np.float64) ** 2).sum(1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("values", VALUES)
def test_search_never_loses_to_the_plainer_method_in_any_block(values):
    w_RI = weights(values, 40, 160)
    scale_2 = scale_2_of(w_RI)
    loss = {m: block_losses(w_RI, *quantize(w_RI, scale_2, m)[:2], scale_2) for m in METHODS}
    slack = 1 + 1e-6  # losses are compared in float32
    assert (loss["four-over-six"] <= loss["plain"] * slack).all()
    assert (loss["sweep"] <= loss["four-over-six"] * slack).all()


def test_sweep_cuts_the_error_of_a_gaussian_to_less_than_four_fifths():
    w_RI = weights("gauss", 512, 256)
    scale_2 = scale_2_of(w_RI)
    total = {m: quantize(w_RI, scale_2, m)[2].sum() for m in METHODS}
    assert total["sweep"] <= 0.80 * total["plain"]
    assert total["four-over-six"] <= 0.87 * total["plain"]


@pytest.mark.parametrize("values", ["gauss", "t5", "bf16"])
def test_sweep_finds_the_best_of_all_scales(values):
    w_RI = weights(values, 3, 112)
    scale_2 = scale_2_of(w_RI)
    loss = block_losses(w_RI, *quantize(w_RI, scale_2, "sweep")[:2], scale_2)
    for r, g in np.ndindex(loss.shape):
        assert loss[r, g] <= oracle.nvfp4_best_loss(w_RI[r, 16 * g : 16 * g + 16], scale_2) * (1 + 1e-6)


def check_against_oracle(w_RI, scale_2):
    codes, scale, _, _ = quantize(w_RI, scale_2, "plain")
    for r, g in np.ndindex(scale.shape):
        block = w_RI[r, 16 * g : 16 * g + 16]
        assert scale[r, g] == oracle.nvfp4_plain_scale(block, scale_2)
    for method in METHODS:
        codes, scale, _, _ = quantize(w_RI, scale_2, method)
        assert ((scale > 0) & (scale < 127)).all()
        for r, g in np.ndindex(scale.shape):
            step = np.float32(oracle.e4m3(int(scale[r, g]))) * scale_2
            expected = oracle.pack(oracle.codes_of(w_RI[r, 16 * g : 16 * g + 16], step))
            assert codes[r, 8 * g : 8 * g + 8].tolist() == expected, (method, r, g)


@pytest.mark.parametrize("values", VALUES)
def test_scales_and_codes_are_the_nearest_by_exhaustion(values):
    w_RI = weights(values, 2, 48)
    check_against_oracle(w_RI, scale_2_of(w_RI))


finite = st.floats(-(2.0**100), 2.0**100, width=32)
grid = st.sampled_from([0.0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0, 7.0, 1e-3, 2.0**-12, 448.0])


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, (2, 32), elements=finite | grid), st.sampled_from([None, 2.0**-9, 1.0, 1 / 6]))
def test_any_finite_weights(w_RI, scale_2):
    """Also under a scale_2 that does not fit the weights: scales then stop at 448, codes at 6."""
    scale_2 = scale_2_of(w_RI) if scale_2 is None else np.float32(scale_2)
    check_against_oracle(w_RI, scale_2)
    for method in METHODS:
        codes, scale, _, _ = quantize(w_RI, scale_2, method)
        their_codes, their_scale = microscale.quantize_nvfp4(torch.from_numpy(w_RI), float(scale_2), method)
        assert np.array_equal(scale, their_scale.numpy())
        assert np.array_equal(codes, their_codes.numpy())


def test_requantizing_under_the_scales_on_disk_gives_the_codes_back_in_both_dialects():
    w_RI = weights("gauss", 33, 1040)
    amax = nvfp4.amax_f32(w_RI)
    scale_2 = nvfp4.nvfp4_scale_2(amax)
    read_back = np.float32(1) / nvfp4.nvfp4_global_divisor(amax)  # what a reader makes of the divisor
    assert abs(float(read_back) / float(scale_2) - 1) < 2e-7
    for method in METHODS:
        codes, scale, _, _ = quantize(w_RI, scale_2, method)
        for multiplier in (scale_2, read_back):
            again = np.zeros_like(codes)
            nvfp4.requantize_nvfp4(w_RI, multiplier, scale, again)
            assert np.array_equal(again, codes)


def test_a_block_of_zeros_has_scale_one_and_negative_zero_is_code_zero():
    w_RI = np.zeros((1, 32), np.float32)
    w_RI[0, 16:] = [-0.0, 0.0, 1.0, -1e-9] * 4
    codes, scale, sq_err, _ = quantize(w_RI, scale_2_of(w_RI), "sweep")
    assert scale[0, 0] == 0x38
    assert not codes[0, :8].any()
    assert codes[0, 8] == 0x00
    assert codes[0, 9] >> 4 == 8  # a negative weight that rounds to zero keeps its sign
    assert sq_err[0] == pytest.approx(4e-18)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad):
    w_RI = weights("gauss", 9, 2048)
    w_RI[7, 3] = np.nan
    w_RI[4, 2047] = bad
    out = np.empty((9, 1024), np.uint8), np.empty((9, 128), np.uint8), np.empty(9), np.empty(9)
    assert nvfp4.quantize_nvfp4(w_RI, np.float32(1e-4), 0, *out) == 4
    amax = nvfp4.amax_f32(w_RI[4:5])
    assert np.isnan(amax) if np.isnan(bad) else amax == np.inf
    assert np.isnan(nvfp4.amax_f32(w_RI))


def test_scales_of_a_tensor():
    assert nvfp4.nvfp4_scale_2(0.0) == nvfp4.nvfp4_global_divisor(0.0) == 1.0
    assert nvfp4.nvfp4_scale_2(2688.0) == nvfp4.nvfp4_global_divisor(2688.0) == 1.0
    assert nvfp4.nvfp4_scale_2(1e-44) == 2.0**-100
    assert nvfp4.nvfp4_global_divisor(1e-44) == 2.0**100
    assert nvfp4.amax_f32(np.array([[-3.0, 2.0]], np.float32)) == 3.0
    assert nvfp4.amax_f32(np.zeros((0, 16), np.float32)) == 0.0


def test_chunks_and_threads_and_views_change_nothing():
    w_RI = weights("t5", 64, 576)
    scale_2 = scale_2_of(w_RI)
    whole = quantize(w_RI, scale_2, "sweep")
    parts = [np.zeros_like(a) for a in whole]
    larger = np.zeros(whole[0].size + 3, np.uint8)
    parts[0] = larger[3:].reshape(whole[0].shape)  # not aligned
    rows = [(0, 1), (1, 32), (32, 64)]
    threads = [
        threading.Thread(target=nvfp4.quantize_nvfp4, args=(w_RI[a:b], scale_2, 2, *(part[a:b] for part in parts)))
        for a, b in rows
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(parts, whole, strict=True):
        assert np.array_equal(got, expected)
