"""What each command does: read the arguments, call the library, hand the result to `show`."""

from __future__ import annotations

import gc
import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.export.checkpoint import Checkpoint, open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli import show
from quantkit.quantize.plan import Plan

if TYPE_CHECKING:
    from quantkit.quantize.shipping import Shipping

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SMALLEST_MEMORY = 32_000_000


def parse_bytes(text: str) -> int:
    """`512MB`, `4GiB`, `1e9` ... in bytes; raises QuantkitError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]i?)?b?\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except ValueError:
        size = 0
    if size < SMALLEST_MEMORY:
        raise QuantkitError("not a memory size", value=text, allowed="32MB or more, such as 512MB or 4GiB")
    return size


def emit(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of records and no cycle among them: looking for one takes half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_plan(
    source: str, recipe: str | None, format_name: str | None, group: str | None, tp: Sequence[int],
    engine: str = "vllm", *, per_rank: bool = False, headers_only: bool = False,
) -> Plan:  # fmt: skip
    """The plan of a checkpoint and a recipe, or of a calibration run, which holds both.

    With `headers_only` a checkpoint on the Hub is not fetched: the plan can be shown, not carried out.
    """
    from quantkit.quantize.planner import make_plan
    from quantkit.quantize.recipe import load_recipe, with_int4_group
    from quantkit.quantize.run_source import is_run, open_run, plan_of_run

    if is_run(Path(source)):
        if recipe is not None or group is not None:
            raise QuantkitError(
                "a calibration run has its recipe", value=recipe or f"--group {group}", allowed="no -r and no --group"
            )
        run = open_run(Path(source))
        with _no_collection():
            return plan_of_run(run, format_name, engine, tp, per_rank=per_rank)
    if recipe is None:
        raise QuantkitError("a recipe is needed: -r", file=source, hint="`quantkit recipes` lists the shipped ones")
    loaded = load_recipe(recipe)
    if len(loaded.outputs) > 1:
        raise QuantkitError(
            "a recipe with several outputs", file=recipe, value=", ".join(o.name for o in loaded.outputs),
            allowed="plan, export or quantize of a checkpoint, without --push-to",
        )  # fmt: skip
    if group is not None:
        loaded = with_int4_group(loaded, group)
    if any(n < 1 for n in tp):
        raise QuantkitError("a tensor-parallel size must be 1 or more", value=list(tp))
    with _no_collection():
        return make_plan(loaded, open_checkpoint(source, headers_only=headers_only), format_name=format_name, tp=tp)


def plan_command(
    source: str,
    recipe: str,
    format_name: str | None,
    group: str | None,
    tp: Sequence[int],
    engines: Sequence[str],
    jobs: int,
    memory: str,
    as_json: bool,
) -> None:
    """`quantkit plan`; one plan after the other where the recipe has several outputs."""
    from quantkit.quantize.cli.several import output_names, plans_of
    from quantkit.quantize.engines import check_engine_names

    budget = parse_bytes(memory)
    check_engine_names(engines, tp)
    if output_names(recipe):
        with _no_collection():
            plans = plans_of(source, recipe, format_name, group, tp, headers_only=True)
    else:
        plans = {"": load_plan(source, recipe, format_name, group, tp, headers_only=True)}
    shown = [_show_plan(plan, engines, tp, jobs, budget, quiet=as_json) for plan in plans.values()]
    if as_json:
        facts = {name: found for name, (found, _) in zip(plans, shown, strict=True)}
        emit(facts.get("", facts))
    if not all(passed for _, passed in shown):
        sys.exit(1)


def _show_plan(
    plan: Plan, engines: Sequence[str], tp: Sequence[int], jobs: int, budget: int, *, quiet: bool
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """The facts of a plan, and whether every engine that was asked for takes it."""
    from quantkit.quantize.capacity import plan_facts
    from quantkit.quantize.cli.show_engines import engines as show_engines
    from quantkit.quantize.engines import examine_plan

    twins = examine_plan(plan, engines, tp)
    facts = plan_facts(plan, jobs, budget) | ({"engines": [t.as_json() for t in twins]} if twins else {})
    if not quiet:
        show.plan(plan, facts)
    show_engines(twins)
    return facts, all(t.passed for t in twins)


def written(
    wanted: Sequence[tuple[Plan, Path]], jobs: int, budget: int, ship: Shipping | None = None
) -> list[dict[str, Any]]:
    """Write the outputs of some plans over one source in one pass; the facts of each."""
    from quantkit.kernels.cpu import FIRST_RUN
    from quantkit.quantize.capacity import plan_facts, step_bytes
    from quantkit.quantize.journal import check_target
    from quantkit.quantize.progress import progress
    from quantkit.quantize.run import is_finished, run_all

    for plan, out in wanted:
        if not is_finished(plan, out):
            check_target(out)
        show.plan_line(plan, plan_facts(plan, jobs, budget))
    if FIRST_RUN:
        sys.stderr.write("compiling kernels for this machine, once: up to half a minute\n")
    try:
        with progress("quantize", sum(plan.bytes_in for plan, _ in wanted)) as advance:
            done = run_all(wanted, jobs=jobs, memory=budget, report=lambda step: advance(step_bytes(step)), ship=ship)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to go on\n")
        sys.exit(130)
    peak = peak_memory()
    for (plan, out), summary in zip(wanted, done, strict=True):
        show.summary(plan, summary, out, peak)
    return [
        {
            "out": str(out), "bytes_in": s.bytes_in, "bytes_out": s.bytes_out, "seconds": s.seconds,
            "resumed_steps": s.resumed, "peak_memory_bytes": peak,
        }
        for (_, out), s in zip(wanted, done, strict=True)
    ]  # fmt: skip


def export_command(
    source: str, recipe: str | None, out: Path, format_name: str | None, group: str | None, tp: Sequence[int],
    jobs: int, memory: str, as_json: bool, *, engine: str = "vllm", per_rank: bool = False,
    ship: Shipping | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`quantkit export`; returns the facts that `as_json` prints."""
    from quantkit.quantize.cli.several import export_outputs, output_names, plans_of

    budget = parse_bytes(memory)
    if recipe is not None and ship is None and output_names(recipe):
        facts = export_outputs(plans_of(source, recipe, format_name, group, tp), out, jobs, budget)
    else:
        plan = load_plan(source, recipe, format_name, group, tp, engine, per_rank=per_rank)
        (facts,) = written([(plan, out)], jobs, budget, ship)
    if as_json:
        emit(facts)
    return facts


def verified(checkpoint: Path, source: Checkpoint | None, run: Path | None, jobs: int) -> Any:
    """The report of a checkpoint, with progress shown."""
    from quantkit.quantize.progress import progress
    from quantkit.quantize.verification import verify_checkpoint

    begun = time.monotonic()
    total = source.nbytes if source else 0
    with progress("verify", total, quiet=source is None) as advance:
        return verify_checkpoint(checkpoint, source, run=run, jobs=jobs, advance=advance, begun=begun)


def verify_command(
    checkpoint: str, source: str | None, run: Path | None, jobs: int, as_json: bool, *, engines: Sequence[str] = (),
    tp: Sequence[int] = (), manifest: bool = False, junit: Path | None = None,
) -> None:  # fmt: skip
    """`quantkit verify`."""
    from quantkit.export.manifest import check_manifest
    from quantkit.export.verify import manifest_of
    from quantkit.quantize.cli.show_engines import engines as show_engines
    from quantkit.quantize.engines import check_engine_names, examine_folder
    from quantkit.quantize.junit import write_junit

    folder = Path(checkpoint)
    if not folder.is_dir():
        raise QuantkitError("no such folder", file=checkpoint)
    if tp and not engines:
        raise QuantkitError("--tp says for how many ranks --engine looks", value=list(tp), hint="add --engine vllm")
    check_engine_names(engines, tp)
    report = verified(folder, open_checkpoint(source) if source else None, run, jobs)
    if manifest:
        report = replace(report, checks=(*report.checks, check_manifest(folder, manifest_of(folder), jobs)))
    with _no_collection():
        twins = examine_folder(folder, engines, tp) if engines else []
    passed = report.passed and all(t.passed for t in twins)
    if junit is not None:
        write_junit(junit, report, twins)
    if as_json:
        emit(report.as_json() | ({"engines": [t.as_json() for t in twins], "passed": passed} if twins else {}))
    show.report(report)
    show_engines(twins)
    if not passed:
        sys.exit(1)


def inspect_command(checkpoint: str, as_json: bool) -> None:
    """`quantkit inspect`."""
    from quantkit.quantize.capacity import checkpoint_facts

    with _no_collection():
        facts = checkpoint_facts(open_checkpoint(checkpoint, headers_only=True))
    if as_json:
        emit(facts)
    else:
        show.inspection(facts)
