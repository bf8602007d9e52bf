"""KV scales under the names that an engine loads, both sides of each pair, and SGLang's JSON of them.

A scale under another name is dropped by engines with at most a warning, and the cache runs at 1.0. A missing side is
taken from SGLang's JSON, which has the larger of the two, or is that of the other side, as SGLang itself takes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from quantkit.export.checkpoint import Reader, has_fp8_kv, quantization_config, text_config
from quantkit.export.kv_json import check_file, scales_json
from quantkit.export.kv_scales import kv_rules
from quantkit.export.repair.draft import Change, Draft
from quantkit.export.safetensors_file import TensorInfo
from quantkit.kernels.errors import QuantkitError

# What follows the attention module's name in checkpoints of all tools; `{}` is k or v.
_FORMS = (
    "{}_scale", "{}_proj.{}_scale", "attn.{}_scale", "attn.attn.{}_scale", "qkv_proj.{}_scale", "qkqkv_proj.{}_scale",
    "attn_mqa.{}_scale", "mla_attn.{}_scale", "{}_cache.scale", "{}_proj.output_scale", "{}_proj.{}_cache_scale",
    "{}_cache_scale",
)  # fmt: skip
_BOTH = ("kv_scale", "kv_cache_scale")
Sides = dict[str, list[TensorInfo]]


def mend_kv(draft: Draft, modules: Mapping[int, str], engine: str, reader: Reader) -> None:
    """Rename, complete and convert KV scales; `modules` maps layers to their attention modules."""
    found = {layer: _sides(draft, module) for layer, module in modules.items()}
    found = {layer: sides for layer, sides in found.items() if sides}
    by_json = _from_json(draft)
    text = text_config(draft.config)
    layers = range(int(text.get("num_hidden_layers") or 0))
    wanted = set(layers) & modules.keys()
    if not has_fp8_kv(draft.config) or not (found or by_json):
        return
    rules = kv_rules(engine, str(quantization_config(draft.config).get("quant_method")), text)
    if rules.values != "measured" or any(
        t.shape != () and np.prod(t.shape) != 1 for s in found.values() for v in s.values() for t in v
    ):
        return  # an engine without names for them, or scales of heads, which only vLLM reads and under one name
    if lost := sorted(wanted - found.keys() - by_json.keys()):
        raise QuantkitError(
            "layers have no KV scale, others do: an engine would run them at 1.0", file=draft.folder,
            value=f"layers {', '.join(map(str, lost[:8]))}", hint="calibrate again: no file here holds those scales",
        )  # fmt: skip
    like = next(iter(draft.tensors.values()))
    counts = dict.fromkeys(("renamed", "completed", "converted"), 0)
    for layer in sorted(found.keys() | wanted):
        sides = found.get(layer, {})
        names = {f"{modules[layer]}.{n}": kind for pair in rules.names for n, kind in zip(pair, "kv", strict=True)}
        if all(n in draft.tensors and draft.tensors[n].dtype == "F32" for n in names):
            continue  # what stands beside them is for another engine
        values = {kind: _one(draft, infos, reader) for kind, infos in sides.items()}
        counts["completed"] += 2 - len(values)
        values = _completed(values, by_json.get(layer))
        old = {t.name for infos in sides.values() for t in infos}
        near = next((infos[0] for infos in sides.values()), like)
        counts["renamed"] += any(n not in draft.tensors for n, kind in names.items() if kind in sides)
        for name in old - names.keys():
            draft.tensors.pop(name, None)
            draft.fresh.pop(name, None)
        for name, kind in names.items():
            info = draft.tensors.get(name)
            if info is None or info.dtype != "F32":
                counts["converted"] += info is not None
                draft.set_number(name, values[kind], info or near)
    _report(draft, counts, rules.names[0])


def _report(draft: Draft, counts: Mapping[str, int], names: tuple[str, str]) -> None:
    if counts["renamed"]:
        draft.changes.append(
            Change(f"KV scales of {counts['renamed']} layers have the names that load: {' and '.join(names)}")
        )
    if counts["completed"]:
        draft.changes.append(Change(
            f"{counts['completed']} missing KV scales: from SGLang's JSON where it has the layer, else that of the "
            "other side; values beyond 448 times it would be clipped"
        ))  # fmt: skip
    if counts["converted"]:
        draft.changes.append(Change(f"{counts['converted']} KV scales are float32 again"))


def _sides(draft: Draft, module: str) -> Sides:
    """Of k and of v the tensors that hold the scale, in the order of the forms."""
    found: Sides = {}
    for kind in "kv":
        names = [f"{module}.{form.replace('{}', kind)}" for form in _FORMS] + [f"{module}.{n}" for n in _BOTH]
        infos = [draft.tensors[n] for n in names if n in draft.tensors]
        if infos:
            found[kind] = infos
    return found


def _one(draft: Draft, infos: list[TensorInfo], reader: Reader) -> float:
    values = {draft.number(t.name, reader) for t in infos}
    if len(values) > 1:
        raise QuantkitError(
            "one KV scale has several values under several names", file=infos[0].file, tensor=infos[0].name,
            value=sorted(values), hint="remove the tensor that is stale",
        )  # fmt: skip
    return values.pop()


def _completed(values: Mapping[str, float], larger: float | None) -> dict[str, float]:
    """Both sides; `larger` is the JSON's number, the larger of the two."""
    if len(values) == 2:
        return dict(values)
    if not values:
        assert larger is not None
        return {"k": larger, "v": larger}
    ((side, value),) = values.items()
    other = larger if larger is not None and larger > value else value
    return {side: value, "v" if side == "k" else "k": other}


def _json_files(folder: Path) -> dict[int, Path]:
    named = ((p, re.fullmatch(r"kv_cache_scales\.tp(\d+)\.json", p.name)) for p in sorted(folder.glob("*.json")))
    return {int(m[1]): p for p, m in named if m}


def _from_json(draft: Draft) -> dict[int, float]:
    """Scales by layer, from the first file of them whose numbers can be read."""
    import json

    for path in _json_files(draft.folder).values():
        try:
            ranks = json.loads(path.read_text(encoding="utf-8"))["kv_cache"]["scaling_factor"]
            scales = {int(n): max(float(r[n]) for r in ranks.values()) for n in next(iter(ranks.values()))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            continue
        if scales and all(np.isfinite(s) and s > 0 for s in scales.values()):
            return scales
    return {}


def mend_json(draft: Draft, modules: Mapping[int, str], reader: Reader) -> None:
    """Write SGLang's files again that it would not take, from the tensors or else from the numbers of an old file."""
    text = text_config(draft.config)
    layers, kind = int(text.get("num_hidden_layers") or 0), str(text.get("model_type"))
    for tp, path in _json_files(draft.folder).items():
        faults = check_file(path, tp=tp, num_layers=layers, model_type=kind)
        if not faults:
            continue
        pairs: dict[int, tuple[float, float]] = {n: (s, s) for n, s in _from_json(draft).items()}
        for layer, module in modules.items():
            sides = _sides(draft, module)
            if len(sides) == 2 and all(np.prod(t.shape) == 1 for v in sides.values() for t in v):
                pairs[layer] = (_one(draft, sides["k"], reader), _one(draft, sides["v"], reader))
        if any(n not in pairs for n in range(layers)):
            raise QuantkitError(
                "SGLang would not take the file, and nothing holds its scales", file=path, value=faults[0],
                hint="remove it, or calibrate again",
            )  # fmt: skip
        draft.files[path.name] = scales_json(kind, layers, pairs, tp)
        draft.changes.append(Change(f"{path.name}: written anew ({faults[0]})"))
