"""The twin of vLLM against vLLM: what the real loader does with sound and broken checkpoints is what the twin says.

    refused         the loader raises
    silently wrong  it loads, and a parameter is filled in part or twice, a tensor is not used, or a weight differs from the
                    dequantised twin of the sound checkpoint
    ok, slow        it loads, and all of that is as it should be

What the stand-ins for missing kernels do, and what only a run shows (a cache at scale 1.0), is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from integration.checkpoints import quantise, write_twin
from integration.engine import Engine
from integration.schemes import every, named, options
from oracle.dequantize import read
from quantised import as_gptq
from quantkit.quantize.engines import examine_folder
from safetensors.torch import save_file

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]
Damage = Callable[[dict[str, Any], Tensors], object]  # quantization_config, tensors
LAYER, ATTN = "model.layers.1.", "model.layers.1.self_attn."
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# What vLLM makes room for and these checkpoints have nothing for, or has one of where they have several.
NOISE = re.compile(r"attn\.([qkv]|prob)_(scale|zero_point)$|\.(w13_|w2_)?(input_(global_)?scale|weight_shape)$")


def plain(module: str) -> Damage:
    """The layer back in BF16, on no list."""

    def change(_: dict[str, Any], t: Tensors) -> None:
        parts = [n for n in t if n.startswith(module + ".")]
        rows = next(t[n].shape[0] for n in parts if n.endswith(("weight", "weight_packed")))
        for n in parts:
            del t[n]
        t[f"{module}.weight"] = torch.zeros(rows, 256, dtype=torch.bfloat16)

    return change


def each(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda _, t: t.update({n: change(x) for n, x in t.items() if n.endswith(ending)})


def group(c: dict[str, Any]) -> dict[str, Any]:
    return c["config_groups"]["group_0"]["weights"]


def kv(value: torch.Tensor, scheme: dict[str, Any]) -> Damage:
    names = [f"model.layers.{i}.self_attn.{p}_scale" for i in (0, 1) for p in "kv"]
    return lambda c, t: (c.update(kv_cache_scheme=scheme), t.update({n: value.clone() for n in names}))


# family, format of tests/integration/schemes.py, damage; the verdict follows from the real loader
CASES: dict[str, tuple[str, str, Damage]] = {
    "sound int4": ("llama", "int4", lambda c, t: None),
    "sound nvfp4": ("llama", "modelopt-nvfp4", lambda c, t: None),
    "sound fp8": ("llama", "fp8", lambda c, t: None),
    "sound mixed": ("qwen3_moe", "mixed", lambda c, t: None),
    "sound experts": ("qwen3_moe", "int4", lambda c, t: None),
    "sound KV scales": ("llama", "int4", kv(torch.tensor([0.05]), KV)),
    "KV scales of heads under a scheme of tensors": ("llama", "int4", kv(torch.tensor([0.05, 0.05]), KV)),
    "a KV scheme without symmetric": ("llama", "int4", kv(torch.tensor([0.05]), {k: v for k, v in KV.items() if k != "symmetric"})),
    "a kept layer on no list, fp8": ("qwen3_moe", "fp8", plain(f"{ATTN}o_proj")),
    "a kept layer on no list, int4": ("llama", "int4", plain(f"{ATTN}o_proj")),
    "a kept layer on no list, modelopt": ("llama", "modelopt-nvfp4", plain(f"{ATTN}q_proj")),
    "a quantised layer on the list, int4": ("llama", "int4", lambda c, t: c["ignore"].append(f"{ATTN}o_proj")),
    "a quantised layer on the list, fp8": ("llama", "fp8", lambda c, t: c["modules_to_not_convert"].append(f"{ATTN}o_proj")),
    "a pattern open at its end": ("llama", "modelopt-nvfp4", lambda c, t: c["ignore"].append("model.layers.1*")),
    "one shard on the list": ("llama", "int4", lambda c, t: c["ignore"].append(f"{ATTN}q_proj")),
    "a private key": ("llama", "int4", lambda c, t: group(c).update(quantkit=1)),
    "the order of activations": ("llama", "int4", lambda c, t: group(c).update(actorder="group")),
    "ModelOpt's INT4": ("llama", "modelopt-nvfp4", lambda c, t: c.update(quant_algo="W4A16_AWQ")),
    "E4M3 scales as bytes": ("llama", "nvfp4", each("weight_scale", lambda x: x.view(torch.uint8))),
    "a global that is the reciprocal": ("llama", "nvfp4", each("weight_global_scale", lambda x: 1 / x)),
    "half of a fused layer": ("llama", "int4", lambda c, t: t.pop(f"{ATTN}k_proj.weight_packed")),
    "scales padded for a kernel": ("llama", "nvfp4", each("k_proj.weight_scale", lambda x: torch.cat([x.view(torch.uint8).flip(0)] * 2).view(x.dtype))),
    "zero points along the inputs": ("llama", "int4a", each("weight_zero_point", lambda x: x.new_zeros(x.shape[0] * 8, -(-x.shape[1] // 8)))),
    "float32 scales of groups": ("llama", "int4", each("weight_scale", lambda x: x.float() * 1.003)),
    "experts of an unquantised layer": ("qwen3_moe", "int4", lambda c, t: c["ignore"].extend(
        f"{LAYER}mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down"))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_twin(case: str, source: Callable[[str], Path], room: Path, vllm: Engine) -> None:
    family, name, damage = CASES[case]
    folder = source(family)
    written = quantise(folder, room / "out", *options(room, family, name))
    twin = write_twin(folder, written, room / "twin")
    config, tensors = json.loads((written / "config.json").read_text()), read(written)
    damage(config["quantization_config"], tensors)
    rewrite(written, config, tensors)
    result = vllm.run(task="load", folder=written, twin=twin)
    assert verdict(written) == real(result), result.get("error")


@pytest.mark.parametrize(("change", "symmetric"), [({}, False), ({"desc_act": True}, True)])
def test_twin_of_gptq(
    change: dict[str, Any], symmetric: bool, source: Callable[[str], Path], room: Path, vllm: Engine
) -> None:
    folder = source("llama")
    as_gptq(folder, room / "out", symmetric=symmetric)
    config = json.loads((room / "out" / "config.json").read_text())
    config["quantization_config"] |= change
    (room / "out" / "config.json").write_text(json.dumps(config))
    result = vllm.run(task="load", folder=room / "out", twin=folder)
    assert verdict(room / "out") == real(result) == "refused", result


SMALL = {"head_dim": 48}  # q, k and v have 192, 96 and 96 rows: three rows of scales are too few
LARGE = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}  # 576, 192, 192


@pytest.mark.parametrize(("sizes", "expected"), [(SMALL, "refused"), (LARGE, "silently wrong")])
def test_rows_of_scales_overlap(sizes: dict[str, int], expected: str, room: Path, vllm: Engine) -> None:
    """The method fp8 does not check the shards of a fused layer: half a block, and the next one's scales overwrite it."""
    folder = FAMILIES["llama"](room / "source", **sizes)
    recipe = every("fp8-block", format="fp8").replace("attention, ", "")  # the plan would refuse attention
    written = quantise(folder, room / "out", "-r", named(room, "fp8", recipe))
    config, tensors = json.loads((written / "config.json").read_text()), read(written)
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    for name in [n for n in tensors if "self_attn" in n and n.endswith("weight")]:
        rows, inputs = tensors[name].shape
        tensors[name] = tensors[name].float().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-inputs // 128))
    rewrite(written, config, tensors)
    result = vllm.run(task="load", folder=written, twin=folder)
    assert verdict(written) == real(result) == expected, result.get("error")


def verdict(folder: Path) -> str:
    """The twin's worst verdict; slow is right all the same."""
    (report,) = examine_folder(folder, ["vllm"], [1])
    worst = report.findings[0].verdict
    return "ok" if worst == "slow" else worst


def real(result: dict[str, Any]) -> str:
    """The same in terms of what the real loader did."""
    if "error" in result:
        return "refused"
    holes = [n for n, *_ in result["half_filled"] if not NOISE.search(n)]
    twice = [n for n in result["written_twice"] if not NOISE.search(n)]
    return "silently wrong" if result["not_consumed"] or holes or twice or result["differ"] else "ok"


def rewrite(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Replace the configuration, the second one of ModelOpt alike, and the shards by one."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    nested = folder / "hf_quant_config.json"
    if nested.is_file():
        content, quant = json.loads(nested.read_text()), config["quantization_config"]
        content["quantization"] |= {"quant_algo": quant["quant_algo"], "exclude_modules": quant["ignore"]}
        nested.write_text(json.dumps(content))
