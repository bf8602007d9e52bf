"""A report of `verify` as JUnit XML, which CI systems show: each check is a test case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from quantkit.export.engines.finding import EngineReport
from quantkit.export.verify import Check
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.verification import Report

SHOWN = 50  # failures of one check; the rest is a count


def write_junit(path: Path, report: Report, twins: Sequence[EngineReport] = ()) -> None:
    """One `testsuite`: a `testcase` for each check and engine; raises QuantkitError when it cannot be written."""
    checks = [*report.checks, *(_as_check(t) for t in twins)]
    failed = [c for c in checks if not c.passed]
    suite = ElementTree.Element(
        "testsuite", name="quantkit verify", tests=str(len(checks)), failures=str(len(failed)), errors="0",
        skipped="0", time=f"{report.seconds:.3f}",
    )  # fmt: skip
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname=_clean(Path(report.folder).name), name=check.name)
        if check.failures:
            more = [f"... and {len(check.failures) - SHOWN} more"] if len(check.failures) > SHOWN else []
            fault = ElementTree.SubElement(case, "failure", message=_clean(check.failures[0]))
            fault.text = _clean("\n".join([*check.failures[:SHOWN], *more]))
        ElementTree.SubElement(case, "system-out").text = _clean(check.value)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as e:
        raise QuantkitError(f"cannot write the JUnit file: {e.strerror}", file=path) from e


def _as_check(twin: EngineReport) -> Check:
    faults = tuple(f"{f.verdict}: {f.where}: {f.what}" for f in twin.findings if f.failed)
    return Check(f"{twin.engine} {twin.version} with {twin.tp} ranks", f"{len(twin.findings)} findings", faults)


def _clean(text: str) -> str:
    """Without what XML cannot hold: names of tensors come from files of others."""
    return "".join(c if c in "\n\t" or (c.isprintable() and not "\ud800" <= c <= "\udfff") else "?" for c in text)
