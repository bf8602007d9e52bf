"""The numbers of the streaming benchmark that have no peer: copies, start-up, and the plan of 118,629 tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import measure

sys.path.insert(0, str(Path(__file__).parents[1]))
import headers  # tests/headers.py


def copies(quantkit: str, out: Path, source: Path, rounds: int) -> list[dict]:
    """Pass-through (`-r keep`) beside `cp`, in turn, each followed by a sync of what it wrote."""
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    commands = {
        "pass-through (-r keep)": [quantkit, "quantize", str(source), "-r", "keep", "-o", str(out), "--no-verify"],
        "cp -r": ["cp", "-r", str(source), str(out)],
    }
    seconds: dict[str, list[float]] = {f"{name}{end}": [] for name in commands for end in ("", " and sync")}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            measure.warm(source)
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
            os.sync()
            seconds[f"{name} and sync"].append(time.perf_counter() - start)
    shutil.rmtree(out)
    return [{"what": what, "value": size / median(s) / 1e9, "unit": "GB/s"} for what, s in seconds.items()]


def commands(quantkit: str, times: int = 9) -> list[dict]:
    """Wall time of the commands a person waits for; `python -c pass` is the floor."""
    asked = {
        "quantkit --help": [quantkit, "--help"],
        "quantkit recipes": [quantkit, "recipes"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    measured = {what: measure.wall(command, times + 1)[1:] for what, command in asked.items()}
    return [{"what": what, "value": median(seconds), "unit": "s"} for what, seconds in measured.items()]


def plan_of_headers(quantkit: str, work: Path) -> list[dict]:
    """`quantkit plan` of a GLM-5.2-FP8 that has headers and no weights."""
    folder = work / "glm-5.2-fp8-headers"
    if not folder.exists():
        headers.write(folder, headers.GIANTS["GLM-5.2"], "fp8_block128")
    ran = measure.run([quantkit, "plan", str(folder), "-r", "models/glm-5.2-int4", "--json"])
    return [
        {"what": "plan of GLM-5.2-FP8 (118,629 tensors)", "value": ran.seconds, "unit": "s"},
        {"what": "peak memory of that plan", "value": ran.peak_rss / 1e9, "unit": "GB"},
    ]
