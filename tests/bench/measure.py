"""Run a command and watch the memory of its processes; read the sources into the page cache; describe the machine.

Linux only: everything comes from /proc.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SAMPLE_SECONDS = 0.01
FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


@dataclass(frozen=True)
class Ran:
    """What a finished command left.

    peak_rss   sum over its processes of the kernel's own high-water mark (VmHWM), pages of mapped files included
    peak_anon  largest sampled sum of their anonymous memory (RssAnon): what the command itself holds
    cpu        processor seconds of all its threads: on a machine that others use, steadier than the wall
    """

    stdout: str
    seconds: float
    peak_rss: int
    peak_anon: int
    cpu: float


def run(command: list[str], env: dict[str, str] | None = None) -> Ran:
    """Run `command` to its end, sampling its memory every 10 ms; a failure shows its stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before, start = _cpu_of_children(), time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **(env or {})})
        high: dict[int, int] = {}
        anon = 0
        while child.poll() is None:
            now = 0
            for pid in _with_children(child.pid):
                status = _status(pid)
                high[pid] = max(high.get(pid, 0), status.get("VmHWM", 0))
                now += status.get("RssAnon", 0)
            anon = max(anon, now)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)}\nexited with {child.returncode}\n{err.read()[-4000:]}")
        return Ran(out.read(), seconds, sum(high.values()), anon, _cpu_of_children() - before)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wall(command: list[str], times: int, env: dict[str, str] | None = None) -> list[float]:
    """Wall time of a short command, waited for rather than polled."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        seconds.append(time.perf_counter() - start)
    return seconds


def warm(folder: Path) -> None:
    """Read every file of a folder once, so that the page cache has it."""
    buffer = bytearray(1 << 24)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def _with_children(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    found, todo = [], [pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += map(int, task.read_text().split())
            except OSError:  # a thread that ended between the listing and the read
                continue
    return found


def _status(pid: int) -> dict[str, int]:
    """The memory lines of /proc/PID/status in bytes; nothing when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0][:-1]: int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}


def machine() -> dict[str, str]:
    """Processor, cores, memory, vector units and the releases that the numbers depend on."""
    cpu = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in cpu.split("\n\n")[0].splitlines() if ":" in line)
    fields = {k.strip(): v.strip() for k, v in fields.items()}
    flags = fields.get("flags", "").split()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return {
        "processor": f"{fields.get('model name')} (family {fields.get('cpu family')}, model {fields.get('model')})",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.1f} GiB",
        "vector units": " ".join(f for f in FLAGS if f in flags) or "none of " + " ".join(FLAGS),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "releases": ", ".join(f"{name} {_version(name)}" for name in ("quantkit", "numba", "numpy", "torch")),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
