"""Roles of every tensor of every family, against tables written out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from families import FAMILIES, LINEAR, load_tensors, read_config
from quantkit.quantize.roles import Family, Placed, roles_of

# name inside the layer -> role, part, label of the fused set, split; `*` after a role: no linear layer
Table = dict[str, str]
NORMS = {"input_layernorm.weight": "norm* - - replicated", "post_attention_layernorm.weight": "norm* - - replicated"}
QKVO = {
    "self_attn.q_proj.weight": "attention.q - qkv column",
    "self_attn.k_proj.weight": "attention.k - qkv column",
    "self_attn.v_proj.weight": "attention.v - qkv column",
    "self_attn.o_proj.weight": "attention.o - - row",
}
QKV_BIAS = {f"self_attn.{n}_proj.bias": "bias* - - column" for n in "qkv"}
QK_NORM = {f"self_attn.{n}_norm.weight": "norm* - - replicated" for n in "qk"}
MLA = {
    "self_attn.q_a_proj.weight": "attention.q_a - qkv_a replicated",
    "self_attn.q_a_layernorm.weight": "norm* - - replicated",
    "self_attn.q_b_proj.weight": "attention.q_b - - column",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.kv_a - qkv_a replicated",
    "self_attn.kv_a_layernorm.weight": "norm* - - replicated",
    "self_attn.kv_b_proj.weight": "attention.kv_b - - column",
    "self_attn.o_proj.weight": "attention.o - - row",
}
INDEXER = {
    "self_attn.indexer.wq_b.weight": "indexer - - replicated",
    "self_attn.indexer.wk.weight": "indexer - - replicated",
    "self_attn.indexer.k_norm.weight": "norm* - - replicated",
    "self_attn.indexer.k_norm.bias": "norm* - - replicated",
    "self_attn.indexer.weights_proj.weight": "indexer* - - replicated",
}
ROUTER_BIAS = "router_bias* - - replicated"


def gated(prefix: str, role: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    rows = (f"{role} gate gate_up column", f"{role} up gate_up column", f"{role} down - row")
    return {f"{prefix}.{name}.weight": row for name, row in zip(names, rows, strict=True)}


def experts(prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    found: Table = {f"{prefix}.gate.weight": "router* - - replicated"}
    for expert in range(4):
        found |= gated(f"{prefix}.experts.{expert}", "routed_experts", names)
    return found


def mtp(block: Table, head: bool) -> Table:
    found = {name: "mtp." + row for name, row in block.items()} | {"eh_proj.weight": "mtp.other* - - replicated"}
    found |= {f"{n}.weight": "mtp.norm* - - replicated" for n in ("enorm", "hnorm", "shared_head.norm")}
    if head:
        found["embed_tokens.weight"] = "mtp.embedding* - - column"
        found["shared_head.head.weight"] = "mtp.lm_head - - column"
    return found


DENSE = gated("mlp", "dense_mlp")
SHARED = gated("mlp.shared_experts", "shared_experts")
GROUPED = experts("mlp") | {"mlp.gate.e_score_correction_bias": ROUTER_BIAS} | SHARED
MIXTRAL = experts("block_sparse_moe", ("w1", "w3", "w2"))
GLM4 = NORMS | QKVO | QKV_BIAS | QK_NORM
DSA = NORMS | MLA | INDEXER | GROUPED
PHI3 = {
    "self_attn.qkv_proj.weight": "attention.qkv - - column",
    "self_attn.o_proj.weight": "attention.o - - row",
    "mlp.gate_up_proj.weight": "dense_mlp gate_up - column",
    "mlp.down_proj.weight": "dense_mlp down - row",
}
GPT_OSS = {
    "self_attn.o_proj.bias": "bias* - - replicated",
    "self_attn.sinks": "attention.sinks* - - column",
    "mlp.router.weight": "router* - - replicated",
    "mlp.router.bias": ROUTER_BIAS,
    "mlp.experts.gate_up_proj": "routed_experts gate_up - column",
    "mlp.experts.gate_up_proj_bias": "bias* - - column",
    "mlp.experts.down_proj": "routed_experts down - row",
    "mlp.experts.down_proj_bias": "bias* - - replicated",
}
FEED_NORMS = {f"{n}_feedforward_layernorm.weight": "norm* - - replicated" for n in ("pre", "post")}
SHARED_GATE = {"mlp.shared_expert_gate.weight": "router* - - replicated"}

LAYERS: list[tuple[str, int, Table]] = [
    ("llama", 0, NORMS | QKVO | DENSE),
    ("llama_tied", 1, NORMS | QKVO | DENSE),
    ("mistral", 1, NORMS | QKVO | DENSE),
    ("qwen2", 1, NORMS | QKVO | QKV_BIAS | DENSE),
    ("qwen3", 1, NORMS | QKVO | QK_NORM | DENSE),
    ("gemma2", 1, NORMS | FEED_NORMS | QKVO | DENSE),
    ("phi3", 1, NORMS | PHI3),
    (
        "qwen2_moe",
        1,
        NORMS | QKVO | QKV_BIAS | experts("mlp") | gated("mlp.shared_expert", "shared_experts") | SHARED_GATE,
    ),
    ("qwen3_moe", 0, NORMS | QKVO | QK_NORM | DENSE),
    ("qwen3_moe", 1, NORMS | QKVO | QK_NORM | experts("mlp")),
    ("mixtral", 1, NORMS | QKVO | MIXTRAL),
    (
        "minimax_m2",
        1,
        NORMS | QKVO | QK_NORM | MIXTRAL | {"block_sparse_moe.e_score_correction_bias": ROUTER_BIAS},
    ),
    ("gpt_oss", 1, NORMS | QKVO | QKV_BIAS | GPT_OSS),
    ("deepseek_v3", 0, NORMS | MLA | DENSE),
    ("deepseek_v3", 1, NORMS | MLA | GROUPED),
    ("deepseek_v32", 1, DSA),
    ("deepseek_v32", 2, mtp(DSA, head=True)),
    ("glm4_moe", 1, GLM4 | GROUPED),
    ("glm4_moe", 2, mtp(GLM4 | GROUPED, head=True)),
    ("glm_moe_dsa", 0, NORMS | MLA | INDEXER | DENSE),
    ("glm_moe_dsa", 3, NORMS | MLA | GROUPED),  # shares the indexer of layer 2
    ("glm_moe_dsa", 4, mtp(DSA, head=False)),
    ("kimi", 1, NORMS | MLA | GROUPED),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]]:
    root = tmp_path_factory.mktemp("families")
    found = {}
    for family, build in FAMILIES.items():
        folder = build(root / family)
        found[family] = ({n: tuple(t.shape) for n, t in load_tensors(folder).items()}, read_config(folder))
    return found


def row_of(name: str, place: Placed) -> str:
    fused = place.fused.rpartition(".")[2] if place.fused else "-"
    if place.fused:  # the set is named after the module that holds its members
        assert name.startswith(place.fused.rpartition(".")[0] + ".")
    return f"{place.role}{'' if place.linear else '*'} {place.part or '-'} {fused} {place.split}"


@pytest.mark.parametrize(("family", "layer", "expected"), LAYERS)
def test_a_layer_reads_as_written_by_hand(built: Any, family: str, layer: int, expected: Table) -> None:
    placed, _ = roles_of(*built[family])
    prefix = f"{'language_model.' if family == 'kimi' else ''}model.layers.{layer}."
    inside = {n.removeprefix(prefix): (n, p) for n, p in placed.items() if n.startswith(prefix)}
    assert {tail: row_of(n, p) for tail, (n, p) in inside.items()} == expected
    assert {p.layer for _, p in inside.values()} == {layer}
    for tail, (_, place) in inside.items():
        number = re.search(r"experts\.(\d+)\.", tail)
        assert place.expert == (int(number[1]) if number else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_known_family_is_placed(built: Any, family: str) -> None:
    shapes, config = built[family]
    placed, about = roles_of(shapes, config)
    assert list(placed) == list(shapes)
    assert about == Family(config["model_type"], True, ())
    assert [n for n, p in placed.items() if p.role.endswith("other") and not n.endswith(".eh_proj.weight")] == []
    linear = {
        n for n, p in placed.items() if p.linear and p.role.rpartition(".")[2] not in ("lm_head", "vision", "projector")
    }
    stacked = {n for n in shapes if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert linear == {n for n in shapes if LINEAR.fullmatch(n)} | stacked


def test_outside_the_layers(built: Any) -> None:
    placed, _ = roles_of(*built["llama"])
    outside = {n: row_of(n, p) for n, p in placed.items() if p.layer is None}
    assert outside == {
        "model.embed_tokens.weight": "embedding* - - column",
        "model.norm.weight": "norm* - - replicated",
        "lm_head.weight": "lm_head - - column",
    }
    kimi, _ = roles_of(*built["kimi"])
    outside = {n: row_of(n, p) for n, p in kimi.items() if p.layer is None and not n.endswith(".bias")}
    block = "vision_tower.encoder.blocks.0."
    assert outside == {
        "language_model.model.embed_tokens.weight": "embedding* - - column",
        "language_model.model.norm.weight": "norm* - - replicated",
        "language_model.lm_head.weight": "lm_head - - column",
        "vision_tower.patch_embed.proj.weight": "vision* - - replicated",  # a convolution
        "vision_tower.patch_embed.pos_emb.weight": "vision* - - replicated",
        **{f"{block}{n}.weight": "vision - - replicated" for n in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")},
        **{f"{block}{n}.weight": "vision* - - replicated" for n in ("norm0", "norm1")},
        "vision_tower.encoder.final_layernorm.weight": "vision* - - replicated",
        "mm_projector.pre_norm.weight": "projector* - - replicated",
        **{f"mm_projector.proj.{n}.weight": "projector - - replicated" for n in (0, 2)},
    }
    assert not any(p.linear for n, p in kimi.items() if n.endswith(".bias"))


def test_fused_sets_join_exactly_the_siblings(built: Any) -> None:
    placed, _ = roles_of(*built["qwen3_moe"])
    sets: dict[str, set[str]] = {}
    for name, place in placed.items():
        if place.fused:
            sets.setdefault(place.fused, set()).add(name)
    expert = "model.layers.1.mlp.experts.3."
    assert sets[expert + "gate_up"] == {expert + "gate_proj.weight", expert + "up_proj.weight"}
    assert sets["model.layers.0.self_attn.qkv"] == {f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"}
    assert len(sets) == 2 + 1 + 4  # attention of two layers, a dense MLP, four experts
    # DeepSeek-V2-Lite has q_proj beside kv_a and no k_proj or v_proj: nothing to join
    lone, _ = roles_of({"model.layers.0.self_attn.q_proj.weight": (64, 64)}, {"model_type": "deepseek_v3"})
    assert lone["model.layers.0.self_attn.q_proj.weight"].fused is None
