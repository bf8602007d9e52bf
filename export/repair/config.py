"""`quantization_config` and hf_quant_config.json, made to say what the tensors are: lists can be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import NESTED, has_fp8_kv, quantization_config, read_json, with_quantization
from quantkit.export.formats import Layer, format_module
from quantkit.export.repair.draft import NEEDS_SOURCE, Change, Draft
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.packed import input_scale_tensor
from quantkit.export.targets import with_fused_names
from quantkit.export.verify import check_config
from quantkit.kernels.errors import QuantkitError

_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")


def mend_config(draft: Draft, weights: Mapping[str, Weight], linear: Sequence[str], empty: Path, *, ours: bool) -> None:
    """The list of layers that are not quantised, then the groups, as far as they are wrong.

    linear  names of all linear weights;  empty  a folder without hf_quant_config.json;  ours  quantkit has written it
    """
    nested = read_json(draft.folder / NESTED) if (draft.folder / NESTED).is_file() else None
    if check_config(draft.checkpoint(), weights, linear, ours=ours).passed:
        return
    old = quantization_config(draft.config)
    ignore = _ignore(old, weights, linear)
    if not old:
        _set(draft, _rebuilt(draft, weights, linear, ignore), "config.json: quantization_config made from the tensors")
    elif not check_config(draft.checkpoint(empty), weights, linear, ours=ours).passed:
        key = next((k for k in _LISTS if k in old), "ignore")
        draft.config = with_quantization(draft.config, {**old, key: ignore})
        if check_config(draft.checkpoint(empty), weights, linear, ours=ours).passed:
            _set(draft, {}, f"config.json: {key} lists the {len(ignore)} layers that are not quantised")
        else:
            made = _rebuilt(draft, weights, linear, ignore)
            _set(draft, made, "config.json: quantization_config made from the tensors, it described others")
    failures = check_config(draft.checkpoint(empty), weights, linear, ours=ours).failures
    if failures:
        raise QuantkitError(
            "the configuration does not describe the tensors, and cannot be made from them", file=draft.folder,
            value="; ".join(failures[:5]), hint=NEEDS_SOURCE,
        )  # fmt: skip
    if isinstance(nested, dict):
        _mend_nested(draft, nested, weights, linear)


def _set(draft: Draft, made: Mapping[str, Any], what: str) -> None:
    if made:
        draft.config = with_quantization(draft.config, made["config.json"])
        draft.files |= {n: c for n, c in made.items() if n != "config.json"}
    draft.files["config.json"] = draft.config
    draft.changes.append(Change(what))


def _ignore(old: Mapping[str, Any], weights: Mapping[str, Weight], linear: Sequence[str]) -> list[str]:
    """Every linear layer that is not quantised, in full; names that have no tensor, such as a tied head's, stay."""
    experts = old.get("quant_method") in ("modelopt", "fp8")
    plain = [weights[n].module for n in linear if weights[n].encoding == "plain"]
    quantized = [w.module for w in weights.values() if w.encoding != "plain"]
    known = set(with_fused_names(sorted(w.module for w in weights.values()), experts=True))
    listed = (e for k in _LISTS for e in old.get(k) or [] if not e.startswith("re:") and "*" not in e)
    kept = [e for e in listed if e not in known and not any(m.startswith(f"{e}.") for m in quantized)]
    return list(dict.fromkeys([*with_fused_names(plain, experts=experts), *kept]))


def _layers(weights: Mapping[str, Weight], linear: Sequence[str]) -> list[Layer]:
    unknown = [n for n in linear if weights[n].encoding != "plain" and weights[n].scheme is None]
    if unknown:
        raise QuantkitError(
            "a layer is stored in a way that no configuration of ours describes", tensor=unknown[0],
            value=weights[unknown[0]].encoding, hint=NEEDS_SOURCE,
        )  # fmt: skip
    return [
        Layer(weights[n].module, weights[n].scheme, static_input=input_scale_tensor(weights[n]) is not None)
        for n in linear
    ]


def _rebuilt(
    draft: Draft, weights: Mapping[str, Weight], linear: Sequence[str], ignore: Sequence[str]
) -> Mapping[str, Any]:
    method = str(quantization_config(draft.config).get("quant_method") or _method(draft))
    made = format_module(method).config(_layers(weights, linear), ignore, fp8_kv=has_fp8_kv(draft.config))
    if not made:
        raise QuantkitError("no configuration describes these tensors", file=draft.folder, hint=NEEDS_SOURCE)
    return made


def _method(draft: Draft) -> str:
    """The dialect of the tensors' names."""
    names = tuple(draft.tensors)
    if any(n.endswith(".weight_scale_2") for n in names):
        return "modelopt"
    return "fp8" if any(n.endswith(".weight_scale_inv") for n in names) else "compressed-tensors"


def _mend_nested(draft: Draft, nested: Mapping[str, Any], weights: Mapping[str, Weight], linear: Sequence[str]) -> None:
    """Both files name the algorithm of the tensors and the same layers; engines differ on which one wins."""
    config = dict(quantization_config(draft.config))
    ignore = list(config.get("ignore") or [])
    layers = [layer for layer in _layers(weights, linear) if layer.scheme is not None]
    if len({(layer.scheme, layer.static_input) for layer in layers}) == 1:
        made = format_module("modelopt").config(layers, ignore, fp8_kv=has_fp8_kv(draft.config))
        config["quant_algo"] = made["config.json"]["quant_algo"]
    elif "quant_algo" not in config:
        raise QuantkitError("mixed layers, and config.json does not name the algorithm", file=draft.folder / NESTED)
    if config != quantization_config(draft.config):
        draft.config = with_quantization(draft.config, config)
        draft.files["config.json"] = draft.config
    inner = {**(nested.get("quantization") or {}), "quant_algo": config["quant_algo"], "exclude_modules": ignore}
    inner["kv_cache_quant_algo"] = "FP8" if has_fp8_kv(draft.config) else inner.get("kv_cache_quant_algo")
    draft.files[NESTED] = {**nested, "quantization": inner}
    draft.changes.append(Change(f"{NESTED} and config.json say the same: {config['quant_algo']}, by the tensors"))
