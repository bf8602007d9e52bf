"""Calibration text: where it comes from, as records that are read when they are asked for.

A source is nothing (the text that ships with the package), a .txt file (one long text), a .jsonl or .parquet file, a
folder, or the name of a Hugging Face data set; folder and name may go on as NAME[:CONFIG][:SPLIT]. `NAME:X` means a
split when X is called like one (train, test, validation, ...), a configuration otherwise; `NAME::SPLIT` is always a
split. Only `datasets` goes to the network, and only for a name. Data sets with code of their own are not run, and
nothing is unpickled.

The shipped text is `sample.txt`, documents divided by lines of `%%`, and `sample_chats.jsonl`, whose conversations are
left out where the tokenizer has no chat template or one that knows no tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from quantkit.calibrate.chat import Record, field_of, to_record
from quantkit.kernels.errors import QuantkitError

SAMPLE = "quantkit sample text"
SUFFIXES = (".txt", ".jsonl", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
INSTALL = "pip install 'quantkit[calibrate]'"


class Records(Protocol):
    """A sequence of records; a data set reads one only when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...


@dataclass(frozen=True, slots=True)
class Documents:
    """A source that is open.

    origin     what a report calls it: a file's name without its folder, or the data set as it was named
    records    texts and conversations
    is_shipped the package's own text: conversations that the tokenizer's template cannot write are left out
    """

    origin: str
    records: Records
    is_shipped: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a table as records; `row(i)` is the mapping of row i, `field` the one of `chat.FIELDS` it is read by."""

    count: int
    row: Callable[[int], Mapping[str, Any]]
    field: str
    origin: str

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Record:
        return to_record(self.row(index), self.field, f"{self.origin}, row {index}")


def load_documents(source: str | Path | None) -> Documents:
    """Open a source of calibration text; None is the shipped text.

    Raises QuantkitError when the file is missing, empty, of another kind or not UTF-8, when a line of .jsonl is no JSON
    object (with its number) or lines are read by different fields, and when a data set cannot be loaded.
    """
    if source is None:
        return _shipped()
    path = Path(source).expanduser()
    if str(source) and path.is_dir():
        return _data_set(str(path), None, None, path.name)
    folder = Path(str(source).partition(":")[0]).expanduser()
    is_folder = ":" in str(source) and folder.is_dir()
    is_file = path.is_file() or path.suffix in SUFFIXES or path.is_absolute() or str(source).startswith((".", "~"))
    if is_file and not is_folder:
        return _file(path)
    name, config, split = split_name(str(source))
    if is_folder:
        return _data_set(str(folder), config, split, f"{folder.name}{str(source)[len(name) :]}")
    return _data_set(name, config, split, str(source))


def split_name(source: str) -> tuple[str, str | None, str | None]:
    """NAME[:CONFIG][:SPLIT] -> (name, configuration, split); raises QuantkitError for another form."""
    name, *rest = re.split(r":(?![^\[]*\])", source)  # not at the colon of a slice, train[:10%]
    if not name or len(rest) > 2:
        raise QuantkitError("not a name of a data set", value=source, allowed="NAME, NAME:CONFIG, NAME:CONFIG:SPLIT")
    if len(rest) == 1:
        is_split = any(rest[0] == s or rest[0].startswith((f"{s}_", f"{s}[")) for s in SPLITS)
        rest = ["", rest[0]] if is_split else [rest[0], ""]
    config, split = rest or ("", "")
    return name, config or None, split or None


def _shipped() -> Documents:
    folder = files("quantkit.calibrate")
    texts = (folder / "sample.txt").read_text(encoding="utf-8").split("\n%%\n")
    chats = (folder / "sample_chats.jsonl").read_text(encoding="utf-8")
    return Documents(SAMPLE, [*texts, *_json_lines(chats, Path("sample_chats.jsonl"))], is_shipped=True)


def _file(path: Path) -> Documents:
    if path.suffix not in SUFFIXES:
        allowed = f"{', '.join(SUFFIXES)}; token ids as .npy, .safetensors or .json"
        raise QuantkitError("not a kind of file that text is read from", file=path, allowed=allowed)
    if not path.is_file():
        raise QuantkitError("no such file", file=path)
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise QuantkitError("not UTF-8", file=path, value=f"byte {e.object[e.start]:#04x} at {e.start}") from e
    if not text.strip():
        raise QuantkitError("an empty file: no text to calibrate with", file=path)
    return Documents(path.name, [text] if path.suffix == ".txt" else _json_lines(text, path))


def _json_lines(text: str, path: Path) -> list[Record]:
    """A record for every line that is not blank, all read by one field."""
    records: list[Record] = []
    first: tuple[int, str] | None = None
    # not splitlines(): JSON strings may hold U+2028 and other characters that it takes for the end of a line
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        row = _json_object(line, where)
        field = field_of(row, where)
        first = first or (number, field)
        if field != first[1]:
            found = f"`{first[1]}` in line {first[0]}, `{field}` here"
            raise QuantkitError(f"{where}: mixed fields", value=found, hint="every line must have the same fields")
        records.append(to_record(row, field, where))
    return records


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise QuantkitError(f"{where}: not JSON ({e})", value=_short(line)) from e
    if not isinstance(row, dict):
        raise QuantkitError(f"{where}: not a JSON object", value=_short(line))
    return row


def _parquet(path: Path) -> Documents:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise QuantkitError("parquet needs pyarrow, which is not installed", file=path, hint=INSTALL) from e
    try:
        names = pq.read_schema(path).names
        field = field_of(names, path.name)
        table = pq.read_table(path, columns=[n for n in names if n in (*field.split("+"), "tools")])
    except (pa.ArrowException, OSError) as e:
        raise QuantkitError("not a readable parquet file", file=path, value=_short(str(e))) from e
    return _rows(table.num_rows, lambda i: table.slice(i, 1).to_pylist()[0], field, path.name)


def _data_set(name: str, config: str | None, split: str | None, origin: str) -> Documents:
    """Load a data set by name, or from a folder (files that `datasets` knows, or one that `save_to_disk` wrote)."""
    try:
        import datasets
    except ImportError as e:
        raise QuantkitError("data sets need `datasets`, which is not installed", value=origin, hint=INSTALL) from e
    is_saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        data = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, config, split=split)
    except Exception as e:  # builders, the Hub and the network raise what they like
        raise QuantkitError(
            "cannot load the data set", value=f"{origin} ({type(e).__name__}: {_short(str(e))})",
            allowed="a .txt, .jsonl or .parquet file, a folder, or NAME[:CONFIG][:SPLIT]",
        ) from e  # fmt: skip
    finally:
        if shows_bars:
            datasets.enable_progress_bars()
    if isinstance(data, dict):
        data = _choose_split(data, split, origin)
    field = field_of(data.column_names, origin)
    return _rows(len(data), lambda i: data[i], field, origin)


def _choose_split(splits: Mapping[str, Any], split: str | None, origin: str) -> Any:
    """The split that was asked for, else `train`, else the only one there is."""
    if split is None:
        split = "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
    if split not in splits:
        raise QuantkitError(f"no split {split} in the data set", value=origin, allowed=", ".join(splits))
    return splits[split]


def _rows(count: int, row: Callable[[int], Mapping[str, Any]], field: str, origin: str) -> Documents:
    if count == 0:
        raise QuantkitError("no rows to calibrate with", value=origin)
    return Documents(origin, _Rows(count, row, field, origin))


def _short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
