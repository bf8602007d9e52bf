"""Commands that serve a checkpoint: one for each engine that loads it, KV flags where the engine applies the scales.

Read from vLLM 0.33, SGLang 0.5.23, stored versions of TensorRT-LLM, and transformers 5.14.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.export.checkpoint import has_fp8_kv, quantization_config, text_config
from quantkit.export.kv_scales import kv_rules

COMMANDS = {
    "vllm": 'vllm serve "$MODEL"',
    "sglang": 'python -m sglang.launch_server --model-path "$MODEL"',
    "trtllm": 'trtllm-serve "$MODEL"',
}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "transformers": "transformers"}
KV_FLAG = "--kv-cache-dtype fp8_e4m3"
# `quant_method`, or ModelOpt's `quant_algo`, to the engines that load it. transformers has no reader for ModelOpt's.
_READERS: dict[str, tuple[str, ...]] = {
    "": ("vllm", "sglang", "trtllm", "transformers"),
    "compressed-tensors": ("vllm", "sglang", "transformers"),
    "fp8": ("vllm", "sglang", "transformers"),
    "gptq": ("vllm", "sglang", "transformers"),
    "awq": ("vllm", "sglang", "transformers"),
    "mxfp4": ("vllm", "sglang", "transformers"),
    "NVFP4": ("vllm", "sglang", "trtllm"),
    "W4A16_NVFP4": ("vllm", "sglang"),
    "FP8": ("vllm", "sglang", "trtllm"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("vllm",),
    "FP8_PB_WO": ("vllm",),
    "MIXED_PRECISION": ("vllm",),
    "W4A16_AWQ": ("trtllm",),
}


@dataclass(frozen=True, slots=True)
class Serving:
    """How one engine serves a checkpoint; `note` says why the stored KV scales are not used, None when they are.

    command  for a shell that has the checkpoint's name in MODEL; empty for transformers, which is a library
    """

    engine: str
    command: str
    note: str | None = None


def servings(
    config: Mapping[str, Any], schemes: Collection[tuple[str, str]], kv_names: Collection[str]
) -> list[Serving]:
    """The engines that load a checkpoint with this config.json.

    schemes   (role, scheme) of its quantised layers
    kv_names  names of its KV scales from the attention module on, such as `self_attn.k_scale`
    """
    quant = quantization_config(config)
    method = str(quant.get("quant_method") or "")
    key = str(quant.get("quant_algo")) if method == "modelopt" else method
    found = []
    for engine in _READERS.get(key, ()):
        if method == "compressed-tensors" and _refuses(engine, schemes):
            continue
        command = COMMANDS.get(engine, "")
        note = None
        if kv_names and command:
            note = _kv_note(engine, method, config, kv_names)
            command += "" if note else f" {KV_FLAG}"
        if command and config.get("auto_map"):
            command += " --trust_remote_code" if engine == "trtllm" else " --trust-remote-code"
        found.append(Serving(engine, command, note))
    return found


def _refuses(engine: str, schemes: Collection[tuple[str, str]]) -> bool:
    """What engines cannot load of compressed-tensors, though they load others of the format."""
    experts = {s for role, s in schemes if role.endswith("routed_experts")}
    if engine == "sglang":
        dense_mxfp4 = any(s == "mxfp4" and not role.endswith("routed_experts") for role, s in schemes)
        mixed = len({s for _, s in schemes}) > 1 and any(s.startswith("int4") for s in experts)
        return dense_mxfp4 or mixed or any(s.startswith("int4a") for s in experts)
    if engine == "transformers":  # fused experts: the first config group, without zero points or a global scale
        return bool(experts) and (
            len({s for _, s in schemes}) > 1 or any(s.startswith(("int4a", "nvfp4")) for s in experts)
        )
    return False


def _kv_note(engine: str, method: str, config: Mapping[str, Any], kv_names: Collection[str]) -> str | None:
    """Why the FP8 cache is not switched on; None when the engine finds the scales and applies them."""
    if not has_fp8_kv(config):
        return "the configuration does not switch an FP8 cache on"
    rules = kv_rules(engine, method, text_config(config))
    stored = {n.partition(".")[2] for n in kv_names}
    if rules.values != "measured" or rules.reason:
        return rules.reason or "the engine uses no measured scales here"
    if not any(set(pair) <= stored for pair in rules.names):
        return f"{NAMES[engine]} looks for the KV scales under other names: {' or '.join(rules.names[0])}"
    return None
