"""recipes/ci/quantize.sh from start to end on a tiny model, published to a Hub in memory; the workflow runs that script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from families import FAMILIES
from hub_server import TOKEN, running_hub
from huggingface_hub import ModelCard

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "ci" / "quantize.sh"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ci")
    FAMILIES["llama"](folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 384, 600))
    (folder / "bin").mkdir()
    command = folder / "bin" / "quantkit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quantkit.quantize.cli.main "$@"\n')
    command.chmod(0o755)
    return folder


def job(room: Path, out: str, **given: str) -> subprocess.CompletedProcess[str]:
    path = f"{room / 'bin'}:{os.environ['PATH']}"
    fixed = {"MODEL": "model", "RECIPE": "fp8-channel", "OUT": out, "REPORTS": f"{out}-reports", "OPTIONS": "--jobs 1"}
    env = {**os.environ, **fixed, "TEXT": "ids.npy", "SAMPLES": "2", "SEQ_LEN": "64", "PATH": path, **given}
    return subprocess.run(["bash", SCRIPT], cwd=room, env=env, capture_output=True, text=True, check=False)


def test_from_the_recipe_to_the_hub(room: Path) -> None:
    with running_hub() as hub:
        done = job(
            room, "out", GATES="kl=1 top1=0.1", REPO="org/tiny-fp8", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stderr + done.stdout
        held = hub.repos["org/tiny-fp8"].files()
    assert held == {
        p.relative_to(room / "out").as_posix(): p.read_bytes()
        for p in (room / "out").rglob("*")
        if p.is_file() and not p.name.startswith(".")
    }
    reports = room / "out-reports"
    assert json.loads((reports / "verify.json").read_text())["passed"]
    suite = ElementTree.parse(reports / "junit.xml").getroot().find("testsuite")
    assert suite is not None and suite.attrib["failures"] == "0" and int(suite.attrib["tests"]) > 5
    scores = json.loads((reports / "evaluation.json").read_text())
    assert scores["tokens"] == 2 * 63
    assert f"{scores['kl']:.5f}" in ModelCard.load(room / "out" / "README.md").text


def test_a_missed_gate_publishes_nothing(room: Path) -> None:
    with running_hub() as hub:
        done = job(room, "gated", GATES="top1=1.1", REPO="org/gated", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert done.returncode == 1, done.stderr
        assert "FAIL top1" in done.stderr
        assert not hub.repos


def test_bad_input_is_exit_2(room: Path) -> None:
    done = job(room, "never", RECIPE="no-such-recipe")
    assert done.returncode == 2
    assert "no such recipe" in done.stderr
    assert not (room / "never").exists()


def test_the_workflow_passes_its_inputs_to_the_script() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "quantize.yml").read_text())
    triggers = flow[True]  # YAML 1.1 reads the key `on` as true
    inputs = triggers["workflow_call"]["inputs"]
    assert inputs == triggers["workflow_dispatch"]["inputs"]
    assert {"model", "recipe", "repo", "gates"} <= set(inputs)
    (work,) = (s for s in flow["jobs"]["quantize"]["steps"] if "env" in s)
    script = SCRIPT.read_text()
    for name, value in work["env"].items():
        found = re.fullmatch(r"\$\{\{ (inputs|secrets)\.(\w+) \}\}", value)
        assert found and (found[1] == "secrets" or found[2] in inputs), value
        assert re.search(rf"\b{name}\b", script), f"the script does not use {name}"
    assert "${{" not in work["run"], "inputs reach the shell as variables only"
    assert {n for n in inputs if n != "runner"} == {v[11:-3] for n, v in work["env"].items() if n != "HF_TOKEN"}
