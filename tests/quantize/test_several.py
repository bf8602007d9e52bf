"""Several outputs from one pass: the bytes of single runs, the source read once, kills, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calibration_runs import files_of
from families import FAMILIES, tiny
from integration.checkpoints import quantise
from killed import KilledError, killed_after
from quantkit.export import checkpoint as checkpoint_module
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.several import plans_of
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run, run_all
from quantkit.quantize.verification import verify_checkpoint

REST = '{match: {role: "*"}, keep: true}'
LINEAR = "[attention, dense_mlp]"
POOLS = f"""outputs:
  - name: decode
    format: gptq
    weights: [{{match: {{role: {LINEAR}}}, scheme: int4-g32}}, {REST}]
  - name: prefill
    weights: [{{match: {{role: {LINEAR}}}, scheme: fp8-tensor}}, {REST}]
"""


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "pools.yaml"
    file.write_text(text)
    return str(file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("m") / "llama", "llama", shards=2)


def pools(source: Path, tmp_path: Path, out: Path, **more: Any) -> Path:
    plans = plans_of(str(source), written(tmp_path, POOLS), None, None, ())
    run_all([(plan, out / name) for name, plan in plans.items()], jobs=2, memory=1 << 26, **more)
    return out


def test_each_output_has_the_bytes_of_a_run_of_its_own(llama: Path, tmp_path: Path) -> None:
    out = pools(llama, tmp_path, tmp_path / "o")
    assert sorted(p.name for p in out.iterdir()) == ["decode", "prefill"]
    for recipe, name in zip(load_recipe(str(tmp_path / "pools.yaml")).split(), ("decode", "prefill"), strict=True):
        run(make_plan(recipe, open_checkpoint(llama)), tmp_path / name, jobs=1, memory=1 << 20)
        assert files_of(out / name) == files_of(tmp_path / name)
        assert verify_checkpoint(out / name, open_checkpoint(llama)).passed


def test_the_source_is_read_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(llama)
    read: list[int] = []
    real = checkpoint_module.read_all

    def counted(fd: int, into: memoryview, at: int) -> None:
        read.append(len(into))
        real(fd, into, at)

    monkeypatch.setattr(checkpoint_module, "read_all", counted)
    pools(llama, tmp_path, tmp_path / "o")
    both = sum(read)
    assert 0 < both <= source.nbytes
    read.clear()
    for name, recipe in zip("ab", load_recipe(str(tmp_path / "pools.yaml")).split(), strict=True):
        run(make_plan(recipe, source), tmp_path / name, jobs=1, memory=1 << 26)
    assert sum(read) == 2 * both


def test_killed_anywhere_and_run_again_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    expected = files_of(pools(llama, tmp_path, tmp_path / "whole"))
    for stop in (1, 9, 30):
        out = tmp_path / f"killed-{stop}"
        with pytest.raises(KilledError):
            pools(llama, tmp_path, out, report=killed_after(stop))
        assert not any((out / name).exists() for name in ("decode", "prefill"))
        assert files_of(pools(llama, tmp_path, out)) == expected
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*")}
    pools(llama, tmp_path, tmp_path / "whole")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*")}, "a finished one is left alone"


def test_the_shipped_recipe_for_two_pools(tmp_path: Path) -> None:
    source = FAMILIES["glm_moe_dsa"](tmp_path / "m")
    out = quantise(source, tmp_path / "o", "-r", "models/glm-5.2-prefill-decode", "--tp", "1")
    methods = {
        n: json.loads((out / n / "config.json").read_text())["quantization_config"] for n in ("decode", "prefill")
    }
    assert {n: m["quant_method"] for n, m in methods.items()} == {"decode": "compressed-tensors", "prefill": "fp8"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (POOLS.replace("name: prefill", "name: decode"), "names of their own"),
        (POOLS.replace("name: prefill", "name: ../up"), "pattern"),
        (POOLS.replace(f", {REST}]\n  - name", "]\n  - name"), "the last rule"),
        (POOLS + "kv_cache: {}\n", "without calibration"),
    ],
)
def test_recipes_that_cannot_be(text: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=match):
        load_recipe(written(tmp_path, text))


def test_a_format_for_all_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="for one output"):
        plans_of(str(llama), written(tmp_path, POOLS), "awq", None, ())
