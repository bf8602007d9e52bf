"""Which files and tensors belong to the checkpoint: the index decides, as far as it can be right.

Engines take the files that the index names and load every tensor in them, stale ones too; without an index they load
all files of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import INDEX, SINGLE, Reader, read_json, text_config
from quantkit.export.repair.draft import NEEDS_SOURCE, Change, Draft
from quantkit.export.safetensors_file import TensorInfo, read_header
from quantkit.kernels.errors import QuantkitError

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def open_draft(folder: Path) -> Draft:
    """The tensors of a folder, each once; raises QuantkitError when some are lost or two files disagree on one."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise QuantkitError("config.json is not a JSON object", file=folder / "config.json")
    found = {f: read_header(f) for f in sorted(folder.glob("*.safetensors"))}
    weight_map, total = _index(folder)
    draft = Draft(folder, config, {}, [])
    if weight_map:
        _by_index(draft, found, weight_map)
    else:
        _without_index(draft, found)
    if not draft.tensors:
        raise QuantkitError("no tensors here", file=folder)
    size = draft.checkpoint().nbytes
    if weight_map and total != size:
        draft.changes.append(Change(f"{INDEX}: total_size was {total}, the tensors have {size} bytes"))
    used = {t.file for t in draft.tensors.values()}
    if not weight_map and len(used) > 1:
        draft.changes.append(Change(f"{INDEX}: made from the headers of {len(used)} shards"))
    stray = sorted(f.name for f in found if f not in used)
    draft.left_out |= {f.name for f in found} | {INDEX}
    if stray:
        draft.changes.append(Change(f"left out stray weight files: {', '.join(stray)}"))
    _check_layers(draft)
    return draft


def _index(folder: Path) -> tuple[dict[str, str], Any]:
    """(weight_map, total_size) of the index; empty for none, or one that cannot be read."""
    if not (folder / INDEX).is_file():
        return {}, None
    try:
        data = read_json(folder / INDEX)
        return dict(data["weight_map"]), (data.get("metadata") or {}).get("total_size")
    except (QuantkitError, KeyError, TypeError, ValueError, AttributeError):
        return {}, None


def _by_index(draft: Draft, found: Mapping[Path, Mapping[str, TensorInfo]], weight_map: Mapping[str, str]) -> None:
    named = _named(found, weight_map)
    wrong, lost = [], []
    for name, file in weight_map.items():
        info = found.get(draft.folder / file, {}).get(name)
        if info is None:
            others = [t[name] for f, t in found.items() if name in t and (f in named or len(found) == 1)]
            others = others or [t[name] for t in found.values() if name in t]
            if len(others) != 1:
                lost.append(name)
                continue
            info = others[0]
            wrong.append(name)
        draft.tensors[name] = info
    if lost:
        raise QuantkitError(
            f"{len(lost)} tensors of the index are in no file", file=draft.folder, tensor=lost[0], hint=NEEDS_SOURCE
        )
    if wrong:
        draft.changes.append(
            Change(f"{INDEX}: {len(wrong)} tensors are in another shard than it says, {wrong[0]} first")
        )
    twice = [n for f in named for n in found[f] if n in draft.tensors and draft.tensors[n].file != f]
    if twice:
        draft.changes.append(Change(f"{len(twice)} tensors stand twice, {twice[0]} first: kept where the index says"))
    extra = [t for f in named for n, t in found[f].items() if n not in weight_map]
    for info in extra:
        if info.name in draft.tensors:
            _same(draft.tensors[info.name], info)
        draft.tensors.setdefault(info.name, info)
    if extra:
        draft.changes.append(
            Change(
                f"{INDEX}: {len(extra)} tensors were not in it, {extra[0].name} first; engines load them all the same"
            )
        )


def _named(found: Iterable[Path], weight_map: Mapping[str, str]) -> list[Path]:
    """The files of the index, and those numbered like them: an index that lost entries lost no shard."""
    names = set(weight_map.values())
    sets = {(m[1], m[3]) for n in names if (m := _NUMBERED.fullmatch(n))}
    return [
        f for f in found if f.name in names or ((m := _NUMBERED.fullmatch(f.name)) and (m[1], m[3]) in sets)
    ]  # fmt: skip


def _without_index(draft: Draft, found: Mapping[Path, Mapping[str, TensorInfo]]) -> None:
    main = list(found)
    numbered = [(f, m) for f in found if (m := _NUMBERED.fullmatch(f.name))]
    if draft.folder / SINGLE in found:
        main = [draft.folder / SINGLE]
    elif numbered:
        sets = {(m[1], m[3]) for _, m in numbered}
        if len(sets) > 1:
            raise QuantkitError(
                "shards of several checkpoints, and no index", file=draft.folder,
                value=", ".join(sorted(f"{a}-of-{n}" for a, n in sets)), hint="leave one set in the folder",
            )  # fmt: skip
        count = int(numbered[0][1][3])
        if len(numbered) != count:
            raise QuantkitError(
                "shards are missing, and no index says what they held", file=draft.folder,
                value=f"{len(numbered)} of {count}", hint=NEEDS_SOURCE,
            )  # fmt: skip
        main = [f for f, _ in numbered]
    for file in main:
        for name, info in found[file].items():
            if name in draft.tensors:
                _same(draft.tensors[name], info)
                draft.changes.append(Change(f"{name} stands twice with the same bytes: kept once"))
            draft.tensors.setdefault(name, info)


def _same(a: TensorInfo, b: TensorInfo) -> None:
    """Refuse two tensors of one name that differ: nothing says which one is right."""
    with Reader() as reader:
        if (a.dtype, a.shape) == (b.dtype, b.shape) and (reader.read(a) == reader.read(b)).all():
            return
    raise QuantkitError(
        "two files hold different tensors of one name, and the index does not choose", file=b.file, tensor=b.name,
        value=f"also in {a.file.name}", hint="remove the file that is stale",
    )  # fmt: skip


def _check_layers(draft: Draft) -> None:
    """Refuse a checkpoint that lacks whole layers."""
    wanted = text_config(draft.config).get("num_hidden_layers")
    present = {int(m[1]) for n in draft.tensors if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", n))}
    if not isinstance(wanted, int) or not present:
        return
    missing = [n for n in range(wanted) if n not in present]
    if missing:
        raise QuantkitError(
            "decoder layers are missing", file=draft.folder, value=f"layers {', '.join(map(str, missing[:8]))}",
            allowed=f"0 to {wanted - 1}", hint=NEEDS_SOURCE,
        )  # fmt: skip
