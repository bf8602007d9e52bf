"""A calibration run that includes the MTP layer: codes, scales of its cache, kills, exports, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibration_runs import files_of, samples
from families import FAMILIES, Tensors, deepseek_with_mtp, load_tensors, save_tensors
from killed import KilledError, killed_after
from mtp_reference import run_mtp
from oracle.dequantize import dequantize
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.calibration import Settings
from quantkit.quantize.calibration_run import calibrate_into
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.run_source import open_run, plan_of_run
from quantkit.quantize.verification import verify_checkpoint

SETTINGS = Settings(memory=1 << 28)
ROLES = "[mtp.attention, mtp.shared_experts, mtp.routed_experts]"
RECIPE = """
weights:
  - {{match: {{role: {roles}, except: [mtp.attention.kv_b]}}, scheme: int4-g32{method}}}
  - {{match: {{role: "*"}}, keep: true}}
{more}
"""
MAKERS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v3": deepseek_with_mtp, "glm4_moe": FAMILIES["glm4_moe"], "glm_moe_dsa": FAMILIES["glm_moe_dsa"],
}  # fmt: skip


def plan_for(source: Path, roles: str = ROLES, method: str = ", method: gptq", more: str = "kv_cache: {}") -> Plan:
    file = source.parent / "recipe.yaml"
    file.write_text(RECIPE.format(roles=roles, method=method, more=more))
    return make_plan(load_recipe(str(file)), open_checkpoint(source))


def served(folder: Path) -> Tensors:
    """The weights of a checkpoint, decoded."""
    return {n: t for n, t in dequantize(folder).items() if not n.endswith(("k_scale", "v_scale"))}


def layers_of(source: Path) -> int:
    return int(json.loads((source / "config.json").read_text())["num_hidden_layers"])


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """(source, its finished run, how often the run told of its progress)."""
    folder = tmp_path_factory.mktemp(request.param)
    source = MAKERS[request.param](folder / "source")
    calls: list[int] = []
    calibrate_into(folder / "run", plan_for(source), samples(), SETTINGS, advance=calls.append)
    return source, folder / "run", len(calls)


def test_every_layer_of_it_loses_less_than_without_data(made: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, folder, _ = made
    result = open_run(folder).result
    inside = f"model.layers.{layers_of(source)}."
    assert result["layers"].keys() == {t.name for t in plan_for(source).tasks if t.fate == "quantize"}
    assert all(n.startswith(inside) for n in result["layers"])
    assert all(f["loss"] <= f["loss_data_free"] * (1 + 1e-6) for f in result["layers"].values())
    run(plan_of_run(open_run(folder), None, "vllm", ()), tmp_path / "o", jobs=2, memory=1 << 20)
    for with_run in (folder, None):
        report = verify_checkpoint(tmp_path / "o", open_checkpoint(source), run=with_run)
        assert report.passed, [c.failures for c in report.checks]
    run(plan_for(source, method="", more=""), tmp_path / "free", jobs=2, memory=1 << 20)
    ids = torch.from_numpy(samples(seed=1, n=8).ids_NL).long()
    exact, error = run_mtp(source, ids).hidden, {}
    for name in ("o", "free"):
        error[name] = float((run_mtp(source, ids, served(tmp_path / name)).hidden - exact).square().sum())
    assert 0 < error["o"] < 0.9 * error["free"]


def test_its_cache_has_a_scale_of_its_own(made: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, folder, _ = made
    opened, last = open_run(folder), layers_of(source)
    assert sorted(opened.scales) == list(range(last)) and list(opened.mtp_scales) == [last]
    if source.parent.name.startswith("glm4_moe"):
        run(plan_of_run(opened, None, "vllm", ()), tmp_path / "o", jobs=1, memory=1 << 20)
        stored = load_tensors(tmp_path / "o")
        cache = run_mtp(source, torch.from_numpy(samples().ids_NL).long(), served(tmp_path / "o")).cache
        for part, x in (("k", cache.keys), ("v", cache.values)):
            assert f"model.layers.0.self_attn.{part}_scale" in stored
            scale = stored[f"model.layers.{last}.self_attn.attn.{part}_scale"]  # the one name vLLM's MTP class takes
            torch.testing.assert_close(scale[0], 1.25 * x.abs().max() / 448, rtol=1e-4, atol=0)
        for size in (1, 2):
            factors = json.loads((tmp_path / "o" / f"kv_cache_scales.tp{size}.json").read_text())["kv_cache"]
            assert all(set(f) == {str(i) for i in range(last)} for f in factors["scaling_factor"].values())
            assert len(factors["scaling_factor"]) == size


def test_neither_kills_nor_memory_show(made: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, whole, calls = made
    left = []
    for stop in (calls - 7, 5, 2, 5):  # in the block before it, while its inputs are watched (twice), behind its codes
        with pytest.raises(KilledError):
            calibrate_into(tmp_path / "run", plan_for(source), samples(), SETTINGS, advance=killed_after(stop))
        journal = (tmp_path / "run" / "journal").read_text().splitlines()
        left.append(layers_of(source) + 1 - len(journal))
    assert left == [2, 1, 1, 1]
    calibrate_into(tmp_path / "run", plan_for(source), samples(), replace(SETTINGS, memory=1 << 16))
    assert files_of(tmp_path / "run") == {n: b for n, b in files_of(whole).items() if not n.startswith("kv/")}


def test_its_experts_have_to_pass_the_gate(made: tuple[Path, Path, int]) -> None:
    source, folder, _ = made
    with pytest.raises(QuantkitError, match="12 routed experts saw too few tokens"):
        calibrate_into(folder, plan_for(source), samples(), SETTINGS, min_expert_tokens=1 << 20)


def test_rules_that_leave_it_alone_do_not_run_it(tmp_path: Path) -> None:
    source = deepseek_with_mtp(tmp_path / "source")
    calibrate_into(tmp_path / "run", plan_for(source, "[attention.o]"), samples(), SETTINGS)
    opened = open_run(tmp_path / "run")
    assert sorted(opened.scales) == [0, 1] and not opened.mtp_scales
    assert len((tmp_path / "run" / "journal").read_text().splitlines()) == 2


def test_heads_and_other_layouts_are_refused(tmp_path: Path) -> None:
    source = deepseek_with_mtp(tmp_path / "source")
    with pytest.raises(QuantkitError, match="does not reach") as e:
        calibrate_into(tmp_path / "run", plan_for(source, "[mtp.lm_head]"), samples(), SETTINGS)
    assert "of MTP layers those of deepseek_v3" in str(e.value) and "heads" in str(e.value)
    other = FAMILIES["qwen3_moe"](tmp_path / "qwen")
    tensors = load_tensors(other)
    more = {f"mtp.{n.removeprefix('model.')}": t for n, t in tensors.items() if "layers.0." in n}
    save_tensors(other, tensors | {n: t.clone() for n, t in more.items()})
    with pytest.raises(QuantkitError, match="does not reach") as e:
        calibrate_into(tmp_path / "run2", plan_for(other, "[mtp.attention]"), samples(), SETTINGS)
    assert "glm4_moe" in str(e.value)
