"""A checkpoint on the Hub: fetched into the Hub's own cache, or opened from its headers alone.

Headers come by range requests. Each becomes a stand-in file of a temporary folder, of the right size and without data,
so that they pass the same checks as those on a disk. The stand-ins are gone when the checkpoint is handed out: whoever
tried to read a weight would get an error, not zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from quantkit.export.checkpoint import INDEX, Checkpoint, open_folder, read_json
from quantkit.kernels.errors import QuantkitError

# Weights in other forms, and copies of the weights for other software
UNWANTED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "metal/*")
AT_A_TIME = 8  # requests for headers
SHARD = ".safetensors"


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    from httpx import HTTPError
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, SafetensorsParsingError

    try:
        yield
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, SafetensorsParsingError, OSError) as e:
        raise QuantkitError(
            f"cannot fetch from the Hub: {str(e).strip().splitlines()[0]}",
            value=f"{repo}@{revision or 'main'}",
            hint="no such folder here either; check the name, the network and HF_TOKEN",
        ) from e


def fetch(repo: str, revision: str | None, *, weights: bool = True) -> Path:
    """The folder of the Hub's cache that holds a revision; without `weights` the shards are left out if not there."""
    from huggingface_hub import snapshot_download

    with _explained(repo, revision):
        unwanted = [*UNWANTED, *([] if weights else ["*" + SHARD])]
        return Path(snapshot_download(repo, revision=revision, ignore_patterns=unwanted))


def open_headers(repo: str, revision: str | None) -> Checkpoint:
    """The checkpoint without its data: no weight can be read. From the cache where that holds the shards already."""
    folder = fetch(repo, revision, weights=False)
    names = _shard_names(repo, folder)
    if all((folder / name).is_file() for name in names):
        return open_folder(folder)
    with TemporaryDirectory() as room:
        for file in folder.rglob("*"):
            if file.is_file() and not file.name.endswith(SHARD):
                link = Path(room) / file.relative_to(folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for _ in pool.map(lambda name: _stand_in(repo, folder.name, Path(room) / name, name), names):
                pass
        return replace(open_folder(Path(room)), folder=folder)  # side files are there


def _shard_names(repo: str, folder: Path) -> list[str]:
    """Names in the repository: those of the index, else every safetensors file at the top."""
    from huggingface_hub import HfApi

    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else []
        return sorted({n for n in names if isinstance(n, str) and ".." not in n and not n.startswith("/")})
    with _explained(repo, folder.name):
        listed = HfApi().list_repo_files(repo, revision=folder.name)
    return [n for n in listed if n.endswith(SHARD) and "/" not in n]


def _stand_in(repo: str, commit: str, path: Path, name: str) -> None:
    """A file with the header of a shard and a hole in place of its data."""
    from huggingface_hub import HfApi

    with _explained(repo, commit):
        found = HfApi().parse_safetensors_file_metadata(repo, name, revision=commit)
    header = {
        tensor: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for tensor, t in found.tensors.items()
    }
    text = json.dumps(header).encode()
    size = max((t.data_offsets[1] for t in found.tensors.values()), default=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + size)
