"""What the integration tests share: checkpoints written by the quantkit command, and their dequantised twins.

A twin is the source with every quantised weight replaced by what the written codes mean, rounded to the source's dtype.
The meaning comes from `oracle/dequantize.py`, which shares no code with the product.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from oracle.dequantize import dequantize, read
from safetensors.torch import save_file

QUANTKIT = (sys.executable, "-m", "quantkit.quantize.cli.main")


def cache() -> Path:
    """Where the real model is kept between runs: QUANTKIT_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("QUANTKIT_CACHE") or Path.home() / ".cache" / "quantkit")


def quantise(source: Path, out: Path, *options: str) -> Path:
    """Run `quantkit quantize`, which verifies what it wrote; returns `out`."""
    done = subprocess.run(
        [*QUANTKIT, "quantize", str(source), "-o", str(out), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"quantkit quantize {source} {' '.join(options)}: {done.stderr}"
    return out


def write_twin(source: Path, quantised: Path, out: Path) -> Path:
    """Write the dequantised twin of `quantised` as `out`; every tensor of the source must be accounted for."""
    meaning = dequantize(quantised)
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
