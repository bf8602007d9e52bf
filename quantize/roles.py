"""What every tensor of a checkpoint is: embedding, attention.q, routed expert, router, part of the MTP layer ...

Pure: names, shapes and config.json in, one `Placed` per tensor out. Recipes match on these roles, the planner needs the
sets an engine fuses and the way it cuts a weight over GPUs. Names are looked up in the tables of `families.py` once per
*template* (a name with its numbers replaced), so 119,000 tensors cost about a second. Whether a tensor is quantised in
the source, and what an ignore list says about it, plays no part: published ignore lists name tensors that do not exist.

A tensor that no row of the tables fits gets the role `other`; in a model of an unknown family every assignment rests on
names and shapes alone. Both are said in `Family.assumptions`.

Shape legend: E experts, O outputs, I inputs (2I: gate and up rows of one gated MLP), H hidden size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.quantize import families
from quantkit.quantize.families import REPLICATED, ROW, Row

_NUMBER = re.compile(r"\.(\d{1,9})(?=\.|$)")
_LAYER = re.compile(r"(?:^|.*?\.)(?:layers|h|blocks|decoder_layers|mtp_layers)\.#\.")
_PARAMETER = re.compile(r"(.+?)(?:\.|(?<=_proj)_)(weight|bias)")
_PREFIX = re.compile(r"(?:(?:language_model|model|transformer|text_model)\.)*")
_NOT_LINEAR = re.compile(r".*(?:norm|ln_?\w*|embed\w*|pos_emb\w*|conv\w*)")
_SMALLEST_SIDE = 16  # a narrower 2-D weight of unknown name is taken for a table of constants


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of one tensor in its model.

    role    what it is; `mtp.<role>` inside a multi-token-prediction layer. Roles: embedding, lm_head, norm, router,
            router_bias, attention.{q,k,v,o,qkv,q_a,q_b,kv_a,kv_b,sinks,kv_scale}, indexer, dense_mlp, shared_experts,
            routed_experts, vision, projector, bias (of a linear layer), other
    layer   number of the decoder layer as written in the name; None outside the layers and in vision towers
    expert  number of the routed expert; None elsewhere and for a 3-D tensor that holds all experts
    part    gate, up, down or gate_up for the matrices of an MLP
    fused   key of the set an engine joins into one weight at load; None when it stands alone. Members of a set must
            share one scheme and whatever scale spans a whole tensor
    split   how tensor parallelism cuts it: `column` (outputs), `row` (inputs), `replicated`
    linear  a weight of a linear layer (2-D [O, I], or 3-D [E, O, I]) that a rule may quantise. False for routers, the
            indexer's weights_proj and eh_proj, which engines build unquantised, and for a tied head
    transposed  a 3-D weight stored as [E, I, O] (gpt-oss in BF16)
    """

    role: str
    layer: int | None
    expert: int | None
    part: str | None
    fused: str | None
    split: str
    linear: bool
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The model family, named by its `model_type`, and in plain sentences what had to be assumed about it."""

    name: str
    known: bool
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TpFacts:
    """Head counts that tensor parallelism divides. `mla`: the KV cache is one latent row, held whole by every rank."""

    heads: int
    kv_heads: int
    mla: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all tensors of one template have in common; `layer_at`, `expert_at` index the numbers of the name."""

    row: Row
    layer_at: int | None
    expert_at: int | None
    cut: int  # characters of the name after the parent module, replaced by the label of the fused set
    mtp: bool
    weight: bool  # a `.weight` or a bare parameter, not a bias
    recognised: bool
    roles: tuple[str, str]  # outside and inside a multi-token-prediction layer


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model (nested in multimodal models)."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return inner
    return config


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these keys that holds a positive whole number."""
    return next((config[k] for k in keys if type(config.get(k)) is int and config[k] > 0), None)


def tp_facts(config: Mapping[str, Any]) -> TpFacts:
    """Head counts of config.json; 0 where it does not say (nothing can then be checked)."""
    text = text_config(config)
    heads = _count(text, "num_attention_heads", "n_head") or 0
    return TpFacts(heads, _count(text, "num_key_value_heads") or heads, bool(text.get("kv_lora_rank")))


def matches_role(role: str, pattern: str) -> bool:
    """Does a rule's role pattern cover this role? Exact, a parent of dotted roles, or `*`.

    `attention` covers `attention.q`, `mtp` covers `mtp.routed_experts`; `routed_experts` does not cover the latter.
    """
    return pattern in ("*", role) or role.startswith(pattern + ".")


def attention_modules(placed: Mapping[str, Placed], prefix: str = "") -> dict[int, str]:
    """The attention module of each layer, as the checkpoint names it; `prefix` "mtp.": of the MTP layers instead."""
    found: dict[int, str] = {}
    for name, place in placed.items():
        if place.layer is not None and place.role.startswith(f"{prefix}attention.") and place.linear:
            found.setdefault(place.layer, name.rsplit(".", 2)[0])
    return found


def shared_inputs(placed: Mapping[str, Placed]) -> dict[str, str]:
    """Weight -> key of the set that engines keep one scale of activations for.

    A fused set has one input; of the experts of a layer gate and up have one scale, down another.
    """
    keys = {}
    for name, place in placed.items():
        if place.expert is not None:
            stem = name.partition(".experts.")[0]
            keys[name] = f"{stem}.experts.*.{'down' if place.part == 'down' else 'gate_up'}"
        elif place.fused is not None:
            keys[name] = place.fused
    return keys


def roles_of(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> tuple[dict[str, Placed], Family]:
    """The role of every tensor, and what is known of the family.

    `shapes` maps logical names to logical shapes: a quantised linear layer is one `X.weight` [O, I], its scales merged
    away. `config` is config.json as read. Never raises on an unknown model: what cannot be placed is `other`.
    """
    text = text_config(config)
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    kinds: dict[str, _Kind] = {}
    placed: dict[str, Placed] = {}
    counts: Counter[str] = Counter()
    others: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        pieces = _NUMBER.split(name.replace("#", "_"))
        template = ".#".join(pieces[::2])
        kind = kinds.get(template)
        if kind is None:
            kind = kinds[template] = _kind_of(template)
        row = kind.row
        layer = None if kind.layer_at is None else int(pieces[kind.layer_at])
        expert = None if kind.expert_at is None else int(pieces[kind.expert_at])
        mtp = kind.mtp or (layer is not None and layers is not None and layer >= layers)
        linear = row.linear and kind.weight and _is_matrix(shape, kind)
        fused = name[: -kind.cut] + row.fused if row.fused and linear else None
        if fused:
            counts[fused] += 1
        if not kind.recognised:
            others.setdefault(template, []).append(name)
        placed[name] = Placed(kind.roles[mtp], layer, expert, row.part, fused, row.split, linear)
    for name, place in placed.items():
        if place.fused and counts[place.fused] == 1:
            placed[name] = replace(place, fused=None)
    if tied:
        placed |= {n: replace(p, linear=False) for n, p in placed.items() if p.role == "lm_head"}
    title, known = _name_of(config, text)
    notes = [] if known else _say_names(title, kinds)
    notes += _say_mtp(text, layers, placed)
    notes += [_say_other(t, [shapes[n] for n in names], placed[names[0]].linear) for t, names in others.items()]
    notes += _orient_experts(placed, shapes, text)
    return placed, Family(title, known, tuple(notes))


def _kind_of(template: str) -> _Kind:
    """Look one template up in the tables."""
    parameter = _PARAMETER.fullmatch(template)
    path, leaf = (parameter[1], parameter[2]) if parameter else (template, "")
    inside = _LAYER.match(path)
    mtp = re.fullmatch(families.MTP, path) is not None
    for pattern, role in ((families.PROJECTOR, "projector"), (families.VISION, "vision")):
        if re.fullmatch(pattern, path):
            matrix = leaf == "weight" and _NOT_LINEAR.fullmatch(path.rpartition(".")[2]) is None
            return _Kind(Row("", role, linear=matrix), None, None, 0, False, leaf == "weight", True, (role, role))
    tail = path[inside.end() :] if inside else path[_end_of_prefix(path) :]
    if mtp and not inside:
        tail = tail.removeprefix("mtp.")
    if leaf == "bias" and re.fullmatch(r"(?:\w+\.)?(?:gate|router)", tail):
        row, found = Row("", "router_bias", linear=False), True
    else:
        table = families.IN_LAYER if inside or mtp else families.OUTSIDE
        hit = next((r for r in table if re.fullmatch(r.path, tail)), None)
        row, found = hit or Row("", "other", linear=inside is not None), hit is not None or (mtp and not inside)
    if leaf == "bias" and row.role not in ("norm", "router_bias", "other"):
        split = REPLICATED if row.split == ROW else row.split
        row = Row("", "bias", None, None, split, linear=False)
    numbers = [m.start() for m in re.finditer(r"\.#", template)]
    layer_at = 2 * numbers.index(inside.end() - 3) + 1 if inside else None
    expert = re.search(r"\.experts\.#", template)
    expert_at = 2 * numbers.index(expert.end() - 2) + 1 if expert else None
    cut = len(template) - len(path.rpartition(".")[0]) - 1
    weight = leaf == "weight" or (not leaf and row.role == "routed_experts")
    return _Kind(row, layer_at, expert_at, cut, mtp, weight, found, (row.role, "mtp." + row.role))


def _end_of_prefix(path: str) -> int:
    match = _PREFIX.match(path)
    return match.end() if match else 0


def _is_matrix(shape: tuple[int, ...], kind: _Kind) -> bool:
    """2-D, or 3-D where all experts share a tensor; both sides of some size where only the name's ending speaks."""
    if kind.row.role == "routed_experts" and kind.expert_at is None:
        return len(shape) == 3
    if len(shape) != 2:
        return False
    return bool(kind.row.path) or min(shape) >= _SMALLEST_SIDE


def _orient_experts(
    placed: dict[str, Placed], shapes: Mapping[str, tuple[int, ...]], text: Mapping[str, Any]
) -> list[str]:
    """Find 3-D experts stored [E, I, O] by comparing with the hidden size; the gate_up tensor decides for its layer."""
    stacked = [n for n, p in placed.items() if p.linear and len(shapes[n]) == 3]
    hidden = text.get("hidden_size")
    usual = text.get("model_type") in families.TRANSPOSED_EXPERTS
    by_layer: dict[str, bool] = {}
    unclear: list[str] = []
    for name in stacked:
        a, b = shapes[name][1:]
        if (a == hidden) != (b == hidden):
            down = placed[name].part == "down"
            by_layer[name.rpartition(".")[0]] = (a == hidden) != down
    for name in stacked:
        parent = name.rpartition(".")[0]
        if parent not in by_layer:
            unclear.append(name)
        if by_layer.get(parent, usual):
            placed[name] = replace(placed[name], transposed=True)
    order = "[experts, inputs, outputs]" if usual else "[experts, outputs, inputs]"
    return [f"assumed: 3-D experts are stored {order}: the shape of {unclear[0]} fits both"] if unclear else []


def _name_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, bool]:
    """The family's `model_type` and whether its tensors are known here."""
    types = [str(t) for t in (config.get("model_type"), text.get("model_type")) if t]
    known = next((t for t in types if t in families.KNOWN), None)
    return (known, True) if known else (types[0] if types else "unknown", False)


def _say_names(name: str, kinds: Mapping[str, _Kind]) -> list[str]:
    """What an unknown family rests on."""
    said = [f"model_type is {name!r}, not a family known here: roles were read from tensor names and shapes alone"]
    for template, kind in kinds.items():
        if kind.recognised and kind.row.linear and kind.weight and kind.row.role not in ("vision", "projector"):
            said.append(f"assumed: {_star(template)} is {kind.roles[kind.mtp]}, by its name")
    return said


def _say_mtp(text: Mapping[str, Any], layers: int | None, placed: Mapping[str, Placed]) -> list[str]:
    """Where the number of decoder layers had to decide without a count of prediction layers."""
    if layers is None:
        return ["assumed: no multi-token-prediction layer, since config.json has no num_hidden_layers"]
    extra = {p.layer for p in placed.values() if p.layer is not None and p.layer >= layers}
    if not extra or text.get("num_nextn_predict_layers"):
        return []
    numbers = ", ".join(map(str, sorted(extra)))
    return [f"assumed: layer {numbers} predicts further tokens (MTP), since config.json counts {layers} layers"]


def _say_other(template: str, shapes: list[tuple[int, ...]], linear: bool) -> str:
    where = f"{_star(template)} ({len(shapes)} tensor{'s' if len(shapes) > 1 else ''}, first {list(shapes[0])})"
    if linear:
        return f"assumed: {where} is a linear layer: 2-D weight in a decoder layer; name not known, so role `other`"
    return f"not known: {where} has the role `other`"


def _star(template: str) -> str:
    return template.replace("#", "*")
