"""One timed run of llm-compressor's `model_free_ptq`, in the peer's own environment (make_peer_venv.sh).

usage: python peer.py TINY SOURCE OUT SCHEME [--fp8-source] [--workers N]

TINY is a small checkpoint of the same kind that is converted first, so that lazy imports and first-call work are not
timed. Prints one line of JSON: the seconds of the call on SOURCE, and of the imports.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

BLOCK_SOURCE = r"re:.*\.mlp\.experts\..*"


def main() -> None:
    """Convert TINY, then SOURCE, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tiny", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("scheme")
    parser.add_argument("--fp8-source", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()

    start = time.perf_counter()
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from llmcompressor import model_free_ptq

    imported = time.perf_counter() - start

    def convert(source: Path, out: Path) -> float:
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        model_free_ptq(
            str(source),
            str(out),
            scheme=args.scheme,
            max_workers=args.workers,
            device="cpu",
            converter=FP8BlockDequantizer(targets=[BLOCK_SOURCE]) if args.fp8_source else None,
        )
        return time.perf_counter() - start

    convert(args.tiny, args.out)
    seconds = convert(args.source, args.out)
    size = sum(f.stat().st_size for f in args.out.glob("*.safetensors"))
    print(json.dumps({"seconds": seconds, "bytes_out": size, "import_seconds": imported}))


if __name__ == "__main__":
    main()
