"""What a twin says: one verdict on one kind of thing, with an example, a count and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Verdict = Literal["ok", "not known", "slow", "silently wrong", "refused"]
SEVERITY: tuple[Verdict, ...] = ("refused", "silently wrong", "slow", "not known", "ok")
FAILS = ("refused", "silently wrong")


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict.

    verdict  ok; slow: right, but on a slower path; silently wrong: it loads and computes something else, at most with a
             warning; refused: an error at load; not known: nothing could be read of it, look at the engine's log
    where    the module, tensor or configuration key it was first seen at
    what     what the engine does, without the name, so that equal ones can be counted together
    fix      what to change, or an empty string
    count    modules or tensors this holds for
    """

    verdict: Verdict
    where: str
    what: str
    fix: str = ""
    count: int = 1

    @property
    def failed(self) -> bool:
        """The checkpoint cannot be served like this."""
        return self.verdict in FAILS


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All findings of one engine at one tensor-parallel size, worst first; `flags` are needed to serve it."""

    engine: str
    version: str
    tp: int
    findings: tuple[Finding, ...]
    flags: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing is refused or silently wrong."""
        return not any(f.failed for f in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain data, with `passed`."""
        return asdict(self) | {"passed": self.passed}


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Equal findings as one, with the first place and the count of all; worst first."""
    found: dict[tuple[str, str, str], Finding] = {}
    for f in findings:
        key = (f.verdict, f.what, f.fix)
        found[key] = replace(found[key], count=found[key].count + f.count) if key in found else f
    return tuple(sorted(found.values(), key=lambda f: SEVERITY.index(f.verdict)))
