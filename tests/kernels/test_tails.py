"""The method `tails`: weights from the kurtosis, scales that lose least by them, nearest codes, never worse than plain."""

import numpy as np
import pytest
import torch
from oracle import int4 as oracle_int4
from oracle import microscale as oracle_fp4
from quantkit.kernels import microscale
from quantkit.kernels.cpu import int4, int4_tails, nvfp4, tails

STEPS = [s * t for t in np.linspace(1.2, 0.3, 361).astype(np.float32) for s in (1, -1)]


def matrix(rows, inputs):
    """Heavy tails, and a column that is large in one row in twenty."""
    w = np.random.default_rng(0).standard_t(4, (rows, inputs)).astype(np.float32)
    w[::20, 5] *= 30
    return w


def moments_of(w):
    square, fourth = np.zeros((2, w.shape[1]))
    tails.add_moments(w, square, fourth)
    return tails.Moments(square, fourth, len(w))


def weights_of(*matrices):
    return tails.tail_weights([moments_of(w) for w in matrices])


def loss(w, w_hat, h):
    return float((h * np.sqrt(np.abs(w)) * (w.astype(np.float64) - w_hat) ** 2).sum())


def test_tail_weights_are_squared_kurtosis_over_mean_square_whatever_the_chunks():
    w = matrix(50, 96)
    w[:, 7] = 0
    sums = []
    for size in (50, 7, 1):
        square, fourth = np.zeros((2, 96))
        for at in range(0, 50, size):
            tails.add_moments(w[at : at + size], square, fourth)
        sums.append((square, fourth))
    for square, fourth in sums[1:]:
        assert np.array_equal(square, sums[0][0])
        assert np.array_equal(fourth, sums[0][1])
    found = tails.tail_weights([tails.Moments(*sums[0], 50)])
    x = np.delete(w.astype(np.float64), 7, axis=1)
    expected = ((x**4).mean(0) / (x**2).mean(0) ** 2) ** 2 / (x**2).mean(0)
    assert np.allclose(np.delete(found, 7), expected / expected.max(), rtol=1e-5)
    assert found[7] == 0


@pytest.mark.parametrize("rows", [(50, 30), (50, 20, 30)])
def test_matrices_that_share_inputs_multiply_their_kurtosis_and_the_last_says_how_small_the_columns_are(rows):
    parts = [matrix(n, 64) * np.float32(k + 1) for k, n in enumerate(rows)]
    parts[0][:, 3] = parts[-1][:, 9] = 0
    for w in parts:
        w[:, 20] = 0
    expected = np.ones(64)
    for w in parts:
        for c in range(64):
            if w[:, c].any():
                expected[c] *= np.mean(w[:, c].astype(np.float64) ** 4) / np.mean(w[:, c].astype(np.float64) ** 2) ** 2
    expected[20] = 0
    for c in set(range(64)) - {20}:
        last = [w for w in parts if w[:, c].any()][-1]
        expected[c] /= np.mean(last[:, c].astype(np.float64) ** 2)
    assert np.allclose(weights_of(*parts), expected / expected.max(), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-36, 1e36])
def test_tail_weights_do_not_depend_on_the_unit_of_the_weights(size):
    w = matrix(50, 96)
    small = (w * np.float32(0.1 * size)).astype(np.float32)
    assert np.allclose(weights_of(small), weights_of(w), rtol=1e-3)
    assert np.allclose(weights_of(small, small, small), weights_of(w, w, w), rtol=2e-3)
    assert not weights_of(np.zeros((4, 8), np.float32)).any()


def test_the_loss_weighs_columns_and_sizes():
    w, h = matrix(6, 64), np.linspace(1, 5, 64).astype(np.float32)
    assert np.isclose(tails.tail_loss(w, np.rint(w), h), loss(w, np.rint(w), h), rtol=1e-6)


def quantize_int4(w, h, half, group=64):
    (rows, inputs), stats = w.shape, (np.empty(len(w)), np.empty(len(w)))
    codes, bits = np.empty((rows, -(-inputs // 8) * 4), np.uint8), np.empty((rows, inputs // group), np.uint16)
    int4_tails.tail_scales(w, h, group, half, bits)
    bad = int4.encode_int4(w, group, half, bits, codes, *stats)
    scale = bits.view(np.float16).astype(np.float32) if half else (bits.astype(np.uint32) << 16).view(np.float32)
    return bad, codes, scale, *stats


@pytest.mark.parametrize(("half", "group"), [(False, 64), (True, 64), (False, 32), (False, 192), (True, 6)])
def test_int4_is_as_good_as_trying_every_scale(half, group):
    w = matrix(37, 192)
    h, kind = weights_of(w), "f16" if half else "bf16"
    bad, codes, scale, sq_err, sq_norm = quantize_int4(w, h, half, group)
    assert bad == -1
    found = best = plain = lost = 0.0
    for r, g in np.ndindex(scale.shape):
        span = slice(g * group, g * group + group)
        part, weight = w[r, span], h[span]
        q = oracle_int4.codes(part, scale[r, g])
        nibbles = np.stack((codes[r] & 15, codes[r] >> 4), 1).reshape(-1)[span]
        assert np.array_equal(nibbles.astype(int) - 8, q)

        def at(s, part=part, weight=weight):
            return loss(part, oracle_int4.codes(part, s) * np.float64(s), weight)

        lost += float(((part - q * np.float64(scale[r, g])) ** 2).sum())
        found += at(scale[r, g])
        plain_here = at(oracle_int4.plain_scale(part, kind))
        assert at(scale[r, g]) <= plain_here * (1 + 1e-5)
        plain += plain_here
        best += min(at(oracle_int4.stored_scale(t * np.abs(part).max() / np.float32(8), kind)) for t in STEPS)
    assert found <= 1.005 * best
    assert found <= 0.8 * plain
    assert np.isclose(sq_err.sum(), lost, rtol=1e-5)  # sums of integers, as `int4.py` says
    assert np.isclose(sq_norm.sum(), float((w.astype(np.float64) ** 2).sum()), rtol=1e-5)


@pytest.mark.parametrize(("inputs", "group"), [(192, 64), (75, 75)])
def test_int4_of_a_row_does_not_depend_on_the_rows_beside_it(inputs, group):
    w = matrix(23, inputs)
    h = weights_of(w)
    _, codes, scale, *_ = quantize_int4(w, h, False, group)
    for at in range(0, 23, 4):
        _, part_codes, part_scale, *_ = quantize_int4(w[at : at + 4].copy(), h, False, group)
        assert np.array_equal(part_codes, codes[at : at + 4])
        assert np.array_equal(part_scale, scale[at : at + 4])


@pytest.mark.parametrize("unit", [-100, 100])
def test_scales_follow_the_unit_of_the_weights_and_of_their_weights(unit):
    w = matrix(9, 128)
    h = weights_of(w)
    _, codes, scale, *_ = quantize_int4(w, h, False)
    _, scaled_codes, scaled, *_ = quantize_int4(np.ldexp(w, unit), np.ldexp(h, -unit // 4), False)
    assert np.array_equal(scaled_codes, codes)
    assert np.array_equal(scaled, np.ldexp(scale, unit))
    _, codes, scale, *_ = quantize_nvfp4(w, h, np.float32(0.01))
    _, scaled_codes, scaled, *_ = quantize_nvfp4(
        np.ldexp(w, unit), np.ldexp(h, -unit // 4), np.ldexp(np.float32(0.01), unit)
    )
    assert np.array_equal(scaled_codes, codes)
    assert np.array_equal(scaled, scale)


def test_groups_of_zeros_and_weights_of_zero():
    w, one = matrix(5, 128), np.ones(128, np.float32)
    h = weights_of(w)
    h[64:] = 0  # counts as one everywhere
    _, codes, scale, *_ = quantize_int4(w, h, False)
    _, one_codes, one_scale, *_ = quantize_int4(w, one, False)
    assert np.array_equal(scale[:, 1], one_scale[:, 1])
    assert np.array_equal(codes[:, 32:], one_codes[:, 32:])
    _, codes, scale, *_ = quantize_nvfp4(w, h, np.float32(0.01))
    _, one_codes, one_scale, *_ = quantize_nvfp4(w, one, np.float32(0.01))
    assert np.array_equal(scale[:, 4:], one_scale[:, 4:])
    assert np.array_equal(codes[:, 32:], one_codes[:, 32:])
    w[2, 64:] = 0
    _, codes, scale, *_ = quantize_int4(w, h, False)
    assert scale[2, 1] == 1
    assert (codes[2, 32:] == 0x88).all()
    _, codes, scale, *_ = quantize_nvfp4(w, h, np.float32(0.01))
    assert (scale[2, 4:] == 0x38).all()
    assert not codes[2, 32:].any()


def quantize_nvfp4(w, h, scale_2):
    (rows, inputs), stats = w.shape, (np.empty(len(w)), np.empty(len(w)))
    codes, scale = np.empty((rows, inputs // 2), np.uint8), np.empty((rows, inputs // 16), np.uint8)
    return nvfp4.quantize_nvfp4(w, scale_2, nvfp4.TAILS, codes, scale, *stats, h), codes, scale, *stats


def test_nvfp4_is_as_good_as_trying_every_code():
    w = matrix(40, 64)
    h, scale_2 = weights_of(w), nvfp4.nvfp4_scale_2(float(np.abs(w).max()))
    bad, codes, scale, sq_err, sq_norm = quantize_nvfp4(w, h, scale_2)
    assert bad == -1
    found = best = plain = 0.0
    for r, g in np.ndindex(scale.shape):
        part, weight = w[r, g * 16 : g * 16 + 16], h[g * 16 : g * 16 + 16]
        steps = {c: np.float32(oracle_fp4.e4m3(c)) * scale_2 for c in range(1, 127)}
        values = {c: np.array(oracle_fp4.E2M1) * float(s) for c, s in steps.items()}
        nearest = {c: v[np.abs(np.abs(part)[:, None] - v).argmin(1)] for c, v in values.items()}
        losses = {c: loss(part, np.sign(part) * v, weight) for c, v in nearest.items()}
        mine = losses[int(scale[r, g])]
        plain_here = losses[oracle_fp4.nvfp4_plain_scale(part, scale_2)]
        assert mine <= plain_here * (1 + 1e-5)
        assert codes[r, 8 * g : 8 * g + 8].tolist() == oracle_fp4.pack(
            oracle_fp4.codes_of(part, steps[int(scale[r, g])])
        )
        found += mine
        best += min(losses.values())
        plain += plain_here
    assert found <= 1.0001 * best
    assert found <= 0.8 * plain
    w_hat = microscale.dequantize_nvfp4(torch.from_numpy(codes), torch.from_numpy(scale), float(scale_2)).numpy()
    assert np.isclose(sq_err.sum(), ((w.astype(np.float64) - w_hat) ** 2).sum(), rtol=1e-6)
    assert np.isclose(sq_norm.sum(), (w.astype(np.float64) ** 2).sum(), rtol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad):
    w = matrix(10, 64)
    h = weights_of(w)
    w[3, 5] = w[7, 1] = bad
    assert quantize_int4(w, h, False)[0] == 3
    assert quantize_nvfp4(w, h, np.float32(0.01))[0] == 3


def test_columns_of_one_kurtosis_leave_gaussian_weights_almost_as_good_as_the_search():
    w = np.random.default_rng(1).standard_normal((256, 512)).astype(np.float32)
    lost = quantize_int4(w, weights_of(w), False)[3].sum()
    codes, bits, stats = np.empty((256, 256), np.uint8), np.empty((256, 8), np.uint16), (np.empty(256), np.empty(256))
    assert int4.quantize_int4(w, 64, 2, False, codes, bits, *stats) == -1
    assert lost <= 1.05 * stats[0].sum()
