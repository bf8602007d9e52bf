"""A run that is killed: a callback for progress that raises."""

from __future__ import annotations

from collections.abc import Callable


class KilledError(BaseException):
    """Stands for the end of the process: nothing may catch it on the way, as nothing catches a kill."""


def killed_after(calls: int) -> Callable[[object], None]:
    """A callback that raises KilledError when it is called for the `calls`-th time."""
    seen = 0

    def callback(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise KilledError

    return callback
