"""The tokenizer of a checkpoint, loaded from its files alone and without running its code unasked."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.calibrate.chat import Tokenizer
from quantkit.calibrate.text import INSTALL
from quantkit.kernels.errors import QuantkitError

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint folder, from its files alone: nothing is looked up on the network.

    Raises QuantkitError when transformers or the tokenizer is missing or broken, and when the tokenizer is Python code
    of the checkpoint and `trust_remote_code` is False.
    """
    if not any((folder / name).is_file() for name in FILES):
        raise QuantkitError(
            "no tokenizer in the checkpoint", file=folder, allowed=", ".join(FILES),
            hint="copy it from the published model, or give token ids (.npy, .safetensors, .json)",
        )  # fmt: skip
    code = _remote_code(folder)
    if code and not trust_remote_code:
        raise QuantkitError(
            "the tokenizer is code of the checkpoint, which is not run unasked", file=folder, value=code,
            hint="read that code, then use --trust-remote-code; or give token ids (.npy, .safetensors, .json)",
        )  # fmt: skip
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise QuantkitError("a tokenizer needs transformers, which is not installed", hint=INSTALL) from e
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as e:  # `tokenizers` raises bare Exception for a broken file
        reason = f"{type(e).__name__}: {str(e)[:300]}"
        raise QuantkitError("the tokenizer cannot be loaded", file=folder, value=reason) from e
    return tokenizer


def _remote_code(folder: Path) -> str | None:
    """What `auto_map` names as the tokenizer's class, from either of the two files transformers looks in."""
    for name in ("tokenizer_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_bytes())
        except ValueError as e:
            raise QuantkitError("not JSON", file=file, value=str(e)) from e
        code = config.get("auto_map") if isinstance(config, dict) else None
        if isinstance(code, dict):
            code = code.get("AutoTokenizer")
        if code:
            return ", ".join(str(c) for c in code if c) if isinstance(code, list) else str(code)
    return None
