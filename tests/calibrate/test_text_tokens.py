"""Samples of token ids: packed to the last token, chosen by the seed, from documents, one long text or a file of ids.

pytest tests/calibrate/test_text_tokens.py
"""

import hashlib
import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import BOS, EOS, TURN, VOCAB, byte_tokenizer, save
from quantkit.calibrate import tokens
from quantkit.calibrate.chat import Conversation
from quantkit.calibrate.text import Documents, load_documents
from quantkit.calibrate.tokenizer import load_tokenizer
from quantkit.calibrate.tokens import load_token_ids, make_samples, read_samples
from quantkit.kernels.errors import QuantkitError
from safetensors.numpy import save_file

LONG = Documents(
    "long", ["".join(f"{i:04d}" for i in range(1000))]
)  # position p holds digit p % 4 of the number p // 4
MANY = Documents("many", [chr(65 + i) * (5 + i) for i in range(26)])
CHAT = Conversation(({"role": "user", "content": "Hi"},), None, "row 0")


def as_bytes(ids) -> bytes:
    return bytes(int(i) for i in ids)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a look-up on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# ---- documents ----


def test_documents_are_packed_whole_each_closed_by_one_eos():
    found = make_samples(MANY, byte_tokenizer(), samples=10, seq_len=40, seed=3)
    assert (found.ids_NL.shape, found.ids_NL.dtype, found.origin, found.seed) == ((10, 40), np.int32, "many", 3)
    stream = found.ids_NL.reshape(-1)
    parts = np.split(stream, np.flatnonzero(stream == EOS) + 1)
    seen = [as_bytes(p[:-1]).decode() for p in parts[:-1]]
    assert len(seen) == len(set(seen)) > 10
    assert set(seen) < set(MANY.records)
    assert seen != sorted(seen)
    tail = as_bytes(parts[-1]).decode()  # cut where the last row is full
    assert any(str(r).startswith(tail) for r in MANY.records)
    # whole documents were read until there was enough, and no further
    assert 400 <= found.tokens_available < 400 + 31


def test_only_what_is_needed_is_read():
    class Counting:
        asked: list[int] = []  # noqa: RUF012

        def __len__(self):
            return 10_000_000

        def __getitem__(self, index):
            self.asked.append(index)
            return "x" * 99

    found = make_samples(Documents("large", Counting()), byte_tokenizer(), samples=4, seq_len=50, seed=0)
    assert (found.tokens_available, len(Counting.asked)) == (200, 2)


def test_order_first_keeps_the_order():
    found = make_samples(MANY, byte_tokenizer(), samples=2, seq_len=16, seed=0, order="first")
    expected = [65] * 5 + [EOS] + [66] * 6 + [EOS] + [67] * 7 + [EOS] + [68] * 8 + [EOS] + [69] * 2
    assert found.ids_NL.reshape(-1).tolist() == expected


def test_empty_documents_leave_no_trace():
    documents = Documents("d", ["", "abcdefg", "", ""])
    assert make_samples(documents, byte_tokenizer(), samples=1, seq_len=8, seed=1).ids_NL.tolist() == [
        [*b"abcdefg", EOS]
    ]


def test_template_that_ends_a_turn_is_not_ended_twice():
    documents = Documents("chats", [CHAT, CHAT])
    found = make_samples(documents, byte_tokenizer(), samples=1, seq_len=20, seed=0)
    written = [TURN, *b"user\nHi", EOS, *b"\n"]
    assert found.ids_NL[0].tolist() == written + written


def test_documents_without_an_end_of_text_token():
    with pytest.raises(QuantkitError, match=r"(?s)no end-of-text token to join documents by.*hint"):
        make_samples(MANY, byte_tokenizer(eos=False), samples=1, seq_len=8, seed=0)
    assert make_samples(LONG, byte_tokenizer(eos=False), samples=1, seq_len=8, seed=0).ids_NL.shape == (1, 8)


# ---- one long text ----


@pytest.mark.parametrize(("samples", "seq_len"), [(1, 4000), (4, 1000), (7, 100), (40, 100), (3, 8), (500, 8)])
def test_windows_are_even_and_inside_the_text(samples, seq_len):
    found = make_samples(LONG, byte_tokenizer(), samples=samples, seq_len=seq_len, seed=5)
    text = LONG.records[0].encode()
    # every window is a piece of the text; only one place fits where it holds two whole numbers
    starts = [text.find(as_bytes(row), max(0, i * (4000 // samples))) for i, row in enumerate(found.ids_NL)]
    assert min(starts) >= 0
    assert set(np.diff(starts)) <= {4000 // samples}
    assert found.tokens_available == 4000


def test_order_first_takes_the_beginning():
    found = make_samples(LONG, byte_tokenizer(), samples=3, seq_len=100, seed=9, order="first")
    assert as_bytes(found.ids_NL.reshape(-1)) == LONG.records[0].encode()[:300]


def test_very_long_text_is_cut_after_lines(monkeypatch):
    text = "ab\n" * 40 + "no end of line in a long while " * 3
    whole = make_samples(Documents("t", [text]), byte_tokenizer(), samples=1, seq_len=200, seed=0, order="first")
    monkeypatch.setattr(tokens, "PIECE", 10)
    assert max(map(len, tokens._pieces(text))) > 90
    assert [len(p) for p in tokens._pieces(text)][:3] == [12, 12, 12]
    pieces = make_samples(Documents("t", [text]), byte_tokenizer(), samples=1, seq_len=200, seed=0, order="first")
    assert pieces.ids_NL.tolist() == whole.ids_NL.tolist()
    assert pieces.tokens_available == whole.tokens_available == 213


# ---- BOS ----


@pytest.mark.parametrize("documents", [MANY, LONG])
def test_every_sequence_opens_as_the_tokenizer_opens_a_text(documents):
    plain = make_samples(documents, byte_tokenizer(), samples=5, seq_len=39, seed=2)
    opened = make_samples(documents, byte_tokenizer(bos=True), samples=5, seq_len=40, seed=2)
    assert (opened.ids_NL[:, 0] == BOS).all()
    assert (opened.ids_NL[:, 1:] == plain.ids_NL).all()


# ---- determinism ----


@pytest.mark.parametrize("documents", [MANY, LONG])
def test_same_settings_same_digest_and_any_other_another(documents):
    def digest(**changed):
        settings = {"samples": 6, "seq_len": 24, "seed": 0, "order": "seeded", **changed}
        return make_samples(documents, byte_tokenizer(), **settings).digest

    others = [digest(seed=1), digest(samples=5), digest(seq_len=25), digest(order="first")]
    assert digest() == digest()
    assert len({digest(), *others}) == 5


def test_digest_is_the_written_one():
    """It is recorded in run folders: a change makes every one of them look like another text."""
    found = make_samples(MANY, byte_tokenizer(), samples=2, seq_len=16, seed=0, order="first")
    settings = '{"bos": [], "order": "first", "samples": 2, "seed": 0, "seq_len": 16}'
    expected = hashlib.sha256(settings.encode() + found.ids_NL.astype("<i4").tobytes()).hexdigest()
    assert found.digest == expected
    chosen = make_samples(MANY, byte_tokenizer(), samples=3, seq_len=8, seed=0)
    assert chosen.digest == "b2b8ae227ac7c3ab7ed0e0d34b96d2c634fcf988bca952baca3c50b892aaf378"


# ---- refusals ----


@pytest.mark.parametrize(
    ("documents", "samples", "seq_len", "says"),
    [
        (LONG, 5, 1000, "4000 tokens in long.*>= 5000 for 5 samples of 1000.*--samples 4 would fit"),
        (MANY, 100, 10, "481 tokens in many.*>= 1000 for 100 samples of 10.*--samples 48 would fit"),
        (LONG, 1, 5000, "4000 tokens in long.*>= 5000 for 1 samples of 5000.*a shorter --seq-len"),
        (Documents("void", ["", ""]), 1, 8, "0 tokens in void"),
    ],
)
def test_too_short(documents, samples, seq_len, says):
    with pytest.raises(QuantkitError, match="(?s)the text is too short.*" + says):
        make_samples(documents, byte_tokenizer(), samples=samples, seq_len=seq_len, seed=0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples": 0}, "no samples asked for.*value: 0"),
        ({"samples": -3}, "no samples asked for.*value: -3"),
        ({"seq_len": 7}, "sequences too short.*value: 7.*allowed: >= 8"),
        ({"seed": -1}, "not a seed.*value: -1"),
        ({"seed": 1 << 32}, "not a seed"),
    ],
)
def test_numbers_that_make_no_sense(settings, says):
    with pytest.raises(QuantkitError, match="(?s)" + says):
        make_samples(LONG, byte_tokenizer(), **{"samples": 1, "seq_len": 8, "seed": 0, **settings})


def test_conversations_of_a_user_need_a_template():
    with pytest.raises(QuantkitError, match="row 0: conversations, and the tokenizer has no chat template"):
        make_samples(Documents("chats", [CHAT, CHAT]), byte_tokenizer(template=None), samples=1, seq_len=8, seed=0)


# ---- the shipped text ----


def test_shipped_text_is_enough_and_offline(offline, tmp_path):
    found = read_samples(None, save(tmp_path), samples=64, seq_len=512, seed=0, vocab=VOCAB)
    assert (found.ids_NL.shape, found.origin) == ((64, 512), "quantkit sample text")


def test_shipped_conversations_are_left_out_without_a_template_or_with_a_refusing_one():
    shipped = load_documents(None)
    texts = [r for r in shipped.records if isinstance(r, str)]
    size = sum(len(t.encode()) + 1 for t in texts)
    options = {"samples": 1, "seq_len": size, "seed": 0, "order": "first"}
    for template in (None, "{{ raise_exception('no') }}"):
        found = make_samples(shipped, byte_tokenizer(template=template), **options)
        assert (found.tokens_available, (found.ids_NL == TURN).sum()) == (size, 0)
        with pytest.raises(QuantkitError, match="too short"):
            make_samples(shipped, byte_tokenizer(template=template), **{**options, "seq_len": size + 1})
    assert (make_samples(shipped, byte_tokenizer(), **{**options, "seq_len": size + 5000}).ids_NL == TURN).sum() > 20


# ---- files of ids ----

IDS = (np.arange(40).reshape(4, 10) * 6).astype(np.int64)


def id_files(folder: Path) -> list[Path]:
    np.save(folder / "a.npy", IDS.astype(np.uint16))
    save_file({"input_ids": IDS, "attention_mask": np.ones_like(IDS)}, folder / "b.safetensors")
    (folder / "c.json").write_text(json.dumps(IDS.tolist()))
    return [folder / "a.npy", folder / "b.safetensors", folder / "c.json"]


def test_rows_are_used_as_they_are(tmp_path):
    found = [load_token_ids(f) for f in id_files(tmp_path)]
    assert [f.origin for f in found] == ["a.npy", "b.safetensors", "c.json"]
    assert all((f.ids_NL == IDS).all() and f.ids_NL.dtype == np.int32 and f.tokens_available == 40 for f in found)
    assert len({f.digest for f in found}) == 1
    some = load_token_ids(tmp_path / "a.npy", samples=3, seq_len=10)
    assert some.ids_NL.tolist() == IDS[:3].tolist()
    assert some.digest != found[0].digest


def test_one_row_is_cut(tmp_path):
    (tmp_path / "flat.json").write_text(json.dumps(list(range(29))))
    assert load_token_ids(tmp_path / "flat.json", seq_len=9).ids_NL.tolist() == np.arange(27).reshape(3, 9).tolist()
    with pytest.raises(QuantkitError, match=r"(?s)no length to cut it by.*--seq-len"):
        load_token_ids(tmp_path / "flat.json")
    with pytest.raises(QuantkitError, match=r"(?s)sequences too short.*value: 0"):
        load_token_ids(tmp_path / "flat.json", seq_len=0)


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (IDS, {"seq_len": 12}, "sequences of another length.*value: 10.*allowed: 12"),
        (IDS, {"samples": 5}, "too few sequences.*value: 4.*allowed: >= 5"),
        (IDS, {"samples": 0}, "no samples asked for"),
        (IDS.reshape(-1), {"seq_len": 41}, "too few sequences in the file.*value: 0"),
        (IDS - 1, {}, "a number that is no token id.*value: -1"),
        (IDS + (1 << 31), {}, "a number that is no token id.*value: 2147483882"),
        (IDS.astype(np.float32), {}, r"not an array of token ids.*float32 \[4, 10\].*allowed: integers"),
        (IDS.reshape(2, 2, 10), {}, r"not an array of token ids.*\[2, 2, 10\]"),
        (IDS[:, :4], {}, "sequences too short"),
        (IDS[:0], {}, "not an array of token ids"),
        (np.array([{"a": 1}], dtype=object), {}, "token ids cannot be read.*allow_pickle"),
    ],
)
def test_arrays_that_are_refused(tmp_path, content, options, says):
    np.save(tmp_path / "ids.npy", content)
    with pytest.raises(QuantkitError, match="(?s)" + says):
        load_token_ids(tmp_path / "ids.npy", **options)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ids.json", "[[1, 2], [3]]", "row 1 is of another length.*value: 1.*allowed: 2"),
        ("ids.json", "[[1, 2], [3, 4.5]]", "row 1 is not a list of token ids"),
        ("ids.json", "[true, 1]", "row 0 is not a list of token ids"),
        ("ids.json", '{"text": "a"}', r"row 0 is not a list of token ids.*text comes as \.jsonl"),
        ("ids.json", '[{"text": "a"}]', "row 0 is not a list of token ids"),
        ("ids.json", "[]", "not an array of token ids"),
        ("ids.json", "[1, 2", "token ids cannot be read.*JSONDecodeError"),
        ("ids.npy", "not numpy", "token ids cannot be read"),
        ("ids.safetensors", "short", "token ids cannot be read"),
        ("ids.bin", "1 2 3", r"token ids are not read from such a file.*allowed: \.npy, \.safetensors, \.json"),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(QuantkitError, match="(?s)" + says):
        load_token_ids(tmp_path / name)


def test_safetensors_without_input_ids_and_missing_file(tmp_path):
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    with pytest.raises(QuantkitError, match=r"(?s)token ids cannot be read.*input_ids"):
        load_token_ids(tmp_path / "ids.safetensors")
    with pytest.raises(QuantkitError, match="no such file"):
        load_token_ids(tmp_path / "absent.npy")


def test_ids_outside_the_vocabulary(tmp_path):
    file = id_files(tmp_path)[0]
    options = {"samples": 4, "seq_len": 10, "seed": 0}
    # no tokenizer in the folder, and none is needed
    assert read_samples(file, tmp_path, vocab=235, **options).ids_NL.max() == 234
    with pytest.raises(QuantkitError, match=r"(?s)a\.npy: a token id that the model does not have.*234.*0\.\.233"):
        read_samples(file, tmp_path, vocab=234, **options)


# ---- the tokenizer ----


@pytest.mark.parametrize("bos", [False, True])
def test_tokenizer_of_a_folder_without_the_network(tmp_path, offline, bos):
    folder = save(tmp_path / "model", bos=bos)
    for text in ("Grüße, 世界!\n", "<turn>user\nHi<eos>"):
        assert load_tokenizer(folder)(text)["input_ids"] == byte_tokenizer(bos=bos)(text)["input_ids"]
    assert load_tokenizer(folder).eos_token_id == EOS


def test_tokenizer_that_is_missing_or_broken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(QuantkitError, match=r"(?s)no tokenizer in the checkpoint.*tokenizer\.json.*hint"):
        load_tokenizer(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')
    with pytest.raises(QuantkitError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(QuantkitError, match=r"(?s)not JSON.*tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("code", [["own.OwnTokenizer", None], [None, "own.OwnTokenizer"], "own.OwnTokenizer"])
def test_tokenizer_that_is_code_runs_only_when_allowed(tmp_path, offline, name, code):
    folder = save(tmp_path / "model")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    file = folder / name
    config = json.loads(file.read_text()) if file.is_file() else {"model_type": "llama"}
    file.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": code}}))
    with pytest.raises(QuantkitError, match=r"(?s)code of the checkpoint.*own\.OwnTokenizer.*--trust-remote-code"):
        load_tokenizer(folder)
    assert not ran.exists()


def test_code_of_the_checkpoint_runs_when_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = save(tmp_path / "model")
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}})
    )
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert tokenizer("Hi<eos>")["input_ids"] == [*b"Hi", EOS]
