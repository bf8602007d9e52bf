"""Tables of tensor names: what a weight is called in the published checkpoints of each model family.

Data only; `roles.py` reads it. Names repeat between families (DeepSeek, Kimi and GLM share theirs), so one table of
patterns serves all: a family is known when its `model_type` was checked against these rows, tensor by tensor. Paths are
regular expressions matched in full against the module path with every number replaced by `#`: inside a decoder layer
without its `...layers.#.` prefix, elsewhere without the leading `model.` or `language_model.`. First match wins.
"""

from __future__ import annotations

from typing import NamedTuple

COLUMN, ROW, REPLICATED = "column", "row", "replicated"

# config.json `model_type` (of the model or of its language model) whose published tensors were checked against the rows
KNOWN = frozenset({
    "llama", "mistral", "mixtral",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25",
    "glm4_moe", "glm_moe_dsa",
    "gpt_oss", "minimax_m2",
    "gemma", "gemma2", "gemma3_text", "phi3",
})  # fmt: skip

# families whose unquantised 3-D experts are stored [experts, inputs, outputs]; used only where the shape cannot tell
TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "llama4", "llama4_text"})


class Row(NamedTuple):
    """One pattern. `fused` labels the set an engine joins this weight with (members share a parent module).

    `linear` False on a matrix means that no engine builds the layer from quantised weights (routers, the indexer's
    `weights_proj`, the MTP layer's `eh_proj`), or that it is no linear layer (embeddings).
    """

    path: str
    role: str
    part: str | None = None
    fused: str | None = None
    split: str = REPLICATED
    linear: bool = True


_ATTN = r"(?:self_attn|self_attention|attention|attn)\."
_MLP = r"(?:mlp|feed_forward|block_sparse_moe|moe|ffn)\."
_SHARED = _MLP + r"(?:shared_experts?|shared_mlp)\."


def _mlp(prefix: str, role: str) -> tuple[Row, ...]:
    """The three (or two) matrices of a gated MLP below `prefix`, under the names in use."""
    return (
        Row(prefix + r"(?:gate_proj|w1)", role, "gate", "gate_up", COLUMN),
        Row(prefix + r"(?:up_proj|w3|fc1)", role, "up", "gate_up", COLUMN),
        Row(prefix + r"(?:down_proj|w2|fc2)", role, "down", None, ROW),
        Row(prefix + r"gate_up_proj", role, "gate_up", None, COLUMN),
    )


NORM = Row(r"(?:.*[._])?(?:[a-z]*norm|ln)(?:_\w+|\d+)?", "norm", linear=False)

IN_LAYER: tuple[Row, ...] = (
    # an expert or a shared expert before the dense MLP: the prefixes nest
    *_mlp(_MLP + r"experts\.#\.", "routed_experts"),
    *_mlp(_MLP + r"experts\.", "routed_experts"),  # all experts of a layer in one 3-D tensor
    Row(_MLP + r"shared_expert_gate", "router", linear=False),
    *_mlp(_SHARED, "shared_experts"),
    Row(_MLP + r"(?:gate|router)(?:\.wg)?", "router", linear=False),
    Row(
        _MLP + r"(?:gate\.|router\.|moe_statics\.)?(?:e_score_correction_bias|expert_bias)", "router_bias", linear=False
    ),
    *_mlp(_MLP, "dense_mlp"),
    # attention: multi-head, grouped, and DeepSeek's latent form
    Row(_ATTN + r"q_proj", "attention.q", None, "qkv", COLUMN),
    Row(_ATTN + r"k_proj", "attention.k", None, "qkv", COLUMN),
    Row(_ATTN + r"v_proj", "attention.v", None, "qkv", COLUMN),
    Row(_ATTN + r"(?:o_proj|out_proj|dense)", "attention.o", None, None, ROW),
    Row(_ATTN + r"(?:qkv_proj|qkv|query_key_value|W_pack|Wqkv)", "attention.qkv", None, None, COLUMN),
    Row(_ATTN + r"q_a_proj", "attention.q_a", None, "qkv_a"),
    Row(_ATTN + r"kv_a_proj_with_mqa", "attention.kv_a", None, "qkv_a"),
    Row(_ATTN + r"q_b_proj", "attention.q_b", None, None, COLUMN),
    Row(_ATTN + r"kv_b_proj", "attention.kv_b", None, None, COLUMN),
    Row(_ATTN + r"sinks", "attention.sinks", None, None, COLUMN, linear=False),
    Row(_ATTN + r"(?:[kv]_proj\.|attn\.)?[kv]_scale", "attention.kv_scale", linear=False),
    # DeepSeek sparse attention
    Row(_ATTN + r"indexer\.(?:wq_b|wk)", "indexer"),
    Row(_ATTN + r"indexer\.weights_proj", "indexer", linear=False),
    NORM,
    # pieces that only a multi-token-prediction layer has
    Row(r"eh_proj", "other", linear=False),
    Row(r"shared_head\.head", "lm_head", None, None, COLUMN),
    Row(r"embed_tokens", "embedding", None, None, COLUMN, linear=False),
)

OUTSIDE: tuple[Row, ...] = (
    Row(r"embed_tokens|word_embeddings|tok_embeddings|embed_in|wte", "embedding", None, None, COLUMN, linear=False),
    Row(r"lm_head|embed_out", "lm_head", None, None, COLUMN),
    NORM,
)

# a component anywhere in the path says that a tensor is not the language model's; a projector may sit inside the tower
PROJECTOR = r"(?:.*\.)?(?:mm_projector|multi_modal_projector|projector|aligner|(?:visual|vision_\w+)\.merger)(?:\..*)?"
VISION = r"(?:.*\.)?(?:vision_tower|vision_model|vision_encoder|visual|vit|image_encoder)(?:\..*)?"
MTP = r"(?:.*\.)?mtp(?:_\w+)?(?:\..*)?"
