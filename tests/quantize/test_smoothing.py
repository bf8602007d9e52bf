"""AWQ as a recipe asks for it: folds that change nothing but codes, files that hold what was folded, what is not folded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, load_tensors, save_tensors
from killed import KilledError, killed_after
from oracle.dequantize import dequantize
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.tokens import Samples
from quantkit.export.checkpoint import Reader, open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.calibration import Settings, steps_of_blocks
from quantkit.quantize.calibration_run import calibrate_into
from quantkit.quantize.decoded import DecodedWeights
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.run_source import open_run, plan_of_run
from quantkit.quantize.smoothing import Smoothed, smooth
from quantkit.quantize.verification import verify_checkpoint
from safetensors.torch import load_file

SETTINGS = Settings(memory=1 << 28)
ALL = "{role: [attention, dense_mlp, shared_experts, routed_experts], except: [attention.kv_b]}"
AWQ = """
weights:
{first}  - {{match: {match}, scheme: int4-g32, method: {method}}}
  - {{match: {{role: "*"}}, keep: true}}
"""


def samples(n: int = 8, length: int = 64) -> Samples:
    ids = np.random.default_rng(0).integers(0, 100, (n, length)).astype(np.int32)
    return Samples(ids, "random ids", hashlib.sha256(ids.tobytes()).hexdigest(), 0, ids.size)


def plan_for(source: Path, folder: Path, method: str = "awq", match: str = ALL, first: str = "") -> Plan:
    file = folder / "awq.yaml"
    file.write_text(AWQ.format(method=method, match=match, first=first))
    return make_plan(load_recipe(str(file)), open_checkpoint(source))


def strong_channels(folder: Path) -> Path:
    """A tiny model whose norms make some channels large, as trained ones do: scaling has something to gain."""
    tensors = load_tensors(folder)
    for name, w in tensors.items():
        if w.ndim == 1 and "layernorm" in name:
            w[::16] *= 20
        if name.endswith("up_proj.weight"):
            w[::16] *= 20
    save_tensors(folder, tensors)
    return folder


def served(source: Path, folder: Path, plan: Plan) -> Path:
    calibrate_into(folder / "run", plan, samples(), SETTINGS)
    run(plan_of_run(open_run(folder / "run"), None, "vllm", ()), folder / "o", jobs=2, memory=1 << 20)
    return folder / "o"


def logits(source: Path, weights: dict[str, torch.Tensor] | None) -> torch.Tensor:
    """Of the ordinary transformers model, with other weights in place of its own."""
    from transformers import AutoModelForCausalLM

    if weights is not None:
        other = source.parent / "other"
        other.mkdir(exist_ok=True)
        save_tensors(other, weights)
        (other / "config.json").write_text((source / "config.json").read_text())
        source = other
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(samples(n=2).ids_NL).long()).logits


def smoothed_model(source: Path, plan: Plan, folder: Path) -> tuple[dict[str, torch.Tensor], list[Smoothed]]:
    """All weights after the folds, before any code, as the blocks hold them in float32."""
    found = {n: t.float() for n, t in load_tensors(source).items()}
    done = []
    with Reader() as reader:
        model = open_model(source, DecodedWeights(plan.source, reader))
        steps = steps_of_blocks(plan, model)
        ids = torch.from_numpy(samples().ids_NL).long()
        states = Activations([model.start(part) for part in ids.split(4)], memory=1 << 28, folder=folder)
        for index in range(model.num_blocks):
            with model.block(index) as block, states:
                tasks = {t.name: t for s in steps[index] for t in s.tasks}
                done.append(smooth(block, states, plan, tasks, 1 << 28, "cpu", lambda state: None))
                for name in done[-1].changed:
                    module = name if name.endswith(".bias") else name.removesuffix(".weight")
                    found[name] = block.weight(module).clone().reshape(found[name].shape)
                states = Activations([state for _, state in block.run_all(states)], memory=1 << 28, folder=folder)
        states.close()
    return found, done


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "phi3", "glm4_moe"]
)
def test_the_folded_model_computes_what_the_published_one_does(family: str, tmp_path: Path) -> None:
    source = strong_channels(FAMILIES[family](tmp_path / "s"))
    plan = plan_for(source, tmp_path)
    weights, done = smoothed_model(source, plan, tmp_path)
    folded = [f for d in done for f in d.facts.values() if f["into"] is not None]
    assert len(folded) > 3
    published = load_tensors(source)
    changed = {n for d in done for n in d.changed}
    assert changed == {n for n, w in weights.items() if not torch.equal(w, published[n].float())}
    kinds = {n.rpartition(".")[0].rpartition(".")[2] for n in changed}
    assert {"input_layernorm", "post_attention_layernorm", "down_proj" if family != "mixtral" else "w2"} <= kinds
    before, after = logits(source, None), logits(source, weights)
    assert float((before - after).abs().max()) <= 1e-5 * float(before.abs().max())


def test_routers_choose_the_same_experts_to_the_bit(tmp_path: Path) -> None:
    source = strong_channels(FAMILIES["qwen3_moe"](tmp_path / "s"))
    weights, _ = smoothed_model(source, plan_for(source, tmp_path), tmp_path)
    published = load_tensors(source)
    name = "model.layers.1.mlp.gate.weight"
    scale_I = published["model.layers.1.post_attention_layernorm.weight"].float()
    scale_I = scale_I / weights["model.layers.1.post_attention_layernorm.weight"]
    assert not torch.equal(scale_I, torch.ones_like(scale_I))
    assert torch.equal(torch.frexp(scale_I).mantissa, torch.full_like(scale_I, 0.5))
    assert torch.equal(weights[name], published[name].float() * scale_I)
    assert torch.equal(weights[name].bfloat16().float(), weights[name])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2"])
def test_what_is_served_is_what_was_calibrated(family: str, tmp_path: Path) -> None:
    source = strong_channels(FAMILIES[family](tmp_path / "s"))
    plan = plan_for(source, tmp_path)
    out = served(source, tmp_path, plan)
    written, published = load_tensors(out), load_tensors(source)
    result = json.loads((tmp_path / "run" / "calibration.json").read_text())
    held = {n: t for f in (tmp_path / "run" / "weights").glob("*.safetensors") for n, t in load_file(f).items()}
    plain = {n for n in held if n in published}
    assert {n for n in plain if n.endswith("layernorm.weight")}
    for name in plain:
        assert torch.equal(written[name], held[name]) and written[name].dtype == published[name].dtype
        assert not torch.equal(written[name], published[name])
    for name in published.keys() - set(result["smoothed"]) - {f"{n}.weight" for n in result["layers"]}:
        assert torch.equal(written[name], published[name])
    for folder in (tmp_path / "run", None):
        report = verify_checkpoint(out, open_checkpoint(source), run=folder)
        assert report.passed, [c.failures for c in report.checks]
        assert not {e.name for e in report.layers} & set(result["smoothed"])
    plain_rounding = plan_for(source, tmp_path, "search")
    run(plain_rounding, tmp_path / "p", jobs=2, memory=1 << 20)
    truth = logits(source, None)
    errors = [float((logits(source, dequantize(o)) - truth).norm() / truth.norm()) for o in (out, tmp_path / "p")]
    assert errors[0] < 0.9 * errors[1]


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = strong_channels(FAMILIES["llama"](tmp_path / "s"))
    out = served(source, tmp_path, plan_for(source, tmp_path))
    config = CompressedTensorsConfig(run_compressed=False)
    with pytest.warns(UserWarning, match="run_compressed"):
        read = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=config)
    with torch.no_grad():
        got = read(torch.from_numpy(samples(n=2).ids_NL).long()).logits
    expected = logits(source, dequantize(out))
    assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_a_changed_norm_without_a_run_fails(tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "s")
    out = served(source, tmp_path, plan_for(source, tmp_path))
    manifest = json.loads((out / "quantkit.json").read_text())
    name = next(n for n in manifest["calibrated"] if n.endswith("layernorm.weight"))
    manifest["calibrated"].remove(name)
    (out / "quantkit.json").write_text(json.dumps(manifest))
    report = verify_checkpoint(out, open_checkpoint(source))
    assert any(name in failure for c in report.checks for failure in c.failures)


def test_a_kept_projection_is_scaled_by_powers_of_two_and_written(tmp_path: Path) -> None:
    source = strong_channels(FAMILIES["llama"](tmp_path / "s"))
    first = '  - {match: {name: ["*.up_proj.weight", "*.gate_proj.weight"]}, keep: true}\n'
    out = served(source, tmp_path, plan_for(source, tmp_path, first=first))
    written, published = load_tensors(out), load_tensors(source)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        ratio = written[name].double() / published[name].double()
        ratio = ratio[torch.isfinite(ratio)]
        assert not torch.equal(ratio, torch.ones_like(ratio))
        assert torch.equal(torch.frexp(ratio).mantissa, torch.full_like(ratio, 0.5))
    report = verify_checkpoint(out, open_checkpoint(source), run=tmp_path / "run")
    assert report.passed, [c.failures for c in report.checks]


def test_a_norm_that_adds_one_to_its_weight_is_left_alone(tmp_path: Path) -> None:
    source = FAMILIES["gemma2"](tmp_path / "s")
    result = calibrate_into(tmp_path / "run", plan_for(source, tmp_path), samples(), SETTINGS)
    facts = {n: f["smoothing"] for n, f in result["layers"].items()}
    for part in ("self_attn.q_proj", "mlp.gate_proj"):
        assert facts[f"model.layers.0.{part}"]["into"] is None
        assert "no norm" in facts[f"model.layers.0.{part}"]["reason"]
    assert facts["model.layers.0.mlp.down_proj"]["into"] == "model.layers.0.mlp.up_proj"


def test_gptq_on_top_loses_less(tmp_path: Path) -> None:
    source = strong_channels(FAMILIES["llama"](tmp_path / "s"))
    lost = []
    for method in ("awq", "{name: awq, gptq: true}", "{name: awq, clip: false}"):
        out = tmp_path / str(len(lost))
        out.mkdir()
        result = calibrate_into(out / "run", plan_for(source, out, method), samples(), SETTINGS)
        lost.append(sum(f["loss"] for f in result["layers"].values()))
    assert lost[1] < 0.8 * lost[0]
    assert lost[0] < lost[2]


def test_experts_without_tokens_are_not_smoothed_inside(tmp_path: Path) -> None:
    source = FAMILIES["qwen3_moe"](tmp_path / "s")
    tensors = load_tensors(source)
    tensors["model.layers.1.mlp.gate.weight"].zero_()  # all tokens go to the same two experts
    save_tensors(source, tensors)
    result = calibrate_into(tmp_path / "run", plan_for(source, tmp_path), samples(), SETTINGS)
    unseen = [n for n, f in result["layers"].items() if not f["tokens"]]
    assert len(unseen) == 6
    for name in unseen:
        facts = result["layers"][name]
        assert facts["coverage"] == "none"
        if name.endswith("down_proj"):
            assert facts["smoothing"] == {"into": None, "reason": "it saw no token"}


# so little that sets come in several waves; that experts are streamed
@pytest.mark.parametrize(("family", "memory"), [("llama", 1 << 19), ("qwen3_moe", 1_800_000)])
def test_memory_and_kills_change_nothing(family: str, memory: int, tmp_path: Path) -> None:
    source = strong_channels(FAMILIES[family](tmp_path / "s"))
    plan = plan_for(source, tmp_path)
    calibrate_into(tmp_path / "whole", plan, samples(), SETTINGS)

    for stop in (1, 4, 2):  # in the first block, then twice in the second
        with pytest.raises(KilledError):
            calibrate_into(tmp_path / "killed", plan, samples(), SETTINGS, advance=killed_after(stop))
    calibrate_into(tmp_path / "killed", plan, samples(), Settings(memory))
    for file in sorted((tmp_path / "whole" / "weights").iterdir()):
        assert file.read_bytes() == (tmp_path / "killed" / "weights" / file.name).read_bytes()


def test_a_weight_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "s")
    tensors = load_tensors(source)
    tensors["model.layers.0.mlp.up_proj.weight"][7] = torch.inf
    save_tensors(source, tensors)
    with pytest.raises(QuantkitError, match=r"NaN or infinity(.|\n)*mlp.up_proj"):
        calibrate_into(tmp_path / "run", plan_for(source, tmp_path), samples(), SETTINGS)


def test_inputs_too_large_for_a_hessian_are_named(tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "s")
    tensors = load_tensors(source)
    tensors["model.layers.0.input_layernorm.weight"][7] = 1e25  # its square is beyond float32
    save_tensors(source, tensors)
    with pytest.raises(QuantkitError, match=r"no AWQ scale(.|\n)*layers.0.self_attn.[kqv]_proj(.|\n)*inputs \[.*7"):
        calibrate_into(tmp_path / "run", plan_for(source, tmp_path), samples(), SETTINGS)
