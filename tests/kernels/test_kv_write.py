"""Writes into a paged cache: every element exactly, by both twins, against ml_dtypes and slow float64 rules."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from kv_caches import POISON, poisoned, torch_of
from oracle import attention as oracle
from oracle.microscale import nearest_e2m1, nearest_e4m3
from quantkit.kernels import attention
from quantkit.kernels.cpu import attention as cpu
from quantkit.kernels.kv import new_cache, new_latent_cache

HALVES = ("bf16", "f16")
FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F), "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7E)}


def reference(cache, slots, *rows):
    write = attention.reference_write if hasattr(cache, "k") else attention.reference_write_latent
    write(torch_of(cache), *(torch.from_numpy(x) for x in (slots, *rows)))


def numba(cache, slots, *rows):
    write = cpu.write if hasattr(cache, "k") else cpu.write_latent
    write(cache, slots, *rows, threads=3)


def dispatched(cache, slots, *rows):
    write = attention.write if hasattr(cache, "k") else attention.write_latent
    write(torch_of(cache), *(torch.from_numpy(x) for x in (slots, *rows)))


TWINS = pytest.mark.parametrize("twin", [reference, numba, dispatched])


def numbers(scale: float = 1.0) -> np.ndarray:
    """All bfloat16 values as float32, and what lies around every boundary of the small formats: ties and neighbours.

    The boundaries are those of x / scale: a product with 1 / scale instead falls on the other side of some.
    """
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    grids = [np.unique(np.abs(t[np.isfinite(t)])) for t in (oracle.E4M3, oracle.E5M2, oracle.E2M1)]
    grids.append(np.unique(np.abs(np.arange(0, 31744, dtype=np.uint16).view(np.float16).astype(np.float64))))
    ties = np.concatenate([*((g[1:] + g[:-1]) / 2 for g in grids), [448, 464, 65504, 65519.99, 65520, 57344, 61440]])
    ties = ties.astype(np.float32) * np.float32(scale)
    around = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    return np.concatenate([every, around, -around])


def written(twin, format, x, scale=1.0):
    """Codes and block scales of one row of K that holds x; V takes the negative."""
    scales = {} if format in (*HALVES, "mxfp4") else {"k_scale": scale, "v_scale": scale}
    cache = new_cache(format, 1, 1, 1, x.size, **scales)
    row = x.reshape(1, 1, -1)
    twin(cache, np.zeros(1, np.int64), row, -row)
    return cache


@TWINS
def test_bf16_and_f16_are_those_of_other_libraries(twin):
    x = numbers()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = {"bf16": x.astype(ml_dtypes.bfloat16), "f16": x.astype(np.float16)}
    for format in HALVES:
        got = written(twin, format, x).k.reshape(-1)
        nan = np.isnan(x)
        np.testing.assert_array_equal(got[~nan], expected[format].view(np.uint16)[~nan])
        assert np.isnan(got[nan].view(expected[format].dtype).astype(np.float32)).all()


@TWINS
@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.0213])
def test_fp8_is_clamped_then_cast(twin, format, scale):
    dtype, largest, nan = FP8[format]
    x = numbers(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.clip(x / np.float32(scale), -np.float32(largest), np.float32(largest))
        expected = wanted.astype(dtype).view(np.uint8)
    expected = np.where(np.isnan(x), nan + 128 * np.signbit(x), expected)
    cache = written(twin, format, x, scale)
    np.testing.assert_array_equal(cache.k.reshape(-1), expected)
    np.testing.assert_array_equal(cache.v.reshape(-1), expected ^ 128)


def slow_block(x: np.ndarray, format: str, outer: np.float32) -> tuple[list[int], int]:
    """Codes of one FP4 block and the code of its scale, by exhaustion."""
    amax = np.abs(x).max()
    if np.isnan(amax):
        code = 0x7F if format == "nvfp4" else 0xFF
    elif format == "nvfp4":
        wanted = float(np.clip(amax / (np.float32(6) * outer), np.float32(2.0**-9), np.float32(448)))
        code = 0x38 if amax == 0 else nearest_e4m3(wanted)
    else:
        code = 127 if amax == 0 else next((c for c in range(255) if float(amax) / 2.0 ** (c - 127) < 7), 253)
    scale = np.float32(oracle.E4M3[code]) * outer if format == "nvfp4" else np.float32(oracle.E8M0[code])
    codes = []
    for value in x / scale:
        codes.append(0 if np.isnan(value) else nearest_e2m1(float(abs(value))) + (8 if value < 0 else 0))
    return codes, code


def fp4_blocks(size: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    blocks = rng.standard_normal((60, size)).astype(np.float32) * np.exp2(rng.integers(-20, 12, (60, 1))).astype(
        np.float32
    )
    blocks[0], blocks[1] = 0, -0.0
    blocks[2] = np.float32(1e-40) * np.arange(size)
    blocks[3, 5] = np.nan
    blocks[4] = 0.7
    blocks[5, 3] = 1e30
    blocks[6] = 6
    blocks[7, 0] = 7 * 2.0**3
    blocks[8] = np.float32(2.0**-9) * 6
    blocks[9] = np.resize([0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 6], size)
    return blocks


@TWINS
@pytest.mark.parametrize(("format", "size"), [("nvfp4", 16), ("mxfp4", 32)])
def test_fp4_blocks(twin, format, size):
    outer = 0.37 if format == "nvfp4" else 1.0
    blocks = fp4_blocks(size)
    cache = written(twin, format, blocks.reshape(-1), outer)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [slow_block(b, format, np.float32(outer)) for b in blocks]
    np.testing.assert_array_equal(cache.k_block_scale.reshape(-1), [code for _, code in expected])
    nibbles = np.stack([cache.k & 15, cache.k >> 4], -1).reshape(len(blocks), size)
    for got, (codes, _), block in zip(nibbles, expected, blocks, strict=True):
        if not np.isnan(block).any():  # under a scale that is not a number codes mean nothing
            np.testing.assert_array_equal(got, codes)
    decoded = oracle.values(format, cache.k, outer, cache.k_block_scale).reshape(len(blocks), size)
    assert np.isnan(decoded[3]).all()
    assert np.isfinite(np.delete(decoded, 3, 0)).all()


@TWINS
def test_dsa_row(twin):
    rng = np.random.default_rng(4)
    latent = rng.standard_normal((8, 512)).astype(np.float32) * np.exp2(rng.integers(-12, 14, (8, 4))).repeat(128, 1)
    latent = latent.astype(np.float32)
    latent[0, :128] = 0
    latent[1, 128:256] = 448  # a quotient of exactly 1
    latent[2, 0] = np.nan
    latent[3, 0] = -np.inf
    latent[4, 300] = np.nextafter(np.float32(448 * 2), np.float32(1e9))
    rope = rng.standard_normal((8, 64)).astype(np.float32)
    cache = new_latent_cache("dsa", 1, 8)
    twin(cache, np.arange(8), latent, rope)
    for row, x, r in zip(cache.rows[0], latent, rope, strict=True):
        for block in range(4):
            part = x[128 * block : 128 * block + 128]
            amax = min(float(np.abs(part[~np.isnan(part)]).max()), float(np.finfo(np.float32).max))
            least = max(float(np.float32(amax) / np.float32(448)), float(np.float32(1e-4)))
            power = 2.0 ** math.ceil(math.log2(least))
            assert np.frombuffer(row.tobytes(), "<f4", 1, 512 + 4 * block)[0] == power
            held = np.clip(part / np.float32(power), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            np.testing.assert_array_equal(row[128 * block : 128 * block + 128], held)
        np.testing.assert_array_equal(row[528:].view("<u2"), r.astype(ml_dtypes.bfloat16).view(np.uint16))


@TWINS
@pytest.mark.parametrize("format", ["bf16", "e4m3"])
def test_flat_latent_rows_are_those_of_keys(twin, format):
    rng = np.random.default_rng(5)
    latent, rope = (rng.standard_normal((5, n)).astype(np.float32) for n in (48, 16))
    scale = 0.02 if format == "e4m3" else 1.0
    cache = new_latent_cache(format, 1, 5, 48, 16, scale=scale)
    twin(cache, np.arange(5), latent, rope)
    x = np.concatenate([latent, rope], 1)
    same = written(numba, format, x.reshape(-1), scale)
    np.testing.assert_array_equal(cache.rows.reshape(-1), same.k.reshape(-1))


@TWINS
@pytest.mark.parametrize("format", ["bf16", "f16", "e4m3", "e5m2", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_only_the_slots_asked_for_are_written(twin, format, dtype):
    rng = np.random.default_rng(6)
    cache = poisoned(format, 4, 8, 2, 32, 64)
    before = cache.k.copy(), cache.v.copy()
    slots = np.array([17, -1, 3, 31, -1], dtype)
    k, v = (rng.standard_normal((5, 2, n)).astype(np.float32) for n in (32, 64))
    twin(cache, slots, k, v)
    for got, old, scale in ((cache.k, before[0], cache.k_block_scale), (cache.v, before[1], cache.v_block_scale)):
        same = np.setdiff1d(np.arange(32), slots)
        np.testing.assert_array_equal(got.reshape(32, -1)[same], old.reshape(32, -1)[same])
        assert (got.reshape(32, -1)[[17, 3, 31]] != POISON[format]).any(1).all()
        if scale is not None:
            assert np.isin(scale.reshape(32, -1)[same], [0x7F, 0xFF]).all()
    read = oracle.values(format, cache.k, cache.k_scale, cache.k_block_scale).reshape(32, 2, 32)
    np.testing.assert_allclose(read[slots[slots >= 0]], k[slots >= 0], atol=1.0 if format == "e5m2" else 0.6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", ["bf16", "e4m3", "mxfp4"])
def test_half_precision_is_written_as_its_float32(format, dtype):
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(7)).to(getattr(torch, dtype))
    got, expected = poisoned(format, 1, 4, 2, 32, 32), poisoned(format, 1, 4, 2, 32, 32)
    slots = torch.tensor([2, 0, 3])
    attention.write(torch_of(got), slots, x, x)
    attention.reference_write(torch_of(expected), slots, x.float(), x.float())
    np.testing.assert_array_equal(got.k, expected.k)
    np.testing.assert_array_equal(got.v, expected.v)


@TWINS
def test_nothing_to_write(twin):
    cache = poisoned("e4m3", 1, 4, 2, 32, 32)
    nothing = np.zeros((0, 2, 32), np.float32)
    twin(cache, np.zeros(0, np.int32), nothing, nothing)
    assert (cache.k == POISON["e4m3"]).all()
