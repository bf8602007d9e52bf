"""The rules of a KV scale against numbers worked out in float64, and every reason to refuse one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.kv_scales import smallest_covering, stored_e4m3
from quantkit.calibrate.kv import KVStats
from quantkit.calibrate.kv_records import LayerKV, Seen
from quantkit.calibrate.kv_scales import Shares, amax_scale, choose_scales, mse_scale, percentile_scale, shares
from quantkit.calibrate.log2_histogram import Histogram, count
from quantkit.kernels.errors import QuantkitError


def seen_of(x: np.ndarray) -> Seen:
    """Of one head, whose pairs reach 1.25 of its amax."""
    amax = float(np.abs(x).max())
    return Seen((amax,), (1.25 * amax,), Histogram.of(count(torch.from_numpy(x.astype(np.float32)))))


def sink_keys(tokens: int = 2000) -> np.ndarray:
    """Keys of 64 channels: two strong ones, 28 weak ones, and a sink token that stands out. float32 values."""
    x = np.random.default_rng(0).standard_normal((tokens, 64))
    x[:, :2] *= 25
    x[:, 2:30] *= 0.02
    x[0, :2] = 120
    return x.astype(np.float32).astype(np.float64)


def layers(n: int = 4, tokens: int = 5000) -> tuple[LayerKV, ...]:
    """Layers of two heads that differ from one another."""
    k = seen_of(np.array([4.0, -2.0, 0.5]))
    two = Seen((4.0, 2.0), (5.0, 2.5), k.histogram)
    out = []
    for i in range(n):
        keys = replace(two, head_amax=(4.0 + i, 2.0), head_bound=(5.0 + i, 2.5))
        out.append(LayerKV(i, tokens, 0, 512, keys, replace(two, head_amax=(1.0, 0.5 + i), head_bound=(1.0, 0.5 + i))))
    return tuple(out)


# ---- rules ----


@given(st.floats(width=32, min_value=2.0**-100, max_value=2.0**100), st.sampled_from([1.0, 1.25, 2.0]))
def test_amax_is_never_clipped_and_the_scale_is_the_next_float32(amax, headroom):
    scale = amax_scale(amax, headroom)
    assert float(np.float32(scale)) == scale
    assert 448 * scale >= amax
    below = float(np.nextafter(np.float32(scale), np.float32(0)))
    assert below < amax * headroom / 448 <= scale


def test_the_usual_definition_is_met():
    """amax / 448 as other tools store it, where float32 holds it; else the neighbour above."""
    assert amax_scale(12.5, 1.0) in (
        float(np.float32(12.5 / 448)),
        float(np.nextafter(np.float32(12.5 / 448), np.float32(1))),
    )
    assert amax_scale(448.0, 1.0) == 1.0
    assert amax_scale(448.0) == 1.25


def test_smallest_and_empty():
    assert amax_scale(0.0) == 1.0
    assert amax_scale(1e-44) == float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("share", [0.99, 0.999, 0.9999])
def test_percentile(share):
    x = sink_keys()
    true = smallest_covering(x, share) / 448
    assert true < percentile_scale(seen_of(x), 1.0, share) <= true * (1 + 1 / 32) * (1 + 2**-23)


@pytest.mark.parametrize("scale", [0.05, 0.268, 0.3, 1.0, 16.0])
def test_the_error_of_a_scale_is_that_of_its_values(scale):
    x = sink_keys()
    true = np.mean((stored_e4m3(x, scale) - x) ** 2)
    assert seen_of(x).histogram.e4m3_error(scale) == pytest.approx(true, rel=0.03)


def test_mse_is_the_best_of_its_candidates():
    x = sink_keys()
    found = mse_scale(seen_of(x))
    top = np.abs(x).max() / 448
    errors = [np.mean((stored_e4m3(x, top * 2 ** (-i / 16)) - x) ** 2) for i in range(65)]
    assert np.mean((stored_e4m3(x, found) - x) ** 2) <= 1.03 * min(errors)
    assert mse_scale(Seen((0.0,), (0.0,), Histogram(5, 0, ()))) == 1.0


def test_why_amax_with_headroom_and_no_percentile():
    """What the docstring says: headroom is free, percentiles clip sinks, and 16 loses the weak channels."""
    x = sink_keys(tokens=20000)
    size = np.mean(x**2)

    def error(scale: float) -> float:
        return float(np.mean((stored_e4m3(x, scale) - x) ** 2) / size)

    seen = seen_of(x)
    plain = error(amax_scale(seen.amax, 1.0))
    assert error(amax_scale(seen.amax, 1.25)) < 1.1 * plain
    assert error(amax_scale(seen.amax, 2.0)) < 1.1 * plain
    assert error(percentile_scale(seen, 1.0, 0.999)) > 5 * plain
    weak = x[:, 2:30]
    lost = [np.mean((stored_e4m3(weak, s) - weak) ** 2) / np.mean(weak**2) for s in (amax_scale(seen.amax), 16.0)]
    assert lost[1] > 100 * lost[0]


# ---- shares ----


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 64.0])
def test_shares_are_close_above_the_true_ones(scale):
    x = sink_keys()
    size = np.abs(x)
    found = shares(seen_of(x), scale)
    assert np.mean((size < scale / 64) & (size > 0)) <= found.underflow <= np.mean(size < scale / 64 * (1 + 1 / 32))
    assert np.mean(size > 448 * scale) <= found.clipped <= np.mean(size > 448 * scale / (1 + 1 / 32))


def test_nothing_seen_is_clipped_by_amax():
    seen = seen_of(sink_keys())
    assert shares(seen, amax_scale(seen.amax, 1.0)).clipped == 0.0
    assert shares(seen, float(np.nextafter(np.float32(amax_scale(seen.amax, 1.0)), np.float32(0)))).clipped > 0.0


# ---- all layers ----


def test_scales_of_layers_and_heads():
    chosen = choose_scales(layers(), headroom=1.25, per_head=True)
    assert list(chosen) == [0, 1, 2, 3]
    s = chosen[2]
    assert (s.k, s.v) == (amax_scale(6.0), amax_scale(2.5))
    assert (s.head_k, s.head_v) == ((amax_scale(6.0), amax_scale(2.0)), (amax_scale(1.0), amax_scale(2.5)))
    assert s.k == max(s.head_k)
    assert choose_scales(layers())[2].head_k == ()


def test_the_rope_rule_covers_the_bound_of_keys():
    chosen = choose_scales(layers(), "rope", 1.0, per_head=True)
    assert (chosen[1].k, chosen[1].head_k) == (amax_scale(6.0, 1.0), (amax_scale(6.0, 1.0), amax_scale(2.5, 1.0)))
    assert chosen[1].v == amax_scale(1.5, 1.0)


def test_other_rules_use_their_function():
    x = sink_keys()
    both = [LayerKV(i, 9000, 0, 9, seen_of(x * (1 + i)), seen_of(x[1:] * (1 + i))) for i in range(4)]
    percentile = choose_scales(both, "percentile", 1.5, share=0.99)
    mse = choose_scales(both, "mse")
    for layer in both:
        assert percentile[layer.layer].k == percentile_scale(layer.k, 1.5, 0.99)
        assert mse[layer.layer].v == mse_scale(layer.v)
        assert percentile[layer.layer].k_shares == shares(layer.k, percentile[layer.layer].k)


def test_one_scale_for_both_parts_of_a_latent_row():
    stats = KVStats(rank=8)
    for n in range(4):
        row = torch.randn(5000, 12, generator=torch.Generator().manual_seed(n))
        row[:, :8] *= 0.1  # the roped key is the larger part
        stats.latent(n, row)
    for layer, (number, s) in zip(stats.finish(), choose_scales(stats.finish()).items(), strict=True):
        assert layer.layer == number
        assert s.k == s.v == amax_scale(layer.pe.amax)
        assert s.k_shares == s.v_shares == shares(layer.keys, s.k)
        assert s.k_shares.underflow >= shares(layer.pe, s.k).underflow


def test_a_head_of_zeros_takes_the_scale_of_its_layer():
    data = [replace(x, k=replace(x.k, head_amax=(x.k.amax, 0.0))) for x in layers()]
    chosen = choose_scales(data, per_head=True)
    assert chosen[0].head_k == (chosen[0].k, chosen[0].k)


def test_a_layer_of_zeros_gets_one():
    zero = Seen((0.0, 0.0), (0.0, 0.0), Histogram(10, 0, ()))
    data = [*layers(), replace(layers()[0], layer=9, v=zero)]
    assert choose_scales(data)[9].v == 1.0
    assert choose_scales(data)[9].v_shares == Shares(0.0, 0.0)


# ---- refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "minmax"}, "unknown rule"),
        ({"headroom": 0.9}, "headroom"),
        ({"headroom": float("nan")}, "headroom"),
        ({"headroom": float("inf")}, "headroom"),
        ({"rule": "percentile", "share": 99.99}, "no such percentile"),
        ({"rule": "percentile", "share": 0.0}, "no such percentile"),
        ({"rule": "mse", "per_head": True}, "per head"),
        ({"rule": "percentile", "per_head": True}, "per head"),
        ({"min_tokens": 5001}, "too short"),
    ],
)
def test_requests_out_of_range_are_refused(options, message):
    with pytest.raises(QuantkitError, match=message):
        choose_scales(layers(), **options)


def with_k(layer: LayerKV, **change) -> LayerKV:
    return replace(layer, k=replace(layer.k, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: replace(x, tokens=4095), "too short"),
        (lambda x: replace(x, tokens=4994, dropped=6), "NaN or infinity"),
        (lambda x: replace(x, tokens=0, dropped=5000), "NaN or infinity"),
        (lambda x: with_k(x, head_amax=(float("inf"), 1.0)), "not finite"),
        (lambda x: with_k(x, head_bound=(float("nan"), 1.0)), "not finite"),
        (lambda x: with_k(x, head_amax=(-1.0, 1.0)), "not finite"),
    ],
)
def test_statistics_that_no_scale_can_rest_on(change, message):
    data = [*layers()[:3], change(layers()[3])]
    with pytest.raises(QuantkitError, match=message) as error:
        choose_scales(data)
    assert "layer 3" in str(error.value)


def test_a_few_bad_tokens_are_allowed():
    assert len(choose_scales([replace(x, tokens=4995, dropped=5) for x in layers()])) == 4


def test_all_reasons_at_once():
    data = [replace(layers()[0], tokens=1), *layers()[1:3], with_k(layers()[3], head_amax=(float("nan"), 1.0))]
    with pytest.raises(QuantkitError, match="2 errors"):
        choose_scales(data)


def test_no_layers_are_refused():
    with pytest.raises(QuantkitError, match="no keys or values"):
        choose_scales(())


@pytest.mark.parametrize(
    ("same", "of", "refused"), [(2, 4, False), (3, 4, True), (2, 3, True), (2, 2, False), (1, 1, False)]
)
@pytest.mark.parametrize("part", ["k", "v"])
def test_more_than_half_of_the_layers_with_one_scale(part, same, of, refused):
    data = list(layers(of))
    for i in range(same):
        data[i] = replace(data[i], **{part: replace(data[i].k, head_amax=(448.0, 1.0))})
    if refused:
        with pytest.raises(QuantkitError, match=f"more than half of the layers have the same {part}_scale"):
            choose_scales(data)
    else:
        assert len(choose_scales(data)) == of


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_values_that_were_seen_come_back_within_a_step(seed):
    """End to end: what the statistics saw, cached under the chosen scale, errs by half a step of E4M3 at most."""
    x = np.random.default_rng(seed).standard_normal((5, 2, 4)) * np.exp2(np.random.default_rng(seed).integers(-10, 10))
    k = torch.from_numpy(x.astype(np.float32))
    stats = KVStats()
    stats.update(0, k, k)
    s = choose_scales(stats.finish(), min_tokens=1)[0]
    exact = k.double().numpy()
    back = stored_e4m3(exact, s.k)
    assert (np.abs(back - exact) <= np.maximum(np.abs(exact) / 16, s.k * 2.0**-10) * (1 + 1e-12)).all()
