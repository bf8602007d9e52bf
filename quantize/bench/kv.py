"""`quantkit bench kv`: requests served from a BF16 and an FP8 cache of one size, and what page tags cost and find.

    sweep      for each concurrency and format, in turn: does the budget hold so many requests, how fast do they decode
    integrity  decode steps with tags beside the same steps without (`kernels/replay_measure.py`). The tokens of all
               requests together are limited, so that dozens of pairs of steps take seconds
    faults     eight kinds of mistakes made in a replay, and the same replay without them, which must raise no alarm

Everything runs on the CPU over the real attention kernel, one layer of 32 query heads and 8 KV heads of 128 values. No
weights are read: in a server they are shared by all requests of a step, and throughput rises with concurrency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import KVFormat, token_bytes
from quantkit.kernels.replay_faults import FAULTS
from quantkit.kernels.replay_measure import (
    IntegrityCost,
    Setting,
    cache_for,
    inject_faults,
    measure_integrity,
    sweep,
)

FORMATS: tuple[KVFormat, KVFormat] = ("bf16", "e4m3")
TAGS_AT = (1, 2, 4, 8, 64)

_MOST_TOKENS = 1 << 17
_COPY_OF_CACHE = 1.4  # memory of the tags' run beside the keys and values of its tokens: room to grow
_FAULT_WORK = 2e5  # tokens that take as long as the faults, for the estimate of the time left


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be measured; checked by `check`."""

    concurrency: tuple[int, ...]
    budget: int
    new_tokens: int
    seconds: float
    requests: int
    setting: Setting

    @property
    def tags_at(self) -> tuple[int, ...]:
        """Concurrencies at which the cost of tags is measured: the usual ones up to the largest asked for."""
        return tuple(c for c in TAGS_AT if c <= max(self.concurrency))

    def tags_setting(self, concurrency: int) -> Setting:
        """Shorter prompts where many requests would hold too many tokens."""
        return replace(self.setting, context=min(self.setting.context, max(_MOST_TOKENS // concurrency, 1)))


def check(q: Question, memory: int) -> None:
    """Raise QuantkitError unless everything can be run in so many bytes of memory."""
    for what, value in (
        ("context", q.setting.context),
        ("requests", q.requests),
        *(("concurrency", c) for c in q.concurrency),
    ):
        if value < 1:
            raise QuantkitError(f"--{what} must be 1 or more", value=value)
    if q.new_tokens < 2:
        raise QuantkitError("--new must be 2 or more: the first token comes with the prompt", value=q.new_tokens)
    if not 0 < q.seconds < float("inf"):
        raise QuantkitError("--seconds must be a positive number", value=q.seconds)
    size, heads = q.setting.page_size, q.setting.heads
    page = token_bytes(cache_for("bf16", 1, size, heads)) * size
    one = -(-(q.setting.context + q.new_tokens + 1) // size) * page
    if q.budget < one:
        raise QuantkitError(
            "the budget holds no request", value=f"{q.budget:,} bytes",
            allowed=f"{one:,} bytes or more for {q.setting.context} + {q.new_tokens} tokens in BF16, {page:,} a page",
        )  # fmt: skip
    tags = max(c * q.tags_setting(c).context for c in q.tags_at) * page // size
    need = int(max(q.budget, _COPY_OF_CACHE * tags))
    if need > memory:
        raise QuantkitError("the caches do not fit into memory", value=f"{need:,} bytes", allowed=f"{memory:,}")


def bench(q: Question, progress: Callable[[float, str], None]) -> dict[str, Any]:
    """The result as JSON wants it; `progress` is told of the part done, 0 to 1, and what comes next."""
    per_row = q.setting.context + 8 * q.new_tokens  # tokens written, and attention in the same unit
    work = [float(c * per_row) for c in q.concurrency for _ in FORMATS]
    work += [q.seconds * 4e4 + c * q.tags_setting(c).context for c in q.tags_at]
    work.append(_FAULT_WORK * q.requests / 400)
    left = list(work)

    def begin(what: str) -> None:
        progress(1 - sum(left) / sum(work), what)
        left.pop(0)

    rows: list[dict[str, Any]] = []
    for c in q.concurrency:
        for format in FORMATS:
            begin(f"concurrency {c}, {format} cache")
            (row,) = sweep((format,), (c,), budget_bytes=q.budget, new_tokens=q.new_tokens, setting=q.setting)
            rows.append(asdict(row) | {"admitted": row.admitted})
    integrity = {}
    for c in q.tags_at:
        begin(f"page tags at concurrency {c}")
        setting = q.tags_setting(c)
        cost = measure_integrity(c, seconds=q.seconds, setting=setting)
        integrity[str(c)] = _cost(cost, setting.context)
    begin("faults")
    report = inject_faults(requests=q.requests, threads=1)
    return {
        "budget_bytes": q.budget, "context": q.setting.context, "new_tokens": q.new_tokens,
        "threads": q.setting.threads, "sweep": rows, "integrity": integrity,
        "faults": asdict(report) | {"kinds": len(FAULTS)},
    }  # fmt: skip


def _cost(cost: IntegrityCost, context: int) -> dict[str, Any]:
    return {
        "throughput_change_pct": cost.throughput.pct,
        "p95_change_pct": cost.p95.pct,
        "cpu_change_pct": cost.cpu.pct,
        "ci95": {n: list(getattr(cost, n).ci95) for n in ("throughput", "p95", "cpu")},
        "context": context, "pairs": cost.steps, "step_ms": cost.step_ms,
        "check_us": cost.check_us, "null_us": cost.null_us, "check_share_pct": cost.check_us / cost.step_ms / 10,
        "pages_checked": cost.pages_checked, "bytes_per_page": cost.sidecar_bytes / cost.pages,
    }  # fmt: skip


def passed(result: dict[str, Any]) -> bool:
    """Every injected fault was found, no alarm was false, no wrong token was released."""
    faults = result["faults"]
    found = 0 < faults["injected"] == faults["detected"]
    return bool(found and faults["false_alarms"] == 0 and faults["wrong"] == 0)
