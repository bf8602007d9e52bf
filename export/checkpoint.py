"""A published checkpoint: its folder, its configuration and the headers of all its tensors, read and checked once.

Nothing here reads a weight. `Reader` gives bytes on demand with positioned reads: memory stays flat where a memory map
would count every page touched.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from quantkit.export.safetensors_file import TensorInfo, read_all, read_header
from quantkit.kernels.errors import QuantkitError, join_errors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NESTED = "hf_quant_config.json"  # where ModelOpt's readers look besides


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors` in the order of their files; `side_files` are all other files of the folder, relative to it.

    calibrated  logical tensors that a calibration run has put in place of the published ones, or added
    smoothed    logical tensors whose channels that run has scaled: no longer the published weights, codes or not
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]
    side_files: tuple[Path, ...]
    calibrated: frozenset[str] = frozenset()
    smoothed: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted: the `total_size` of an index."""
        return sum(t.nbytes for t in self.tensors.values())


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json: all of it, or `text_config` of a multimodal model."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def with_quantization(config: Mapping[str, Any], quant: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with another `quantization_config`, in the place of the old one."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "quantization_config" in text and "quantization_config" not in config:
        return {**config, "text_config": {**text, "quantization_config": dict(quant)}}
    return {**config, "quantization_config": dict(quant)}


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the quantisation, at the top or inside `text_config`; empty for a plain checkpoint."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def has_fp8_kv(config: Mapping[str, Any]) -> bool:
    """True when the configuration switches an FP8 KV cache on (compressed-tensors and ModelOpt keys)."""
    quant = quantization_config(config)
    scheme = quant.get("kv_cache_scheme")
    by_dict = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return by_dict or quant.get("kv_cache_quant_algo") == "FP8"


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises QuantkitError with the place of the fault."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise QuantkitError(f"cannot read the file: {e.strerror}", file=path) from e
    except ValueError as e:
        raise QuantkitError(f"not valid JSON: {e}", file=path) from e


def _inside(folder: Path, name: object, index: Path) -> Path:
    """The file `name` of `folder`; refuses names that lead out of it."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise QuantkitError("the index names a file that is not a name", file=index, value=repr(name))
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name:
        raise QuantkitError(
            "the index names a file outside of the checkpoint", file=index, value=name, allowed="a path in the folder"
        )
    return folder / name


def _shards(folder: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Shard files, and the index's map of tensor to file where there is an index."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise QuantkitError("the index has no weight_map", file=index)
        files = {name: _inside(folder, name, index) for name in dict.fromkeys(weight_map.values())}
        missing = [QuantkitError("a shard of the index is missing", file=p) for p in files.values() if not p.is_file()]
        if missing:
            raise join_errors("shards are missing", missing)
        return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], None
    found = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    if len(found) == 1:
        return found, None
    if found:
        raise QuantkitError(
            f"{len(found)} safetensors files but no index says which belong to the model",
            file=folder,
            allowed=f"{INDEX} or {SINGLE}",
            hint="download the index of the checkpoint too",
        )
    pickles = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
    raise QuantkitError(
        "no safetensors files here",
        file=folder,
        value=", ".join(pickles[:3]) or None,
        hint="pickled checkpoints are never loaded: convert them to safetensors first" if pickles else None,
    )


def _check_index(tensors: dict[str, TensorInfo], weight_map: dict[str, Path], index: Path) -> None:
    errors = []
    for name, file in weight_map.items():
        if name not in tensors:
            errors.append(QuantkitError("the index names a tensor that no shard holds", file=index, tensor=name))
        elif tensors[name].file != file:
            errors.append(
                QuantkitError(
                    "the index names the wrong shard",
                    file=index,
                    tensor=name,
                    value=file.name,
                    allowed=tensors[name].file.name,
                )
            )
    errors += [
        QuantkitError(
            "a shard holds a tensor that the index does not name: engines load it all the same",
            file=t.file,
            tensor=t.name,
            hint="a stale shard or index: download the checkpoint again",
        )
        for t in tensors.values()
        if t.name not in weight_map
    ]
    if errors:
        raise join_errors("index and shards disagree", errors)


def read_tensors(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Headers of all `files`; a tensor in two of them is an error."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise QuantkitError(
                    "the tensor is in two shards: engines differ on which one wins",
                    file=file,
                    tensor=name,
                    value=f"also in {tensors[name].file.name}",
                )
            tensors[name] = info
    return tensors


def open_folder(folder: Path) -> Checkpoint:
    """Read and check every header of a local checkpoint folder."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise QuantkitError(
            "not a checkpoint folder: there is no config.json",
            file=folder,
            hint="name the folder that holds config.json",
        )
    config = read_json(config_file)
    if not isinstance(config, dict):
        raise QuantkitError("config.json is not a JSON object", file=config_file)
    files, weight_map = _shards(folder)
    tensors = read_tensors(files)
    if weight_map is not None:
        _check_index(tensors, weight_map, folder / INDEX)
    if not tensors:
        raise QuantkitError("the checkpoint holds no tensors", file=folder)
    weights = {*files, folder / INDEX, config_file}
    side = sorted(
        p.relative_to(folder)
        for p in folder.rglob("*")
        if p.is_file() and p not in weights and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    return Checkpoint(folder, config, tensors, tuple(files), tuple(side))


def open_checkpoint(source: str | Path, *, headers_only: bool = False) -> Checkpoint:
    """Open a checkpoint by folder or by Hub id `org/name[@revision]`.

    A Hub id is fetched into the Hub's own cache, by huggingface_hub, and opened from there; with `headers_only` no
    shard is fetched, and no weight can be read.
    """
    folder = Path(source)
    if folder.is_dir():
        return open_folder(folder)
    if folder.is_file():
        raise QuantkitError("name the checkpoint's folder, not a file", file=folder, hint=f"try {folder.parent}")
    repo, _, revision = str(source).partition("@")
    if repo.count("/") != 1 or repo.startswith((".", "/")) or not all(repo.split("/")):
        raise QuantkitError("no such folder", file=source, allowed="a folder, or a Hub id such as org/name")
    from quantkit.export.hub_source import fetch, open_headers

    return open_headers(repo, revision or None) if headers_only else open_folder(fetch(repo, revision or None))


class Reader:
    """Positioned reads of tensors, safe from many threads; files are opened once and closed together."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._held = threading.local()

    @contextmanager
    def hold(self, tensors: Iterable[TensorInfo]) -> Iterator[None]:
        """Read tensors now; what this thread reads of them inside the block comes from memory."""
        self._held.data = {t.name: self.read(t) for t in tensors}
        try:
            yield
        finally:
            del self._held.data

    def _fd(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise QuantkitError(f"cannot read the file: {e.strerror}", file=file) from e
            return self._fds[file]

    def descriptor(self, info: TensorInfo) -> int:
        """The open file that holds a tensor; it stays open until `close`."""
        return self._fd(info.file)

    def read_into(self, info: TensorInfo, first: int, into: npt.NDArray[Any]) -> None:
        """Fill the contiguous array `into` with the tensor's bytes from byte `first` on."""
        held = getattr(self._held, "data", {}).get(info.name)
        if held is not None:
            memoryview(into).cast("B")[:] = held[first : first + into.nbytes]  # type: ignore[arg-type]
            return
        try:
            read_all(self._fd(info.file), memoryview(into).cast("B"), info.start + first)  # type: ignore[arg-type]
        except EOFError as e:
            raise QuantkitError("the file became shorter while it was read", file=info.file, tensor=info.name) from e
        except OSError as e:
            raise QuantkitError(f"cannot read: {e.strerror}", file=info.file, tensor=info.name) from e

    def read(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor."""
        data = np.empty(info.nbytes, np.uint8)
        if info.nbytes:
            self.read_into(info, 0, data)
        return data

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
