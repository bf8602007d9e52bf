"""The loader check finds damage: each of these checkpoints is wrong in one way, which vLLM by itself loads, at most with a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from integration.checkpoints import quantise, write_twin
from integration.engine import Engine
from integration.schemes import options
from oracle.dequantize import read
from safetensors.torch import save_file

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.0."
LAYER = "model.layers.1.self_attn."


def drop_half_of_a_fused_layer(tensors: Tensors) -> None:
    del tensors[f"{LAYER}k_proj.weight_packed"]


def swap_gate_and_up(tensors: Tensors) -> None:
    for part in ("weight_packed", "weight_scale"):
        gate, up = f"{EXPERT}gate_proj.{part}", f"{EXPERT}up_proj.{part}"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def store_the_scale_of_another(tensors: Tensors) -> None:
    tensors[f"{LAYER}q_proj.weight_scale"] = tensors[f"{LAYER}q_proj.weight_scale"].roll(1, 0)


def invert_a_global(tensors: Tensors) -> None:
    name = f"{LAYER}o_proj.weight_global_scale"
    tensors[name] = 1 / tensors[name]


def disagree_on_a_global(tensors: Tensors) -> None:
    tensors[f"{LAYER}v_proj.weight_global_scale"] *= 2


@pytest.mark.parametrize(
    ("name", "damage", "noticed"),
    [
        ("int4", drop_half_of_a_fused_layer, "half_filled"),
        ("int4", swap_gate_and_up, "differ"),
        ("int4", store_the_scale_of_another, "differ"),
        ("nvfp4", invert_a_global, "differ"),
        ("nvfp4", disagree_on_a_global, "error"),
    ],
)
def test_damage(
    name: str, damage: Callable[[Tensors], None], noticed: str, source: Callable[[str], Path], room: Path, vllm: Engine
) -> None:
    plain = source("qwen3_moe")
    written = quantise(plain, room / "out", *options(room, "qwen3_moe", name))
    twin = write_twin(plain, written, room / "twin")
    tensors = read(written)
    damage(tensors)
    rewrite(written, tensors)

    result = vllm.run(task="load", folder=written, twin=twin)

    if noticed == "error":
        assert "do not share their scale" in result["error"]
    else:
        names = [entry if isinstance(entry, str) else entry[0] for entry in result[noticed]]
        assert any(n.startswith("model.layers.1.") and "attn.attn." not in n for n in names), result


def test_ignore_list(source: Callable[[str], Path], room: Path, vllm: Engine) -> None:
    """A kept layer that the ignore list does not name: vLLM builds it quantised and fills only a part of it."""
    plain = source("qwen3_moe")
    written = quantise(plain, room / "out", *options(room, "qwen3_moe", "fp8"))
    config = json.loads((written / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    tensors = read(written)
    name = f"{LAYER}o_proj."
    tensors[f"{name}weight"] = tensors[f"{name}weight"].bfloat16()
    del tensors[f"{name}weight_scale_inv"]
    assert not any(module == name.rstrip(".") for module in kept)
    rewrite(written, tensors)

    result = vllm.run(task="load", folder=written, twin=plain)

    assert f"{name}weight_scale_inv" in [n for n, *_ in result["half_filled"]]


def rewrite(folder: Path, tensors: Tensors) -> None:
    """Replace the shards of a checkpoint by one."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
