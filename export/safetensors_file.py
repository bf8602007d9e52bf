"""The safetensors file, read with suspicion and written in place.

Layout (safetensors format, huggingface/safetensors): 8 bytes little-endian header length, a JSON header that maps each
tensor name to dtype, shape and `data_offsets` relative to the end of the header, then the tensor bytes without a gap.

Reading: only headers, and every number in them is checked before it is believed: a checkpoint is downloaded data.
Writing: the reference writer needs all tensors at once; ours lays a shard out first (`layout`), so that workers can
write each tensor at its final offset in any order, and a killed run can go on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.kernels.errors import QuantkitError

ITEMSIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the reference reader's own limit, in bytes
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `start` is its absolute byte offset in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor of a shard to be written goes: `start` is the absolute byte offset in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; `dtype` is a safetensors name."""
    return math.prod(shape) * ITEMSIZE[dtype]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # the second entry would silently win
        names = [k for k, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _header_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, offset of the data, file size); raises QuantkitError for anything that is not a safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            prefix = f.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length < 2 or length > MAX_HEADER or 8 + length > size:
                raise QuantkitError(
                    "not a safetensors file, or cut short: the header does not fit in the file",
                    file=path,
                    value=f"header of {length} bytes in a file of {size}",
                    allowed=f"2 to {MAX_HEADER} bytes, inside the file",
                    hint="download the file again and compare its size with the published one",
                )
            raw = f.read(length)
    except OSError as e:
        raise QuantkitError(f"cannot read the file: {e.strerror}", file=path) from e
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise QuantkitError(f"the safetensors header is not valid JSON: {e}", file=path) from e
    if not isinstance(header, dict):
        raise QuantkitError("the safetensors header is not a JSON object", file=path, value=type(header).__name__)
    return header, 8 + length, size


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # `bool` is an `int` in Python: type() is meant


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    def bad(what: str, value: object, allowed: object) -> QuantkitError:
        return QuantkitError(what, file=path, tensor=name, value=value, allowed=allowed)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        keys = sorted(entry) if isinstance(entry, dict) else entry
        raise bad("malformed header entry", keys, "dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise bad("unknown dtype", dtype, ", ".join(ITEMSIZE))
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise bad("malformed shape", shape, "a list of sizes >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise bad("malformed data_offsets", offsets, "[begin, end]")
    begin, end = offsets
    if end - begin != nbytes_of(dtype, shape):
        raise bad(
            "data_offsets disagree with dtype and shape", f"{end - begin} bytes", f"{nbytes_of(dtype, shape)} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data + begin, end - begin)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, checked: sizes agree, no overlap, no gap, data end where the file ends."""
    header, data, size = _header_json(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise QuantkitError("__metadata__ must map strings to strings", file=path)
    tensors = {name: _tensor(path, name, entry, data) for name, entry in header.items()}
    at = data
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if t.start != at:
            raise QuantkitError(
                "tensors overlap" if t.start < at else "a gap lies before the tensor",
                file=path,
                tensor=t.name,
                value=f"begins at byte {t.start - data} of the data",
                allowed=f"{at - data}",
            )
        at += t.nbytes
    if at != size:
        raise QuantkitError(
            "the file is truncated" if at > size else "bytes lie after the last tensor",
            file=path,
            value=f"{size} bytes",
            allowed=f"{at} bytes",
            hint="download the file again" if at > size else None,
        )
    return tensors


def layout(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[Slot], int]:
    """Lay out one shard of (name, dtype, shape) entries: (bytes of length and header, slots, size of the file).

    Wide dtypes come first and the header is padded to 8 bytes, so that every tensor is aligned for a reader that maps
    the file. Slots come back in the order of `entries`.
    """
    order = sorted(range(len(entries)), key=lambda i: (-ITEMSIZE[entries[i][1]], entries[i][0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = [0] * len(entries)
    at = 0
    for i in order:
        name, dtype, shape = entries[i]
        begins[i] = at
        at += nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[i], at]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise QuantkitError("too many tensors for one shard", value=f"header of {len(text)} bytes", allowed=MAX_HEADER)
    data = 8 + len(text)
    slots = [Slot(n, d, s, data + b, nbytes_of(d, s)) for (n, d, s), b in zip(entries, begins, strict=True)]
    return len(text).to_bytes(8, "little") + text, slots, data + at


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset`: pwrite may write less than it was given."""
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def read_all(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from `offset`; raises EOFError when the file ends before."""
    view = into.cast("B")
    while view:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise EOFError
        view, offset = view[got:], offset + got
