"""Writes into a paged cache in Triton: the bits of the torch reference, and nothing beside them."""

import numpy as np
import pytest
import torch
from kv_caches import POISON, poisoned, torch_of
from quantkit.kernels import attention
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gpu import attention as gpu
from quantkit.kernels.kv import new_latent_cache

FORMATS = ("bf16", "f16", "e4m3", "e5m2", "nvfp4", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(shape, dtype, seed=0):
    """Random magnitudes from 1e-6 to 1e5, and rows of what is special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-14, 11, (*shape[:-1], 1)))
    x.reshape(-1, shape[-1])[0] = 0
    x.reshape(-1, shape[-1])[1] = -0.0
    x.reshape(-1, shape[-1])[2, :: max(shape[-1] // 5, 1)] = np.nan
    x.reshape(-1, shape[-1])[3, 0] = np.inf
    x.reshape(-1, shape[-1])[4, -1] = -np.inf
    x.reshape(-1, shape[-1])[5] *= 1e-40
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32)).to(dtype)


def bits(array):
    """Bits as integers; every NaN of a 16-bit float is the same one."""
    if array is None or array.dtype == torch.uint8:
        return array
    return array.cpu().view(torch.int16).int() & 0xFFFF


def same(a, b, format):
    if a is None:
        assert b is None
        return
    a, b = bits(a).cpu(), bits(b).cpu()
    if format in ("bf16", "f16"):
        exponent = 0x7F80 if format == "bf16" else 0x7C00
        nan_a, nan_b = ((x & 0x7FFF) > exponent for x in (a, b))
        assert torch.equal(nan_a, nan_b)
        a, b = a.masked_fill(nan_a, 0), b.masked_fill(nan_b, 0)
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_the_reference(format, dtype, device):
    for slots, heads, k_dim, v_dim in ((4, 2, 64, 32), (3, 1, 96, 160)):
        mine = torch_of(poisoned(format, 5, slots, heads, k_dim, v_dim), device)
        theirs = torch_of(poisoned(format, 5, slots, heads, k_dim, v_dim))
        order = torch.from_numpy(np.random.default_rng(1).permutation(5 * slots)[: 3 * slots])
        order[2] = -1
        k, v = (numbers((3 * slots, heads, d), dtype, d) for d in (k_dim, v_dim))
        gpu.write(mine, order.to(device), k.to(device), v.to(device))
        attention.reference_write(theirs, order, k, v)
        for part in ("k", "v", "k_block_scale", "v_block_scale"):
            same(getattr(mine, part), getattr(theirs, part), format)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "bf16", "f16"])
def test_widths_that_are_no_power_of_two(format, device):
    mine, theirs = (torch_of(poisoned(format, 2, 4, 3, 17, 1), d) for d in (device, "cpu"))
    k, v = numbers((6, 3, 17), torch.float32), numbers((6, 3, 1), torch.float32)
    slots = torch.tensor([7, 0, 3, -1, 5, 1], dtype=torch.int32)
    gpu.write(mine, slots.to(device), k.to(device), v.to(device))
    attention.reference_write(theirs, slots, k, v)
    same(mine.k, theirs.k, format)
    same(mine.v, theirs.v, format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("format", "rank", "rope"),
    [("bf16", 512, 64), ("e4m3", 512, 64), ("dsa", 512, 64), ("bf16", 40, 0), ("e4m3", 24, 7)],
)
def test_latent_rows(format, rank, rope, dtype, device):
    caches = [new_latent_cache(format, 3, 4, rank, rope, scale=0.31 if format == "e4m3" else 1.0) for _ in range(2)]
    for cache in caches:
        cache.rows[...] = POISON[format]
    mine, theirs = torch_of(caches[0], device), torch_of(caches[1])
    latent, ropes = (
        numbers((9, rank), dtype, 1),
        numbers((9, rope), dtype, 2) if rope else torch.empty(9, 0, dtype=dtype),
    )
    if format == "dsa":  # a NaN keeps its payload to itself in the bf16 part, whatever the library
        ropes = ropes.nan_to_num(1.0)
    slots = torch.tensor([7, 0, 3, -1, 5, 11, 2, 10, 1])
    gpu.write_latent(mine, slots.to(device), latent.to(device), ropes.to(device))
    attention.reference_write_latent(theirs, slots, latent, ropes)
    same(mine.rows, theirs.rows, format)


def test_no_tokens(device):
    cache = torch_of(poisoned("e4m3", 1, 4, 1, 16, 16), device)
    before = cache.k.clone()
    none = torch.empty(0, 1, 16, device=device)
    gpu.write(cache, torch.empty(0, dtype=torch.int32, device=device), none, none)
    assert torch.equal(cache.k, before)


def test_slots_outside_and_twice_are_refused(device):
    cache = torch_of(poisoned("e4m3", 2, 4, 1, 16, 16), device)
    before = cache.k.clone()
    x = torch.ones(2, 1, 16, device=device)
    for slots, message in (([0, 8], "outside"), ([-2, 1], "outside"), ([3, 3], "two tokens")):
        with pytest.raises(QuantkitError, match=message):
            gpu.write(cache, torch.tensor(slots, device=device), x, x)
    latent = torch_of(new_latent_cache("dsa", 1, 4), device)
    with pytest.raises(QuantkitError, match="outside"):
        gpu.write_latent(latent, torch.tensor([4], device=device), x.new_ones(1, 512), x.new_ones(1, 64))
    assert torch.equal(cache.k, before)
