"""Checks of a checkpoint from its own files: names, headers, companions, scales, configuration.

Nothing here trusts the code that wrote the files: headers are read again, every scale is read and looked at.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quantkit.export.checkpoint import INDEX, NESTED, Checkpoint, Reader, quantization_config, read_json, text_config
from quantkit.export.kv_json import check_file
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.rows import scale_values


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was looked at, and each failure in a line."""

    name: str
    value: str
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No failure."""
        return not self.failures


def check_files(checkpoint: Checkpoint, manifest: Mapping[str, Any] | None) -> list[Check]:
    """Index, stray files, and the headers against those that were planned."""
    folder = checkpoint.folder
    failures = []
    index = folder / INDEX
    if index.is_file():
        total = (read_json(index).get("metadata") or {}).get("total_size")
        if total != checkpoint.nbytes:
            failures.append(f"{INDEX}: total_size is {total}, the tensors have {checkpoint.nbytes} bytes")
    stray = [p for p in sorted(folder.glob("*.safetensors")) if p not in checkpoint.files]
    failures += [f"{p.name}: a weight file that is not part of the checkpoint; engines load it" for p in stray]
    files = f"{len(checkpoint.tensors)} tensors in {len(checkpoint.files)} files, {checkpoint.nbytes} bytes"
    checks = [Check("headers, index and files agree", files, tuple(failures))]
    if manifest is not None:
        planned: Mapping[str, str] = manifest.get("headers") or {}
        failures = [f"{name}: the planned shard is missing" for name in planned if not (folder / name).is_file()]
        for file in checkpoint.files:
            with file.open("rb") as f:
                length = f.read(8)
                header = length + f.read(int.from_bytes(length, "little"))
            if planned.get(file.name) != hashlib.sha256(header).hexdigest():
                failures.append(f"{file.name}: its tensors are not those of the plan")
        checks.append(
            Check("every planned tensor is there once, nothing else", f"{len(planned)} shards", tuple(failures))
        )
    return checks


def check_scales(weights: Mapping[str, Weight], reader: Reader) -> Check:
    """No scale is zero, negative where it must not be, infinite or NaN. (INT4 scales may be negative: signed range.)

    Nor is there one without the codes it belongs to: they were lost.
    """
    failures = [
        f"{n}: a scale without a weight"
        for n in weights
        if n.endswith((".weight_scale", ".weight_scale_inv", ".scales"))
        and f"{n.rpartition('.')[0]}.weight" not in weights
    ]
    seen = 0
    for weight in weights.values():
        for kind in ("scale", "multiplier", "divisor"):
            info = weight.parts.get(kind)
            if info is None or weight.encoding == "plain":
                continue
            seen += 1
            values = scale_values(info, reader.read(info))
            finite = np.isfinite(values)
            if not finite.all():
                failures.append(f"{info.name}: {int((~finite).sum())} scales are not finite")
            elif (values == 0).any():
                failures.append(f"{info.name}: {int((values == 0).sum())} scales are zero")
            elif (values < 0).any() and not weight.encoding.startswith(("int4", "gptq", "awq")):
                failures.append(f"{info.name}: {int((values < 0).sum())} scales are negative")
    for weight in weights.values():
        shape = weight.parts.get("shape")
        if shape is not None and weight.encoding == "int4-ct":
            stored = reader.read(shape).view(np.int64 if shape.dtype == "I64" else np.int32)
            rows, inputs = (int(n) for n in stored)
            if (rows, -(-inputs // 8) * 8) != weight.shape:
                failures.append(f"{shape.name}: holds {list(stored)}, the codes have {list(weight.shape)}")
    return Check("scales are finite and not zero", f"{seen} scale tensors", tuple(failures))


def check_fused(weights: Mapping[str, Weight], fused: Mapping[str, str], reader: Reader) -> Check:
    """Weights that engines fuse share one scheme, and one scale of the whole tensor where there is one."""
    sets: dict[str, list[Weight]] = {}
    for name, key in fused.items():
        sets.setdefault(key, []).append(weights[name])
    failures = []
    for key, members in sets.items():
        stored = Counter(w.scheme.name if w.scheme else w.encoding for w in members)
        if len(stored) > 1:
            failures.append(f"{key}: fused layers are stored in different ways: {', '.join(sorted(stored))}")
            continue
        for kind in ("divisor", "multiplier", "scale"):
            infos = [w.parts[kind] for w in members if kind in w.parts]
            if not infos or (kind == "scale" and members[0].encoding != "fp8-tensor"):
                continue
            values = {float(scale_values(i, reader.read(i))[0]) for i in infos}
            if len(values) > 1:
                failures.append(f"{key}: fused layers have different global scales: {sorted(values)}")
    return Check("fused sets share scheme and global scale", f"{len(sets)} sets", tuple(failures))


def _listed(config: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """Those of `names` that an ignore list of names and `re:` patterns covers."""
    entries = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or []
    entries = [*entries, *("re:" + p[2:] for p in config.get("dynamic") or {} if p.startswith("-:"))]  # GPTQ
    exact = {e for e in entries if not e.startswith("re:")}
    patterns = [re.compile(e[3:]) for e in entries if e.startswith("re:")]
    return {n for n in names if n in exact or any(p.match(n) for p in patterns)}


def check_config(checkpoint: Checkpoint, weights: Mapping[str, Weight], linear: Sequence[str], *, ours: bool) -> Check:
    """The configuration says of every linear layer what its tensors are.

    linear  names of all linear weights
    ours    the lists were written by quantkit, which names every layer that is not quantised; published lists may
            rely on what engines do anyway
    """
    config = quantization_config(checkpoint.config)
    quantized = [n for n in linear if weights[n].encoding != "plain"]
    plain = [n for n in linear if weights[n].encoding == "plain"]
    failures = []
    if quantized and not config:
        failures.append(f"config.json has no quantization_config but {len(quantized)} layers are quantised")
    # scales of the cache beside weights as published
    only_kv = config.get("kv_cache_scheme") and not config.get("config_groups")
    if not any(w.encoding != "plain" for w in weights.values()) and config and not only_kv:
        failures.append("config.json has a quantization_config but no layer is quantised")
    if config.get("quant_method") in ("compressed-tensors", "gptq", "awq", "modelopt", "fp8") and quantized:
        modules = [weights[n].module for n in quantized]
        covered = _listed(config, modules)
        failures += [f"{m}: is quantised, yet on the ignore list" for m in sorted(covered)[:20]]
        groups = config.get("config_groups") or {}
        by_class = config["quant_method"] != "compressed-tensors" or any(
            "Linear" in g["targets"] for g in groups.values()
        )
        if ours and by_class:
            missing = {weights[n].module for n in plain} - _listed(config, [weights[n].module for n in plain])
            failures += [f"{m}: is not quantised, yet not on the ignore list" for m in sorted(missing)[:20]]
        if config["quant_method"] == "compressed-tensors":
            failures += _check_groups(groups, [weights[n] for n in quantized])
    nested = checkpoint.folder / NESTED
    if nested.is_file():
        failures += _check_nested(config, read_json(nested))
    return Check(
        "the configuration describes the tensors",
        f"{len(quantized)} layers quantised, {len(plain)} not",
        tuple(failures),
    )


def _check_groups(groups: Mapping[str, Any], weights: Sequence[Weight]) -> list[str]:
    """Each layer falls into a group of its own scheme."""
    failures = []
    described = [(g["targets"], g.get("weights") or {}) for g in groups.values()]
    compiled = [
        ([re.compile(t[3:]) for t in targets if t.startswith("re:")], set(targets), args) for targets, args in described
    ]
    for weight in weights:
        hits = [
            a
            for p, names, a in compiled
            if "Linear" in names or weight.module in names or any(x.match(weight.module) for x in p)
        ]
        scheme = weight.scheme
        if len(hits) != 1:
            failures.append(f"{weight.module}: {len(hits)} config groups claim it")
        elif scheme is not None:
            bits = 8 if scheme.element == "e4m3" else 4
            channel = hits[0].get("strategy") == "channel" and scheme.group_size == weight.shape[1]
            grouped = scheme.granularity == "group" and not channel
            group = scheme.group_size if grouped else hits[0].get("group_size")
            if hits[0].get("num_bits") != bits or hits[0].get("group_size") != group:
                failures.append(
                    f"{weight.module}: stored as {scheme.name}, described as {hits[0].get('num_bits')} bits, "
                    f"group {hits[0].get('group_size')}"
                )
    return failures


def _check_nested(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    """hf_quant_config.json and config.json say the same; engines differ on which one wins."""
    inner = nested.get("quantization") or {}
    failures = []
    if inner.get("quant_algo") != config.get("quant_algo"):
        failures.append(f"hf_quant_config.json says {inner.get('quant_algo')}, config.json {config.get('quant_algo')}")
    if sorted(inner.get("exclude_modules") or []) != sorted(config.get("ignore") or []):
        failures.append("hf_quant_config.json and config.json list different modules as not quantised")
    return failures


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest that quantkit wrote, or None for a checkpoint of another origin."""
    path = folder / "quantkit.json"
    if not path.is_file():
        return None
    data = read_json(path)
    return data if isinstance(data, dict) else None


def check_kv_json(folder: Path, config: Mapping[str, Any]) -> list[Check]:
    """SGLang's files of KV scales, as strictly as SGLang reads them: it runs at 1.0 when one rule is broken."""
    files = {
        int(m[1]): p for p in folder.glob("*.json") if (m := re.fullmatch(r"kv_cache_scales\.tp(\d+)\.json", p.name))
    }
    if not files:
        return []
    text = text_config(config)
    layers, kind = int(text.get("num_hidden_layers", 0)), str(text.get("model_type"))
    failures = [
        f"{path.name}: {reason}"
        for tp, path in sorted(files.items())
        for reason in check_file(path, tp=tp, num_layers=layers, model_type=kind)
    ]
    return [Check("SGLang takes the JSON of KV scales", f"{len(files)} files", tuple(failures))]
