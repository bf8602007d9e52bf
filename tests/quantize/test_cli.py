"""The command line as a user meets it: what it prints where, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import FAMILIES
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.commands import parse_bytes
from quantkit.quantize.journal import work_folder


def quantkit(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantkit.quantize.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama") / "m")


def test_help_names_every_command() -> None:
    done = quantkit("--help")
    assert done.returncode == 0
    for command in ("plan", "export", "quantize", "verify", "inspect", "recipes"):
        assert command in done.stdout


def test_recipes_lists_and_prints() -> None:
    assert "int4-experts" in quantkit("recipes").stdout
    assert quantkit("recipes", "int4").stdout.startswith("# INT4 g128")
    assert quantkit("recipes", "int5").returncode == 2


def test_plan_for_people_and_for_machines(llama: Path) -> None:
    text = quantkit("plan", llama, "-r", "int4")
    assert text.returncode == 0
    assert text.stdout == "", "data only on stdout"
    for word in ("attention.q", "int4-g128 search", "bits per weight", "GB", "of memory at most", "loads: 1"):
        assert word in text.stderr
    done = quantkit("plan", llama, "-r", "int4", "--json")
    facts = json.loads(done.stdout)
    assert {
        "bytes_in",
        "bytes_out",
        "tensors_in",
        "tensors_out",
        "bits_per_weight",
        "memory_bytes",
        "tp",
        "steps",
    } <= set(facts)
    assert facts["tp"]["1"] == "loads"


def test_quantize_writes_and_verifies(llama: Path, tmp_path: Path) -> None:
    done = quantkit("quantize", llama, "-r", "int4", "-o", tmp_path / "o", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verify"]["passed"]
    assert result["bytes_out"] < result["bytes_in"]
    assert "verified" in done.stderr
    again = quantkit("quantize", llama, "-r", "int4", "-o", tmp_path / "o", "--no-verify")
    assert again.returncode == 0
    assert "finished already" in again.stderr
    facts = json.loads(quantkit("inspect", tmp_path / "o", "--json").stdout)
    assert {row["stored"] for row in facts["stored"]} == {"BF16", "int4-g128"}
    assert "int4-g128" in quantkit("inspect", tmp_path / "o").stderr


def test_verify_fails_with_status_1(llama: Path, tmp_path: Path) -> None:
    assert quantkit("export", llama, "-r", "fp8-channel", "-o", tmp_path / "o").returncode == 0
    file = tmp_path / "o" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x55
    file.write_bytes(data)
    done = quantkit("verify", tmp_path / "o", "--source", llama, "--json")
    assert done.returncode == 1
    assert "FAIL" in done.stderr
    assert not json.loads(done.stdout)["passed"]


BAD = [
    (("plan", "{llama}", "-r", "int4", "--group", "48"), "unknown group"),
    (("plan", "{llama}", "-r", "nvfp4", "--group", "64"), "no INT4 rule"),
    (("plan", "{llama}", "-r", "no-such"), "no such recipe"),
    (("plan", "{llama}", "-r", "int4-experts"), "matches nothing"),
    (("plan", "{llama}", "-r", "int4", "--format", "gguf"), "unknown format"),
    (("plan", "{llama}", "-r", "int4", "--tp", "3"), "will not load: 3"),
    (("plan", "{llama}", "-r", "int4", "--tp", "0"), "must be 1 or more"),
    (("plan", "{llama}", "-r", "int4", "--memory", "lots"), "not a memory size"),
    (("plan", "{llama}", "-r", "fp8-block"), "not a multiple of the block 128"),
    (("plan", "/no/such/folder", "-r", "int4"), "no such folder"),
    (("quantize", "{llama}", "-r", "int4", "-o", "{llama}"), "holds other files"),
    (("verify", "/no/such/folder"), "no such folder"),
    (("inspect", "{llama}/config.json"), "name the checkpoint's folder"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_bad_input_is_status_2_without_a_traceback(llama: Path, args: tuple[str, ...], message: str) -> None:
    done = quantkit(*(a.format(llama=llama) for a in args))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_missing_option_is_status_2() -> None:
    assert quantkit("plan").returncode == 2


def test_interrupted_run_says_how_to_go_on(llama: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "quantkit.quantize.cli.main",
        "export",
        str(llama),
        "-r",
        "nvfp4",
        "-o",
        str(tmp_path / "o"),
    ]
    for _ in range(20):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not work_folder(tmp_path / "o").exists() and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        _, text = child.communicate()
        if child.returncode == 130:
            assert "run the same command again" in text
            assert not (tmp_path / "o").exists()
            break
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "o" / "quantkit.json").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("512MB", 512_000_000), ("4GiB", 4 << 30), ("1g", 10**9), ("64MiB", 64 << 20), ("1e9", 10**9)]
)
def test_memory_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "12XB", "1.2.3GB", "1MB", "-4GB"])
def test_bad_memory_sizes(text: str) -> None:
    with pytest.raises(QuantkitError, match="not a memory size"):
        parse_bytes(text)
