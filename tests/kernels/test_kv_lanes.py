"""The vector operations of the CPU attention, alone: every code, every lane, on this CPU and on one that can do little."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numba import njit
from oracle import attention as oracle
from quantkit.kernels.cpu import kv_lanes, simd


@njit
def widen_all(bytes_, f16, e4m3, bf16, out_f16, out_e4m3, out_bf16):
    for i in range(0, 65536, 16):
        simd.store(out_f16, i, kv_lanes.load_f16(f16, 2 * i))
        simd.store(out_bf16, i, kv_lanes.load_bf16(bf16, 2 * i))
    for i in range(0, 256, 32):
        simd.store(out_e4m3, i, kv_lanes.load_e4m3_256th(e4m3, i))
    return kv_lanes.f32_at(bytes_, 3)


def assert_every_code_is_exact():
    all16, all8 = np.arange(65536, dtype=np.uint16), np.arange(256, dtype=np.uint8)
    out = [np.empty(n, np.float32) for n in (65536, 256, 65536)]
    bytes_ = np.frombuffer(b"???" + np.float32(-1.75e-40).tobytes(), np.uint8)
    one = widen_all(bytes_, all16.view(np.uint8), all8, all16.view(np.uint8), *out)
    assert one == np.float32(-1.75e-40)
    with np.errstate(invalid="ignore"):
        expected = all16.view(np.float16).astype(np.float32), (oracle.E4M3 / 256).astype(np.float32), oracle.bf16(all16)
    for got, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
        number = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(wanted[number]))


def test_every_code_is_exact():
    assert_every_code_is_exact()


def test_every_code_is_exact_on_a_cpu_that_can_do_little(tmp_path):
    """Any x86-64 or ARM: an old x86 does not convert float16, and LLVM would end the process."""
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[1]))
    environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['assert_every_code_is_exact']()"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@njit
def small_operations(values, stride, nibbles, out):
    like = simd.zeros(4)
    simd.store(out, 0, kv_lanes.load_strided(values, 5, stride, like))
    all_ = simd.load_tile(values, 0, simd.zeros(16))
    simd.store(out, 64, kv_lanes.sums(all_))
    simd.store(out, 80, kv_lanes.spread(values, 37))
    simd.store(out, 96, simd.as_f32(kv_lanes.load_nibbles(nibbles, 1)))
    kv_lanes.prefetch(nibbles, 0)
    return kv_lanes.highest(simd.load_f32(values, 0))


def test_small_operations():
    values = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    nibbles = np.arange(17, 34, dtype=np.uint8)
    out = np.empty(112, np.float32)
    for high in range(16):  # the largest in every lane
        values[:16] = -np.arange(1, 17)
        values[high] = 7
        assert small_operations(values, 100, nibbles, out) == 7
    np.testing.assert_array_equal(out[:64], np.concatenate([values[5 + 100 * i :][:16] for i in range(4)]))
    np.testing.assert_allclose(out[64:80], values[:256].reshape(16, 16).sum(1, dtype=np.float64), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[80:96], values[37])
    lanes = out[96:].view(np.int32) & 15
    np.testing.assert_array_equal(lanes, np.stack([nibbles[1:9] & 15, nibbles[1:9] >> 4], 1).reshape(-1))


def test_sums_of_runs_run_in_one_order():
    """The same 16 numbers in every run: 16 equal sums, bit for bit."""
    run = np.random.default_rng(1).standard_normal(16).astype(np.float32) * np.float32(2.0) ** np.arange(16)
    out = np.empty(112, np.float32)
    small_operations(np.tile(run.astype(np.float32), 25), 16, np.zeros(17, np.uint8), out)
    np.testing.assert_array_equal(out[64:80], out[64])
