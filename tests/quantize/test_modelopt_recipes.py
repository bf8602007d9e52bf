"""ModelOpt's shipped recipes: each becomes what it says, or is refused by the key that cannot be said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from families import FAMILIES
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize import modelopt_recipes
from quantkit.quantize.modelopt_recipes import modelopt_recipe, shipped_by_modelopt
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import Recipe, load_recipe
from quantkit.quantize.shipped import read_recipe

ALL, MLP, EXPERTS = "attention.q dense_mlp routed_experts", "dense_mlp shared_experts routed_experts", "routed_experts"
CAST = "use_constant_amax"  # in place of an expectation: the key that is refused

# name: (some roles of its one rule, scheme, method, input scale, KV cache), or the key
EXPECTED: dict[str, tuple[str, str, str, str | None, bool] | str] = {
    "fp8_default-kv_fp8": (ALL, "fp8-tensor", "plain", "amax", True),
    "fp8_default-kv_fp8_cast": CAST,
    "int4_blockwise_weight_only": (ALL, "int4-g128", "plain", None, False),
    "mxfp4_mlp_weight_only": (MLP, "mxfp4", "plain", None, False),
    "nvfp4_act_headroom-kv_fp8_cast": CAST,
    "nvfp4_default-kv_fp8": (ALL, "nvfp4", "plain", "amax", True),
    "nvfp4_default-kv_fp8_cast": CAST,
    "nvfp4_default-kv_none-gptq": (ALL, "nvfp4", "gptq", "amax", False),
    "nvfp4_default-kv_nvfp4_cast": CAST,
    "nvfp4_experts_only-kv_fp8": (EXPERTS, "nvfp4", "plain", "amax", True),
    "nvfp4_experts_only-kv_fp8_cast": CAST,
    "nvfp4_experts_only-kv_fp8_layerwise": (EXPERTS, "nvfp4", "plain", "amax", True),
    "nvfp4_experts_only-kv_fp8_layerwise_offload": (EXPERTS, "nvfp4", "plain", "amax", True),
    "nvfp4_experts_only_input_scale1-kv_fp8_cast": CAST,
    "nvfp4_experts_only_mse-kv_fp8_cast": CAST,
    "nvfp4_mlp_only-kv_fp8": (MLP, "nvfp4", "plain", "amax", True),
    "nvfp4_mlp_only-kv_fp8_cast": CAST,
    "nvfp4_mlp_only-novit-kv_fp8": (MLP, "nvfp4", "plain", "amax", True),
    "nvfp4_mlp_only_mse-kv_fp8_cast": CAST,
    "nvfp4_mlp_weight_only": "weight_quantizer",  # blocks of 32
    "nvfp4_omlp_only-kv_fp8": ("attention.o " + MLP, "nvfp4", "plain", "amax", True),
    "nvfp4_omlp_only-kv_fp8_cast": CAST,
    "nvfp4_weight_only-kv_fp16": (ALL, "nvfp4", "plain", None, False),
    "nvfp4_weight_only-kv_fp8_cast": CAST,
}


def test_the_table_names_every_recipe_for_any_model() -> None:
    assert shipped_by_modelopt() == [f"modelopt:general/ptq/{name}" for name in EXPECTED]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_recipe_is_what_it_says_or_is_refused(name: str) -> None:
    expected, source = EXPECTED[name], f"modelopt:general/ptq/{name}"
    if isinstance(expected, str):
        with pytest.raises(QuantkitError, match="cannot be translated") as e:
            load_recipe(source)
        assert expected in str(e.value.value)
        return
    some, scheme, method, inputs, cache = expected
    recipe = load_recipe(source)
    rule, rest = recipe.weights
    assert set(some.split()) <= set(rule.match.role) and rest.keep
    assert ("attention.q" in rule.match.role) == ("attention.q" in some)
    assert (rule.scheme, str(rule.method)) == (scheme, method)
    assert (rule.measured and rule.measured.rule) == inputs
    assert (recipe.kv_cache is not None) == cache


def write(folder: Path, quantize: dict[str, Any], kind: str = "ptq") -> None:
    """A package of recipes with one in it."""
    (folder / "r.yaml").write_text(yaml.safe_dump({"metadata": {"recipe_type": kind}, "quantize": quantize}))


NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "static", "scale_bits": "e4m3"}}
WEIGHTS = {"quantizer_name": "*weight_quantizer", "cfg": NVFP4}
INPUTS = {"quantizer_name": "*input_quantizer", "cfg": NVFP4}
HEADROOM = {"method": "nvfp4_act_headroom", "anchor_percentile": 1, "rho": 16384}


def test_later_entries_win_and_algorithms_are_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelopt_recipes, "folder", lambda: tmp_path)
    fp8 = [
        {"quantizer_name": f"*self_attn*{q}_quantizer", "cfg": {"num_bits": "e4m3", "axis": None}}
        for q in ("weight", "input")
    ]
    off = {"quantizer_name": "*self_attn.kv_a*", "enable": False}
    write(
        tmp_path,
        {"algorithm": HEADROOM, "quant_cfg": [WEIGHTS, INPUTS, {"quantizer_name": "*mlp.experts*", "enable": False}]},
    )
    with pytest.raises(QuantkitError, match="role routed_experts"):  # but not block_sparse_moe.experts
        modelopt_recipe("modelopt:r")
    write(
        tmp_path,
        {"algorithm": HEADROOM, "quant_cfg": [WEIGHTS, INPUTS, {"quantizer_name": "*experts*", "enable": False}]},
    )
    (rule, _) = modelopt_recipe("modelopt:r")["weights"]
    assert rule["input_scale"] == "nvfp4_act_headroom" and rule["scheme"] == "nvfp4"
    assert not {r for r in rule["match"]["role"] if "experts" in r}
    write(tmp_path, {"algorithm": {"method": "mse", "fp8_scale_sweep": True}, "quant_cfg": [WEIGHTS, off]})
    (rule, _) = modelopt_recipe("modelopt:r")["weights"]
    assert rule["method"] == "sweep" and "attention.kv_a" not in rule["match"]["role"]
    write(tmp_path, {"algorithm": "max", "quant_cfg": [WEIGHTS, INPUTS, *fp8]})
    attention, mlp, _ = Recipe.model_validate(modelopt_recipe("modelopt:r")).weights
    assert (attention.scheme, mlp.scheme) == ("fp8-tensor", "nvfp4")
    pinned = INPUTS | {"cfg": NVFP4 | {"constant_amax": 2688.0}}
    write(tmp_path, {"algorithm": "max", "quant_cfg": [WEIGHTS, pinned]})
    assert modelopt_recipe("modelopt:r")["weights"][0]["input_scale"] == 1.0


@pytest.mark.parametrize(
    ("quantize", "key"),
    [
        ({"algorithm": {"method": "awq_lite"}, "quant_cfg": [WEIGHTS]}, "algorithm: awq_lite"),
        ({"algorithm": {"method": "mse", "step_size": 0.2}, "quant_cfg": [WEIGHTS]}, "algorithm: mse"),
        ({"algorithm": HEADROOM | {"rho": 9}, "quant_cfg": [WEIGHTS, INPUTS]}, "algorithm.rho"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS | {"speed": 1}]}, "quant_cfg.speed"),
        ({"algorithm": "max", "quant_cfg": [INPUTS]}, "input_quantizer"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS, {"quantizer_name": "*q_proj*", "enable": True, "parent_class": "x"}]}, "parent_class"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS, {"quantizer_name": "*layers.0.*", "enable": False}]}, "quant_cfg"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS, {"quantizer_name": "*q_bmm_quantizer", "cfg": NVFP4}]}, "q_bmm_quantizer"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS, {"quantizer_name": "*k_bmm_quantizer", "cfg": {"num_bits": "e4m3"}}]}, "bmm"),
        ({"algorithm": "max", "quant_cfg": [WEIGHTS | {"cfg": NVFP4 | {"four_over_six": True}}]}, "weight_quantizer"),
        ({"algorithm": "max", "quant_cfg": [{"quantizer_name": "*", "enable": False}]}, "quant_cfg"),
    ],
)  # fmt: skip
def test_what_rules_cannot_say_is_refused_by_its_key(
    quantize: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelopt_recipes, "folder", lambda: tmp_path)
    write(tmp_path, quantize)
    with pytest.raises(QuantkitError, match="cannot be translated") as e:
        modelopt_recipe("modelopt:r")
    assert key in str(e.value.value)


def test_other_kinds_unknown_names_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantkitError, match="no such recipe") as e:
        load_recipe("modelopt:general/ptq/nvfp5")
    assert "modelopt:general/ptq/nvfp4_default-kv_fp8" in str(e.value)
    monkeypatch.setattr(modelopt_recipes, "folder", lambda: tmp_path)
    write(tmp_path, {}, kind="qad")
    with pytest.raises(QuantkitError, match="recipe_type"):
        load_recipe("modelopt:r")
    monkeypatch.undo()
    monkeypatch.setattr(modelopt_recipes, "find_spec", lambda name: None)
    assert shipped_by_modelopt() == []
    with pytest.raises(QuantkitError, match="not installed"):
        load_recipe("modelopt:general/ptq/nvfp4_default-kv_fp8")


def test_plans_without_importing_modelopt(tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "s")
    plan = make_plan(load_recipe("modelopt:general/ptq/nvfp4_omlp_only-kv_fp8"), open_checkpoint(source))
    chosen = {t.name.rpartition(".")[2] for t in plan.tasks if t.fate == "quantize"}
    assert chosen == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    text = read_recipe("modelopt:general/ptq/nvfp4_weight_only-kv_fp16")[1]
    assert Recipe.model_validate(yaml.safe_load(text)).weights[0].scheme == "nvfp4"
    code = (
        "import sys; from quantkit.quantize.recipe import load_recipe\n"
        "load_recipe('modelopt:general/ptq/nvfp4_weight_only-kv_fp16')\n"
        "print([m for m in ('modelopt', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
