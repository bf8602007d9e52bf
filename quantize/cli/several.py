"""Recipes with several outputs: OUT/NAME for each, written in one pass over the source, verified one by one."""

from __future__ import annotations

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
    from quantkit.quantize.cli.commands import written

    return dict(zip(plans, written([(p, out / name) for name, p in plans.items()], jobs, budget), strict=True))


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
