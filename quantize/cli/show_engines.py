"""The findings of the engines' twins as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.export.engines.finding import EngineReport, Finding
from quantkit.quantize.cli.show import _console


def engines(reports: Sequence[EngineReport]) -> None:
    """Each engine and size: findings, worst first, and the flags it needs."""
    out = _console()
    for report in reports:
        said = "can serve it" if report.passed else "CANNOT serve it as it is"
        out.print(f"{report.engine} {report.version}, {report.tp} rank{'s' if report.tp > 1 else ''}: {said}")
        for finding in report.findings:
            out.print(f"  {finding.verdict:<14} {_line(finding)}", markup=False)
            if finding.fix and finding.verdict != "ok":
                out.print(f"  {'':<14}   fix: {finding.fix}", markup=False)
        if report.flags:
            out.print(f"  {'flags':<14} {' '.join(report.flags)}")


def _line(finding: Finding) -> str:
    many = f" ({finding.count}, first {finding.where})" if finding.count > 1 else f" ({finding.where})"
    return finding.what + many
