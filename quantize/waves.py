"""Cut a list into runs whose parts fit into the memory together; a part that is too large alone is a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_waves(parts: Iterable[T], size: Callable[[T], int], memory: int) -> Iterator[list[T]]:
    """The parts in their order, as many at a time as take at most `memory` bytes."""
    wave: list[T] = []
    used = 0
    for part in parts:
        if wave and used + size(part) > memory:
            yield wave
            wave, used = [], 0
        wave.append(part)
        used += size(part)
    if wave:
        yield wave
