"""Runs jobs in vLLM's own environment; see vllm_side/worker.py for what a job is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

VARIABLE = "QUANTKIT_VLLM_PYTHON"
WORKER = Path(__file__).parent / "vllm_side" / "worker.py"


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of `jobs`, in order. Fails when no python of a vLLM environment is named."""
    python = os.environ.get(VARIABLE)
    assert python, (
        f"{VARIABLE} must name the python of an environment with vLLM: make one with "
        "`tests/integration/make_vllm_venv.sh DIR` and set it to DIR/bin/python, or deselect these tests: -m 'not vllm'"
    )
    done = subprocess.run(
        [python, str(WORKER)], input=json.dumps(jobs), capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, f"the vLLM worker failed: {done.stderr[-4000:]}"
    results: list[dict[str, Any]] = json.loads(done.stdout)
    for job, result in zip(jobs, results, strict=True):
        if "error" in result:
            print(json.dumps(job), result["error"], sep="\n")
    return results
