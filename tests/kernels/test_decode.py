"""Row decoders against tables and plain numpy, chunk by chunk as the pipeline calls them: exact."""

import numpy as np
import pytest
from quantkit.kernels import elements, layouts, packed
from quantkit.kernels.cpu import decode

RNG = np.random.default_rng(7)


def scales(*shape):
    return (RNG.random(shape, dtype=np.float32) + 0.1) * RNG.choice(np.float32([1, -1]), shape)


def chunks(rows, size):
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)]


@pytest.mark.parametrize("inputs", [1, 96, 129])
def test_fp8_channel_and_every_code(inputs):
    codes = np.arange(256, dtype=np.uint8).repeat(inputs).reshape(256, inputs)
    scale = scales(256, 1)
    out = np.empty(codes.shape, np.float32)
    decode.fp8_group_to_f32(codes, scale, out)
    np.testing.assert_array_equal(out, elements.E4M3_VALUES[codes] * scale)


def test_fp8_groups_of_32():
    codes = RNG.integers(0, 256, (5, 96), dtype=np.uint8)
    scale = elements.E8M0_VALUES[RNG.integers(100, 140, (5, 3))]
    out = np.empty(codes.shape, np.float32)
    decode.fp8_group_to_f32(codes, scale, out)
    np.testing.assert_array_equal(out, elements.E4M3_VALUES[codes] * scale.repeat(32, axis=1))


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 5), (257, 384)], ids=str)
@pytest.mark.parametrize("size", [128, 100])
def test_fp8_blocks_from_any_row(shape, size):
    rows, inputs = shape
    codes = RNG.integers(0, 256, shape, dtype=np.uint8)
    scale = scales(-(-rows // 128), -(-inputs // 128))
    out = np.empty(shape, np.float32)
    for s in chunks(rows, size):
        decode.fp8_block_to_f32(codes[s], scale, s.start, out[s])
    full = scale.repeat(128, axis=0).repeat(128, axis=1)[:rows, :inputs]
    np.testing.assert_array_equal(out, elements.E4M3_VALUES[codes] * full)


@pytest.mark.parametrize(("inputs", "groups"), [(64, 2), (128, 1), (33, 1), (1, 1), (256, 2), (7, 1)])
def test_int4(inputs, groups):
    q = RNG.integers(-8, 8, (6, inputs)).astype(np.int8)
    scale, zero = scales(6, groups), RNG.integers(-8, 8, (6, groups)).astype(np.int8)
    codes = packed.pack_codes(q).view(np.uint8)
    out = np.empty(q.shape, np.float32)
    decode.int4_to_f32(codes, scale, zero, out)
    group = inputs // groups
    np.testing.assert_array_equal(out, (q - zero.repeat(group, axis=1)) * scale.repeat(group, axis=1))


@pytest.mark.parametrize("group", [16, 32])
def test_fp4(group):
    codes = np.concatenate(
        [np.arange(16, dtype=np.uint8).repeat(6)[None], RNG.integers(0, 16, (4, 96), dtype=np.uint8)]
    )
    scale = scales(5, 96 // group)
    out = np.empty(codes.shape, np.float32)
    decode.fp4_to_f32(packed.pack_pairs(codes), scale, group, out)
    expected = elements.E2M1_VALUES[codes] * scale.repeat(group, axis=1)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))


def k_major(act_order):
    outputs, inputs, groups = 24, 96, 3
    codes = RNG.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    zero = RNG.integers(0, 16, (groups, outputs), dtype=np.uint8)
    g_idx = np.arange(inputs, dtype=np.int32) // 32
    if act_order:
        g_idx = RNG.permutation(g_idx)
    scale = scales(groups, outputs)
    w = (codes.astype(np.float32) - zero[g_idx].T) * scale[g_idx].T
    return codes, zero, g_idx, scale, w


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_column_slices(act_order):
    codes, zero, g_idx, scale, w = k_major(act_order)
    words = layouts.gptq_pack(codes)
    out, nibbles = np.empty(w.shape, np.float32), np.empty((24, 48), np.uint8)
    for s in chunks(24, 10):
        decode.gptq_to_f32(words[:, s], scale[:, s], zero[:, s], g_idx, out[s])
        decode.gptq_to_int4(words[:, s], nibbles[s])
    np.testing.assert_array_equal(out, w)
    np.testing.assert_array_equal(nibbles.view(np.int32), packed.pack_words(codes))


@pytest.mark.parametrize("act_order", [False, True])
def test_awq_column_slices(act_order):
    codes, zero, g_idx, scale, w = k_major(act_order)
    words = layouts.awq_pack(codes)
    out, nibbles = np.empty(w.shape, np.float32), np.empty((24, 48), np.uint8)
    for s in chunks(24, 10):
        first_word = s.start // 8
        part, first = np.ascontiguousarray(words[:, first_word:]), s.start - 8 * first_word
        decode.awq_to_f32(part, first, scale[:, s], zero[:, s], g_idx, out[s])
        decode.awq_to_int4(part, first, nibbles[s])
    np.testing.assert_array_equal(out, w)
    np.testing.assert_array_equal(nibbles.view(np.int32), packed.pack_words(codes))


def test_awq_rows_are_padded_with_raw_zero():
    codes = RNG.integers(0, 16, (8, 12), dtype=np.uint8)
    nibbles = np.full((8, 8), 255, np.uint8)
    decode.awq_to_int4(layouts.awq_pack(codes), 0, nibbles)
    np.testing.assert_array_equal(nibbles.view(np.int32), packed.pack_words(codes))
