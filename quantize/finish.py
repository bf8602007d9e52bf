"""What stands beside the shards: side files byte for byte, configuration, index, card, and last the manifest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import INDEX, NESTED
from quantkit.export.manifest import MANIFEST, file_digests
from quantkit.quantize.card import CARD, SOURCE_CARD, card_text
from quantkit.quantize.journal import sync_folder
from quantkit.quantize.manifest import manifest
from quantkit.quantize.plan import Plan
from quantkit.quantize.work import Measured

# Files of a source that are weights in another form, or say how the source was quantised: not copied.
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
SOURCE_QUANT_FILES = (NESTED, "quantize_config.json", "quant_config.json", MANIFEST)


def write_files(plan: Plan, folder: Path, measured: Mapping[str, Measured], jobs: int) -> None:
    """Finish the checkpoint in `folder`, whose shards are complete, and make all of it durable."""
    published = plan.format == "as published"
    for side in plan.source.side_files:
        if side.suffix in NOT_COPIED or (side.name in SOURCE_QUANT_FILES and not (published and side.name != MANIFEST)):
            continue
        name = Path(SOURCE_CARD) if side == Path(CARD) and not published else side
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source.folder / side, folder / name)
    files: dict[str, Any] = dict(plan.files)
    if published:
        shutil.copyfile(plan.source.folder / "config.json", folder / "config.json")
        del files["config.json"]
    if len(plan.shards) > 1:
        files[INDEX] = plan.index
    for file, content in files.items():
        write_json(folder / file, content)
    facts = manifest(plan, measured)
    if not published:
        (folder / CARD).write_text(card_text(folder, facts), encoding="utf-8")
    write_json(folder / MANIFEST, {**facts, "files": file_digests(folder, jobs)})
    sync_files(folder)


def write_json(path: Path, content: Any) -> None:
    """A JSON file for people too; equal content gives equal bytes."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sync_files(folder: Path) -> None:
    """Make every file of a folder durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
    sync_folder(folder)
