"""`quantkit calibrate` and `evaluate` as a user runs them: what they print, and what bad input gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES

RECIPE = """
weights:
  - {match: {role: [attention, dense_mlp]}, scheme: int4-g32, method: {name: gptq, damp: 0.02}}
  - {match: {role: "*"}, keep: true}
kv_cache: {}
calibration: {samples: 40, seq_len: 128}
"""


def quantkit(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantkit.quantize.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    FAMILIES["llama"](folder / "model")
    (folder / "r.yaml").write_text(RECIPE)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 100, (64, 128)).astype(np.int32))
    return folder


def test_calibrate_export_and_evaluate(room: Path) -> None:
    made = quantkit(
        "calibrate", room / "model", "-r", room / "r.yaml", "-o", room / "run", "--text", room / "ids.npy", "--json"
    )
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    assert facts["text"]["samples"] == [40, 128] and len(facts["kv_scales"]) == 2
    assert "layers calibrated" in made.stderr and "k_scale" in made.stderr
    again = quantkit("calibrate", room / "model", "-r", room / "r.yaml", "-o", room / "run", "--text", room / "ids.npy")
    assert again.returncode == 0, again.stderr
    written = quantkit("export", room / "run", "-o", room / "out", "--engine", "sglang")
    assert written.returncode == 0, written.stderr
    words = (
        "evaluate",
        room / "out",
        "--source",
        room / "model",
        "--text",
        room / "ids.npy",
        "--seq-len",
        128,
        "--samples",
        4,
    )
    scores = quantkit(*words, "--kv", "--gate", "kl=10", "--gate", "kv_error=0.01", "--gate", "kv_clipped=0", "--json")
    assert scores.returncode == 0, scores.stderr
    found = json.loads(scores.stdout)
    layers = found["kv_layers"]
    assert [x["layer"] for x in layers] == [0, 1] and all(x["k_scale"] != 1 for x in layers)
    assert found["kv_error"] == pytest.approx(sum(x["error"] for x in layers) / 2) and found["kv_error"] > 0
    assert found["kv_clipped"] == 0 and "worst layers" in scores.stderr and "in the mean of 2 layers" in scores.stderr
    assert found["tokens"] == 4 * 127 and 0 < found["kl"] < 1 and found["gates"][0]["passed"]
    missed = quantkit(*words, "--gate", "top1=1.1")
    assert missed.returncode == 1 and "FAIL top1" in missed.stderr
    assert "activations" not in missed.stderr and "worst layers" not in missed.stderr


def test_evaluate_says_what_became_of_activations(room: Path) -> None:
    assert quantkit("export", room / "model", "-r", "fp8-channel", "-o", room / "fp8").returncode == 0
    words = (
        "evaluate",
        room / "fp8",
        "--source",
        room / "model",
        "--text",
        room / "ids.npy",
        "--samples",
        2,
        "--seq-len",
        128,
    )
    found = []
    for more, said in (
        ((), "activations as served: FP8 by token in 14 layers"),
        (("--weights-only",), "left out, only weights"),
    ):
        ran = quantkit(*words, *more, "--json")
        assert ran.returncode == 0 and said in ran.stderr, ran.stderr
        found.append(json.loads(ran.stdout))
    assert [f["weights_only"] for f in found] == [False, True] and found[0]["activations"] == {"FP8 by token": 14}
    assert found[0]["kl"] > found[1]["kl"] > 0 and found[0]["kv_layers"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "model", "-r", "r.yaml", "-o", "x", "--text", "none.txt"], "no such file"),
        (
            ["calibrate", "model", "-r", "r.yaml", "-o", "x", "--text", "ids.npy", "--dataset", "d"],
            "two sources of text",
        ),
        (["calibrate", "model", "-r", "r.yaml", "-o", "x"], "tokenizer"),
        (
            ["calibrate", "model", "-r", "r.yaml", "-o", "x", "--text", "ids.npy", "--samples", "65"],
            "too few sequences",
        ),
        (["calibrate", "model", "-r", "int4", "-o", "x", "--group", "32", "--text", "ids.npy"], "needs no calibration"),
        (["export", "model", "-o", "y"], "a recipe is needed"),
        (["export", "model", "-r", "r.yaml", "-o", "y"], "needs a calibration run"),
        (["evaluate", "model", "--source", "model", "--text", "ids.npy", "--gate", "bleu=1"], "not a gate"),
        (["evaluate", "model", "--source", "model", "--text", "ids.npy", "--gate", "kv_error=1"], "need --kv"),
        (["evaluate", "model", "--source", "model", "--text", "ids.npy", "--memory", "1"], "not a memory size"),
    ],
)
def test_bad_input_is_exit_2_without_a_traceback(room: Path, words: list[str], message: str) -> None:
    given = [str(room / w) if (room / w).exists() or w in ("x", "y", "none.txt") else w for w in words]
    if "calibrate" in given and "int4" not in given and "ids.npy" in words:
        given += [] if "--samples" in given else ["--samples", "40"]
    done = quantkit(*given)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_run_has_its_recipe(room: Path) -> None:
    (room / "unfinished").mkdir()
    (room / "unfinished" / "run.json").write_text(json.dumps({"source": str(room / "model"), "recipe": {}}))
    done = quantkit("export", room / "unfinished", "-o", room / "z", "-r", "int4")
    assert done.returncode == 2 and "has its recipe" in done.stderr
    done = quantkit("export", room / "unfinished", "-o", room / "z")
    assert done.returncode == 2 and "not finished" in done.stderr
