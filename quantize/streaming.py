"""Steps on threads: each is carried out, synced and journaled; several plans over one source share what is read.

The steps of all plans that read the same weights form a bundle: one thread carries them out one after the other, and
the weights that more than one of them wants are read once and held meanwhile, where they fit a quarter of the thread's
budget. Larger ones are read once a plan. Each plan has its own journal: a kill costs no plan a finished step.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.export.checkpoint import Reader
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.rows import Buffers
from quantkit.quantize.journal import Work
from quantkit.quantize.plan import Plan, Step
from quantkit.quantize.shards import open_shard
from quantkit.quantize.shipping import Shipping
from quantkit.quantize.target import Target
from quantkit.quantize.work import run_step

SYNC_SECONDS = 0.5  # about so much finished work is done again after a kill
NOT_HERE = -1  # in place of the descriptor of a shard that the Hub has


class Output(NamedTuple):
    """One checkpoint as it is written."""

    plan: Plan
    out: Path
    work: Work


Bundle = list[tuple[int, Step]]  # the number of an output, and a step of its plan
Finished = tuple[int, Step, dict[str, Any] | BaseException]


def bundles(outputs: Sequence[Output]) -> list[Bundle]:
    """Steps that are left, in the order of the first plan; those of several plans on the same weights together."""
    of_weight: dict[str, Bundle] = {}
    found: list[Bundle] = []
    for i, output in enumerate(outputs):
        for step in output.plan.steps:
            if step.name in output.work.done:
                continue
            hits = {id(b): b for n in _names(step) if (b := of_weight.get(n)) is not None}
            joined, *others = hits.values() or [[]]
            if not hits:
                found.append(joined)
            for other in others:  # a step with a scale of its own for q, k and v joins what were three bundles
                joined += other
                of_weight |= {n: joined for _, s in other for n in _names(s)}
                other.clear()
            joined.append((i, step))
            of_weight |= dict.fromkeys(_names(step), joined)
    return [bundle for bundle in found if bundle]


def _names(step: Step) -> list[str]:
    return [t.name.removesuffix(".weight") for t in step.tasks]


def shared_tensors(bundle: Bundle, limit: int) -> list[TensorInfo]:
    """The source tensors that several steps of a bundle read; none when they take more than `limit` bytes."""
    seen: dict[str, tuple[TensorInfo, set[int]]] = {}
    for i, step in bundle:
        for task in step.tasks:
            if task.fate in ("quantize", "decode", "pass"):
                for info in task.weight.parts.values():
                    seen.setdefault(info.name, (info, set()))[1].add(i)
    shared = [info for info, users in seen.values() if len(users) > 1]
    return shared if sum(info.nbytes for info in shared) <= limit else []


class _Bundles:
    """Hands bundles to worker threads one by one, until one of them fails."""

    def __init__(self, left: Iterator[Bundle], admit: Callable[[threading.Event], None]) -> None:
        self._left = left
        self._admit = admit
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def next(self) -> Bundle | None:
        with self._lock:
            self._admit(self.stop)
            return None if self.stop.is_set() else next(self._left, None)


def stream(
    outputs: Sequence[Output], reader: Reader, jobs: int, memory: int, report: Callable[[Step], None],
    ship: Shipping | None,
) -> None:  # fmt: skip
    """Run every step that is not in its journal; journal what is finished and synced."""
    fds: list[list[int]] = [[] for _ in outputs]
    try:
        for output, own in zip(outputs, fds, strict=True):
            for shard in output.plan.shards:
                away = ship is not None and ship.has(shard.name)
                own.append(NOT_HERE if away else open_shard(shard, output.work.checkpoint))
            for step in output.plan.steps:
                if step.name in output.work.done:
                    report(step)
        left = _Bundles(iter(bundles(outputs)), ship.admit if ship is not None else lambda _: None)
        results: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()

        def worker() -> None:
            buffers, budget = Buffers(), memory // jobs
            targets = [Target(own, reader, budget, o.plan.half, buffers) for o, own in zip(outputs, fds, strict=True)]
            while (bundle := left.next()) is not None:
                i, step = bundle[0]
                try:
                    with reader.hold(shared_tensors(bundle, budget // 4)):
                        for i, step in bundle:
                            results.put((i, step, run_step(step, targets[i])))
                except BaseException as e:  # handed to the main thread, which raises it
                    left.stop.set()
                    results.put((i, step, e))
            results.put(None)

        threads = [threading.Thread(target=worker, name=f"quantkit-{i}", daemon=True) for i in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            _collect(results, len(threads), outputs, fds, report)
        finally:
            left.stop.set()
            for thread in threads:
                thread.join()
    finally:
        for fd in (fd for own in fds for fd in own):
            if fd != NOT_HERE:
                os.close(fd)


def _collect(
    results: queue.SimpleQueue[Finished | None], running: int, outputs: Sequence[Output], fds: list[list[int]],
    report: Callable[[Step], None],
) -> None:  # fmt: skip
    """Gather finished steps until every worker has ended; sync and journal them from time to time and at the end."""
    pending: list[dict[str, Any]] = [{} for _ in outputs]
    touched: list[set[int]] = [set() for _ in outputs]
    failure: BaseException | None = None
    synced = time.monotonic()
    try:
        while running:
            item = results.get()
            if item is None:
                running -= 1
                continue
            i, step, result = item
            if isinstance(result, BaseException):
                failure = failure or result
                continue
            pending[i][step.name] = result
            touched[i].update(o.shard for t in step.tasks for o in t.outs)
            report(step)
            if time.monotonic() - synced > SYNC_SECONDS:
                _sync(outputs, fds, touched, pending)
                synced = time.monotonic()
    finally:
        _sync(outputs, fds, touched, pending)
    if failure is not None:
        raise failure


def _sync(
    outputs: Sequence[Output], fds: list[list[int]], touched: list[set[int]], pending: list[dict[str, Any]]
) -> None:  # fmt: skip
    for output, own, shards, steps in zip(outputs, fds, touched, pending, strict=True):
        for shard in shards:
            os.fdatasync(own[shard])
        output.work.append(steps)
        shards.clear()
        steps.clear()
