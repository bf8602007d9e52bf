"""The end of `make demo`: what each checkpoint costs in accuracy, and what the FP8 KV cache does, as two tables.

    python tests/demo_table.py NAME=EVALUATE.json ...

reads what `quantkit evaluate --json` prints; the last one is of a checkpoint with an FP8 cache (`--kv`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    made = Table(title=title, box=None, title_justify="left", title_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*row)
    Console(highlight=False, width=110).print("\n", made)


def main(*evaluations: str) -> None:
    read = {name: json.loads(Path(file).read_text()) for name, _, file in (e.partition("=") for e in evaluations)}
    first, last = next(iter(read.values())), list(read.values())[-1]
    text = f"{first['tokens']:,} tokens of {Path(first['text'].split()[-1]).name}"
    accuracy = [["BF16, as published", f"{first['perplexity_source']:.2f}", "", ""]]
    accuracy += [
        [name, f"{e['perplexity_candidate']:.2f}", f"{e['kl']:.3f}", f"{100 * e['top1']:.1f} %"]
        for name, e in read.items()
    ]
    table(f"Accuracy on {text}", ["", "perplexity", "KL(BF16 || it)", "same top token"], accuracy)
    numbers = [
        [
            str(x["layer"]), f"{x['k_scale']:.4f}", f"{x['v_scale']:.5f}", f"{x['error']:.2e}",
            f"{x['error_at_one']:.2e}", f"{100 * max(x['k_clipped'], x['v_clipped']):.2g} %",
        ]
        for x in last["kv_layers"]
    ]  # fmt: skip
    mean = ["mean", "", "", f"{last['kv_error']:.2e}", f"{last['kv_error_at_one']:.2e}", ""]
    table(
        f"FP8 KV cache: relative squared error of attention outputs on {text}",
        ["layer", "k_scale", "v_scale", "stored scales", "scale 1.0", "clipped"],
        [*numbers, mean],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
