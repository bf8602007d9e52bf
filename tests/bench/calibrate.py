"""How long GPTQ takes from a checkpoint to a quantised one, and the memory, beside llm-compressor in the same run.

usage: python tests/bench/calibrate.py MODEL TEXT [--peer-python .venv-peer/bin/python] [--samples 64] [--json]

Both get the same token ids, `--samples` of `--seq-len` tokens cut from TEXT by the model's tokenizer, and write INT4 in
groups of `--group` for every linear layer but the head. quantkit: `calibrate`, then `export`, without KV scales, which
the peer does not measure here. Runs alternate, medians are shown, nothing is asserted.

wall    quantkit: both commands from start to exit. Peer: the whole process; `seconds` its work without the imports
cpu     processor seconds of all threads
peak    VmHWM of the process, of the larger of quantkit's two
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import measure

HERE = Path(__file__).parent
QUANTKIT = str(Path(sys.executable).parent / "quantkit")
RECIPE = """weights:
  - {match: {role: [attention, dense_mlp, shared_experts, routed_experts]}, scheme: int4-g128, method: gptq}
  - {match: {role: "*"}, keep: true}
outputs: [{format: compressed-tensors}]
"""
WORDS = ("wall", "cpu", "peak")


def main() -> None:
    """Parse, measure, print."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as folder:
        work = Path(folder)
        (work / "recipe.yaml").write_text(RECIPE)
        _cut(args, work / "ids.npy")
        ours: list[dict[str, float]] = []
        peer: list[dict[str, float]] = []
        for _ in range(args.rounds):
            ours.append(_ours(args, work))
            _say(f"quantkit: {ours[-1]['wall']:.0f} s")
            if args.peer_python:
                peer.append(_peer(args, work))
                _say(f"peer: {peer[-1]['wall']:.0f} s")
    result = {"machine": measure.machine(), "samples": args.samples, "quantkit": _median(ours)}
    if peer:
        result["peer"] = _median(peer)
        result["ratio"] = {w: result["quantkit"][w] / result["peer"][w] for w in WORDS}
    print(json.dumps(result, indent=2) if args.json else _table(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer-python", help="python that make_peer_venv.sh made; without it the peer is left out")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    return parser.parse_args()


def _cut(args: argparse.Namespace, file: Path) -> None:
    """The same token ids for both: the start of the text, one sample after another."""
    code = (
        "import sys, numpy as np; from pathlib import Path; from transformers import AutoTokenizer\n"
        "model, text, out, n, length = sys.argv[1:]; n, length = int(n), int(length)\n"
        "ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text(encoding='utf-8')).input_ids[:n * length]\n"
        "np.save(out, np.array(ids, np.int32).reshape(n, length))\n"
    )
    sizes = [str(args.samples), str(args.seq_len)]
    measure.run([sys.executable, "-c", code, str(args.model), str(args.text), str(file), *sizes])


def _ours(args: argparse.Namespace, work: Path) -> dict[str, float]:
    run, out = work / "run", work / "out"
    calibrate = [QUANTKIT, "calibrate", str(args.model), "-r", str(work / "recipe.yaml"), "-o", str(run)]
    calibrate += ["--text", str(work / "ids.npy"), "--samples", str(args.samples), "--seq-len", str(args.seq_len)]
    measure.warm(args.model)
    ran = [
        measure.run([*calibrate, "--group", str(args.group)]),
        measure.run([QUANTKIT, "export", str(run), "-o", str(out)]),
    ]
    for folder in (run, out):
        shutil.rmtree(folder)
    return {
        "wall": sum(r.seconds for r in ran),
        "cpu": sum(r.cpu for r in ran),
        "peak": max(r.peak_rss for r in ran),
    }


def _peer(args: argparse.Namespace, work: Path) -> dict[str, float]:
    out = work / "peer"
    command = [args.peer_python, str(HERE / "peer_gptq.py"), str(args.model), str(out), str(work / "ids.npy")]
    measure.warm(args.model)
    ran = measure.run([*command, str(args.group)])
    shutil.rmtree(out)
    seconds = json.loads(ran.stdout.strip().splitlines()[-1])["seconds"]
    return {"wall": ran.seconds, "cpu": ran.cpu, "peak": ran.peak_rss, "seconds": seconds}


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {word: median(r[word] for r in runs) for word in runs[0]}


def _table(result: dict) -> str:
    lines = [f"{k}: {v}" for k, v in result["machine"].items()]
    for who in ("quantkit", "peer"):
        if who in result:
            row = result[who]
            lines.append(f"{who:9} wall {row['wall']:6.1f} s  cpu {row['cpu']:6.1f} s  peak {row['peak'] / 1e9:.2f} GB")
    if "ratio" in result:
        lines.append("ratio     " + "  ".join(f"{w} {r:.2f}" for w, r in result["ratio"].items()))
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
