"""Recipes with several outputs: OUT/NAME for each, written in one pass over the source, verified one by one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli import show
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe, with_int4_group


def output_names(recipe: str | None) -> tuple[str, ...]:
    """The names of a recipe's outputs; empty for a recipe with one, and without a recipe."""
    outputs = load_recipe(recipe).outputs if recipe is not None else ()
    return tuple(o.name for o in outputs) if len(outputs) > 1 else ()


def plans_of(
    source: str, recipe: str, format_name: str | None, group: str | None, tp: Sequence[int], *,
    headers_only: bool = False,
) -> dict[str, Plan]:  # fmt: skip
    """The plan of each output by name, over one opened source; --group changes the outputs with INT4 rules."""
    if format_name is not None:
        raise QuantkitError(
            "--format is for one output", file=recipe, value=format_name, allowed="`format` of each output"
        )
    checkpoint = open_checkpoint(source, headers_only=headers_only)
    recipes = load_recipe(recipe).split()
    if group is not None:
        has_int4 = [any((rule.scheme or "").startswith("int4") for rule in r.weights) for r in recipes]
        recipes = tuple(
            with_int4_group(r, group) if has or not any(has_int4) else r
            for r, has in zip(recipes, has_int4, strict=True)
        )
    plans = [make_plan(r, checkpoint, tp=tp) for r in recipes]
    return dict(zip(output_names(recipe), plans, strict=True))


def export_outputs(plans: Mapping[str, Plan], out: Path, jobs: int, budget: int) -> dict[str, Any]:
    """Write every output of a recipe; returns the facts of each by name."""
    from quantkit.quantize.capacity import plan_facts, step_bytes
    from quantkit.quantize.cli.commands import peak_memory
    from quantkit.quantize.journal import check_target
    from quantkit.quantize.progress import progress
    from quantkit.quantize.run import is_finished, run_all

    for name, plan in plans.items():
        if not is_finished(plan, out / name):
            check_target(out / name)
        show.plan_line(plan, plan_facts(plan, jobs, budget))
    wanted = [(plan, out / name) for name, plan in plans.items()]
    try:
        with progress("quantize", sum(p.bytes_in for p in plans.values())) as advance:
            done = run_all(wanted, jobs=jobs, memory=budget, report=lambda step: advance(step_bytes(step)))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to go on\n")
        sys.exit(130)
    for (plan, folder), summary in zip(wanted, done, strict=True):
        show.summary(plan, summary, folder, peak_memory())
    return {
        name: {"out": str(out / name), "bytes_in": s.bytes_in, "bytes_out": s.bytes_out, "seconds": s.seconds,
               "resumed_steps": s.resumed, "peak_memory_bytes": peak_memory()}
        for name, s in zip(plans, done, strict=True)
    }  # fmt: skip


def quantize_outputs(
    source: str, plans: Mapping[str, Plan], out: Path, jobs: int, budget: int, *, verify: bool
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Write every output, then verify each against the source; the facts, and whether all checks passed."""
    from quantkit.quantize.cli.commands import verified

    facts, passed = export_outputs(plans, out, jobs, budget), True
    for name in plans if verify else ():
        report = verified(out / name, open_checkpoint(source), None, jobs)
        facts[name]["verify"] = report.as_json()
        show.report(report)
        passed &= report.passed
    return facts, passed
