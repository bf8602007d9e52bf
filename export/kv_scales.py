"""KV-cache scales inside a checkpoint: under which names an engine loads them, and where it cannot apply them.

A scale is a float32 of shape [1], a multiplier: stored = e4m3(clamp(x / scale)), x = stored * scale. An engine that
does not find one, or finds it under a name its model class does not map, runs at 1.0 with at most a warning; hence the
table. Read from vLLM 0.33, SGLang 0.5.23 and stored versions of TensorRT-LLM; transformers 5.14 with
compressed-tensors 0.20.

    kind of attention   engine         written
    keys and values     vllm           MODULE.k_scale, .v_scale (ModelOpt: MODULE.k_proj.k_scale, MODULE.v_proj.v_scale)
                        transformers   MODULE.k_scale, .v_scale
                        trtllm         MODULE.k_proj.k_scale, MODULE.v_proj.v_scale
                        sglang         as vllm; a second copy as MODULE.attn.k_scale for classes that map no names;
                                       nothing, and no FP8 cache by default, for classes that build attention without it
    latent (MLA)        sglang         1.0: rows are written unscaled, its backends disagree where a scale is applied
                        others         nothing: vLLM maps every name to a parameter that MLA does not have, so 1.0
    MTP layers          vllm           of keys and values: MODULE.attn.k_scale, .v_scale; its MTP class maps no names
    sparse (DSA)        all            nothing: a scale for each 128 values is computed at run time, RoPE stays BF16

Letters: H KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from quantkit.export.formats import FP8_KV
from quantkit.kernels.errors import QuantkitError

F32 = NDArray[np.float32]
Engine = Literal["vllm", "sglang", "trtllm", "transformers"]
Attention = Literal["heads", "latent", "sparse"]
Values = Literal["measured", "one", "none"]

# Formats whose configuration gives attention a place for scales; GPTQ's, AWQ's and gpt-oss' have none in any engine.
FORMATS = ("compressed-tensors", "modelopt", "fp8")

# SGLang: classes that take scales under the names of the table (a parameter exists, and names are mapped) ...
_SGLANG_MAPS = frozenset({
    "llama", "mistral", "phi3", "internlm3", "minimax_m2", "minimax_m3", "gemma2", "gemma3", "gemma3n", "gemma4",
    "nemotron_h", "phimoe", "cohere", "exaone4", "arcee", "apertus", "dbrx", "gptj", "qwen3_5", "qwen3_next",
})  # fmt: skip
# ... that have the parameter but map no names: only its own name loads
_SGLANG_NATIVE = frozenset({"qwen2", "qwen2_moe", "mixtral", "glm4", "granite", "olmo2"})
# ... and that build attention without a quantisation config: no parameter, scales are dropped
_SGLANG_WITHOUT = frozenset({
    "qwen3", "qwen3_moe", "glm4_moe", "gpt_oss", "llama4", "bailing_moe", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "exaone_moe", "falcon_h1", "lfm2", "lfm2_moe", "llada2_moe", "mellum", "sdar", "sdar_moe", "step3p5",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class KVRules:
    """What to write for one engine and model.

    values   measured: the scales of calibration; one: 1.0; none: no tensors
    names    pairs of what follows MODULE and a dot, for keys and for values; equal values under every pair
    fp8      the configuration may switch the FP8 cache on (`kv_cache_scheme`); False where that would do harm
    reason   why measured scales are not applied, or what is not known of it; None when all is well
    heads    a scale for each KV head is possible
    """

    values: Values
    names: tuple[tuple[str, str], ...]
    fp8: bool
    reason: str | None
    heads: bool = False


_SHORT = ("k_scale", "v_scale")
_PROJ = ("k_proj.k_scale", "v_proj.v_scale")
_NATIVE = ("attn.k_scale", "attn.v_scale")


def attention_kind(config: Mapping[str, Any]) -> Attention:
    """What the (text) config.json says is cached: heads of keys and values, MLA's latent rows, or those of DSA."""
    if config.get("kv_lora_rank"):
        return "sparse" if config.get("index_topk") else "latent"
    return "heads"


def kv_rules(engine: str, format: str, config: Mapping[str, Any]) -> KVRules:
    """The row of the table; `config` is the language model's part of config.json, `format` the checkpoint's.

    Raises QuantkitError for an unknown engine.
    """
    if engine not in get_args(Engine):
        raise QuantkitError("unknown engine", value=engine, allowed=", ".join(get_args(Engine)))
    kind = attention_kind(config)
    if kind == "sparse":
        why = "sparse attention (DSA) computes a scale for every 128 values at run time: its cache has no static scale"
        return KVRules("none", (), False, why)
    if format not in FORMATS or (engine == "transformers" and format != "compressed-tensors"):
        why = f"{engine} has no place for KV scales of checkpoints of the format {format}: an FP8 cache runs at 1.0"
        return KVRules("none", (), False, why)
    if kind == "latent":
        return _latent(engine)
    if engine == "trtllm":
        why = "TensorRT-LLM: in the versions read, KV scales reach the kernel for FP4 caches only, FP8 runs at 1.0"
        return KVRules("measured", (_PROJ,), True, why)
    usual = _PROJ if format == "modelopt" else _SHORT
    if engine == "sglang":
        return _sglang(str(config.get("model_type")), usual)
    return KVRules("measured", (usual,), True, None, engine == "vllm" and format == "compressed-tensors")


def _latent(engine: str) -> KVRules:
    if engine == "sglang":
        why = (
            "SGLang writes latent rows (MLA) without dividing by k_scale, and its backends disagree where it is "
            "applied: only 1.0 is right"
        )
        return KVRules("one", (_PROJ,), True, why)
    if engine == "transformers":
        return KVRules("none", (), False, "transformers caches the expanded heads of MLA, not the latent row measured")
    if engine == "trtllm":
        why = "TensorRT-LLM: in the versions read, KV scales reach the kernel for FP4 caches only, FP8 runs at 1.0"
        return KVRules("none", (), True, why)
    why = "vLLM 0.33 maps every name of a KV scale to a parameter that latent attention (MLA) lacks: it runs at 1.0"
    return KVRules("none", (), True, why)


def sglang_class(model_type: str) -> Literal["maps", "native", "without", "unknown"]:
    """What SGLang's class of a model does with KV scales: maps names, takes its own alone, drops all; or not known."""
    kind = model_type.removesuffix("_text")
    if kind in _SGLANG_WITHOUT:
        return "without"
    return "native" if kind in _SGLANG_NATIVE else "maps" if kind in _SGLANG_MAPS else "unknown"


def _sglang(model_type: str, usual: tuple[str, str]) -> KVRules:
    kind = sglang_class(model_type)
    if kind == "without":
        why = (
            f"SGLang's class for {model_type} builds attention without a quantisation config: scales are dropped "
            "and an FP8 cache runs at 1.0"
        )
        return KVRules("none", (), False, why)
    if kind == "native":
        return KVRules("measured", (usual, _NATIVE), True, None)
    why = f"whether SGLang's class for {model_type} loads KV scales is not known: look for a warning when it starts"
    return KVRules("measured", (usual,), True, None if kind == "maps" else why)


def scale_tensors(
    rules: KVRules, modules: Mapping[int, str], scales: Mapping[int, tuple[float, float]]
) -> dict[str, F32]:
    """The tensors of a checkpoint, float32 [1] rounded to nearest, by full name.

    modules  layer -> its attention module as the checkpoint names it (`model.layers.0.self_attn`)
    scales   layer -> (k_scale, v_scale), for the same layers

    Empty when the rules say none. Raises QuantkitError when layers differ, or a scale is no positive normal float32.
    """
    if rules.values == "measured":
        _check_layers(modules, scales)
    out: dict[str, F32] = {}
    for layer, module in modules.items():
        pair = scales[layer] if rules.values == "measured" else (1.0, 1.0)
        for names in _names(rules, module):
            for name, scale in zip(names, pair, strict=True):
                out[f"{module}.{name}"] = _stored([scale], f"{module}.{name}")
    return out


def mtp_scale_tensors(
    engine: str, rules: KVRules, modules: Mapping[int, str], scales: Mapping[int, tuple[float, float]]
) -> dict[str, F32]:
    """Those of MTP layers, where they are measured ones; a layer without a scale runs at 1.0.

    vLLM's MTP class of GLM-4-MoE maps no names: another one than the parameter's own stops it while it loads.
    """
    if rules.values != "measured":
        return {}
    return scale_tensors(replace(rules, names=(_NATIVE,)) if engine == "vllm" else rules, modules, scales)


def head_scale_tensors(
    rules: KVRules, modules: Mapping[int, str], scales: Mapping[int, tuple[Sequence[float], Sequence[float]]]
) -> dict[str, F32]:
    """Scales (k_H, v_H) of each KV head, float32 [H, 1, 1], as vLLM loads them beside `kv_cache_scheme(per_head=True)`.

    Raises QuantkitError as `scale_tensors`, and for rules other than those of vLLM with compressed-tensors.
    """
    if not rules.heads:
        raise QuantkitError(
            "scales per head are read by vLLM from compressed-tensors checkpoints only", value=rules.reason,
            allowed="--engine vllm --format compressed-tensors, a model with heads of keys and values",
        )  # fmt: skip
    _check_layers(modules, scales)
    out: dict[str, F32] = {}
    for layer, module in modules.items():
        for name, heads in zip(_SHORT, scales[layer], strict=True):
            out[f"{module}.{name}"] = _stored(heads, f"{module}.{name}").reshape(-1, 1, 1)
    return out


def kv_cache_scheme(rules: KVRules, *, per_head: bool = False) -> dict[str, Any] | None:
    """`kv_cache_scheme` of config.json with every key the strictest reader wants; None: leave the cache as it is."""
    return dict(FP8_KV, strategy="attn_head" if per_head else "tensor") if rules.fp8 else None


def _names(rules: KVRules, module: str) -> tuple[tuple[str, str], ...]:
    """Attention inside a `mixer` (Nemotron-H) is known to both engines under ModelOpt's name only."""
    if module.rpartition(".")[2] == "mixer":
        return tuple(dict.fromkeys(_PROJ if pair == _SHORT else pair for pair in rules.names))
    return rules.names


def _check_layers(modules: Mapping[int, str], scales: Mapping[int, Any]) -> None:
    if modules.keys() != scales.keys():
        odd = sorted(modules.keys() ^ scales.keys())
        raise QuantkitError(
            "layers with attention and layers with KV scales differ", value=f"layers {odd[:8]} are on one side only",
            hint="calibrate the same model that is exported",
        )  # fmt: skip


def _stored(scales: Sequence[float], name: str) -> F32:
    with np.errstate(over="ignore", under="ignore"):
        out = np.array(scales, np.float64).astype(np.float32)
    if out.ndim != 1 or not out.size or not (np.isfinite(out) & (out >= np.finfo(np.float32).tiny)).all():
        raise QuantkitError(
            "a KV scale is not usable", tensor=name, value=list(scales), allowed="positive normal float32 numbers"
        )
    return out
