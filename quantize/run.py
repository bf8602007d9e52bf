"""Carry a plan out: read, decode, search, round, pack, write each byte at its planned offset, journal, rename.

Steps are independent, so they run on `jobs` threads in any order; kernels and reads release the interpreter. Each step
works through its matrices in blocks of rows that fit the memory budget. Which thread did what, how often the run was
killed and how large the budget was leaves no trace in the output.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import Reader
from quantkit.export.manifest import MANIFEST
from quantkit.export.sources.rows import Buffers
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.finish import write_files
from quantkit.quantize.journal import Work, open_work, work_folder
from quantkit.quantize.plan import Plan, Step
from quantkit.quantize.recipe import InputScale
from quantkit.quantize.recipe_method import CALIBRATED
from quantkit.quantize.shards import check_disk, no_space, open_shard
from quantkit.quantize.shipping import AT_ONCE, Shipping, check_shipped
from quantkit.quantize.target import Target
from quantkit.quantize.work import Measured, run_step

SYNC_SECONDS = 0.5  # about so much finished work is done again after a kill
NOT_HERE = -1  # in place of the descriptor of a shard that the Hub has


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. `seconds` covers the streaming of weights, without planning and start-up."""

    bytes_in: int
    bytes_out: int
    seconds: float
    resumed: int
    measured: Mapping[str, Measured]


class _Steps:
    """Hands steps to worker threads one by one, until one of them fails."""

    def __init__(self, steps: Iterator[Step], admit: Callable[[threading.Event], None]) -> None:
        self._steps = steps
        self._admit = admit
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def next(self) -> Step | None:
        with self._lock:
            self._admit(self.stop)
            return None if self.stop.is_set() else next(self._steps, None)


def run(
    plan: Plan, out: Path, *, jobs: int, memory: int, report: Callable[[Step], None] = lambda _: None,
    ship: Shipping | None = None,
) -> Summary:  # fmt: skip
    """Write the checkpoint of `plan` to `out`; resumes what an earlier run of the same plan has left.

    `memory` bounds the buffers of all threads together, in bytes; `report` is called for every finished step. `ship`
    takes finished shards away to the Hub: what is written to `out` lacks them.
    Raises QuantkitError for a fault in a weight, a full disk, or an output that is taken.
    """
    out = out.absolute()
    _check_calibrated(plan)
    already = _finished(plan, out)
    if already is not None:
        shutil.rmtree(work_folder(out), ignore_errors=True)
        return already
    if plan.source.folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise QuantkitError(
            "the output lies inside the source", file=out, allowed=f"a folder outside of {plan.source.folder}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    work = open_work(out, plan.identity())
    try:
        check_disk(plan, work, None if ship is None else AT_ONCE)
        check_shipped(work, ship)
        if ship is not None:
            ship.begin(plan, work)
        resumed = len(work.done)
        begun = time.monotonic()
        with Reader() as reader:
            _stream(plan, work, reader, jobs, memory, report, ship)
        if ship is not None:
            ship.finish()
        seconds = time.monotonic() - begun
        # in the order of the plan, not of the threads: the manifest is part of the output
        measured = {n: Measured(*m) for step in plan.steps for n, m in work.done[step.name].items()}
        write_files(plan, work.checkpoint, measured, jobs)
        work.publish(out)
    except OSError as e:
        raise no_space(e, out) or QuantkitError(f"cannot write the output: {e.strerror}", file=e.filename or out) from e
    finally:
        if ship is not None:
            ship.stop()
        work.close()
    return Summary(plan.bytes_in, plan.bytes_out, seconds, resumed, measured)


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


def _stream(
    plan: Plan, work: Work, reader: Reader, jobs: int, memory: int, report: Callable[[Step], None],
    ship: Shipping | None,
) -> None:  # fmt: skip
    """Run every step that is not in the journal; journal what is finished and synced."""
    fds: list[int] = []
    try:
        for shard in plan.shards:
            away = ship is not None and ship.has(shard.name)
            fds.append(NOT_HERE if away else open_shard(shard, work.checkpoint))
        todo = [s for s in plan.steps if s.name not in work.done]
        for step in plan.steps:
            if step.name in work.done:
                report(step)
        steps = _Steps(iter(todo), ship.admit if ship is not None else lambda _: None)
        results: queue.SimpleQueue[tuple[Step, dict[str, Any] | BaseException] | None] = queue.SimpleQueue()

        def worker() -> None:
            target = Target(fds, reader, memory // jobs, plan.half, Buffers())
            while (step := steps.next()) is not None:
                try:
                    results.put((step, run_step(step, target)))
                except BaseException as e:  # handed to the main thread, which raises it
                    steps.stop.set()
                    results.put((step, e))
            results.put(None)

        threads = [threading.Thread(target=worker, name=f"quantkit-{i}", daemon=True) for i in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            _collect(results, len(threads), work, fds, report)
        finally:
            steps.stop.set()
            for thread in threads:
                thread.join()
    finally:
        for fd in fds:
            if fd != NOT_HERE:
                os.close(fd)


def _collect(
    results: queue.SimpleQueue[tuple[Step, dict[str, Any] | BaseException] | None],
    running: int, work: Work, fds: list[int], report: Callable[[Step], None],
) -> None:  # fmt: skip
    """Gather finished steps until every worker has ended; sync and journal them from time to time and at the end."""
    pending: dict[str, Any] = {}
    touched: set[int] = set()
    failure: BaseException | None = None
    synced = time.monotonic()
    try:
        while running:
            item = results.get()
            if item is None:
                running -= 1
                continue
            step, result = item
            if isinstance(result, BaseException):
                failure = failure or result
                continue
            pending[step.name] = result
            touched.update(o.shard for t in step.tasks for o in t.outs)
            report(step)
            if time.monotonic() - synced > SYNC_SECONDS:
                _sync(work, fds, touched, pending)
                synced = time.monotonic()
    finally:
        _sync(work, fds, touched, pending)
    if failure is not None:
        raise failure


def _sync(work: Work, fds: list[int], touched: set[int], pending: dict[str, Any]) -> None:
    for shard in touched:
        os.fdatasync(fds[shard])
    work.append(pending)
    touched.clear()
    pending.clear()
