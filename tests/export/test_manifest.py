"""The manifest: hashes by hashlib, faults of every kind found, the same bytes whatever the threads; JUnit by its parser."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from families import FAMILIES
from quantkit.export.checkpoint import open_checkpoint
from quantkit.quantize.cli.main import app, run_app
from quantkit.quantize.manifest import hub_origin
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run


def written(source: Path, out: Path, jobs: int) -> Path:
    recipe = load_recipe("fp8-channel")
    small = recipe.model_copy(update={"outputs": (recipe.output.model_copy(update={"shard_size": 400_000}),)})
    run(make_plan(small, open_checkpoint(source)), out, jobs=jobs, memory=1 << 20)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FAMILIES["llama"](tmp_path_factory.mktemp("source") / "m")
    (folder / "docs").mkdir()
    (folder / "docs" / "note.txt").write_text("a side file")
    return folder


@pytest.fixture(scope="module")
def good(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(source, tmp_path_factory.mktemp("good") / "o", jobs=2)


def verify(*words: object) -> int:
    return run_app(lambda: app(["verify", *(str(w) for w in words)]))


def test_every_file_is_listed_with_its_hash(good: Path, source: Path, tmp_path: Path) -> None:
    manifest = json.loads((good / "quantkit.json").read_text())
    files = {p.relative_to(good).as_posix(): p.read_bytes() for p in good.rglob("*") if p.is_file()}
    del files["quantkit.json"]
    assert "docs/note.txt" in files
    assert manifest["files"] == {
        n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in sorted(files.items())
    }
    (shard,) = manifest["source"]["files"].values()
    data = (source / "model.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert shard == {"size": len(data), "header_sha256": hashlib.sha256(header).hexdigest()}
    assert manifest["recipe"]["weights"][0]["scheme"] == "fp8-channel"
    assert str(source) not in (good / "quantkit.json").read_text()
    assert (good / "quantkit.json").read_bytes() == (written(source, tmp_path / "o", 1) / "quantkit.json").read_bytes()
    assert verify(good, "--manifest") == 0


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of a shard": (lambda f: flip(min(f.glob("*.safetensors"))), "model-00001-of-00004.safetensors: its SHA-256"),
    "a side file grown": (lambda f: (f / "docs" / "note.txt").write_text("a longer side file"), "docs/note.txt: 18 bytes"),
    "a file too many": (lambda f: (f / "notes.txt").write_text("x"), "notes.txt: a file that the manifest does not list"),
    "a file gone": (lambda f: (f / "docs" / "note.txt").unlink(), "docs/note.txt: missing"),
    "a shard gone": (lambda f: max(f.glob("*.safetensors")).unlink(), "model-00004-of-00004.safetensors: missing"),
    "no manifest": (lambda f: (f / "quantkit.json").unlink(), "quantkit.json is missing"),
    "a manifest of old": (lambda f: (f / "quantkit.json").write_text("{}"), "quantkit.json lists no files"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_fails(good: Path, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = DAMAGE[case]
    shutil.copytree(good, tmp_path / "o")
    assert len(list(good.glob("*.safetensors"))) == 4
    damage(tmp_path / "o")
    assert verify(tmp_path / "o", "--manifest", "--junit", tmp_path / "junit.xml") == 1
    assert message in capsys.readouterr().err
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    faults = [f.text or "" for f in suite.iter("failure")]
    assert any(message in f for f in faults)
    assert int(suite.attrib["failures"]) == len(faults)
    assert int(suite.attrib["tests"]) == len(list(suite.iter("testcase"))) >= len(faults)


def test_junit_of_odd_names(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "o")
    (tmp_path / "o" / "a\x01<&\x1b.txt").write_text("x")
    assert verify(tmp_path / "o", "--manifest", "--junit", tmp_path / "junit.xml") == 1
    assert "a?<&?.txt" in "".join(ElementTree.parse(tmp_path / "junit.xml").getroot().itertext())
    assert verify(good, "--junit", tmp_path / "no" / "junit.xml") == 2


def test_hidden_files_are_not_part_of_it(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "o")
    (tmp_path / "o" / ".quantkit-push.json").write_text("{}")
    assert verify(tmp_path / "o", "--manifest") == 0


def test_repository_and_revision_of_the_source(source: Path, tmp_path: Path) -> None:
    commit, blob = "c" * 40, "b" * 64
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    shutil.copytree(source, snapshot)
    (tmp_path / "models--org--tiny" / "blobs").mkdir()
    shard = snapshot / "model.safetensors"
    shard.rename(tmp_path / "models--org--tiny" / "blobs" / blob)
    shard.symlink_to(tmp_path / "models--org--tiny" / "blobs" / blob)
    facts = json.loads((written(snapshot, tmp_path / "o", 2) / "quantkit.json").read_text())["source"]
    assert (facts["repo"], facts["revision"], facts["name"]) == ("org/tiny", commit, "tiny")
    assert facts["files"]["model.safetensors"]["sha256"] == blob
    note = tmp_path / "local" / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{commit}\netag\n1.0\n")
    assert hub_origin(tmp_path / "local") == (None, commit)
    assert hub_origin(source) == (None, None)
