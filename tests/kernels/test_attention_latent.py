"""Absorbed latent attention: the torch reference and the Numba twin against float64, on the same bits."""

import numpy as np
import pytest
import torch
from kv_caches import assert_close, filled_latent, paged, slots_of, torch_of
from quantkit.kernels import attention
from quantkit.kernels.cpu import attention as cpu
from quantkit.kernels.kv import Batch


def reference(q, cache, batch, scale):
    return attention.reference_attend_latent(
        torch.from_numpy(q), torch_of(cache), torch_of(batch), softmax_scale=scale
    ).numpy()


def numba(q, cache, batch, scale):
    return cpu.attend_latent(q, cache, batch, softmax_scale=scale, threads=2)


TWINS = pytest.mark.parametrize("twin", [reference, numba])


def problem(seed, format, *, rank, rope, heads, lengths, queries, slots=16):
    rng = np.random.default_rng(seed)
    batch, pages = paged(rng, lengths, queries, slots)
    rows = [rng.standard_normal((n, rank + rope), np.float32) for n in lengths]
    q = rng.standard_normal((sum(queries), heads, rank + rope), np.float32)
    return q, filled_latent(format, batch, pages, slots, rows, rank), batch


@TWINS
@pytest.mark.parametrize("format", ["bf16", "e4m3", "dsa"])
@pytest.mark.parametrize(
    ("heads", "lengths", "queries"), [(16, [70], [1]), (1, [5, 0, 64], [5, 0, 2]), (128, [33], [2]), (5, [600, 17], [1, 17])]
)  # fmt: skip
def test_deepseek_rows(twin, format, heads, lengths, queries):
    q, cache, batch = problem(1, format, rank=512, rope=64, heads=heads, lengths=lengths, queries=queries)
    assert_close(twin(q, cache, batch, 0.06), q, cache, batch, 0.06)


@TWINS
@pytest.mark.parametrize("format", ["bf16", "e4m3"])
@pytest.mark.parametrize(("rank", "rope", "slots"), [(32, 16, 64), (48, 0, 1), (17, 5, 3), (1, 1, 16), (100, 60, 7)])
def test_other_widths(twin, format, rank, rope, slots):
    q, cache, batch = problem(2, format, rank=rank, rope=rope, heads=3, lengths=[50, 21], queries=[4, 1], slots=slots)
    assert_close(twin(q, cache, batch, 0.2), q, cache, batch, 0.2)


@TWINS
def test_dsa_scales_are_read_token_by_token(twin):
    """Latent values of very different size from one token and block to the next."""
    rng = np.random.default_rng(3)
    batch, pages = paged(rng, [40], [2], 16)
    rows = rng.standard_normal((40, 576), np.float32)
    rows[:, :512] *= np.exp2(rng.integers(-10, 3, (40, 4))).astype(np.float32).repeat(128, 1)
    cache = filled_latent("dsa", batch, pages, 16, [rows], 512)
    q = rng.standard_normal((2, 4, 576), np.float32)
    assert_close(twin(q, cache, batch, 0.1), q, cache, batch, 0.1)


@TWINS
@pytest.mark.parametrize(("format", "byte"), [("dsa", 700), ("dsa", 100), ("e4m3", 100), ("bf16", 100)])
def test_nan_reaches_just_the_queries_that_see_it(twin, format, byte):
    q, cache, batch = problem(4, format, rank=512, rope=64, heads=2, lengths=[40], queries=[30])
    clean = twin(q, cache, batch, 0.05)
    row = cache.rows.reshape(-1, cache.rows.shape[-1])[slots_of(batch, 0, 16)[25]]
    if format == "dsa" and byte > 656:
        row[512:516] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    else:
        row[byte] = 0x7FC0 if format == "bf16" else 0xFF
    got = twin(q, cache, batch, 0.05)
    np.testing.assert_array_equal(got[:15], clean[:15])
    assert np.isnan(got[15:]).all()


@pytest.mark.parametrize("format", ["e4m3", "dsa"])
def test_a_request_gets_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(format):
    q, cache, batch = problem(5, format, rank=512, rope=64, heads=8, lengths=[1100, 9], queries=[1, 9])
    together = cpu.attend_latent(q, cache, batch, softmax_scale=0.05)
    np.testing.assert_array_equal(numba(q, cache, batch, 0.05), together)
    alone = Batch(np.array([0, 1], np.int32), batch.block_table[:1], batch.lengths[:1])
    np.testing.assert_array_equal(cpu.attend_latent(q[:1], cache, alone, softmax_scale=0.05), together[:1])


def test_the_dispatch_gives_the_numba_twin_on_the_cpu():
    q, cache, batch = problem(6, "dsa", rank=512, rope=64, heads=4, lengths=[20], queries=[2])
    for dtype in (torch.float32, torch.bfloat16):
        half = torch.from_numpy(q).to(dtype)
        got = attention.attend_latent(half, torch_of(cache), torch_of(batch), softmax_scale=0.05)
        np.testing.assert_array_equal(got.numpy(), numba(half.float().numpy(), cache, batch, 0.05))
