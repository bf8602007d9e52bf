"""The folder of a calibration run: what `calibrate` leaves for `export`, and how it survives being killed.

    RUN/run.json                  identity: recipe, source, text, settings; another one is refused
    RUN/journal                   a line per finished block: what was measured of its layers
    RUN/weights/block-00012.safetensors   calibrated layers of a block, compressed-tensors names
    RUN/weights/kv-scales.safetensors     scales of the KV cache
    RUN/activations/00012/        hidden states behind the last finished block, until the run is done
    RUN/samples/00012.safetensors recorded samples of a block, until the run is done
    RUN/calibration.json          the result: scales, ranges, coverage, text digest, versions
    RUN/calibration.safetensors   recorded samples for the verifier (`recorded.py`)

A file is written under another name, synced and renamed, and its line in the journal comes last: what the journal says
is on the disk. A killed run goes on behind the last finished block and gives the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import read_json
from quantkit.export.safetensors_file import layout, write_all
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.journal import sync_folder
from quantkit.quantize.overlay import WEIGHTS

RUN, JOURNAL, RESULT = "run.json", "journal", "calibration.json"
ACTIVATIONS, SAMPLES = "activations", "samples"
VERSION = 4  # raised when the same run would give other bytes, or its files mean something else

# dtype as safetensors names it, shape, and the bytes
Stored = tuple[str, tuple[int, ...], NDArray[Any]]


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file as a whole: it is there with all its bytes, or not at all."""
    header, slots, size = layout([(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size)
        write_all(fd, header, 0)
        for slot in slots:
            data = np.ascontiguousarray(tensors[slot.name][2])
            if data.nbytes != slot.nbytes:
                raise QuantkitError("internal: a tensor has another size than its shape", tensor=slot.name)
            write_all(fd, data.reshape(-1).view(np.uint8).data, slot.start)
        os.fsync(fd)
    except OSError as e:
        raise QuantkitError(f"cannot write: {e.strerror}", file=path) from e
    finally:
        os.close(fd)
    partial.rename(path)
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as a whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as f:
        f.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        f.flush()
        os.fsync(f.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def measured_scales(folder: Path | None) -> dict[str, float]:
    """The measured scales of activations by layer, of a finished run; empty without one."""
    if folder is None or not (folder / RESULT).is_file():
        return {}
    layers = read_json(folder / RESULT).get("input_scales") or {}
    return {name: float(facts["input_scale"]) for name, facts in layers.items()}


class RunFolder:
    """An open run folder: one process at a time. `done` maps the number of each finished block to its measurements."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.done: dict[int, Any] = {}
        try:
            for name in (WEIGHTS, ACTIVATIONS, SAMPLES):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as e:
            raise QuantkitError(f"cannot write here: {e.strerror}", file=folder) from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check(identity)
            self._resume()
        except OSError as e:
            self._lock.close()
            raise QuantkitError(
                "another run is working in this folder", file=folder, hint="wait for it, or choose another -o"
            ) from e
        except BaseException:
            self._lock.close()
            raise

    def _check(self, identity: Mapping[str, Any]) -> None:
        file = self.folder / RUN
        if not file.is_file():
            strange = [p.name for p in self.folder.iterdir() if p.name not in (WEIGHTS, ACTIVATIONS, SAMPLES, "lock")]
            if strange:
                raise QuantkitError(
                    "the run folder holds other files", file=self.folder, value=", ".join(sorted(strange)[:5]),
                    allowed="a new or an empty folder",
                )  # fmt: skip
            write_json(file, identity)
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise QuantkitError("the run folder is damaged", file=file, hint=f"remove {self.folder}") from e
        changed = sorted(k for k in {*before, *identity} - {"source"} if before.get(k) != identity.get(k))
        if changed:
            raise QuantkitError(
                "this folder holds another run: " + ", ".join(changed) + " changed",
                file=self.folder,
                value="; ".join(f"{k}: {_short(identity.get(k))}" for k in changed),
                allowed="; ".join(f"{k}: {_short(before.get(k))}" for k in changed),
                hint="run the command as it was to go on, or choose another -o",
            )

    def _resume(self) -> None:
        path = self.folder / JOURNAL
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        whole = lines[:-1]  # a torn last line is cut off
        try:
            self.done = {int(block): facts for block, facts in (json.loads(line) for line in whole)}
        except (ValueError, TypeError) as e:
            raise QuantkitError("the journal is damaged", file=path, hint=f"remove {self.folder}") from e
        with path.open("ab") as f:
            f.truncate(sum(len(line) + 1 for line in whole))
        self._journal = path.open("a", encoding="utf-8")

    def block_file(self, block: int) -> Path:
        """Where the calibrated layers of a block go."""
        return self.folder / WEIGHTS / f"block-{block:05d}.safetensors"

    def samples_file(self, block: int) -> Path:
        """Where the recorded samples of a block go."""
        return self.folder / SAMPLES / f"{block:05d}.safetensors"

    def activations(self, block: int) -> Path:
        """The folder of the hidden states behind a block."""
        return self.folder / ACTIVATIONS / f"{block:05d}"

    def finished(self, block: int, facts: Any) -> None:
        """Record a block whose files are on the disk."""
        self._journal.write(json.dumps([block, facts], separators=(",", ":"), allow_nan=False) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.done[block] = facts
        for states in (self.folder / ACTIVATIONS).iterdir():
            if states != self.activations(block):
                shutil.rmtree(states)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.close()
        self._lock.close()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
