"""Fixtures of the Triton tests: they run on a GPU where there is one, otherwise interpreted on the CPU."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch fills memory that it hands out uninitialised with NaN: what a kernel fails to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
