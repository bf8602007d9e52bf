"""The model card: metadata as the Hub reads it, tables that say what the files hold, commands each engine takes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from huggingface_hub import ModelCard
from quantkit.export.checkpoint import open_checkpoint
from quantkit.export.serving import servings
from quantkit.quantize.capacity import fates_of
from quantkit.quantize.cli.main import app, run_app
from quantkit.quantize.engines import examine_plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run

SOURCE_CARD = """---
license: other
license_name: tiny
license_link: LICENSE
language: [en]
pipeline_tag: text-generation
tags: [chat]
---
# Tiny

Its own words.
"""


def quantkit(*words: object) -> int:
    return run_app(lambda: app([str(w) for w in words]))


def written(source: Path, out: Path, recipe: str = "int4", **options: Any) -> Path:
    run(make_plan(load_recipe(recipe), open_checkpoint(source), **options), out, jobs=1, memory=1 << 20)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot in the Hub's cache."""
    folder = tmp_path_factory.mktemp("hub") / "models--org--tiny" / "snapshots" / ("c" * 40)
    folder.parent.mkdir(parents=True)
    FAMILIES["llama"](folder)
    (folder / "README.md").write_text(SOURCE_CARD)
    return folder


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(source, tmp_path_factory.mktemp("out") / "o")


def test_metadata_is_that_of_the_hub(out: Path) -> None:
    card = ModelCard.load(out / "README.md")
    data = card.data.to_dict()
    assert data == {
        "license": "other", "license_name": "tiny", "license_link": "LICENSE", "language": ["en"],
        "pipeline_tag": "text-generation", "library_name": "transformers", "base_model": "org/tiny",
        "base_model_relation": "quantized", "tags": ["quantkit", "compressed-tensors", "int4"],
    }  # fmt: skip
    assert f"at revision `{'c' * 40}`" in card.text
    assert (out / "README.source.md").read_text() == SOURCE_CARD
    assert "(README.source.md)" in card.text


def test_the_table_holds_sizes_and_errors(out: Path, source: Path) -> None:
    text = (out / "README.md").read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    table = {r[0]: r for r in rows}
    manifest = json.loads((out / "quantkit.json").read_text())
    names = [n for n, layer in manifest["layers"].items() if layer["role"] == "dense_mlp"]
    sums = [manifest["measured"][n] for n in names]
    error = (sum(s[0] for s in sums) / sum(s[1] for s in sums)) ** 0.5
    assert table["dense_mlp"][1:4] == ["int4-g128", "search", "6"]
    assert table["dense_mlp"][-1] == f"{error:.4f}"
    assert 0.05 < error < 0.15
    assert table["embedding"][1] == "as published"
    inside = sum(t.nbytes for t in open_checkpoint(out).tensors.values())
    assert f"became {inside / 1e9:.3f} GB" in text
    assert 'vllm serve "$MODEL"  # vLLM' in text
    assert "--kv-cache-dtype" not in text


def test_scores_are_put_in_later(source: Path, tmp_path: Path) -> None:
    out = written(source, tmp_path / "o")
    scores = {
        "text": "/home/someone/wiki.txt", "text_digest": "d", "kv": False, "tokens": 5110, "perplexity_source": 30.0119,
        "perplexity_candidate": 32.7414, "kl": 0.11312, "top1": 0.7971, "seconds": 3.0,
    }  # fmt: skip
    (tmp_path / "e.json").write_text(json.dumps(scores))
    before = (out / "README.md").read_text()
    assert quantkit("card", out, "--evaluation", tmp_path / "e.json", "--base-model", "other/tiny") == 0
    card = ModelCard.load(out / "README.md")
    assert "| this checkpoint | 32.7414 | 0.11312 | 79.71 % |" in card.text
    assert "/home" not in card.content
    found = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert found == {"perplexity": 32.7414, "kl_divergence": 0.11312, "top1_agreement": 0.7971}
    assert card.data.eval_results[0].dataset_name == "wiki.txt"
    assert card.data.base_model == "other/tiny"
    assert before != card.content
    listed = json.loads((out / "quantkit.json").read_text())["files"]["README.md"]
    assert listed["sha256"] == hashlib.sha256((out / "README.md").read_bytes()).hexdigest()
    assert quantkit("verify", out, "--manifest") == 0
    (tmp_path / "e.json").write_text("{}")
    assert quantkit("card", out, "--evaluation", tmp_path / "e.json") == 2
    assert quantkit("card", out, "--base-model", "no/such/name") == 2
    assert quantkit("card", source) == 2


def test_a_copy_keeps_its_card(source: Path, tmp_path: Path) -> None:
    assert (written(source, tmp_path / "o", "keep") / "README.md").read_text() == SOURCE_CARD
    assert not (tmp_path / "o" / "README.source.md").exists()


def test_a_local_source_has_no_base_model(tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "tiny")
    card = ModelCard.load(written(source, tmp_path / "o", "fp8-channel") / "README.md")
    assert card.data.base_model is None
    assert card.data.license is None
    assert "`tiny`" in card.text


KV = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}}
SHORT, PROJ = ["self_attn.k_scale", "self_attn.v_scale"], ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"]


def engines(model_type: str, quant: dict[str, Any], schemes: set[tuple[str, str]], kv: list[str]) -> dict[str, bool]:
    """Engine -> whether its command switches the FP8 cache on."""
    found = servings({"model_type": model_type, "quantization_config": quant}, schemes, kv)
    return {s.engine: "--kv-cache-dtype fp8_e4m3" in s.command for s in found}


@pytest.mark.parametrize(
    ("model_type", "quant", "schemes", "kv", "expected"),
    [
        ("llama", {"quant_method": "compressed-tensors", **KV}, {("dense_mlp", "int4-g128")}, SHORT, {"vllm": True, "sglang": True, "transformers": False}),
        # SGLang builds this class's attention without a quantisation config: scales would be dropped
        ("qwen3", {"quant_method": "compressed-tensors", **KV}, {("dense_mlp", "int4-g128")}, SHORT, {"vllm": True, "sglang": False, "transformers": False}),
        ("llama", {"quant_method": "compressed-tensors"}, {("dense_mlp", "int4-g128")}, SHORT, {"vllm": False, "sglang": False, "transformers": False}),
        ("llama", {"quant_method": "compressed-tensors", **KV}, {("dense_mlp", "int4-g128")}, [], {"vllm": False, "sglang": False, "transformers": False}),
        ("llama", {"quant_method": "modelopt", "quant_algo": "NVFP4", **KV}, {("dense_mlp", "nvfp4")}, PROJ, {"vllm": True, "sglang": True, "trtllm": False}),
        ("llama", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {("dense_mlp", "fp8-channel")}, [], {"vllm": False}),
        ("llama", {"quant_method": "compressed-tensors"}, {("dense_mlp", "mxfp4")}, [], {"vllm": False, "transformers": False}),
        ("qwen3_moe", {"quant_method": "compressed-tensors"}, {("routed_experts", "int4a-g128")}, [], {"vllm": False}),
        ("qwen3_moe", {"quant_method": "compressed-tensors"}, {("routed_experts", "int4-g128"), ("attention.q", "fp8-channel")}, [], {"vllm": False}),
        ("qwen3_moe", {"quant_method": "fp8"}, {("routed_experts", "fp8-block")}, [], {"vllm": False, "sglang": False, "transformers": False}),
        ("llama", {"quant_method": "unheard"}, set(), [], {}),
    ],
)  # fmt: skip
def test_engines_and_kv_flags(
    model_type: str, quant: dict[str, Any], schemes: set[tuple[str, str]], kv: list[str], expected: dict[str, bool]
) -> None:
    assert engines(model_type, quant, schemes, kv) == expected


PLANNED = [
    ("llama", "int4", "compressed-tensors"), ("llama", "int4", "gptq"), ("llama", "int4", "modelopt"),
    ("llama", "nvfp4", "modelopt"), ("llama", "fp8-channel", "modelopt"),
    ("qwen3_moe", "nvfp4", "compressed-tensors"), ("qwen3_moe", "mxfp4-experts", "compressed-tensors"),
    ("qwen3_moe", "int4-experts", "compressed-tensors"), ("deepseek_v3", "fp8-block", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "recipe", "form"), PLANNED)
def test_the_card_names_the_engines_whose_twins_pass(family: str, recipe: str, form: str, tmp_path: Path) -> None:
    """Of TensorRT-LLM, read from stored versions only, the card says less than its twin does not refuse."""
    plan = make_plan(load_recipe(recipe), open_checkpoint(FAMILIES[family](tmp_path / "m")), format_name=form)
    schemes = {(r["role"], r["scheme"]) for r in fates_of(plan) if r["scheme"]}
    named = {s.engine for s in servings(plan.files["config.json"], schemes, [])}
    twins = examine_plan(plan, ("vllm", "sglang", "trtllm", "transformers"), (1,))
    passed = {t.engine for t in twins if t.passed}
    assert named <= passed
    assert named - {"trtllm"} == passed - {"trtllm"}
