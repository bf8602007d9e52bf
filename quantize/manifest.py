"""What `quantkit.json` says: the recipe, the published source, the calibration text, the versions, every layer's error.

It is part of the output: equal plans give equal bytes, so it holds no date, no path and nothing of the machine.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.quantize.capacity import fates_of
from quantkit.quantize.plan import Plan
from quantkit.quantize.work import Measured


def manifest(plan: Plan, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Everything but the list of files, which is taken when all others are written."""
    return {
        "quantkit": version("quantkit"),
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("numpy", "numba")}},
        "format": plan.format,
        "recipe": json.loads(plan.recipe.model_dump_json(by_alias=True, exclude_none=True)),
        "plan": plan.identity(),
        "source": source_facts(plan),
        **({"calibration": dict(plan.calibration)} if plan.calibration else {}),
        "headers": {shard.name: hashlib.sha256(shard.header).hexdigest() for shard in plan.shards},
        "roles": fates_of(plan),
        "bytes": plan.bytes_out,
        "tp": sorted(n for n, why in plan.tp.items() if not why),
        **({"kv_scales": names} if (names := _kv_names(plan)) else {}),
        "layers": {
            t.name: {
                "fate": t.fate,
                "role": t.role,
                **({"scheme": t.scheme.name, "method": t.method} if t.scheme else {}),
            }
            for t in plan.tasks
            if t.fate != "keep"
        },
        **{n: sorted(names) for n in ("calibrated", "smoothed") if (names := getattr(plan.source, n))},
        "dropped": {t.name: t.reason for t in plan.tasks if t.fate == "drop"},
        "measured": {name: [m.sq_err, m.sq_norm] for name, m in measured.items()},
    }


def _kv_names(plan: Plan) -> list[str]:
    """Names of the KV scales, from the attention module on: `self_attn.k_scale`."""
    tasks = (t for t in plan.tasks if t.role.removeprefix("mtp.") == "attention.kv_scale" and t.fate != "drop")
    return sorted({re.split(r"\.\d+\.", t.name)[-1] for t in tasks})


def source_facts(plan: Plan) -> dict[str, Any]:
    """The published checkpoint: repository and revision where the Hub's files say them, and what its shards are.

    A shard has its size and the SHA-256 of its header. That of all its bytes is there only where the Hub's cache keeps
    the file under it: a run reads tensors in any order, so another pass over the source would be needed.
    """
    repo, revision = hub_origin(plan.source.folder)
    return {
        "name": plan.source.folder.name if repo is None else repo.rpartition("/")[2],
        **({"repo": repo} if repo else {}),
        **({"revision": revision} if revision else {}),
        "bytes": plan.bytes_in,
        "tensors": len(plan.source.tensors),
        "files": {f.relative_to(plan.source.folder).as_posix(): _shard_facts(f) for f in plan.source.files},
    }


def _shard_facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as f:
        length = f.read(8)
        header = length + f.read(int.from_bytes(length, "little"))
    blob = file.resolve()
    whole = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name)
    return {
        "size": blob.stat().st_size,
        "header_sha256": hashlib.sha256(header).hexdigest(),
        **({"sha256": blob.name} if whole else {}),
    }


def hub_origin(folder: Path) -> tuple[str | None, str | None]:
    """(org/name, commit) of a folder that huggingface_hub has filled: its cache, or a `--local-dir`."""
    parts = folder.absolute().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    first = note.read_text(encoding="utf-8").partition("\n")[0].strip() if note.is_file() else ""
    return None, first if re.fullmatch("[0-9a-f]{40}", first) else None
