"""What the integration tests share: checkpoints written by the quantkit command, and their dequantised twins.

A twin is the source with every quantised weight replaced by what the written codes mean, rounded to the source's dtype.
The meaning comes from `oracle/dequantize.py`, which shares no code with the product.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
from oracle.dequantize import dequantize, read
from quantkit.quantize.cli.main import app, run_app
from safetensors.torch import save_file


def cache_folder() -> Path:
    """Where the real model is kept between runs: QUANTKIT_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("QUANTKIT_CACHE") or Path.home() / ".cache" / "quantkit")


def quantise(source: Path, out: Path, *options: str) -> Path:
    """`quantkit quantize`, which verifies what it wrote; returns `out`.

    Runs the command in this process: two hundred starts of Python would take longer than the work.
    """
    _command("quantize", source, "-o", out, *options)
    return out


def _command(*words: object) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = run_app(lambda: app([str(w) for w in words]))
    assert status == 0, f"quantkit {' '.join(map(str, words))}: exit {status}\n{printed.getvalue()}"


def calibrate(source: Path, out: Path, room: Path, *options: str, more: tuple[str, ...] = (), length: int = 64) -> Path:
    """`quantkit calibrate` with 8 samples of random ids, export with `more` options, and verify; returns `out`."""
    vocabulary = read_vocabulary(source)
    room.mkdir(parents=True, exist_ok=True)
    np.save(room / "ids.npy", np.random.default_rng(0).integers(0, vocabulary, (8, length)).astype(np.int32))
    _command(
        "calibrate", source, "-o", room / "run", "--text", room / "ids.npy", "--samples", 8, "--seq-len", length,
        *options,
    )  # fmt: skip
    _command("export", room / "run", "-o", out, *more)
    _command("verify", out, "--source", source, "--run", room / "run")
    return out


def export(source: Path, out: Path, *options: str) -> Path:
    """`quantkit export`; returns `out`."""
    _command("export", source, "-o", out, *options)
    return out


def read_vocabulary(source: Path) -> int:
    """Number of token ids, of config.json."""
    return int(json.loads((source / "config.json").read_text())["vocab_size"])


def write_twin(source: Path, quantised: Path, out: Path) -> Path:
    """Write the dequantised twin of `quantised` as `out`; every tensor of the source must be accounted for."""
    meaning = {n: x for n, x in dequantize(quantised).items() if not n.endswith((".k_scale", ".v_scale"))}
    plain = read(source)
    assert set(meaning) == set(plain), f"tensors differ from the source: {sorted(set(meaning) ^ set(plain))[:4]}"
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    twin = {name: meaning[name].to(tensor.dtype).contiguous() for name, tensor in plain.items()}
    save_file(twin, out / "model.safetensors", metadata={"format": "pt"})
    return out


def quantization_config(folder: Path) -> dict:
    """The `quantization_config` of a written checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config") or config["text_config"]["quantization_config"]
