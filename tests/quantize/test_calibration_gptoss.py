"""GPTQ on gpt-oss's fused experts: less is lost than without data, in the model's own outputs, and the export verifies.

The losses are computed anew from what enters the experts of the ordinary transformers model and from the bytes that
were written, decoded by the oracle.

Letters: E experts, T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibration_runs import files_of, samples
from families import FAMILIES, load_tensors
from killed import KilledError, killed_after
from model_weights import reference
from oracle.dequantize import dequantize
from quantised_fp4 import as_gptoss_mxfp4
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
RECIPE = """
weights:
  - {{match: {{role: routed_experts}}, scheme: {scheme}{method}}}
  - {{match: {{role: "*"}}, keep: true}}
outputs: [{{format: {form}}}]
"""


def plan_for(
    source: Path, folder: Path, method: str = ", method: gptq", scheme: str = "mxfp4", form: str = "mxfp4"
) -> Plan:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(method=method, scheme=scheme, form=form))
    return make_plan(load_recipe(str(file)), open_checkpoint(source))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, free (MXFP4 without data), run and gptq (with it)."""
    folder = tmp_path_factory.mktemp("gptoss")
    source = FAMILIES["gpt_oss"](folder / "source")
    run(plan_for(source, folder, ""), folder / "free", jobs=2, memory=1 << 20)
    calibrate_into(folder / "run", plan_for(source, folder), samples(), SETTINGS)
    run(plan_of_run(open_run(folder / "run"), None, "vllm", ()), folder / "gptq", jobs=2, memory=1 << 20)
    return folder


def test_loses_less_than_without_data(made: Path) -> None:
    source, found = load_tensors(made / "source"), {n: dequantize(made / n) for n in ("free", "gptq")}
    inputs = _inputs_of_experts(made / "source")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for e, x_TI in inputs.items():
        w_IO = source[name][e].double()
        loss = {n: float((x_TI @ (w_IO - tensors[name][e].double())).square().sum()) for n, tensors in found.items()}
        assert loss["gptq"] < 0.5 * loss["free"], e
        assert loss["gptq"] > 0
    assert len(inputs) >= 2


def test_the_model_is_nearer_to_its_source(made: Path) -> None:
    ids = torch.from_numpy(samples(seed=1, n=4).ids_NL).long()
    with torch.no_grad():
        exact = reference(made / "source")(ids).logits.double().log_softmax(-1)
        kl = {}
        for name in ("free", "gptq"):
            logits = reference(made / "source", dequantize(made / name))(ids).logits.double()
            kl[name] = float((exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).mean())
    assert 0 < kl["gptq"] < 0.7 * kl["free"]


def test_what_is_written_is_what_is_written_without_data_but_for_the_codes(made: Path) -> None:
    free, gptq = load_tensors(made / "free"), load_tensors(made / "gptq")
    assert {n: (t.shape, t.dtype) for n, t in free.items()} == {n: (t.shape, t.dtype) for n, t in gptq.items()}
    changed = {n for n in free if not torch.equal(free[n], gptq[n])}
    blocks = {n for n in free if n.endswith("_blocks")}
    assert blocks <= changed <= blocks | {n for n in free if n.endswith("_scales")}
    assert len(blocks) == 4
    assert (made / "free" / "config.json").read_text() == (made / "gptq" / "config.json").read_text()


@pytest.mark.parametrize("with_run", [True, False])
def test_the_export_verifies(made: Path, with_run: bool) -> None:
    report = verify_checkpoint(made / "gptq", open_checkpoint(made / "source"), run=made / "run" if with_run else None)
    assert report.passed, [c.failures for c in report.checks]
    assert len(report.layers) == 16  # 2 blocks, 4 experts, 2 matrices: the kernel ran on every one
    assert all(0 < layer.output_error < 0.3 for layer in report.layers)


def test_neither_kills_nor_memory_show(made: Path, tmp_path: Path) -> None:
    plan = plan_for(made / "source", made)
    for stop in (1, 7):
        with pytest.raises(KilledError):
            calibrate_into(tmp_path / "killed", plan, samples(), SETTINGS, advance=killed_after(stop))
    calibrate_into(tmp_path / "killed", plan, samples(), replace(SETTINGS, memory=1 << 20))
    assert files_of(tmp_path / "killed") == files_of(made / "run")


def test_blocks_that_are_published_pass_through_a_run(made: Path, tmp_path: Path) -> None:
    """Codes that are in the scheme already lose nothing: there is nothing to choose."""
    as_gptoss_mxfp4(made / "source", tmp_path / "published")
    plan = plan_for(tmp_path / "published", tmp_path)
    assert calibrate_into(tmp_path / "run", plan, samples(), SETTINGS)["layers"] == {}
    run(plan_of_run(open_run(tmp_path / "run"), None, "vllm", ()), tmp_path / "o", jobs=1, memory=1 << 20)
    ours, theirs = load_tensors(tmp_path / "o"), load_tensors(tmp_path / "published")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert verify_checkpoint(tmp_path / "o", open_checkpoint(tmp_path / "published"), run=tmp_path / "run").passed


def test_other_schemes_stay_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="read by engines as MXFP4 or BF16 only"):
        plan_for(made / "source", tmp_path, scheme="int4-g32", form="compressed-tensors")


def _inputs_of_experts(folder: Path) -> dict[int, torch.Tensor]:
    """What enters each expert of layer 0 that sees text in the ordinary model: [T, I] float64."""
    model, rows = reference(folder), {}

    def seen(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        hidden, index = args[0].reshape(-1, args[0].shape[-1]), args[1].reshape(-1, args[1].shape[-1])
        for e in range(4):
            rows[e] = hidden[(index == e).any(-1)].double()

    handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(seen)
    with torch.no_grad():
        model(torch.from_numpy(samples().ids_NL).long())
    handle.remove()
    return {e: x_TI for e, x_TI in rows.items() if len(x_TI)}
