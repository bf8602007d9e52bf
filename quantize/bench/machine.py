"""The machine a benchmark runs on: what it is, and how fast it reads memory.

Linux tells most of it in /proc and /sys; what is not told is left out.
"""

from __future__ import annotations

import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

_VECTOR_UNITS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")
_NO_CACHE_TOLD = 32 << 20
_SMALLEST_BUFFER = 64 << 20
_PASSES = 7


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def available_memory() -> int:
    """Bytes that can be allocated without swapping."""
    told = _field(_read("/proc/meminfo"), "MemAvailable").split()
    return int(told[0]) << 10 if told else 8 << 30


def cache_bytes() -> int:
    """Bytes of the last level of cache, as the system reports it; a virtual machine may share it with others."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) << 10 for s in sizes if s.endswith("K")), default=_NO_CACHE_TOLD)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def processor() -> str:
    """The processor's name and the number of cores that this process may use."""
    name = _field(_read("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    return f"{name}, {cores()} cores"


def releases(*packages: str) -> str:
    """Installed versions, for a line of text."""
    return ", ".join(f"{p} {_version(p)}" for p in packages)


def facts(threads: int) -> dict[str, str]:
    """The lines above a table: processor, memory, what else the machine does, releases."""
    cpu = _read("/proc/cpuinfo")
    flags = (_field(cpu, "flags") or _field(cpu, "Features")).split()
    units = " ".join(f for f in _VECTOR_UNITS if f in flags)
    return {
        "processor": f"{processor()}, {threads} threads used" + (f" ({units})" if units else ""),
        "memory": f"{available_memory() / 1e9:.0f} GB available, last-level cache {cache_bytes() / 1e6:.0f} MB",
        "load": f"{os.getloadavg()[0]:.1f} processes running before this one (mean of a minute)",
        "releases": f"Python {platform.python_version()}, " + releases("quantkit", "numba", "numpy", "torch"),
    }


def read_bandwidth(threads: int) -> tuple[float, int]:
    """(bytes a second, bytes of the buffer): the fastest of several sums of one buffer by so many threads.

    The buffer is twice the last level of cache, but at most a quarter of the available memory.
    """
    nbytes = max(min(2 * cache_bytes(), available_memory() // 4), _SMALLEST_BUFFER)
    parts = np.array_split(np.ones(nbytes // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_PASSES):
            began = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds), nbytes
