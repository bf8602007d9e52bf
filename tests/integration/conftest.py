"""Fixtures of the integration tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from integration.checkpoints import cache_folder
from integration.engine import Engine
from integration.schemes import SOURCES
from smollm2 import smollm2


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct in bf16, fetched once and kept in the cache."""
    return smollm2(cache_folder() / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny bf16 checkpoint of a family, by name."""
    folder = tmp_path_factory.mktemp("sources")
    return cache(lambda family: SOURCES[family](folder / family))


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder that is removed with the test: two hundred checkpoints would fill a small disk."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def vllm() -> Iterator[Engine]:
    """A real vLLM in its own environment."""
    engine = Engine()
    yield engine
    engine.close()
