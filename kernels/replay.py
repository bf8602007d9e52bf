"""Continuous batching over the real cache and attention kernel, for measuring what sharing a cache costs and risks.

A step admits requests that fit, finds pages for the new tokens, checks all pages of all requests in one call, writes
keys and values, and runs one attention call over the whole batch; each request gains one token. What a step computed is
shown and filed only after the check of the next step (see `tags.py`): a request that has its last token stays for one
more check, without work. A request that fails is aborted: its tokens are withheld, its pages go back and enter no tree.

Requests wait in order; nothing that runs is preempted (`PagePool.open` admits worst cases only).

Shape suffixes: R running requests, S request slots, T tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.cpu.attention import attend, write
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, KVCache
from quantkit.kernels.paged import PagePool, copy_pages
from quantkit.kernels.replay_model import Model, Request
from quantkit.kernels.tags import ContentSeals

B1 = NDArray[np.bool_]
I32 = NDArray[np.int32]

_CHUNK = 1024  # tokens written by one call


@dataclass(slots=True, eq=False)
class Injected:
    """A fault that was put into the live structures: the pages it touches, and how to end it after the step."""

    name: str
    step: int
    pages: frozenset[int]
    undo: Callable[[], None] | None = None
    detected: int | None = None  # step of the first abort of a request that maps one of the pages


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """`inject(replay, rng)` is tried at every step from `step` on until it finds an occasion and returns a record."""

    step: int
    when: Literal["before check", "after check"]
    inject: Callable[[Replay, np.random.Generator], Injected | None]


@dataclass(slots=True, eq=False)
class Result:
    """What a replay did so far.

    tokens        of each request: what was generated, or None if withheld or not finished
    seconds       of each step; cpu_seconds: of all threads of the process; running: requests in the batch
    hit_tokens    prompt tokens that were found in the cache, not computed
    latency       seconds from admission to release, of each finished request
    aborted       requests, in order; false_alarms: those among them that no injected fault had touched
    """

    tokens: list[I32 | None]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    aborted: list[int] = field(default_factory=list)
    false_alarms: int = 0
    injected: list[Injected] = field(default_factory=list)

    @property
    def detected(self) -> int:
        """Injected faults that led to the abort of a request they touched."""
        return sum(f.detected is not None for f in self.injected)


class Replay:
    """Serves `requests` on `cache`, whose pages `pool` manages; as many at a time as the pool has slots.

    seals, audit_every  compare the bytes of all filed pages in use every so many steps (0: never)
    """

    def __init__(
        self, requests: Sequence[Request], model: Model, cache: KVCache, pool: PagePool, *, threads: int = 1,
        faults: Sequence[Fault] = (), seed: int = 0, seals: ContentSeals | None = None, audit_every: int = 0,
    ) -> None:  # fmt: skip
        self.requests, self.model, self.cache, self.pool, self.threads = requests, model, cache, pool, threads
        self.queue = deque(range(len(requests)))
        self.running: list[int] = []  # slots, in order of admission
        self.closing: list[int] = []  # slots that have all their tokens
        self.filing: list[int] = []  # slots whose prompt was written in the step before
        self.result = Result([None] * len(requests))
        self.seals, self.audit_every = seals, audit_every
        slots, longest = len(pool.count_S), max(len(r.prompt_T) + r.new_tokens for r in requests)
        self.text_ST: I32 = np.zeros((slots, longest), np.int32)
        self.known_S: I32 = np.zeros(slots, np.int32)  # tokens: prompt and generated
        self.prompt_S: I32 = np.zeros(slots, np.int32)  # tokens of the prompt
        self.target_S: I32 = np.zeros(slots, np.int32)  # tokens when finished
        self.request_S: I32 = np.zeros(slots, np.int32)
        self._admitted_S = np.zeros(slots)
        self._faults, self._rng = list(faults), np.random.default_rng(seed)

    @property
    def steps(self) -> int:
        """Steps made so far."""
        return len(self.result.seconds)

    def run(self, max_steps: int = 1 << 30) -> Result:
        """Step until every request is finished or aborted."""
        while (self.queue or self.running or self.closing) and self.steps < max_steps:
            self.step()
        return self.result

    def step(self) -> float:
        """One step of the whole batch; returns its seconds."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self.admit()
        slots_R = np.array(self.running, np.int32)
        old_R = self.pool.length_S[slots_R]
        self._inject("before check")
        copy_pages(self.cache, *self.pool.extend(slots_R, self.known_S[slots_R]))
        good_R = self._check(slots_R, old_R)
        if not good_R.all():
            slots_R, old_R = slots_R[good_R], old_R[good_R]
        self._publish()
        self._inject("after check")
        if len(slots_R):
            self._compute(slots_R, old_R)
        for fault in self.result.injected:
            if fault.undo is not None:
                fault.undo()
                fault.undo = None
        self.result.running.append(len(slots_R))
        self.result.cpu_seconds.append(time.process_time() - cpu_began)
        self.result.seconds.append(time.perf_counter() - began)
        return self.result.seconds[-1]

    def admit(self) -> int:
        """Let requests in that have arrived and fit, in order; returns how many run now."""
        while self.queue and (request := self.requests[self.queue[0]]).arrival <= self.steps:
            limit = len(request.prompt_T) + request.new_tokens
            opened = self.pool.open(request.prompt_T, limit)
            if opened is None:
                if not self.running and not self.closing:
                    raise QuantkitError("nothing runs and the next request does not fit: pages were lost", value=limit)
                break
            slot, found = opened
            self.text_ST[slot, : len(request.prompt_T)] = request.prompt_T
            self.known_S[slot] = self.prompt_S[slot] = len(request.prompt_T)
            self.target_S[slot] = limit
            self.request_S[slot] = self.queue.popleft()
            self._admitted_S[slot] = time.perf_counter()
            self.result.hit_tokens += found
            self.running.append(slot)
        return len(self.running)

    def check_seconds(self, times: int) -> float:
        """Median seconds of the batch check alone, on the batch as it stands."""
        rows = np.array(self.running, np.int32)
        counts, seconds = self.pool.count_S[rows], []
        for _ in range(times):
            began = time.perf_counter()
            self.pool.tracker.check(rows, counts, counts, self.pool.table_SL)
            seconds.append(time.perf_counter() - began)
        return float(np.median(seconds))

    def _check(self, slots_R: I32, old_R: I32) -> B1:
        """The one batch check, over running and closing requests; aborts those that fail. True: may run."""
        n, closing_R = len(slots_R), np.array(self.closing, np.int32)
        rows = np.concatenate((slots_R, closing_R))
        counts = self.pool.count_S[rows]
        writes = np.concatenate((old_R // self.pool.page_size, counts[n:]))
        bad = self.pool.tracker.check(rows, counts, writes, self.pool.table_SL)
        if self.audit_every and self.seals is not None and self.steps % self.audit_every == 0:
            bad = self._audit(self.seals, rows, bad)
        if not bad.any():
            return np.ones(n, np.bool_)
        for slot in rows[bad].tolist():
            self._abort(slot)
        return ~bad[:n]

    def _audit(self, seals: ContentSeals, rows: I32, bad: B1) -> B1:
        """Add the rows that hold a filed page whose bytes have changed; such pages leave the tree."""
        used = [self.pool.table_SL[s, : self.pool.count_S[s]] for s in rows]
        frozen = np.unique(np.concatenate([*used, np.array([], np.int32)]))
        wrong = seals.verify(frozen[self.pool.frozen_P[frozen]])
        for page in wrong.tolist():
            if page in self.pool.tree.by_page:
                self.pool.drop(self.pool.tree.by_page[page])
        holds = np.array([np.isin(row, wrong).any() for row in used], np.bool_)
        return holds | bad if len(bad) else holds

    def _abort(self, slot: int) -> None:
        row = frozenset(self.pool.table_SL[slot, : self.pool.count_S[slot]].tolist())
        causes = [f for f in self.result.injected if f.pages & row]
        for fault in causes:
            fault.detected = self.steps if fault.detected is None else fault.detected
        self.result.false_alarms += not causes
        self.result.aborted.append(int(self.request_S[slot]))
        for slots in (self.running, self.closing, self.filing):
            if slot in slots:
                slots.remove(slot)
        self.pool.abort(slot)

    def _publish(self) -> None:
        """Everything of the steps before has passed the check: show and file it."""
        for slot in (*self.filing, *self.closing):
            tokens = self.pool.length_S[slot] if slot in self.closing else self.prompt_S[slot]
            filed = self.pool.file(slot, self.text_ST[slot, :tokens])
            if self.seals is not None:
                self.seals.seal(filed)
        for slot in self.closing:
            request = int(self.request_S[slot])
            self.result.tokens[request] = self.text_ST[slot, self.prompt_S[slot] : self.target_S[slot]].copy()
            self.result.latency.append(time.perf_counter() - self._admitted_S[slot])
            self.pool.close(slot)
        self.filing, self.closing = [], []

    def _inject(self, when: str) -> None:
        for fault in [f for f in self._faults if f.when == when and f.step <= self.steps]:
            record = fault.inject(self, self._rng)
            if record is not None:
                self.result.injected.append(record)
                self._faults.remove(fault)

    def _compute(self, slots_R: I32, old_R: I32) -> None:
        """Write the tokens that are not cached yet, then one attention call and one new token for every request."""
        known_R = self.known_S[slots_R]
        self._write(slots_R, old_R, known_R - old_R)
        last_R = known_R - 1
        q_RQD = self.model.queries(self.text_ST[slots_R, last_R], last_R)
        table = np.ascontiguousarray(self.pool.table_SL[slots_R, : self.pool.count_S[slots_R].max()])
        batch = Batch(np.arange(len(slots_R) + 1, dtype=np.int32), table, known_R)
        o_RQD = attend(q_RQD, self.cache, batch, softmax_scale=self.model.softmax_scale, threads=self.threads)
        self.text_ST[slots_R, known_R] = self.model.next_tokens(o_RQD)
        self.known_S[slots_R] += 1
        self.filing = slots_R[known_R == self.prompt_S[slots_R]].tolist()
        done_R = self.known_S[slots_R] == self.target_S[slots_R]
        if done_R.any():
            self.closing = slots_R[done_R].tolist()
            self.running = slots_R[~done_R].tolist()

    def _write(self, slots_R: I32, old_R: I32, new_R: I32) -> None:
        rows = np.repeat(slots_R, new_R)
        positions = np.arange(len(rows), dtype=np.int32) + np.repeat(old_R - (np.cumsum(new_R) - new_R), new_R)
        positions = positions.astype(np.int32)
        size = self.pool.page_size
        for at in range(0, len(rows), _CHUNK):
            r, p = rows[at : at + _CHUNK], positions[at : at + _CHUNK]
            k, v = self.model.keys_values(self.text_ST[r, p], p)
            write(self.cache, self.pool.table_SL[r, p // size] * size + p % size, k, v)
