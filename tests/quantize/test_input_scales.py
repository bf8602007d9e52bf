"""Measured scales of activations, from a tiny source to a verified checkpoint, and every reason to refuse one."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, load_tensors, save_tensors
from oracle.dequantize import dequantize
from oracle.packed_product import nvfp4_activations
from quantkit.calibrate.tokens import Samples
from quantkit.calibrate.watch import Watch
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.calibration import Settings
from quantkit.quantize.calibration_run import calibrate_into
from quantkit.quantize.input_scales import block_scales, measured_tasks
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.run_source import open_run, plan_of_run
from quantkit.quantize.verification import Report, verify_checkpoint

SETTINGS = Settings(memory=1 << 28)
LINEAR = "[attention, dense_mlp, shared_experts, routed_experts]"
REST = '  - {match: {role: "*"}, keep: true}\n'
EXPERT = re.compile(r"\.experts\.\d+\.(?:(down)|gate|up)_proj")


def samples(n: int = 8, length: int = 64) -> Samples:
    ids = np.random.default_rng(0).integers(0, 100, (n, length)).astype(np.int32)
    return Samples(ids, "random ids", hashlib.sha256(ids.tobytes()).hexdigest(), 0, ids.size)


def plan_for(source: Path, folder: Path, rule: str) -> Plan:
    file = folder / "recipe.yaml"
    match = f"match: {{role: {LINEAR}, except: [attention.kv_b]}}"
    file.write_text(f"weights:\n  - {{{match}, {rule}}}\n{REST}")
    return make_plan(load_recipe(str(file)), open_checkpoint(source))


def written(source: Path, room: Path, rule: str, form: str = "compressed-tensors") -> tuple[Path, Report]:
    """Calibrate, export as `room/o`, verify against source and run."""
    calibrate_into(room / "run", plan_for(source, room, rule), samples(), SETTINGS)
    run(plan_of_run(open_run(room / "run"), form, "vllm", ()), room / "o", jobs=2, memory=1 << 20)
    return room / "o", verify_checkpoint(room / "o", open_checkpoint(source), run=room / "run")


def inputs_of_layers(source: Path) -> dict[str, torch.Tensor]:
    """What transformers' own model feeds every linear layer outside of experts, all tokens: [T, I]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: found.update({name: x[0].detach().flatten(0, -2)}))
    model(torch.from_numpy(samples().ids_NL).long())
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama") / "m")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, one expert a token; the router gives expert 3 the mean of the others, so that it is never chosen."""
    folder = FAMILIES["qwen3_moe"](tmp_path_factory.mktemp("moe") / "m", num_experts_per_tok=1)
    tensors = load_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[3] = tensor[:3].float().mean(0)
    save_tensors(folder, tensors, 2)
    return folder


FORMS = [
    ("compressed-tensors", "nvfp4", "input_global_scale", 2688),
    ("modelopt", "nvfp4", "input_scale", 2688),
    ("compressed-tensors", "fp8-tensor", "input_scale", 448),
    ("modelopt", "fp8-tensor", "input_scale", 448),
]


@pytest.mark.parametrize(("form", "scheme", "suffix", "largest"), FORMS)
def test_scales_are_those_of_the_inputs(form, scheme, suffix, largest, llama, tmp_path):
    out, report = written(llama, tmp_path, f"scheme: {scheme}, input_scale: {{rule: amax, headroom: 1.5}}", form)
    assert report.passed, [c.failures for c in report.checks]
    stored = load_tensors(out)
    layers = {n: x for n, x in inputs_of_layers(llama).items() if n != "lm_head"}
    assert {n for n in stored if n.endswith((".input_scale", ".input_global_scale"))} == {
        f"{n}.{suffix}" for n in layers
    }
    for name, x_TI in layers.items():
        scale = stored[f"{name}.{suffix}"]
        assert scale.dtype == torch.float32 and scale.shape == (() if form == "modelopt" else (1,))
        value = 1 / scale if suffix == "input_global_scale" else scale
        torch.testing.assert_close(value.reshape(()), 1.5 * x_TI.abs().max() / largest, rtol=1e-4, atol=0)


def test_configurations_say_that_activations_are_quantised(llama, tmp_path):
    found = {}
    for form, scheme, _, _ in FORMS:
        room = tmp_path / f"{form}-{scheme}"
        room.mkdir()
        out, _ = written(llama, room, f"scheme: {scheme}, input_scale: amax", form)
        found[form, scheme] = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = {key: c["config_groups"]["group_0"]["input_activations"] for key, c in found.items()}
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme

    for scheme, preset in (("nvfp4", "NVFP4"), ("fp8-tensor", "FP8")):
        config = found["compressed-tensors", scheme]
        read = QuantizationConfig.model_validate(config).config_groups["group_0"].input_activations
        wanted = preset_name_to_scheme(preset, ["Linear"]).input_activations
        keys = set(QuantizationArgs.model_fields) - {"observer", "observer_kwargs", "zp_dtype"}
        assert {k: getattr(read, k) for k in keys} == {k: getattr(wanted, k) for k in keys}
    assert (
        found["modelopt", "nvfp4"]["quant_algo"] == "NVFP4" and found["modelopt", "fp8-tensor"]["quant_algo"] == "FP8"
    )
    assert groups["modelopt", "nvfp4"] == {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("method", ["", ", method: gptq"])
def test_experts_share_a_scale_and_one_that_saw_nothing_takes_it(form, method, moe, tmp_path):
    out, report = written(moe, tmp_path, f"scheme: nvfp4, input_scale: nvfp4_act_headroom{method}", form)
    assert report.passed, [c.failures for c in report.checks]
    facts = json.loads((tmp_path / "run" / "calibration.json").read_text())["input_scales"]
    kinds: dict[str, set[float]] = {}
    for name, f in facts.items():
        assert 0 < f["input_scale"] < 1e4 and 0 <= f["saturated"] < 0.01 and 0 <= f["underflow"] <= 1
        if match := EXPERT.search(name):
            kinds.setdefault(match[1] or "gate_up", set()).add(f["input_scale"])
            assert (f["source"] == "peer") == (".experts.3." in name) == (f["tokens"] == 0)
        else:
            assert f["source"] == "own" and f["tokens"] == 512
    assert {k: len(v) for k, v in kinds.items()} == {"gate_up": 1, "down": 1}
    sources = {f["source"] for n, f in facts.items() if EXPERT.search(n)}
    assert sources == {"own", "fused", "peer"}
    assert not any(bool(torch.isnan(t.float()).any()) for t in load_tensors(out).values())


def test_a_killed_run_measures_the_same(moe, tmp_path):
    class KilledError(Exception):
        pass

    plan = plan_for(moe, tmp_path, "scheme: nvfp4, input_scale: nvfp4_act_headroom, method: gptq")
    seen = 0

    def advance(tokens: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise KilledError

    with pytest.raises(KilledError):
        calibrate_into(tmp_path / "killed", plan, samples(), SETTINGS, advance=advance)
    results = [calibrate_into(tmp_path / name, plan, samples(), SETTINGS) for name in ("killed", "whole")]
    assert results[0] == results[1] and len(results[0]["input_scales"]) == len(measured_tasks(plan))
    for file in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_verify_runs_the_kernels_on_quantised_activations(llama, tmp_path):
    out, report = written(llama, tmp_path, "scheme: nvfp4, input_scale: amax")
    recorded = load_tensors(tmp_path / "run")
    hat, plain, stored = dequantize(out), load_tensors(llama), load_tensors(out)
    assert len(report.layers) == 14
    for layer in report.layers:
        module = layer.name.removesuffix(".weight")
        x_TI = recorded[f"inputs.{module}"].float().numpy()
        seen_TI = nvfp4_activations(x_TI, 1 / float(stored[f"{module}.input_global_scale"]))
        exact = x_TI.astype(np.float64) @ plain[layer.name].double().numpy().T
        y = seen_TI.astype(np.float64) @ hat[layer.name].double().numpy().T
        assert abs(layer.output_error - np.linalg.norm(y - exact) / np.linalg.norm(exact)) < 1e-4


def without(name: str, tensors: dict[str, torch.Tensor]) -> None:
    del tensors[name]


def changed(name: str, tensors: dict[str, torch.Tensor], *, by: float) -> None:
    tensors[name] = tensors[name] * by


Q = "model.layers.0.self_attn.q_proj.input_global_scale"
DOWN = "model.layers.1.mlp.down_proj.input_global_scale"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (partial(without, DOWN), "asks for an input scale, none is stored"),
        (partial(changed, DOWN, by=0.0), "not one positive float32 number"),
        (partial(changed, DOWN, by=float("nan")), "not one positive float32 number"),
        (partial(changed, DOWN, by=-1.0), "not one positive float32 number"),
        (partial(changed, Q, by=2.0), "several input scales"),
        (partial(changed, DOWN, by=2.0), "the calibration run measured"),
    ],
)
def test_verify_finds_scales_that_are_wrong(damage: Callable, reason: str, written_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(written_llama / "o", tmp_path / "o")
    tensors = load_tensors(tmp_path / "o")
    damage(tensors)
    save_tensors(tmp_path / "o", tensors)
    report = verify_checkpoint(tmp_path / "o", None, run=written_llama / "run")
    (check,) = [c for c in report.checks if "sound scale" in c.name]
    assert any(reason in f for f in check.failures), check.failures


def test_verify_finds_scales_that_nobody_asks_for(written_llama, tmp_path):
    shutil.copytree(written_llama / "o", tmp_path / "o")
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (tmp_path / "o" / "config.json").write_text(json.dumps(config))
    report = verify_checkpoint(tmp_path / "o", None)
    assert any("does not ask for an input scale" in f for c in report.checks for f in c.failures)


@pytest.fixture(scope="module")
def written_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("written")
    _, report = written(llama, room, "scheme: nvfp4, input_scale: nvfp4_act_headroom")
    assert report.passed, [c.failures for c in report.checks]
    return room


def test_numbers_need_no_calibration_and_zero_tokens_no_scale(llama, tmp_path):
    plan = plan_for(llama, tmp_path, "scheme: nvfp4, input_scale: 1.0")
    run(plan, tmp_path / "o", jobs=1, memory=1 << 20)
    assert float(load_tensors(tmp_path / "o")[Q]) == 1.0
    measured = plan_for(llama, tmp_path, "scheme: nvfp4, input_scale: amax")
    with pytest.raises(QuantkitError, match="the input scale amax needs a calibration run"):
        run(measured, tmp_path / "p", jobs=1, memory=1 << 20)
    assert not (tmp_path / "p").exists()
    sets = [("model.layers.0.mlp.down_proj",)]
    with pytest.raises(QuantkitError, match="no input other than zero"):
        block_scales(sets, measured_tasks(measured), Watch(blocks=sets))


def test_a_published_scale_gives_way_to_a_new_one(written_llama, tmp_path):
    """NVFP4 passes bit for bit into the other dialect, with its input scales set anew."""
    plan = plan_for(written_llama / "o", tmp_path, "scheme: nvfp4, input_scale: 0.5")
    assert {t.fate for t in plan.tasks} == {"keep", "pass"} and plan.format == "compressed-tensors"
    run(plan, tmp_path / "o", jobs=1, memory=1 << 20)
    before, after = load_tensors(written_llama / "o"), load_tensors(tmp_path / "o")
    assert set(before) == set(after) and float(after[Q]) == 2.0 != float(before[Q])
    same = [n for n in before if torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))]
    assert len(same) == len(before) - 14


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("{match: {role: attention}, scheme: int4-g32, input_scale: amax}", "for nvfp4 and fp8-tensor"),
        ("{match: {role: attention}, scheme: fp8-tensor, input_scale: nvfp4_act_headroom}", "is for nvfp4"),
        ("{match: {role: attention}, scheme: nvfp4, input_scale: p99}", "nvfp4_act_headroom"),
        ("{match: {role: attention}, scheme: nvfp4, input_scale: .inf}", "finite"),
        ("{match: {role: attention}, scheme: nvfp4, input_scale: -1}", "greater than 0"),
        (
            "{match: {role: attention}, scheme: nvfp4, input_scale: {rule: nvfp4_act_headroom, headroom: 2}}",
            "goes with `amax`",
        ),
    ],
)
def test_recipes_that_are_refused(rules, message, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(f"weights:\n  - {rules}\n{REST}")
    with pytest.raises(QuantkitError, match=re.escape(message)):
        load_recipe(str(file))


def test_layers_that_engines_join_are_quantised_alike(llama, moe, tmp_path):
    file = tmp_path / "r.yaml"
    q = "  - {match: {role: attention.q}, scheme: nvfp4, input_scale: amax}\n"
    file.write_text(f"weights:\n{q}  - {{match: {{role: attention}}, scheme: nvfp4}}\n{REST}")
    with pytest.raises(QuantkitError, match="stored in different ways"):
        make_plan(load_recipe(str(file)), open_checkpoint(llama))
    one = '  - {match: {name: "*.experts.1.*.weight"}, scheme: nvfp4, input_scale: amax}\n'
    file.write_text(f"weights:\n{one}  - {{match: {{role: routed_experts}}, scheme: nvfp4}}\n{REST}")
    with pytest.raises(QuantkitError, match="stored in different ways"):
        make_plan(load_recipe(str(file)), open_checkpoint(moe))


# ---- tokens with NaN ----


def damaged(llama: Path, folder: Path, token: int) -> Path:
    """The same model with an infinity in the embedding of one token."""
    shutil.copytree(llama, folder)
    tensors = load_tensors(folder)
    tensors["model.embed_tokens.weight"][token, 5] = float("inf")
    save_tensors(folder, tensors)
    return folder


@pytest.mark.parametrize("rule", ["scheme: int4-g32, method: gptq", "scheme: nvfp4, input_scale: amax"])
def test_too_many_bad_tokens_stop_the_run(rule, llama, tmp_path):
    source = damaged(llama, tmp_path / "s", 7)
    with pytest.raises(QuantkitError, match="too many tokens have NaN") as raised:
        calibrate_into(tmp_path / "run", plan_for(source, tmp_path, rule), samples(), SETTINGS)
    assert raised.value.tensor == "model.layers.0.self_attn.q_proj" and "at most 1%" in str(raised.value)
    assert not (tmp_path / "run" / "calibration.json").exists()


def test_a_rare_bad_token_is_counted(llama, tmp_path):
    """One token in 2048 spoils the 16 of its sample, 0.8 %: attention multiplies what it masks by zero."""
    text = samples(128, 16)
    text.ids_NL[0, -1] = 200
    source = damaged(llama, tmp_path / "s", 200)
    plan = plan_for(source, tmp_path, "scheme: nvfp4, input_scale: amax, method: gptq")
    result = calibrate_into(tmp_path / "run", plan, text, SETTINGS)
    for facts in (*result["layers"].items(), *result["input_scales"].items()):
        first = "layers.0.self_attn" in facts[0] and "o_proj" not in facts[0]
        assert facts[1]["dropped_tokens"] == (1 if first else 16) == 2048 - facts[1]["tokens"]
