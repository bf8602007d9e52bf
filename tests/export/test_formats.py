"""What is written is what readers parse: configurations through compressed-tensors' own models, target patterns, ignore lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from families import FAMILIES, load_tensors, read_config, save_tensors, tiny, write_config
from quantised_fp4 import as_nvfp4
from quantkit.export.checkpoint import open_checkpoint
from quantkit.export.sources.detect import weights_of
from quantkit.export.targets import target_patterns, with_fused_names
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint

REST = '  - {match: {role: "*"}, keep: true}\n'
MIXED = """weights:
  - {match: {role: routed_experts}, scheme: int4-g32}
  - {match: {role: [attention, dense_mlp]}, scheme: fp8-channel}
"""


def plan_of(folder: Path, tmp_path: Path, rules: str, form: str = "compressed-tensors") -> Plan:
    file = tmp_path / "r.yaml"
    file.write_text(rules + REST if rules.startswith("weights") else f"weights:\n{rules}{REST}")
    return make_plan(load_recipe(str(file)), open_checkpoint(folder), format_name=form)


SCHEMES = [
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-channel",
    "int4a-g32",
    "int4a-g128",
    "nvfp4",
    "mxfp4",
    "fp8-tensor",
    "fp8-channel",
]
EXPECTED = {
    "int4-g32": ("pack-quantized", ["weight_packed", "weight_scale", "weight_shape"]),
    "int4a-g128": ("pack-quantized", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]),
    "nvfp4": ("nvfp4-pack-quantized", ["weight_global_scale", "weight_packed", "weight_scale"]),
    "mxfp4": ("mxfp4-pack-quantized", ["weight_packed", "weight_scale"]),
    "fp8-channel": ("float-quantized", ["weight", "weight_scale"]),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_parses_every_scheme(scheme: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", "llama", hidden_size=256, intermediate_size=256)
    plan = plan_of(folder, tmp_path, f"  - {{match: {{role: [attention, dense_mlp]}}, scheme: {scheme}}}\n")
    written = plan.files["config.json"]["quantization_config"]
    parsed = QuantizationConfig.model_validate(written)
    (group,) = parsed.config_groups.values()
    assert group.targets == ["Linear"]
    assert parsed.ignore == ["lm_head"]
    assert parsed.quantization_status == "compressed"
    if scheme in EXPECTED:
        assert written["format"] == EXPECTED[scheme][0]
        names = sorted(n.rpartition(".")[2] for n in plan.index["weight_map"] if ".q_proj." in n and "layers.0" in n)
        assert names == EXPECTED[scheme][1]
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(folder))
    assert report.passed, [c for c in report.checks if not c.passed]


def test_mixed_groups_match_their_own_layers_and_no_other(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_moe"](tmp_path / "m")
    plan = plan_of(folder, tmp_path, MIXED)
    written = plan.files["config.json"]["quantization_config"]
    assert written["format"] == "mixed-precision"
    parsed = QuantizationConfig.model_validate(written)
    groups = {g.format: [re.compile(t.removeprefix("re:")) for t in g.targets] for g in parsed.config_groups.values()}
    assert set(groups) == {"pack-quantized", "float-quantized"}
    for layer in plan.layers:
        hits = {form for form, patterns in groups.items() if any(p.match(layer.module) for p in patterns)}
        expected = {None: set(), "int4-g32": {"pack-quantized"}, "fp8-channel": {"float-quantized"}}
        assert hits == expected[layer.scheme.name if layer.scheme else None], layer.module
    assert any(p.match("model.layers.1.self_attn.qkv_proj") for p in groups["float-quantized"]), "the fused layer too"
    assert not any(p.match("model.layers.1.self_attn.qkv_proj") for p in groups["pack-quantized"])
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(folder)).passed


def test_patterns_list_numbers_only_where_they_tell_groups_apart() -> None:
    first = [f"m.layers.{i}.mlp.{p}_proj" for i in range(12) for p in ("gate", "up")]
    last = [f"m.layers.{i}.mlp.{p}_proj" for i in range(12, 30) for p in ("gate", "up")]
    (a, b) = target_patterns([first, last], ["lm_head"])
    assert all(any(re.match(p[3:], m) for p in a) for m in first)
    assert not any(re.match(p[3:], m) for p in a for m in last)
    assert not any(re.match(p[3:], m) for p in b for m in first), "layers.1 must not hit layers.10"
    assert any(re.match(p[3:], "m.layers.3.mlp.gate_up_proj") for p in a)
    (only,) = target_patterns([first], [])
    assert only[0] == r"re:m\.layers\.\d+\.mlp\.gate_proj$"


def test_ignore_lists_hold_shards_and_the_fused_name() -> None:
    names = [
        "a.self_attn.q_proj",
        "a.self_attn.k_proj",
        "a.self_attn.v_proj",
        "a.mlp.gate_proj",
        "b.self_attn.q_a_proj",
        "b.self_attn.kv_a_proj_with_mqa",
    ]
    listed = with_fused_names(names)
    assert set(listed) - set(names) == {
        "a.self_attn.qkv_proj",
        "b.self_attn.fused_qkv_a_proj",
        "b.self_attn.fused_qkv_a_proj_with_mqa",
    }


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [
        ("nvfp4", "W4A16_NVFP4"),
        ("fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("fp8-block", "FP8_PB_WO"),
        ("fp8-tensor, input_scale: 1.0", "FP8"),
    ],
)
def test_modelopt_writes_two_configurations_that_agree(scheme: str, algorithm: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", "llama", num_key_value_heads=4)
    plan = plan_of(folder, tmp_path, f"  - {{match: {{role: [attention, dense_mlp]}}, scheme: {scheme}}}\n", "modelopt")
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    flat = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    nested = json.loads((tmp_path / "o" / "hf_quant_config.json").read_text())["quantization"]
    assert flat["quant_algo"] == nested["quant_algo"] == algorithm
    assert flat["ignore"] == nested["exclude_modules"] == ["lm_head"]
    assert {"group_size", "kv_cache_quant_algo"} <= set(nested)
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(folder))
    assert report.passed, [c for c in report.checks if not c.passed]
    assert {w.scheme.name for w in weights_of(open_checkpoint(tmp_path / "o")).values() if w.scheme} == {
        scheme.split(",", maxsplit=1)[0]
    }


def test_fp8_blocks_in_the_published_format(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", "llama", num_key_value_heads=4)
    plan = make_plan(load_recipe("fp8-block"), open_checkpoint(folder))
    config = plan.files["config.json"]["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in plan.index["weight_map"]
    assert "scale_fmt" not in config
    powers = plan_of(folder, tmp_path, "  - {match: {role: dense_mlp}, scheme: fp8-block-ue8m0}\n", "fp8")
    assert powers.files["config.json"]["quantization_config"]["scale_fmt"] == "ue8m0"
    run(powers, tmp_path / "o", jobs=2, memory=1 << 20)
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(folder)).passed


def test_formats_without_mixes_say_so(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", "llama", num_key_value_heads=4)
    rules = "".join(
        f"  - {{match: {{role: {role}}}, scheme: {scheme}}}\n"
        for role, scheme in (("attention", "fp8-block-ue8m0"), ("dense_mlp", "fp8-block"))
    )
    with pytest.raises(QuantkitError, match="one scale format"):
        plan_of(folder, tmp_path, rules, "fp8")


def test_fused_layers_must_share_a_scheme(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="layers that engines fuse"):
        plan_of(FAMILIES["llama"](tmp_path / "m"), tmp_path, "  - {match: {role: attention.q}, scheme: nvfp4}\n")


def test_scales_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "m")
    write_config(folder, read_config(folder) | {"dtype": "float16"})
    run(make_plan(load_recipe("int4"), open_checkpoint(folder)), tmp_path / "o", jobs=1, memory=1 << 20)
    checkpoint = open_checkpoint(tmp_path / "o")
    assert {t.dtype for n, t in checkpoint.tensors.items() if n.endswith("weight_scale")} == {"F16"}
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(folder)).passed


def test_experts_fused_in_3d_are_split(tmp_path: Path) -> None:
    """Families that publish [E, 2I, H] tensors: engines read the quantised experts one by one."""
    folder = FAMILIES["qwen3_moe"](tmp_path / "m")
    tensors = load_tensors(folder)
    stem = "model.layers.1.mlp.experts"
    experts = sorted({n.removeprefix(stem + ".").split(".")[0] for n in tensors if n.startswith(stem)}, key=int)
    one = {n: t for n, t in tensors.items() if not n.startswith(stem)}
    pieces = {p: [tensors[f"{stem}.{e}.{p}_proj.weight"] for e in experts] for p in ("gate", "up", "down")}
    one[f"{stem}.gate_up_proj"] = torch.stack(
        [torch.cat(pair) for pair in zip(pieces["gate"], pieces["up"], strict=True)]
    )
    one[f"{stem}.down_proj"] = torch.stack(pieces["down"])
    for old in folder.glob("model*"):
        old.unlink()
    save_tensors(folder, one)
    for scheme in ("int4-g32", "nvfp4"):
        plan = plan_of(folder, tmp_path, f"  - {{match: {{role: routed_experts}}, scheme: {scheme}}}\n")
        run(plan, tmp_path / scheme, jobs=2, memory=1 << 20)
        report = verify_checkpoint(tmp_path / scheme, open_checkpoint(folder))
        assert report.passed, [c for c in report.checks if not c.passed]
        weights = weights_of(open_checkpoint(tmp_path / scheme))
        for e in experts:
            assert weights[f"{stem}.{e}.up_proj.weight"].shape == tuple(pieces["up"][0].shape)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_scales_of_an_fp8_cache_stay_switched_on(form: str, tmp_path: Path) -> None:
    """Scales that the configuration does not declare are ignored by engines: the cache would silently run at 1.0."""
    folder = FAMILIES["llama"](tmp_path / "m")
    tensors = load_tensors(folder)
    for i in range(2):
        tensors |= {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.05]) for x in "kv"}
    save_tensors(folder, tensors)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    declared = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, "config_groups": {}, "ignore": []}
    write_config(folder, read_config(folder) | {"quantization_config": declared})
    plan = plan_of(folder, tmp_path, "  - {match: {role: [attention, dense_mlp]}, scheme: nvfp4}\n", form)
    assert "model.layers.1.self_attn.k_scale" in plan.index["weight_map"]
    assert plan.files["config.json"]["quantization_config"]["kv_cache_scheme"] == scheme
    if form == "modelopt":
        assert plan.files["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_activation_scales_are_not_lost_on_the_way(tmp_path: Path) -> None:
    as_nvfp4(FAMILIES["llama"](tmp_path / "m"), tmp_path / "src", "modelopt", activations=True)
    with pytest.raises(QuantkitError, match="activation scales"):
        plan_of(tmp_path / "src", tmp_path, "  - {match: {role: [attention, dense_mlp]}, scheme: nvfp4}\n")
    kept = make_plan(load_recipe("keep"), open_checkpoint(tmp_path / "src"))
    assert any(n.endswith("input_scale") for n in kept.index["weight_map"])


def test_integers_are_not_quantised(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "m")
    tensors = load_tensors(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    save_tensors(folder, tensors | {name: torch.zeros(tensors[name].shape, dtype=torch.int8)})
    with pytest.raises(QuantkitError, match="not a float tensor"):
        plan_of(folder, tmp_path, "  - {match: {role: dense_mlp}, scheme: nvfp4}\n")


def test_patterns_know_the_name_that_vllm_gives_minimax() -> None:
    (only,) = target_patterns([["model.layers.0.block_sparse_moe.experts.0.w1"]], [])
    assert re.match(only[0][3:], "model.layers.0.block_sparse_moe.experts.0.w1")
    assert re.match(only[0][3:], "model.layers.0.mlp.experts.0.w1")


@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-block"])
def test_fp8_experts_that_no_engine_reads_are_refused(scheme: str, tmp_path: Path) -> None:
    rules = f"  - {{match: {{role: routed_experts}}, scheme: {scheme}}}\n"
    folder = FAMILIES["qwen3_moe"](tmp_path / "m")
    with pytest.raises(QuantkitError, match="per tensor only"):
        plan_of(folder, tmp_path, rules, "modelopt")
    assert plan_of(folder, tmp_path, rules).layers


def test_four_bit_indexer_is_refused(tmp_path: Path) -> None:
    folder = FAMILIES["glm_moe_dsa"](tmp_path / "m")
    with pytest.raises(QuantkitError, match="indexer"):
        plan_of(folder, tmp_path, "  - {match: {role: indexer}, scheme: int4-g32}\n")


def test_modelopt_excludes_the_heads_of_mtp_layers_under_both_names(tmp_path: Path) -> None:
    plan = plan_of(
        FAMILIES["glm4_moe"](tmp_path / "m"),
        tmp_path,
        "  - {match: {role: routed_experts}, scheme: nvfp4}\n",
        "modelopt",
    )
    layer = max(p.layer for p in plan.placed.values() if p.role.startswith("mtp.") and p.layer is not None)
    assert {f"model.layers.{layer}.head", f"model.layers.{layer}.shared_head.head"} <= set(plan.ignore)
    assert len(plan.ignore) == len(set(plan.ignore))
