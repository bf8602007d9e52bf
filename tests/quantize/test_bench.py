"""`quantkit bench`: both commands end to end on tiny sizes, every wrong argument, and that baselines compute the same.

How fast anything is is not asserted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from quantkit.kernels import attention as attention_reference
from quantkit.kernels import gemm as gemm_reference
from quantkit.kernels.matrix import packed_bytes
from quantkit.quantize.bench import attention, gemm, kernels, kv, timing
from quantkit.quantize.bench.device import Device
from quantkit.quantize.bench.names import A4, DEFAULT, GEMM
from quantkit.quantize.bench.timing import Candidate

GEMM_DEFAULT = [n for n in DEFAULT if n in GEMM]
ATTENTION_DEFAULT = [n for n in DEFAULT if n not in GEMM]
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
KERNELS = ("bench", "kernels", "--shape", "64x256", "--tokens", "1,3", "--context", "70", "--repeat", "1")
KV = ("bench", "kv", "--concurrency", "1,2", "--budget", "34MB", "--context", "4000", "--new", "3", "--seconds", "0.01",
      "--requests", "60")  # fmt: skip


def quantkit(*args: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom quantkit.quantize.cli.main import main; main()"
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)


# ---- bench kernels ----


def test_kernels_as_json() -> None:
    done = quantkit(*KERNELS, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["kernel"], r["m"]) for r in rows if r["kernel"] in GEMM] == [
        (name, m) for m in (1, 3) for name in GEMM_DEFAULT
    ]
    assert [r["kernel"] for r in rows if r["kernel"] not in GEMM] == ATTENTION_DEFAULT
    for r in rows:
        assert {"kernel", "device", "m", "n", "k", "seconds", "packed_bytes", "baselines"} <= set(r)
        assert r["device"] == "cpu"
        assert r["seconds"] > 0
        assert r["gbps"] == pytest.approx(r["packed_bytes"] / r["seconds"] / 1e9)
        assert all(s > 0 for s in r["baselines"].values())
    by_name = {r["kernel"]: r for r in rows}
    weight = by_name["int4-g128"]
    assert (weight["n"], weight["k"], weight["packed_bytes"]) == (64, 256, 64 * 128 + 64 * 2 * 2)
    assert set(weight["baselines"]) == {"torch f32 linear", "torch bf16 linear", "ATen int4"}
    cache = by_name["kv-e4m3"]
    assert (cache["m"], cache["n"], cache["k"], cache["packed_bytes"]) == (32, 70, 128, 70 * 8 * 128 * 2)
    assert set(cache["baselines"]) == {"torch f32 sdpa", "torch bf16 sdpa", "kv-bf16"}
    assert by_name["mla-dsa"]["packed_bytes"] == 70 * 656


def test_kernels_for_people() -> None:
    done = quantkit(*KERNELS, "--schemes", "nvfp4,kv-e5m2", "--tokens", "2", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "data only on stdout"
    for text in ("processor", "load", "1 threads used", "bandwidth", "GEMM 64 x 256", "nvfp4", "ATen int4", "70 cached tokens",
                 "kv-e5m2", "torch bf16 sdpa", "of memory"):  # fmt: skip
        assert text in done.stderr
    assert "int4-g128" not in done.stderr


# ---- bench kv ----


def test_kv_as_json() -> None:
    done = quantkit(*KV, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    faults = result["faults"]
    assert 0 < faults["injected"] == faults["detected"]
    assert faults["false_alarms"] == 0
    assert faults["checks"] > 0
    assert list(result["integrity"]) == ["1", "2"]
    for cost in result["integrity"].values():
        assert {"throughput_change_pct", "p95_change_pct", "ci95"} <= set(cost)
        for name in ("throughput", "p95", "cpu"):
            low, high = cost["ci95"][name]
            assert low <= cost[f"{name}_change_pct"] <= high
        assert cost["pairs"] > 0
        assert cost["bytes_per_page"] == 16
    assert [(r["concurrency"], r["format"]) for r in result["sweep"]] == [
        (c, f) for c in (1, 2) for f in ("bf16", "e4m3")
    ]
    assert all(r["admitted"] and r["tokens_per_s"] > 0 for r in result["sweep"])


def test_kv_for_people_shows_what_does_not_fit() -> None:
    done = quantkit(*KV, "--concurrency", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "data only on stdout"
    for text in ("out of memory (2 fit)", "resident tokens: bf16 8,256, e4m3 16,576", "16 bytes a page",
                 "0 false alarms", "page tags against none", "concurrency 3, e4m3 cache"):  # fmt: skip
        assert text in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if "out of memory" in x]
    assert line.count("out of memory") == 1, "FP8 holds all three"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, True),
        ({"detected": 7}, False),
        ({"injected": 0, "detected": 0}, False),
        ({"false_alarms": 1}, False),
        ({"wrong": 1}, False),
    ],
)
def test_kv_fails_on_a_missed_fault_or_a_false_alarm(change: dict[str, int], verdict: bool) -> None:
    faults = {"injected": 8, "detected": 8, "false_alarms": 0, "wrong": 0}
    assert kv.passed({"faults": faults | change}) is verdict


# ---- wrong arguments ----

BAD = [
    (("kernels", "--shape", "4096"), "not a shape"),
    (("kernels", "--shape", "0x128"), "not a shape"),
    (("kernels", "--shape", "64x"), "not a shape"),
    (("kernels", "--tokens", "0"), "not a number for --tokens"),
    (("kernels", "--tokens", "1,x"), "not a number for --tokens"),
    (("kernels", "--schemes", "int5"), "allowed: int4-g32, "),
    (("kernels", "--schemes", ","), "--schemes names nothing"),
    (("kernels", "--device", "tpu"), "no such device"),
    (("kernels", "--device", "cuda"), "torch finds no CUDA device"),
    (("kernels", "--threads", "0"), "--threads does not fit"),
    (("kernels", "--threads", "9999"), "--threads does not fit"),
    (("kernels", "--repeat", "0"), "--repeat must be 1 or more"),
    (("kernels", "--context", "0"), "--context must be 1 or more"),
    (("kernels", "--shape", "64x100"), "int4-g128 does not divide the inputs"),
    (("kernels", "--shape", "9999872x9999872"), "the shape does not fit into memory"),
    (("kernels", "--schemes", "mla-dsa", "--context", "99999999999"), "the context does not fit into memory"),
    (("kv", "--concurrency", "0"), "not a number for --concurrency"),
    (("kv", "--concurrency", "1,two"), "not a number for --concurrency"),
    (("kv", "--concurrency", ""), "--concurrency names nothing"),
    (("kv", "--budget", "lots"), "not a memory size"),
    (("kv", "--budget", "64KiB"), "not a memory size"),
    (("kv", "--budget", "34MB", "--context", "9000"), "the budget holds no request"),
    (("kv", "--budget", "9e15"), "the caches do not fit into memory"),
    (("kv", "--context", "0"), "--context must be 1 or more"),
    (("kv", "--new", "1"), "--new must be 2 or more"),
    (("kv", "--seconds", "0"), "--seconds must be a positive number"),
    (("kv", "--seconds", "inf"), "--seconds must be a positive number"),
    (("kv", "--requests", "0"), "--requests must be 1 or more"),
    (("kv", "--threads", "0"), "--threads does not fit"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_bad_arguments_are_status_2_without_a_traceback(args: tuple[str, ...], message: str) -> None:
    done = quantkit("bench", *args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_kernels_without_torch_says_what_to_install() -> None:
    done = quantkit(*KERNELS, before="import sys; sys.modules['torch'] = None")
    assert done.returncode == 2
    assert "quantkit[torch]" in done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; print(sorted({'torch', 'numpy', 'numba', 'rich.table'} & set(sys.modules)), file=sys.stderr)"
    done = quantkit("bench", "kernels", "--help", before=f"import atexit; atexit.register(lambda: exec({code!r}))")
    assert done.returncode == 0
    assert "--schemes" in done.stdout
    assert done.stderr.strip() == "[]"


# ---- what is timed ----


def device(kind: str = "cpu") -> Device:
    return Device(kind, "cpu", "test", 1, 1 << 12, 1 << 30, timing.cpu_turn)


def close(found: object, exact: torch.Tensor, tolerance: float) -> None:
    y = torch.as_tensor(found).float().reshape(exact.shape)
    assert (y - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("name", [n for n in GEMM if n != A4])
def test_random_matrices_are_finite_and_of_ordinary_size(name: str) -> None:
    w = gemm_reference.dequantize(gemm_reference.as_tensors(gemm.random_matrix(name, 130, 256)))
    assert w.isfinite().all()
    assert 0.01 < w.std() < 4


def test_baselines_of_the_gemm_compute_the_same() -> None:
    x_TI = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    int4 = gemm.random_matrix("int4-g128", 64, 256)
    exact = gemm_reference.reference(x_TI, gemm_reference.as_tensors(int4))
    close(gemm.aten_int4(int4, "cpu", copies=2)(x_TI)(1), exact, 0.01)
    dense = gemm_reference.dequantize(gemm_reference.as_tensors(int4))
    close(gemm.linear([dense, dense])(x_TI)(3), exact, 1e-5)
    close(gemm.linear([dense.bfloat16()])(x_TI)(0), exact, 0.01)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_packed_kernels_of_either_kind_compute_the_product(kind: str) -> None:
    """The GPU's run in Triton's interpreter, on the CPU, and so do its baselines."""
    here = device(kind)
    weights = gemm.make_weights(GEMM_DEFAULT, 64, 128, here, pytest.fail)
    ours, others = gemm.candidates(weights, 3, here)
    assert [c.name for c in ours] == GEMM_DEFAULT
    x_TI = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).clamp(-5, 5).bfloat16()
    for c in ours:
        w = gemm_reference.as_tensors(gemm.random_matrix(c.name, 64, 128))
        scale = 5.0 / (6 * 448) if c.name == A4 else None
        close(c.run(1), gemm_reference.reference(x_TI, w, input_scale=scale), 1e-3)
        assert gemm.row(c.name, weights, 3)["packed_bytes"] == packed_bytes(w)
    dense = gemm_reference.dequantize(gemm_reference.as_tensors(gemm.random_matrix("fp8-channel", 64, 128)))
    assert len(others) == 3
    for c in others:
        if c.name != "ATen int4":
            close(c.run(1), x_TI.float() @ dense.T, 0.05 if "fp8" in c.name else 0.01)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("latent", [False, True])
def test_attention_and_its_baselines_agree(kind: str, latent: bool) -> None:
    here = device(kind)
    names = [n for n in ATTENTION_DEFAULT if n.startswith("mla-" if latent else "kv-")]
    layer = attention.make_layer(names, 70, here, latent=latent)
    ours, others = attention.candidates(layer, here)
    plain, *coded = ours
    attend = attention_reference.reference_attend_latent if latent else attention_reference.reference_attend
    cpu = attention.make_layer(names[:1], 70, device("cuda"), latent=latent)
    exact = attend(cpu.query, cpu.caches[names[0]][0], cpu.batch, softmax_scale=cpu.query.shape[2] ** -0.5)
    close(plain.run(1), exact, 1e-3)
    for c in others:
        close(c.run(1), exact, 0.02)
    assert len(others) == (2 if kind == "cpu" else 1) * (2 if latent else 1)
    for c in coded:
        close(c.run(2), exact, 0.25 if "fp4" in c.name else 0.12)


def test_a_baseline_that_cannot_run_is_named_and_left_out() -> None:
    notes: list[str] = []

    def broken(_: int) -> None:
        raise RuntimeError("no such operator\nand a long tail")

    others = [Candidate("broken", broken), Candidate("whole", lambda c: c)]
    ours = [Candidate("ours", lambda c: c)]
    here = Device("cpu", "cpu", "test", 1, 1, 1, lambda run, first: [1.0])
    seconds = kernels.time_all(ours, others, 2, here, lambda _: None, notes.append)
    assert set(seconds) == {"ours", "whole"}
    assert notes == ["broken is left out: no such operator"]
    assert [c.name for c in others] == ["whole"]


# ---- timing ----


def test_turns_alternate_and_the_median_counts() -> None:
    log: list[tuple[str, int]] = []
    spent = {"a": iter([[1.0, 9.0], [2.0, 8.0], [3.0]]), "b": iter([[5.0], [4.0], [6.0]])}

    def turn(run: object, first: int) -> list[float]:
        name = run()
        log.append((name, first))
        return next(spent[name])

    both = [Candidate(n, lambda n=n: n) for n in "ab"]
    ticks: list[int] = []
    assert timing.alternate(both, turn, 3, lambda: ticks.append(1)) == {"a": 3.0, "b": 5.0}
    assert log == [(n, r * timing.CALLS) for r, order in enumerate(("ab", "ba", "ab")) for n in order]
    assert len(ticks) == 6


def test_every_call_of_a_turn_gets_another_copy() -> None:
    seen: list[int] = []
    seconds = timing.cpu_turn(seen.append, 8)
    assert seen == [8, 9, 10, 11]
    assert len(seconds) == 3
    assert min(seconds) >= 0


@pytest.mark.parametrize(
    ("nbytes", "cache", "room", "copies"),
    [
        (100, 1000, 10**6, 11),
        (100, 10, 10**6, timing.CALLS),
        (100, 10**6, 10**9, 64),
        (100, 1000, 350, 3),
        (100, 1000, 50, 1),
        (0, 0, 0, 1),
    ],
)
def test_copies_pass_the_cache_and_stay_in_memory(nbytes: int, cache: int, room: int, copies: int) -> None:
    assert timing.copies_for(nbytes, cache, room) == copies


def test_fewer_tokens_each_where_many_requests_are_tagged() -> None:
    setting = kv.Setting(context=8000)
    q = kv.Question((1, 16, 64), 1 << 30, 8, 1.0, 10, setting)
    assert q.tags_at == (1, 2, 4, 8, 64)
    assert [q.tags_setting(c).context for c in q.tags_at] == [8000, 8000, 8000, 8000, 2048]
    assert np.isclose(64 * q.tags_setting(64).context, 1 << 17)
    assert kv.Question((4,), 1 << 30, 8, 1.0, 10, setting).tags_at == (1, 2, 4)
