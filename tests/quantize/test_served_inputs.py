"""Activations quantised as the checkpoint asks for, inside the ordinary model of transformers by hooks of plain torch.

Letters: N samples, L tokens of a sample, T tokens, I inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES, load_tensors, save_tensors
from model_weights import reference
from oracle.dequantize import dequantize
from oracle.packed_product import nvfp4_activations
from quantkit.calibrate.tokens import Samples
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.evaluation import Evaluation, compare_checkpoints
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run

IDS = torch.randint(3, 384, (3, 24), generator=torch.Generator().manual_seed(0))
LINEAR = "[attention, dense_mlp, shared_experts, routed_experts]"
Hook = Callable[[torch.Tensor], torch.Tensor]


def written(source: Path, out: Path, rule: str, form: str = "compressed-tensors") -> Path:
    recipe = out.with_suffix(".yaml")
    match = f"match: {{role: {LINEAR}, except: [attention.kv_b]}}"
    rest = '  - {match: {role: "*"}, keep: true}\n'
    recipe.write_text(f"weights:\n  - {{{match}, {rule}}}\n{rest}outputs: [{{format: {form}}}]\n")
    run(make_plan(load_recipe(str(recipe)), open_checkpoint(source)), out, jobs=1, memory=1 << 20)
    return out


def evaluated(out: Path, source: Path, *, weights_only: bool = False, memory: int = 1 << 28) -> Evaluation:
    samples = Samples(IDS.int().numpy(), "ids", "", 0, IDS.numel())
    return compare_checkpoints(
        open_checkpoint(out), open_checkpoint(source), samples, kv=False, memory=memory, weights_only=weights_only
    )


def e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def by_token(x: torch.Tensor) -> torch.Tensor:
    return e4m3(x, x.abs().amax(-1, keepdim=True) / 448)


def by_block(x: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 128))
    return e4m3(blocks, blocks.abs().amax(-1, keepdim=True) / 448).flatten(-2)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(nvfp4_activations(x.reshape(-1, x.shape[-1]).numpy(), 0.003)).float().reshape(x.shape)


def fixed(x: torch.Tensor) -> torch.Tensor:
    return e4m3(x, torch.tensor(0.003))


def ordinary(source: Path, out: Path, hook: Hook) -> float:
    """Perplexity of the decoded weights with `hook` before every linear layer but the head."""
    full = reference(source, dequantize(out))
    for name, module in full.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (hook(args[0]),))
        elif name.endswith(".experts"):
            module.forward = lambda x, index, weight, experts=module: routed(experts, x, index, weight, hook)
    with torch.no_grad():
        logits = full(IDS, use_cache=False).logits[:, :-1].double()
    return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()))


def routed(experts, x_TI, index, weight, hook):
    """Token by token, expert by expert."""
    rows = []
    for t in range(len(x_TI)):
        row = torch.zeros_like(x_TI[0])
        for e, w in zip(index[t].tolist(), weight[t], strict=True):
            gate, up = (hook(x_TI[t : t + 1]) @ experts.gate_up_proj[e].T).chunk(2, -1)
            row += w * (hook(torch.nn.functional.silu(gate) * up) @ experts.down_proj[e].T)[0]
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("sources")
    made = {name: FAMILIES[name](room / name) for name in ("qwen3_moe", "deepseek_v3")}
    made["llama"] = FAMILIES["llama"](room / "llama", head_dim=64)  # keys of a whole 128-row block
    # where a value lies on the edge of two codes, the last bit of a sum decides, and so on through every later layer
    return made | {"one layer": FAMILIES["llama"](room / "one", num_hidden_layers=1)}


CASES = [
    ("one layer", "scheme: nvfp4, input_scale: 0.003", "compressed-tensors", nvfp4, {"NVFP4": 7}),
    ("one layer", "scheme: nvfp4, input_scale: 0.003", "modelopt", nvfp4, {"NVFP4": 7}),
    ("llama", "scheme: fp8-tensor, input_scale: 0.003", "compressed-tensors", fixed, {"FP8 under a stored scale": 14}),
    ("llama", "scheme: fp8-tensor, input_scale: 0.003", "modelopt", fixed, {"FP8 under a stored scale": 14}),
    ("llama", "scheme: fp8-channel", "compressed-tensors", by_token, {"FP8 by token": 14}),
    ("llama", "scheme: fp8-channel", "modelopt", by_token, {"FP8 by token": 14}),
    ("llama", "scheme: fp8-tensor", "compressed-tensors", by_token, {"FP8 by token": 14}),
    ("llama", "scheme: fp8-block", "fp8", by_block, {"FP8 by 128 inputs of a token": 14}),
    ("llama", "scheme: fp8-block", "compressed-tensors", by_block, {"FP8 by 128 inputs of a token": 14}),
    ("qwen3_moe", "scheme: nvfp4, input_scale: 0.003", "modelopt", nvfp4, None),
    ("qwen3_moe", "scheme: fp8-channel", "compressed-tensors", by_token, None),
]


@pytest.mark.parametrize(("family", "rule", "form", "hook", "counts"), CASES)
def test_as_the_ordinary_model_with_hooks(family, rule, form, hook, counts, sources, tmp_path):
    source = sources[family]
    out = written(source, tmp_path / "o", rule, form)
    found = evaluated(out, source)
    weights_only = evaluated(out, source, weights_only=True)
    assert found.scores.perplexity_candidate == pytest.approx(ordinary(source, out, hook), rel=1e-4)
    assert weights_only.scores.perplexity_candidate == pytest.approx(ordinary(source, out, lambda x: x), rel=1e-5)
    assert found.scores.perplexity_candidate != weights_only.scores.perplexity_candidate
    assert found.activations == weights_only.activations and (counts is None or found.activations == counts)
    if family == "qwen3_moe":  # experts that do not fit, and many that do
        swept = evaluated(out, source, memory=300_000)
        assert swept.scores.kl == pytest.approx(found.scores.kl, rel=1e-5)


def test_16_bit_activations_stay_as_they_are(sources, tmp_path):
    out = written(sources["llama"], tmp_path / "o", "scheme: nvfp4")
    found = evaluated(out, sources["llama"])
    assert found.activations == {}
    assert found.scores == evaluated(out, sources["llama"], weights_only=True).scores


@pytest.mark.parametrize(
    ("form", "suffix"), [("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")]
)
def test_layers_that_run_as_one_have_the_largest_number_that_is_stored(form, suffix, sources, tmp_path):
    source = sources["llama"]
    out = written(source, tmp_path / "o", "scheme: nvfp4, input_scale: 0.003", form)
    before = evaluated(out, source).scores
    tensors = load_tensors(out)
    name = f"model.layers.0.self_attn.k_proj.{suffix}"
    tensors[name] = tensors[name] / 2  # not the largest
    save_tensors(out, tensors)
    assert evaluated(out, source).scores == before
    tensors[name] = tensors[name] * 22
    save_tensors(out, tensors)
    assert evaluated(out, source).scores != before


def test_latent_attention_runs(sources, tmp_path):
    out = written(sources["deepseek_v3"], tmp_path / "o", "scheme: fp8-channel")
    found, plain = (evaluated(out, sources["deepseek_v3"], weights_only=w).scores.kl for w in (False, True))
    assert plain < found < 20 * plain


def change(out: Path, **settings: object) -> None:
    config = json.loads((out / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] |= settings
    (out / "config.json").write_text(json.dumps(config))


def test_what_is_refused(sources, tmp_path):
    source = sources["llama"]
    out = written(source, tmp_path / "o", "scheme: fp8-tensor, input_scale: 0.003")
    tensors = load_tensors(out)
    missing = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.down_proj.input_scale"}
    save_tensors(out, missing)
    with pytest.raises(QuantkitError, match="not stored") as raised:
        evaluated(out, source)
    assert raised.value.tensor == "model.layers.1.mlp.down_proj" and "--weights-only" in str(raised.value)
    save_tensors(out, tensors)
    change(out, num_bits=6)
    with pytest.raises(QuantkitError, match="a form that is not computed here"):
        evaluated(out, source)
    assert evaluated(out, source, weights_only=True).scores.kl > 0
