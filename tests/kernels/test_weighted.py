"""Scales with a weight on each input: as good as an exhaustive search, stored as the format stores them."""

import numpy as np
import pytest
from oracle import int4 as oracle_int4
from oracle import microscale as oracle_fp4
from quantkit.kernels.cpu import int4, weighted


def groups(rows, inputs, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.standard_t(4, (rows, inputs)).astype(np.float32)
    h = np.exp(2 * rng.standard_normal(inputs)).astype(np.float32)
    return w, h


def weighted_loss(w, h, scale, zero=0):
    w_hat = (oracle_int4.codes(w, scale, zero) - zero) * np.float64(scale)
    return float((h * (w.astype(np.float64) - w_hat) ** 2).sum())


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("group", [32, 64, 192])
def test_int4_is_as_good_as_trying_every_scale(group, kind):
    w, h = groups(12, 192)
    scale = np.empty((12, 192 // group), np.float32)
    weighted.int4_scales(w, h, group, kind == "f16", scale)
    found = exhaustive = plain = 0.0
    for r in range(12):
        for g in range(scale.shape[1]):
            part, weight = w[r, g * group : (g + 1) * group], h[g * group : (g + 1) * group]
            assert scale[r, g] == oracle_int4.stored_scale(scale[r, g], kind)
            start = np.abs(part).max() / np.float32(8)
            tries = [s * start * np.float32(t) for t in np.linspace(1.2, 0.3, 361) for s in (1, -1)]
            found += weighted_loss(part, weight, scale[r, g])
            exhaustive += min(weighted_loss(part, weight, oracle_int4.stored_scale(s, kind)) for s in tries)
            plain += weighted_loss(part, weight, oracle_int4.plain_scale(part, kind))
    assert found <= 1.01 * exhaustive
    assert found <= 0.8 * plain


def test_int4_beats_the_unweighted_search_where_inputs_differ_and_equals_it_where_not():
    w, h = groups(20, 256)
    stats = np.empty(20), np.empty(20)
    codes, bits = np.empty((20, 128), np.uint8), np.empty((20, 4), np.uint16)
    assert int4.quantize_int4(w, 64, 2, False, codes, bits, *stats) == -1
    searched = (bits.astype(np.uint32) << 16).view(np.float32)
    for weights, bound in ((h, 0.9), (np.ones_like(h), 1.003)):
        scale = np.empty((20, 4), np.float32)
        weighted.int4_scales(w, weights, 64, False, scale)
        losses = [
            sum(
                weighted_loss(w[r, g * 64 : g * 64 + 64], weights[g * 64 : g * 64 + 64], s[r, g])
                for r in range(20)
                for g in range(4)
            )
            for s in (scale, searched)
        ]
        assert losses[0] <= bound * losses[1]


def test_int4_with_zero_points_takes_the_best_range():
    w, h = groups(12, 128)
    w += np.float32(0.7)
    scale, zero = np.empty((12, 2), np.float32), np.empty((12, 2), np.int8)
    weighted.int4_scales_asym(w, h, 64, False, scale, zero)
    for r in range(12):
        for g in range(2):
            part, weight = w[r, g * 64 : g * 64 + 64], h[g * 64 : g * 64 + 64]
            ranges = [oracle_int4.asym_parameters(part * np.float32(1 - 0.05 * k), "bf16") for k in range(10)]
            best = min(weighted_loss(part, weight, s, z) for s, z in ranges)
            assert weighted_loss(part, weight, scale[r, g], int(zero[r, g])) <= 1.001 * best


def test_nvfp4_is_as_good_as_trying_every_code():
    w, h = groups(12, 64)
    scale_2 = np.float32(np.abs(w).max() / 2688)
    code = np.empty((12, 4), np.uint8)
    weighted.nvfp4_scales(w, h, scale_2, code)
    found = best = plain = 0.0
    for r in range(12):
        for g in range(4):
            part, weight = w[r, g * 16 : g * 16 + 16], h[g * 16 : g * 16 + 16]
            losses = {c: fp4_loss(part, weight, np.float32(oracle_fp4.e4m3(c)) * scale_2) for c in range(1, 127)}
            found += losses[int(code[r, g])]
            best += min(losses.values())
            plain += losses[oracle_fp4.nvfp4_plain_scale(part, scale_2)]
    assert found <= 1.01 * best
    assert found <= 0.8 * plain


def test_mxfp4_is_as_good_as_trying_every_exponent():
    w, h = groups(12, 96)
    code = np.empty((12, 3), np.uint8)
    weighted.mxfp4_scales(w, h, code)
    for r in range(12):
        for g in range(3):
            part, weight = w[r, g * 32 : g * 32 + 32], h[g * 32 : g * 32 + 32]
            best = min(fp4_loss(part, weight, np.float32(2.0**e)) for e in range(-20, 20))
            assert fp4_loss(part, weight, np.float32(2.0 ** (int(code[r, g]) - 127))) <= 1.0001 * best


def fp4_loss(w, h, scale):
    values = np.array(oracle_fp4.E2M1) * float(scale)
    return float((h * np.abs(w.astype(np.float64)[:, None] - values).min(1) ** 2).sum())


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e30])
def test_tiny_and_huge_weights_and_weightings_are_searched_alike(size):
    w, h = groups(4, 64)
    reference, scaled = np.empty((4, 2), np.float32), np.empty((4, 2), np.float32)
    weighted.int4_scales(w, h, 32, False, reference)
    factor = np.float32(2.0 ** round(np.log2(size)))
    weighted.int4_scales(w * factor, h * (np.float32(1) / factor), 32, False, scaled)
    assert np.array_equal(scaled, np.maximum(np.abs(reference * factor), 2.0**-126) * np.sign(reference))


def test_zeros_get_the_scale_of_a_group_of_zeros():
    w, h = np.zeros((2, 64), np.float32), np.zeros(64, np.float32)
    scale, zero, code = np.empty((2, 2), np.float32), np.empty((2, 2), np.int8), np.empty((2, 4), np.uint8)
    weighted.int4_scales(w, h, 32, False, scale)
    assert (scale == 1).all()
    weighted.int4_scales_asym(w, h, 32, False, scale, zero)
    assert (scale == 1).all()
    assert (zero == -8).all()
    weighted.nvfp4_scales(w, h, np.float32(1), code)
    assert (code == 0x38).all()
    block = np.empty((2, 2), np.uint8)
    weighted.mxfp4_scales(w, h, block)
    assert (block == 127).all()
    w[:] = np.random.default_rng(0).standard_normal(w.shape)  # weightings of zero count as equal ones
    weighted.int4_scales(w, h, 32, False, scale)
    expected = np.empty_like(scale)
    weighted.int4_scales(w, np.ones(64, np.float32), 32, False, expected)
    assert np.array_equal(scale, expected)
