"""A calibration run on tiny models: what it leaves, that kills leave no trace, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_runs import files_of, samples
from families import FAMILIES, load_tensors
from killed import KilledError, killed_after
from quantkit.export.checkpoint import Reader, open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.calibration import Settings
from quantkit.quantize.calibration_run import calibrate_into
from quantkit.quantize.decoded import DecodedWeights
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.run_source import open_run, plan_of_run
from quantkit.quantize.verification import verify_checkpoint

SETTINGS = Settings(memory=1 << 28)
GPTQ = """
weights:
  - {{match: {{role: [attention, dense_mlp, shared_experts, routed_experts], except: [attention.kv_b]}}, scheme: {scheme}, method: gptq}}
  - {{match: {{role: "*"}}, keep: true}}
{more}
"""


def plan_for(source: Path, folder: Path, scheme: str = "int4-g32", more: str = "kv_cache: {}") -> Plan:
    file = folder / f"{scheme}.yaml"
    file.write_text(GPTQ.format(scheme=scheme, more=more))
    return make_plan(load_recipe(str(file)), open_checkpoint(source))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama") / "m")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["int4-g32", "nvfp4"])
def test_from_source_to_a_verified_checkpoint(family: str, scheme: str, tmp_path: Path) -> None:
    source = FAMILIES[family](tmp_path / "s")
    plan = plan_for(source, tmp_path, scheme)
    result = calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)
    chosen = {t.name for t in plan.tasks if t.fate == "quantize"}
    reached = {n for n in chosen if not n.startswith("model.layers.2.") or family != "deepseek_v3"}
    assert reached <= set(result["layers"]) == chosen
    assert all(f["loss"] <= f["loss_data_free"] * (1 + 1e-6) for f in result["layers"].values())
    assert sum(f["loss"] for f in result["layers"].values()) < 0.9 * sum(
        f["loss_data_free"] for f in result["layers"].values()
    )
    out = plan_of_run(open_run(tmp_path / "run"), None, "vllm", ())
    run(out, tmp_path / "o", jobs=2, memory=1 << 20)
    for folder in (tmp_path / "run", None):
        report = verify_checkpoint(tmp_path / "o", open_checkpoint(source), run=folder)
        assert report.passed, [c.failures for c in report.checks]
    with Reader() as reader:
        written = DecodedWeights(open_checkpoint(tmp_path / "o"), reader)
        published = DecodedWeights(open_checkpoint(source), reader)
        for name in chosen:
            w, hat = published.read(f"{name}.weight").float(), written.read(f"{name}.weight").float()
            assert 0 < float((w - hat).norm() / w.norm()) < 0.6


def test_scales_are_those_of_the_keys_and_values_that_are_served(llama: Path, tmp_path: Path) -> None:
    plan = plan_for(llama, tmp_path)
    calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)
    opened = open_run(tmp_path / "run")
    run(plan_of_run(opened, None, "vllm", ()), tmp_path / "o", jobs=1, memory=1 << 20)
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    stored = load_tensors(tmp_path / "o")
    from transformers import AutoModelForCausalLM

    with Reader() as reader:
        weights = DecodedWeights(open_checkpoint(tmp_path / "o"), reader)
        state = {n: weights.read(n).float() for n in weights.names() if not n.endswith("_scale")}
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.load_state_dict(state)
    cache = model(torch.from_numpy(samples().ids_NL).long(), use_cache=True).past_key_values
    for layer, entry in enumerate(cache.layers):
        for part, x in (("k", entry.keys), ("v", entry.values)):
            scale = stored[f"model.layers.{layer}.self_attn.{part}_scale"]
            assert scale.shape == (1,) and scale.dtype == torch.float32
            torch.testing.assert_close(scale[0], 1.25 * x.abs().max().detach() / 448, rtol=1e-4, atol=0)
    names = sorted(p.name for p in (tmp_path / "o").glob("kv_cache_scales.*"))
    assert names
    factors = json.loads((tmp_path / "o" / names[0]).read_text())["kv_cache"]["scaling_factor"]
    assert set(factors["0"]) == {str(i) for i in range(len(cache.layers))}


def test_a_killed_run_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    plan = plan_for(llama, tmp_path)
    calibrate_into(tmp_path / "whole", plan, samples(), SETTINGS)

    for stop in (1, 5, 9):
        try:
            calibrate_into(tmp_path / "killed", plan, samples(), SETTINGS, advance=killed_after(stop))
        except KilledError:
            with pytest.raises(QuantkitError, match="not finished"):
                open_run(tmp_path / "killed")
    calibrate_into(tmp_path / "killed", plan, samples(), SETTINGS)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_memory_changes_nothing(family: str, tmp_path: Path) -> None:
    plan = plan_for(FAMILIES[family](tmp_path / "source"), tmp_path)
    calibrate_into(tmp_path / "much", plan, samples(), SETTINGS)
    calibrate_into(tmp_path / "little", plan, samples(), Settings(memory=1 << 16))
    assert files_of(tmp_path / "much") == files_of(tmp_path / "little")


def test_in_bfloat16_codes_and_scales_are_nearly_the_same(llama: Path, tmp_path: Path) -> None:
    plan = plan_for(llama, tmp_path)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        result = calibrate_into(out, plan, samples(), replace(SETTINGS, dtype=dtype))
        assert json.loads((out / "run.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        losses = [layer["loss"] / layer["loss_data_free"] for layer in result["layers"].values()]
        found[dtype] = np.median(losses), result["kv_scales"]["0"]["k"]
    exact, fast = found.values()
    assert fast == pytest.approx(exact, rel=0.05)
    assert fast != exact  # the dtype was used


def test_weights_as_published_with_kv_scales(llama: Path, tmp_path: Path) -> None:
    plan = make_plan(load_recipe("keep-kv-fp8"), open_checkpoint(llama))
    calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)
    run(plan_of_run(open_run(tmp_path / "run"), None, "vllm", ()), tmp_path / "o", jobs=1, memory=1 << 20)
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(llama), run=tmp_path / "run")
    assert report.passed and report.kv, [c.failures for c in report.checks]


def test_refuses_another_text_another_recipe_and_a_recipe_without_calibration(llama: Path, tmp_path: Path) -> None:
    plan = plan_for(llama, tmp_path)
    calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)
    with pytest.raises(QuantkitError, match="another run: text changed"):
        calibrate_into(tmp_path / "run", plan, samples(1), SETTINGS)
    with pytest.raises(QuantkitError, match="another run: recipe changed"):
        calibrate_into(tmp_path / "run", plan_for(llama, tmp_path, more=""), samples(), SETTINGS)
    with pytest.raises(QuantkitError, match="needs no calibration"):
        calibrate_into(tmp_path / "p", make_plan(load_recipe("keep"), open_checkpoint(llama)), samples(), SETTINGS)
    with pytest.raises(QuantkitError, match="another run: dtype changed"):
        calibrate_into(tmp_path / "run", plan, samples(), replace(SETTINGS, dtype=torch.bfloat16))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(QuantkitError, match="holds other files"):
        calibrate_into(tmp_path / "other", plan, samples(), SETTINGS)


def test_refuses_to_export_a_run_of_another_version(llama: Path, tmp_path: Path) -> None:
    calibrate_into(tmp_path / "run", plan_for(llama, tmp_path), samples(), SETTINGS)
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    with pytest.raises(QuantkitError, match="made by another version"):
        open_run(tmp_path / "run")


def test_refuses_to_export_uncalibrated_layers(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="needs a calibration run"):
        run(plan_for(llama, tmp_path), tmp_path / "o", jobs=1, memory=1 << 20)


def test_too_little_text_for_scales_is_an_error(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="cannot rest on these statistics"):
        calibrate_into(tmp_path / "run", plan_for(llama, tmp_path), samples(n=2), SETTINGS)


def test_experts_that_saw_too_few_tokens_fail_the_gate(tmp_path: Path) -> None:
    source = FAMILIES["qwen3_moe"](tmp_path / "s")
    plan = plan_for(source, tmp_path)
    calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)
    with pytest.raises(QuantkitError, match="routed experts saw too few tokens"):
        calibrate_into(tmp_path / "run", plan, samples(), SETTINGS, min_expert_tokens=1 << 20)
