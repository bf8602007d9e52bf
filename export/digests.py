"""SHA-256 of a folder's files, remembered beside them: an upload that goes on does not hash 400 GB again.

`.quantkit-push.json` maps a file to its size, time of change and hash. Of files that were removed once the Hub had them
it keeps size and hash: they are the only trace left here. A folder that cannot be written is hashed each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

JOURNAL = ".quantkit-push.json"


def sha256_of(path: Path) -> str:
    """The hash of all bytes of a file, which is streamed."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def visible_files(folder: Path) -> list[str]:
    """Names in the folder of every file that is not hidden and not in a hidden folder, sorted: what is published."""
    names = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(n.as_posix() for n in names if not any(part.startswith(".") for part in n.parts))


class Digests:
    """Hashes of the files of `folder` by their names in it; `removed` maps a removed file to [size, hash]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            data: dict[str, Any] = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet
            data = {}
        self._known: dict[str, list[Any]] = data.get("sha256", {})
        self.removed: dict[str, list[Any]] = data.get("removed", {})

    def _stamp(self, name: str) -> list[int]:
        stat = (self.folder / name).stat()
        return [stat.st_size, stat.st_mtime_ns]

    def known(self, name: str) -> str | None:
        """The remembered hash of a file that has not changed since, else None."""
        *stamp, digest = self._known.get(name, [None])
        return digest if stamp == self._stamp(name) else None

    def sha256(self, name: str) -> str:
        """The hash, read from the file unless it is known."""
        digest = self.known(name)
        if digest is None:
            digest = sha256_of(self.folder / name)
            self.remember(name, digest)
        return digest

    def remember(self, name: str, digest: str) -> None:
        """Keep the hash of a file as it is now."""
        self._known[name] = [*self._stamp(name), digest]
        with contextlib.suppress(OSError):
            self._save()

    def remove(self, name: str) -> None:
        """Remove a file whose bytes the Hub holds; first its hash is made durable."""
        size, _, digest = self._known.pop(name)
        self.removed[name] = [size, digest]
        self._save()
        os.truncate(self.folder / name, 0)  # an open descriptor would keep the space
        (self.folder / name).unlink()

    def sweep(self) -> None:
        """Remove what a killed `remove` has left."""
        for name in self.removed:
            (self.folder / name).unlink(missing_ok=True)

    def _save(self) -> None:
        new = self.folder / f"{JOURNAL}.new"
        with new.open("w", encoding="utf-8") as f:
            json.dump({"sha256": self._known, "removed": self.removed}, f)
            f.flush()
            os.fsync(f.fileno())
        new.replace(self.folder / JOURNAL)
