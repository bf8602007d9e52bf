"""FP8 E4M3: published bytes, the torch reference, exhaustive oracles, partial blocks and power-of-two scales."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import float8 as oracle
from quantkit.kernels import float8
from quantkit.kernels.cpu import fp8, nvfp4
from weights import VALUES, weights

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vectors.json").read_text())
SHAPES = [(128, 128), (256, 384), (1, 1), (1, 640), (130, 250), (127, 129), (3, 2100)]
KINDS = ["tensor", "channel", "block", "ue8m0"]


def golden_weights():
    bits = np.frombuffer(bytes.fromhex(GOLDEN["fp8_e4m3_4x8"]["W_bf16_bytes"]), np.uint16).reshape(4, 8)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def run(w_RI, kind):
    """Row of the first number that is not finite, and codes, scales, sums."""
    rows, inputs = w_RI.shape
    codes, sq_err, sq_norm = np.full((rows, inputs), 0xAA, np.uint8), np.full(rows, np.nan), np.full(rows, np.nan)
    if kind == "tensor":
        scale = np.array([fp8.fp8_scale(nvfp4.amax_f32(w_RI))])
        bad = fp8.quantize_fp8_tensor(w_RI, scale[0], codes, sq_err, sq_norm)
    elif kind == "channel":
        scale = np.full((rows, 1), np.nan, np.float32)
        bad = fp8.quantize_fp8_channel(w_RI, codes, scale, sq_err, sq_norm)
    else:
        scale = np.full((-(-rows // 128), -(-inputs // 128)), np.nan, np.float32)
        bad = fp8.quantize_fp8_block(w_RI, kind == "ue8m0", codes, scale, sq_err, sq_norm)
    return bad, codes, scale, sq_err, sq_norm


def quantize(w_RI, kind):
    bad, *parts = run(w_RI, kind)
    assert bad == -1
    return parts


def reference(w_RI, kind):
    w = torch.from_numpy(w_RI)
    if kind == "tensor":
        return float8.quantize_tensor(w, float(w.abs().max()))
    return float8.quantize_channel(w) if kind == "channel" else float8.quantize_block(w, kind == "ue8m0")


def spread(scale, kind, shape):
    """The scale of every weight."""
    if kind in ("tensor", "channel"):
        return np.broadcast_to(scale, shape)
    return np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]


def test_plain_writes_the_published_bytes():
    golden = GOLDEN["fp8_e4m3_4x8"]
    for kind, name in (("tensor", "per_tensor"), ("channel", "per_channel")):
        codes, scale, _, _ = quantize(golden_weights(), kind)
        assert codes.tobytes().hex() == golden[name]["weight_bytes"]
        assert scale.reshape(-1).tolist() == golden[name]["weight_scale"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numba_equals_torch(shape, values, kind):
    w_RI = weights(values, *shape)
    codes, scale, sq_err, sq_norm = quantize(w_RI, kind)
    their_codes, their_scale = reference(w_RI, kind)
    assert np.array_equal(scale, their_scale.numpy())
    assert np.array_equal(codes, their_codes.numpy())
    every = spread(scale, kind, shape)
    w_hat = float8.dequantize(torch.from_numpy(codes), torch.from_numpy(every.copy())).numpy().astype(np.float64)
    last_bit = 2.0**-149  # of a subnormal error
    np.testing.assert_allclose(sq_err, ((w_RI - w_hat) ** 2).sum(1), rtol=1e-6, atol=shape[1] * last_bit**2)
    np.testing.assert_allclose(sq_norm, (w_RI.astype(np.float64) ** 2).sum(1), rtol=1e-13, atol=0)
    half_step = np.maximum(np.abs(w_RI) / 16, every / 1024)  # three bits of mantissa, or half of 2^-9
    assert (np.abs(w_RI - w_hat) <= half_step * (1 + 1e-6) + last_bit).all()


@pytest.mark.parametrize("values", ["gauss", "powers", "negative_zero", "one_huge", "subnormal", "zeros"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_by_exhaustion(values, power_of_two):
    w_RI = weights(values, 129, 135)
    codes, scale, _, _ = quantize(w_RI, "ue8m0" if power_of_two else "block")
    their_codes, their_scale = oracle.block(w_RI, power_of_two)
    assert np.array_equal(scale, their_scale)
    assert np.array_equal(codes, their_codes)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
grid = st.sampled_from([0.0, -0.0, 448.0, -464.0, 2.0**-9, 3 * 2.0**-10, 2.0**-10, 17.0, 19.0, 1e-45, 3.4e38])


@settings(max_examples=80, deadline=None)
@given(arrays(np.float32, (2, 9), elements=finite | grid), st.sampled_from(KINDS))
def test_any_finite_weights(w_RI, kind):
    codes, scale, _, _ = quantize(w_RI, kind)
    every = spread(scale, kind, w_RI.shape)
    for (r, i), w in np.ndenumerate(w_RI):
        assert codes[r, i] == oracle.nearest(w, every[r, i])
    assert np.array_equal(codes, reference(w_RI, kind)[0].numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_requantizing_under_the_scales_on_disk_gives_the_codes_back(kind):
    w_RI = weights("t5", 200, 300)
    codes, scale, _, _ = quantize(w_RI, kind)
    again = np.zeros_like(codes)
    rows, inputs = {"tensor": (200, 300), "channel": (1, 300)}.get(kind, (128, 128))
    fp8.requantize_fp8(w_RI, scale.reshape(-1, 1) if kind == "tensor" else scale, rows, inputs, again)
    assert np.array_equal(again, codes)


def test_a_scale_from_a_fused_set_saturates_nothing_and_a_smaller_one_stops_at_448():
    w_RI = np.array([[1.0, -1.0, 0.5, 0.0]], np.float32)
    codes, sums = np.zeros((1, 4), np.uint8), (np.zeros(1), np.zeros(1))
    fp8.quantize_fp8_tensor(w_RI, fp8.fp8_scale(2.0), codes, *sums)
    assert [oracle.value(int(c)) for c in codes[0]] == [224.0, -224.0, 112.0, 0.0]
    fp8.quantize_fp8_tensor(w_RI, fp8.fp8_scale(0.25), codes, *sums)
    assert [oracle.value(int(c)) for c in codes[0]] == [448.0, -448.0, 448.0, 0.0]


def test_zeros_have_scale_one_and_tiny_weights_a_normal_scale():
    assert fp8.fp8_scale(0.0) == 1.0
    assert fp8.fp8_scale(448.0) == 1.0
    assert fp8.fp8_scale(1e-44) == 2.0**-126
    for kind in KINDS:
        codes, scale, sq_err, _ = quantize(np.zeros((3, 130), np.float32), kind)
        assert (scale == 1.0).all()
        assert not codes.any()
        assert not sq_err.any()


def test_ue8m0_scales_are_the_next_power_of_two():
    w_RI = np.zeros((1, 384), np.float32)
    w_RI[0, [0, 128, 256]] = [448.0, 449.0, 447.0]
    assert quantize(w_RI, "ue8m0")[1].tolist() == [[1.0, 2.0, 1.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_row_that_is_not_finite_is_named(kind, bad):
    w_RI = weights("gauss", 300, 1100)
    w_RI[140, 1099] = bad
    w_RI[141, 0] = bad
    assert run(w_RI, kind)[0] == 140


@pytest.mark.parametrize("kind", ["channel", "block", "ue8m0"])
def test_chunks_of_whole_blocks_change_nothing(kind):
    w_RI = weights("gauss", 300, 1100)
    whole = quantize(w_RI, kind)
    parts = [quantize(w_RI[a:b], kind) for a, b in ((0, 128), (128, 256), (256, 300))]
    for k, expected in enumerate(whole):
        assert np.array_equal(np.concatenate([part[k] for part in parts]), expected)
