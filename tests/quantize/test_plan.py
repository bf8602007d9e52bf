"""Plans of 700 GB models from headers alone: sizes to the byte, fates, TP tables, and every kind of refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import FAMILIES, read_config, tiny, write_config
from headers import GIANTS, miniature, write
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe, with_int4_group

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sizes_golden.json").read_text())
REST = '  - {match: {role: "*"}, keep: true}\n'


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2-FP8 as published: 118,629 tensors, 755.6 GB of holes."""
    return write(tmp_path_factory.mktemp("giants") / "GLM-5.2-FP8", GIANTS["GLM-5.2"], "fp8_block128")


def recipe_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return file


def plan_of(folder: Path, recipe: str | Path, **more: object) -> Plan:
    return make_plan(load_recipe(str(recipe)), open_checkpoint(folder), **more)  # type: ignore[arg-type]


def fates(plan: Plan) -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for t in plan.tasks:
        found.setdefault(t.role, set()).add((t.fate, t.scheme.name if t.scheme else ""))
    return found


def test_glm_in_int4_is_the_size_of_the_published_deployment(glm: Path) -> None:
    plan = plan_of(glm, "models/glm-5.2-int4")
    golden = GOLDEN["GLM-5.2/experts_int4g32/rest_bf16/mtp_experts_same"]
    assert plan.bytes_in == 755_617_140_416
    assert plan.bytes_out == golden["bytes"] == 450_904_205_312
    assert len(plan.index["weight_map"]) == golden["tensors"]
    assert f"{plan.bytes_out / 2**30:.2f}" == "419.94"
    assert plan.index["metadata"]["total_size"] == plan.bytes_out
    assert plan.tp == dict.fromkeys((1, 2, 4, 8, 16), "")
    assert sum(s.size for s in plan.shards) == plan.file_bytes
    assert all(s.size <= 5_001_000_000 for s in plan.shards)
    config = plan.files["config.json"]["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert "model.layers.6.self_attn.indexer.weights_proj" in config["ignore"], "the name in the tensors"
    assert not any("indexers_proj" in name for name in config["ignore"]), (
        "the source's list names a tensor that is not there"
    )


GRID = [
    ("nvfp4", "nvfp4", "bf16", "mtp.routed_experts"),
    ("mxfp4", "mxfp4", "bf16", "mtp.routed_experts"),
    ("int4g32", "int4-g32", "keep", "mtp.routed_experts"),
    ("int4g32", "int4-g32", "bf16", "drop"),
]


@pytest.mark.parametrize(("experts", "scheme", "rest", "mtp"), GRID)
def test_golden_sizes(glm: Path, tmp_path: Path, experts: str, scheme: str, rest: str, mtp: str) -> None:
    roles = "[routed_experts, mtp.routed_experts]" if mtp != "drop" else "routed_experts"
    dropped = "  - {match: {role: mtp}, drop: no speculative decoding}\n" if mtp == "drop" else ""
    closing = '  - {match: {role: "*"}, scheme: bf16}\n' if rest == "bf16" else REST
    text = f"weights:\n  - {{match: {{role: {roles}}}, scheme: {scheme}}}\n{dropped}{closing}"
    plan = plan_of(glm, recipe_of(tmp_path, text))
    key = f"GLM-5.2/experts_{experts}/rest_{'bf16' if rest == 'bf16' else 'fp8b'}/mtp_experts_{'drop' if dropped else 'same'}"
    layers = sum(t.fate == "quantize" for t in plan.tasks)
    # the golden NVFP4 carries a float32 activation scale a layer as well; weights alone have none
    scalars = layers if scheme == "nvfp4" else 0
    golden = (GOLDEN[key]["bytes"] - 4 * scalars, GOLDEN[key]["tensors"] - scalars)
    assert (plan.bytes_out, len(plan.index["weight_map"])) == golden


def test_kimi_passes_its_int4_through(tmp_path: Path) -> None:
    folder = write(tmp_path / "k", GIANTS["KIMI-K2.6-text"], "int4g32")
    plan = plan_of(folder, "models/kimi-k2.6")
    assert {t.fate for t in plan.tasks} == {"keep"}
    assert plan.bytes_out == plan.bytes_in
    assert plan.format == "as published"
    assert plan.files["config.json"] == open_checkpoint(folder).config


def test_defaults_keep_what_engines_need_dense(tmp_path: Path) -> None:
    folder = write(tmp_path / "g", miniature("GLM-5.2"), "bf16")
    found = fates(make_plan(with_int4_group(load_recipe("int4"), "32"), open_checkpoint(folder)))
    kept = {r for r, what in found.items() if what == {("keep", "")}}
    assert {"embedding", "lm_head", "norm", "router", "router_bias", "indexer", "attention.kv_b"} <= kept
    assert {r for r in found if r.startswith("mtp.")} <= kept, "the MTP layer stays as published unless a rule names it"
    assert found["routed_experts"] == found["shared_experts"] == found["attention.o"] == {("quantize", "int4-g32")}


def test_fused_layers_share_a_step(tmp_path: Path) -> None:
    plan = plan_of(FAMILIES["llama"](tmp_path / "l"), "nvfp4")
    names = {frozenset(t.name.rpartition(".")[2] for t in s.tasks) for s in plan.steps if s.tasks[0].fate == "quantize"}
    assert frozenset({"q_proj", "k_proj", "v_proj"}) in names
    assert frozenset({"gate_proj", "up_proj"}) in names
    assert frozenset({"down_proj"}) in names


def test_tied_head_is_not_written_and_not_quantised(tmp_path: Path) -> None:
    plan = plan_of(FAMILIES["llama_tied"](tmp_path / "l"), "nvfp4")
    assert "lm_head.weight" not in plan.index["weight_map"]
    assert "lm_head" in plan.ignore


def test_group_that_does_not_divide_says_which_would(tmp_path: Path) -> None:
    folder = tiny(
        tmp_path / "t", "llama", hidden_size=192, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512
    )
    with pytest.raises(QuantkitError) as e:
        plan_of(folder, "int4")
    text = str(e.value)
    assert "192 inputs, group 128" in text
    assert "--group 64 (tensor-parallel sizes 1)" in text
    assert "--group auto" in text
    auto = make_plan(with_int4_group(load_recipe("int4"), "auto"), open_checkpoint(folder))
    assert {t.scheme.name for t in auto.tasks if t.scheme} == {"int4-g64"}
    assert auto.tp[1] == ""
    assert "128 inputs / 4 is not a multiple of the group 64" in auto.tp[4]


def test_tp_size_that_was_asked_for(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "l")
    with pytest.raises(QuantkitError, match="will not load: 16"):
        plan_of(folder, "int4", tp=[16])


def test_rule_that_matches_nothing(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "l")
    with pytest.raises(QuantkitError, match="matches nothing") as e:
        plan_of(folder, "int4-experts")
    assert "role routed_experts" in str(e.value)
    assert "attention.q" in str(e.value), "the roles that are there"


def test_shadowed_rule_matches_nothing(tmp_path: Path) -> None:
    rules = (
        "weights:\n  - {match: {role: attention}, scheme: nvfp4}\n  - {match: {role: attention.q}, keep: true}\n" + REST
    )
    with pytest.raises(QuantkitError, match="matches nothing"):
        plan_of(FAMILIES["llama"](tmp_path / "l"), recipe_of(tmp_path, rules))


def test_format_that_cannot_hold_the_scheme(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="fp8 format cannot hold nvfp4"):
        plan_of(FAMILIES["llama"](tmp_path / "l"), "nvfp4", format_name="fp8")


def test_static_fp8_of_modelopt_needs_a_number(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "l")
    rule = "weights:\n  - {match: {role: dense_mlp}, scheme: fp8-tensor%s}\n" + REST
    with pytest.raises(QuantkitError, match="static input scale"):
        plan_of(folder, recipe_of(tmp_path, rule % ""), format_name="modelopt")
    plan = plan_of(folder, recipe_of(tmp_path, rule % ", input_scale: 1.0"), format_name="modelopt")
    assert any(n.endswith(".input_scale") for n in plan.index["weight_map"])


def test_all_faults_at_once(tmp_path: Path) -> None:
    rules = (
        "weights:\n  - {match: {role: routed_experts}, keep: true}\n  - {match: {name: nothing}, keep: true}\n" + REST
    )
    with pytest.raises(QuantkitError, match="2 errors"):
        plan_of(FAMILIES["llama"](tmp_path / "l"), recipe_of(tmp_path, rules))


def test_identity_names_what_changed(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "l")
    a, b = plan_of(folder, "nvfp4"), plan_of(folder, "nvfp4")
    assert a.identity() == b.identity()
    other = plan_of(folder, "fp8-channel").identity()
    assert {k for k in other if other[k] != a.identity()[k]} >= {"recipe", "configuration", "layout of the shards"}
    assert other["source tensors"] == a.identity()["source tensors"]


def test_tied_head_that_is_stored_is_not_written_twice(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "l")
    write_config(folder, read_config(folder) | {"tie_word_embeddings": True})
    plan = plan_of(folder, "nvfp4")
    assert "lm_head.weight" not in plan.index["weight_map"]
    assert [t.reason for t in plan.tasks if t.fate == "drop"] == ["tied to the embedding"]
    assert "lm_head.weight" in plan_of(folder, "keep").index["weight_map"], "keep keeps all"
