"""A tokenizer of bytes for tests: one token a byte, ids 0..255, then <eos> 256, <bos> 257, <turn> 258; saved as a checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

EOS, BOS, TURN, VOCAB = 256, 257, 258, 259
TEMPLATE = (
    "{% for t in tools or [] %}<turn>tool {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    "{% if m.role == 'rejected' %}{{ raise_exception('no such role') }}{% endif %}"
    "<eos>\n{% endfor %}"
)


def letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    table = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [table[b] for b in range(256)]


def byte_tokenizer(*, template: str | None = TEMPLATE, bos: bool = False, eos: bool = True) -> Any:
    """The tokenizer; `bos`: it opens every text with <bos>, unless it is asked for no special tokens."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>", "<turn>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    names = {"bos_token": "<bos>"} | ({"eos_token": "<eos>"} if eos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


def save(folder: Path, **options: Any) -> Path:
    byte_tokenizer(**options).save_pretrained(folder)
    return folder
