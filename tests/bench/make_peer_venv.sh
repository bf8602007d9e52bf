#!/usr/bin/env bash
# Makes the virtual environment of the peer that tests/bench/stream.py measures beside quantkit: llm-compressor 0.14.
# It gets an environment of its own because it pins other releases (compressed-tensors 0.19, transformers < 5.15).
# usage: tests/bench/make_peer_venv.sh [FOLDER]      (default: .venv-peer in the repository)
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.venv-peer}
python=${PYTHON:-python3}

"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet "torch==2.13.0" "llmcompressor==0.14.0.1"
"$venv/bin/python" -c 'from importlib.metadata import version as v; print("peer:", *(f"{n} {v(n)}" for n in ("llmcompressor", "compressed-tensors", "transformers", "torch")))'
