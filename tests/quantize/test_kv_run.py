"""The verifier's attention over recorded keys and values: its errors are those of FP8, and scale 1.0 is found out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from families import FAMILIES, load_tensors, read_config, save_tensors, write_config
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.recorded import FILE
from quantkit.quantize.verification import Report, verify_checkpoint
from safetensors.torch import save_file

FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
T, H, Q, D = 37, 2, 4, 32


def with_scales(source: Path, out: Path, scales: dict[str, float], *, declared: bool = True) -> Path:
    """A copy of a plain checkpoint that asks for an FP8 cache and stores these scales."""
    out.mkdir()
    tensors = load_tensors(source) | {n: torch.tensor([s]) for n, s in scales.items()}
    save_tensors(out, tensors, 1)
    config = read_config(source)
    if declared:
        config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_KV}
    write_config(out, config)
    return out


def recorded(folder: Path, largest: float, *, queries: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"k": (T, H, D), "v": (T, H, D), "q": (T, Q, D)}
    rows = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    rows["k"] *= largest / rows["k"].abs().max()
    rows["q"] /= largest / 4
    rows = {n: x.bfloat16() for n, x in rows.items() if queries or n != "q"}
    folder.mkdir(exist_ok=True)
    save_file({f"kv.0.{n}": x for n, x in rows.items()}, folder / FILE)
    return rows


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    s = torch.tensor(scale)
    return ((x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn).double()) * s.double()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().repeat_interleave(Q // H, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(D)
    mask = torch.ones(T, T).tril().bool()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def check_of(report: Report) -> tuple[str, tuple[str, ...]]:
    return next((c.value, c.failures) for c in report.checks if "FP8 cache" in c.name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("source") / "m")


NAMES = [
    ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"),
    ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"),
    ("model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.v_scale"),
]


@pytest.mark.parametrize("names", NAMES)
def test_errors_are_those_of_fp8(source: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    rows = recorded(tmp_path / "r", 2000.0)
    k_scale, v_scale = 1.25 * 2000 / 448, 0.0125
    out = with_scales(source, tmp_path / "o", dict(zip(names, (k_scale, v_scale), strict=True)))
    report = verify_checkpoint(out, None, run=tmp_path / "r")
    exact = attention(rows["q"], rows["k"], rows["v"])
    (run,) = report.kv
    for got, scales in ((run.error, (k_scale, v_scale)), (run.error_at_one, (1.0, 1.0))):
        seen = attention(rows["q"], fp8(rows["k"], scales[0]), fp8(rows["v"], scales[1]))
        assert got == pytest.approx(float((seen - exact).norm() / exact.norm()), rel=1e-3)
    assert run.clipped == 0
    assert run.error < 0.05 < 0.1 < run.error_at_one, "1.0 clips keys above 448"
    assert check_of(report)[1] == ()


def test_missing_scales_run_at_one_and_fail(source: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "r", 2000.0)
    report = verify_checkpoint(with_scales(source, tmp_path / "o", {}), None, run=tmp_path / "r")
    assert not report.passed
    (failure,) = check_of(report)[1]
    assert "layer 0" in failure and "k_scale 1" in failure and "clipped" in failure


def test_a_wrong_scale_fails(source: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "r", 100.0)
    scales = dict(zip(NAMES[0], (448 / 100, 0.01), strict=True))  # the reciprocal, which some tools store
    assert check_of(verify_checkpoint(with_scales(source, tmp_path / "o", scales), None, run=tmp_path / "r"))[1] == ()
    scales[NAMES[0][0]] = 100 / 448 / 8
    assert check_of(verify_checkpoint(with_scales(source, tmp_path / "p", scales), None, run=tmp_path / "r"))[1] != ()


def test_without_recorded_queries(source: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "r", 1.0, queries=False)
    scales = dict(zip(NAMES[0], (0.003, 0.01), strict=True))
    report = verify_checkpoint(with_scales(source, tmp_path / "o", scales), None, run=tmp_path / "r")
    assert 0 < report.kv[0].error < 0.04


def test_sixteen_bit_caches_are_left_alone(source: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "r", 2000.0)
    assert verify_checkpoint(with_scales(source, tmp_path / "o", {}, declared=False), None, run=tmp_path / "r").kv == ()


def test_latent_rows(tmp_path: Path) -> None:
    source = FAMILIES["deepseek_v3"](tmp_path / "s")
    config = read_config(source)
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rows = torch.randn(20, rank + rope, generator=torch.Generator().manual_seed(0)).bfloat16()
    (tmp_path / "r").mkdir()
    save_file({"kv.0.latent": rows}, tmp_path / "r" / FILE)
    name = "model.layers.0.self_attn.k_proj.k_scale"
    report = verify_checkpoint(with_scales(source, tmp_path / "o", {name: 0.01}), None, run=tmp_path / "r")
    (run,) = report.kv
    assert run.k_scale == pytest.approx(0.01) and 0 < run.error < 0.04


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k": torch.zeros(4, 2, 8)}, "do not fit together"),
        ({"k": torch.zeros(4, 2, 8), "v": torch.zeros(5, 2, 8)}, "do not fit together"),
        ({"k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8), "q": torch.zeros(4, 3, 8)}, "do not fit together"),
        ({"latent": torch.zeros(4, 8)}, "do not fit together"),
        ({"k": torch.full((4, 2, 8), math.inf), "v": torch.zeros(4, 2, 8)}, "NaN or infinity"),
    ],
)
def test_refuses_samples_that_do_not_fit(
    source: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save_file({f"kv.0.{n}": x for n, x in tensors.items()}, tmp_path / FILE)
    with pytest.raises(QuantkitError, match=message):
        verify_checkpoint(with_scales(source, tmp_path / "o", {}), None, run=tmp_path)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_no_scales_fail(source: Path, tmp_path: Path, scale: float) -> None:
    recorded(tmp_path / "r", 1.0)
    report = verify_checkpoint(with_scales(source, tmp_path / "o", {NAMES[0][0]: scale}), None, run=tmp_path / "r")
    assert "layer 0" in check_of(report)[1][0]
    (run,) = json.loads(json.dumps(report.as_json(), allow_nan=False))["kv"]
    assert run["error"] is None and not run["passed"]


def test_the_json_of_scales_is_read_as_strictly_as_sglang_reads_it(source: Path, tmp_path: Path) -> None:
    out = with_scales(source, tmp_path / "o", {}, declared=False)
    layers = read_config(source)["num_hidden_layers"]
    scales = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {str(i): 0.05 for i in range(layers)}}}
    file = out / "kv_cache_scales.tp1.json"
    for content, failures in (({"model_type": "llama", "kv_cache": scales}, 0), ({"kv_cache": scales}, 1)):
        file.write_text(json.dumps(content))
        check = next(c for c in verify_checkpoint(out, None).checks if "SGLang" in c.name)
        assert len(check.failures) == failures, check.failures
    assert "model_type" in check.failures[0]
