"""The file format: hostile headers are refused by name, and what we lay out the reference reader reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantkit.export.safetensors_file import ITEMSIZE, layout, nbytes_of, read_header
from quantkit.kernels.errors import QuantkitError
from safetensors import safe_open


def file_of(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, tuple[Any, int, str]] = {
    # name: (header, bytes of data, part of the message)
    "not an object": ([1, 2], 0, "not a JSON object"),
    "not json": (b'{"a":', 0, "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "deep nesting": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "header"),
    "same name twice": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "appears twice",
    ),
    "unknown dtype": ({"a": entry(dtype="F7")}, 8, "unknown dtype"),
    "dtype not text": ({"a": entry(dtype=["F32"])}, 8, "unknown dtype"),
    "entry is a list": ({"a": [1]}, 8, "malformed header entry"),
    "entry lacks a key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "malformed header entry"),
    "entry has another key": ({"a": {**entry(), "x": 1}}, 8, "malformed header entry"),
    "negative size": ({"a": entry(shape=(-2,))}, 8, "malformed shape"),
    "bool as a size": ({"a": entry(shape=(True, 2))}, 8, "malformed shape"),
    "float as a size": ({"a": entry(shape=(2.0,))}, 8, "malformed shape"),
    "huge product": ({"a": entry(shape=(1 << 40, 1 << 40))}, 8, "disagree"),
    "shape disagrees with offsets": ({"a": entry(shape=(3,))}, 8, "disagree"),
    "offsets run backwards": ({"a": entry(offsets=(8, 0))}, 8, "disagree"),
    "three offsets": ({"a": entry(offsets=(0, 8, 9))}, 8, "malformed data_offsets"),
    "bool as an offset": ({"a": entry(offsets=(False, 8))}, 8, "malformed data_offsets"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "overlap"),
    "two tensors on the same bytes": ({"a": entry(), "b": entry()}, 8, "overlap"),
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "gap"),
    "gap at the start": ({"a": entry(offsets=(4, 12))}, 12, "gap"),
    "data cut short": ({"a": entry()}, 7, "truncated"),
    "bytes at the end": ({"a": entry()}, 9, "after the last tensor"),
    "metadata not text": ({"__metadata__": {"format": 1}, "a": entry()}, 8, "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    header, size, message = HOSTILE[case]
    path = file_of(tmp_path / "m.safetensors", header, bytes(size))
    with pytest.raises(QuantkitError, match=message) as e:
        read_header(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize("length", [0, 1, 10**9, 1 << 63])
def test_lying_header_length_is_refused(length: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", {"a": entry()}, bytes(8), length)
    with pytest.raises(QuantkitError, match="cut short"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"PK\x03\x04 this is a pickle"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(QuantkitError):
        read_header(path)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
entries = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda s: s != "__metadata__" and s.isprintable()),
    st.tuples(st.sampled_from(["U8", "I32", "BF16", "F32", "I64", "F8_E4M3"]), shapes),
    min_size=1,
    max_size=8,
)


@given(entries)
def test_layout_is_read_back_by_the_reference(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    listed = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    header, slots, size = layout(listed)
    path = tmp_path_factory.mktemp("layout") / "m.safetensors"
    content = bytearray(size)
    content[: len(header)] = header
    for i, slot in enumerate(slots):
        content[slot.start : slot.start + slot.nbytes] = bytes([i + 1]) * slot.nbytes
    path.write_bytes(content)
    ours = read_header(path)
    with safe_open(path, "np") as f:
        assert set(f.keys()) == set(ours) == set(tensors)
        for i, (name, dtype, shape) in enumerate(listed):
            assert ours[name].shape == tuple(f.get_slice(name).get_shape()) == shape
            assert ours[name].start % ITEMSIZE[dtype] == 0, "aligned for a memory map"
            if dtype in ("U8", "I32", "F32", "I64"):
                raw = np.ascontiguousarray(f.get_tensor(name)).reshape(-1).view(np.uint8)
                assert raw.tobytes() == bytes([i + 1]) * nbytes_of(dtype, shape)


def test_layout_keeps_the_order_of_entries_and_leaves_no_gap() -> None:
    listed = [("small", "U8", (3,)), ("wide", "I64", (1,)), ("empty", "F32", (0, 4)), ("mid", "BF16", (2,))]
    header, slots, size = layout(listed)
    assert [s.name for s in slots] == ["small", "wide", "empty", "mid"]
    assert size == len(header) + sum(s.nbytes for s in slots)
    assert len(header) % 8 == 0
    by_start = sorted(slots, key=lambda s: (s.start, s.nbytes))
    assert [s.name for s in by_start if s.nbytes] == ["wide", "mid", "small"]
