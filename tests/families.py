"""Tiny checkpoints of every supported model family, with random weights, under the names of the published ones.

transformers builds and saves the language model (it writes experts one by one, as publishers do); what it drops or does
not know is added by hand: MTP layers, a float32 router bias, the config keys that engines need, Kimi's wrapping in
`language_model.` with a vision tower. Every build takes well under a second and a few megabytes at most; the seed is
fixed. Sizes are multiples of 128 where a block or a tensor-parallel cut needs them, and no matrix of an MLP is square,
so that a transposed weight is noticed (but gpt-oss's down projection is, as in the real one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_TOP2: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
_GROUPS: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MLA: dict[str, Any] = {
    **_MOE,
    **_GROUPS,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,  # with the rotary part kv_a has 192 rows: one 128x128 block and a half
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
}
_DSA: dict[str, Any] = {**_MLA, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 16}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"rope_theta": 150000.0, "original_max_position_embeddings": 8}
# config keys of the published files that transformers 5 does not write, though engines read them
_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def tiny(folder: Path, model_type: str, *, shards: int = 1, seed: int = 0, **settings: Any) -> Path:
    """A random model of one `model_type` in `folder`; `settings` override the tiny dimensions."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import: not needed by every test file

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_BASE, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1 or tensor.std() == 0:  # norms and biases start as constants
                tensor.copy_(tensor.mean() + 0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    tensors = load_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.1 * torch.randn(tensor.shape)  # published in float32, trained away from zero
    save_tensors(folder, tensors, shards)
    return folder


def load_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def save_tensors(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """Write `tensors` as one file, or as several with an index, in place of what `folder` holds."""
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    step = -(-len(names) // shards)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i * step : (i + 1) * step]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Replace config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _routed(folder: Path, model_type: str, mtp_head: bool | None = None, **settings: Any) -> Path:
    """A DeepSeek-like model with the config keys transformers drops; `mtp_head` None: no MTP layer."""
    tiny(folder, model_type, **{"shards": 2, **settings})
    extra = dict(_ROUTING) | {k: v for k, v in settings.items() if k.startswith("index_")}
    write_config(folder, read_config(folder) | extra | {"num_nextn_predict_layers": 0})
    if mtp_head is not None:
        _add_mtp_layer(folder, mtp_head)
    return folder


def _add_mtp_layer(folder: Path, with_head: bool) -> None:
    """Add the multi-token-prediction layer, numbered `num_hidden_layers`: a full decoder block and its own pieces."""
    config, tensors = read_config(folder), load_tensors(folder)
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    root = f"model.layers.{count}."
    block = f"model.layers.{config['first_k_dense_replace']}."
    like = {root + n.removeprefix(block): t for n, t in tensors.items() if n.startswith(block)}
    shapes = {"eh_proj.weight": (hidden, 2 * hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
    shapes["shared_head.norm.weight"] = (hidden,)
    if with_head:
        shapes["embed_tokens.weight"] = shapes["shared_head.head.weight"] = (config["vocab_size"], hidden)
    like |= {root + n: torch.empty(shape, dtype=torch.bfloat16) for n, shape in shapes.items()}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in like.items():
        values = 0.02 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = (values + (1 if tensor.ndim == 1 and tensor.dtype != torch.float32 else 0)).to(tensor.dtype)
    save_tensors(folder, tensors, 2)
    write_config(folder, config | {"num_nextn_predict_layers": 1})


def deepseek_with_mtp(folder: Path) -> Path:
    """DeepSeek-V3 with its MTP layer, which has copies of embedding and head."""
    return _routed(folder, "deepseek_v3", mtp_head=True, **_MLA)


def kimi(folder: Path) -> Path:
    """Kimi-K2.5/K2.6: DeepSeek-V3 under `language_model.`, a vision tower, a projector, a nested config."""
    _routed(folder, "deepseek_v3", **_MLA)
    tensors = {"language_model." + n: t for n, t in load_tensors(folder).items()}
    width, generator = 64, torch.Generator().manual_seed(2)
    block = "vision_tower.encoder.blocks.0."
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, 3, 14, 14),
        block + "wqkv": (3 * width, width),
        block + "wo": (width, width),
        block + "mlp.fc0": (2 * width, width),
        block + "mlp.fc1": (width, 2 * width),
        block + "norm0": (width,),
        block + "norm1": (width,),
        "vision_tower.encoder.final_layernorm": (width,),
        "mm_projector.pre_norm": (width,),
        "mm_projector.proj.0": (4 * width, 4 * width),
        "mm_projector.proj.2": (256, 4 * width),
    }
    for name, shape in shapes.items():
        tensors[name + ".weight"] = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        tensors[name + ".bias"] = (0.02 * torch.randn(shape[0], generator=generator)).bfloat16()
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(8, 8, width, generator=generator).bfloat16()
    save_tensors(folder, tensors, 2)
    text = read_config(folder) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16"}
    write_config(folder, outer | {"tie_word_embeddings": False, "text_config": text, "vision_config": {}})
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": partial(tiny, model_type="llama"),
    "llama_tied": partial(tiny, model_type="llama", tie_word_embeddings=True),
    "mistral": partial(tiny, model_type="mistral"),
    "qwen2": partial(tiny, model_type="qwen2"),
    "qwen3": partial(tiny, model_type="qwen3"),
    "gemma2": partial(tiny, model_type="gemma2", tie_word_embeddings=True),
    "phi3": partial(tiny, model_type="phi3"),
    "qwen2_moe": partial(
        tiny, model_type="qwen2_moe", shards=2, num_experts=4, shared_expert_intermediate_size=128, **_MOE
    ),
    "qwen3_moe": partial(tiny, model_type="qwen3_moe", shards=2, num_experts=4, mlp_only_layers=[0], **_MOE),
    "mixtral": partial(tiny, model_type="mixtral", shards=2, intermediate_size=128, **_TOP2),
    "minimax_m2": partial(tiny, model_type="minimax_m2", shards=2, intermediate_size=128, **_TOP2),
    "gpt_oss": partial(
        tiny, model_type="gpt_oss", intermediate_size=256, sliding_window=32, rope_parameters=_YARN, **_TOP2
    ),
    "deepseek_v3": partial(_routed, model_type="deepseek_v3", **_MLA),
    "deepseek_v32": partial(_routed, model_type="deepseek_v32", mtp_head=True, **_DSA),
    "glm4_moe": partial(
        _routed, model_type="glm4_moe", mtp_head=True, use_qk_norm=True, attention_bias=True, first_k_dense_replace=1,
        **_MOE, **_GROUPS,
    ),
    "glm_moe_dsa": partial(
        _routed, model_type="glm_moe_dsa", mtp_head=False, num_hidden_layers=4, index_topk_freq=4,
        index_skip_topk_offset=3, **_DSA,
    ),
    "kimi": kimi,
}  # fmt: skip

# weights of linear layers that publishers quantise, by name; written here again so that tests share nothing with roles
LINEAR = re.compile(
    r"(?:language_model\.)?model\.layers\.\d+\..*(?:[qkvo]_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj"
    r"|gate_proj|up_proj|down_proj|gate_up_proj|\.w[123]|indexer\.wq_b|indexer\.wk)\.weight"
)
EXPERTS = re.compile(r".*\.experts\.\d+\..*\.weight")
