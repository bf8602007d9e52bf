"""The `push` command and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from quantkit.quantize.cli.options import AsJson, CreatePr, Force, Private, Revision


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A finished checkpoint.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub, made if it does not exist.")],
    private: Private = False,
    revision: Revision = None,
    create_pr: CreatePr = False,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Publish a checkpoint: shards first, configuration and index last, every hash compared. Run again to go on."""
    from quantkit.quantize.cli.push_command import Destination, push_command

    push_command(folder, Destination(repo, private, revision, create_pr, force), json)
