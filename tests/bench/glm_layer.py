"""The checkpoint that the streaming benchmark reads: the routed experts of a GLM-like layer, in BF16 and in FP8 blocks.

54 experts of gate, up [2048, 6144] and down [6144, 2048] are 4.08 GB of BF16 (2.04 GB of FP8), in 4 shards with an
index and a config.json. Weights are Gaussian: a search has the work it has on a real model. quantkit is not used here.

O outputs, I inputs, R and C rows and columns of 128 x 128 blocks
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

HIDDEN, INNER, LAYER, SHARDS = 6144, 2048, 3, 4
BYTES_PER_EXPERT = 3 * HIDDEN * INNER * 2
BLOCK, E4M3_MAX = 128, 448.0
DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32"}

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": HIDDEN,
    "intermediate_size": 12288,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYER + 1,
    "first_k_dense_replace": LAYER,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 0,
    "vocab_size": 154880,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def experts_for(gigabytes: float) -> int:
    """How many experts make about that much BF16; at least one per shard (4 GB: 54, which is 4.08 GB)."""
    return max(SHARDS, round(54 * gigabytes / 4))


def make(folder: Path, experts: int, *, fp8: bool, inner: int = INNER, hidden: int = HIDDEN) -> int:
    """Write the checkpoint unless it is there, and return the bytes of its tensors."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = CONFIG | {"n_routed_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}
        if fp8:
            config["quantization_config"] = FP8_CONFIG
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        weight_map: dict[str, str] = {}
        total = 0
        for shard, of_shard in enumerate(np.array_split(np.arange(experts), SHARDS)):
            name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
            header = _header([int(e) for e in of_shard], fp8, inner, hidden)
            weight_map |= dict.fromkeys(header, name)
            total += sum(end - start for start, end in (entry["data_offsets"] for entry in header.values()))
            _write(folder / name, header, (a for e in of_shard for a in _expert(int(e), fp8, inner, hidden)))
        # last, so that a folder with an index is a complete one
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def _shapes(inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _header(experts: list[int], fp8: bool, inner: int, hidden: int) -> dict[str, dict]:
    entries: dict[str, dict] = {}
    at = 0
    for expert in experts:
        for projection, shape in _shapes(inner, hidden).items():
            weight = f"model.layers.{LAYER}.mlp.experts.{expert}.{projection}.weight"
            blocks = tuple(-(-n // BLOCK) for n in shape)
            parts = [(weight, "F8_E4M3", shape, 1), (weight + "_scale_inv", "F32", blocks, 4)]
            for name, dtype, dims, size in parts if fp8 else [(weight, "BF16", shape, 2)]:
                end = at + dims[0] * dims[1] * size
                entries[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, end]}
                at = end
    return entries


def _expert(expert: int, fp8: bool, inner: int, hidden: int) -> Iterator[NDArray]:
    """The arrays of one expert in the order of the header; each expert has a seed of its own."""
    rng = np.random.default_rng([LAYER, expert])
    for shape in _shapes(inner, hidden).values():
        w_OI = (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        if fp8:
            yield from _fp8_blocks(w_OI.astype(np.float32))
        else:
            yield w_OI


def _fp8_blocks(w_OI: NDArray) -> tuple[NDArray, NDArray]:
    """E4M3 codes and the float32 scale of each 128 x 128 block (sizes here are multiples of 128)."""
    outputs, inputs = w_OI.shape
    w_RoCi = w_OI.reshape(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scale_RC = np.abs(w_RoCi).max(axis=(1, 3)) / np.float32(E4M3_MAX)
    codes = (w_RoCi / scale_RC[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(outputs, inputs), scale_RC


def _write(file: Path, header: dict[str, dict], arrays: Iterator[NDArray]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for (name, entry), array in zip(header.items(), arrays, strict=True):
            if list(array.shape) != entry["shape"] or DTYPES[array.dtype.name] != entry["dtype"]:
                raise AssertionError(f"{name}: the header says {entry}, the array is {array.dtype} {array.shape}")
            f.write(array.view(np.uint8).data)
