"""The README is run: every `quantkit` command in it, on the real model, and the file tree is the tree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from integration.checkpoints import cache_folder
from smollm2 import smollm2

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (quantkit .+)$", README, re.MULTILINE)
TREE = re.search(r"## Where things are\n.*?```text\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the model under the name that the README uses."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "smollm2").symlink_to(smollm2(cache_folder() / "smollm2-135m-instruct"))
    return folder


def test_the_readme_shows_every_command() -> None:
    assert len(COMMANDS) >= 6
    shown = {"plan", "quantize", "verify", "inspect", "recipes", "export", "calibrate", "evaluate", "bench"}
    assert {c.split()[1] for c in COMMANDS} == shown


def test_commands_of_the_readme_run_in_their_order(room: Path) -> None:
    for command in COMMANDS:
        words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, "-m", "quantkit.quantize.cli.main", *words[1:]],
            cwd=room,
            capture_output=True,
            text=True,
            check=False,
        )
        refused = f"$ {command}\nerror:" in README
        assert done.returncode == (2 if refused else 0), f"{command}\n{done.stderr}"


def test_numbers_printed_in_the_readme_are_printed_by_the_commands(room: Path) -> None:
    """Lines of a plan hold sizes only, so they are the same on every machine."""
    (block,) = re.findall(r"\$ (quantkit plan smollm2 -r int4 --group 64)\n(.*?)```", README, re.DOTALL)
    words = shlex.split(block[0])
    done = subprocess.run(
        [sys.executable, "-m", "quantkit.quantize.cli.main", *words[1:]],
        cwd=room,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == block[1].split()


def test_the_file_tree_is_the_tree() -> None:
    assert TREE is not None
    named = set()
    folder = ""
    for line in TREE[1].splitlines():
        entry = line.split("  ")[0] if not line.startswith(" ") else line.strip().split("  ")[0]
        for name in entry.split():
            if not line.startswith(" "):
                folder = name if name.endswith("/") else ""
                named.add(name.rstrip("/"))
            else:
                named.add((folder + name).rstrip("/"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in listed:
        if (
            path.startswith(("kernels/", "calibrate/", "export/", "quantize/"))
            and path.endswith(".py")
            and not path.endswith("__init__.py")
        ):
            assert path in named, f"{path} is not in the README's tree"
    for name in named:
        assert (ROOT / name).exists(), f"the README's tree names {name}, which does not exist"
