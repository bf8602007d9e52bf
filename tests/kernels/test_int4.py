"""INT4 kernels: equal to the torch reference, and true to the laws that a slow oracle checks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import int4 as oracle
from quantkit.kernels import affine, packed
from quantkit.kernels.cpu import convert, int4

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vectors.json").read_text())
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# (rows, inputs, group): square, tall, one group, one row, ragged tails, one weight, a row longer than a block of sums
SHAPES = [
    (7, 512, 128),
    (33, 64, 32),
    (3, 192, 64),
    (1, 128, 128),
    (4, 1000, 1000),
    (2, 7, 7),
    (1, 1, 1),
    (3, 6146, 6146),
]
SPREADS = ("normal", "t3", "wild")


def weights(shape, spread="normal", seed=0):
    rng = np.random.default_rng(seed)
    if spread == "t3":
        return rng.standard_t(3, shape).astype(np.float32)
    w = rng.standard_normal(shape).astype(np.float32)
    if spread == "laplace":
        return rng.laplace(size=shape).astype(np.float32)
    return w * np.exp(8 * rng.standard_normal(shape)).astype(np.float32) if spread == "wild" else w


def run(w, group, kind="bf16", search=False, asym=False, signed=False):
    """Codes int8, scales float32 and bits, zeros, sums; from the kernel."""
    rows, inputs = w.shape
    groups = inputs // group
    nibbles = np.full((rows, -(-inputs // 8) * 4), 255, np.uint8)
    scale, zero = np.empty((rows, groups), np.uint16), np.zeros((rows, groups), np.int8)
    sums = np.empty(rows), np.empty(rows)
    half = kind == "f16"
    if asym:
        bad = int4.quantize_int4_asym(w, group, search, half, nibbles, scale, zero, *sums)
    else:
        bad = int4.quantize_int4(w, group, 1 if signed else 2 * search, half, nibbles, scale, *sums)
    assert bad == -1
    value = np.empty(scale.shape, np.float32)
    (convert.f16_to_f32 if half else convert.bf16_to_f32)(scale, value)
    codes = packed.unpack_codes(nibbles.view(np.int32), inputs)
    again = np.empty_like(nibbles)
    if asym:
        int4.requantize_int4_asym(w, group, half, scale, zero, again)
    else:
        int4.requantize_int4(w, group, half, scale, again)
    np.testing.assert_array_equal(again, nibbles)  # codes are the nearest under the stored scale
    np.testing.assert_array_equal(packed.pack_codes(codes).view(np.uint8), nibbles)  # and the padding is raw 0
    return codes, value, scale, zero, sums


def losses(w, group, value, zero):
    """True error of each group [rows, groups] under the stored scales."""
    rows, groups = value.shape
    w_RGN = w.reshape(rows, groups, group)
    return np.array(
        [[oracle.loss(w_RGN[r, g], value[r, g], int(zero[r, g])) for g in range(groups)] for r in range(rows)]
    )


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", ["plain", "signed", "searched", "plain_asym", "searched_asym"])
def test_kernels_equal_the_reference(method, shape, kind, spread):
    rows, inputs, group = shape
    w = weights((rows, inputs), spread)
    search, asym = method.startswith("searched"), method.endswith("asym")
    codes, _, scale, zero, (err, norm) = run(w, group, kind, search, asym, method == "signed")
    expected = getattr(affine, method)(torch.from_numpy(w), group, DTYPES[kind])
    np.testing.assert_array_equal(scale, expected[1].view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(codes, expected[0].numpy())
    if asym:
        np.testing.assert_array_equal(zero, expected[2].numpy())
    w_hat = affine.dequantize(*expected).double().numpy()
    true_norm = (w.astype(np.float64) ** 2).sum(1)
    tolerance = 1e-5 if spread == "normal" else 1e-3
    np.testing.assert_allclose(err, ((w - w_hat) ** 2).sum(1), rtol=tolerance, atol=1e-8 * true_norm.max())
    np.testing.assert_allclose(norm, true_norm, rtol=tolerance)


@pytest.mark.parametrize("kind", DTYPES)
def test_plain_equals_the_oracle(kind):
    w = weights((5, 96), "t3", seed=3)
    codes, value, _, _, _ = run(w, 32, kind)
    asym_codes, asym_value, _, asym_zero, _ = run(w, 32, kind, asym=True)
    for r in range(5):
        for g in range(3):
            group = slice(32 * g, 32 * g + 32)
            scale = oracle.plain_scale(w[r, group], kind)
            assert value[r, g] == scale
            np.testing.assert_array_equal(codes[r, group], oracle.codes(w[r, group], scale))
            scale, zero = oracle.asym_parameters(w[r, group], kind)
            assert (asym_value[r, g], asym_zero[r, g]) == (scale, zero)
            np.testing.assert_array_equal(asym_codes[r, group], oracle.codes(w[r, group], scale, zero))


@pytest.mark.parametrize("name", ["ct_int4_g32_sym", "ct_int4_g32_asym"])
def test_compressed_tensors_golden_bytes(name):
    golden = GOLDEN[name]
    bits = np.frombuffer(bytes.fromhex(golden["W_bf16_bytes"]), np.uint16).reshape(golden["shape"])
    w = np.empty(bits.shape, np.float32)
    convert.bf16_to_f32(bits, w)
    codes, _, scale, zero, _ = run(w, 32, asym=not golden["symmetric"])
    assert scale.tobytes().hex() == golden["weight_scale_bf16_bytes"]
    assert packed.pack_codes(codes).tobytes().hex() == golden["weight_packed_bytes_fp32_div"]
    if not golden["symmetric"]:
        assert packed.pack_zero_points(zero).tobytes().hex() == golden["weight_zero_point_bytes"]


@pytest.mark.parametrize(("group", "bound"), [(128, 0.77), (64, 0.76), (32, 0.74)])
def test_search_on_gaussian_weights(group, bound):
    w = weights((64, 2048), seed=11)
    plain, searched = (sum(run(w, group, search=s)[4][0]) for s in (False, True))
    assert searched <= bound * plain


@pytest.mark.parametrize("spread", ["normal", "t3", "laplace"])
@pytest.mark.parametrize(("group", "rows"), [(32, 100), (64, 60), (128, 60), (2048, 6)])
def test_search_loses_nothing_against_trying_everything(group, rows, spread):
    w = weights((rows, group), spread, seed=5)
    _, value, _, zero, _ = run(w, group, search=True)
    everything = sum(oracle.exhaustive_loss(row, "bf16") for row in w)
    assert losses(w, group, value, zero).sum() <= 1.002 * everything


# What breaks scale searches: subnormals, the ends of float32 and float16, both zeros, and ordinary numbers beside them.
HARD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38, 6e-8, 6.1e-5, 65504.0, -7e4, 1.0, -1.0, 0.1, 7.5, -8.0, 1e-30]


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 9, 32, 64])),
           elements=st.one_of(st.sampled_from(HARD).map(np.float32), st.floats(-2, 2, width=32))),
    st.sampled_from(sorted(DTYPES)), st.booleans(),
)  # fmt: skip
def test_search_is_never_worse_and_scales_are_normal(w, kind, asym):
    inputs = w.shape[1]
    for group in {inputs, 32 if inputs % 32 == 0 else inputs}:
        _, plain_value, _, plain_zero, _ = run(w, group, kind, False, asym)
        _, value, scale, zero, (_, norm) = run(w, group, kind, True, asym)
        assert np.isfinite(value).all()
        assert (np.abs(value) >= oracle.STORED[kind][1]).all()
        assert np.isfinite(norm).all()
        largest = np.abs(w.reshape(len(w), -1, group)).max(2).astype(np.float64)
        noise = group * (largest * 2.0**-22) ** 2
        assert (losses(w, group, value, zero) <= losses(w, group, plain_value, plain_zero) * (1 + 1e-9) + noise).all()
        expected = (affine.searched_asym if asym else affine.searched)(torch.from_numpy(w), group, DTYPES[kind])
        np.testing.assert_array_equal(scale, expected[1].view(torch.int16).numpy().view(np.uint16))


def test_zero_groups_have_scale_one_and_zero_weights():
    w = np.zeros((2, 64), np.float32)
    w[1, 32:] = 1
    for search in (False, True):
        codes, value, _, _, (err, norm) = run(w, 32, search=search)
        np.testing.assert_array_equal(value[:, 0], [1, 1])
        np.testing.assert_array_equal(codes[:, :32], 0)
        assert (err[0], norm[0]) == (0, 0)
        codes, value, _, zero, _ = run(w, 32, search=search, asym=True)
        np.testing.assert_array_equal(codes[0], zero[0].repeat(32))
        np.testing.assert_array_equal(value[0], 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longer_side_gets_code_minus_8(sign):
    w = np.float32(sign * 0.25) * np.arange(-7, 9, dtype=np.float32)[None]
    codes, value, _, _, (err, _) = run(w, 16, search=True)
    np.testing.assert_array_equal(codes * value, w)
    assert (value[0, 0], err[0]) == (-sign * 0.25, 0)


@pytest.mark.parametrize("group", [32, 128])
def test_signed_scales_keep_the_largest_weight_and_are_never_worse_than_plain(group):
    w = weights((16, 512), "t3", seed=5)
    codes, value, _, zero, _ = run(w, group, signed=True)
    _, plain_value, _, _, _ = run(w, group)
    assert (losses(w, group, value, zero) <= losses(w, group, plain_value, zero) * (1 + 1e-9)).all()
    largest = np.abs(w.reshape(16, -1, group)).max(2)
    signed = ~np.isclose(np.abs(value), largest / 7.5, rtol=2**-8)
    assert signed.mean() > 0.5
    np.testing.assert_allclose(np.abs(value)[signed], (largest / 8)[signed], rtol=2**-8)
    lost = np.abs(w - codes * value.repeat(group, 1)).reshape(16, -1, group)
    at = np.abs(w.reshape(16, -1, group)).argmax(2)[..., None]
    of_largest = np.take_along_axis(lost, at, 2)[..., 0]
    assert (of_largest[signed] <= largest[signed] * 2**-8).all()  # the rounding of the scale to bfloat16
    assert (lost.max(2)[signed] <= np.abs(value)[signed] * 1.04).all()  # a weight of the other sign may end at 7 of 8


def test_weights_on_a_plain_grid_come_back_exactly():
    q = np.random.default_rng(2).integers(-7, 8, (4, 256)).astype(np.float32)
    q[:, ::32] = -7.5  # the largest weight of each group: it rounds to -8 and is the one that loses
    w = q * np.float32(2.0**-6)
    codes, value, _, _, _ = run(w, 32)
    np.testing.assert_array_equal((codes * value.repeat(32, axis=1))[q != -7.5], w[q != -7.5])


def test_bytes_do_not_depend_on_the_chunk():
    w = weights((9, 384), "t3", seed=9)
    codes, _, scale, _, (err, norm) = run(w, 128, search=True)
    for r in range(9):
        row = run(w[r : r + 1].copy(), 128, search=True)
        np.testing.assert_array_equal(row[0][0], codes[r])
        np.testing.assert_array_equal(row[2][0], scale[r])
        assert (row[4][0][0], row[4][1][0]) == (err[r], norm[r])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("asym", [False, True])
def test_the_first_row_that_is_not_finite_is_named(bad, asym):
    w = weights((6, 64))
    w[4, 63] = bad
    w[5, 0] = bad
    nibbles, scale, zero = np.empty((6, 32), np.uint8), np.empty((6, 2), np.uint16), np.empty((6, 2), np.int8)
    sums = np.empty(6), np.empty(6)
    for search in (False, True):
        if asym:
            assert int4.quantize_int4_asym(w, 32, search, False, nibbles, scale, zero, *sums) == 4
        else:
            assert int4.quantize_int4(w, 32, 2 * search, False, nibbles, scale, *sums) == 4
