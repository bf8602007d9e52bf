"""The records of a paged KV cache, and every check that stands before a kernel: bad input is refused, nothing is written."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_caches import torch_of
from quantkit.kernels import attention
from quantkit.kernels.cpu import attention as cpu
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, KVCache, LatentCache, check_cache, new_cache, new_latent_cache, token_bytes


def cache_of(format="e4m3"):
    return new_cache(format, 4, 8, 2, 32, 64)


def batch_of():
    """Two requests, of 11 and 5 tokens with 2 and 1 queries."""
    table = np.array([[2, 0], [3, -1]], np.int32)
    return Batch(np.array([0, 2, 3], np.int32), table, np.array([11, 5], np.int32))


Q = np.ones((3, 4, 32), np.float32)


@pytest.mark.parametrize(
    ("format", "bytes_"),
    [("bf16", 384), ("f16", 384), ("e4m3", 192), ("e5m2", 192), ("nvfp4", 96 + 12), ("mxfp4", 96 + 6)],
)
def test_bytes_of_a_token(format, bytes_):
    assert token_bytes(cache_of(format)) == bytes_


@pytest.mark.parametrize(("format", "bytes_"), [("bf16", 1152), ("e4m3", 576), ("dsa", 656)])
def test_bytes_of_a_latent_token(format, bytes_):
    assert token_bytes(new_latent_cache(format, 2, 16)) == bytes_


def strided(a):
    return np.repeat(a, 2, -1)[..., ::2]


BAD_CACHES = [
    ("unknown format", lambda c: replace(c, format="fp8")),
    ("wrong dtype", lambda c: replace(c, k=c.k.view(np.int8))),
    ("wrong dtype", lambda c: replace(c, v=c.v.astype(np.uint16))),
    ("wrong dtype", lambda c: replace(c, format="bf16")),
    ("wrong shape", lambda c: replace(c, k=c.k[0])),
    ("wrong shape", lambda c: replace(c, v=c.v[:3].copy())),
    ("wrong shape", lambda c: replace(c, v=c.v[:, :, :1].copy())),
    ("must be contiguous", lambda c: replace(c, k=strided(c.k))),
    ("must be contiguous", lambda c: replace(c, v=strided(c.v))),
    ("no such width", lambda c: replace(c, v=c.v[..., :0])),
    ("needs pages, slots and heads", lambda c: replace(c, k=c.k[:0], v=c.v[:0])),
    ("has no block scales", lambda c: replace(c, k_block_scale=c.k)),
    *[("k_scale of the cache", lambda c, s=s: replace(c, k_scale=s)) for s in (0.0, -1.0, np.nan, np.inf, 1e-60, 1e60)],
    *[("v_scale of the cache", lambda c, s=s: replace(c, v_scale=s)) for s in (0.0, -0.5, np.nan, -np.inf, 1e-42)],
    ("must lie where", lambda c: replace(c, v=torch.from_numpy(c.v))),
]


@pytest.mark.parametrize(("message", "spoil"), BAD_CACHES)
def test_bad_caches(message, spoil):
    check_cache(cache_of())
    bad = spoil(cache_of())
    with pytest.raises(QuantkitError, match=message):
        check_cache(bad)
    with pytest.raises(QuantkitError, match=message):
        cpu.attend(Q, bad, batch_of(), softmax_scale=1.0)
    with pytest.raises(QuantkitError, match=message):
        cpu.write(bad, np.zeros(1, np.int32), np.ones((1, 2, 32), np.float32), np.ones((1, 2, 64), np.float32))


BAD_FP4 = [
    ("needs block scales", lambda c: replace(c, k_block_scale=None)),
    ("needs block scales", lambda c: replace(c, v_block_scale=None)),
    ("wrong shape", lambda c: replace(c, k_block_scale=c.v_block_scale)),
    ("wrong dtype", lambda c: replace(c, v_block_scale=c.v_block_scale.astype(np.float32))),
    ("must be contiguous", lambda c: replace(c, v_block_scale=strided(c.v_block_scale))),
    ("no such width", lambda c: replace(c, k=c.k[..., :12].copy(), k_block_scale=c.k_block_scale[..., :1].copy())),
]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("message", "spoil"), BAD_FP4)
def test_bad_fp4_caches(format, message, spoil):
    with pytest.raises(QuantkitError, match=message):
        check_cache(spoil(cache_of(format)))


@pytest.mark.parametrize("format", ["bf16", "f16", "mxfp4"])
def test_formats_without_a_scale_refuse_one(format):
    with pytest.raises(QuantkitError, match="has no k_scale"):
        check_cache(replace(cache_of(format), k_scale=0.5))
    with pytest.raises(QuantkitError, match="has no v_scale"):
        check_cache(replace(cache_of(format), v_scale=0.5))


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("unknown format", lambda: new_latent_cache("nvfp4", 2, 4)),
        ("unknown format", lambda: new_cache("int8", 2, 4, 1, 16)),
        ("other widths", lambda: new_latent_cache("dsa", 2, 4, 256, 64)),
        ("no such widths", lambda: new_latent_cache("bf16", 2, 4, 0, 64)),
        ("has no scale", lambda: new_latent_cache("dsa", 2, 4, scale=2.0)),
        ("scale of the cache", lambda: new_latent_cache("e4m3", 2, 4, scale=np.nan)),
        ("wrong shape", lambda: check_cache(LatentCache("dsa", np.zeros((2, 4, 576), np.uint8)))),
        ("wrong dtype", lambda: check_cache(LatentCache("bf16", np.zeros((2, 4, 576), np.uint8)))),
        ("needs pages", lambda: new_latent_cache("bf16", 0, 4)),
        ("no such width", lambda: new_cache("mxfp4", 2, 4, 1, 48)),
    ],
)
def test_bad_latent_caches(message, make):
    with pytest.raises(QuantkitError, match=message):
        make()


def table(*rows):
    return np.array(rows, np.int32)


BAD_BATCHES = [
    ("does not divide the queries", lambda b: replace(b, query_start=np.array([0, 2, 4], np.int32))),
    ("does not divide the queries", lambda b: replace(b, query_start=np.array([1, 2, 3], np.int32))),
    ("does not divide the queries", lambda b: replace(b, query_start=np.array([0, 4, 3], np.int32))),
    ("query_start has the wrong shape", lambda b: replace(b, query_start=np.array([0, 3], np.int32))),
    ("query_start has the wrong dtype", lambda b: replace(b, query_start=b.query_start.astype(np.int64))),
    ("more queries than tokens", lambda b: replace(b, lengths=np.array([1, 5], np.int32))),
    ("more queries than tokens", lambda b: replace(b, lengths=np.array([11, -5], np.int32))),
    ("longer than its block table", lambda b: replace(b, lengths=np.array([17, 5], np.int32))),
    ("longer than its block table", lambda b: replace(b, lengths=np.array([2**31 - 1, 5], np.int32))),
    ("lengths has the wrong shape", lambda b: replace(b, lengths=np.array([11, 5, 1], np.int32))),
    ("lengths has the wrong dtype", lambda b: replace(b, lengths=b.lengths.astype(np.uint32))),
    ("page 1 of request 0 is outside", lambda b: replace(b, block_table=table([2, 4], [3, 0]))),
    ("page 0 of request 1 is outside", lambda b: replace(b, block_table=table([2, 0], [-1, 0]))),
    ("page 0 of request 0 is outside", lambda b: replace(b, block_table=table([2**31 - 1, 0], [3, 0]))),
    ("block_table has the wrong dtype", lambda b: replace(b, block_table=b.block_table.astype(np.int64))),
    ("block_table must be contiguous", lambda b: replace(b, block_table=strided(b.block_table))),
    ("block_table must lie where", lambda b: replace(b, block_table=b.block_table.tolist())),
]


@pytest.mark.parametrize(("message", "spoil"), BAD_BATCHES)
def test_bad_batches(message, spoil):
    bad = spoil(batch_of())
    with pytest.raises(QuantkitError, match=message):
        cpu.attend(Q, cache_of(), bad, softmax_scale=1.0)
    latent = new_latent_cache("bf16", 4, 8, 24, 8)
    with pytest.raises(QuantkitError, match=message):
        cpu.attend_latent(Q, latent, bad, softmax_scale=1.0)


BAD_CALLS = [
    ("q has the wrong shape", {"q": np.ones((3, 4, 16), np.float32)}),
    ("q has the wrong shape", {"q": np.ones((3, 128), np.float32)}),
    ("q has the wrong dtype", {"q": Q.astype(np.float64)}),
    ("q must be contiguous", {"q": strided(Q)}),
    ("q must lie where", {"q": torch.ones(3, 4, 32)}),
    ("do not share the KV heads evenly", {"q": np.ones((3, 3, 32), np.float32)}),
    ("do not share the KV heads evenly", {"q": np.ones((3, 0, 32), np.float32)}),
    *[("softmax scale", {"softmax_scale": s}) for s in (0.0, -1.0, np.nan, np.inf, 1e60)],
    *[("window", {"window": w}) for w in (-1, 2.5)],
    ("sinks has the wrong shape", {"sinks_H": np.zeros(2, np.float32)}),
    ("sinks has the wrong dtype", {"sinks_H": np.zeros(4)}),
]


@pytest.mark.parametrize(("message", "change"), BAD_CALLS)
def test_bad_calls(message, change):
    call = {"q": Q, "softmax_scale": 1.0, "window": 0, "sinks_H": None} | change
    cpu.attend(Q, cache_of(), batch_of(), softmax_scale=1.0)
    with pytest.raises(QuantkitError, match=message):
        cpu.attend(call.pop("q"), cache_of(), batch_of(), **call)


BAD_WRITES = [
    ("slot of token 1 is outside", {"slots": np.array([0, 32])}),
    ("slot of token 0 is outside", {"slots": np.array([-2, 0])}),
    ("two tokens are written to one slot", {"slots": np.array([7, 7])}),
    ("slots has the wrong dtype", {"slots": np.array([0.0, 1.0])}),
    ("slots has the wrong shape", {"slots": np.array([[0, 1]])}),
    ("k has the wrong shape", {"k": np.ones((2, 2, 33), np.float32)}),
    ("k has the wrong shape", {"k": np.ones((3, 2, 32), np.float32)}),
    ("k has the wrong dtype", {"k": np.ones((2, 2, 32))}),
    ("v has the wrong shape", {"v": np.ones((2, 1, 64), np.float32)}),
    ("v must be contiguous", {"v": strided(np.ones((2, 2, 64), np.float32))}),
]


@pytest.mark.parametrize(("message", "change"), BAD_WRITES)
def test_bad_writes_change_nothing(message, change):
    good = {"slots": np.array([0, 1]), "k": np.ones((2, 2, 32), np.float32), "v": np.ones((2, 2, 64), np.float32)}
    cache = cache_of()
    with pytest.raises(QuantkitError, match=message):
        cpu.write(cache, *(good | change).values())
    assert not cache.k.any()
    assert not cache.v.any()
    with pytest.raises(QuantkitError, match=message):
        attention.reference_write(torch_of(cache), *(torch.from_numpy(x) for x in (good | change).values()))
    assert not cache.k.any()
    cpu.write(cache, *good.values())
    assert cache.k.any()


@pytest.mark.parametrize(
    ("message", "latent", "rope"),
    [
        ("latent has the wrong shape", (2, 511), (2, 64)),
        ("rope has the wrong shape", (2, 512), (2, 63)),
        ("rope has the wrong shape", (2, 512), (1, 64)),
    ],
)
def test_bad_latent_writes(message, latent, rope):
    cache = new_latent_cache("dsa", 1, 4)
    with pytest.raises(QuantkitError, match=message):
        cpu.write_latent(cache, np.array([0, 1]), np.ones(latent, np.float32), np.ones(rope, np.float32))
    assert not cache.rows.any()


def test_the_dispatch_refuses_other_devices():
    cache: KVCache = torch_of(cache_of())
    meta = replace(cache, k=cache.k.to("meta"), v=cache.v.to("meta"))
    q = torch.ones(3, 4, 32)
    with pytest.raises(QuantkitError, match="no attention kernel for this device"):
        attention.attend(q.to("meta"), meta, torch_of(batch_of()), softmax_scale=1.0)
    with pytest.raises(QuantkitError, match="no attention kernel for this device"):
        attention.attend(q, cache_of(), torch_of(batch_of()), softmax_scale=1.0)
    with pytest.raises(QuantkitError, match="different devices"):
        attention.attend(q.to("meta"), cache, torch_of(batch_of()), softmax_scale=1.0)
