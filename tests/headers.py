"""Checkpoints with true names, shapes, dtypes and file sizes but no weights: safetensors headers over sparse files.

One generator, `tensors`, lists the DeepSeek-V3 line of models (DeepSeek-V3 and V3.2, Kimi-K2 and K2.6, GLM-5.2) at
full size or as a miniature that keeps what is awkward in them: a `kv_a` projection with a partial last 128x128 block, a
float32 router bias, a LayerNorm with a bias, layers without an indexer of their own, an MTP layer numbered
`num_hidden_layers`, and an ignore list that names a tensor which does not exist. A 755 GB model takes 15 MB of disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

Store = Literal["bf16", "fp8_block128", "int4g32"]
Tensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape
BYTES = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F8_E4M3": 1}

_KIMI_IGNORE = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
_KIMI_IGNORE += ["re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"]


@dataclass(frozen=True)
class Model:
    """Dimensions as config.json has them. `indexer`: heads and head size; `freq`: every how many layers own one."""

    name: str
    model_type: str
    hidden: int
    layers: int
    mtp: int
    first_dense: int
    dense_inter: int
    experts: int
    moe_inter: int
    heads: int
    q_lora: int
    kv_lora: int
    rope: int
    nope: int
    v: int
    vocab: int
    indexer: tuple[int, int] | None = None
    freq: int = 1
    offset: int = 0
    mtp_head: bool = False  # the MTP layer carries its own embedding and head
    prefix: str = ""
    top_k: int = 8

    def owns_indexer(self, layer: int) -> bool:
        if self.indexer is None:
            return False
        return layer >= self.layers or max(layer - self.offset + 1, 0) % self.freq == 0

    def without_mtp(self) -> Model:
        return replace(self, mtp=0)


_V3 = Model(
    "DSV3", "deepseek_v3", 7168, 61, 1, 3, 18432, 256, 2048, 128, 1536, 512, 64, 128, 128, 129280, mtp_head=True
)  # fmt: skip
_K2 = replace(
    _V3, name="KIMI-K2", model_type="kimi_k2", mtp=0, first_dense=1, experts=384, heads=64, vocab=163840, mtp_head=False
)
GIANTS = {
    "GLM-5.2": Model(
        "GLM-5.2", "glm_moe_dsa", 6144, 78, 1, 3, 12288, 256, 2048, 64, 2048, 512, 64, 192, 256, 154880,
        indexer=(32, 128), freq=4, offset=3,
    ),
    "DSV3": _V3,
    "DSV3.2": replace(_V3, name="DSV3.2", model_type="deepseek_v32", indexer=(64, 128)),
    "KIMI-K2": _K2,
    "KIMI-K2.6-text": replace(_K2, name="KIMI-K2.6-text", model_type="kimi_k25", prefix="language_model."),
}  # fmt: skip


def miniature(name: str) -> Model:
    """The same family with small dimensions: 8 layers, 6 experts, kv_a of 192 rows (one block and a half)."""
    return replace(
        GIANTS[name], hidden=256, layers=8, dense_inter=384, experts=6, moe_inter=128, heads=4, q_lora=128, kv_lora=128,
        rope=64, nope=64, v=64, vocab=512, indexer=GIANTS[name].indexer and (4, 128), top_k=2,
    )  # fmt: skip


def tensors(model: Model, store: Store) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint, in the order of the layers."""
    root = model.prefix + "model."
    yield root + "embed_tokens.weight", "BF16", (model.vocab, model.hidden)
    for layer in range(model.layers + model.mtp):
        yield from _layer(model, store, layer, f"{root}layers.{layer}.")
    yield root + "norm.weight", "BF16", (model.hidden,)
    yield model.prefix + "lm_head.weight", "BF16", (model.vocab, model.hidden)


def _linear(name: str, rows: int, cols: int, store: str) -> Iterator[Tensor]:
    if store == "int4g32":
        yield name + "_packed", "I32", (rows, cols // 8)
        yield name + "_scale", "BF16", (rows, cols // 32)
        yield name + "_shape", "I32", (2,)
        return
    yield name, "BF16" if store == "bf16" else "F8_E4M3", (rows, cols)
    if store == "fp8_block128":
        yield name + "_scale_inv", "F32", (math.ceil(rows / 128), math.ceil(cols / 128))


def _layer(m: Model, store: Store, layer: int, p: str) -> Iterator[Tensor]:
    rest = "bf16" if store == "int4g32" else store  # Kimi quantises the routed experts only
    yield p + "input_layernorm.weight", "BF16", (m.hidden,)
    yield p + "post_attention_layernorm.weight", "BF16", (m.hidden,)
    a = p + "self_attn."
    yield from _linear(a + "q_a_proj.weight", m.q_lora, m.hidden, rest)
    yield a + "q_a_layernorm.weight", "BF16", (m.q_lora,)
    yield from _linear(a + "q_b_proj.weight", m.heads * (m.nope + m.rope), m.q_lora, rest)
    yield from _linear(a + "kv_a_proj_with_mqa.weight", m.kv_lora + m.rope, m.hidden, rest)
    yield a + "kv_a_layernorm.weight", "BF16", (m.kv_lora,)
    yield from _linear(a + "kv_b_proj.weight", m.heads * (m.nope + m.v), m.kv_lora, rest)
    yield from _linear(a + "o_proj.weight", m.hidden, m.heads * m.v, rest)
    if m.indexer and m.owns_indexer(layer):
        heads, dim = m.indexer
        yield from _linear(a + "indexer.wq_b.weight", heads * dim, m.q_lora, rest)
        yield from _linear(a + "indexer.wk.weight", dim, m.hidden, rest)
        yield a + "indexer.k_norm.weight", "BF16", (dim,)
        yield a + "indexer.k_norm.bias", "BF16", (dim,)
        yield a + "indexer.weights_proj.weight", "BF16", (heads, m.hidden)
    if layer < m.first_dense:
        yield from _mlp(p + "mlp.", m.dense_inter, m.hidden, rest)
    else:
        yield p + "mlp.gate.weight", "BF16", (m.experts, m.hidden)
        yield p + "mlp.gate.e_score_correction_bias", "F32", (m.experts,)
        for expert in range(m.experts):
            yield from _mlp(f"{p}mlp.experts.{expert}.", m.moe_inter, m.hidden, store)
        yield from _mlp(p + "mlp.shared_experts.", m.moe_inter, m.hidden, rest)
    if layer >= m.layers:
        yield p + "eh_proj.weight", "BF16", (m.hidden, 2 * m.hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{p}{norm}.weight", "BF16", (m.hidden,)
        if m.mtp_head:
            yield p + "embed_tokens.weight", "BF16", (m.vocab, m.hidden)
            yield p + "shared_head.head.weight", "BF16", (m.vocab, m.hidden)


def _mlp(p: str, inter: int, hidden: int, store: str) -> Iterator[Tensor]:
    yield from _linear(p + "gate_proj.weight", inter, hidden, store)
    yield from _linear(p + "up_proj.weight", inter, hidden, store)
    yield from _linear(p + "down_proj.weight", hidden, inter, store)


def nbytes(tensor: Tensor) -> int:
    """Payload bytes of one tensor."""
    return BYTES[tensor[1]] * math.prod(tensor[2])


def config(model: Model, store: Store) -> dict[str, Any]:
    """config.json as published: Kimi-K2.6 nests the language model and its quantisation under `text_config`."""
    m = model
    text: dict[str, Any] = {
        "model_type": "kimi_k2" if m.prefix else m.model_type,
        "hidden_size": m.hidden,
        "num_hidden_layers": m.layers,
        "num_nextn_predict_layers": m.mtp,
        "first_k_dense_replace": m.first_dense,
        "intermediate_size": m.dense_inter,
        "moe_intermediate_size": m.moe_inter,
        "n_routed_experts": m.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": m.top_k,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.heads,
        "q_lora_rank": m.q_lora,
        "kv_lora_rank": m.kv_lora,
        "qk_rope_head_dim": m.rope,
        "qk_nope_head_dim": m.nope,
        "v_head_dim": m.v,
        "vocab_size": m.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if m.indexer:
        text |= {"index_n_heads": m.indexer[0], "index_head_dim": m.indexer[1], "index_topk": 2048}
        text |= {"index_topk_freq": m.freq, "index_skip_topk_offset": m.offset} if m.freq > 1 else {}
    if store == "fp8_block128":
        text["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": _not_converted(m),
        }
    if store == "int4g32":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        weights |= {"dynamic": False, "actorder": None}
        text["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": _KIMI_IGNORE,
            "kv_cache_scheme": None,
        }
    return {"model_type": m.model_type, "text_config": text} if m.prefix else text


def _not_converted(m: Model) -> list[str]:
    """The explicit list of GLM: it says `indexers_proj`, where the tensor is called `indexer.weights_proj`."""
    names = ["lm_head", "model.embed_tokens", "model.norm"]
    for layer in range(m.layers + m.mtp):
        p = f"model.layers.{layer}."
        names += [p + "input_layernorm", p + "post_attention_layernorm"]
        names += [p + "self_attn.q_a_layernorm", p + "self_attn.kv_a_layernorm", p + "self_attn.indexers_proj"]
        names += [] if layer < m.first_dense else [p + "mlp.gate", p + "mlp.gate.e_score_correction_bias"]
        names += [p + n for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")] if layer >= m.layers else []
    return names


def write(folder: Path, model: Model, store: Store, shard_bytes: int = 5 << 30, seed: int | None = None) -> Path:
    """Write the checkpoint; with a `seed` the files hold random but valid values, else zeros that take no disk."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors(model, store):
        size = nbytes(tensor)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    weight_map: dict[str, str] = {}
    rng = None if seed is None else np.random.default_rng(seed)
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((name for name, _, _ in shard), file)
        _write_shard(folder / file, sorted(shard, key=lambda t: (-BYTES[t[1]], t[0])), rng)
    total = sum(nbytes(t) for shard in shards for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(model, store), indent=1))
    return folder


def _write_shard(path: Path, shard: list[Tensor], rng: np.random.Generator | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        name, dtype, shape = tensor
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes(tensor)]}
        at += nbytes(tensor)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if rng is not None:
            file.writelines(_values(t, shard, rng) for t in shard)
        file.truncate(8 + len(raw) + at)


def _values(tensor: Tensor, shard: list[Tensor], rng: np.random.Generator) -> bytes:
    """Random contents that decode to weights of ordinary size: no NaN codes, positive scales, true shapes."""
    name, dtype, shape = tensor
    if name.endswith("_shape"):
        packed = next(s for n, _, s in shard if n == name.removesuffix("_shape") + "_packed")
        return np.array([packed[0], packed[1] * 8], np.int32).tobytes()
    if dtype == "F8_E4M3":
        magnitude = rng.integers(0, 0x7F, shape, np.uint8)  # 0x7f would be NaN
        return (magnitude | rng.integers(0, 2, shape, np.uint8) << np.uint8(7)).tobytes()
    if dtype == "I32":
        return rng.integers(-(2**31), 2**31, shape, np.int32).tobytes()
    values = rng.standard_normal(shape, np.float32) * 0.02
    if "scale" in name:
        values = np.abs(values) * 0.01 + 1e-4
    return values.tobytes() if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
