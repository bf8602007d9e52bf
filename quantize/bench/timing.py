"""Kernels timed in turn, so that a change of the machine's clock or load meets all of them.

CPU: in each of its turns a kernel rests until the threads of the one before are asleep (OpenMP and BLAS pools keep
spinning for some 25 ms), runs once untimed, then a few times on the clock. Each call gets another copy of its weights,
as in a model, whose layers follow one another: a small matrix that stayed in a cache would look three times as fast.
GPU: Triton's `do_bench`, which empties the L2 cache before each call and takes the time from events.

The median over all calls is what is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

CALLS = 4  # of a turn, the first one untimed
_REST = 0.03
_LONG = 0.03  # seconds of a call from which on a turn has one timed call only
_MOST_COPIES = 64

T = TypeVar("T")
Turn = Callable[[Callable[[int], Any], int], list[float]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to time: `run(c)` works on copy `c` of the weights, any number."""

    name: str
    run: Callable[[int], Any]


def attempt(name: str, call: Callable[[], T], note: Callable[[str], None]) -> T | None:
    """What `call` gives, or None and a note when the installed release or the machine cannot do it."""
    try:
        return call()
    except (RuntimeError, NotImplementedError, ImportError, AttributeError, TypeError) as e:
        note(f"{name} is left out: {(str(e).strip() or type(e).__name__).splitlines()[0]}")
        return None


def copies_for(bytes_of_all: int, cache: int, room: int) -> int:
    """Copies that everybody gets, so that what one turn read has left the cache before the next one of that kernel.

    bytes_of_all  one copy of the weights of all candidates; room: bytes that all copies may take
    """
    wanted = max(CALLS, cache // max(bytes_of_all, 1) + 1)
    return max(min(wanted, _MOST_COPIES, room // max(bytes_of_all, 1)), 1)


def cpu_turn(run: Callable[[int], Any], first: int) -> list[float]:
    """Seconds of the timed calls of one turn; they use the copies after `first`."""
    time.sleep(_REST)
    seconds = []
    for call in range(CALLS):
        began = time.perf_counter()
        run(first + call)
        seconds.append(time.perf_counter() - began)
        if call == 1 and seconds[0] > _LONG:
            break
    return seconds[1:]


def cuda_turn(run: Callable[[int], Any], first: int) -> list[float]:
    """The same on the current GPU; `first` is not needed, since nothing stays in a cache."""
    from triton.testing import do_bench

    return [do_bench(lambda: run(0), warmup=10, rep=20, return_mode="median") / 1e3]


def alternate(candidates: Sequence[Candidate], turn: Turn, rounds: int, done: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each candidate over so many turns each; `done` is called after every turn."""
    seconds: dict[str, list[float]] = {c.name: [] for c in candidates}
    for n in range(rounds):
        for c in candidates if n % 2 == 0 else reversed(candidates):
            seconds[c.name] += turn(c.run, n * CALLS)
            done()
    return {name: median(s) for name, s in seconds.items()}
