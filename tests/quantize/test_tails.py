"""The method `tails` over a checkpoint: q, k, v and gate, up are searched, and verified, with weights of their own set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import load_tensors, save_tensors, tiny
from numpy.typing import NDArray
from oracle import int4 as oracle
from quantkit.export.checkpoint import open_checkpoint
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint

GROUP = 32
SETS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
STEPS = [sign * t for t in np.linspace(1.2, 0.3, 91) for sign in (1, -1)]
RULES = """weights:
  - {match: {role: [attention, dense_mlp]}, scheme: int4-g32, method: tails}
  - {match: {role: "*"}, keep: true}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer whose weights have heavy tails, heavier in some columns than in others."""
    folder = tiny(
        tmp_path_factory.mktemp("m") / "llama", "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1
    )
    tensors, chance = load_tensors(folder), np.random.default_rng(5)
    for name, w in tensors.items():
        if name.endswith("_proj.weight"):
            rows, inputs = w.shape
            size = np.exp(chance.standard_normal(inputs))
            w.copy_(w.new_tensor(0.02 * size * chance.standard_t(3, (rows, inputs))))
    save_tensors(folder, tensors)
    return folder


def made(source: Path, out: Path) -> Path:
    recipe = out.with_suffix(".yaml")
    recipe.write_text(RULES)
    run(make_plan(load_recipe(str(recipe)), open_checkpoint(source)), out, jobs=2, memory=1 << 20)
    return out


def weights_of(set_of: list[NDArray[Any]]) -> NDArray[Any]:
    """The product of the columns' kurtoses, squared for a matrix alone, over the mean square of the last matrix."""
    kurtoses = [np.mean(w**4, axis=0) / np.mean(w**2, axis=0) ** 2 for w in set_of]
    h = np.prod(kurtoses * (2 if len(set_of) == 1 else 1), axis=0) / np.mean(set_of[-1] ** 2, axis=0)
    return h / h.max()


def decoded(tensors: dict[str, Any], module: str) -> NDArray[Any]:
    words = tensors[f"{module}.weight_packed"].numpy().view(np.uint32)
    codes = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    scale = tensors[f"{module}.weight_scale"].float().numpy().astype(np.float64)
    return (codes.reshape(len(words), -1).astype(np.float64) - 8) * np.repeat(scale, GROUP, axis=1)


def test_scales_are_best_by_the_tails_of_all_that_share_an_input_and_verify_measures_by_them(
    source: Path, tmp_path: Path
) -> None:
    out = made(source, tmp_path / "out")
    report = verify_checkpoint(out, open_checkpoint(source))
    assert report.passed
    errors = {layer.name.removesuffix(".weight"): layer.error for layer in report.layers}
    before, after = load_tensors(source), load_tensors(out)
    assert len(errors) == sum(map(len, SETS))
    for names in SETS:
        modules = [f"model.layers.0.{n}" for n in names]
        matrices = [before[f"{m}.weight"].double().numpy() for m in modules]
        h = weights_of(matrices)
        for module, w in zip(modules, matrices, strict=True):
            weight = h * np.sqrt(np.abs(w))
            lost = (weight * (w - decoded(after, module)) ** 2).reshape(len(w), -1, GROUP).sum(2)
            best = np.full(lost.shape, np.inf)
            for r, g in np.ndindex(best.shape):
                span = slice(g * GROUP, g * GROUP + GROUP)
                part = w[r, span].astype(np.float32)
                for t in STEPS:
                    scale = oracle.stored_scale(t * np.abs(part).max() / 8, "bf16")
                    d = part - oracle.codes(part, scale) * np.float64(scale)
                    best[r, g] = min(best[r, g], float((weight[r, span] * d**2).sum()))
            assert lost.sum() <= 1.01 * best.sum(), module
            assert np.isclose(errors[module], np.sqrt(lost.sum() / (weight * w**2).sum()), rtol=1e-4), module
