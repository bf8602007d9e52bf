"""How each reader matches the name of a layer against a list: six rules for what is written the same way.

A parent's name, a prefix or a pattern that is open at its end mean different things to different readers, which is why
quantkit writes full names, one per shard. Published checkpoints do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch, translate

from quantkit.kernels.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class Names:
    """A list of a configuration.

    entries   as written
    exact     those that are names, not `re:` patterns
    patterns  all `re:` entries as one, matched from the start of a name as every reader does
    globs     entries with a wildcard as one, matched in full
    """

    entries: tuple[str, ...]
    exact: frozenset[str]
    patterns: re.Pattern[str] | None
    globs: re.Pattern[str] | None


Match = Callable[[Names, str], bool]


def _compiled(patterns: list[str]) -> re.Pattern[str] | None:
    for p in patterns:
        try:
            re.compile(p)
        except re.error as e:
            raise QuantkitError(f"a pattern of the configuration is not valid: {e}", value=p) from e
    return re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None


def names(entries: object, renamed: Callable[[str], str] = str) -> Names:
    """The entries of a list; anything else is an empty list, as readers take a missing key.

    renamed  how an engine renames names; patterns it leaves alone. Raises QuantkitError for an invalid pattern.
    """
    listed = [e for e in entries if isinstance(e, str)] if isinstance(entries, list | tuple) else []
    listed = [e if e.startswith("re:") else renamed(e) for e in listed]
    exact = [e for e in listed if not e.startswith("re:")]
    patterns = [e[3:] for e in listed if e.startswith("re:")]
    globs = [translate(e) for e in exact if any(c in e for c in "*?[")]
    return Names(tuple(listed), frozenset(exact), _compiled(patterns), _compiled(globs))


def whole(listed: Names, name: str) -> bool:
    """The name itself, or a `re:` pattern (compressed-tensors; vLLM)."""
    return name in listed.exact or (listed.patterns is not None and listed.patterns.match(name) is not None)


def ending(listed: Names, name: str) -> bool:
    """As `whole`, and what follows any dot of the name (SGLang, compressed-tensors)."""
    if whole(listed, name):
        return True
    tail = name
    while tail:
        _, _, tail = tail.partition(".")
        if tail in listed.exact:
            return True
    return False


def part(listed: Names, name: str) -> bool:
    """Whole parts of the name between dots, anywhere, with or without a leading `model.` (SGLang, fp8)."""
    parts = name.split(".")
    if not listed.exact:
        return False
    for i in range(len(parts)):
        for j in range(i + 1, len(parts) + 1):
            piece = ".".join(parts[i:j])
            if piece in listed.exact or f"model.{piece}" in listed.exact:
                return True
    return False


def part_or_glob(listed: Names, name: str) -> bool:
    """Whole parts of the name, or a wildcard that fits all of it or one of its parts (SGLang, ModelOpt)."""
    if part(listed, name):
        return True
    globs = listed.globs
    return globs is not None and any(globs.fullmatch(p) for p in (name, *name.split(".")))


def inside(listed: Names, name: str) -> bool:
    """Any piece of the name (AWQ)."""
    return any(e in name for e in listed.entries)


def inside_or_glob(listed: Names, name: str) -> bool:
    """Any piece of the name, or a wildcard; one at the end is taken off first (vLLM, ModelOpt)."""
    return any(e.removesuffix("*") in name or fnmatch(name, e) for e in listed.entries)


def beginning_or_end(listed: Names, name: str) -> bool:
    """A pattern from the start of the name, open at its end, or the name's end (transformers, fp8)."""
    return any(_begins(e, name) or name.endswith(e) for e in listed.entries)


def _begins(entry: str, name: str) -> bool:
    try:
        return re.match(entry, name) is not None
    except re.error:
        return False
