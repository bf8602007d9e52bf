"""Writing a checkpoint: the same bytes for any jobs, budget, kill and resume; and every fault leaves nothing half-written."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from families import FAMILIES, load_tensors
from headers import miniature, write
from quantised import as_fp8_block
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.journal import open_work, work_folder
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe, with_int4_group
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint

MB = 1 << 20
SMALL_GLM = str(Path(__file__).parent / "small_glm.yaml")  # the shipped recipe of GLM-5.2 without its TP sizes


def plan_of(folder: Path, recipe: str, group: str | None = None) -> Plan:
    loaded = load_recipe(recipe)
    return make_plan(with_int4_group(loaded, group) if group else loaded, open_checkpoint(folder))


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of all files of a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM-5.2 in FP8 blocks, with values: partial blocks, MoE, an MTP layer."""
    return write(tmp_path_factory.mktemp("glm"), miniature("GLM-5.2"), "fp8_block128", shard_bytes=MB, seed=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama") / "m")


TAILS = str(Path(__file__).parent / "small_tails.yaml")  # tails of both formats
RECIPES = [(SMALL_GLM, None), ("nvfp4-experts", None), ("keep", None), (TAILS, None)]


@pytest.mark.parametrize(("recipe", "group"), RECIPES, ids=["int4-and-bf16", "nvfp4-experts", "keep", "tails"])
def test_same_bytes_for_any_jobs_and_budget(glm: Path, tmp_path: Path, recipe: str, group: str | None) -> None:
    plan = plan_of(glm, recipe, group)
    found = set()
    for jobs, memory in ((1, 512 * MB), (2, 32 * MB), (5, MB)):
        out = tmp_path / f"{jobs}"
        run(plan, out, jobs=jobs, memory=memory)
        assert verify_checkpoint(out, open_checkpoint(glm)).passed
        found.add(digest(out))
        shutil.rmtree(out)
    assert len(found) == 1


def test_written_size_is_the_planned_size(glm: Path, tmp_path: Path) -> None:
    plan = plan_of(glm, SMALL_GLM)
    run(plan, tmp_path / "o", jobs=2, memory=32 * MB)
    files = sorted((tmp_path / "o").glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) == plan.file_bytes
    assert open_checkpoint(tmp_path / "o").nbytes == plan.bytes_out


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its exit status, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as e:
            sys.stderr.write(f"{e}\n")
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_again_and_again_gives_the_same_bytes(glm: Path, tmp_path: Path) -> None:
    plan = plan_of(glm, SMALL_GLM)
    run(plan, tmp_path / "whole", jobs=2, memory=32 * MB)
    out = tmp_path / "killed"
    chance = random.Random(7)

    def until_killed(steps: int) -> Callable[[], None]:
        left = [steps]

        def report(_: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return lambda: run(plan, out, jobs=2, memory=32 * MB, report=report) and None

    kills = 0
    while (status := in_child(until_killed(chance.randrange(1, len(plan.steps) + 8 * kills)))) != 0:
        assert status == -signal.SIGKILL
        assert not out.exists(), "nothing under the final name"
        kills += 1
    assert kills >= 3
    assert digest(out) == digest(tmp_path / "whole")
    assert not work_folder(out).exists()


def test_killed_at_any_time_from_outside(glm: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantkit.quantize.cli.main", "export", str(glm), "-r", SMALL_GLM, "--jobs", "2"]
    run(plan_of(glm, SMALL_GLM), tmp_path / "whole", jobs=1, memory=64 * MB)
    chance = random.Random(3)
    out = tmp_path / "killed"
    for _ in range(6):
        child = subprocess.Popen([*command, "-o", str(out)], stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 2.0))
        child.kill()
        child.wait()
    subprocess.run([*command, "-o", str(out)], check=True, stderr=subprocess.DEVNULL)
    assert digest(out) == digest(tmp_path / "whole")


def test_journal_spares_finished_work(glm: Path, tmp_path: Path) -> None:
    plan = plan_of(glm, SMALL_GLM)
    work = open_work(tmp_path / "o", plan.identity())
    work.close()
    steps = iter(plan.steps)
    first = next(s for s in steps if s.tasks[0].fate == "keep")
    journal = work_folder(tmp_path / "o") / "journal"
    journal.write_text(journal.read_text() + json.dumps([first.name, {}]) + "\n" + '["torn')
    summary = run(plan, tmp_path / "o", jobs=1, memory=MB)
    assert summary.resumed == 1
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(glm))
    failed = [f for c in report.checks for f in c.failures]
    assert len(failed) == 1, "the step the journal vouched for was not done again, so its bytes are still missing"
    assert failed[0].startswith(first.name)


def test_finished_output_is_left_alone(llama: Path, tmp_path: Path) -> None:
    plan = plan_of(llama, "nvfp4")
    run(plan, tmp_path / "o", jobs=1, memory=MB)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "o").iterdir()}
    summary = run(plan, tmp_path / "o", jobs=1, memory=MB)
    assert summary.resumed == len(plan.steps)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "o").iterdir()}
    with pytest.raises(QuantkitError, match="holds other files"):
        run(plan_of(llama, "fp8-channel"), tmp_path / "o", jobs=1, memory=MB)


def test_folder_with_other_files_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(QuantkitError, match="holds other files") as e:
        run(plan_of(llama, "nvfp4"), tmp_path / "o", jobs=1, memory=MB)
    assert "model.safetensors" in str(e.value)


def test_output_inside_the_source_is_refused(llama: Path) -> None:
    with pytest.raises(QuantkitError, match="inside the source"):
        run(plan_of(llama, "nvfp4"), llama / "out", jobs=1, memory=MB)
    assert not (llama / "out.partial").exists()


def test_two_runs_cannot_share_a_folder(llama: Path, tmp_path: Path) -> None:
    plan = plan_of(llama, "nvfp4")
    work = open_work(tmp_path / "o", plan.identity())
    with pytest.raises(QuantkitError, match="another run is writing"):
        run(plan, tmp_path / "o", jobs=1, memory=MB)
    work.close()
    run(plan, tmp_path / "o", jobs=1, memory=MB)


def test_unfinished_run_of_another_plan(llama: Path, tmp_path: Path) -> None:
    open_work(tmp_path / "o", plan_of(llama, "nvfp4").identity()).close()
    with pytest.raises(QuantkitError, match=r"another plan is here: .*recipe"):
        run(plan_of(llama, "fp8-channel"), tmp_path / "o", jobs=1, memory=MB)


@pytest.mark.parametrize("recipe", ["int4", "nvfp4", "fp8-channel"])
@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0])
def test_weight_that_is_not_finite(llama: Path, tmp_path: Path, recipe: str, value: int) -> None:
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    info = open_checkpoint(folder).tensors["model.layers.1.mlp.up_proj.weight"]
    with info.file.open("r+b") as f:
        f.seek(info.start + (3 * info.shape[1] + 5) * 2)
        f.write(value.to_bytes(2, "little"))
    with pytest.raises(QuantkitError, match="not a finite number") as e:
        run(plan_of(folder, recipe), tmp_path / "o", jobs=2, memory=MB)
    assert "model.layers.1.mlp.up_proj.weight" in str(e.value)
    assert "row 3" in str(e.value)
    assert not (tmp_path / "o").exists()
    with pytest.raises(QuantkitError, match="not a finite number"):
        run(plan_of(folder, recipe), tmp_path / "o", jobs=1, memory=MB)


def test_full_disk_is_said_and_the_run_goes_on_later(glm: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: writes fail in the same place, with EFBIG."""
    plan = plan_of(glm, SMALL_GLM)
    run(plan, tmp_path / "whole", jobs=2, memory=32 * MB)
    out = tmp_path / "o"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
        try:
            run(plan, out, jobs=2, memory=32 * MB)
        except QuantkitError as e:
            os._exit(42 if "no space left" in str(e) and "same command again" in str(e) else 4)

    assert in_child(limited) == 42
    assert not out.exists()
    run(plan, out, jobs=2, memory=32 * MB)
    assert digest(out) == digest(tmp_path / "whole")


def test_too_small_a_disk_is_refused_before_the_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(QuantkitError, match="the disk cannot hold"):
        run(plan_of(llama, "nvfp4"), tmp_path / "o", jobs=1, memory=MB)
    assert not list(work_folder(tmp_path / "o").glob("checkpoint/*"))


def test_side_files_come_along_byte_for_byte(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    side = {"tokenizer.json": b"\x00\xff", "modeling_x.py": b"print(1)\r\n", "sub/chat_template.jinja": b"{{ x }}"}
    for name, content in side.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for unwanted in ("pytorch_model.bin", "old.safetensors.bak", "consolidated.safetensors", "hf_quant_config.json"):
        (folder / unwanted).write_bytes(b"{}")
    run(plan_of(folder, "nvfp4"), tmp_path / "o", jobs=1, memory=MB)
    assert {n: (tmp_path / "o" / n).read_bytes() for n in side} == side
    names = {str(p.relative_to(tmp_path / "o")) for p in (tmp_path / "o").rglob("*") if p.is_file()}
    assert not names & {"pytorch_model.bin", "consolidated.safetensors", "hf_quant_config.json"}


def test_tensor_larger_than_the_budget_passes(tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "m")
    tensors = load_tensors(folder)
    name = next(n for n in tensors if n.endswith("layers.0.mlp.down_proj.weight"))
    assert tensors[name].nbytes > 1024
    run(plan_of(folder, "int4"), tmp_path / "o", jobs=1, memory=1024)
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(folder)).passed


def test_published_fp8_blocks_are_kept_as_they_are(llama: Path, tmp_path: Path) -> None:
    expected = as_fp8_block(llama, tmp_path / "fp8")
    run(plan_of(tmp_path / "fp8", "keep"), tmp_path / "o", jobs=1, memory=MB)
    before, after = open_checkpoint(tmp_path / "fp8"), open_checkpoint(tmp_path / "o")
    assert set(before.tensors) == set(after.tensors)
    assert before.config == after.config
    assert expected
    assert verify_checkpoint(tmp_path / "o", before).passed
