#!/usr/bin/env bash
# Produce, verify, evaluate and publish a checkpoint: the steps of .github/workflows/quantize.yml, for any CI system.
#
#   MODEL   folder, or a Hub id (org/name[@revision])           RECIPE  a shipped recipe or a .yaml file
#   OUT     folder to write (default: checkpoint)               REPORTS folder of the reports (default: reports)
#   REPO    org/name to publish to; empty: nothing is published  REVISION  branch; empty: main
#   GATES   such as "kl=0.05 top1=0.9"; empty: scores without a gate. EVALUATE=0 leaves the evaluation out
#   TEXT    text to evaluate on (default: the one that ships)   SAMPLES, SEQ_LEN  how much of it
#   OPTIONS more options of `quantkit quantize`, such as "--group 64 --jobs 4"
#
# Exit status of the step that failed: 1 a check or a gate, 2 bad input; nothing is published then.
# REPORTS gets quantize.json, verify.json, junit.xml, evaluation.json. HF_TOKEN is for the Hub's client.
set -euo pipefail

: "${MODEL:?a checkpoint folder or a Hub id}" "${RECIPE:?a recipe}"
OUT=${OUT:-checkpoint}
REPORTS=${REPORTS:-reports}
mkdir -p "$REPORTS"
read -ra options <<< "${OPTIONS:-}"
read -ra gates <<< "${GATES:-}"

step() { echo "== $*" >&2; }

step "quantize $MODEL with $RECIPE"
quantkit quantize "$MODEL" -r "$RECIPE" -o "$OUT" --no-verify --json "${options[@]}" > "$REPORTS/quantize.json"

step "verify $OUT"
run=()
if [ -d "$OUT.run" ]; then run=(--run "$OUT.run"); fi
quantkit verify "$OUT" --source "$MODEL" "${run[@]}" --manifest --junit "$REPORTS/junit.xml" --json \
  > "$REPORTS/verify.json"

if [ "${EVALUATE:-1}" != 0 ]; then
  step "evaluate $OUT"
  arguments=()
  for gate in "${gates[@]}"; do arguments+=(--gate "$gate"); done
  if [ -n "${TEXT:-}" ]; then arguments+=(--text "$TEXT"); fi
  if [ -n "${SAMPLES:-}" ]; then arguments+=(--samples "$SAMPLES"); fi
  if [ -n "${SEQ_LEN:-}" ]; then arguments+=(--seq-len "$SEQ_LEN"); fi
  quantkit evaluate "$OUT" --source "$MODEL" "${arguments[@]}" --json > "$REPORTS/evaluation.json"
  quantkit card "$OUT" --evaluation "$REPORTS/evaluation.json"
  quantkit verify "$OUT" --manifest
elif [ "${#gates[@]}" -gt 0 ]; then
  echo "error: GATES without an evaluation" >&2
  exit 2
fi

if [ -n "${REPO:-}" ]; then
  step "publish $REPO"
  quantkit push "$OUT" "$REPO" ${REVISION:+--revision "$REVISION"}
fi
