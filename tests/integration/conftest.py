"""Fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.checkpoints import cache
from smollm2 import smollm2


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct in bf16, fetched once and kept in the cache."""
    return smollm2(cache() / "smollm2-135m-instruct")
