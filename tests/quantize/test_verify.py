"""The verifier finds what is wrong: each kind of damage to a good checkpoint fails the check that is meant for it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, load_tensors, save_tensors
from quantkit.export.checkpoint import Checkpoint, open_checkpoint
from quantkit.export.safetensors_file import TensorInfo
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.verification import Report, verify_checkpoint

LAYER = "model.layers.1.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("source") / "m")


@pytest.fixture(scope="module")
def outputs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("outputs")
    made = {}
    for name, recipe, form in (
        ("int4", "int4", "compressed-tensors"),
        ("nvfp4", "nvfp4", "compressed-tensors"),
        ("modelopt", "nvfp4", "modelopt"),
        ("fp8", "fp8-channel", "compressed-tensors"),
    ):
        made[name] = root / name
        run(
            make_plan(load_recipe(recipe), open_checkpoint(source), format_name=form),
            made[name],
            jobs=1,
            memory=1 << 20,
        )
    return made


def tensor(folder: Path, name: str) -> TensorInfo:
    return open_checkpoint(folder).tensors[name]


def poke(folder: Path, name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a tensor in place."""
    info = tensor(folder, name)
    with info.file.open("r+b") as f:
        f.seek(info.start + at)
        f.write(data)


def edit(folder: Path, file: str, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def copied(outputs: dict[str, Path], name: str, tmp_path: Path) -> Path:
    shutil.copytree(outputs[name], tmp_path / "o")
    return tmp_path / "o"


def failed(report: Report) -> list[str]:
    return [f"{c.name} :: {f}" for c in report.checks for f in c.failures]


@pytest.mark.parametrize("name", ["int4", "nvfp4", "modelopt", "fp8"])
def test_a_good_checkpoint_passes(outputs: dict[str, Path], source: Path, name: str) -> None:
    report = verify_checkpoint(outputs[name], open_checkpoint(source), jobs=2)
    assert failed(report) == []
    assert len(report.layers) == 14
    assert len(report.worst) == 10
    json.loads(json.dumps(report.as_json(), allow_nan=False))


def test_without_the_source_scales_and_names_are_checked(outputs: dict[str, Path]) -> None:
    report = verify_checkpoint(outputs["int4"], None)
    assert report.passed
    assert not report.layers
    assert len(report.checks) == 5


Damage = tuple[str, Callable[[Path], None], str, bool]  # output, what is done, part of the failure, needs the source

DAMAGE: dict[str, Damage] = {
    "one INT4 code": ("int4", lambda f: poke(f, f"{LAYER}.weight_packed", 77, b"\x5a"), "nearest to its weight", True),
    "one FP4 code": ("nvfp4", lambda f: poke(f, f"{LAYER}.weight_packed", 77, b"\x77"), "nearest to its weight", True),
    "one FP8 code": ("fp8", lambda f: poke(f, f"{LAYER}.weight", 77, b"\x7e"), "nearest to its weight", True),
    "a scale that is too large": ("int4", lambda f: poke(f, f"{LAYER}.weight_scale", 0, b"\x80\x3f"), "worse than plain|nearest", True),
    "a zero scale": ("int4", lambda f: poke(f, f"{LAYER}.weight_scale", 0, b"\x00\x00"), "scales are zero", False),
    "a scale that is NaN": ("int4", lambda f: poke(f, f"{LAYER}.weight_scale", 0, b"\xc0\x7f"), "not finite", False),
    "an infinite global": ("nvfp4", lambda f: poke(f, f"{Q}.weight_global_scale", 0, np.float32(np.inf).tobytes()), "not finite", False),
    "a negative FP8 scale": ("fp8", lambda f: poke(f, f"{LAYER}.weight_scale", 0, np.float32(-1).tobytes()), "negative", False),
    "an E4M3 NaN": ("nvfp4", lambda f: poke(f, f"{LAYER}.weight_scale", 0, b"\x7f"), "not finite", False),
    "globals that differ in q/k/v": (
        "nvfp4", lambda f: poke(f, f"{Q}.weight_global_scale", 0, np.float32(1000).tobytes()), "different global scales", False,
    ),
    "multipliers that differ": (
        "modelopt", lambda f: poke(f, f"{Q}.weight_scale_2", 0, np.float32(1e-3).tobytes()), "different global scales", False,
    ),
    "a kept tensor": ("int4", lambda f: poke(f, "model.norm.weight", 0, b"\x00"), "equal the source", True),
    "a wrong weight_shape": ("int4", lambda f: poke(f, f"{LAYER}.weight_shape", 0, b"\x07"), "the codes have", False),
    "a stray weight file": ("int4", lambda f: shutil.copy(f / "model.safetensors", f / "consolidated.safetensors") and None, "not part", False),
    "a truncated shard": ("int4", lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]) and None, "truncated", False),
    "a layer on the ignore list": (
        "int4", lambda f: edit(f, "config.json", lambda c: c["quantization_config"]["ignore"].append(LAYER)), "on the ignore list", False,
    ),
    "the head missing from the ignore list": (
        "int4", lambda f: edit(f, "config.json", lambda c: c["quantization_config"]["ignore"].clear()), "lm_head: is not quantised, yet not on", False,
    ),
    "another group in the configuration": (
        "int4",
        lambda f: edit(f, "config.json", lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64)),
        "stored as int4-g128, described as 4 bits, group 64", False,
    ),
    "no configuration": ("int4", lambda f: edit(f, "config.json", lambda c: c.pop("quantization_config") and None), "no quantization_config", False),
    "two configurations that disagree": (
        "modelopt", lambda f: edit(f, "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="NVFP4")), "hf_quant_config.json says", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(outputs: dict[str, Path], source: Path, case: str, tmp_path: Path) -> None:
    name, damage, message, needs_source = DAMAGE[case]
    folder = copied(outputs, name, tmp_path)
    damage(folder)
    found = failed(verify_checkpoint(folder, open_checkpoint(source) if needs_source else None))
    assert any(re.search(message, f) for f in found), found


def rewritten(folder: Path, change: Callable[[dict[str, object]], None]) -> Checkpoint:
    tensors = load_tensors(folder)
    change(tensors)  # type: ignore[arg-type]
    save_tensors(folder, tensors)
    return open_checkpoint(folder)


def test_lost_and_added_tensors_are_found(outputs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    folder = copied(outputs, "fp8", tmp_path)
    rewritten(folder, lambda t: t.__delitem__("model.layers.1.input_layernorm.weight"))
    found = failed(verify_checkpoint(folder, open_checkpoint(source)))
    assert any("model.layers.1.input_layernorm.weight: is in the source, nothing of it" in f for f in found)
    assert any("its tensors are not those of the plan" in f for f in found)


def test_missing_companion_is_found(outputs: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(outputs, "fp8", tmp_path)
    rewritten(folder, lambda t: t.__delitem__(f"{LAYER}.weight_scale"))
    (failure,) = failed(verify_checkpoint(folder, None))
    assert f"{LAYER}.weight" in failure
    assert "scale of an FP8 weight is missing" in failure


def test_wrong_total_size_is_found(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe("nvfp4")
    small = recipe.model_copy(update={"outputs": (recipe.output.model_copy(update={"shard_size": 200_000}),)})
    run(make_plan(small, open_checkpoint(source)), tmp_path / "o", jobs=1, memory=1 << 20)
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(source)).passed
    assert len(list((tmp_path / "o").glob("*.safetensors"))) > 2
    edit(tmp_path / "o", "model.safetensors.index.json", lambda c: c["metadata"].update(total_size=1))
    assert any("total_size is 1" in f for f in failed(verify_checkpoint(tmp_path / "o", None)))
