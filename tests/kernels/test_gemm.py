"""The packed GEMM: the Numba twin against float64, for every layout, odd shapes, extreme numbers and wrong operands."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from oracle.packed_product import bound, nvfp4_activations, product
from packed_matrices import KINDS, ODD_INPUTS, random_matrix, with_all_codes
from quantkit.kernels.cpu.gemm import grouped_matmul, matmul
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.matrix import PackedMatrix
from quantkit.kernels.scheme import SCHEMES

# Every width of a tile and its remainders, and the BLAS path.
TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 13, 100]


def activations(tokens: int, inputs: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, inputs)).astype(np.float32)


def check(x: np.ndarray, w: PackedMatrix, threads: int = 1) -> None:
    y = matmul(x, w, threads=threads)
    assert y.dtype == np.float32
    error = np.abs(y - product(x, w))
    worst = np.unravel_index(np.argmax(error - bound(x, w)), error.shape)
    assert (error <= bound(x, w)).all(), (
        f"{w.scheme.name} {w.outputs}x{w.inputs}, {len(x)} tokens, {worst}: {error[worst]}"
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_is_as_exact_as_a_plain_float32_product(name: str, scale_format: str, tokens: int) -> None:
    for outputs, inputs in ((1, 128), (7, 256), (130, 384)):
        check(activations(tokens, inputs), random_matrix(name, outputs, inputs, scale_format))


@pytest.mark.parametrize(
    ("name", "scale_format", "inputs"),
    ODD_INPUTS,
)
def test_rows_that_are_no_whole_blocks(name: str, scale_format: str, inputs: int) -> None:
    for outputs in (1, 2, 65, 129):
        for tokens in (1, 3, 8, 97):
            check(activations(tokens, inputs), random_matrix(name, outputs, inputs, scale_format))


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_threads_give_the_same_bits(name: str, scale_format: str) -> None:
    w = random_matrix(name, 200, 384, scale_format)
    for tokens in (1, 2, 4, 8):
        x = activations(tokens, 384)
        np.testing.assert_array_equal(matmul(x, w, threads=2), matmul(x, w, threads=1))


@pytest.mark.parametrize("element", ["int4", "int4a", "e2m1", "e4m3"])
def test_every_code_alone(element: str) -> None:
    """Each code in each position of a block, with the other inputs zero: the exact value comes out."""
    name = {"int4": "int4-g128", "int4a": "int4a-g128", "e2m1": "nvfp4", "e4m3": "fp8-block"}[element]
    scale_format = {"e2m1": "e4m3", "e4m3": "f32"}.get(element, "bf16")
    w = random_matrix(name, 256, 128, scale_format)
    byte = np.arange(256, dtype=np.uint8)[:, None]
    w = replace(w, codes=np.broadcast_to(byte, w.codes.shape).copy(), global_scale=1.0)
    x = np.eye(128, dtype=np.float32)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 8), slice(0, 128)):
        y = matmul(np.ascontiguousarray(x[rows]), w)
        exact = product(x[rows], w)
        np.testing.assert_array_equal(y[np.isfinite(exact)], exact[np.isfinite(exact)].astype(np.float32))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_activations(dtype: str) -> None:
    w = random_matrix("int4-g128", 64, 256, "bf16")
    x = activations(5, 256).astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    given = x if dtype == "float16" else x.view(np.uint16)
    np.testing.assert_array_equal(matmul(given, w), matmul(x.astype(np.float32), w))


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_extreme_numbers(name: str, scale_format: str) -> None:
    w = random_matrix(name, 12, 256, scale_format)
    huge = activations(4, 256)
    huge[:, 17] = 1e30
    equal = np.full((3, 256), 0.3, np.float32)
    tiny = np.full((2, 256), 1e-40, np.float32)
    minus_zero = np.full((2, 256), -0.0, np.float32)
    for x in (huge, equal, tiny, minus_zero, np.zeros((8, 256), np.float32)):
        check(x, w)
        check(x, with_all_codes(w, 0))
        check(x, with_all_codes(w, 0x88))


def test_infinite_and_nan_activations_stay_with_their_token() -> None:
    w = random_matrix("int4-g128", 40, 256, "bf16")
    x = activations(6, 256)
    good = matmul(x, w)
    x[2, 5], x[4, 9] = np.nan, np.inf
    y = matmul(x, w)
    assert not np.isfinite(y[2]).any() and np.isnan(y[2]).all()
    untouched = [0, 1, 3, 5]
    np.testing.assert_array_equal(y[untouched], good[untouched])


def test_scales_of_subnormal_size_and_nan() -> None:
    w = random_matrix("int4-channel", 3, 64, "bf16")
    check(activations(2, 64), replace(w, scale=np.array([[1], [0], [0x8001]], np.uint16)))
    y = matmul(activations(2, 64), replace(w, scale=np.array([[0x3F80], [0x7FC0], [0x3F80]], np.uint16)))
    np.testing.assert_array_equal(np.isnan(y), [[False, True, False]] * 2)
    w = random_matrix("mxfp4", 3, 32, "e8m0")
    check(activations(2, 32), replace(w, scale=np.array([[0], [1], [130]], np.uint8)))
    assert np.isnan(matmul(activations(1, 32), replace(w, scale=np.full((3, 1), 255, np.uint8)))).all()


def test_no_tokens() -> None:
    assert matmul(np.empty((0, 128), np.float32), random_matrix("int4-g128", 5, 128, "bf16")).shape == (0, 5)


def test_w4a4_quantises_the_activations() -> None:
    w = random_matrix("nvfp4", 33, 160, "e4m3")
    x = activations(6, 160)
    x[1] = 0
    x[2, 16:32] = 0
    x[3, 40] = 3000.0
    x[4] *= 1e-6
    for input_scale in (0.002, float(np.abs(x).max()) / (6 * 448), 1.0):
        seen = nvfp4_activations(x, input_scale)
        y = matmul(x, w, input_scale=input_scale)
        assert (np.abs(y - product(seen, w)) <= bound(seen, w) + 1e-30).all(), input_scale


def test_grouped_form() -> None:
    experts = [random_matrix("int4-g32", 70, 128, "bf16", seed=e) for e in range(5)]
    x = activations(31, 128)
    starts = np.array([0, 4, 4, 20, 21, 31], np.int32)
    y = grouped_matmul(x, starts, experts, threads=2)
    for e, w in enumerate(experts):
        part = slice(starts[e], starts[e + 1])
        assert (np.abs(y[part] - product(x[part], w)) <= bound(x[part], w)).all() if part.start < part.stop else True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((4, 60), np.uint8)}, "the codes"),
        ({"codes": np.zeros((4, 64), np.int8)}, "the codes"),
        ({"codes": np.zeros((4, 128), np.uint8)[:, ::2]}, "contiguous"),
        ({"scale": np.zeros((4, 2), np.uint16)}, "the scales"),
        ({"scale": np.zeros((4, 1), np.float32)}, "the scales"),
        ({"scale_format": "f32"}, "no scales in this format"),
        ({"zero": np.zeros((1, 1), np.int32)}, "zero points"),
        ({"global_scale": 2.0}, "global scale"),
        ({"inputs": 100}, "whole groups"),
        ({"scheme": SCHEMES["bf16"]}, "quantised scheme"),
        ({"scheme": SCHEMES["int4a-g128"]}, "needs zero points"),
        ({"outputs": 0}, "rows and columns"),
    ],
)
def test_refuses_a_matrix_that_does_not_fit(change: dict, message: str) -> None:
    w = replace(random_matrix("int4-g128", 4, 128, "bf16"), **change)
    with pytest.raises(QuantkitError, match=message):
        matmul(np.zeros((1, 128), np.float32), w)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 127), np.float32), "do not fit the matrix"),
        (np.zeros(128, np.float32), "do not fit the matrix"),
        (np.zeros((1, 128), np.float64), "wrong dtype"),
        (np.zeros((128, 2), np.float32).T, "contiguous"),
    ],
)
def test_refuses_activations_that_do_not_fit(x: np.ndarray, message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        matmul(x, random_matrix("int4-g128", 4, 128, "bf16"))


def test_refuses_activation_scales_that_do_not_fit() -> None:
    x = np.zeros((1, 128), np.float32)
    with pytest.raises(QuantkitError, match="NVFP4 weights only"):
        matmul(x, random_matrix("int4-g128", 4, 128, "bf16"), input_scale=1.0)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(QuantkitError, match="scale of the activations"):
            matmul(x, random_matrix("nvfp4", 4, 128, "e4m3"), input_scale=wrong)
    x[0, 3] = np.nan
    with pytest.raises(QuantkitError, match="must be finite"):
        matmul(x, random_matrix("nvfp4", 4, 128, "e4m3"), input_scale=1.0)


def test_refuses_experts_that_do_not_fit() -> None:
    x = np.zeros((4, 128), np.float32)
    same = [random_matrix("int4-g128", 4, 128, "bf16", seed=e) for e in range(2)]
    with pytest.raises(QuantkitError, match="needs experts"):
        grouped_matmul(x, np.array([0], np.int32), [])
    with pytest.raises(QuantkitError, match="expert 1 differs"):
        grouped_matmul(x, np.array([0, 2, 4], np.int32), [same[0], random_matrix("int4-g128", 8, 128, "bf16")])
    for wrong in ([0, 2, 3], [1, 2, 4], [0, 5, 4], [0, -1, 4]):
        with pytest.raises(QuantkitError, match="do not divide the tokens"):
            grouped_matmul(x, np.array(wrong, np.int32), same)
    with pytest.raises(QuantkitError, match="expert offsets"):
        grouped_matmul(x, np.array([0, 2, 4], np.int64), same)


OTHER_CPU = """
import numpy as np
from packed_matrices import random_matrix
from quantkit.kernels.cpu.gemm import matmul
from oracle.packed_product import bound, product
for name, fmt in (("int4-g32", "bf16"), ("nvfp4", "e4m3"), ("fp8-block", "f32")):
    w = random_matrix(name, 9, 256, fmt)
    for tokens in (1, 8):
        x = np.random.default_rng(0).standard_normal((tokens, 256)).astype(np.float32)
        assert (np.abs(matmul(x, w) - product(x, w)) <= bound(x, w)).all(), (name, tokens)
print("same")
"""


@pytest.mark.parametrize("features", ["+avx,+avx2,+fma,+f16c", "+avx,+f16c"])
def test_code_for_other_cpus(features: str, tmp_path: Path) -> None:
    """The lookup has a version for AVX-512, one for AVX2 and a plain one; each machine runs those it can."""
    flags = Path("/proc/cpuinfo").read_text()
    assert all(f in flags for f in ("avx2", "fma", "f16c")), "this test needs an x86-64-v3 machine"
    env = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", OTHER_CPU], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr
