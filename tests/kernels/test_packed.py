"""Packed layouts: golden bytes, compressed-tensors' own functions, and the way back. All exact."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st
from quantkit.kernels import layouts, packed
from quantkit.kernels.errors import QuantkitError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vectors.json").read_text())
SHAPES = [(1, 1), (3, 7), (1, 8), (8, 9), (16, 64), (5, 33), (24, 40)]


def words(rows):
    return np.array([[int(w, 16) for w in row] for row in rows], np.uint32).view(np.int32)


def codes(shape, low=-8, seed=0):
    return np.random.default_rng(seed).integers(low, low + 16, shape).astype(np.int8 if low else np.uint8)


@pytest.mark.parametrize("name", ["ct_int4_pack_ramp", "ct_int4_pack_ragged_cols10"])
def test_codes_golden(name):
    golden = GOLDEN[name]
    q = np.array(golden["q_signed"], np.int8)
    got = packed.pack_codes(q)
    np.testing.assert_array_equal(got, words(golden["weight_packed_i32"]))
    assert got.tobytes().hex() == golden["weight_packed_bytes"]
    np.testing.assert_array_equal(packed.unpack_codes(got, q.shape[1]), q)


def test_zero_points_golden():
    golden = GOLDEN["ct_int4_zero_point_pack_dim0"]
    zero = np.array(golden["zp_signed_N16xG1"], np.int8)
    got = packed.pack_zero_points(zero)
    assert got.tobytes().hex() == golden["weight_zero_point_bytes"]
    np.testing.assert_array_equal(packed.unpack_zero_points(got, 16), zero)


def test_fp4_pairs_golden():
    golden = GOLDEN["e2m1_codes_in_order"]
    pairs = packed.pack_pairs(np.arange(16, dtype=np.uint8)[None])
    assert pairs.tobytes().hex() == golden["ct_packed_bytes"]
    np.testing.assert_array_equal(packed.unpack_pairs(pairs), [np.arange(16)])


def test_modelopt_int4_golden():
    golden = GOLDEN["modelopt_int4_awq_4x16"]
    q = np.array(golden["q_signed_rows"], np.int8)
    got = packed.pack_row_pairs(q)
    assert got.tobytes().hex() == golden["weight_bytes"]
    np.testing.assert_array_equal(packed.unpack_row_pairs(got), q)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_equal_compressed_tensors(shape):
    q = codes(shape)
    got = packed.pack_codes(q)
    np.testing.assert_array_equal(got, pack_to_int32(torch.from_numpy(q), 4).numpy())
    np.testing.assert_array_equal(packed.unpack_codes(got, shape[1]), q)
    np.testing.assert_array_equal(unpack_from_int32(torch.from_numpy(got), 4, torch.Size(shape)).numpy(), q)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_points_equal_compressed_tensors(shape):
    zero = codes(shape, seed=1)
    got = packed.pack_zero_points(zero)
    np.testing.assert_array_equal(got, pack_to_int32(torch.from_numpy(zero), 4, packed_dim=0).numpy())
    np.testing.assert_array_equal(packed.unpack_zero_points(got, shape[0]), zero)


def test_gptq_golden():
    golden = GOLDEN["gptq_int4_16x16"]
    stored = np.array(golden["codes_unsigned_KxN"], np.uint8)
    qweight = words(golden["qweight_i32"])
    assert qweight.tobytes().hex() == golden["qweight_bytes"]
    np.testing.assert_array_equal(layouts.gptq_unpack(qweight), stored.T)
    np.testing.assert_array_equal(layouts.gptq_pack(np.ascontiguousarray(stored.T)), qweight)
    eights = np.full((1, 16), 8, np.uint8)
    for key, v2 in (("qzeros_sym_v1", False), ("qzeros_sym_v2", True)):
        np.testing.assert_array_equal(layouts.gptq_pack_zeros(eights, v2=v2), words(golden[key]))
        np.testing.assert_array_equal(layouts.gptq_unpack_zeros(words(golden[key]), 16, v2=v2), eights)


def test_gptq_v1_zeros_wrap():
    zeros = np.arange(16, dtype=np.uint8)[None]
    qzeros = layouts.gptq_pack_zeros(zeros, v2=False)
    np.testing.assert_array_equal(packed.unpack_words(qzeros, 16), [[15, *range(15)]])
    np.testing.assert_array_equal(layouts.gptq_unpack_zeros(qzeros, 16, v2=False), zeros)


def test_awq_golden():
    golden = GOLDEN["awq_int4_16x16"]
    stored = np.array(golden["codes_unsigned_KxN"], np.uint8)
    qweight = words(golden["qweight_i32"])
    assert qweight.tobytes().hex() == golden["qweight_bytes"]
    np.testing.assert_array_equal(layouts.awq_unpack(qweight), stored.T)
    np.testing.assert_array_equal(layouts.awq_pack(np.ascontiguousarray(stored.T)), qweight)
    zeros = np.array(golden["zeros"], np.uint8)
    np.testing.assert_array_equal(layouts.awq_unpack_zeros(words(golden["qzeros_i32"])), zeros)
    np.testing.assert_array_equal(layouts.awq_pack_zeros(zeros), words(golden["qzeros_i32"]))


def test_gptq_is_the_transpose_of_compressed_tensors():
    q, zero = codes((24, 64)), codes((24, 4), seed=2)
    unsigned = (q + 8).astype(np.uint8)
    np.testing.assert_array_equal(packed.pack_codes(q), layouts.gptq_pack(unsigned).T)
    unsigned_zero = np.ascontiguousarray((zero + 8).astype(np.uint8).T)
    np.testing.assert_array_equal(packed.pack_zero_points(zero), layouts.gptq_pack_zeros(unsigned_zero, v2=True).T)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_every_layout_comes_back(rows, inputs, seed):
    q = codes((rows, inputs), seed=seed)
    np.testing.assert_array_equal(packed.unpack_codes(packed.pack_codes(q), inputs), q)
    even = codes((2 * rows, 2 * inputs), low=0, seed=seed)
    np.testing.assert_array_equal(packed.unpack_pairs(packed.pack_pairs(even)), even)
    signed = even.astype(np.int8) - np.int8(8)
    np.testing.assert_array_equal(packed.unpack_row_pairs(packed.pack_row_pairs(signed)), signed)
    eights = codes((8 * rows, 8 * inputs), low=0, seed=seed)
    np.testing.assert_array_equal(layouts.gptq_unpack(layouts.gptq_pack(eights)), eights)
    np.testing.assert_array_equal(layouts.awq_unpack(layouts.awq_pack(eights)), eights)


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(QuantkitError, match="pairs of inputs"):
        packed.pack_pairs(np.zeros((2, 3), np.uint8))
    with pytest.raises(QuantkitError, match="pairs of rows"):
        packed.pack_row_pairs(np.zeros((3, 2), np.int8))
    for inputs in (8, 17):
        with pytest.raises(QuantkitError, match="wrong length"):
            packed.unpack_codes(np.zeros((1, 2), np.int32), inputs)
