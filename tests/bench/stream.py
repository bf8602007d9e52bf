"""How fast quantkit streams a checkpoint, beside llm-compressor's `model_free_ptq` in the same run.

usage: python tests/bench/stream.py [--peer-python .venv-peer/bin/python] [--gb 4] [--only int4] [--json]

The source is the routed experts of one GLM-like layer (glm_layer.py), read once before every run so that it is in the
page cache. Each path runs `--rounds` times, in turn with the peer; medians are shown, and nothing is asserted.

steady rate    bytes of source weights / seconds of the quantising part. quantkit: the `seconds` of `quantize --json`
               (reading, quantising, writing; start-up and plan left out). Peer: the `model_free_ptq` call, imports left
               out. Both have converted a small checkpoint of the same kind before: nothing is compiled or loaded anew.
               quantkit syncs to the disk what it writes, and that is in its time; the peer does not.
wall, cpu      the whole command, from start to exit; processor seconds of its threads
peak           VmHWM of the process (pages of mapped files count); `anon` its anonymous part, sampled every 10 ms
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import glm_layer
import measure
import table
from startup import commands, copies, plan_of_headers

HERE = Path(__file__).parent
QUANTKIT = str(Path(sys.executable).parent / "quantkit")
RECIPE = """weights:
  - {{match: {{role: routed_experts}}, {rule}}}
  - {{match: {{role: "*"}}, keep: true}}
outputs: [{{format: {output}}}]
"""


@dataclass(frozen=True)
class Case:
    """One row of the table: what quantkit is asked for, and the peer's name of the same (None: it has none)."""

    key: str
    path: str
    fp8: bool
    rule: str
    peer: str | None
    output: str = "compressed-tensors"


# those that share a run of the peer stand together
CASES = (
    Case("int4-plain", "BF16 -> INT4 g128, plain", False, "scheme: int4-g128, method: plain", "W4A16"),
    Case("int4", "BF16 -> INT4 g128, searched", False, "scheme: int4-g128", "W4A16"),
    Case("int4-tails", "BF16 -> INT4 g128, tails", False, "scheme: int4-g128, method: tails", "W4A16"),
    Case("fp8-int4", "FP8 block -> INT4 g128, searched", True, "scheme: int4-g128", "W4A16"),
    Case("nvfp4-plain", "BF16 -> NVFP4, plain", False, "scheme: nvfp4, method: plain", "NVFP4A16"),
    Case("nvfp4", "BF16 -> NVFP4, sweep", False, "scheme: nvfp4", "NVFP4A16"),
    Case("nvfp4-tails", "BF16 -> NVFP4, tails", False, "scheme: nvfp4, method: tails", "NVFP4A16"),
    Case("fp8-block", "BF16 -> FP8 block", False, "scheme: fp8-block", "FP8_BLOCK", "fp8"),
    Case("mxfp4", "BF16 -> MXFP4, searched", False, "scheme: mxfp4", None),
)


def main() -> None:
    """Parse, measure, print."""
    args = _arguments()
    work = args.dir or Path(tempfile.mkdtemp(prefix="quantkit-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    bench: Bench | None = None
    try:
        cases = [c for c in CASES if not args.only or c.key in args.only]
        bench = Bench(work, args, cases)
        groups = groupby(cases, key=lambda c: (c.peer, c.fp8))
        rows = [row for _, group in groups for row in bench.measure(list(group))]
        result = {"machine": measure.machine(), "peer": bench.peer_version(), "gb": args.gb, "paths": rows}
        if not args.only:
            result["copies"] = copies(QUANTKIT, bench.out, bench.sets[False], args.rounds)
            result["start-up"] = commands(QUANTKIT) + plan_of_headers(QUANTKIT, work)
    finally:
        if bench is not None:
            shutil.rmtree(bench.out.parent)
        if args.dir is None:
            shutil.rmtree(work, ignore_errors=True)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        table.show(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the BF16 source (4)")
    parser.add_argument("--dir", type=Path, help="folder for the data sets, kept; a temporary one by default")
    parser.add_argument("--out-dir", type=Path, help="folder for the output (--dir); /dev/shm leaves the disk out")
    parser.add_argument("--only", action="append", choices=[c.key for c in CASES], help="one path; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each path (3)")
    parser.add_argument("--jobs", type=int, default=2, help="quantkit's --jobs (2)")
    parser.add_argument("--memory", default="512MB", help="quantkit's --memory (512MB)")
    parser.add_argument("--peer-python", help="python that make_peer_venv.sh made; without it the peer is left out")
    parser.add_argument("--peer-rounds", type=int, help="runs of the peer (as --rounds)")
    parser.add_argument("--peer-workers", type=int, default=1, help="its max_workers (1, its default: 2 was slower)")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    args = parser.parse_args()
    if args.no_peer:
        args.peer_python = None
    return args


class Bench:
    """The data sets on disk and the runs over them."""

    def __init__(self, work: Path, args: argparse.Namespace, cases: list[Case]) -> None:
        self.args, self.work = args, work
        self.out = Path(tempfile.mkdtemp(prefix="bench-", dir=args.out_dir or work)) / "out"
        shutil.rmtree(work / "numba-cache", ignore_errors=True)
        self.sets: dict[bool, Path] = {}
        self.tiny: dict[bool, Path] = {}
        self.bytes: dict[bool, int] = {}
        experts = glm_layer.experts_for(args.gb)
        for fp8 in sorted({c.fp8 for c in cases}):
            kind = "fp8" if fp8 else "bf16"
            self.sets[fp8], self.tiny[fp8] = work / f"{kind}-{experts}-experts", work / f"{kind}-tiny"
            _say(f"source: {self.sets[fp8]}")
            self.bytes[fp8] = glm_layer.make(self.sets[fp8], experts, fp8=fp8)
            glm_layer.make(self.tiny[fp8], 4, fp8=fp8, inner=256, hidden=512)

    def measure(self, cases: list[Case]) -> Iterator[dict]:
        """The rows of the cases that one peer run stands beside: every round runs each case and then the peer."""
        size = self.bytes[cases[0].fp8]
        has_peer = self.args.peer_python and cases[0].peer
        peer_rounds = (self.args.peer_rounds or self.args.rounds) if has_peer else 0
        # twice over a small checkpoint: the first run compiles the kernels
        small = {c.key: [self._ours(c, self.tiny)["wall"] for _ in range(2)] for c in cases}
        ours: dict[str, list[dict]] = {c.key: [] for c in cases}
        peer: list[dict] = []
        for turn in range(max(self.args.rounds, peer_rounds)):
            for case in cases if turn < self.args.rounds else []:
                ours[case.key].append(self._ours(case, self.sets))
                _say(f"{case.path}: {ours[case.key][-1]['seconds']:.2f} s")
            if turn < peer_rounds:
                peer.append(self._peer(cases[0]))
                _say(f"{cases[0].path}: {peer[-1]['seconds']:.2f} s (peer)")
        for case in cases:
            row: dict[str, Any] = {
                "key": case.key,
                "path": case.path,
                "bytes_in": size,
                "quantkit": _median(ours[case.key], size),
            }
            row["small_checkpoint_seconds"] = {"first": small[case.key][0], "later": small[case.key][1]}
            if peer:
                row["peer"] = _median(peer, size)
                row["ratio"] = row["quantkit"]["gb_per_s"] / row["peer"]["gb_per_s"]
                row["memory_ratio"] = row["quantkit"]["peak"] / row["peer"]["peak"]
            yield row

    def _ours(self, case: Case, sources: dict[bool, Path]) -> dict:
        recipe = self.work / f"{case.key}.yaml"
        recipe.write_text(RECIPE.format(rule=case.rule, output=case.output))
        command = [QUANTKIT, "quantize", str(sources[case.fp8]), "-r", str(recipe), "-o", str(self.out)]
        command += ["--jobs", str(self.args.jobs), "--memory", self.args.memory, "--no-verify", "--json"]
        return self._run(command, sources[case.fp8])

    def _peer(self, case: Case) -> dict:
        source = self.sets[case.fp8]
        command = [self.args.peer_python, str(HERE / "peer.py"), str(self.tiny[case.fp8]), str(source)]
        command += [str(self.out), str(case.peer), "--workers", str(self.args.peer_workers)]
        return self._run(command + (["--fp8-source"] if case.fp8 else []), source)

    def _run(self, command: list[str], source: Path) -> dict:
        measure.warm(source)
        ran = measure.run(command, {"NUMBA_CACHE_DIR": str(self.work / "numba-cache")})
        shutil.rmtree(self.out)
        # the report is the last thing on stdout: one document of quantkit, the last line of the peer
        report = json.loads(ran.stdout[ran.stdout.index("{") :])
        return {
            "seconds": report["seconds"],
            "bytes_out": report["bytes_out"],
            "wall": ran.seconds,
            "cpu": ran.cpu,
            "peak": ran.peak_rss,
            "peak_anon": ran.peak_anon,
        }

    def peer_version(self) -> str | None:
        """Name and releases of the peer, or None when it is left out."""
        if not self.args.peer_python:
            return None
        names = ("llmcompressor", "compressed-tensors", "torch")
        code = f"from importlib.metadata import version as v; print(', '.join(f'{{n}} {{v(n)}}' for n in {names}))"
        return measure.run([self.args.peer_python, "-c", code]).stdout.strip()


def _median(runs: list[dict], bytes_in: int) -> dict:
    """Medians of the times, the largest of the memory peaks, and the range of the rates."""
    seconds = [r["seconds"] for r in runs]
    return {
        "gb_per_s": bytes_in / median(seconds) / 1e9,
        "gb_per_s_range": [bytes_in / max(seconds) / 1e9, bytes_in / min(seconds) / 1e9],
        "runs": len(runs),
        "seconds": median(seconds),
        "wall": median(r["wall"] for r in runs),
        "cpu": median(r["cpu"] for r in runs),
        "bytes_out": runs[0]["bytes_out"],
        "peak": max(r["peak"] for r in runs),
        "peak_anon": max(r["peak_anon"] for r in runs),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
