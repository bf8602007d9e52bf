#!/usr/bin/env bash
# make_peer_venv.sh DIR [PYTHON]: a virtual environment DIR with the peer that tests/bench/stream.py measures beside
# quantkit, llm-compressor 0.14. It pins other releases (compressed-tensors 0.19), so it gets an environment of its own.
set -euo pipefail

dir=${1:?usage: make_peer_venv.sh DIR [PYTHON]}
python=${2:-python3}

"$python" -m venv "$dir"
"$dir/bin/pip" install --quiet "torch==2.13.0" "llmcompressor==0.14.0.1" "compressed-tensors==0.19.0" "transformers==5.17.0"
"$dir/bin/python" -c "from llmcompressor import model_free_ptq"
