"""A real vLLM for the tests, in its own environment and process; see vllm_side/worker.py for what a job is."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "QUANTKIT_VLLM_PYTHON"
WORKER = Path(__file__).parent / "vllm_side" / "worker.py"


class Engine:
    """The process in vLLM's environment; importing vLLM takes it seconds. Fails when no such environment is named."""

    def __init__(self) -> None:
        python = os.environ.get(VARIABLE)
        assert python, (
            f"{VARIABLE} must name the python of an environment with vLLM: make one with "
            "`tests/integration/make_vllm_venv.sh DIR` and set it to DIR/bin/python, or leave these tests out: -m 'not vllm'"
        )
        # Triton is interpreted in this process (tests/conftest.py), not in vLLM's
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [python, str(WORKER)],
            text=True,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def run(self, **job: Any) -> dict[str, Any]:
        """The result of one job; fails when the process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in job.items()}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise AssertionError(f"the vLLM worker ended: {self._log.read()[-4000:]}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()
