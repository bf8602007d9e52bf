"""Paged attention in Triton against float64, on the same bits; caches are poisoned where no request owns a slot."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_caches import POISON, assert_close, exact, filled, filled_latent, paged, problem, slots_of, torch_of
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gpu import attention as gpu
from quantkit.kernels.kv import Batch

FORMATS = ("bf16", "f16", "e4m3", "e5m2", "nvfp4", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(q, cache, batch, device, **options):
    if options.get("sinks_H") is not None:
        options["sinks_H"] = torch.from_numpy(options["sinks_H"]).to(device)
    q = torch.from_numpy(q) if isinstance(q, np.ndarray) else q
    return gpu.attend(q.to(device), torch_of(cache, device), torch_of(batch, device), **options).cpu().numpy()


# slots of a page, KV heads, query heads each, widths of K and V, lengths, queries
SHAPES = [
    (16, 1, 4, 64, 64, [300], [1]),
    (1, 2, 1, 64, 32, [33, 5], [1, 1]),
    (64, 1, 16, 128, 128, [200], [3]),
    (16, 2, 3, 32, 64, [40, 0, 17, 64, 1], [7, 0, 1, 30, 1]),
    (7, 1, 5, 96, 160, [90], [21]),
]
ODD = [
    (16, 2, 20, 80, 80, [77], [2]),
    (16, 1, 2, 1, 1, [19], [4]),
    (3, 2, 6, 17, 100, [31], [5]),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(format, shape, device):
    slots, heads, group, k_dim, v_dim, lengths, queries = shape
    q, cache, batch = problem(
        1, format, slots=slots, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim, lengths=lengths, queries=queries
    )
    given = torch.from_numpy(q).to(DTYPES[(FORMATS.index(format) + SHAPES.index(shape)) % 3])
    got = attend(given, cache, batch, device, softmax_scale=k_dim**-0.5)
    assert_close(got, given.float().numpy(), cache, batch, k_dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_dtypes_of_queries(format, dtype, device):
    q, cache, batch = problem(16, format, slots=16, heads=1, group=2, k_dim=32, v_dim=32, lengths=[50], queries=[9])
    given = torch.from_numpy(q).to(dtype)
    got = attend(given, cache, batch, device, softmax_scale=0.2)
    assert_close(got, given.float().numpy(), cache, batch, 0.2)


@pytest.mark.parametrize("format", ["bf16", "e4m3"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_widths_that_are_no_power_of_two(format, shape, device):
    slots, heads, group, k_dim, v_dim, lengths, queries = shape
    q, cache, batch = problem(
        2, format, slots=slots, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim, lengths=lengths, queries=queries
    )
    assert_close(attend(q, cache, batch, device, softmax_scale=0.3), q, cache, batch, 0.3)


@pytest.mark.parametrize("format", ["f16", "e4m3", "nvfp4"])
@pytest.mark.parametrize(
    ("window", "with_sinks"), [(1, False), (8, True), (64, False), (65, True), (10**12, True), (0, True)]
)
def test_window_and_sinks(format, window, with_sinks, device):
    q, cache, batch = problem(
        3, format, slots=16, heads=1, group=4, k_dim=32, v_dim=32, lengths=[150, 7, 80], queries=[1, 3, 20]
    )
    sinks = np.random.default_rng(0).standard_normal(4).astype(np.float32) * 3 if with_sinks else None
    got = attend(q, cache, batch, device, softmax_scale=0.2, window=window, sinks_H=sinks)
    assert_close(got, q, cache, batch, 0.2, window, sinks)


def test_pages_before_the_window_need_not_exist(device):
    q, cache, batch = problem(4, "e4m3", slots=16, heads=1, group=2, k_dim=32, v_dim=32, lengths=[200], queries=[3])
    table = batch.block_table.copy()
    table[0, :11] = (
        2**31 - 1
    )  # the first query stands at 197 and sees 20 tokens: what lies below 178 // 16 is out of sight
    gone = replace(batch, block_table=table)
    got = attend(q, cache, gone, device, softmax_scale=0.2, window=20)
    np.testing.assert_array_equal(got, attend(q, cache, batch, device, softmax_scale=0.2, window=20))


@pytest.mark.parametrize("length", [255, 256, 1100])
def test_long_requests_are_split_over_their_tokens(length, device):
    q, cache, batch = problem(
        5, "e4m3", slots=64, heads=1, group=2, k_dim=16, v_dim=32, lengths=[length, 40], queries=[2, 1]
    )
    sinks = np.array([0.5, -1.0], np.float32)
    assert_close(attend(q, cache, batch, device, softmax_scale=0.25, sinks_H=sinks), q, cache, batch, 0.25, 0, sinks)
    assert_close(attend(q, cache, batch, device, softmax_scale=0.25, window=99), q, cache, batch, 0.25, 99)


def adversarial():
    base = np.random.default_rng(6).standard_normal((100, 2, 32), np.float32)
    huge = base.copy()
    huge[37, 1, 5] = 3e4
    yield "equal", np.full_like(base, 0.7), np.full_like(base, -0.3)
    yield "negative zeros", np.full_like(base, -0.0), np.full_like(base, -0.0)
    yield "one huge key", huge, base
    yield "one huge value", base, huge
    yield "denormals", base * np.float32(1e-40), base * np.float32(1e-40)
    yield "smallest codes", np.sign(base) * np.float32(0.021 * 2**-9), np.sign(base) * np.float32(0.017 * 3 * 2**-9)
    yield "far apart", base * np.float32(60), base


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("name", "k", "v"), list(adversarial()), ids=lambda x: x if isinstance(x, str) else "")
def test_adversarial_inputs(format, name, k, v, device):
    rng = np.random.default_rng(7)
    batch, pages = paged(rng, [100], [3], 16)
    q = rng.standard_normal((3, 6, 32), np.float32)
    cache = filled(format, batch, pages, 16, [k], [v])
    got = attend(q, cache, batch, device, softmax_scale=0.18)
    assert_close(got, q, cache, batch, 0.18)
    if name == "negative zeros":
        np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_in_the_cache_reaches_just_the_queries_that_see_it(format, device):
    """Token 25 of head 1 is not a number: earlier queries and the other head never see it."""
    q, cache, batch = problem(8, format, slots=16, heads=2, group=3, k_dim=32, v_dim=32, lengths=[40], queries=[30])
    slot = slots_of(batch, 0, 16)[25]
    clean = attend(q, cache, batch, device, softmax_scale=0.2)
    for part, scales in ((cache.k, cache.k_block_scale), (cache.v, cache.v_block_scale)):
        target, poison = (part, POISON[format]) if scales is None else (scales, 0x7F if format == "nvfp4" else 0xFF)
        row = target.reshape(-1, *target.shape[2:])[slot, 1]
        saved = row.copy()
        row[...] = poison
        got = attend(q, cache, batch, device, softmax_scale=0.2)
        row[...] = saved
        np.testing.assert_array_equal(got[:15], clean[:15])  # query x stands at 10 + x
        np.testing.assert_array_equal(got[15:, :3], clean[15:, :3])
        assert np.isnan(got[15:, 3:]).all()


def test_nan_out_of_the_window_is_not_seen(device):
    q, cache, batch = problem(8, "e4m3", slots=16, heads=1, group=1, k_dim=32, v_dim=32, lengths=[100], queries=[30])
    clean = attend(q, cache, batch, device, softmax_scale=0.2, window=9)
    for part in (cache.k, cache.v):
        part.reshape(-1, 32)[slots_of(batch, 0, 16)[80]] = 0x7F
    got = attend(q, cache, batch, device, softmax_scale=0.2, window=9)
    sees = slice(80 - 70, 80 - 70 + 9)
    assert np.isnan(got[sees]).all()
    got[sees] = clean[sees]
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize(("format", "codes"), [("e4m3", 256), ("e5m2", 256)])
def test_every_code_is_read_exactly(format, codes, device):
    """One token: the output is its value, and NaN where the code is none."""
    batch, pages = paged(np.random.default_rng(9), [1], [1], 16)
    zero = np.zeros((1, 1, codes), np.float32)
    cache = filled(format, batch, pages, 16, [zero], [zero])
    cache.v[batch.block_table[0, 0], 0, 0] = np.arange(codes)
    got = attend(np.zeros((1, 1, codes), np.float32), cache, batch, device, softmax_scale=1.0)[0, 0]
    expected = exact(np.zeros((1, 1, codes)), cache, batch, 1.0)[0, 0]
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=2e-7, atol=0)
    assert not np.isfinite(got[~finite]).any()
    assert np.isnan(got[np.isnan(expected)]).all()


def test_a_request_gets_the_same_numbers_alone_and_in_a_batch(device):
    q, cache, batch = problem(
        11, "bf16", slots=16, heads=1, group=4, k_dim=32, v_dim=32, lengths=[200, 65, 3], queries=[1, 20, 1]
    )
    together = attend(q, cache, batch, device, softmax_scale=0.125)
    for r, (a, b) in enumerate(itertools.pairwise(batch.query_start)):
        alone = Batch(np.array([0, b - a], np.int32), batch.block_table[r : r + 1], batch.lengths[r : r + 1])
        got = attend(q[a:b], cache, alone, device, softmax_scale=0.125)
        np.testing.assert_allclose(got, together[a:b], rtol=0, atol=1e-6)


def test_no_queries(device):
    q, cache, batch = problem(12, "e4m3", slots=16, heads=1, group=1, k_dim=32, v_dim=32, lengths=[9], queries=[0])
    assert attend(q, cache, batch, device, softmax_scale=1.0).shape == (0, 1, 32)


# ---- latent attention ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("format", "rank", "rope"),
    [("bf16", 512, 64), ("e4m3", 512, 64), ("dsa", 512, 64), ("bf16", 40, 0), ("e4m3", 24, 7)],
)
def test_latent(format, rank, rope, dtype, device):
    rng = np.random.default_rng(13)
    lengths, queries = [140, 0, 33, 5], [1, 0, 20, 5]
    batch, pages = paged(rng, lengths, queries, 16)
    rows = [rng.standard_normal((n, rank + rope)).astype(np.float32) for n in lengths]
    cache = filled_latent(format, batch, pages, 16, rows, rank)
    q = torch.from_numpy(rng.standard_normal((26, 3, rank + rope)).astype(np.float32)).to(dtype)
    got = gpu.attend_latent(q.to(device), torch_of(cache, device), torch_of(batch, device), softmax_scale=0.07)
    assert_close(got.cpu().numpy(), q.float().numpy(), cache, batch, 0.07)


def test_latent_nan_is_seen_from_its_token_on(device):
    rng = np.random.default_rng(14)
    batch, pages = paged(rng, [30], [20], 16)
    for format in ("bf16", "e4m3", "dsa"):
        cache = filled_latent(format, batch, pages, 16, [rng.standard_normal((30, 576)).astype(np.float32)], 512)
        q = rng.standard_normal((20, 2, 576)).astype(np.float32)

        def run(q=q, cache=cache):
            given = torch.from_numpy(q).to(device)
            return gpu.attend_latent(given, torch_of(cache, device), torch_of(batch, device), softmax_scale=0.05).cpu()

        clean = run()
        cache.rows.reshape(-1, cache.rows.shape[2])[slots_of(batch, 0, 16)[18]] = POISON[format]
        got = run()
        assert torch.equal(got[:8], clean[:8])
        assert got[8:].isnan().all()


# ---- what is refused ----


def test_wrong_calls_are_refused_before_anything_runs(device):
    q, cache, batch = problem(15, "e4m3", slots=16, heads=2, group=1, k_dim=32, v_dim=32, lengths=[40], queries=[2])
    q, cache, batch = torch.from_numpy(q).to(device), torch_of(cache, device), torch_of(batch, device)
    far = batch.block_table.clone()
    far[0, 1] = 99
    cases = [
        ("outside the cache", q, cache, replace(batch, block_table=far), {}),
        ("longer than its block table", q, cache, replace(batch, lengths=batch.lengths + 60), {}),
        ("more queries than tokens", q, cache, replace(batch, lengths=batch.lengths * 0), {}),
        ("wrong shape", q[:, :, :16].contiguous(), cache, batch, {}),
        ("wrong dtype", q.double(), cache, batch, {}),
        ("must be contiguous", q.transpose(0, 1).contiguous().transpose(0, 1), cache, batch, {}),
        ("wrong dtype", q, cache, replace(batch, lengths=batch.lengths.long()), {}),
        ("softmax scale", q, cache, batch, {"softmax_scale": 0.0}),
        ("window", q, cache, batch, {"window": -1}),
        ("sinks", q, cache, batch, {"sinks_H": torch.zeros(3, device=device)}),
        ("k_scale", q, replace(cache, k_scale=float("nan")), batch, {}),
    ]
    for message, queries, held, asked, options in cases:
        with pytest.raises(QuantkitError, match=message):
            gpu.attend(queries, held, asked, **{"softmax_scale": 1.0, **options})
