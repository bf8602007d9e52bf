"""The work folder of a run: one writer at a time, a journal of finished steps, nothing under the final name until done.

    OUT.partial/lock         held by the running process (flock: freed by the system when it dies)
    OUT.partial/journal      first line: the plan's identity; then one line per finished step
    OUT.partial/checkpoint/  the output as it grows, renamed to OUT at the end

A line is appended only after the step's bytes were synced: what the journal says is on the disk, whatever was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quantkit.kernels.errors import QuantkitError


@dataclass(slots=True)
class Work:
    """An open work folder. `done` maps each finished step to what was measured of it.

    `after` is called with the names of steps that have become durable.
    """

    folder: Path
    checkpoint: Path
    done: dict[str, Any]
    _lock: TextIO
    _journal: TextIO
    after: Callable[[Collection[str]], None] = lambda _: None

    def append(self, entries: Mapping[str, Any]) -> None:
        """Record finished steps; they must be on the disk already."""
        for name, measured in entries.items():
            self._journal.write(json.dumps([name, measured], separators=(",", ":")) + "\n")
            self.done[name] = measured
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.after(entries.keys())

    def publish(self, out: Path) -> None:
        """Give the finished checkpoint its final name and remove the work folder."""
        if out.is_dir():
            out.rmdir()  # empty: `open_work` refused anything else
        self.checkpoint.rename(out)
        sync_folder(out.parent)
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Let go of the folder; what was recorded stays for the next run."""
        self._journal.close()
        self._lock.close()


def sync_folder(folder: Path) -> None:
    """Make renames and new files of a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def work_folder(out: Path) -> Path:
    """Where a run that writes `out` keeps its unfinished state."""
    return out.with_name(out.name + ".partial")


def check_target(out: Path) -> None:
    """Refuse an output folder that holds anything: engines load every file of a folder, stale ones too."""
    if out.is_dir() and any(out.iterdir()):
        found = sorted(p.name for p in out.iterdir())
        raise QuantkitError(
            "the output folder holds other files",
            file=out,
            value=", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else ""),
            allowed="a new or an empty folder",
            hint="choose another -o; stale shards beside new ones would be loaded by engines",
        )
    if out.exists() and not out.is_dir():
        raise QuantkitError("the output is a file", file=out, allowed="a new or an empty folder")


def open_work(out: Path, identity: Mapping[str, str]) -> Work:
    """Open or resume the work folder of `out`; QuantkitError when another run holds it, or another plan made it."""
    check_target(out)
    folder = work_folder(out)
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as e:
        raise QuantkitError(f"cannot write here: {e.strerror}", file=folder) from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        lock.close()
        raise QuantkitError(
            "another run is writing this output", file=folder, hint="wait for it, or choose another -o"
        ) from e
    try:
        journal, done = _resume(folder / "journal", identity)
    except BaseException:
        lock.close()
        raise
    return Work(folder, folder / "checkpoint", done, lock, journal)


def _resume(path: Path, identity: Mapping[str, str]) -> tuple[TextIO, dict[str, Any]]:
    """The journal open for appending, and the steps that it holds; a torn last line is cut off."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    whole = lines[:-1]
    if not whole:
        journal = path.open("w", encoding="utf-8")
        journal.write(json.dumps(dict(identity)) + "\n")
        journal.flush()
        os.fsync(journal.fileno())
        sync_folder(path.parent)
        return journal, {}
    try:
        before = json.loads(whole[0])
        done = dict(json.loads(line) for line in whole[1:])
    except (ValueError, TypeError) as e:
        raise QuantkitError(
            "the journal of the unfinished run is damaged", file=path, hint=f"remove {path.parent}"
        ) from e
    changed = sorted(k for k in {*before, *identity} if before.get(k) != identity.get(k))
    if changed:
        raise QuantkitError(
            "an unfinished run for another plan is here: " + ", ".join(changed) + " changed",
            file=path.parent,
            hint="run the command as it was to finish it, choose another -o, or remove that folder to start anew",
        )
    with path.open("r+b") as f:
        f.truncate(sum(len(line) + 1 for line in whole))
    return path.open("a", encoding="utf-8"), done
