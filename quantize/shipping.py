"""Shards go to the Hub while later ones are written, and leave the disk once the hash on the Hub was compared.

A shard is finished when every step that writes into it is on the disk. Workers get no new step while WAITING finished
shards lie here: a slow network slows the run, it does not fill the disk. What was sent and removed is recorded in the
output folder (`export/digests.py`), so a killed run neither writes nor sends it again.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection

from quantkit.export.digests import Digests
from quantkit.export.hub import Repo
from quantkit.export.push import File, Push, files_of
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.journal import Work
from quantkit.quantize.plan import Plan, Step

WAITING = 2
AT_ONCE = WAITING + 3  # shards on the disk: one is written, threads are in the next one, and steps may end in two
POLL_SECONDS = 0.2


class Shipping:
    """Sends finished shards in a thread of its own. A failure stops the run: `finish` raises it."""

    def __init__(self, repo: Repo, *, force: bool = False, report: Callable[[File], None] = lambda _: None) -> None:
        self._repo, self._force, self._report = repo, force, report
        self._queue: queue.SimpleQueue[File | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="quantkit-upload", daemon=True)
        self._waiting = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    def begin(self, plan: Plan, work: Work) -> None:
        """Compare what was sent before with the Hub, send what was finished before, and listen to the journal."""
        folder = work.checkpoint
        self._push = Push(self._repo, Digests(folder), self._report)
        self._push.digests.sweep()
        self._shards = [File(s.name, folder / s.name) for s in plan.shards]
        self._steps = {step.name: _shards_of(step) for step in plan.steps}
        self._left = Counter(shard for shards in self._steps.values() for shard in shards)
        finished = self._finished(work.done)
        self._push.begin([*finished, *files_of(folder)[1]], force=self._force)
        work.after = self._synced
        self._thread.start()
        self._enqueue(finished)

    def has(self, name: str) -> bool:
        """True for a shard that was sent and removed."""
        return name in self._push.digests.removed

    def admit(self, stop: threading.Event) -> None:
        """Wait until there is room for another shard; sets `stop` when sending has failed."""
        while self._waiting >= WAITING and not stop.is_set() and self._failure is None:
            stop.wait(POLL_SECONDS)
        if self._failure is not None:
            stop.set()

    def finish(self) -> None:
        """Wait until every shard is sent; raises what went wrong."""
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Send nothing after the current shard."""
        self._stopped.set()
        self._queue.put(None)

    def _synced(self, steps: Collection[str]) -> None:
        self._enqueue(self._finished(steps))

    def _finished(self, steps: Collection[str]) -> list[File]:
        """The shards that these steps have completed, less those sent."""
        done = Counter(shard for step in steps for shard in self._steps[step])
        self._left.subtract(done)
        return [self._shards[i] for i in sorted(done) if not self._left[i] and not self.has(self._shards[i].name)]

    def _enqueue(self, files: Collection[File]) -> None:
        for file in files:
            with self._lock:
                self._waiting += 1
            self._queue.put(file)

    def _send(self) -> None:
        while (file := self._queue.get()) is not None and not self._stopped.is_set():
            try:
                self._push.send([file], f"Add {file.name}")
                self._push.digests.remove(file.name)
            except Exception as e:  # handed to the main thread, which raises it
                self._failure = e
                return
            with self._lock:
                self._waiting -= 1


def _shards_of(step: Step) -> set[int]:
    return {out.shard for task in step.tasks for out in task.outs}


def check_shipped(work: Work, ship: Shipping | None) -> None:
    """Refuse to go on without the Hub when shards of this run are there only: they would be written as zeros."""
    away = Digests(work.checkpoint).removed
    if away and ship is None:
        raise QuantkitError(
            "shards of this unfinished run are on the Hub only", file=work.folder, value=", ".join(sorted(away)[:5]),
            hint="go on with --push-to and --stream-upload as before, or remove that folder to start anew",
        )  # fmt: skip
