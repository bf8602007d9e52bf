"""Samples: sequences of token ids of exactly one length, from a tokenizer and documents or from a file of ids.

Documents are joined by the end-of-text token and cut: padding would be measured as if it were text. A tokenizer that
opens every text with a token (BOS) opens every sequence with it, as a server would, since that position carries the
largest activations and keys of many models. The same text, tokenizer and settings give the same ids everywhere.

N samples, L sequence length, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from quantkit.calibrate.chat import Conversation, Record, Tokenizer, render
from quantkit.calibrate.text import INSTALL, Documents, load_documents
from quantkit.calibrate.tokenizer import load_tokenizer
from quantkit.kernels.errors import QuantkitError

Ids = NDArray[np.int32]
Order = Literal["seeded", "first"]

MIN_SEQ_LEN = 8
PIECE = 1 << 18  # characters that are tokenised in one call, which keeps a hundred bytes for each
ID_SUFFIXES = (".npy", ".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class Samples:
    """Token ids to run, and where they came from.

    ids_NL            int32, every row full
    origin            file, data set or "quantkit sample text"
    digest            SHA-256 over ids and settings, hexadecimal
    seed              what chose the documents or windows
    tokens_available  tokens that were read to choose from (a data set is read no further than needed)
    """

    ids_NL: Ids  # noqa: N815
    origin: str
    digest: str
    seed: int
    tokens_available: int


def make_samples(
    documents: Documents, tokenizer: Tokenizer, *, samples: int, seq_len: int, seed: int, order: Order = "seeded"
) -> Samples:
    """`samples` sequences of exactly `seq_len` tokens.

    Documents are shuffled by the seed and packed one after the other, each closed by the end-of-text token, and no more
    are read than needed. One long text gives windows at even distances instead, all moved by one offset of the seed.
    Order "first" leaves the documents in order and takes the first tokens, for an evaluation. Raises QuantkitError when
    there are too few tokens (how many there are and how many are needed) or a number makes no sense.
    """
    _check_numbers(samples, seq_len, seed)
    bos = _opening(tokenizer)
    body = seq_len - len(bos)
    needed = samples * body
    # RandomState: its streams are frozen for all releases of NumPy, those of default_rng are not
    random = np.random.RandomState(seed)
    count = len(documents.records)
    if count == 1:
        ids_T = _tokens(_as_text(documents, 0, tokenizer), tokenizer)
    else:
        chosen = random.permutation(count) if order == "seeded" else np.arange(count)
        ids_T = _packed(documents, tokenizer, chosen, needed)
    if len(ids_T) < needed:
        raise _too_short(documents.origin, len(ids_T), samples, body, len(bos))
    if count == 1 and order == "seeded":
        step = len(ids_T) // samples
        starts = random.randint(step - body + 1) + step * np.arange(samples)
        ids_NL = ids_T[starts[:, None] + np.arange(body)]
    else:
        ids_NL = ids_T[:needed].reshape(samples, body)
    ids_NL = np.concatenate([np.tile(np.array(bos, np.int32), (samples, 1)), ids_NL], axis=1)
    return _samples(ids_NL, documents.origin, seed, len(ids_T), {"order": order, "bos": bos})


def load_token_ids(file: Path, *, samples: int | None = None, seq_len: int | None = None) -> Samples:
    """Token ids from .npy ([N, L] or [T]), .safetensors (`input_ids`) or .json (a list, or lists of one length).

    Rows are used as they are, the first `samples` of them; `seq_len` must be their length. [T] is cut into rows of
    `seq_len`, which must be given. Raises QuantkitError when the file is missing or no such array, rows are too few or
    of another length, or an id is negative (padding or a mask is no token).
    """
    if not file.is_file():
        raise QuantkitError("no such file", file=file)
    if file.suffix not in ID_SUFFIXES:
        raise QuantkitError("token ids are not read from such a file", file=file, allowed=", ".join(ID_SUFFIXES))
    _check_numbers(1 if samples is None else samples, MIN_SEQ_LEN if seq_len is None else seq_len, 0)
    ids = _read_ids(file)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size == 0:
        raise QuantkitError(
            "not an array of token ids",
            file=file,
            value=f"{ids.dtype} {list(ids.shape)}",
            allowed="integers, [N, L] or [T]",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= 1 << 31:
        raise QuantkitError(
            "a number that is no token id", file=file, value=low if low < 0 else high, allowed="0..2147483647"
        )
    if ids.ndim == 1:
        if seq_len is None:
            raise QuantkitError("one row of token ids, and no length to cut it by", file=file, hint="give --seq-len")
        ids = ids[: len(ids) // seq_len * seq_len].reshape(-1, seq_len)
    if seq_len is not None and ids.shape[1] != seq_len:
        raise QuantkitError("sequences of another length", file=file, value=ids.shape[1], allowed=seq_len)
    if len(ids) < (samples or 1):
        raise QuantkitError("too few sequences in the file", file=file, value=len(ids), allowed=f">= {samples or 1}")
    _check_numbers(len(ids), ids.shape[1], 0)
    chosen = np.ascontiguousarray(ids[:samples], dtype=np.int32)
    return _samples(chosen, file.name, 0, ids.size, {"order": "file"})


def read_samples(
    source: str | Path | None, folder: Path, *, samples: int, seq_len: int, seed: int, vocab: int,
    order: Order = "seeded", trust_remote_code: bool = False,
) -> Samples:  # fmt: skip
    """Samples for the checkpoint `folder` with `vocab` tokens from any source: text, a data set, token ids, or None.

    A file of ids needs no tokenizer. Raises QuantkitError as the functions above do, and for an id the model has not.
    """
    if source is not None and Path(source).suffix in ID_SUFFIXES:
        found = load_token_ids(Path(source), samples=samples, seq_len=seq_len)
    else:
        documents = load_documents(source)
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        found = make_samples(documents, tokenizer, samples=samples, seq_len=seq_len, seed=seed, order=order)
    check_vocabulary(found, vocab)
    return found


def check_vocabulary(samples: Samples, vocab: int) -> None:
    """Raise QuantkitError when an id is not below `vocab`: the embedding has no row for it."""
    high = int(samples.ids_NL.max())
    if high >= vocab:
        hint = "the text was tokenised for another model"
        raise QuantkitError(
            f"{samples.origin}: a token id that the model does not have",
            value=high,
            allowed=f"0..{vocab - 1}",
            hint=hint,
        )


def _check_numbers(samples: int, seq_len: int, seed: int) -> None:
    if samples < 1:
        raise QuantkitError("no samples asked for", value=samples, allowed=">= 1")
    if seq_len < MIN_SEQ_LEN:
        raise QuantkitError("sequences too short to mean anything", value=seq_len, allowed=f">= {MIN_SEQ_LEN}")
    if not 0 <= seed < 1 << 32:
        raise QuantkitError("not a seed", value=seed, allowed="0..4294967295")


def _opening(tokenizer: Tokenizer) -> list[int]:
    """[BOS] when the tokenizer puts it before every text, else []."""
    ids = list(tokenizer("")["input_ids"])
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _as_text(documents: Documents, index: int, tokenizer: Tokenizer) -> str:
    """A record as text; empty for a shipped conversation that the tokenizer's template cannot write."""
    record: Record = documents.records[index]
    if not isinstance(record, Conversation):
        return record
    try:
        return render(record, tokenizer)
    except QuantkitError:
        if documents.is_shipped:
            return ""
        raise


def _tokens(text: str, tokenizer: Tokenizer) -> Ids:
    """The ids of a text without special tokens at its ends; a very long text is cut after a line first."""
    parts = []
    for piece in _pieces(text):
        parts.append(np.array(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def _packed(documents: Documents, tokenizer: Tokenizer, chosen: NDArray[Any], needed: int) -> Ids:
    """Tokens of the chosen documents, each closed by the end-of-text token, until `needed` are there."""
    eos = tokenizer.eos_token_id
    if eos is None:
        hint = "give one long text (.txt) or token ids, or set eos_token in tokenizer_config.json"
        raise QuantkitError("the tokenizer has no end-of-text token to join documents by", hint=hint)
    parts: list[Ids] = []
    total = 0
    for index in chosen:
        ids_T = _tokens(_as_text(documents, int(index), tokenizer), tokenizer)
        if not len(ids_T):
            continue
        if eos not in ids_T[-2:]:  # a chat template closes the last turn itself, some with a line feed after it
            ids_T = np.append(ids_T, np.int32(eos))
        parts.append(ids_T)
        total += len(ids_T)
        if total >= needed:
            break
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _too_short(origin: str, found: int, samples: int, body: int, bos: int) -> QuantkitError:
    fits = found // body
    return QuantkitError(
        "the text is too short", value=f"{found} tokens in {origin}",
        allowed=f">= {samples * body} for {samples} samples of {body + bos}",
        hint=f"--samples {fits} would fit, or give more text" if fits else "give more text, or a shorter --seq-len",
    )  # fmt: skip


def _read_ids(file: Path) -> NDArray[Any]:
    try:
        if file.suffix == ".npy":
            return np.asarray(np.load(file, allow_pickle=False))
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="numpy") as tensors:
                return np.asarray(tensors.get_tensor("input_ids"))
        return _json_ids(json.loads(file.read_bytes()), file)
    except ImportError as e:
        raise QuantkitError("this file needs safetensors, which is not installed", file=file, hint=INSTALL) from e
    except QuantkitError:
        raise
    except Exception as e:  # safetensors has an error class of its own, NumPy raises ValueError, EOFError, OSError
        raise QuantkitError("token ids cannot be read", file=file, value=f"{type(e).__name__}: {str(e)[:300]}") from e


def _json_ids(data: Any, file: Path) -> NDArray[Any]:
    rows = data if isinstance(data, list) and data and all(isinstance(r, list) for r in data) else [data]
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not all(type(v) is int for v in row):
            allowed = "a list of integers, or lists of them; text comes as .jsonl"
            raise QuantkitError(f"row {i} is not a list of token ids", file=file, allowed=allowed)
        if len(row) != len(rows[0]):
            raise QuantkitError(f"row {i} is of another length", file=file, value=len(row), allowed=len(rows[0]))
    return np.array(rows if data is rows else rows[0], dtype=np.int64)


def _samples(ids_NL: Ids, origin: str, seed: int, available: int, settings: dict[str, Any]) -> Samples:
    count, seq_len = ids_NL.shape
    settings = {**settings, "samples": count, "seq_len": seq_len, "seed": seed}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(ids_NL, dtype="<i4").tobytes())
    return Samples(ids_NL, origin, digest.hexdigest(), seed, available)
