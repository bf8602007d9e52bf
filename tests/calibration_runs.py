"""What tests of calibration runs share: ids in place of text, and the bytes of a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from quantkit.calibrate.tokens import Samples


def samples(seed: int = 0, n: int = 40, length: int = 128) -> Samples:
    """Random ids."""
    ids = np.random.default_rng(seed).integers(0, 100, (n, length)).astype(np.int32)
    return Samples(ids, "random ids", hashlib.sha256(ids.tobytes()).hexdigest(), seed, ids.size)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder but its lock."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "lock"
    }
