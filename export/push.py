"""Publish a checkpoint folder: shards first, what makes it loadable last, and every byte compared on the Hub.

Shards go in one commit, or one by one while later ones are still written. The last commit brings config.json, the
index, the card and all other small files: what an interrupted upload leaves is never a repository that loads. A file
that the Hub holds with the same size and hash is not sent again. A shard is read at most twice: to hash and to send it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.export.checkpoint import open_folder
from quantkit.export.digests import Digests, visible_files
from quantkit.export.hub import GO_ON, Held, Repo
from quantkit.kernels.errors import QuantkitError, join_errors

SHARD = ".safetensors"
MAX_FILE = 45_000_000_000  # the Hub's limit is 50 GB
TOGETHER = 4  # shards sent at the same time


@dataclass(frozen=True, slots=True)
class File:
    """A file to publish: its name in the repository, and where it lies."""

    name: str
    path: Path

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size


def files_of(folder: Path) -> tuple[list[File], list[File]]:
    """(shards, all other files) of a folder, sorted; hidden files are not published. Raises for a file over 45 GB."""
    files = [File(name, folder / name) for name in visible_files(folder)]
    large = [f for f in files if f.size > MAX_FILE]
    if large:
        raise QuantkitError(
            "the file is too large for the Hub", file=large[0].path, value=f"{large[0].size / 1e9:.1f} GB",
            allowed=f"{MAX_FILE / 1e9:.0f} GB", hint="a smaller `shard_size` in the recipe, 5GB by default",
        )  # fmt: skip
    shards = [f for f in files if f.name.endswith(SHARD)]
    return shards, [f for f in files if f not in shards]


@dataclass(slots=True)
class Push:
    """An upload under way. `held` is what the Hub has; `doomed` are files of others, removed by the first commit."""

    repo: Repo
    digests: Digests
    report: Callable[[File], None] = lambda _: None
    held: dict[str, Held] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)

    def has(self, file: File) -> bool:
        """True when the Hub holds these very bytes under this name."""
        there = self.held.get(file.name)
        if there is None or there.size != file.size:
            return False
        return there.digest == (self.digests.sha256(file.name) if there.lfs else git_sha1(file.path))

    def begin(self, files: Sequence[File], *, force: bool) -> None:
        """Look at what the Hub holds; raises QuantkitError when that is not a part of this upload, unless `force`."""
        self.held = self.repo.files()
        gone = self.digests.removed
        lost = [n for n in sorted(gone) if n not in self.held or [self.held[n].size, self.held[n].digest] != gone[n]]
        if lost:
            raise QuantkitError(
                "a shard that was sent and removed here is not on the Hub", file=self.digests.folder / lost[0],
                value=self.repo.url, hint="name the repository and branch it was sent to, or write the checkpoint anew",
            )  # fmt: skip
        ours = {f.name for f in files if self.has(f)}
        self.doomed = {n for n in self.held if n not in ours and n not in gone}
        if self.doomed and not force:
            names = sorted(self.doomed)
            raise QuantkitError(
                "the repository holds other files", value=f"{self.repo.id}: " + ", ".join(names[:5])
                + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
                allowed="an empty repository or branch, or a part of this upload",
                hint="choose another name or a new --revision, or replace them with --force",
            )  # fmt: skip

    def send(self, files: Sequence[File], message: str) -> None:
        """Upload what is missing, commit it, and compare all `files` with what the Hub then holds."""
        from huggingface_hub import CommitOperationAdd

        additions: list[CommitOperationAdd] = []
        missing = [f for f in files if not self.has(f)]
        for at in range(0, len(missing), TOGETHER):
            group = missing[at : at + TOGETHER]
            adding = [CommitOperationAdd(f.name, f.path) for f in group]
            for file, addition in zip(group, adding, strict=True):
                known = self.digests.known(file.name)
                if known is not None:  # else the client hashes while it sends, where it can
                    addition.upload_info.sha256 = bytes.fromhex(known)
            self.repo.upload(adding)
            for file, addition in zip(group, adding, strict=True):
                if file.name.endswith(SHARD):  # kept by the Hub's large file storage, so the client has the hash
                    self.digests.remember(file.name, addition.upload_info.sha256.hex())
                    self.report(file)
            additions += adding
        if additions:
            self.repo.commit(additions, sorted(self.doomed - {f.name for f in files}), message)
            self.doomed = set()
            self.held = self.repo.files()
        self.compare(files)

    def compare(self, files: Sequence[File]) -> None:
        """Raises QuantkitError unless the Hub holds every file with the local size and hash."""
        wrong = []
        for file in files:
            if not self.has(file):
                there = self.held.get(file.name)
                wrong.append(
                    QuantkitError(
                        "the Hub holds other bytes than were sent" if there else "the file is not on the Hub",
                        file=file.name, value=f"{there.size} bytes, hash {there.digest}" if there else None,
                        allowed=f"{file.size} bytes and the hash of {file.path}",
                        hint="--force sends the file again" if there else GO_ON,
                    )
                )  # fmt: skip
        if wrong:
            raise join_errors("the upload is damaged", wrong)


def git_sha1(path: Path) -> str:
    """SHA-1 of the git blob of a small file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def push_folder(
    folder: Path, repo: Repo, *, force: bool = False, report: Callable[[File], None] = lambda _: None
) -> int:
    """Publish a finished checkpoint folder; returns the number of files, all compared with the Hub.

    Shards that were sent and removed while the checkpoint was written need not be there.
    Raises QuantkitError for a folder that is no sound checkpoint, for files of others on the Hub, and what Repo raises.
    """
    digests = Digests(folder)
    if not digests.removed:
        open_folder(folder)
    shards, rest = files_of(folder)
    push = Push(repo, digests, report)
    push.begin([*shards, *rest], force=force)
    push.send(shards, "Add the weights")
    push.send(rest, "Add configuration, index and card")
    if push.doomed:  # nothing of ours was missing, yet others are there
        repo.commit([], sorted(push.doomed), "Remove other files")
    return len(shards) + len(rest) + len(digests.removed)
