"""The engines' twins: every trap is found on a checkpoint with that one fault, and nothing on those that are sound.

The faults are those that engines are known to load silently or to refuse (formats, names, values). A sound checkpoint is
one that quantkit exported, or for GPTQ and AWQ one of the tests' own writers; the fault is put in by hand.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Tensors, load_tensors, read_config, save_tensors, write_config
from quantised import as_awq, as_gptq
from quantkit.export.checkpoint import open_checkpoint
from quantkit.export.engines.files import Files
from quantkit.export.engines.finding import FAILS, EngineReport, Finding
from quantkit.export.engines.twin import ENGINES, examine
from quantkit.export.kv_scales import kv_cache_scheme, kv_rules
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.engines import examine_folder, examine_plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe, with_int4_group
from quantkit.quantize.run import run
from quantkit.quantize.shipped import shipped

LAYER = "model.layers.0."
EXPERT = "model.layers.1.mlp.experts.0."
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

# family, rules of the recipe, format; the rest is kept
ALL = "[attention, dense_mlp, shared_experts, routed_experts]"
BASES: dict[str, tuple[str, str, str]] = {
    "int4": ("llama", "{match: {role: %s}, scheme: int4-g32}", "compressed-tensors"),
    "int4a": ("llama", "{match: {role: %s}, scheme: int4a-g32}", "compressed-tensors"),
    "channel": ("llama", "{match: {role: %s}, scheme: int4-channel}", "compressed-tensors"),
    "nvfp4": ("llama", "{match: {role: %s}, scheme: nvfp4}", "compressed-tensors"),
    "nvfp4-a4": ("llama", "{match: {role: %s}, scheme: nvfp4, input_scale: 0.01}", "compressed-tensors"),
    "modelopt": ("llama", "{match: {role: %s}, scheme: nvfp4}", "modelopt"),
    "modelopt-a4": ("llama", "{match: {role: %s}, scheme: nvfp4, input_scale: 0.01}", "modelopt"),
    "fp8": ("llama", "{match: {role: %s}, scheme: fp8-block}", "fp8"),
    "fp8-static": ("llama", "{match: {role: %s}, scheme: fp8-tensor, input_scale: 0.5}", "compressed-tensors"),
    "modelopt-fp8": ("llama", "{match: {role: %s}, scheme: fp8-tensor, input_scale: 0.5}", "modelopt"),
    "qwen3": ("qwen3", "{match: {role: %s}, scheme: int4-g32}", "compressed-tensors"),
    "qwen2": ("qwen2", "{match: {role: %s}, scheme: int4-g32}", "compressed-tensors"),
    "moe": ("qwen3_moe", "{match: {role: %s}, scheme: int4-g32}", "compressed-tensors"),
    "moe-a4": ("qwen3_moe", "{match: {role: routed_experts}, scheme: nvfp4, input_scale: 0.01}", "compressed-tensors"),
    "moe-mxfp4": ("qwen3_moe", "{match: {role: routed_experts}, scheme: mxfp4}", "compressed-tensors"),
    "mla": ("deepseek_v3", "{match: {role: %s, except: [attention.kv_b]}, scheme: int4-g32}", "compressed-tensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        # heads of 64: a key projection is then one block of 128 rows
        more = {"head_dim": 64} if name in ("llama", "qwen3", "qwen2") else {}
        return root / name if (root / name).exists() else FAMILIES[name](root / name, **more)

    return make


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, family: Callable[[str], Path]) -> Callable[[str], Path]:
    """A sound checkpoint by name, written once."""
    root = tmp_path_factory.mktemp("bases")

    def make(name: str) -> Path:
        out = root / name
        if out.exists():
            return out
        if name in ("gptq", "awq"):
            {"gptq": partial(as_gptq, group=32), "awq": partial(as_awq, group=32)}[name](family("llama"), out)
            return out
        source, rule, form = BASES[name]
        path = root / f"{name}.yaml"
        rule = rule % ALL if "%s" in rule else rule
        path.write_text(
            f'weights:\n  - {rule}\n  - {{match: {{role: "*"}}, keep: true}}\noutputs: [{{format: {form}}}]\n'
        )
        run(make_plan(load_recipe(str(path)), open_checkpoint(family(source))), out, jobs=1, memory=1 << 20)
        return out

    return make


def failed(report: EngineReport) -> list[Finding]:
    return [f for f in report.findings if f.failed]


def look(folder: Path, engine: str, tp: int = 1) -> EngineReport:
    (report,) = examine_folder(folder, [engine], [tp])
    return report


# ---- nothing is found where nothing is wrong ----

# base -> engines that truly cannot serve it, and why
CANNOT = {
    ("modelopt", "transformers"): "no reader for ModelOpt",
    ("modelopt-a4", "transformers"): "no reader for ModelOpt",
    ("modelopt-fp8", "transformers"): "no reader for ModelOpt",
    ("moe-a4", "transformers"): "NVFP4 experts are not decoded into fused ones",
    ("gptq", "trtllm"): "not a format of this engine",
    ("awq", "trtllm"): "not a format of this engine",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*BASES, "gptq", "awq"])
def test_a_sound_checkpoint_passes(name: str, engine: str, base: Callable[[str], Path]) -> None:
    report = look(base(name), engine)
    assert bool(failed(report)) == ((name, engine) in CANNOT), failed(report)
    assert report.passed == (not failed(report))
    assert failed(report) or any(f.count > 1 for f in report.findings), "layers that are alike are counted together"


def reasons(name: str, form: str, family: str, engine: str) -> set[str]:
    """What has to be found on the plan of a shipped recipe, as patterns; empty for nothing."""
    moe = family in MOE
    if form == "modelopt":
        algorithm = {"fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN", "fp8-block": "FP8_PB_WO"}.get(name)
        if engine == "transformers":
            return {"no reader for ModelOpt"}
        if name.startswith("int4") and engine != "trtllm":
            return {"the algorithm W4A16_AWQ"}
        return {f"the algorithm {algorithm}"} if engine == "sglang" and algorithm else set()
    if form in ("gptq", "awq") and engine == "trtllm":
        return {"not a format of this engine"}
    if form == "mxfp4" and family != "gpt_oss":
        return {"mxfp4 is for gpt-oss alone"}
    if form == "compressed-tensors" and moe and engine == "transformers" and name.startswith("nvfp4"):
        return {"experts in NVFP4 cannot be decoded"}
    return set()


MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "minimax_m2", "gpt_oss", "deepseek_v3", "deepseek_v32", "glm4_moe",
       "glm_moe_dsa", "kimi")  # fmt: skip
RECIPES = [n for n, _ in shipped() if not n.startswith("models/")]


def plans(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    """The plans of a recipe in every format that holds it."""
    recipe = load_recipe(name)
    if "int4" in name:
        recipe = with_int4_group(recipe, "32")
    for form in ("compressed-tensors", "modelopt", "fp8", "mxfp4", "gptq", "awq"):
        try:
            plan = make_plan(recipe, open_checkpoint(folder), format_name=form)
        except QuantkitError:
            continue  # the format cannot hold it, or the family has no such layer
        yield plan.format, plan


@pytest.mark.parametrize("name", FAMILIES)
def test_no_false_alarm_on_what_the_shipped_recipes_write(name: str, family: Callable[[str], Path]) -> None:
    folder = family(name)
    seen = 0
    for recipe in RECIPES:
        for form, plan in plans(folder, recipe):
            for report in examine_plan(plan, list(ENGINES), []):
                expected = reasons(recipe, form, name, report.engine) if form != "as published" else set()
                found = {f.what for f in failed(report)}
                assert all(any(re.search(e, w) for e in expected) for w in found), (recipe, form, report.engine, found)
                assert all(any(re.search(e, w) for w in found) for e in expected), (recipe, form, report.engine, found)
                seen += 1
    assert seen >= 4 * 8


@dataclass(frozen=True)
class Head:
    """A header without a file."""

    dtype: str
    shape: tuple[int, ...]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FAMILIES)
def test_kv_scales_that_are_written_for_an_engine_reach_it(
    name: str, engine: str, family: Callable[[str], Path]
) -> None:
    config = read_config(family(name))
    text = config.get("text_config") or config
    rules = kv_rules(engine, "compressed-tensors", text)
    root = "language_model.model" if name == "kimi" else "model"
    modules = [f"{root}.layers.{i}.self_attn" for i in range(text["num_hidden_layers"])]
    headers = {f"{m}.{n}": Head("F32", (1,)) for m in modules for pair in rules.names for n in pair}
    headers |= {f"{m}.k_proj.weight": Head("BF16", (64, 64)) for m in modules}
    quant = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [
        f"{m}.k_proj" for m in modules], "kv_cache_scheme": kv_cache_scheme(rules)}  # fmt: skip
    report = examine(Files(config | {"quantization_config": quant}, None, headers), engine, 1)
    assert failed(report) == []
    if rules.values == "measured":
        assert any("KV scales" in f.what or "loads KV" in f.what for f in report.findings)


# ---- every trap is found ----


def edit(change: Callable[[dict[str, Any]], Any], file: str = "config.json") -> Callable[[Path], None]:
    """A change of a JSON file; of `quantization_config` for config.json."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content["quantization_config"] if file == "config.json" else content)
        (folder / file).write_text(json.dumps(content))

    return apply


def tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """A change of the tensors."""

    def apply(folder: Path) -> None:
        found = load_tensors(folder)
        change(found)
        save_tensors(folder, {n: t.contiguous() for n, t in found.items()})

    return apply


def both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for step in steps:
            step(folder)

    return apply


def each(found: Tensors, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    names = [n for n in found if n.endswith(ending)]
    assert names
    for n in names:
        found[n] = change(found[n])


def one(found: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found[name] = change(found[name])


def add_kv(
    names: tuple[str, str] = ("k_scale", "v_scale"), value: float = 0.05, like: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    scheme: dict[str, Any] | None = KV, method: dict[str, Any] | None = None,
) -> Callable[[Path], None]:  # fmt: skip
    """Scales of the KV cache in every layer, and the key that switches it on."""

    def apply(folder: Path) -> None:
        found = load_tensors(folder)
        stems = {n.partition("self_attn.")[0] for n in found if "self_attn." in n}
        for stem in stems:
            for n in names:
                found[f"{stem}self_attn.{n}"] = like(torch.tensor([value], dtype=torch.float32))
        save_tensors(folder, found)
        config = read_config(folder)
        config["quantization_config"] |= {"kv_cache_scheme": scheme} if scheme else {}
        config["quantization_config"] |= method or {}
        write_config(folder, config)

    return apply


def group(**changes: Any) -> Callable[[Path], None]:
    return edit(lambda c: c["config_groups"]["group_0"]["weights"].update(changes))


def drop(*names: str) -> Callable[[Path], None]:
    return tensors(lambda t: [t.pop(n) for n in names])


def plain(module: str, parts: tuple[str, ...]) -> Callable[[Path], None]:
    """A layer back in BF16, that no list names."""

    def change(t: Tensors) -> None:
        rows = next(t[f"{module}.{p}"] for p in ("weight_packed", "weight", "qweight") if f"{module}.{p}" in t).shape[0]
        for p in parts:
            t.pop(f"{module}.{p}")
        t[f"{module}.weight"] = torch.zeros(rows, 256, dtype=torch.bfloat16)

    return tensors(change)


def json_of_scales(**changes: Any) -> Callable[[Path], None]:
    """SGLang's file of scales for one rank and two layers, with a fault."""

    def apply(folder: Path) -> None:
        content = {
            "model_type": "llama",
            "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.1, "1": 0.1}}},
        }
        (folder / "kv_cache_scales.tp1.json").write_text(json.dumps(content | changes))

    return apply


def as_e4m3_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


CT_INT4 = ("weight_packed", "weight_scale", "weight_shape")
CT_NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")
Q, K = f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.k_proj"
WRONG, REFUSED = "silently wrong", "refused"

# what is broken: base, how, [(engine, verdict, part of what is said)]
Case = tuple[str, Callable[[Path], None], list[tuple[str, str, str]]]
TRAPS: dict[str, Case] = {
    # 1: directions
    "a multiplier in place of compressed-tensors' divisor": (
        "nvfp4", tensors(lambda t: each(t, "weight_global_scale", lambda x: 1 / x)),
        [(e, WRONG, "must be a divisor") for e in ENGINES],
    ),
    "a divisor in place of ModelOpt's multiplier": (
        "modelopt", tensors(lambda t: each(t, "weight_scale_2", lambda x: 1 / x)),
        [(e, WRONG, "must be a multiplier") for e in ("vllm", "sglang", "trtllm")],
    ),
    "an input scale that is the reciprocal": (
        "nvfp4-a4", tensors(lambda t: each(t, "input_global_scale", lambda x: 1 / x)),
        [("vllm", WRONG, "beyond 100000"), ("sglang", WRONG, "the reciprocal")],
    ),
    "weight_scale_inv taken by its name": (
        "fp8", tensors(lambda t: each(t, "weight_scale_inv", lambda x: 1 / x)),
        [("vllm", WRONG, "must be a multiplier, amax / 448"), ("sglang", WRONG, "amax / 448")],
    ),
    # 2: globals of fused sets
    "globals that differ in q, k and v (weights only)": (
        "nvfp4", tensors(lambda t: one(t, f"{Q}.weight_global_scale", lambda x: 2 * x)),
        [("vllm", WRONG, "takes the largest"), ("sglang", REFUSED, "wants them equal"), ("trtllm", REFUSED, "equal")],
    ),
    "globals that differ in q, k and v (W4A4)": (
        "nvfp4-a4", tensors(lambda t: one(t, f"{Q}.weight_global_scale", lambda x: 2 * x)),
        [("vllm", WRONG, "takes the largest"), ("sglang", WRONG, "takes the largest")],
    ),
    "globals of gate and up of an expert that differ": (
        "moe-a4", tensors(lambda t: one(t, f"{EXPERT}up_proj.weight_global_scale", lambda x: 2 * x)),
        [("vllm", WRONG, "takes that of gate"), ("sglang", WRONG, "takes that of gate")],
    ),
    "FP8 scales that differ in a fused layer": (
        "fp8-static", tensors(lambda t: one(t, f"{Q}.weight_scale", lambda x: 2 * x)),
        [("vllm", "slow", "quantised again"), ("sglang", "slow", "quantised again")],
    ),
    # 3: dtypes of scales
    "E4M3 scales as bytes": (
        "nvfp4", tensors(lambda t: each(t, "weight_scale", as_e4m3_bytes)),
        [("vllm", WRONG, "copied by value into F8_E4M3"), ("sglang", WRONG, "byte 126 becomes 128.0")],
    ),
    "E8M0 scales under their dtype": (
        "moe-mxfp4", tensors(lambda t: each(t, "weight_scale", lambda x: x.view(torch.float8_e8m0fnu))),
        [("vllm", WRONG, "copied by value into U8")],
    ),
    # 4: packing
    "GPTQ v1 zero points called v2": (
        "gptq", edit(lambda c: c.update(checkpoint_format="gptq_v2")), [("transformers", WRONG, "shifted by one step")],
    ),
    "zero points packed along the inputs": (
        "int4a", tensors(lambda t: each(t, "weight_zero_point", lambda x: x.new_zeros(x.shape[0] * 8, -(-x.shape[1] // 8)))),
        [("vllm", REFUSED, "weight_zero_point is"), ("sglang", REFUSED, "weight_zero_point is")],
    ),
    "AWQ in the order of another kernel": (
        "awq", edit(lambda c: c.update(version="gemv")), [(e, REFUSED, "AWQ in the order gemv") for e in ("vllm", "sglang")],
    ),
    # 5: the kernel's layout
    "scales padded and swizzled for a kernel": (
        "nvfp4", tensors(lambda t: each(t, "k_proj.weight_scale", lambda x: torch.cat([x.view(torch.uint8)] * 2).view(x.dtype))),
        [("vllm", WRONG, "the rest is cut off"), ("sglang", WRONG, "cut off"), ("transformers", REFUSED, "weight_scale is")],
    ),
    "scales in another order": (
        "nvfp4", tensors(lambda t: each(t, "weight_scale", lambda x: x.view(torch.uint8).T.contiguous().view(x.dtype))),
        [(e, REFUSED, "weight_scale is") for e in ENGINES],
    ),
    "GPTQ in Marlin's order": ("gptq", edit(lambda c: c.update(checkpoint_format="marlin")), [("sglang", REFUSED, "Marlin")]),
    # 6: names of KV scales
    "a class that builds attention without KV scales": (
        "qwen3", add_kv(), [("sglang", WRONG, "qwen3 builds attention without")],
    ),
    "a class that maps no names": ("qwen2", add_kv(), [("sglang", WRONG, "does not map these names")]),
    "the native name where names are mapped": (
        "int4", add_kv(("attn.k_scale", "attn.v_scale")), [("sglang", WRONG, "does not map"), ("transformers", WRONG, "does not")],
    ),
    "GPTQ with KV scales": (
        "gptq", add_kv(scheme=None), [("vllm", WRONG, "gptq gives attention no place"), ("sglang", WRONG, "gptq gives")],
    ),
    "an FP8 cache without scales": (
        "int4", edit(lambda c: c.update(kv_cache_scheme=KV)), [("vllm", WRONG, "no scale is stored"), ("sglang", WRONG, "runs at 1.0")],
    ),
    "one layer without KV scales": (
        "int4", both(add_kv(), drop("model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale")),
        [("vllm", WRONG, "no KV scale in this layer")],
    ),
    "a v_scale alone": (
        "int4", both(add_kv(), drop("model.layers.1.self_attn.k_scale")),
        [("sglang", REFUSED, "a v_scale without"), ("vllm", WRONG, "without a k_scale")],
    ),
    # 7: SGLang's JSON
    "SGLang's JSON without its dtype": (
        "int4", json_of_scales(kv_cache={"dtype": "fp8_e4m3", "scaling_factor": {}}), [("sglang", WRONG, "all scales become 1.0")],
    ),
    "SGLang's JSON of another model": (
        "int4", json_of_scales(model_type="qwen3"), [("sglang", WRONG, "all scales become 1.0")],
    ),
    # 8: values of KV scales
    "KV scales that are the reciprocal": ("int4", add_kv(value=448 / 4), [(e, WRONG, "not amax / 448") for e in ("vllm", "sglang")]),
    "KV scales in BF16": ("int4", add_kv(like=torch.Tensor.bfloat16), [(e, WRONG, "in BF16") for e in ("vllm", "sglang")]),
    "KV scales of each head": (
        "int4", add_kv(like=lambda x: x.repeat(2)), [(e, REFUSED, "one number is wanted") for e in ENGINES if e != "trtllm"],
    ),
    "KV scales of shape [1, 1]": ("int4", add_kv(like=lambda x: x.reshape(1, 1)), [("transformers", REFUSED, "shape \\[1, 1\\]")]),
    # 9: NVFP4 cache
    "scales of an NVFP4 cache": (
        "modelopt", both(
            add_kv(("k_proj.k_scale", "v_proj.v_scale"), scheme=None),
            edit(lambda c: c["quantization"].update(kv_cache_quant_algo="NVFP4"), "hf_quant_config.json"),
        ), [("sglang", WRONG, "multiplied by 6 on SM100")],
    ),
    # 10: latent attention
    "scales of latent rows": (
        "mla", add_kv(("k_proj.k_scale", "v_proj.v_scale")),
        [("sglang", WRONG, "latent rows"), ("vllm", WRONG, "a parameter that latent attention")],
    ),
    # 11: scales of activations
    "experts without an input scale": (
        "moe-a4", tensors(lambda t: [t.pop(n) for n in list(t) if n.endswith("input_global_scale")]),
        [("vllm", WRONG, "whatever is in memory"), ("sglang", WRONG, "under 1.0")],
    ),
    "an expert that saw no tokens": (
        "moe-a4", tensors(lambda t: one(t, f"{EXPERT}down_proj.input_global_scale", lambda x: x * float("inf"))),
        [("vllm", WRONG, "not a positive number")],
    ),
    "input scales that differ among experts": (
        "moe-a4", tensors(lambda t: one(t, f"{EXPERT}down_proj.input_global_scale", lambda x: 2 * x)),
        [("vllm", WRONG, "reduces them to one"), ("sglang", WRONG, "reduces")],
    ),
    # 12: lists that match too much or too little
    "a pattern open at its end": (
        "modelopt", edit(lambda c: c["ignore"].append("model.layers.0*")), [("vllm", REFUSED, "has this layer unquantised")],
    ),
    "the name of a parent": (
        "int4", both(edit(lambda c: c["ignore"].append(f"{LAYER}self_attn")), *(
            plain(f"{LAYER}self_attn.{p}_proj", CT_INT4) for p in "qkvo"
        )), [("vllm", REFUSED, "is not quantised, but"), ("sglang", WRONG, "is not quantised, but")],
    ),
    "a kept layer that no list names": (
        "fp8", plain(f"{LAYER}self_attn.o_proj", ("weight", "weight_scale_inv")),
        [(e, WRONG, "is not quantised, but") for e in ("vllm", "sglang", "transformers")],
    ),
    "one shard of a fused layer on the list": (
        "int4", edit(lambda c: c["ignore"].append(Q)), [("vllm", REFUSED, "some shards"), ("sglang", REFUSED, "some shards")],
    ),
    "a prefix that another layer has too": (
        "fp8", edit(lambda c: c["modules_to_not_convert"].append("model.layers.1")),
        [("transformers", WRONG, "has this layer unquantised"), ("sglang", WRONG, "has this layer unquantised")],
    ),
    # 14: files
    "a stray weight file": (
        "int4", lambda f: shutil.copy(f / "model.safetensors", f / "consolidated.safetensors") and None,
        [(e, WRONG, "every weight file is loaded") for e in ENGINES],
    ),
    # 15: INT4 experts with zero points
    "INT4 experts with zero points": (
        "moe", both(group(symmetric=False), tensors(lambda t: t.update({
            n.replace("_scale", "_zero_point"): torch.zeros(-(-x.shape[0] // 8), x.shape[1], dtype=torch.int32)
            for n, x in t.items() if n.endswith("weight_scale")
        }))), [("sglang", WRONG, "decoded without them"), ("transformers", REFUSED, "with zero points")],
    ),
    # 16: scales rounded after the codes were chosen
    "float32 scales of groups": (
        "int4", tensors(lambda t: each(t, "weight_scale", torch.Tensor.float)),
        [("vllm", WRONG, "after the codes were chosen"), ("sglang", WRONG, "after the codes")],
    ),
    # 17: two configurations
    "two configurations that disagree": (
        "modelopt-fp8", edit(lambda c: c["quantization"].update(quant_algo="NVFP4"), "hf_quant_config.json"),
        [("vllm", WRONG, "config.json wins here"), ("trtllm", WRONG, "hf_quant_config.json wins")],
    ),
    # missing tensors
    "half of a fused layer": (
        "int4", drop(f"{K}.weight_packed"), [("vllm", WRONG, "codes are not"), ("sglang", WRONG, "codes are not")],
    ),
    "NVFP4 without block scales": (
        "nvfp4", drop(f"{Q}.weight_scale"), [("vllm", REFUSED, "weight_scale is missing"), ("sglang", WRONG, "is missing")],
    ),
    # refused at load
    "GPTQ in the order of activations": (
        "gptq", edit(lambda c: c.update(desc_act=True)), [("vllm", REFUSED, "desc_act"), ("sglang", REFUSED, "desc_act")],
    ),
    "compressed-tensors in the order of activations": ("int4", group(actorder="group"), [(e, REFUSED, "actorder group") for e in ENGINES]),
    "GPTQ with zero points": ("gptq", edit(lambda c: c.update(sym=False)), [("vllm", REFUSED, "sym"), ("sglang", REFUSED, "sym")]),
    "ModelOpt's INT4": (
        "modelopt", both(*(edit(lambda c: (c.get("quantization") or c).update(quant_algo="W4A16_AWQ"), f)
                           for f in ("config.json", "hf_quant_config.json"))),
        [("vllm", REFUSED, "the algorithm W4A16_AWQ"), ("sglang", REFUSED, "W4A16_AWQ")],
    ),
    "kv_cache_scheme without `symmetric`": (
        "int4", add_kv(scheme={k: v for k, v in KV.items() if k != "symmetric"}), [("vllm", REFUSED, "`symmetric` is missing")],
    ),
    "a private key in a scheme": ("int4", group(quantkit="x"), [(e, REFUSED, "unknown keys") for e in ENGINES]),
    "INT4 experts in a mix": ("moe", edit(lambda c: c.update(format="mixed-precision")), [("sglang", REFUSED, "at the top is mixed")]),
    "MIXED_PRECISION without NVFP4": (
        "modelopt-fp8", edit(lambda c: c.update(quant_algo="MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "FP8"}})),
        [("sglang", REFUSED, "taken for w4afp8")],
    ),
    "a linear layer of no group": (
        "int4", edit(lambda c: c["config_groups"]["group_0"].update(targets=[r"re:.*self_attn\.(q|k|v|qkv|o)_proj$"])),
        [("sglang", REFUSED, "no config group targets"), ("vllm", REFUSED, "has this layer unquantised")],
    ),
    "float32 scales in a layer SGLang does not fuse": (
        "mla", tensors(lambda t: each(t, "q_b_proj.weight_scale", torch.Tensor.float)), [("sglang", REFUSED, "Downcasting")],
    ),
    "dense MXFP4": (
        "moe-mxfp4", both(edit(lambda c: c["ignore"].remove(f"{LAYER}mlp.down_proj")), tensors(lambda t: t.update({
            f"{LAYER}mlp.down_proj.weight_packed": torch.zeros(256, 256, dtype=torch.uint8),
            f"{LAYER}mlp.down_proj.weight_scale": torch.zeros(256, 16, dtype=torch.uint8),
        }) or t.pop(f"{LAYER}mlp.down_proj.weight"))), [("sglang", REFUSED, "no expert")],
    ),
    # slow
    "groups of 32 on Hopper": ("int4", lambda f: None, [("vllm", "slow", "no Machete kernel for group 32")]),
    "NVFP4 activations before Blackwell": (
        "nvfp4-a4", lambda f: None, [("vllm", "slow", "need SM100"), ("sglang", "slow", "need SM100")],
    ),
}  # fmt: skip
MODELOPT_ELSEWHERE = ("modelopt", "transformers", WRONG, "raw codes as weights")  # 13


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_found(trap: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    name, damage, expected = TRAPS[trap]
    folder = tmp_path / "broken"
    shutil.copytree(base(name), folder)
    before = {e: {(f.verdict, f.what) for f in look(folder, e).findings} for e in ENGINES}
    damage(folder)
    for engine, verdict, said in expected:
        found = {(f.verdict, f.what) for f in look(folder, engine).findings}
        hits = {(v, w) for v, w in found if v == verdict and re.search(said, w)}
        assert hits, (engine, sorted(found))
        assert verdict not in FAILS or hits - before[engine], "it was there before the damage"


def test_modelopt_is_nothing_for_transformers(base: Callable[[str], Path]) -> None:
    name, engine, verdict, said = MODELOPT_ELSEWHERE
    assert [(f.verdict, f.what) for f in failed(look(base(name), engine))] == [
        (verdict, f"no reader for ModelOpt: {said}")
    ]


def test_doubled_tensors_are_found(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(base("int4"), folder)
    save_tensors(folder, load_tensors(folder), 2)
    (first, *_) = sorted(folder.glob("model-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shutil.copy(first, folder / "model-00009-of-00009.safetensors")
    index["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = failed(look(folder, "sglang"))
    assert finding.verdict == WRONG
    assert "in two shards" in finding.what


TP: list[tuple[str, str, int, str, str]] = [
    ("int4", "vllm", 2, "", ""),
    ("int4", "vllm", 8, REFUSED, "4 attention heads do not divide by 8"),
    ("moe", "sglang", 8, REFUSED, "128 inputs / 8 is not a multiple of the group 32"),
    ("fp8", "sglang", 4, REFUSED, "is not a multiple of the block 128"),
    ("fp8", "vllm", 4, WRONG, "outputs / 2 is not a multiple of the block 128: rows of scales overlap"),
    ("moe-a4", "sglang", 4, REFUSED, "a multiple of 64 is needed"),
    ("awq", "sglang", 4, "slow", "the slow AWQ kernel"),
    ("moe", "vllm", 4, "slow", "off Marlin's tiles"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "engine", "tp", "verdict", "said"), TP)
def test_sizes_on_a_rank(name: str, engine: str, tp: int, verdict: str, said: str, base: Callable[[str], Path]) -> None:
    report = look(base(name), engine, tp)
    if not verdict:
        assert failed(report) == []
        return
    assert any(f.verdict == verdict and re.search(said, f.what) for f in report.findings), report.findings


def test_flags_and_kv_of_a_sound_checkpoint(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(base("int4"), folder)
    add_kv()(folder)
    for engine, flags in (("vllm", ("--tensor-parallel-size 2",)), ("sglang", ("--tp 2", "--kv-cache-dtype fp8_e4m3"))):
        report = look(folder, engine, 2)
        assert failed(report) == []
        assert report.flags == flags
        assert any(
            "KV scales reach attention and the FP8 cache is on" in f.what and f.count == 2 for f in report.findings
        )


def test_bad_arguments(base: Callable[[str], Path]) -> None:
    with pytest.raises(QuantkitError, match="unknown engine"):
        examine_folder(base("int4"), ["sgl"], [])
    with pytest.raises(QuantkitError, match="1 or more"):
        examine_folder(base("int4"), ["sglang"], [0])


def test_an_invalid_pattern_is_said(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(base("int4"), folder)
    edit(lambda c: c["ignore"].append("re:("))(folder)
    (finding,) = failed(look(folder, "vllm"))
    assert "is not valid" in finding.what
