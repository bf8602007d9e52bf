"""What a replay says in numbers: the cost of the page tags, which batches a memory budget admits, faults found.

The cost is measured in lockstep: two replays of the same requests, one with tags and one with the null tracker, take
each step one after the other, in random order, on one shared cache. They compute the same bytes, so they may share it,
and nothing differs between the two but the tracker. Intervals come from a bootstrap over blocks of steps. One attention
layer is computed for each check; a model with 60 layers would check as often and compute 60 times as much.

Shape suffixes: N steps, B blocks of steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import KVCache, KVFormat, new_cache, token_bytes
from quantkit.kernels.paged import PagePool
from quantkit.kernels.replay import Fault, Replay, Result
from quantkit.kernels.replay_faults import FAULTS, fault
from quantkit.kernels.replay_model import Heads, Model, Request, Workload, make_requests
from quantkit.kernels.tags import NullTracker, PageTags, Tracker

_KV_SCALE = 8 / 448  # the keys and values of the model stay within +-8
_RESAMPLES = 2000
_WARM_UP = 2  # steps that are not counted: the first writes the prompts
_BLOCK = 8
_MOST_STEPS = _WARM_UP + 256 * _BLOCK
_SMALL = Heads(4, 2, 64)  # faults are found in the bookkeeping; the sizes of the layer do not matter


@dataclass(frozen=True, slots=True)
class Setting:
    """A decode pool under test: sizes of the layer, page size, tokens of each prompt, threads of the kernel."""

    heads: Heads = field(default_factory=Heads)
    page_size: int = 64
    context: int = 8192
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Relative change in percent, and its 95 % interval."""

    pct: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class IntegrityCost:
    """Page tags against the null tracker. Positive p95 and negative throughput are a cost.

    steps              pairs of steps compared
    throughput, p95    by the clock on the wall, whatever else the machine did
    cpu                processor time for the same tokens: the same cost where other work disturbs the clock
    step_ms            median step with the null tracker
    check_us, null_us  median of the batch check alone, with tags and with the null tracker: against `step_ms` a direct
                       and almost noiseless account of the same cost
    sidecar_bytes      tags and generations of all pages
    """

    concurrency: int
    steps: int
    throughput: Change
    p95: Change
    cpu: Change
    step_ms: float
    check_us: float
    null_us: float
    pages_checked: int
    sidecar_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One format at one concurrency. `running` < `concurrency`: the budget does not admit that many at once.

    resident_tokens  tokens that the budget holds in this format
    tokens_per_s     of the whole batch, None where it was not admitted; p95_ms of a step
    """

    format: str
    concurrency: int
    running: int
    resident_tokens: int
    tokens_per_s: float | None
    p95_ms: float | None

    @property
    def admitted(self) -> bool:
        """Whether all requests ran at once."""
        return self.running == self.concurrency


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A replay with faults beside the same replay without. `wrong` counts released requests with other tokens.

    checks        pages compared in the run without faults, which must raise no alarm: false_alarms counts both runs
    missed        names of faults that no request was aborted for
    """

    injected: int
    detected: int
    false_alarms: int
    checks: int
    aborted: int
    wrong: int
    requests: int
    peak_running: int
    missed: list[str] = field(default_factory=list)


def cache_for(format: KVFormat, pages: int, page_size: int, heads: Heads) -> KVCache:
    """A numpy cache of this many pages with scales that fit the synthetic model."""
    scale = 1.0 if format in ("bf16", "f16", "mxfp4") else _KV_SCALE
    return new_cache(format, pages, page_size, heads.kv, heads.dim, k_scale=scale, v_scale=scale)


def measure_integrity(
    concurrency: int, *, seconds: float = 20.0, format: KVFormat = "e4m3", setting: Setting = Setting(),
    control: bool = False,
) -> IntegrityCost:  # fmt: skip
    """Cost of the page tags at this concurrency: decode steps in lockstep for `seconds`, at least 48 of them.

    control  compare the null tracker with itself: what the method reports where there is nothing to report
    """
    if concurrency < 1 or not 0 < seconds < float("inf"):
        raise QuantkitError("nothing to measure", value=[concurrency, seconds], allowed="requests and seconds above 0")
    requests = _decoders(concurrency, _MOST_STEPS, setting)
    size, max_pages = setting.page_size, -(-(setting.context + _MOST_STEPS + 1) // setting.page_size)
    pages = concurrency * max_pages
    cache, model = cache_for(format, pages, size, setting.heads), Model(setting.heads)
    tags = PageTags(pages, size, concurrency, max_pages, seed=setting.seed)
    trackers: tuple[Tracker, Tracker] = (NullTracker(), NullTracker() if control else tags)
    off, on = (
        Replay(requests, model, cache, PagePool(pages, size, concurrency, max_pages, t), threads=setting.threads)
        for t in trackers
    )
    rng = np.random.default_rng(setting.seed)
    _lockstep(on, off, _WARM_UP, rng)
    end = time.perf_counter() + seconds
    while off.steps < _MOST_STEPS and (time.perf_counter() < end or off.steps < _WARM_UP + 6 * _BLOCK):
        _lockstep(on, off, _BLOCK, rng)
    off_N = np.array(off.result.seconds[_WARM_UP:])
    throughput, p95, cpu = _changes(on.result, off.result, rng)
    compared = tags.checks // on.steps
    return IntegrityCost(
        concurrency, len(off_N), throughput, p95, cpu, float(np.median(off_N)) * 1e3,
        on.check_seconds(200) * 1e6, off.check_seconds(200) * 1e6, compared, tags.sidecar_bytes, pages,
    )  # fmt: skip


def _decoders(concurrency: int, steps: int, setting: Setting) -> list[Request]:
    """Requests of one length that all arrive at once and outlive the steps."""
    workload = Workload(concurrency, (setting.context,) * 2, (steps + 1,) * 2, seed=setting.seed)
    return make_requests(workload)


def _lockstep(on: Replay, off: Replay, steps: int, rng: np.random.Generator) -> None:
    """So many steps of both, each going first in half of them: who comes second finds the cache warm."""
    for on_first in rng.permutation(np.arange(steps) % 2):
        for replay in (on, off) if on_first else (off, on):
            replay.step()


def _changes(on: Result, off: Result, rng: np.random.Generator) -> list[Change]:
    """Change of throughput, of the 95th percentile of the seconds of a step, and of processor time."""
    on_BN, off_BN = (np.array(r.seconds[_WARM_UP:]).reshape(-1, _BLOCK) for r in (on, off))
    on_cpu_B, off_cpu_B = (np.array(r.cpu_seconds[_WARM_UP:]).reshape(-1, _BLOCK).sum(1) for r in (on, off))

    def ratios(b: NDArray[np.int64]) -> list[float]:
        slower = np.percentile(on_BN[b], 95) / np.percentile(off_BN[b], 95)
        faster = off_BN[b].sum() / on_BN[b].sum()
        return [100 * float(r - 1) for r in (faster, slower, on_cpu_B[b].sum() / off_cpu_B[b].sum())]

    blocks = len(on_BN)
    draws = np.array([ratios(rng.integers(0, blocks, blocks)) for _ in range(_RESAMPLES)])
    low, high = np.percentile(draws, [2.5, 97.5], axis=0).tolist()
    return [Change(v, (a, b)) for v, a, b in zip(ratios(np.arange(blocks)), low, high, strict=True)]


def sweep(
    formats: Sequence[KVFormat], concurrencies: Sequence[int], *, budget_bytes: int, new_tokens: int = 16,
    setting: Setting = Setting(),
) -> Iterator[SweepRow]:  # fmt: skip
    """For each format and concurrency: does the budget hold so many requests at once, and how fast do they decode?

    The budget is that of the keys and values of one layer. Prompts have nothing in common.
    """
    size = setting.page_size
    for format in formats:
        pages = budget_bytes // (token_bytes(cache_for(format, 1, size, setting.heads)) * size)
        if pages < 1:
            raise QuantkitError("the budget does not hold one page", value=budget_bytes, tensor=format)
        cache, model = cache_for(format, pages, size, setting.heads), Model(setting.heads)
        for concurrency in concurrencies:
            requests = _decoders(concurrency, new_tokens, setting)
            pool = PagePool(pages, size, concurrency, -(-(setting.context + new_tokens + 1) // size))
            replay = Replay(requests, model, cache, pool, threads=setting.threads)
            running = replay.admit()
            speed, p95 = None, None
            if running == concurrency:
                seconds = np.array([replay.step() for _ in range(new_tokens)])[1:]  # the first prefills
                speed, p95 = concurrency * len(seconds) / float(seconds.sum()), float(np.percentile(seconds, 95)) * 1e3
            yield SweepRow(format, concurrency, running, pages * size, speed, p95)


def inject_faults(
    names: Sequence[str] = tuple(FAULTS), *, requests: int = 400, concurrency: int = 128, format: KVFormat = "e4m3",
    heads: Heads = _SMALL, page_size: int = 4, seed: int = 0, threads: int = 1,
) -> FaultReport:  # fmt: skip
    """Run many requests with shared prefixes twice, the second time with each named fault once, some steps apart."""
    workload = Workload(requests, (20, 200), (16, 96), prefixes=6, prefix_tokens=50, repeat=0.4, per_step=4, seed=seed)
    work = make_requests(workload)
    longest = max(len(q.prompt_T) + q.new_tokens for q in work)
    max_pages = -(-longest // page_size)
    pages = concurrency * max_pages // 3  # memory runs short: requests wait and prefixes are evicted
    model = Model(heads)

    def run(faults: Sequence[Fault]) -> tuple[Result, PageTags]:
        tags = PageTags(pages, page_size, concurrency, max_pages, seed=seed)
        pool = PagePool(pages, page_size, concurrency, max_pages, tags)
        cache = cache_for(format, pages, page_size, heads)
        return Replay(work, model, cache, pool, threads=threads, faults=faults, seed=seed).run(), tags

    clean, tags = run(())
    faulty, _ = run([fault(name, 20 + 5 * n) for n, name in enumerate(names)])
    wrong = sum(
        a is not None and (b is None or not np.array_equal(a, b))
        for a, b in zip(faulty.tokens, clean.tokens, strict=True)
    )
    return FaultReport(
        len(faulty.injected), faulty.detected, clean.false_alarms + faulty.false_alarms, tags.checks,
        len(faulty.aborted), wrong, len(work), max(faulty.running),
        [f.name for f in faulty.injected if f.detected is None],
    )  # fmt: skip
