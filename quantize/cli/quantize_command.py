"""`quantkit quantize`: everything that a recipe needs, in one go, and the proof at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli import show
from quantkit.quantize.cli.calibrate_commands import Reading, calibrate_command
from quantkit.quantize.cli.commands import emit, export_command, parse_bytes, verified
from quantkit.quantize.cli.several import output_names, plans_of, quantize_outputs
from quantkit.quantize.recipe import load_recipe

MEMORY, MEMORY_CALIBRATING = "512MB", "4GB"


def quantize_command(
    source: str, recipe: str, out: Path, format_name: str | None, group: str | None, tp: Sequence[int], engine: str,
    reading: Reading, device: str, dtype: str, jobs: int, memory: str | None, as_json: bool, *, verify: bool,
) -> None:  # fmt: skip
    """Calibrate where the recipe needs it, export, verify against the source; exit status 1 when that fails."""
    if output_names(recipe):
        if reading != Reading(trust_remote_code=reading.trust_remote_code):
            raise QuantkitError("several outputs need no calibration, so no text", value=recipe)
        plans = plans_of(source, recipe, format_name, group, tp)
        all_facts, passed = quantize_outputs(source, plans, out, jobs, parse_bytes(memory or MEMORY), verify=verify)
        if as_json:
            emit(all_facts)
        if not passed:
            sys.exit(1)
        return
    run = Path(f"{out}.run") if load_recipe(recipe).needs_calibration else None
    if run is not None:
        calibrate_command(source, recipe, run, group, reading, memory or MEMORY_CALIBRATING, device, dtype, 0, False)
        facts = export_command(str(run), None, out, format_name, None, tp, jobs, memory or MEMORY, False, engine=engine)
    elif reading != Reading(trust_remote_code=reading.trust_remote_code):
        raise QuantkitError(
            "the recipe needs no calibration, so no text", value=recipe, hint="leave the text options out"
        )
    else:
        facts = export_command(source, recipe, out, format_name, group, tp, jobs, memory or MEMORY, False)
    passed = True
    if verify:
        report = verified(out, open_checkpoint(source), run, jobs)
        facts["verify"] = report.as_json()
        show.report(report)
        passed = report.passed
    if as_json:
        emit(facts)
    if not passed:
        sys.exit(1)
