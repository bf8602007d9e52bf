"""Attention over a paged cache: the torch reference and the Numba twin against float64, on the same bits."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from kv_caches import POISON, assert_close, exact, filled, paged, problem, slots_of, torch_of
from quantkit.kernels import attention
from quantkit.kernels.cpu import attention as cpu
from quantkit.kernels.cpu import attention_run
from quantkit.kernels.kv import Batch

FORMATS = ("bf16", "f16", "e4m3", "e5m2", "nvfp4", "mxfp4")


def reference(q, cache, batch, **options):
    options["sinks_H"] = None if options.get("sinks_H") is None else torch.from_numpy(options["sinks_H"])
    return attention.reference_attend(torch.from_numpy(q), torch_of(cache), torch_of(batch), **options).numpy()


def numba(q, cache, batch, **options):
    return cpu.attend(q, cache, batch, threads=2, **options)


TWINS = pytest.mark.parametrize("twin", [reference, numba])


# slots of a page, KV heads, query heads each, widths of K and V, lengths, queries
SHAPES = [
    (16, 2, 4, 64, 64, [70], [1]),
    (1, 3, 1, 64, 32, [33, 5], [1, 1]),
    (64, 1, 16, 128, 128, [200], [3]),
    (16, 2, 3, 32, 64, [40, 0, 17, 64, 1], [7, 0, 1, 64, 1]),
    (16, 1, 8, 192, 128, [129], [129]),
    (64, 4, 2, 256, 256, [65, 128], [1, 2]),
    (16, 2, 5, 96, 96, [90], [21]),
]
ODD = [
    (16, 2, 4, 80, 80, [77], [2]),
    (7, 3, 1, 40, 24, [50, 3], [50, 1]),
    (16, 1, 2, 1, 1, [19], [4]),
    (3, 2, 6, 17, 100, [31], [5]),
]


@TWINS
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(twin, format, shape):
    slots, heads, group, k_dim, v_dim, lengths, queries = shape
    q, cache, batch = problem(
        1, format, slots=slots, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim, lengths=lengths, queries=queries
    )
    assert_close(twin(q, cache, batch, softmax_scale=k_dim**-0.5), q, cache, batch, k_dim**-0.5)


@TWINS
@pytest.mark.parametrize("format", ["bf16", "f16", "e4m3", "e5m2"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_widths_that_are_no_multiple_of_a_vector(twin, format, shape):
    slots, heads, group, k_dim, v_dim, lengths, queries = shape
    q, cache, batch = problem(
        2, format, slots=slots, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim, lengths=lengths, queries=queries
    )
    assert_close(twin(q, cache, batch, softmax_scale=0.3), q, cache, batch, 0.3)


@TWINS
@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
@pytest.mark.parametrize(
    ("window", "with_sinks"), [(1, False), (8, True), (64, False), (65, True), (10**6, True), (0, True)]
)
def test_window_and_sinks(twin, format, window, with_sinks):
    q, cache, batch = problem(
        3, format, slots=16, heads=2, group=4, k_dim=64, v_dim=64, lengths=[200, 7, 130], queries=[1, 3, 90]
    )
    sinks = np.random.default_rng(0).standard_normal(8).astype(np.float32) * 3 if with_sinks else None
    got = twin(q, cache, batch, softmax_scale=0.125, window=window, sinks_H=sinks)
    assert_close(got, q, cache, batch, 0.125, window, sinks)


def test_pages_before_the_window_need_not_exist():
    q, cache, batch = problem(4, "e4m3", slots=16, heads=1, group=2, k_dim=32, v_dim=32, lengths=[200], queries=[3])
    table = batch.block_table.copy()
    # the first query stands at 197 and sees 20 tokens: pages below 178 // 16 = 11 are out of sight
    table[0, :11] = -1
    gone = Batch(batch.query_start, table, batch.lengths)
    for twin in (reference, numba):
        got = twin(q, cache, gone, softmax_scale=0.2, window=20)
        np.testing.assert_array_equal(got, twin(q, cache, batch, softmax_scale=0.2, window=20))


@pytest.mark.parametrize("format", ["bf16", "e4m3"])
@pytest.mark.parametrize("length", [511, 512, 513, 1500, 17000])
def test_long_requests_are_split_over_their_tokens(format, length):
    q, cache, batch = problem(
        5, format, slots=64, heads=1, group=2, k_dim=16, v_dim=32, lengths=[length, 40], queries=[2, 1]
    )
    sinks = np.array([0.5, -1.0], np.float32)
    got = numba(q, cache, batch, softmax_scale=0.25, sinks_H=sinks)
    assert_close(got, q, cache, batch, 0.25, 0, sinks)
    window = numba(q, cache, batch, softmax_scale=0.25, window=700)
    assert_close(window, q, cache, batch, 0.25, 700)


def adversarial():
    rng = np.random.default_rng(6)
    base = rng.standard_normal((100, 2, 32), np.float32)
    huge = base.copy()
    huge[37, 1, 5] = 3e4
    yield "equal", np.full_like(base, 0.7), np.full_like(base, -0.3)
    yield "zeros", np.zeros_like(base), np.zeros_like(base)
    yield "negative zeros", np.full_like(base, -0.0), np.full_like(base, -0.0)
    yield "one huge key", huge, base
    yield "one huge value", base, huge
    yield "denormals", base * np.float32(1e-40), base * np.float32(1e-40)
    yield "smallest codes", np.sign(base) * np.float32(0.021 * 2**-9), np.sign(base) * np.float32(0.017 * 3 * 2**-9)
    yield "far apart", base * np.float32(60), base


@TWINS
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("name", "k", "v"), list(adversarial()), ids=lambda x: x if isinstance(x, str) else "")
def test_adversarial_inputs(twin, format, name, k, v):
    rng = np.random.default_rng(7)
    batch, pages = paged(rng, [100], [3], 16)
    q = rng.standard_normal((3, 6, 32), np.float32)
    cache = filled(format, batch, pages, 16, [k], [v])
    got = twin(q, cache, batch, softmax_scale=0.18)
    assert_close(got, q, cache, batch, 0.18)
    if name in ("zeros", "negative zeros"):
        np.testing.assert_array_equal(got, 0)


@TWINS
@pytest.mark.parametrize("format", FORMATS)
def test_nan_in_the_cache_reaches_just_the_queries_that_see_it(twin, format):
    """Token 25 of head 1 is not a number: in K it is lost to all heads of the group, in V too; earlier queries never see it."""
    q, cache, batch = problem(8, format, slots=16, heads=2, group=3, k_dim=32, v_dim=32, lengths=[40], queries=[30])
    slot = slots_of(batch, 0, 16)[25]
    clean = twin(q, cache, batch, softmax_scale=0.2)
    for part, scales in ((cache.k, cache.k_block_scale), (cache.v, cache.v_block_scale)):
        target, poison = (part, POISON[format]) if scales is None else (scales, 0x7F if format == "nvfp4" else 0xFF)
        row = target.reshape(-1, *target.shape[2:])[slot, 1]
        saved = row.copy()
        row[...] = poison
        got = twin(q, cache, batch, softmax_scale=0.2)
        row[...] = saved
        # query x stands at 10 + x
        np.testing.assert_array_equal(got[:15], clean[:15])
        np.testing.assert_array_equal(got[15:, :3], clean[15:, :3])
        assert np.isnan(got[15:, 3:]).all()


@TWINS
def test_every_e4m3_code_is_read_exactly(twin):
    """One token: the output is its value. 0x7f and 0xff are NaN, not 480."""
    batch, pages = paged(np.random.default_rng(9), [1], [1], 16)
    zero = np.zeros((1, 1, 256), np.float32)
    cache = filled("e4m3", batch, pages, 16, [zero], [zero])
    cache.v[batch.block_table[0, 0], 0, 0] = np.arange(256)
    got = twin(np.zeros((1, 1, 256), np.float32), cache, batch, softmax_scale=1.0)[0, 0]
    expected = exact(np.zeros((1, 1, 256)), cache, batch, 1.0)[0, 0]
    assert np.isnan(got[[0x7F, 0xFF]]).all()
    assert np.isnan(got).sum() == 2
    np.testing.assert_allclose(got, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_half_precision_are_their_float32(dtype):
    q, cache, batch = problem(10, "e4m3", slots=16, heads=2, group=2, k_dim=64, v_dim=64, lengths=[50], queries=[5])
    half = torch.from_numpy(q).to(getattr(torch, dtype))
    got = attention.attend(half, torch_of(cache), torch_of(batch), softmax_scale=0.125)
    np.testing.assert_array_equal(got.numpy(), numba(half.float().numpy(), cache, batch, softmax_scale=0.125))
    same = attention.reference_attend(half, torch_of(cache), torch_of(batch), softmax_scale=0.125)
    np.testing.assert_array_equal(same.numpy(), reference(half.float().numpy(), cache, batch, softmax_scale=0.125))


@pytest.mark.parametrize("format", ["bf16", "e4m3"])
def test_a_request_gets_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(format):
    lengths, queries = [1200, 65, 600, 300, 3], [1, 65, 2, 40, 1]
    q, cache, batch = problem(
        11, format, slots=16, heads=2, group=4, k_dim=64, v_dim=64, lengths=lengths, queries=queries
    )
    together = cpu.attend(q, cache, batch, softmax_scale=0.125, threads=1)
    for threads in (2, 5):
        np.testing.assert_array_equal(cpu.attend(q, cache, batch, softmax_scale=0.125, threads=threads), together)
    for r, (a, b) in enumerate(itertools.pairwise(batch.query_start)):
        one = slice(r, r + 1)
        alone = Batch(np.array([0, b - a], np.int32), batch.block_table[one], batch.lengths[one])
        got = cpu.attend(q[a:b], cache, alone, softmax_scale=0.125)
        np.testing.assert_array_equal(got, together[a:b])


def test_every_output_is_written(monkeypatch):
    q, cache, batch = problem(
        12, "e4m3", slots=16, heads=2, group=3, k_dim=40, v_dim=24, lengths=[700, 9], queries=[1, 9]
    )
    run = attention_run.run

    def poisoned_run(task, k_rows, v_rows, sinks, out, threads):
        out.fill(np.nan)
        run(task, k_rows, v_rows, sinks, out, threads)

    monkeypatch.setattr(cpu, "run", poisoned_run)
    assert_close(numba(q, cache, batch, softmax_scale=0.2), q, cache, batch, 0.2)


def test_a_batch_without_queries_has_no_outputs():
    _, cache, _ = problem(13, "bf16", slots=16, heads=1, group=1, k_dim=16, v_dim=16, lengths=[3], queries=[1])
    idle = Batch(np.zeros(3, np.int32), np.full((2, 1), -7, np.int32), np.array([0, 5], np.int32))
    nobody = Batch(np.zeros(1, np.int32), np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
    q = np.zeros((0, 2, 16), np.float32)
    for batch in (idle, nobody):
        assert numba(q, cache, batch, softmax_scale=1.0).shape == (0, 2, 16)
        assert reference(q, cache, batch, softmax_scale=1.0).shape == (0, 2, 16)


def test_the_dispatch_gives_the_numba_twin_on_the_cpu():
    q, cache, batch = problem(14, "nvfp4", slots=16, heads=2, group=2, k_dim=32, v_dim=64, lengths=[50], queries=[5])
    sinks = np.array([0.1, -2, 3, 0], np.float32)
    options = {"softmax_scale": 0.2, "window": 30}
    got = attention.attend(
        torch.from_numpy(q), torch_of(cache), torch_of(batch), **options, sinks_H=torch.from_numpy(sinks)
    )
    np.testing.assert_array_equal(got.numpy(), numba(q, cache, batch, **options, sinks_H=sinks))


def test_the_numba_twin_needs_no_torch():
    code = "import sys, quantkit.kernels.cpu.attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
