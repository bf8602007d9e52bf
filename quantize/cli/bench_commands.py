"""What `quantkit bench` does: read the arguments, measure, hand the result to `show_bench`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.commands import emit

SHAPES = ("4096x4096", "6144x2048")
TOKENS = ("1", "4", "8", "64", "256")


def _split(texts: Sequence[str]) -> list[str]:
    """`a,b` and repeated options alike."""
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def numbers(option: str, texts: Sequence[str]) -> tuple[int, ...]:
    """Whole numbers from 1 on, each once; raises QuantkitError."""
    words = _split(texts)
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}", word) or int(word) < 1:
            raise QuantkitError(f"not a number for {option}", value=word, allowed="1 or more, such as 1,8,64")
    if not words:
        raise QuantkitError(f"{option} names nothing", allowed="numbers such as 1,8,64")
    return tuple(dict.fromkeys(int(w) for w in words))


def shapes(texts: Sequence[str]) -> list[tuple[int, int]]:
    """(outputs, inputs) of `4096x4096`; raises QuantkitError."""
    found = []
    for word in _split(texts):
        match = re.fullmatch(r"([1-9][0-9]{0,6})[x×]([1-9][0-9]{0,6})", word.lower())
        if match is None:
            raise QuantkitError("not a shape", value=word, allowed="outputs x inputs, such as 4096x4096")
        found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def kernel_names(text: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The kernels asked for; raises QuantkitError with the list of those known."""
    words = list(default) if text is None else list(dict.fromkeys(_split([text])))
    for word in words:
        if word not in known:
            raise QuantkitError("unknown scheme", value=word, allowed=", ".join(known))
    if not words:
        raise QuantkitError("--schemes names nothing", allowed=", ".join(known))
    return words


def thread_count(threads: int | None) -> int:
    """All cores by default; raises QuantkitError outside 1 .. cores."""
    from quantkit.quantize.cli.options import CORES

    if threads is None:
        return CORES
    if not 1 <= threads <= CORES:
        raise QuantkitError("--threads does not fit this machine", value=threads, allowed=f"1 to {CORES}")
    # read once, when numpy is loaded: products of many tokens take as many threads as everything else
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    return threads


def _at_least_1(option: str, value: int) -> int:
    if value < 1:
        raise QuantkitError(f"{option} must be 1 or more", value=value)
    return value


def _say_what_compiles() -> None:
    from quantkit.kernels.cpu import FIRST_RUN

    if FIRST_RUN:
        sys.stderr.write("compiling kernels for this machine, once: up to a minute\n")


def kernels_command(
    device: str, shape: Sequence[str], tokens: Sequence[str], schemes: str | None, context: int, threads: int | None,
    repeat: int, as_json: bool,
) -> None:  # fmt: skip
    """`quantkit bench kernels`."""
    from quantkit.quantize.bench.names import DEFAULT, KNOWN

    wanted, batches = shapes(shape or SHAPES), numbers("--tokens", tokens or TOKENS)
    count = thread_count(threads)
    _at_least_1("--context", context)
    _at_least_1("--repeat", repeat)
    names = kernel_names(schemes, KNOWN, DEFAULT)
    if device not in ("cpu", "cuda"):
        raise QuantkitError("no such device", value=device, allowed="cpu, cuda")
    if find_spec("torch") is None:
        raise QuantkitError("bench kernels compares with torch, which is absent", hint="pip install 'quantkit[torch]'")
    from quantkit.quantize.bench import kernels, machine
    from quantkit.quantize.bench.device import open_device, read_bandwidth
    from quantkit.quantize.cli import show_bench

    place = open_device(device, count)
    kernels.check(names, wanted, context, place)
    show_bench.machine(machine.facts(count))
    _say_what_compiles()
    bandwidth = read_bandwidth(place)
    show_bench.bandwidth(place.name, bandwidth.rate, bandwidth.buffer_bytes)
    with show_bench.time_left("bench kernels") as progress:
        rows = kernels.bench(names, wanted, batches, context, repeat, place, bandwidth.rate, progress, show_bench.note)
    if as_json:
        emit(rows)
    else:
        show_bench.kernels(rows)


def kv_command(
    concurrency: str, budget: str, context: int, new: int, seconds: float, requests: int, threads: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """`quantkit bench kv`."""
    from quantkit.quantize.cli.commands import parse_bytes

    requests_at, bytes_of_cache, count = (
        numbers("--concurrency", [concurrency]),
        parse_bytes(budget),
        thread_count(threads),
    )
    from quantkit.kernels.replay_measure import Setting
    from quantkit.quantize.bench import kv, machine
    from quantkit.quantize.cli import show_bench

    setting = Setting(context=_at_least_1("--context", context), threads=count)
    question = kv.Question(requests_at, bytes_of_cache, new, seconds, requests, setting)
    kv.check(question, machine.available_memory())
    facts = machine.facts(count)
    show_bench.machine(facts)
    _say_what_compiles()
    with show_bench.time_left("bench kv", every=0) as progress:
        result = {"machine": facts} | kv.bench(question, progress)
    if as_json:
        emit(result)
    else:
        show_bench.kv(result)
    if not kv.passed(result):
        sys.exit(1)
