"""A model four times as deep needs no more memory: one block is loaded at a time, and all of it is freed.

    pytest tests/calibrate/test_blocks_memory.py

Anonymous memory is watched in a process of its own, where every larger buffer is mapped by itself and so goes back to the
system when it is freed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from families import tiny

SIZES = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "head_dim": 64, "vocab_size": 256}
BLOCK = 4 * (384 * 384 * 2 + 384 * 128 * 2 + 3 * 384 * 1536)  # 8.7 MB in float32


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(n.split()[1]) * 1024 for n in lines if n.startswith("RssAnon"))


def growth(folder):
    """Bytes over the opened model, at the most, while every block runs on 4 samples that wait in files.

    Looked at after every tensor that is read and every run, while the block and what it gave are in memory.
    """
    from model_weights import OnDisk, token_ids
    from quantkit.calibrate.activations import Activations
    from quantkit.calibrate.blocks import open_model

    class Watched(OnDisk):
        peak = 0

        def read(self, name):
            tensor = super().read(name)
            self.look()
            return tensor

        def look(self):
            self.peak = max(self.peak, anonymous())

    weights = Watched(folder / "model.safetensors")
    model = open_model(folder, weights)
    before = anonymous()
    with Activations((model.start(token_ids(1, 16, seed=s, vocabulary=256)) for s in range(4)), memory=0) as chain:
        for i in range(model.num_blocks):
            with model.block(i) as block:
                for n in range(4):
                    chain[n] = block.run(chain[n])
                    weights.look()
    return weights.peak - before


def test_four_times_the_depth_adds_nothing(tmp_path):
    for depth in (3, 12):
        tiny(tmp_path / str(depth), "llama", num_hidden_layers=depth, **SIZES)
    code = "import test_blocks_memory as t, sys, json; print(json.dumps([t.growth(t.Path(f)) for f in sys.argv[1:]]))"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(paths)}
    folders = [tmp_path / d for d in ("3", "3", "12")]  # the first run also pays for what is set up once
    ran = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    _, shallow, deep = json.loads(ran.stdout.splitlines()[-1])
    assert shallow > 0.95 * BLOCK, "the block itself was not seen"
    assert shallow < 1.6 * BLOCK
    assert deep < 1.05 * shallow, f"{deep} bytes for 12 blocks, {shallow} for 3"
