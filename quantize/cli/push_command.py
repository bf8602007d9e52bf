"""`quantkit push`, and `quantkit export --push-to`: a finished checkpoint goes to the Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.commands import emit, export_command, load_plan

if TYPE_CHECKING:
    from quantkit.export.hub import Repo
    from quantkit.export.push import File


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint goes: `repo` is None for nowhere; `stream` sends shards while others are written."""

    repo: str | None = None
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    force: bool = False
    stream: bool = False

    def open(self) -> Repo:
        """The repository and the branch, made where they do not exist."""
        from huggingface_hub.utils.tqdm import disable_progress_bars
        from quantkit.export.hub import open_repo

        if not sys.stderr.isatty():
            disable_progress_bars()  # a line for each shard is enough
        return open_repo(self.repo or "", private=self.private, revision=self.revision, create_pr=self.create_pr)


def _sent(file: File) -> None:
    sys.stderr.write(f"sent {file.name}, {file.size / 1e9:.3f} GB\n")


def _push(folder: Path, repo: Repo, *, force: bool) -> dict[str, Any]:
    from quantkit.export.push import push_folder

    try:
        files = push_folder(folder, repo, force=force, report=_sent)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to go on\n")
        sys.exit(130)
    sys.stderr.write(f"published: {repo.url}, {files} files, size and hash of each compared with the Hub's\n")
    return {"repo": repo.id, "revision": repo.revision, "url": repo.url, "files": files}


def push_command(folder: Path, to: Destination, as_json: bool) -> None:
    """`quantkit push`."""
    if not folder.is_dir():
        raise QuantkitError("no such folder", file=folder)
    facts = _push(folder, to.open(), force=to.force)
    if as_json:
        emit(facts)


def export_and_push(
    source: str, recipe: str | None, out: Path, format_name: str | None, group: str | None, tp: Sequence[int],
    jobs: int, memory: str, as_json: bool, *, engine: str, per_rank: bool, to: Destination,
) -> None:  # fmt: skip
    """`quantkit export`, and `quantkit push` of what it wrote; what the Hub would refuse is refused before."""
    if to.repo is None and to != Destination():
        raise QuantkitError("an option of --push-to without it", allowed="--push-to ORG/NAME")
    if to.stream and to.create_pr:
        raise QuantkitError("--stream-upload cannot open a pull request", allowed="--revision BRANCH, or refs/pr/N")
    if to.repo is not None:  # before anything is made there or fetched: a faulty recipe left an empty repository
        load_plan(source, recipe, format_name, group, tp, engine, per_rank=per_rank, headers_only=True)
    repo = to.open() if to.repo is not None else None
    ship = None
    if repo is not None:
        from quantkit.export.digests import Digests
        from quantkit.export.push import Push
        from quantkit.quantize.shipping import Shipping

        if to.stream:
            ship = Shipping(repo, force=to.force, report=_sent)
        elif not out.exists():
            Push(repo, Digests(out)).begin([], force=to.force)
    facts = export_command(
        source, recipe, out, format_name, group, tp, jobs, memory, False, engine=engine, per_rank=per_rank, ship=ship
    )
    if repo is not None:
        facts["published"] = _push(out, repo, force=to.force)
    if as_json:
        emit(facts)
