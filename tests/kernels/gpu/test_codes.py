"""Codes in Triton: every code decoded, every rounding boundary encoded, as the numpy definition in elements.py."""

import numpy as np
import pytest
import torch
import triton.language as tl
from quantkit.kernels import elements
from quantkit.kernels.elements import ELEMENTS
from quantkit.kernels.gpu import decode, encode
from quantkit.kernels.gpu.jit import has_e4m3, jit


@jit
def decode_all(codes_ptr, out_ptr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + at)
    if FORMAT == "e2m1":
        values = decode.e2m1_to_f32(codes)
    else:
        values = decode.stored_to_f32(codes, FORMAT, NATIVE)
    tl.store(out_ptr + at, values)


def decoded(codes, format, device, native=False):
    block = min(len(codes), 4096)
    out = torch.full((len(codes),), torch.nan, device=device)
    decode_all[(len(codes) // block,)](codes.to(device), out, format, native, block)
    return out.cpu().numpy()


@pytest.mark.parametrize("format", ["e2m1", "e4m3", "e5m2", "e8m0"])
def test_every_code_of_few_bits(format, device):
    values = ELEMENTS[format].values
    codes = torch.arange(len(values), dtype=torch.uint8)
    for native in {False, format == "e4m3" and has_e4m3(codes.to(device))}:
        got = decoded(codes, format, device, native)
        np.testing.assert_array_equal(got, values)
        np.testing.assert_array_equal(np.signbit(got)[values == 0], np.signbit(values)[values == 0])


@pytest.mark.parametrize(("format", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_every_16_bit_float(format, dtype, device):
    bits = torch.from_numpy(np.arange(65536, dtype=np.uint16))
    np.testing.assert_array_equal(decoded(bits, format, device), bits.view(dtype).float().numpy())


@jit
def nibbles_minus(pairs_ptr, offset_ptr, out_ptr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    r, b, i = tl.arange(0, ROWS), tl.arange(0, BYTES), tl.arange(0, 2 * BYTES)
    codes = decode.nibbles(tl.load(pairs_ptr + r[:, None] * BYTES + b[None, :]))
    tl.store(out_ptr + r[:, None] * 2 * BYTES + i[None, :], decode.int4_to_f32(codes, tl.load(offset_ptr + r)[:, None]))


def test_every_pair_of_nibbles_under_every_offset(device):
    pairs = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    offsets = torch.arange(16.0)
    out = torch.full((16, 512), torch.nan, device=device)
    nibbles_minus[(1,)](pairs.to(device), offsets.to(device), out, 16, 256)
    expected = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1).float() - offsets[:, None]
    assert torch.equal(out.cpu(), expected)


@jit
def encode_all(x_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, encode.f32_to_e2m1(x) if FORMAT == "e2m1" else encode.f32_to_stored(x, FORMAT))


def encoded(x, format, device):
    padded = np.zeros(-(-len(x) // 4096) * 4096, np.float32)
    padded[: len(x)] = x
    out = torch.full(padded.shape, -1, dtype=torch.int32, device=device)
    encode_all[(len(padded) // 4096,)](torch.from_numpy(padded).to(device), out, format, 4096)
    return out.cpu().numpy()[: len(x)]


def boundaries(values):
    """Every value, every midpoint of two, and their neighbours in float32; both signs; extremes; NaN."""
    v = np.unique(values[np.isfinite(values) & (values >= 0)]).astype(np.float64)
    points = np.concatenate([v, (v[1:] + v[:-1]) / 2, [v[-1] * 1.03, v[-1] * 2, v[1] / 2]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))])
    rest = np.array([1e-45, 1e-38, 3.4e38, np.inf, np.nan, 0], np.float32)
    points = np.concatenate([points, rest, np.geomspace(1e-9, 1e6, 3000, dtype=np.float32)])
    return np.concatenate([points, -points, [-np.float32(np.nan)]]).astype(np.float32)


@pytest.mark.parametrize("format", ["e2m1", "e4m3", "e5m2"])
def test_every_boundary_of_few_bits(format, device):
    x = boundaries(ELEMENTS[format].values)
    expected = getattr(elements, f"encode_{format}")(x)
    np.testing.assert_array_equal(encoded(x, format, device), expected)


@pytest.mark.parametrize(("format", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_16_bit_floats_are_rounded_as_torch_does(format, dtype, device):
    x = boundaries(np.arange(0, 65536, 7, dtype=np.uint16).view(np.float16).astype(np.float32))
    x = np.concatenate([x, np.random.default_rng(0).integers(0, 2**32, 20000, np.uint32).view(np.float32)])
    got = torch.from_numpy(encoded(x, format, device).astype(np.uint16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(got, torch.from_numpy(x).to(dtype).float().numpy())
