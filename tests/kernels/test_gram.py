"""X^T X of bfloat16 tokens, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from quantkit.kernels.cpu import gram


def tokens(count: int, inputs: int) -> torch.Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count + inputs))
    return (x * torch.logspace(-2, 2, inputs)).bfloat16()


def added(x: torch.Tensor, threads: int) -> torch.Tensor:
    h = torch.full((x.shape[1], x.shape[1]), 3.0)
    gram.add_gram(x.view(torch.int16).numpy().view(np.uint16), 0.5, 0.25, h.numpy(), threads)
    return h.triu()


@pytest.mark.parametrize("inputs", [1, 8, 47, 48, 100, 193])
@pytest.mark.parametrize("count", [1, 2, 255, 700])  # odd, and beyond what is summed up at once
def test_sums_are_those_of_float64(count: int, inputs: int) -> None:
    x = tokens(count, inputs)
    exact = 1.5 + 0.25 * (x.double().T @ x.double())
    size = x.double().norm(dim=0)
    found = added(x, 1)
    assert bool(((found - exact.triu()).abs() <= 1e-6 * (1 + torch.outer(size, size))).all())
    for threads in (2, 3):
        assert torch.equal(added(x, threads), found)


def test_without_the_instruction_it_is_the_same_up_to_rounding(tmp_path: Path) -> None:
    x = tokens(300, 60)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch; from test_gram import added, gram; assert not gram.available()\n"
        "torch.save(added(torch.load(sys.argv[1]), 2), sys.argv[2])"
    )
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    files = [str(tmp_path / name) for name in ("x.pt", "h.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, env=environment, cwd=Path(__file__).parent)
    size = x.double().norm(dim=0)
    assert bool(((torch.load(files[1]) - added(x, 1)).abs() <= 1e-6 * (1 + torch.outer(size, size))).all())
