"""`quantkit bench kernels`: every packed kernel beside what else the machine has, timed in turn.

One row for each kernel and size, as JSON wants it:

    kernel           a scheme (GEMM), kv-<format> or mla-<format> (decode attention)
    m, n, k          GEMM: tokens, outputs, inputs. Attention: query heads of one token, cached tokens, values of a key
    seconds          median of one call; packed_bytes: what it has to read of the weights or the cache
    gbps, gflops     packed bytes and multiply-adds (2 operations) a second, in 10^9
    bandwidth_share  of the bandwidth measured before: the fastest of several reads of a large buffer
    baselines        seconds of what else computes the same, by name; for attention also of this kernel on bfloat16
    copies           of the weights, which calls take in turn; total_bytes of all weights and copies of that size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quantkit.quantize.bench import attention, gemm
from quantkit.quantize.bench.device import Device
from quantkit.quantize.bench.names import GEMM, GROUPED, LATENT
from quantkit.quantize.bench.timing import Candidate, alternate, attempt

Row = dict[str, Any]
Progress = Callable[[float, str], None]
_ATTENTION = 0.08  # rough seconds of a turn, for the estimate of the time left only


def bench(
    names: Sequence[str], shapes: Sequence[tuple[int, int]], tokens: Sequence[int], context: int, rounds: int,
    device: Device, bandwidth: float, progress: Progress, note: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """Rows of all kernels in `names`; `check` comes first.

    bandwidth  of the memory, bytes a second
    progress   is told of the part of the work that is done, 0 to 1, and what is being timed
    note       is told why a baseline is left out
    """
    packed, layers = _parts(names)
    watch = _watch(packed, shapes, tokens, layers, progress)

    rows: list[Row] = []
    for outputs, inputs in shapes if packed else []:
        weights = gemm.make_weights(packed, outputs, inputs, device, note)
        for t in tokens:
            ours, others = gemm.candidates(weights, t, device)
            advance = watch(_gemm_seconds(outputs, inputs, t), f"GEMM {outputs}x{inputs}, {t} tokens")
            seconds = time_all(ours, others, rounds, device, advance, note)
            found = [gemm.row(c.name, weights, t) for c in ours]
            rows += [
                _complete(r, seconds, others, weights.copies, weights.total_bytes, device, bandwidth) for r in found
            ]
    for some in filter(None, layers):
        layer = attention.make_layer(some, context, device, latent=some[0] in LATENT)
        ours, others = attention.candidates(layer, device)
        seconds = time_all(ours, others, rounds, device, watch(_ATTENTION, "attention"), note)
        found = [attention.row(c.name, layer) for c in ours]
        beside = [*others, *(c for c in ours if c.name.endswith("-bf16"))]
        rows += [_complete(r, seconds, beside, layer.copies, layer.total_bytes, device, bandwidth) for r in found]
    return rows


def _parts(names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The schemes of the GEMM among the names, and the formats of either kind of attention."""
    kinds = (GROUPED, LATENT)
    return [n for n in names if n in GEMM], [[n for n in names if n in kind] for kind in kinds]


def check(names: Sequence[str], shapes: Sequence[tuple[int, int]], context: int, device: Device) -> None:
    """Raise QuantkitError unless everything can be run."""
    packed, layers = _parts(names)
    if packed:
        gemm.check(packed, shapes, device)
    for some in layers:
        attention.check(some, context, device)


def _gemm_seconds(outputs: int, inputs: int, tokens: int) -> float:
    """Rough seconds of a turn, for the estimate of the time left only."""
    return 0.04 + tokens * outputs * inputs / 2.5e10


def _watch(
    packed: Sequence[str], shapes: Sequence[tuple[int, int]], tokens: Sequence[int], layers: Sequence[Sequence[str]],
    progress: Progress,
) -> Callable[[float, str], Callable[[float], None]]:  # fmt: skip
    """(seconds of a turn, what it is) -> a function to tell of the part of these turns that was made."""
    total = sum(_gemm_seconds(o, i, t) for o, i in shapes for t in tokens) if packed else 0.0
    total += sum(_ATTENTION for some in layers if some)
    done = 0.0

    def watch(seconds: float, what: str) -> Callable[[float], None]:
        def advance(part: float) -> None:
            nonlocal done
            done += part * seconds / total
            progress(done, what)

        return advance

    return watch


def time_all(
    ours: Sequence[Candidate], others: list[Candidate], rounds: int, device: Device,
    advance: Callable[[float], None], note: Callable[[str], None],
) -> dict[str, float]:  # fmt: skip
    """Median seconds by name. Everything runs once before: kernels compile; baselines that cannot run are removed."""
    for c in ours:
        c.run(0)
    for c in others[:]:
        if attempt(c.name, partial(c.run, 0), note) is None:
            others.remove(c)
    every = [*ours, *others]
    return alternate(every, device.turn, rounds, lambda: advance(1 / (rounds * len(every))))


def _complete(
    row: Row,
    seconds: dict[str, float],
    others: Sequence[Candidate],
    copies: int,
    total_bytes: int,
    device: Device,
    bandwidth: float,
) -> Row:
    spent, name = seconds[row["kernel"]], row["kernel"]
    rate = row["packed_bytes"] / spent
    return {
        "kernel": name, "device": device.kind, "m": row["m"], "n": row["n"], "k": row["k"], "seconds": spent,
        "packed_bytes": row["packed_bytes"], "gbps": rate / 1e9, "gflops": row["operations"] / spent / 1e9,
        "bandwidth_share": rate / bandwidth,
        "baselines": {c.name: seconds[c.name] for c in others if c.name != name},
        "threads": device.threads, "copies": copies, "total_bytes": total_bytes, "machine": device.name,
    }  # fmt: skip
