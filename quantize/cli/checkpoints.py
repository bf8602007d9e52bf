"""Commands about a checkpoint that is there: `inspect`, `card`, and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from quantkit.quantize.cli.options import AsJson

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
