"""The tables of `quantkit bench`, and the time that is left; on stderr like those of `show.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from quantkit.quantize.cli.show import _console, _table, size
from quantkit.quantize.progress import LINE_SECONDS

Row = dict[str, Any]


@contextmanager
def time_left(command: str, every: float = LINE_SECONDS) -> Iterator[Callable[[float, str], None]]:
    """Yields a function that is told of the part of the work that is done, 0 to 1, and what is being done.

    every  seconds between two lines where there is no terminal
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(command, total=1.0)
            yield lambda done, what: bar.update(task, completed=done, description=f"{command}: {what}")
        return
    last = time.monotonic()
    first: tuple[float, float] | None = None

    def report(done: float, what: str) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = first or (now, done)  # not before: the first call of a kernel compiles it
        if now - last < every or done >= 1:
            return
        last = now
        left = f", {(now - first[0]) * (1 - done) / (done - first[1]):.0f} s left" if done > first[1] else ""
        print(f"{command}: {done:.0%}{left}: {what}", file=sys.stderr, flush=True)

    yield report


def note(text: str) -> None:
    """A line about something that is not in the table."""
    _console().print(text)


def machine(facts: dict[str, str]) -> None:
    """What the numbers were measured on."""
    console = _console()
    for name, value in facts.items():
        console.print(f"{name:<10} {value}")


def bandwidth(device: str, rate: float, buffer_bytes: int) -> None:
    """How fast the device reads its memory."""
    _console().print(f"{'bandwidth':<10} {rate / 1e9:.1f} GB/s, reading {size(buffer_bytes)} ({device})")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def _is_attention(kernel: str) -> bool:
    return kernel.startswith(("kv-", "mla-"))


def kernels(rows: list[Row]) -> None:
    """One table for each weight shape and each kind of attention; baselines have rows of their own below."""
    by_table = lambda r: (r["n"], r["k"])  # noqa: E731
    for (n, k), found in groupby(rows, by_table):
        _kernel_table(list(found), n, k)


def _kernel_table(rows: list[Row], n: int, k: int) -> None:
    console, attention = _console(), _is_attention(rows[0]["kernel"])
    console.print()
    what = f"decode attention, {rows[0]['m']} heads of {k}, {n:,} cached tokens" if attention else f"GEMM {n} x {k}"
    console.print(
        f"{what}; ms of a call, and how many times as long the others take. Calls go through "
        f"{rows[0]['copies']} copies, {rows[0]['total_bytes'] / 1e6:,.0f} MB"
    )
    names = list(dict.fromkeys(name for r in rows for name in r["baselines"]))
    table = _table("kernel", "tokens", "ms", "GB/s", "of memory", "GFLOP/s", *names, right=1)
    for m, at in groupby(rows, lambda r: r["m"]):
        together = list(at)
        tokens = "1" if attention else str(m)
        for r in together:
            ratios = [f"{r['baselines'][b] / r['seconds']:.2f}x" if b in r["baselines"] else "" for b in names]
            share = f"{100 * r['bandwidth_share']:.0f} %"
            table.add_row(
                r["kernel"], tokens, _time(r["seconds"]), f"{r['gbps']:.2f}", share, f"{r['gflops']:.1f}", *ratios
            )
        for b in names:
            seconds = [r["baselines"][b] for r in together if b in r["baselines"]]
            if seconds and not _is_attention(b):
                table.add_row(f"  {b}", tokens, _time(seconds[0]))
    console.print(table)


def kv(result: dict[str, Any]) -> None:
    """Admission and throughput, the cost of the page tags, the faults."""
    console = _console()
    console.print(
        f"\ncache of {size(result['budget_bytes'])} for one layer of 8 KV heads of 128; "
        f"{result['context']:,} prompt and {result['new_tokens']:,} new tokens a request"
    )
    table = _table(
        "requests", *(f"{f} {x}" for f in ("bf16", "e4m3") for x in ("tokens/s", "p95 ms")), "ratio", right=0
    )
    for c, found in groupby(result["sweep"], lambda r: r["concurrency"]):
        cells, speeds = [f"{c}"], []
        for r in found:
            speeds.append(r["tokens_per_s"])
            full = f"out of memory ({r['running']} fit)"
            cells += [f"{r['tokens_per_s']:,.0f}", f"{r['p95_ms']:.1f}"] if r["admitted"] else [full, ""]
        table.add_row(*cells, f"{speeds[1] / speeds[0]:.2f}x" if all(speeds) else "")
    console.print(table)
    resident = {r["format"]: r["resident_tokens"] for r in result["sweep"]}
    console.print("resident tokens: " + ", ".join(f"{f} {n:,}" for f, n in resident.items()))
    _integrity(result["integrity"])
    f = result["faults"]
    missed = f" (missed: {', '.join(f['missed'])})" if f["missed"] else ""
    console.print(
        f"\nfaults: {f['injected']} of {f['kinds']} kinds injected, {f['detected']} detected{missed}, "
        f"{f['false_alarms']} false alarms in {f['checks']:,} checks; {f['requests']} requests, "
        f"{f['peak_running']} at a time, {f['aborted']} aborted, {f['wrong']} of the others with other tokens"
    )


def _integrity(by_concurrency: dict[str, Row]) -> None:
    console = _console()
    console.print("\npage tags against none, e4m3, with 95 % intervals; the check alone as part of a step")
    changes = ("throughput", "p95", "cpu")
    titles = [t for name in ("throughput", "p95 latency", "processor time") for t in (name, "95 %")]
    alone = ("step ms", "check us", "of a step", "no tags us")
    table = _table("requests", "tokens each", "pairs", *titles, *alone, right=0)
    for c, r in by_concurrency.items():
        cells = []
        for name in changes:
            low, high = r["ci95"][name]
            cells += [f"{r[f'{name}_change_pct']:+.2f} %", f"{low:+.2f} to {high:+.2f}"]
        table.add_row(
            c, f"{r['context']:,}", f"{r['pairs']:,}", *cells,
            f"{r['step_ms']:.2f}", f"{r['check_us']:.2f}", f"{r['check_share_pct']:.3f} %", f"{r['null_us']:.2f}",
        )  # fmt: skip
    console.print(table)
    per_page = {f"{r['bytes_per_page']:g}" for r in by_concurrency.values()}
    console.print(f"memory of the tags: {', '.join(sorted(per_page))} bytes a page")
