"""The engines' twins on a folder, or on an output that is only planned: its headers and configuration are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.export.checkpoint import NESTED, Reader, open_folder, read_json
from quantkit.export.engines.files import Files, files_of
from quantkit.export.engines.finding import EngineReport, Finding
from quantkit.export.engines.twin import ENGINES, examine
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.plan import Plan


def examine_folder(folder: Path, engines: Sequence[str], tp: Sequence[int]) -> list[EngineReport]:
    """One report for each engine and size (1 when none is given); a folder that cannot be opened is a finding too."""
    sizes = check_engine_names(engines, tp)
    try:
        checkpoint = open_folder(folder)
    except QuantkitError as e:
        # engines are less strict: they load a stale or doubled tensor, and the last one read wins
        finding = Finding("silently wrong", str(folder), str(e).replace("\n", "; "), "write the checkpoint again")
        return [EngineReport(x, ENGINES[x].RULES.version, n, (finding,), ()) for x in engines for n in sizes]
    with Reader() as reader:
        files = files_of(checkpoint, reader)
        return [examine(files, engine, n) for engine in engines for n in sizes]


def examine_plan(plan: Plan, engines: Sequence[str], tp: Sequence[int]) -> list[EngineReport]:
    """The same for the output of a plan; what only its values could tell is left out."""
    sizes = check_engine_names(engines, tp or plan.recipe.output.tp)
    headers = {slot.name: slot for shard in plan.shards for slot in shard.slots}
    nested = plan.files.get(NESTED)
    given = plan.source.folder / NESTED
    if nested is None and plan.format == "as published" and given.is_file():
        nested = read_json(given)
    files = Files(plan.files["config.json"], nested, headers)
    return [examine(files, engine, n) for engine in engines for n in sizes]


def check_engine_names(engines: Sequence[str], tp: Sequence[int]) -> tuple[int, ...]:
    """The sizes to look at; raises QuantkitError for an engine that has no twin."""
    unknown = [e for e in engines if e not in ENGINES]
    if unknown:
        raise QuantkitError("unknown engine", value=", ".join(unknown), allowed=", ".join(ENGINES))
    if any(n < 1 for n in tp):
        raise QuantkitError("a tensor-parallel size must be 1 or more", value=list(tp))
    return tuple(tp) or (1,)
