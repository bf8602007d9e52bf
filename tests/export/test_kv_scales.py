"""Names and values of KV scales by engine: what loads, what would be dropped or misapplied, and that it is said."""

import re

import numpy as np
import pytest
from quantkit.export.checkpoint import has_fp8_kv
from quantkit.export.kv_scales import attention_kind, head_scale_tensors, kv_cache_scheme, kv_rules, scale_tensors
from quantkit.kernels.errors import QuantkitError

MODULES = {n: f"model.layers.{n}.self_attn" for n in range(2)}
SCALES = {0: (0.5, 0.25), 1: (0.1, 0.3)}
LLAMA = {"model_type": "llama"}
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
DSA = {"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "index_topk": 2048}
CT, MO = "compressed-tensors", "modelopt"


def written(engine, format, config, modules=MODULES, scales=SCALES):
    """What follows `model.layers.1.` in the names, with the values of that layer."""
    tensors = scale_tensors(kv_rules(engine, format, config), modules, scales)
    assert all(x.dtype == np.float32 and x.shape == (1,) for x in tensors.values())
    layers = {name: x for name, x in tensors.items() if ".layers.1." in name}
    assert len(tensors) == len(modules) * len(layers)
    return {name.partition(".layers.1.")[2]: float(x[0]) for name, x in layers.items()}


K, V = float(np.float32(0.1)), float(np.float32(0.3))
SHORT = {"self_attn.k_scale": K, "self_attn.v_scale": V}
PROJ = {"self_attn.k_proj.k_scale": K, "self_attn.v_proj.v_scale": V}
NATIVE = {"self_attn.attn.k_scale": K, "self_attn.attn.v_scale": V}
ONE = dict.fromkeys(PROJ, 1.0)


@pytest.mark.parametrize(
    ("engine", "format", "config", "tensors", "fp8", "reason"),
    [
        ("vllm", CT, LLAMA, SHORT, True, None),
        ("vllm", "fp8", LLAMA, SHORT, True, None),
        ("vllm", MO, LLAMA, PROJ, True, None),
        ("vllm", CT, {"model_type": "qwen3_moe"}, SHORT, True, None),
        ("transformers", CT, LLAMA, SHORT, True, None),
        ("transformers", MO, LLAMA, {}, False, "no place"),
        ("transformers", "fp8", LLAMA, {}, False, "no place"),
        ("trtllm", MO, LLAMA, PROJ, True, "FP4 caches only"),
        ("sglang", CT, LLAMA, SHORT, True, None),
        ("sglang", MO, LLAMA, PROJ, True, None),
        ("sglang", CT, {"model_type": "gemma3_text"}, SHORT, True, None),
        ("sglang", CT, {"model_type": "qwen2"}, {**SHORT, **NATIVE}, True, None),
        ("sglang", MO, {"model_type": "mixtral"}, {**PROJ, **NATIVE}, True, None),
        ("sglang", CT, {"model_type": "qwen3"}, {}, False, "scales are dropped"),
        ("sglang", CT, {"model_type": "gpt_oss"}, {}, False, "scales are dropped"),
        ("sglang", CT, {"model_type": "llama4_text"}, {}, False, "scales are dropped"),
        ("sglang", CT, {"model_type": "brand_new"}, SHORT, True, "not known"),
        ("vllm", "mxfp4", LLAMA, {}, False, "no place"),
        ("sglang", "gptq", LLAMA, {}, False, "no place"),
        ("vllm", CT, MLA, {}, True, "MLA"),
        ("vllm", MO, MLA, {}, True, "MLA"),
        ("sglang", CT, MLA, ONE, True, "only 1.0"),
        ("sglang", MO, MLA, ONE, True, "only 1.0"),
        ("trtllm", MO, MLA, {}, True, "FP4 caches only"),
        ("transformers", CT, MLA, {}, False, "expanded heads"),
        *[(engine, CT, DSA, {}, False, "DSA") for engine in ("vllm", "sglang", "trtllm", "transformers")],
    ],
)
def test_what_is_written(engine, format, config, tensors, fp8, reason):
    rules = kv_rules(engine, format, config)
    assert written(engine, format, config) == tensors
    assert rules.fp8 == fp8
    assert (rules.reason is None) == (reason is None)
    if reason:
        assert reason in rules.reason


def test_attention_of_a_mixer_goes_by_modelopts_names():
    modules = {1: "backbone.layers.1.mixer"}
    for engine in ("vllm", "sglang"):
        found = written(engine, CT, {"model_type": "nemotron_h"}, modules, {1: (0.1, 0.3)})
        assert found == {"mixer.k_proj.k_scale": K, "mixer.v_proj.v_scale": V}


def test_nested_names_are_kept():
    modules = {1: "model.language_model.layers.1.self_attn"}
    rules = kv_rules("vllm", CT, LLAMA)
    assert list(scale_tensors(rules, modules, {1: (0.1, 0.3)})) == [f"{modules[1]}.k_scale", f"{modules[1]}.v_scale"]


# What vLLM's name mapper does, as rules: (pattern, parameter). Applied in order to each name.
VLLM = [
    (r"\.self_attn\.[kv]_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
    (r"\.mixer\.[kv]_proj\.([kv])_scale$", r".mixer.attn.\1_scale"),
    (r"(?<!\.attn)\.([kv])_scale$", r".attn.\1_scale"),
]


@pytest.mark.parametrize("format", [CT, MO, "fp8"])
@pytest.mark.parametrize("config", [LLAMA, {"model_type": "qwen2"}])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_name_reaches_vllms_parameter(engine, config, format):
    """A checkpoint made for SGLang too: second copies end at the same parameter with the same value."""
    for stored, x in scale_tensors(kv_rules(engine, format, config), MODULES, SCALES).items():
        name = stored
        for pattern, parameter in VLLM:
            name = re.sub(pattern, parameter, name)
        layer, part = re.fullmatch(r"model\.layers\.(\d)\.self_attn\.attn\.([kv])_scale", name).groups()
        assert x[0] == np.float32(SCALES[int(layer)][part == "v"])


# ---- per head ----


def test_scales_of_heads():
    rules = kv_rules("vllm", CT, LLAMA)
    tensors = head_scale_tensors(rules, {0: MODULES[0]}, {0: ((0.5, 0.1), (0.25, 0.2))})
    assert {name: x.shape for name, x in tensors.items()} == {
        "model.layers.0.self_attn.k_scale": (2, 1, 1),
        "model.layers.0.self_attn.v_scale": (2, 1, 1),
    }
    assert tensors["model.layers.0.self_attn.k_scale"].ravel().tolist() == [0.5, float(np.float32(0.1))]
    assert kv_cache_scheme(rules, per_head=True)["strategy"] == "attn_head"


@pytest.mark.parametrize(
    ("engine", "format", "config"),
    [
        ("vllm", MO, LLAMA), ("vllm", "fp8", LLAMA), ("sglang", CT, LLAMA), ("transformers", CT, LLAMA),
        ("vllm", CT, MLA), ("vllm", CT, DSA), ("trtllm", MO, LLAMA),
    ],
)  # fmt: skip
def test_scales_of_heads_elsewhere_are_refused(engine, format, config):
    with pytest.raises(QuantkitError, match="per head"):
        head_scale_tensors(kv_rules(engine, format, config), {0: MODULES[0]}, {0: ((0.5,), (0.5,))})


# ---- the configuration ----


def test_the_scheme_has_every_key_of_the_strictest_reader():
    scheme = kv_cache_scheme(kv_rules("vllm", CT, LLAMA))
    assert scheme == {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert has_fp8_kv({"quantization_config": {"kv_cache_scheme": scheme}})
    scheme["num_bits"] = 4
    assert kv_cache_scheme(kv_rules("vllm", CT, LLAMA))["num_bits"] == 8, "a copy, not the table"


def test_where_fp8_would_do_harm_it_is_not_switched_on():
    assert kv_cache_scheme(kv_rules("sglang", CT, {"model_type": "qwen3"})) is None
    assert kv_cache_scheme(kv_rules("vllm", CT, DSA)) is None


@pytest.mark.parametrize(
    ("config", "kind"), [(LLAMA, "heads"), (MLA, "latent"), (DSA, "sparse"), ({"kv_lora_rank": None}, "heads")]
)
def test_kinds_of_attention(config, kind):
    assert attention_kind(config) == kind


# ---- refused ----


def test_unknown_engines():
    with pytest.raises(QuantkitError, match="unknown engine") as error:
        kv_rules("llama.cpp", CT, LLAMA)
    assert "sglang" in str(error.value)


@pytest.mark.parametrize("scales", [{0: (1.0, 1.0)}, {**SCALES, 2: (1.0, 1.0)}, {}])
def test_other_layers_than_the_model_has(scales):
    with pytest.raises(QuantkitError, match="differ"):
        scale_tensors(kv_rules("vllm", CT, LLAMA), MODULES, scales)
    assert scale_tensors(kv_rules("vllm", CT, DSA), MODULES, scales) == {}


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-39, 1e39])
def test_scales_that_no_engine_can_use(value):
    with pytest.raises(QuantkitError, match="not usable") as error:
        scale_tensors(kv_rules("vllm", CT, LLAMA), MODULES, {**SCALES, 1: (1.0, value)})
    assert "model.layers.1.self_attn.v_scale" in str(error.value)
    with pytest.raises(QuantkitError, match="not usable"):
        head_scale_tensors(kv_rules("vllm", CT, LLAMA), {0: MODULES[0]}, {0: ((1.0, value), (1.0, 1.0))})
