"""`quantkit repair`: mend what can be mended without the source, write it beside, verify it, give it its name.

Tensors stream from the old shards to the new ones, so memory stays flat. Nothing stands under the final name until the
result has passed `verify`; what only the source could mend is refused, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import INDEX, Checkpoint, Reader
from quantkit.export.manifest import MANIFEST, checkpoint_files, file_digests
from quantkit.export.repair.config import mend_config
from quantkit.export.repair.draft import NEEDS_SOURCE, Change, Draft
from quantkit.export.repair.kv import mend_json, mend_kv
from quantkit.export.repair.scales import mend_globals, mend_inputs, mend_uint8, rescaled
from quantkit.export.repair.shards import open_draft
from quantkit.export.safetensors_file import TensorInfo, layout, write_all
from quantkit.export.sources.detect import weights_of
from quantkit.export.verify import check_scales, manifest_of
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.card import CARD, SOURCE_CARD
from quantkit.quantize.finish import NOT_COPIED, SOURCE_QUANT_FILES, sync_files, write_json
from quantkit.quantize.journal import check_target, sync_folder, work_folder
from quantkit.quantize.roles import attention_modules, roles_of, shared_inputs
from quantkit.quantize.verification import linear_weights, verify_checkpoint

CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was changed; nothing was written when there was nothing to change."""

    changes: tuple[Change, ...]
    nbytes: int


def repair(
    folder: Path, out: Path, source: Checkpoint | None = None, *, engine: str = "vllm", jobs: int = 1
) -> Repaired:
    """Write a mended copy of `folder` to `out`; raises QuantkitError for what needs the source.

    source  gives side files that are missing;  engine  whose names of KV scales are written
    """
    out = out.absolute()
    check_target(out)
    if out.resolve() == folder.resolve() or folder.resolve() in out.resolve().parents:
        raise QuantkitError("a checkpoint is never mended in place", file=out, allowed=f"a folder outside of {folder}")
    manifest = manifest_of(folder)
    draft = open_draft(folder)
    work = work_folder(out)
    if work.exists():
        raise QuantkitError("an unfinished run is here", file=work, hint="remove it, or choose another -o")
    new = work / "checkpoint"
    new.mkdir(parents=True)
    try:
        with Reader() as reader:
            _mend(draft, reader, engine, new, ours=manifest is not None and manifest.get("format") != "as published")
            missing = _missing_side_files(draft, source)
            if not draft.changes:
                return Repaired((), 0)
            headers = _write_shards(draft, reader, new)
        _write_rest(draft, new, source, missing)
        if manifest is not None:
            _write_manifest(draft, new, manifest, headers, jobs)
        _check(new)
        sync_files(new)
        if out.is_dir():
            out.rmdir()
        new.rename(out)
        sync_folder(out.parent)
    except OSError as e:
        raise QuantkitError(f"cannot write the output: {e.strerror}", file=e.filename or out) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Repaired(tuple(draft.changes), draft.checkpoint().nbytes)


def _mend(draft: Draft, reader: Reader, engine: str, empty: Path, *, ours: bool) -> None:
    """Every fault in turn; each step reads the draft as the one before has left it."""
    mend_uint8(draft, reader)
    weights = weights_of(draft.checkpoint())
    bad = check_scales(weights, reader).failures
    if bad:
        raise QuantkitError(
            f"{len(bad)} scales are not usable", file=draft.folder, value="; ".join(bad[:5]), hint=NEEDS_SOURCE
        )
    placed, _ = roles_of({n: w.shape for n, w in weights.items()}, draft.config)
    mend_globals(draft, weights, {n: p.fused for n, p in placed.items() if p.fused and n in weights}, reader)
    mend_inputs(draft, weights, shared_inputs(placed), reader)
    modules = attention_modules(placed)
    mend_kv(draft, modules, engine, reader)
    mend_json(draft, modules, reader)
    mend_config(draft, weights, linear_weights(weights, placed), empty, ours=ours)


def _missing_side_files(draft: Draft, source: Checkpoint | None) -> list[Path]:
    """Files that the source has beside its weights and the checkpoint lacks: tokenizer, templates, code."""
    if source is None:
        return []
    found = [
        s
        for s in source.side_files
        if s.suffix not in NOT_COPIED and s.name not in (*SOURCE_QUANT_FILES, CARD, SOURCE_CARD)
        and not (draft.folder / s).exists()
    ]  # fmt: skip
    if found:
        draft.changes.append(Change(f"from the source: {', '.join(map(str, found))}"))
    return found


def _write_shards(draft: Draft, reader: Reader, new: Path) -> dict[str, str]:
    """The shards, each with the tensors of an old one; returns the digests of their headers."""
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in draft.tensors.values():
        by_file.setdefault(info.file, []).append(info)
    names = ["model.safetensors"] if len(by_file) == 1 else [
        f"model-{i + 1:05d}-of-{len(by_file):05d}.safetensors" for i in range(len(by_file))
    ]  # fmt: skip
    headers: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for name, infos in zip(names, (by_file[f] for f in sorted(by_file)), strict=True):
        header, slots, size = layout([(t.name, t.dtype, t.shape) for t in infos])
        fd = os.open(new / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)
            write_all(fd, header, 0)
            for info, slot in zip(infos, slots, strict=True):
                at = slot.start
                for chunk in _bytes_of(draft, info, reader):
                    write_all(fd, chunk.data, at)
                    at += chunk.nbytes
        finally:
            os.close(fd)
        headers[name] = hashlib.sha256(header).hexdigest()
        weight_map |= {t.name: name for t in infos}
    if len(names) > 1:
        total = {"total_size": draft.checkpoint().nbytes}
        write_json(new / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
    return headers


def _bytes_of(draft: Draft, info: TensorInfo, reader: Reader) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor of the draft, a chunk at a time."""
    if info.name in draft.fresh:
        yield draft.fresh[info.name].view(np.uint8)
        return
    factor = draft.factors.get(info.name)
    for first in range(0, info.nbytes, CHUNK):
        chunk = np.empty(min(CHUNK, info.nbytes - first), np.uint8)
        reader.read_into(info, first, chunk)
        yield chunk if factor is None else rescaled(chunk, factor)


def _write_rest(draft: Draft, new: Path, source: Checkpoint | None, missing: list[Path]) -> None:
    """Side files as they are, those that were mended, and those that the source gives."""
    for name in checkpoint_files(draft.folder):
        if name not in (*draft.left_out, *draft.files):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(draft.folder / name, new / name)
    for file, content in draft.files.items():
        write_json(new / file, content)
    for side in missing:
        assert source is not None
        (new / side).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / side, new / side)


def _write_manifest(
    draft: Draft, new: Path, manifest: Mapping[str, Any], headers: Mapping[str, str], jobs: int
) -> None:
    changes = [{"what": c.what, **({} if c.error is None else {"error": c.error})} for c in draft.changes]
    facts = {k: v for k, v in manifest.items() if k != "plan"}  # no longer the output of that plan
    facts |= {"headers": headers, "repaired": [*manifest.get("repaired", []), *changes]}
    write_json(new / MANIFEST, {**facts, "files": file_digests(new, jobs)})


def _check(new: Path) -> None:
    report = verify_checkpoint(new, None)
    failures = [f"{c.name}: {f}" for c in report.checks for f in c.failures]
    if failures:
        raise QuantkitError(
            "some faults cannot be mended without the source", value="; ".join(failures[:8]), hint=NEEDS_SOURCE
        )
