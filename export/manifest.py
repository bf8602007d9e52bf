"""SHA-256 and size of every file of a checkpoint: taken when it is finished, compared by `verify --manifest`.

The manifest itself is not in its list, and neither are hidden files, which are never published.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantkit.export.digests import Digests, sha256_of, visible_files
from quantkit.export.verify import Check

MANIFEST = "quantkit.json"


def checkpoint_files(folder: Path) -> list[str]:
    """Names of the files that the manifest lists, sorted."""
    return [name for name in visible_files(folder) if name != MANIFEST]


def file_digests(folder: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """`{name: {size, sha256}}` of every file, each read once on one of `jobs` threads.

    A shard that the Hub has and the disk no longer holds keeps the hash under which it was sent.
    """
    names = checkpoint_files(folder)

    def digest(name: str) -> dict[str, Any]:
        return {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}

    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(names, pool.map(digest, names), strict=True))
    gone = {name: {"size": size, "sha256": sha} for name, (size, sha) in Digests(folder).removed.items()}
    return dict(sorted({**gone, **found}.items()))


def check_manifest(folder: Path, manifest: Mapping[str, Any] | None, jobs: int) -> Check:
    """Every file has the size and hash of the manifest, none is missing, none is there besides."""
    what = "every file is the one that the manifest lists"
    listed: Mapping[str, Mapping[str, Any]] = (manifest or {}).get("files") or {}
    if not listed:
        found = "lists no files" if manifest is not None else "is missing, or is no JSON object"
        return Check(what, "no list", (f"{MANIFEST} {found}: the files cannot be checked",))
    names = checkpoint_files(folder)
    failures = [f"{n}: missing" for n in sorted(listed.keys() - set(names))]
    failures += [f"{n}: a file that the manifest does not list" for n in names if n not in listed]

    def fault(name: str) -> str | None:
        size, wanted = (folder / name).stat().st_size, listed[name]
        if size != wanted.get("size"):
            return f"{name}: {size} bytes, the manifest says {wanted.get('size')}"
        same = sha256_of(folder / name) == wanted.get("sha256")
        return None if same else f"{name}: its SHA-256 is another one"

    with ThreadPoolExecutor(jobs) as pool:
        failures += [f for f in pool.map(fault, [n for n in names if n in listed]) if f]
    return Check(what, f"{len(listed)} files", tuple(failures))
