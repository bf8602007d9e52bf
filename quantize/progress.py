"""Progress for people, on stderr: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 10.0


def _gb(n: float) -> str:
    return f"{n / 1e9:.2f}"


@contextmanager
def progress(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told of bytes done; `total` is their sum."""
    if quiet:
        yield lambda _: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda n: bar.advance(task, n)
        return
    begun = last = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= LINE_SECONDS and done:
            last = now
            left = (total - done) * (now - begun) / done
            rate = done / (now - begun) / 1e9
            print(
                f"{what}: {_gb(done)} of {_gb(total)} GB, {rate:.2f} GB/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance
