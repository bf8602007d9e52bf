"""ModelOpt's shipped recipes, `modelopt:general/ptq/...`, as recipes of ours: their files are read, ModelOpt is not.

A recipe of ModelOpt switches quantisers on and off by patterns of their names, later entries over earlier ones. Its
entries are carried out here on the names of a standard model, some for each of our roles; what is on in the end becomes
a rule for the role. What a rule cannot say is refused by its key: formats that we do not write, entries that tell apart
what our roles do not, other quantisers than those of weights, inputs, keys and values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from quantkit.kernels.errors import QuantkitError

PREFIX = "modelopt:"
SHIPPED = "general/ptq"  # those that `quantkit recipes` lists: for any model
_LAYERS = (0, 11)

# role: names of its layers in models
_NAMES: dict[str, tuple[str, ...]] = {
    "attention.q": ("self_attn.q_proj",),
    "attention.k": ("self_attn.k_proj",),
    "attention.v": ("self_attn.v_proj",),
    "attention.qkv": ("self_attn.qkv_proj",),
    "attention.q_a": ("self_attn.q_a_proj",),
    "attention.q_b": ("self_attn.q_b_proj",),
    "attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "attention.o": ("self_attn.o_proj",),
    "dense_mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared_experts": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj"),
    "routed_experts": ("mlp.experts.0.gate_proj", "mlp.experts.17.down_proj", "block_sparse_moe.experts.3.w1"),
}
_OTHERS = ("q_bmm_quantizer", "p_bmm_quantizer", "softmax_quantizer")
_KEYS = {"quantizer_name", "cfg", "enable", "parent_class"}
_IGNORED = {"effective_bits"}  # a number for reports
# options of an algorithm that say how it runs, not what comes out: a calibration run is layer by layer in any case
_RUNNING = {"method", "layerwise", "skip_forward_without_activation_calib"}

_NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "scale_bits": "e4m3"}}
_FP8 = {"num_bits": "e4m3"}
_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    (_NVFP4, "nvfp4"),
    ({"num_bits": "e2m1", "block_sizes": {-1: 32, "scale_bits": "e8m0"}}, "mxfp4"),
    (_FP8, "fp8-tensor"),
    *(({"num_bits": 4, "block_sizes": {-1: g}}, f"int4-g{g}") for g in (32, 64, 128)),
]


def folder() -> Path | None:
    """Where the recipes of an installed ModelOpt lie; None without one."""
    spec = find_spec("modelopt_recipes")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def shipped_by_modelopt() -> list[str]:
    """Names of the recipes for any model; none without ModelOpt."""
    root = folder()
    files = sorted((root / SHIPPED).glob("*.yaml")) if root is not None else []
    return [f"{PREFIX}{SHIPPED}/{f.stem}" for f in files]


def modelopt_recipe(source: str) -> dict[str, Any]:
    """The content of a recipe of ours for `modelopt:NAME`.

    Raises QuantkitError without ModelOpt, for an unknown name, and for every key that cannot be translated.
    """
    root, name = folder(), source.removeprefix(PREFIX).removesuffix(".yaml")
    if root is None:
        raise QuantkitError(
            "ModelOpt, whose recipe this is, is not installed", value=source, hint="pip install 'quantkit[modelopt]'"
        )
    if not (root / f"{name}.yaml").is_file():
        raise QuantkitError("ModelOpt has no such recipe", value=source, allowed=", ".join(shipped_by_modelopt()))
    data = _load(root, name)
    if not isinstance(data, dict) or data.get("metadata", {}).get("recipe_type") != "ptq":
        raise _refused(source, "metadata.recipe_type", "only `ptq` recipes say what to write")
    quantize = data["quantize"]
    on = _evaluated(source, quantize["quant_cfg"])
    method, input_rule = _algorithm(source, quantize.get("algorithm"))
    cache = _cache(source, on)
    return {
        "weights": [*_rules(source, on, method, input_rule), {"match": {"role": "*"}, "keep": True}],
        **({"kv_cache": cache} if cache else {}),
    }


def _load(root: Path, name: str) -> Any:
    """A file with its imports put in: in a list they are spliced, in a mapping what stands beside them wins."""
    documents = list(yaml.safe_load_all((root / f"{name}.yaml").read_text(encoding="utf-8")))
    imports: dict[str, str] = {}
    body: Any = None
    for document in documents:
        if isinstance(document, dict) and "imports" in document:
            imports |= document.pop("imports")
        body = document or body
    return _filled(body, root, imports)


def _filled(node: Any, root: Path, imports: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        found: list[Any] = []
        for item in node:
            value = _filled(item, root, imports)
            found += value if isinstance(value, list) else [value]
        return found
    if not isinstance(node, dict):
        return node
    rest = {k: _filled(v, root, imports) for k, v in node.items() if k != "$import"}
    if "$import" not in node:
        return rest
    base = _load(root, imports[node["$import"]])
    return base if isinstance(base, list) else {**base, **rest}


def _quantisers() -> Iterator[str]:
    for layer in _LAYERS:
        for name in (n for names in _NAMES.values() for n in names):
            for kind in ("weight", "input", "output"):
                yield f"model.layers.{layer}.{name}.{kind}_quantizer"
        for kind in ("k_bmm_quantizer", "v_bmm_quantizer", *_OTHERS):
            yield f"model.layers.{layer}.self_attn.{kind}"


def _evaluated(source: str, entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The configuration of every quantiser that is on in the end."""
    on: dict[str, dict[str, Any]] = {}
    names = list(_quantisers())
    for entry in entries:
        strange = set(entry) - _KEYS
        if strange:
            raise _refused(source, f"quant_cfg.{min(strange)}", "an unknown key")
        enabled = entry.get("enable", True)
        if "parent_class" in entry:
            if enabled:
                raise _refused(source, "quant_cfg.parent_class", "rules go by role and name")
            continue
        for name in fnmatch.filter(names, entry["quantizer_name"]):
            if not enabled:
                on.pop(name, None)
            elif "cfg" in entry:
                on[name] = {k: v for k, v in entry["cfg"].items() if k not in _IGNORED and v is not None}
    for name in on:
        if name.endswith(("output_quantizer", *_OTHERS)):
            raise _refused(source, f"quant_cfg: {name.rpartition('.')[2]}", "no format has a place for it")
    return on


def _rules(source: str, on: Mapping[str, Any], method: Any, input_rule: str) -> Iterator[dict[str, Any]]:
    """A rule for all roles that are quantised alike."""
    alike: list[tuple[dict[str, Any], list[str]]] = []
    for role, names in _NAMES.items():
        both = [
            tuple(on.get(f"model.layers.{n}.{name}.{kind}_quantizer") for kind in ("weight", "input"))
            for n in _LAYERS for name in names
        ]  # fmt: skip
        if any(found != both[0] for found in both):
            raise _refused(source, "quant_cfg", f"it tells apart layers of the role {role}")
        weight, inputs = both[0]
        if weight is None and inputs is not None:
            raise _refused(source, "quant_cfg: input_quantizer", f"weights of the role {role} are not quantised")
        if weight is None:
            continue
        said = _scheme(source, weight, inputs, method, input_rule)
        same = next((roles for rule, roles in alike if rule == said), None)
        if same is None:
            alike.append((said, [role]))
        else:
            same.append(role)
    if not alike:
        raise _refused(source, "quant_cfg", "it quantises no layer of a decoder")
    for said, roles in alike:
        yield {"match": {"role": roles}, **said}


def _scheme(source: str, weight: dict[str, Any], inputs: Any, method: Any, input_rule: str) -> dict[str, Any]:
    name = next((name for numbers, name in _WEIGHTS if _numbers(weight) == numbers), None)
    if name is None:
        raise _refused(source, "quant_cfg: weight_quantizer", f"no scheme of ours: {weight}")
    said: dict[str, Any] = {"scheme": name, **({} if method is None else {"method": method})}
    if method == "sweep" and name != "nvfp4":
        raise _refused(source, "algorithm: fp8_scale_sweep", f"it is for nvfp4, here: {name}")
    if inputs is None:
        if name == "fp8-tensor":
            raise _refused(source, "quant_cfg: input_quantizer", "fp8-tensor quantises inputs as well")
        return said
    if inputs.get("constant_amax") is not None and name == "nvfp4":
        constant = float(inputs["constant_amax"]) / (6 * 448)
        inputs = {k: v for k, v in inputs.items() if k != "constant_amax"}
        return said | {"input_scale": constant} if _numbers(inputs) == _NVFP4 else _no_inputs(source, inputs)
    if (name, _numbers(inputs)) in (("nvfp4", _NVFP4), ("fp8-tensor", _FP8)):
        rule: Any = input_rule if input_rule != "amax" else {"rule": "amax", "headroom": 1.0}
        return said | {"input_scale": rule}
    return _no_inputs(source, inputs)


def _no_inputs(source: str, inputs: Any) -> dict[str, Any]:
    raise _refused(source, "quant_cfg: input_quantizer", f"no activations of ours: {inputs}")


def _numbers(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without `type`: whether block scales are computed when a model is quantised or when it runs."""
    blocks = cfg.get("block_sizes")
    if not isinstance(blocks, dict):
        return dict(cfg)
    return {**cfg, "block_sizes": {k: v for k, v in blocks.items() if k != "type"}}


def _algorithm(source: str, algorithm: Any) -> tuple[Any, str]:
    """(method of weights, rule of input scales)."""
    said = {"method": algorithm} if not isinstance(algorithm, dict) else dict(algorithm)
    method = said["method"]
    options = {k: v for k, v in said.items() if k not in _RUNNING}
    if method in (None, "max") and not options:
        return "plain", "amax"
    if method == "mse" and options == {"fp8_scale_sweep": True}:
        return "sweep", "amax"
    if method == "gptq" and not options:
        return "gptq", "amax"
    published = {"anchor_percentile": 1, "upper_percentile": 99.99, "rho": 16384}
    if method == "nvfp4_act_headroom" and options.pop("weight_scale_algorithm", {"method": "max"}) == {"method": "max"}:
        strange = [k for k, v in options.items() if published.get(k) != v]
        if not strange:
            return "plain", "nvfp4_act_headroom"
        raise _refused(source, f"algorithm.{strange[0]}", f"ours is {published.get(strange[0])}")
    raise _refused(source, f"algorithm: {method}", f"options: {options}" if options else "not offered in a recipe")


def _cache(source: str, on: Mapping[str, Any]) -> dict[str, Any] | None:
    found = [cfg for name, cfg in on.items() if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer"))]
    if not found:
        return None
    if any(cfg.get("use_constant_amax") for cfg in found):
        raise _refused(
            source, "quant_cfg: use_constant_amax", "scales of a KV cache are measured (recipes `...-kv_fp8`)"
        )
    if any(cfg != _FP8 for cfg in found) or len(found) != 2 * len(_LAYERS):
        raise _refused(source, "quant_cfg: [kv]_bmm_quantizer", "a KV cache is fp8_e4m3, keys and values")
    return {"dtype": "fp8_e4m3", "rule": "amax", "headroom": 1.0}


def _refused(source: str, key: str, why: str) -> QuantkitError:
    return QuantkitError(
        "a recipe of ModelOpt that cannot be translated", file=source, value=key, allowed=why,
        hint="write a recipe of your own: `quantkit recipes NAME` prints one to start from",
    )  # fmt: skip
