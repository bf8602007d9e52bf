"""Where calibration text comes from: files, data sets, the text that ships; and what is refused, by which words.

pytest tests/calibrate/test_text.py
"""

import json
import pickle
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from quantkit.calibrate import text
from quantkit.calibrate.chat import Conversation, render
from quantkit.calibrate.text import SAMPLE, load_documents, split_name
from quantkit.kernels.errors import QuantkitError

ROOT = Path(__file__).parents[2]
TURNS = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
WRITTEN = "<turn>user\nHello?<eos>\n<turn>assistant\nHello.<eos>\n"


@pytest.fixture(autouse=True)
def cache_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(file: Path, content: str) -> Path:
    file.write_text(content, encoding="utf-8")
    return file


def lines(file: Path, *rows: object) -> Path:
    return write(file, "".join(json.dumps(row) + "\n" for row in rows))


def records(source) -> list:
    found = load_documents(source).records
    return [found[i] for i in range(len(found))]


def as_text(record) -> str:
    return record if isinstance(record, str) else render(record, byte_tokenizer())


# ---- files ----


def test_a_text_file_is_one_document(tmp_path):
    found = load_documents(write(tmp_path / "novel.txt", "\ufeffOne.\r\n\r\nTwo, après.\n"))
    assert (found.origin, found.is_shipped) == ("novel.txt", False)
    assert list(found.records) == ["One.\n\nTwo, après.\n"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "As it is.\n", "id": 7}, "As it is.\n"),
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 = 4"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, WRITTEN),
        ({"messages": TURNS}, WRITTEN),
        ({"messages": TURNS, "text": "the same, flat"}, WRITTEN),
        ({"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]}, WRITTEN),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]}, TURNS[1]]}, WRITTEN),
        (
            {
                "messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}],
                "tools": [{"function": {"name": "look"}}],
            },
            "<turn>tool look\n<turn>user\nHello?<eos>\n<turn>assistant\n[look]<eos>\n",
        ),
        # data sets write null where other rows have a value
        ({"messages": [{**TURNS[0], "tool_calls": None}, TURNS[1]], "tools": None}, WRITTEN),
    ],
)  # fmt: skip
def test_fields_of_a_row(tmp_path, row, expected):
    (record,) = records(lines(tmp_path / "data.jsonl", row))
    assert as_text(record) == expected


def test_blank_lines_and_odd_line_ends_in_strings_are_no_rows(tmp_path):
    file = write(tmp_path / "data.jsonl", '{"text": "a\u2028b\u0085c"}\n\n   \n{"text": "d"}')
    assert records(file) == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.jsonl", '{"text": "a"}\n{"text": "b"\n', "data.jsonl, line 2: not JSON"),
        ("data.jsonl", '{"text": "a"}\n\n["b"]\n', "data.jsonl, line 3: not a JSON object"),
        ("data.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("data.jsonl", '{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', "line 2: mixed fields.*`text` in line 1, `messages` here"),
        ("data.jsonl", '{"body": "a", "title": "t"}\n', "line 1: no field to take text from.*value: body, title.*allowed: messages, "),
        ("data.jsonl", '{"prompt": "a"}\n', "no field to take text from"),
        ("data.jsonl", '{"text": 5}\n', "line 1: `text` is not a string.*value: int"),
        ("data.jsonl", '{"prompt": "a", "completion": null}\n', "`completion` is not a string.*NoneType"),
        ("data.jsonl", '{"messages": "a"}\n', "`messages` is not a list of messages.*value: str"),
        ("data.jsonl", '{"messages": []}\n', "line 1: a conversation without messages"),
        ("data.jsonl", '{"messages": ["a"]}\n', "line 1, message 1: not an object.*value: str"),
        ("data.jsonl", '{"messages": [{"content": "a"}]}\n', "message 1: no role.*value: content"),
        ("data.jsonl", '{"messages": [{"role": "user", "content": null}]}\n', "message 1: `content` is not a string"),
        ("data.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "message 1: content that is not text.*value: image"),
        ("data.jsonl", '{"messages": [{"role": "user", "content": "a"}], "tools": "b"}\n', "`tools` is not a list"),
        ("data.jsonl", " \n", "an empty file"),
        ("data.txt", "", "an empty file"),
        ("data.csv", "a,b", r"not a kind of file that text is read from.*allowed: \.txt, \.jsonl, \.parquet"),
        ("data.parquet", "PAR", "not a readable parquet file"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path, name, content, says):
    with pytest.raises(QuantkitError, match="(?s)" + says):
        load_documents(write(tmp_path / name, content))


def test_missing_file_is_not_taken_for_a_data_set(tmp_path):
    for source in (
        tmp_path / "absent.jsonl",
        "absent.txt",
        "./absent",
        "~/absent-folder-of-nobody",
        tmp_path / "absent",
    ):
        with pytest.raises(QuantkitError, match=r"no such file|not a kind of file"):
            load_documents(source)


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(QuantkitError, match=r"(?s)not UTF-8.*latin\.txt.*byte 0xe9 at 1"):
        load_documents(tmp_path / "latin.txt")


# ---- data sets ----


def test_parquet_rows_are_read_when_asked_for(tmp_path):
    rows = {"text": ["a", "b", None], "other": [1, 2, 3]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data.parquet")
    found = load_documents(tmp_path / "data.parquet")
    assert (found.origin, len(found.records)) == ("data.parquet", 3)
    assert [found.records[1], found.records[0]] == ["b", "a"]
    with pytest.raises(QuantkitError, match=r"(?s)data\.parquet, row 2: `text` is not a string.*NoneType"):
        found.records[2]


def test_parquet_conversations_keep_their_tools(tmp_path):
    tools = [[{"type": "function", "function": {"name": "look"}}]]
    datasets.Dataset.from_dict({"messages": [TURNS], "tools": tools, "id": [1]}).to_parquet(tmp_path / "data.parquet")
    (record,) = records(tmp_path / "data.parquet")
    assert as_text(record) == "<turn>tool look\n" + WRITTEN


def test_folder_of_files_is_a_data_set(tmp_path):
    folder = tmp_path / "stories"
    folder.mkdir()
    lines(folder / "train.jsonl", {"text": "one"}, {"text": "two"})
    lines(folder / "test.jsonl", {"text": "three"})
    found = load_documents(folder)
    assert found.origin == "stories"
    assert records(folder) == ["one", "two"]
    assert load_documents(f"{folder}:test").origin == "stories:test"
    assert records(f"{folder}:test") == ["three"]
    with pytest.raises(QuantkitError, match=r"(?s)cannot load the data set.*stories::odd"):
        load_documents(f"{folder}::odd")


def test_folder_that_was_saved_to_disk(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["one", "two"]})
    data.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"odd": data}).save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"odd": data, "even": data}).save_to_disk(tmp_path / "several")
    assert records(tmp_path / "plain") == records(tmp_path / "single") == ["one", "two"]
    with pytest.raises(QuantkitError, match=r"(?s)no split train.*value: several.*allowed: odd, even"):
        load_documents(tmp_path / "several")
    assert records(f"{tmp_path / 'several'}::even") == ["one", "two"]
    with pytest.raises(QuantkitError, match=r"(?s)no split test.*value: several:test.*allowed: odd, even"):
        load_documents(f"{tmp_path / 'several'}:test")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name:train", ("org/name", None, "train")),
        ("org/name:train_sft", ("org/name", None, "train_sft")),
        ("org/name:test[:10%]", ("org/name", None, "test[:10%]")),
        ("org/name:en:train[10:20]", ("org/name", "en", "train[10:20]")),
        ("org/name:en", ("org/name", "en", None)),
        ("org/name:testing-notes", ("org/name", "testing-notes", None)),
        ("org/name:en:validation", ("org/name", "en", "validation")),
        ("org/name::odd", ("org/name", None, "odd")),
    ],
)
def test_names_of_data_sets(source, parts, monkeypatch):
    assert split_name(source) == parts
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": ["x"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert (load_documents(source).origin, asked) == (source, [parts])


@pytest.mark.parametrize("source", ["", ":train", "a:b:c:d"])
def test_what_is_no_name_of_a_data_set(source):
    with pytest.raises(QuantkitError, match=r"(?s)not a name.*allowed: NAME, NAME:CONFIG, NAME:CONFIG:SPLIT"):
        load_documents(source)


def test_data_set_that_cannot_be_loaded(monkeypatch):
    def load(name, config, split):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        QuantkitError, match=r"(?s)cannot load.*org/name \(ConnectionError: no route to the hub\).*allowed: a \.txt"
    ):
        load_documents("org/name")
    assert not datasets.are_progress_bars_disabled()


def test_data_set_without_rows_or_text(tmp_path):
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "empty.parquet")
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(QuantkitError, match="no rows to calibrate with"):
        load_documents(tmp_path / "empty.parquet")
    with pytest.raises(QuantkitError, match=r"(?s)other: no field to take text from.*value: body"):
        load_documents(tmp_path / "other")


def test_code_and_pickles_of_a_data_set_do_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "train.pkl").write_bytes(pickle.dumps(Trap()))
    write(folder / "trap.py", f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(QuantkitError, match="cannot load the data set"):
        load_documents(folder)
    assert not (tmp_path / "ran").exists()


# ---- conversations ----


def test_no_template_is_an_error_that_names_the_row(tmp_path):
    (record,) = records(lines(tmp_path / "data.jsonl", {"messages": TURNS}))
    with pytest.raises(QuantkitError, match=r"(?s)data\.jsonl, line 1: conversations.*no chat template.*hint"):
        render(record, byte_tokenizer(template=None))


def test_template_that_refuses_names_the_row_and_its_reason():
    refused = Conversation(({"role": "rejected", "content": ""},), None, "line 9")
    with pytest.raises(QuantkitError, match=r"(?s)line 9: the chat template refuses.*TemplateError: no such role"):
        render(refused, byte_tokenizer())


# ---- what ships ----


def test_shipped_text_is_large_various_and_clean():
    found = load_documents(None)
    assert (found.origin, found.is_shipped) == (SAMPLE, True) == ("quantkit sample text", True)
    texts = [r for r in found.records if isinstance(r, str)]
    chats = [r for r in found.records if isinstance(r, Conversation)]
    size = sum(len(t.encode()) for t in texts)
    assert 160_000 <= size <= 200_000
    assert len(texts) >= 100
    assert len(set(texts)) == len(texts)
    assert len(chats) >= 12
    assert sum(c.tools is not None for c in chats) >= 3
    assert sum(any("reasoning_content" in m for m in c.messages) for c in chats) >= 2
    for t in texts:
        assert not t.startswith("\n")
        assert len(t) > 150
        assert "%%" not in t
    whole = "\n".join(texts)
    for piece in [*"ßéñ的のж∫°€", "def ", "SELECT", "#include", "<!DOCTYPE html>", "fn "]:
        assert piece in whole
    for word in ("/work", "localhost", "quantkit", "pypi"):
        assert word not in whole
    # prose that repeats itself would count less than its length: few lines come twice
    long_lines = [line for line in whole.split("\n") if len(line) > 60]
    assert len(set(long_lines)) == len(long_lines)


def test_shipped_conversations_are_written_by_a_template():
    chats = [r for r in records(None) if isinstance(r, Conversation)]
    written = [render(c, byte_tokenizer()) for c in chats]
    assert all(w.count("<turn>") == len(c.messages) + len(c.tools or ()) for w, c in zip(written, chats, strict=True))


def test_shipped_conversations_are_well_formed():
    for chat in (r for r in records(None) if isinstance(r, Conversation)):
        roles = [m["role"] for m in chat.messages]
        assert roles[-1] == "assistant", chat.where
        assert "system" not in roles[1:], chat.where
        offered = {t["function"]["name"] for t in chat.tools or ()}
        calls = [c["function"] for m in chat.messages for c in m.get("tool_calls", ())]
        assert {c["name"] for c in calls} == offered, chat.where
        assert len(calls) == roles.count("tool"), chat.where
        assert all(isinstance(c["arguments"], dict) for c in calls), chat.where


def test_everything_a_user_may_name_is_told(tmp_path):
    """The refusal of an unknown file lists exactly the suffixes that are read."""
    with pytest.raises(QuantkitError) as e:
        load_documents(write(tmp_path / "x.doc", "x"))
    listed = set(re.findall(r"\.\w+", str(e.value.allowed)))
    assert listed == {*text.SUFFIXES, ".npy", ".safetensors", ".json"}
    np.save(tmp_path / "ids.npy", np.zeros(3))
    with pytest.raises(QuantkitError, match="not a kind of file that text is read from"):
        load_documents(tmp_path / "ids.npy")
