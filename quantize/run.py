"""Carry a plan out: read, decode, search, round, pack, write each byte at its planned offset, journal, rename.

Steps are independent, so they run on `jobs` threads in any order; kernels and reads release the interpreter. Each step
works through its matrices in blocks of rows that fit the memory budget. Which thread did what, how often the run was
killed and how large the budget was leaves no trace in the output.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.export.checkpoint import Reader
from quantkit.export.manifest import MANIFEST
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.finish import write_files
from quantkit.quantize.journal import Work, open_work, work_folder
from quantkit.quantize.plan import Plan, Step
from quantkit.quantize.recipe import InputScale
from quantkit.quantize.recipe_method import CALIBRATED
from quantkit.quantize.shards import check_disk, no_space
from quantkit.quantize.shipping import AT_ONCE, Shipping, check_shipped
from quantkit.quantize.streaming import Output, stream
from quantkit.quantize.work import Measured


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. `seconds` covers the streaming of weights, without planning and start-up."""

    bytes_in: int
    bytes_out: int
    seconds: float
    resumed: int
    measured: Mapping[str, Measured]


def run(
    plan: Plan, out: Path, *, jobs: int, memory: int, report: Callable[[Step], None] = lambda _: None,
    ship: Shipping | None = None,
) -> Summary:  # fmt: skip
    """Write the checkpoint of `plan` to `out`; resumes what an earlier run of the same plan has left.

    `memory` bounds the buffers of all threads together, in bytes; `report` is called for every finished step. `ship`
    takes finished shards away to the Hub: what is written to `out` lacks them.
    Raises QuantkitError for a fault in a weight, a full disk, or an output that is taken.
    """
    return run_all([(plan, out)], jobs=jobs, memory=memory, report=report, ship=ship)[0]


def run_all(
    wanted: Sequence[tuple[Plan, Path]], *, jobs: int, memory: int, report: Callable[[Step], None] = lambda _: None,
    ship: Shipping | None = None,
) -> list[Summary]:  # fmt: skip
    """As `run`, for several plans over one source in one pass (`streaming.py`), each with its folder and journal."""
    summaries = {i: s for i, (plan, out) in enumerate(wanted) if (s := _ready(plan, out.absolute())) is not None}
    if len(summaries) == len(wanted):
        return [summaries[i] for i in range(len(wanted))]
    opened: dict[int, Output] = {}
    out = wanted[0][1]
    try:
        for i, (plan, out) in enumerate(wanted):
            if i not in summaries:
                opened[i] = Output(plan, out, _open(plan, out.absolute(), ship))
        resumed = {i: len(o.work.done) for i, o in opened.items()}
        begun = time.monotonic()
        with Reader() as reader:
            stream(list(opened.values()), reader, jobs, memory, report, ship)
        if ship is not None:
            ship.finish()
        seconds = time.monotonic() - begun
        for i, (plan, out, work) in opened.items():
            # in the order of the plan, not of the threads: the manifest is part of the output
            measured = {n: Measured(*m) for step in plan.steps for n, m in work.done[step.name].items()}
            write_files(plan, work.checkpoint, measured, jobs)
            work.publish(out.absolute())
            summaries[i] = Summary(plan.bytes_in, plan.bytes_out, seconds, resumed[i], measured)
    except OSError as e:
        raise no_space(e, out) or QuantkitError(f"cannot write the output: {e.strerror}", file=e.filename or out) from e
    finally:
        if ship is not None:
            ship.stop()
        for output in opened.values():
            output.work.close()
    return [summaries[i] for i in range(len(wanted))]


def _ready(plan: Plan, out: Path) -> Summary | None:
    """The summary of an output that is finished; raises QuantkitError for one that cannot be written."""
    _check_calibrated(plan)
    already = _finished(plan, out)
    if already is not None:
        shutil.rmtree(work_folder(out), ignore_errors=True)
    elif plan.source.folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise QuantkitError(
            "the output lies inside the source", file=out, allowed=f"a folder outside of {plan.source.folder}"
        )
    return already


def _open(plan: Plan, out: Path, ship: Shipping | None) -> Work:
    out.parent.mkdir(parents=True, exist_ok=True)
    work = open_work(out, plan.identity())
    try:
        check_disk(plan, work, None if ship is None else AT_ONCE)
        check_shipped(work, ship)
        if ship is not None:
            ship.begin(plan, work)
    except BaseException:
        work.close()
        raise
    return work


def _check_calibrated(plan: Plan) -> None:
    """Refuse layers that need activations: a calibration run gives their codes and the scales of their inputs."""
    codes = [t for t in plan.tasks if t.fate == "quantize" and t.method in CALIBRATED]
    left = codes or [t for t in plan.tasks if isinstance(t.input_scale, InputScale)]
    if left:
        rule = left[0].input_scale
        what = f"the input scale {rule.rule}" if isinstance(rule, InputScale) else f"the method {left[0].method}"
        raise QuantkitError(
            f"{what} needs a calibration run", file=plan.recipe.name, tensor=left[0].name,
            value=f"{len(left)} layers without calibrated codes or input scales",
            hint="`quantkit calibrate SOURCE -r RECIPE -o RUN`, then `quantkit export RUN -o OUT`",
        )  # fmt: skip


def is_finished(plan: Plan, out: Path) -> bool:
    """True when `out` is the finished output of the very same plan."""
    return _finished(plan, out) is not None


def _finished(plan: Plan, out: Path) -> Summary | None:
    """The summary of a finished output of the very same plan, or None."""
    manifest = out / MANIFEST
    if not manifest.is_file():
        return None
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        if data["plan"] != plan.identity():
            return None
        measured = {n: Measured(*m) for n, m in data["measured"].items()}
    except (ValueError, KeyError, TypeError):
        return None
    return Summary(plan.bytes_in, plan.bytes_out, 0.0, len(plan.steps), measured)
