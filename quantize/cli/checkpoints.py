"""Commands about a checkpoint that is there: `inspect`, `card`, `repair`, and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from quantkit.quantize.cli.options import CORES, AsJson, Jobs, OutFolder

Evaluation = Annotated[
    Path | None, typer.Option("--evaluation", metavar="FILE", help="What `quantkit evaluate --json` has printed.")
]
BaseModel = Annotated[str | None, typer.Option("--base-model", metavar="ORG/NAME", help="The source on the Hub.")]


def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder, or a Hub id.")], json: AsJson = False
) -> None:
    """Say what a checkpoint is: family, sizes, how the tensors of each role are stored."""
    from quantkit.quantize.cli.commands import inspect_command

    inspect_command(checkpoint, json)


def card(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder that quantkit has written.")],
    evaluation: Evaluation = None,
    base_model: BaseModel = None,
) -> None:
    """Write the model card (README.md) again, with the scores of an evaluation."""
    from quantkit.quantize.card import recard

    recard(checkpoint, evaluation, base_model)
    sys.stderr.write(f"written: {checkpoint / 'README.md'}\n")


def repair(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder to mend; it is not changed.")],
    out: OutFolder,
    source: Annotated[
        str | None, typer.Option("--source", help="The checkpoint it was made from: gives side files that are missing.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Whose names of KV scales: vllm, sglang, trtllm, transformers.")
    ] = "vllm",
    jobs: Jobs = CORES,
    json: AsJson = False,
) -> None:
    """Mend a checkpoint that engines refuse or load wrongly, as far as that needs no source, and say what it cost."""
    from quantkit.quantize.cli.repair_command import repair_command

    repair_command(checkpoint, out, source, engine, jobs, json)
