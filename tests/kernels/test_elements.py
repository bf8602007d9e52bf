"""Every code and every rounding case of the number formats, against torch's casts and ml_dtypes: exact."""

import ml_dtypes
import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantkit.kernels import elements as el
from quantkit.kernels.cpu import convert

ML = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
ENCODE = {
    "int4": el.encode_int4,
    "e2m1": el.encode_e2m1,
    "e4m3": el.encode_e4m3,
    "e5m2": el.encode_e5m2,
    "e8m0": el.encode_e8m0,
}


def all_bf16():
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def hard_values(name):
    """Every value, every midpoint, their float32 neighbours, with both signs, and every bfloat16."""
    values = el.ELEMENTS[name].values
    v = np.unique(values[np.isfinite(values)].astype(np.float64))
    points = np.concatenate([v, (v[1:] + v[:-1]) / 2, [0.0, 1.0, 3e38, 1e-45]]).astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    )
    return np.concatenate([points, -points, all_bf16()])


def encode_with_numba(helper, x):
    @numba.njit
    def loop(x, out):
        for i in range(x.size):
            out[i] = helper(x[i])

    out = np.empty(x.size, np.int64)
    loop(np.ascontiguousarray(x), out)
    return out


@pytest.mark.parametrize("name", sorted(ML))
def test_values_equal_ml_dtypes(name):
    element = el.ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    expected = codes.view(ML[name]).astype(np.float32)
    np.testing.assert_array_equal(element.values, expected)
    np.testing.assert_array_equal(
        np.signbit(element.values[~np.isnan(expected)]), np.signbit(expected[~np.isnan(expected)])
    )
    finite = expected[np.isfinite(expected)]
    assert element.max == finite.max()
    assert element.smallest == finite[finite > 0].min()


@pytest.mark.parametrize("name", sorted(ENCODE))
def test_every_value_encodes_to_itself(name):
    element = el.ELEMENTS[name]
    codes = np.flatnonzero(np.isfinite(element.values))
    expected = np.where(codes == 8, 0, codes) if name == "e2m1" else codes  # -0.0 becomes code 0
    np.testing.assert_array_equal(ENCODE[name](element.values[codes]), expected)


def test_int4_rounds_half_to_even_and_saturates():
    x = np.float32([-9, -8.5, -7.5, -0.5, 0.5, 1.5, 2.5, 7.49, 7.5, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(el.encode_int4(x).astype(int) - 8, [-8, -8, -8, 0, 0, 2, 2, 7, 7, 7, -8, 0])


def test_e2m1_equals_ml_dtypes():
    x = hard_values("e2m1")
    x = x[~np.isnan(x) & ~((x == 0) & np.signbit(x))]
    np.testing.assert_array_equal(el.encode_e2m1(x), x.astype(ML["e2m1"]).view(np.uint8) & 15)
    np.testing.assert_array_equal(el.encode_e2m1(np.float32([-0.0, np.nan, np.inf, -np.inf, -0.25])), [0, 0, 7, 15, 8])


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_equals_torch_and_ml_dtypes(name, dtype):
    x = hard_values(name)
    codes = ENCODE[name](x)
    clamped = np.clip(x, -el.ELEMENTS[name].max, el.ELEMENTS[name].max).astype(np.float32)  # NaN passes through
    by_torch = torch.from_numpy(clamped).to(dtype).view(torch.uint8).numpy()
    number = ~np.isnan(x)
    np.testing.assert_array_equal(codes[number], by_torch[number])
    np.testing.assert_array_equal(codes[number], clamped[number].astype(ML[name]).view(np.uint8))
    assert np.isnan(el.ELEMENTS[name].values[codes[~number]]).all()
    np.testing.assert_array_equal(codes[~number] >> 7, np.signbit(x[~number]))


def test_e8m0_equals_torch_and_saturates():
    x = hard_values("e8m0")
    # below 2^-126 torch's cast rounds up instead of to nearest, see the next test
    x = x[np.isnan(x) | ((x >= 2.0**-126) & (x <= 1.5 * 2.0**126))]
    by_torch = torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    np.testing.assert_array_equal(el.encode_e8m0(x), by_torch)
    outside = np.float32([0.0, -1.0, 3.4e38, np.inf, np.nan])
    np.testing.assert_array_equal(el.encode_e8m0(outside), [0, 0, 254, 254, 255])


def test_e8m0_subnormal_inputs_are_nearest():
    tie = np.float32(1.5 * 2.0**-127)
    x = np.float32(
        [1e-45, 2.0**-127, np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(1)), 2.0**-126]
    )
    np.testing.assert_array_equal(el.encode_e8m0(x), [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("helper", "name"), [(convert.f32_to_e4m3_code, "e4m3"), (convert.f32_to_e2m1_code, "e2m1")], ids=["e4m3", "e2m1"]
)
def test_numba_encoders_equal_the_definition(helper, name):
    x = hard_values(name)
    np.testing.assert_array_equal(encode_with_numba(helper, x), ENCODE[name](x))


@pytest.mark.parametrize(
    ("helper", "name"), [(convert.e4m3_code_to_f32, "e4m3"), (convert.e2m1_code_to_f32, "e2m1")], ids=["e4m3", "e2m1"]
)
def test_numba_decoders_equal_the_table(helper, name):
    values = el.ELEMENTS[name].values
    got = np.float32([helper(np.uint8(c)) for c in range(values.size)])
    np.testing.assert_array_equal(got, values)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.where(np.isnan(values), got, values)))


def f32_cases():
    """Every bfloat16 and float16, their midpoints' neighbourhoods, and random bits."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    high = np.arange(65536, dtype=np.uint32) << 16
    low = [0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    return np.concatenate([half, bits.view(np.float32), *[(high | k).view(np.float32) for k in low]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_conversions_equal_torch(dtype):
    to_f32, from_f32 = {
        torch.bfloat16: (convert.bf16_to_f32, convert.f32_to_bf16),
        torch.float16: (convert.f16_to_f32, convert.f32_to_f16),
    }[dtype]
    codes = np.arange(65536, dtype=np.uint16).reshape(16, 4096)
    out = np.empty(codes.shape, np.float32)
    to_f32(codes, out)
    expected = torch.from_numpy(codes.view(np.int16)).view(dtype).float().numpy()
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(out.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.isnan(out[~number]).all()

    x = f32_cases().reshape(1, -1)
    got = np.empty(x.shape, np.uint16)
    from_f32(x, got)
    expected = torch.from_numpy(x).to(dtype)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[number], expected.view(torch.int16).numpy().view(np.uint16)[number])
    assert torch.from_numpy(got.view(np.int16)).view(dtype).isnan().numpy()[~number].all()


@given(st.floats(width=32, allow_nan=False))
def test_encoders_pick_a_nearest_value(x):
    for name in ("e2m1", "e4m3", "e5m2"):
        element = el.ELEMENTS[name]
        values = element.values[np.isfinite(element.values)].astype(np.float64)
        target = min(max(x, -element.max), element.max)
        got = float(element.values[ENCODE[name](np.float32([x]))[0]])
        assert abs(got - target) == np.abs(values - target).min()
