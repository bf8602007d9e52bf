"""Which scheme an engine gives a layer, from the configuration alone: its own order of name, class and fused shards.

compressed-tensors  groups with targets; an ignore list first
modelopt            one algorithm and an exclude list, or `quantized_layers` with one each (MIXED_PRECISION)
fp8, awq            one scheme and a list of what stays as it is
gptq                one scheme; what is quantised is seen from the tensors (vLLM) or said in `dynamic` (SGLang)
mxfp4               the experts of gpt-oss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.export.engines.files import Files
from quantkit.export.engines.finding import Finding
from quantkit.export.engines.matching import Match, Names, names, whole
from quantkit.export.engines.modules import Layer
from quantkit.export.engines.rules import Rules

SchemeKind = Literal["int4", "nvfp4", "mxfp4", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "other"]
Inputs = Literal["none", "dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Stated:
    """A scheme as a configuration states it.

    group      inputs that share a scale; 0 for a whole row; None where there is none
    inputs     how activations are quantised: not, as they come, or under a stored scale
    algorithm  the configuration's own name for it
    """

    kind: SchemeKind
    group: int | None = None
    symmetric: bool = True
    inputs: Inputs = "none"
    algorithm: str = ""

    @property
    def title(self) -> str:
        """In words."""
        group = {None: "", 0: "-channel"}.get(self.group, f"-g{self.group}") if self.kind == "int4" else ""
        asym = "" if self.symmetric else " with zero points"
        inputs = {"none": "", "dynamic": ", dynamic activations", "static": ", activations under a stored scale"}
        return f"{self.kind}{group}{asym}{inputs[self.inputs]}" if self.kind != "other" else self.algorithm


Resolved = Stated | Finding | None  # None: not quantised


# ---- compressed-tensors ----


def stated_group(group: Mapping[str, Any]) -> Stated:
    """The scheme of one entry of `config_groups`."""
    w = group.get("weights") or {}
    a = group.get("input_activations") or {}
    inputs: Inputs = "none" if not a else ("dynamic" if a.get("dynamic") is True else "static")
    bits, kind, strategy = w.get("num_bits"), w.get("type", "int"), w.get("strategy")
    size, symmetric = w.get("group_size"), w.get("symmetric", True) is not False
    if (bits, kind) == (4, "int"):
        per_row = strategy == "channel" or size in (None, -1)
        return Stated("int4", 0 if per_row else int(size), symmetric, inputs)  # type: ignore[arg-type]
    if (bits, kind) == (4, "float"):
        return Stated("nvfp4" if strategy == "tensor_group" else "mxfp4", size, True, inputs)
    if (bits, kind) == (8, "float"):
        if strategy == "group" and size == 32:
            return Stated("mxfp8", 32, True, inputs)
        kinds: dict[Any, SchemeKind] = {"tensor": "fp8-tensor", "channel": "fp8-channel", "block": "fp8-block"}
        return Stated(kinds.get(strategy, "other"), None, symmetric, inputs, f"fp8 {strategy}")
    return Stated("other", size, symmetric, inputs, f"{bits}-bit {kind}")


@dataclass(frozen=True, slots=True)
class _Group:
    targets: Names
    scheme: Stated

    def has_class(self, name: str) -> bool:
        return any(t in name for t in self.targets.exact if "." not in t)


def _groups(quant: Mapping[str, Any], rules: Rules) -> list[_Group]:
    groups = (quant.get("config_groups") or {}).values()
    return [_Group(names(g.get("targets"), rules.named), stated_group(g)) for g in groups]


def _compressed(quant: Mapping[str, Any], layer: Layer, rules: Rules, groups: list[_Group], ignore: Names) -> Resolved:
    asked = [rules.named(n) for n in layer.asked]
    left = _left_out(rules.ignored, ignore, rules.named(layer.name), asked)
    if isinstance(left, Finding) or left:
        return left if isinstance(left, Finding) else None
    # experts count as linear layers, the head of vLLM and SGLang does not
    class_name = "Linear" if rules.head_is_linear or layer.kind != "head" else "ParallelLMHead"
    for step in rules.order:
        if step == "name":
            found = [g for g in groups if whole(g.targets, rules.named(layer.name))][:1]
        elif step == "class":
            found = [g for g in groups if g.has_class(class_name)][:1]
        else:
            each = [next((g for g in groups if whole(g.targets, n)), None) for n in asked]
            found = [g for g in each if g is not None] if None not in each else []
        if len({g.scheme for g in found}) > 1:
            return Finding("refused", layer.name, "shards of one layer fall into groups of different schemes",
                           "one scheme for all shards of a fused layer and for all experts")  # fmt: skip
        if found:
            return found[0].scheme
    if layer.kind == "head" or not rules.unmatched_refused:
        return None
    return Finding("refused", layer.name, "a linear layer that no config group targets and no ignore list names",
                   "name it in `ignore`, in full")  # fmt: skip


def _left_out(match: Match, listed: Names, name: str, asked: list[str]) -> bool | Finding:
    """Is the layer on the list by its own name, or by those of all its shards?"""
    if match(listed, name):
        return True
    each = [match(listed, n) for n in asked]
    if any(each) and not all(each):
        return Finding("refused", name, "some shards of a fused layer are on the ignore list, others are not",
                       "list all shards or none")  # fmt: skip
    return all(each)


def _listed(rules: Rules, match: Match, listed: Names, layer: Layer, method: str) -> bool | Finding:
    """As `_left_out`, for readers that ask for the experts of a layer as a whole."""
    own = rules.named(layer.name)
    if layer.kind != "experts":
        return _left_out(match, listed, own, [rules.named(n) for n in layer.asked])
    one = method in rules.experts_by_one and any(own in e for e in listed.entries)
    return one or match(listed, own)


# ---- the others ----

MODELOPT: dict[str, Stated] = {
    "FP8": Stated("fp8-tensor", inputs="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Stated("fp8-channel", inputs="dynamic"),
    "FP8_PB_WO": Stated("fp8-block", inputs="dynamic"),
    "FP8_BLOCK_SCALES": Stated("fp8-block", inputs="dynamic"),
    "NVFP4": Stated("nvfp4", 16, inputs="static"),
    "NVFP4_AWQ": Stated("nvfp4", 16, inputs="static"),
    "W4A16_NVFP4": Stated("nvfp4", 16),
    "W4A16_AWQ": Stated("int4", 128),
    "W4A8_AWQ": Stated("int4", 128, inputs="static"),
    "MXFP8": Stated("mxfp8", 32, inputs="dynamic"),
}


def modelopt_scheme(algorithm: str, quant: Mapping[str, Any], size: int | None = None) -> Stated:
    """The scheme of one `quant_algo`; `size` of a group as said for one layer, else what the configuration says."""
    found = MODELOPT.get(algorithm, Stated("other"))
    groups = list((quant.get("config_groups") or {}).values())
    if algorithm == "NVFP4" and groups and all(g.get("input_activations") is None for g in groups):
        found = MODELOPT["W4A16_NVFP4"]
    sizes = [size, quant.get("group_size"), *((g.get("weights") or {}).get("group_size") for g in groups)]
    group = next((n for n in sizes if n), None) if found.kind == "int4" else None
    return Stated(found.kind, group or found.group, found.symmetric, found.inputs, algorithm)


def _modelopt(quant: Mapping[str, Any], layer: Layer, rules: Rules, excluded: Names) -> Resolved:
    left = _listed(rules, rules.excluded, excluded, layer, "modelopt")
    if isinstance(left, Finding) or left:
        return left if isinstance(left, Finding) else None
    algorithm = str(quant.get("quant_algo"))
    if algorithm != "MIXED_PRECISION":
        return modelopt_scheme(algorithm, quant)
    layers = quant.get("quantized_layers") or {}
    entries = [layers.get(n) or {} for n in ([layer.name] if layer.name in layers else layer.asked)]
    said = {(e.get("quant_algo"), e.get("group_size")) for e in entries}
    if len(said) > 1:
        return Finding("refused", layer.name, "shards of one layer have different algorithms in `quantized_layers`",
                       "one algorithm for all shards of a fused layer and for all experts")  # fmt: skip
    ((one, size),) = said
    return None if one is None else modelopt_scheme(str(one), quant, size)


def _fp8(quant: Mapping[str, Any], layer: Layer, rules: Rules, skipped: Names) -> Resolved:
    if layer.kind == "head" and not rules.head_is_linear:
        return None
    left = _listed(rules, rules.skipped, skipped, layer, "fp8")
    if isinstance(left, Finding) or left:
        return left if isinstance(left, Finding) else None
    inputs: Inputs = "static" if quant.get("activation_scheme") == "static" else "dynamic"
    block = quant.get("weight_block_size")
    if block is None and rules.name == "transformers" and "weight_block_size" not in quant:
        block = [128, 128]
    return Stated("fp8-block" if block else "fp8-tensor", None, True, inputs)


def _kmajor(quant: Mapping[str, Any], layer: Layer, rules: Rules, skipped: Names, method: str) -> Resolved:
    if layer.kind == "head" and not quant.get("lm_head"):
        return None
    size = quant.get("group_size", quant.get("q_group_size", 128))
    symmetric = quant.get("sym", True) is not False if method == "gptq" else not quant.get("zero_point", True)
    scheme = Stated("int4", 0 if size == -1 else int(size), symmetric, algorithm=method)
    if rules.sees_int4 and not any(s.stored in ("gptq", "awq") for s in layer.shards):
        return None
    if method == "awq":
        return None if any(e in n for e in skipped.entries for n in (layer.name, *layer.asked)) else scheme
    left_out = names([f"re:{k[2:]}" for k in (quant.get("dynamic") or {}) if k.startswith("-:")])
    return None if whole(left_out, layer.name) or all(whole(left_out, n) for n in layer.asked) else scheme


def resolve(files: Files, layers: list[Layer], rules: Rules) -> dict[str, Resolved]:
    """Layer name -> its scheme, None when it is not quantised, or why the engine refuses it."""
    quant = rules.configuration(files)
    method = str(quant.get("quant_method") or "")
    listed = names(quant.get("ignore") or quant.get("exclude_modules"), rules.named)
    if method == "compressed-tensors":
        groups = _groups(quant, rules)
        return {x.name: _compressed(quant, x, rules, groups, listed) for x in layers}
    if method == "modelopt":
        return {x.name: _modelopt(quant, x, rules, listed) for x in layers}
    skipped = names(quant.get("ignored_layers") or quant.get("modules_to_not_convert"))
    if method == "fp8":
        return {x.name: _fp8(quant, x, rules, skipped) for x in layers}
    if method in ("gptq", "awq"):
        return {x.name: _kmajor(quant, x, rules, skipped, method) for x in layers}
    return {x.name: None for x in layers}
