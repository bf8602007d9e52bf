"""The result of the streaming benchmark for people: the machine, one table, and the lines that have no peer."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

COLUMNS = (
    "path",
    "GB/s",
    "peer",
    "ratio",
    "wall s",
    "peer",
    "cpu s",
    "peer",
    "peak GB",
    "anon",
    "peer",
    "anon",
    "ratio",
)


def show(result: dict) -> None:
    """Print the dictionary that `stream.py --json` prints."""
    # wide enough for a pipe or a file, where the width of the terminal is unknown
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for name, value in result["machine"].items():
        console.print(f"{name}: {value}")
    console.print(f"peer: {result['peer'] or 'left out'}\n")
    table = Table(box=box.MARKDOWN)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "path" else "right", no_wrap=True)
    for row in result["paths"]:
        table.add_row(row["path"], *_cells(row))
    console.print(table)
    for row in result["paths"]:
        small = row["small_checkpoint_seconds"]
        console.print(f"{row['path']}: first run {small['first']:.1f} s (compiles), later {small['later']:.2f} s")
    for line in result.get("copies", []) + result.get("start-up", []):
        console.print(f"{line['what']}: {line['value']:.2f} {line['unit']}")


def _cells(row: dict) -> list[str]:
    """The columns after the path; the rate first, then time, then memory, each beside the peer's."""
    ours, peer = row["quantkit"], row.get("peer")
    cells = [
        f"{ours['gb_per_s']:.2f}",
        "",
        "",
        f"{ours['wall']:.1f}",
        "",
        f"{ours['cpu']:.1f}",
        "",
        *_memory(ours),
        "",
        "",
        "",
    ]
    if peer:
        cells[1:3] = [f"{peer['gb_per_s']:.3f}", f"{row['ratio']:.1f}x"]
        cells[4] = f"{peer['wall']:.1f}"
        cells[6] = f"{peer['cpu']:.1f}"
        cells[9:] = [*_memory(peer), f"{row['memory_ratio']:.2f}x"]
    return cells


def _memory(run: dict) -> list[str]:
    return [f"{run['peak'] / 1e9:.2f}", f"{run['peak_anon'] / 1e9:.2f}"]
