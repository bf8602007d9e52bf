"""Progress for people, on stderr: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

LINE_SECONDS = 10.0

Unit = Literal["GB", "tokens", "blocks"]


def _amount(n: float, unit: Unit) -> str:
    return f"{n / 1e9:.2f}" if unit == "GB" else f"{n:,.0f}"


def line(what: str, done: int, total: int, seconds: float, unit: Unit) -> str:
    """One plain line: how much is done, how fast, and how long the rest will take."""
    rate = done / max(seconds, 1e-9)
    left = (total - done) / rate if rate else 0.0
    speed = f"{rate / 1e9:.2f}" if unit == "GB" else f"{rate:,.1f}"
    return f"{what}: {_amount(done, unit)} of {_amount(total, unit)} {unit}, {speed} {unit}/s, {left:.0f} s left"


class Meter:
    """Counts what is done and shows it now and then. Call it with what was added, or `at` with (done, total)."""

    def __init__(self, what: str, total: int, unit: Unit, bar: Any = None, task: Any = None) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._bar, self._task = bar, task
        self._begun = self._last = time.monotonic()

    def __call__(self, added: int) -> None:
        """That much more is done."""
        self.at(self.done + added, self.total)

    def at(self, done: int, total: int) -> None:
        """So much of so much is done."""
        self.done, self.total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS and done:
            self._last = now
            print(line(self.what, done, total, now - self._begun, self.unit), file=sys.stderr, flush=True)


class _Quiet(Meter):
    """Says nothing."""

    def at(self, done: int, total: int) -> None:
        self.done, self.total = done, total


@contextmanager
def progress(what: str, total: int, quiet: bool = False, unit: Unit = "GB") -> Iterator[Meter]:
    """Yields a meter; `total` is what it counts up to: bytes for GB, else tokens or blocks."""
    if quiet:
        yield _Quiet(what, total, unit)
        return
    if not sys.stderr.isatty():
        yield Meter(what, total, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if unit == "GB" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Meter(what, total, unit, bar, bar.add_task(what, total=total or None))
