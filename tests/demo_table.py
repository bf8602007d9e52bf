"""The end of `make demo`: what each checkpoint costs in accuracy, and what the FP8 KV cache does, as two tables.

    python tests/demo_table.py VERIFY.json NAME=EVALUATE.json ...

reads what `quantkit verify --json` and `quantkit evaluate --json` print.
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


def main(verify: str, *evaluations: str) -> None:
    read = {name: json.loads(Path(file).read_text()) for name, _, file in (e.partition("=") for e in evaluations)}
    first = next(iter(read.values()))
    accuracy = [["BF16, as published", f"{first['perplexity_source']:.2f}", "", ""]]
    accuracy += [
        [name, f"{e['perplexity_candidate']:.2f}", f"{e['kl']:.3f}", f"{100 * e['top1']:.1f} %"]
        for name, e in read.items()
    ]
    table(
        f"Accuracy on {first['tokens']:,} tokens of {Path(first['text'].split()[-1]).name}",
        ["", "perplexity", "KL(BF16 || it)", "same top token"],
        accuracy,
    )
    kv = json.loads(Path(verify).read_text())["kv"]
    table(
        "FP8 KV cache: relative error of attention outputs on recorded keys, values and queries",
        ["layer", "k_scale", "v_scale", "stored scales", "scale 1.0", "clipped"],
        [
            [
                str(layer["layer"]), f"{layer['k_scale']:.4f}", f"{layer['v_scale']:.5f}", f"{layer['error']:.4f}",
                f"{layer['error_at_one']:.4f}", f"{100 * layer['clipped']:.2g} %",
            ]
            for layer in kv
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
