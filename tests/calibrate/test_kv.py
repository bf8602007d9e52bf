"""KV-cache statistics: exact where they say so, on the safe side elsewhere, and the same however the text is cut."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.kv_scales import longest_pair, smallest_covering
from quantkit.calibrate.kv import KVStats, rope_of
from quantkit.calibrate.kv_records import LayerKV
from quantkit.calibrate.kv_scan import Rope, scan, scan_torch
from quantkit.calibrate.log2_histogram import BINS, Histogram, count
from quantkit.kernels.errors import QuantkitError

H, Q, D = 2, 6, 8


def text(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Keys with strong channels, values and queries of a text."""
    draw = torch.Generator().manual_seed(seed)
    k, v, q = (torch.randn(tokens, heads, D, generator=draw) for heads in (H, H, Q))
    k[..., 1] *= 30
    return [x.to(dtype) for x in (k, v * 0.1, q)]


def stats(texts, **options) -> KVStats:
    out = KVStats(**options)
    for layer, k, v, q in texts:
        out.update(layer, k, v, q)
    return out


# ---- the histogram ----


SPREAD = np.random.default_rng(7).standard_normal(4001) * np.exp2(np.random.default_rng(8).uniform(-30, 20, 4001))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 0.9999, 1.0])
def test_percentiles_are_at_most_a_bin_above_the_true_ones(share):
    x = np.concatenate([SPREAD, np.zeros(99)]).astype(np.float32)
    true = smallest_covering(x.astype(np.float64), share)
    assert true < Histogram.of(count(torch.from_numpy(x))).percentile(share) <= true * (1 + 1 / 32)


@pytest.mark.parametrize("limit", [1e-6, 2.0**-6, 0.3, 1.0, 5e4])
def test_shares_beyond_a_limit_count_too_much_by_less_than_a_bin(limit):
    x = np.concatenate([SPREAD, np.zeros(99)]).astype(np.float32)
    found = Histogram.of(count(torch.from_numpy(x)))
    size = np.abs(x.astype(np.float64))
    below, below_more = (np.mean((size > 0) & (size < m)) for m in (limit, limit * (1 + 1 / 32)))
    above, above_more = (np.mean(size > m) for m in (limit, limit / (1 + 1 / 32)))
    assert below <= found.share_below(limit) <= below_more
    assert above <= found.share_above(limit) <= above_more


def test_edges_of_bins_are_bit_patterns():
    one_up = np.nextafter(np.float32(1), np.float32(2))
    edge = np.float32(1 + 1 / 32)
    x = torch.tensor([1.0, one_up, np.nextafter(edge, np.float32(1)), edge, -1.0, 0.0, -0.0])
    found = Histogram.of(count(x))
    assert (found.zeros, found.counts, found.total) == (2, (4, 1), 7)
    assert found.first == 40 * 32


def test_magnitudes_off_both_ends_stay_counted():
    x = torch.tensor([1e-45, 2.0**-41, 2.0**-40, 2.0**40, 3e38])
    counted = count(x)
    assert (counted[1], counted[BINS], counted.sum()) == (3, 2, 5)
    found = Histogram.of(counted)
    assert found.percentile(1.0) == np.inf
    assert found.share_below(1e-44) == 3 / 5  # of the first bin it is not known where they are
    assert found.share_above(1e38) == 2 / 5


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.data())
def test_histograms_of_parts_add_up(values, data):
    cut = data.draw(st.integers(0, len(values)))
    a, b, whole = (Histogram.of(count(torch.tensor(x))) for x in (values[:cut], values[cut:], values))
    assert a.merge(b) == whole
    assert whole.total == len(values)
    assert Histogram.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_no_values_at_all():
    none = Histogram.of(count(torch.zeros(0)))
    assert (none.total, none.percentile(0.99), none.share_below(1.0), none.e4m3_error(1.0)) == (0, 0.0, 0.0, 0.0)


# ---- one pass ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [None, 4, 8, 80])
def test_amax_and_rope_bound_of_every_head(width, interleaved):
    k, v, _ = text(50, 0)
    (layer,) = stats([(3, k, v, None)], rope=Rope(width, interleaved)).finish()
    exact = k.double().numpy()
    for h in range(H):
        assert layer.k.head_amax[h] == np.abs(exact[:, h]).max()
        assert layer.v.head_amax[h] == layer.v.head_bound[h] == np.abs(v.double().numpy()[:, h]).max()
        bound = longest_pair(exact[:, h], min(width or D, D), interleaved)
        assert layer.k.head_bound[h] == pytest.approx(bound, rel=1e-15)
    assert layer.k.amax == max(layer.k.head_amax)
    assert layer.k.histogram == Histogram.of(count(k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated", [0, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_twins_find_the_same(dtype, rotated, interleaved):
    k = text(33, 1, dtype)[0]
    k[0, 0, 0], k[1, 1, 2], k[2, 0, 5] = 0.0, 1e-42, -0.0
    a = scan(k, Rope(rotated, interleaved) if rotated else None)
    b = scan_torch(k.float(), rotated, interleaved)
    assert np.array_equal(a.head_amax, b.head_amax)
    assert np.array_equal(a.counts, b.counts)
    assert np.allclose(a.head_bound, b.head_bound, rtol=1e-15, atol=0)


def test_the_bound_holds_at_every_position():
    """A key turned to any position never passes the bound that one position gave, while it does pass its amax."""
    k, v, _ = text(4, 5)
    half = D // 2
    angle = torch.outer(torch.arange(500.0), 10000.0 ** (-torch.arange(half) / half))
    cos, sin = (f(angle).tile(1, 2)[:, None, None, :] for f in (torch.cos, torch.sin))
    turned = k * cos + torch.cat([-k[..., half:], k[..., :half]], -1) * sin
    (layer,) = stats([(0, k, v, None)], rope=Rope()).finish()
    largest = float(turned.abs().max())
    assert layer.k.amax < largest <= layer.k.bound * (1 + 1e-6)
    assert layer.k.bound <= np.sqrt(2) * layer.k.amax


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), min_size=1, max_size=6), st.integers(0, 6)
)
def test_merged_statistics_are_those_of_one_pass(calls, cut):
    texts = []
    for seed, (layer, tokens, bad) in enumerate(calls):
        k, v, q = text(tokens, seed)
        if bad and tokens:
            k[tokens // 2, 0, 1] = torch.nan
        texts.append((layer, k, v, q))
    whole, first, second = (stats(t, rope=Rope(), sample=5) for t in (texts, texts[:cut], texts[cut:]))
    first.merge(second)
    assert first.finish() == whole.finish()
    samples = whole.samples()
    assert first.samples().keys() == samples.keys()
    assert all(torch.equal(first.samples()[name], x) for name, x in samples.items())


def test_tokens_with_nan_or_infinity_are_left_out_whole():
    k, v, q = text(12, 2)
    good = [i for i in range(12) if i not in (1, 4, 7)]
    clean = stats([(0, k[good], v[good], q[good])]).finish()[0]
    k[1, 0, 3], k[4, 1, 0], v[7, 1, 1] = torch.nan, torch.inf, -torch.inf
    q[0, 0, 0] = torch.nan  # queries are only sampled
    seen = stats([(0, k, v, q)], sample=4)
    (layer,) = seen.finish()
    assert (layer.tokens, layer.dropped, layer.longest) == (9, 3, 12)
    assert (layer.k, layer.v) == (clean.k, clean.v)
    assert torch.equal(seen.samples()["kv.0.k"], k[[2, 3, 5, 6]].bfloat16())
    assert all(x.isfinite().all() for x in seen.samples().values())


def test_a_text_of_nothing_but_nan():
    k, v, q = text(3, 2)
    seen = stats([(0, k * torch.nan, v, q)])
    assert (seen.finish()[0].tokens, seen.finish()[0].dropped, seen.finish()[0].k.amax) == (0, 3, 0.0)
    assert seen.samples() == {}


def test_the_sample_is_the_start_of_the_first_text_long_enough():
    texts = [(5, *text(n, n)) for n in (3, 9, 20, 4)]
    seen = stats(texts, sample=8).samples()
    assert list(seen) == ["kv.5.k", "kv.5.v", "kv.5.q"]
    for name, x in zip("kvq", texts[1][1:], strict=True):
        assert torch.equal(seen[f"kv.5.{name}"], x[:8].bfloat16())
    short = stats(texts[:1], sample=8).samples()
    assert len(short["kv.5.k"]) == 3


def test_memory_does_not_grow_with_the_text():
    def size(n: int) -> int:
        seen = stats([(0, *text(64, 0))] * n, sample=16)
        return sum(x.nbytes for x in seen.samples().values()) + len(json.dumps(seen.finish()[0].to_json()))

    assert size(50) - size(1) < 4000  # digits of counts


# ---- MLA ----


def test_latent_rows_are_measured_in_two_parts():
    row = torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    seen = KVStats(rope=Rope(4, interleaved=True), rank=8)
    seen.latent(1, row)
    (layer,) = seen.finish()
    assert layer.latent and layer.pe is not None
    exact = row.double().numpy()
    assert layer.k.head_amax == layer.k.head_bound == (np.abs(exact[:, :8]).max(),)
    assert layer.pe.head_amax == (np.abs(exact[:, 8:]).max(),)
    assert layer.pe.bound == pytest.approx(longest_pair(exact[:, 8:], 4, True), rel=1e-15)
    assert layer.keys.amax == np.abs(exact).max()
    assert layer.keys.bound == max(layer.k.bound, layer.pe.bound)
    assert layer.keys.histogram == Histogram.of(count(row))
    assert torch.equal(seen.samples()["kv.1.latent"], row.bfloat16())


def test_latent_rows_of_unknown_rank_are_measured_whole():
    row = torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    seen = KVStats()
    seen.latent(1, row)
    (layer,) = seen.finish()
    assert layer.pe is None and layer.keys is layer.k
    assert layer.k.histogram == Histogram.of(count(row))


# ---- refused ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, k, v, q: s.update(0, k[0], v, q), "do not fit together"),
        (lambda s, k, v, q: s.update(0, k, v[1:], q), "do not fit together"),
        (lambda s, k, v, q: s.update(0, k, v[:, :1], q), "do not fit together"),
        (lambda s, k, v, q: s.update(0, k, v, q[:, :5]), "multiple of H"),
        (lambda s, k, v, q: s.update(1, k[..., :4], v, q), r"k \[T, 2, 8\]"),
        (lambda s, k, v, q: s.update(1, k, v), "shapes of earlier texts"),
        (lambda s, k, v, q: s.latent(1, k[:, 0]), "shapes of earlier texts"),
        (lambda s, k, v, q: s.latent(0, k), "do not fit together"),
        (lambda s, k, v, q: s.update(0, k[..., :7], v, q), "odd number"),
        (lambda s, k, v, q: s.merge(KVStats()), "different settings"),
        (lambda s, k, v, q: s.merge(stats([(1, k[:, :1], v[:, :1], q)], rope=Rope())), "different shapes"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, message):
    k, v, q = text(6, 0)
    seen = stats([(1, k, v, q)], rope=Rope())
    with pytest.raises(QuantkitError, match=message):
        call(seen, k, v, q)


def test_a_row_must_be_longer_than_its_rank():
    with pytest.raises(QuantkitError, match="do not fit"):
        KVStats(rank=12).latent(0, torch.zeros(3, 12))


# ---- records ----


def test_records_pass_through_json_unchanged():
    seen = stats([(n, *text(30, n)) for n in range(2)], rope=Rope())
    latent = KVStats(rank=4, rope=Rope())
    latent.latent(2, text(9, 0)[0][:, 0])
    layers = (*seen.finish(), *latent.finish())
    assert tuple(LayerKV.from_json(json.loads(json.dumps(x.to_json()))) for x in layers) == layers


@pytest.mark.parametrize(
    "broken",
    [
        lambda d: d.pop("k"),
        lambda d: d.pop("tokens"),
        lambda d: d.update(dropped=-1),
        lambda d: d.update(layer=True),
        lambda d: d["k"].update(amax=[]),
        lambda d: d["k"].update(rope_bound=[1.0]),
        lambda d: d["v"].update(counts=[1.5]),
        lambda d: d["v"].update(first=2560),
        lambda d: d.update(v=None),
        lambda d: d["k"].update(amax=["x", 1.0]),
    ],
)
def test_broken_records_are_refused(broken):
    data = stats([(0, *text(30, 0))]).finish()[0].to_json()
    broken(data)
    with pytest.raises(QuantkitError, match="cannot be read"):
        LayerKV.from_json(data)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"model_type": "llama", "head_dim": 64}, Rope()),
        ({"model_type": "glm4", "head_dim": 128, "partial_rotary_factor": 0.5}, Rope(64, interleaved=True)),
        (
            {
                "model_type": "phi",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            Rope(8),
        ),
        ({"model_type": "qwen3", "partial_rotary_factor": 1.0}, Rope()),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "rope_interleave": True}, Rope()),
        ({"model_type": "cohere2"}, Rope(None, interleaved=True)),
    ],
)
def test_pairing_of_a_configuration(config, rope):
    assert rope_of(config) == rope
