"""What `quantkit repair` does, and what it says of it."""

from __future__ import annotations

import sys
from pathlib import Path

from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.commands import emit
from quantkit.quantize.repair import repair


def repair_command(folder: Path, out: Path, source: str | None, engine: str, jobs: int, as_json: bool) -> None:
    """`quantkit repair`: exit status 2 for what needs the source."""
    if not folder.is_dir():
        raise QuantkitError("no such folder", file=folder)
    done = repair(folder, out, open_checkpoint(source) if source else None, engine=engine, jobs=jobs)
    for change in done.changes:
        cost = "" if change.error is None else f" (relative error of their weights {change.error:.5f})"
        sys.stderr.write(f"{change.what}{cost}\n")
    said = f"verified: {out}, {done.nbytes / 1e9:.3f} GB" if done.changes else "nothing to mend, nothing written"
    sys.stderr.write(said + "\n")
    if as_json:
        changes = [{"what": c.what, "error": c.error} for c in done.changes]
        emit({"out": str(out) if done.changes else None, "bytes": done.nbytes, "changes": changes})
