"""Roles beyond the tables: giants that add up, stored order of experts, MTP layers, unknown families, hostile names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import headers
import pytest
from families import FAMILIES, load_tensors, read_config
from hypothesis import given
from hypothesis import strategies as st
from quantkit.quantize.roles import Family, matches_role, roles_of, tp_facts

Model = tuple[dict[str, tuple[int, ...]], dict[str, Any]]


def shapes_of(family: str, folder: Path) -> Model:
    FAMILIES[family](folder)
    return {n: tuple(t.shape) for n, t in load_tensors(folder).items()}, read_config(folder)


# parameters of GLM-5.2 by category, from the published table
GLM_PARAMETERS = {
    "embedding": 951_582_720,
    "lm_head": 951_582_720,
    "attention": 12_871_532_544,
    "indexer": 192_675_840 + 4_128_768,
    "dense_mlp": 679_477_248,
    "router": 117_964_800,
    "router_bias": 75 * 256,
    "shared_experts": 2_831_155_200,
    "routed_experts": 724_775_731_200,
    "norm": 1_169_664,
    "mtp.attention": 165_019_648,
    "mtp.indexer": 9_175_040 + 196_608,
    "mtp.router": 1_572_864,
    "mtp.router_bias": 256,
    "mtp.shared_experts": 37_748_736,
    "mtp.routed_experts": 9_663_676_416,
    "mtp.other": 75_497_472,
    "mtp.norm": 33_536,
}


def test_a_giant_adds_up_by_role() -> None:
    model = headers.GIANTS["GLM-5.2"]
    shapes = {name: shape for name, _, shape in headers.tensors(model, "bf16")}
    placed, about = roles_of(shapes, headers.config(model, "bf16"))
    assert about == Family("glm_moe_dsa", True, ())
    sums = {
        role: sum(math.prod(shapes[n]) for n, p in placed.items() if matches_role(p.role, role))
        for role in GLM_PARAMETERS
    }
    assert sums == GLM_PARAMETERS
    assert sum(sums.values()) == 753_329_940_480


@pytest.mark.parametrize("name", headers.GIANTS)
def test_ignore_lists_play_no_part(name: str) -> None:
    model = headers.miniature(name)
    shapes = {n: s for n, _, s in headers.tensors(model, "bf16")}
    plain, about = roles_of(shapes, headers.config(model, "bf16"))
    assert about.known
    assert about.assumptions == ()
    for store in ("fp8_block128", "int4g32"):
        assert roles_of(shapes, headers.config(model, store))[0] == plain  # type: ignore[arg-type]


def test_experts_stored_inputs_first_are_found_by_shape(tmp_path: Path) -> None:
    shapes, config = shapes_of("gpt_oss", tmp_path)
    gate_up, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    placed, _ = roles_of(shapes, config)
    assert (shapes[gate_up], shapes[down]) == ((4, 256, 512), (4, 256, 256))  # down is square: gate_up decides
    assert placed[gate_up].transposed
    assert placed[down].transposed
    outputs_first, about = roles_of(shapes | {gate_up: (4, 512, 256)}, config)
    assert not outputs_first[gate_up].transposed
    assert not outputs_first[down].transposed
    assert about.assumptions == ()
    square = {gate_up: (4, 256, 256), down: (4, 256, 128)}
    assert roles_of(square, config)[0][gate_up].transposed is False  # decided by down: 256 outputs first
    _, about = roles_of({gate_up: (4, 256, 256)}, config)
    assert about.assumptions == (
        f"assumed: 3-D experts are stored [experts, inputs, outputs]: the shape of {gate_up} fits both",
    )


def test_an_unknown_family_goes_by_names_and_says_so(tmp_path: Path) -> None:
    shapes, config = shapes_of("qwen3_moe", tmp_path)
    known, _ = roles_of(shapes, config)
    placed, about = roles_of(shapes, config | {"model_type": "brandnew_moe"})
    assert placed == known
    assert (about.name, about.known) == ("brandnew_moe", False)
    assert about.assumptions[0] == (
        "model_type is 'brandnew_moe', not a family known here: roles were read from tensor names and shapes alone"
    )
    assert "assumed: model.layers.*.mlp.experts.*.gate_proj.weight is routed_experts, by its name" in about.assumptions


def test_unknown_names_are_other() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2}
    shapes = {
        "model.layers.0.mixer.in_proj.weight": (64, 32),
        "model.layers.1.mixer.in_proj.weight": (64, 32),
        "model.layers.0.mixer.A_log": (64,),
        "model.layers.0.mixer.table.weight": (64, 8),
        "model.layers.0.mixer.conv1d.weight": (64, 1, 4),
        "model.resampler.weight": (64, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (32,),
    }
    placed, about = roles_of(shapes, config)
    assert {p.role for p in placed.values()} == {"other"}
    assert [n for n, p in placed.items() if p.linear] == list(shapes)[:2]
    assert about.known
    assert about.assumptions[0] == (
        "assumed: model.layers.*.mixer.in_proj.weight (2 tensors, first [64, 32]) is a linear layer: "
        "2-D weight in a decoder layer; name not known, so role `other`"
    )
    assert len(about.assumptions) == len(shapes) - 1


@pytest.mark.parametrize(
    ("tail", "shape", "role", "part", "linear"),
    [
        ("attention.query_key_value.weight", (96, 32), "attention.qkv", None, True),
        ("attention.dense.weight", (32, 32), "attention.o", None, True),
        ("mlp.fc1.weight", (64, 32), "dense_mlp", "up", True),
        ("mlp.fc2.weight", (32, 64), "dense_mlp", "down", True),
        ("mlp.dense_h_to_4h.weight", (64, 32), "other", None, True),
        ("mlp.c_fc.weight", (32, 64), "other", None, True),  # GPT-2 stores it inputs first: never taken for an MLP
        ("feed_forward.experts.gate_up_proj", (4, 32, 128), "routed_experts", "gate_up", True),
        ("feed_forward.shared_expert.down_proj.weight", (32, 64), "shared_experts", "down", True),
        ("mlp.shared_mlp.gate_up_proj.weight", (128, 32), "shared_experts", "gate_up", True),
        ("mlp.experts.2.gate_up_proj.weight", (128, 32), "routed_experts", "gate_up", True),
        ("mlp.experts.gate_proj", (4, 64, 32), "routed_experts", "gate", True),
        ("mlp.experts.up_proj.weight", (4, 64, 32), "routed_experts", "up", True),
        ("mlp.experts.gate_up_proj", (128, 32), "routed_experts", "gate_up", False),  # not one matrix an expert
        ("mlp.gate.wg.weight", (4, 32), "router", None, False),
        ("mlp.moe_statics.e_score_correction_bias", (1, 4), "router_bias", None, False),
        ("self_attn.k_proj.k_scale", (1,), "attention.kv_scale", None, False),
        ("self_attn.v_scale", (), "attention.kv_scale", None, False),
        ("ln_1.weight", (32,), "norm", None, False),
        ("ln_1.bias", (32,), "norm", None, False),
    ],
)
def test_names_of_other_families(tail: str, shape: tuple[int, ...], role: str, part: str | None, linear: bool) -> None:
    name = "transformer.h.3." + tail
    placed, _ = roles_of({name: shape}, {"hidden_size": 32, "num_hidden_layers": 4})
    place = placed[name]
    assert (place.role, place.part, place.linear, place.layer) == (role, part, linear, 3)


def test_mtp_by_name_and_by_number() -> None:
    shapes = {
        "mtp.fc.weight": (64, 128),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.layers.0.self_attn.q_proj.weight": (64, 64),
        "mtp.layers.0.mlp.experts.3.down_proj.weight": (64, 32),
        "model.layers.1.self_attn.q_proj.weight": (64, 64),
        "model.layers.2.self_attn.q_proj.weight": (64, 64),
    }
    placed, about = roles_of(shapes, {"model_type": "qwen3", "num_hidden_layers": 2})
    assert [p.role for p in placed.values()] == [
        "mtp.other", "mtp.norm", "mtp.attention.q", "mtp.routed_experts", "attention.q", "mtp.attention.q",
    ]  # fmt: skip
    assert about.assumptions == ("assumed: layer 2 predicts further tokens (MTP), since config.json counts 2 layers",)
    _, about = roles_of(shapes, {"model_type": "qwen3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    assert about.assumptions == ()
    placed, about = roles_of(shapes, {"model_type": "qwen3"})
    assert placed["model.layers.2.self_attn.q_proj.weight"].role == "attention.q"
    assert "num_hidden_layers" in about.assumptions[0]


def test_a_tied_head_is_no_target(tmp_path: Path) -> None:
    shapes, config = shapes_of("llama", tmp_path)
    placed, _ = roles_of(shapes, config | {"tie_word_embeddings": True})
    assert placed["lm_head.weight"].role == "lm_head"
    assert not placed["lm_head.weight"].linear


@pytest.mark.parametrize(
    ("role", "pattern", "matches"),
    [
        ("attention.q", "attention", True),
        ("attention.q", "attention.q", True),
        ("attention.q_a", "attention.q", False),
        ("attention", "attention.q", False),
        ("mtp.routed_experts", "routed_experts", False),
        ("mtp.routed_experts", "mtp", True),
        ("mtp.attention.q", "mtp.attention", True),
        ("mtp.attention.q", "attention", False),
        ("router_bias", "router", False),
        ("norm", "*", True),
    ],
)
def test_matches_role(role: str, pattern: str, matches: bool) -> None:
    assert matches_role(role, pattern) is matches


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, (32, 8, False)),
        ({"num_attention_heads": 32}, (32, 32, False)),
        ({"text_config": {"num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512}}, (64, 64, True)),
        ({"num_attention_heads": "many", "num_key_value_heads": [8, 4]}, (0, 0, False)),
    ],
)
def test_tp_facts(config: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    facts = tp_facts(config)
    assert (facts.heads, facts.kv_heads, facts.mla) == expected


NAMES = st.lists(
    st.sampled_from(
        ["model", "layers", "mtp", "experts", "mlp", "gate", "0", "7", "9" * 5000, "#", "weight", "bias", ""]
    )
    | st.text(max_size=6),
    max_size=7,
).map(".".join)


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 64), max_size=4).map(tuple), max_size=6))
def test_any_name_and_shape_is_placed(shapes: dict[str, tuple[int, ...]]) -> None:
    placed, about = roles_of(shapes, {"num_hidden_layers": 1, "hidden_size": 64})
    assert list(placed) == list(shapes)
    assert not about.known
    assert not any(p.linear and len(shapes[n]) not in (2, 3) for n, p in placed.items())
