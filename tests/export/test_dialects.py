"""One set of INT4 codes in every dialect: equal after unpacking, bytes as the published vectors, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_runs import files_of, samples
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from families import FAMILIES, tiny
from oracle import dialects
from quantkit.export.checkpoint import open_checkpoint
from quantkit.export.sources.detect import weights_of
from quantkit.kernels import layouts
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.packed import pack_codes
from quantkit.quantize.calibration import Settings
from quantkit.quantize.calibration_run import calibrate_into
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint
from safetensors.torch import load_file

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_vectors.json").read_text())
SYMMETRIC = ("compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt")
MODULE = "model.layers.1.mlp.down_proj"
REST = '  - {match: {role: "*"}, keep: true}\n'


def plan_of(source: Path, tmp_path: Path, scheme: str, form: str, roles: str = "[attention, dense_mlp]") -> Plan:
    file = tmp_path / "r.yaml"
    file.write_text(f"weights:\n  - {{match: {{role: {roles}}}, scheme: {scheme}}}\n{REST}")
    return make_plan(load_recipe(str(file)), open_checkpoint(source), format_name=form)


def written(source: Path, tmp_path: Path, scheme: str, form: str, memory: int = 1 << 20) -> Path:
    out = tmp_path / f"{form}-{scheme}-{source.name}-{memory}"
    run(plan_of(source, tmp_path, scheme, form), out, jobs=2, memory=memory)
    return out


def same_numbers(a: Path, b: Path, module: str = MODULE) -> None:
    for name, x, y in zip(
        ("codes", "scale", "zero"), dialects.layer(a, module), dialects.layer(b, module), strict=True
    ):
        assert np.array_equal(x, y), name


def words(golden: list[list[str]]) -> np.ndarray:
    return np.array([[int(w, 16) for w in row] for row in golden], np.uint32).view(np.int32)


def test_golden_bytes() -> None:
    gptq, awq, pairs = (GOLDEN[n] for n in ("gptq_int4_16x16", "awq_int4_16x16", "modelopt_int4_awq_4x16"))
    codes = np.array(gptq["codes_unsigned_KxN"], np.int8).T - np.int8(8)
    rows = pack_codes(codes).view(np.uint8)
    assert layouts.gptq_from_rows(rows).tobytes().hex() == gptq["qweight_bytes"]
    assert layouts.awq_from_rows(rows).tobytes().hex() == awq["qweight_bytes"]
    zeros = np.full((1, 16), 8, np.uint8)
    for v2, name in ((False, "qzeros_sym_v1"), (True, "qzeros_sym_v2")):
        assert np.array_equal(layouts.gptq_pack_zeros(zeros, v2=v2), words(gptq[name]))
    assert np.array_equal(layouts.awq_pack_zeros(np.array(awq["zeros"], np.uint8)), words(awq["qzeros_i32"]))
    signed = pack_codes(np.array(pairs["q_signed_rows"], np.int8)).view(np.uint8)
    made = layouts.row_pairs_from_rows(signed)
    assert made.tobytes().hex() == pairs["weight_bytes"]
    assert np.array_equal(layouts.rows_from_row_pairs(made), signed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("m") / "llama", "llama", hidden_size=192, intermediate_size=256)


def test_every_dialect_holds_the_same_codes(llama: Path, tmp_path: Path) -> None:
    outs = {form: written(llama, tmp_path, "int4-g64", form) for form in SYMMETRIC}
    first = outs["compressed-tensors"]
    for form, out in outs.items():
        same_numbers(first, out)
        report = verify_checkpoint(out, open_checkpoint(llama))
        assert report.passed, (form, [c for c in report.checks if not c.passed])
        assert any("kernels" in c.name for c in report.checks), form
        assert {w.scheme.name for w in weights_of(open_checkpoint(out)).values() if w.scheme} == {"int4-g64"}
    stored = load_file(first / "model.safetensors")
    theirs = unpack_from_int32(stored[f"{MODULE}.weight_packed"], 4, torch.Size(stored[f"{MODULE}.weight_shape"]))
    assert np.array_equal(theirs.numpy(), dialects.layer(outs["gptq"], MODULE)[0])


@pytest.mark.parametrize("source", SYMMETRIC[1:])
def test_from_any_dialect_into_any_other_bit_for_bit(source: str, llama: Path, tmp_path: Path) -> None:
    begun = written(llama, tmp_path, "int4-g32", source)
    for target in SYMMETRIC:
        again = written(begun, tmp_path, "int4-g32", target)
        expected = files_of(written(llama, tmp_path, "int4-g32", target))
        assert files_of(again)["model.safetensors"] == expected["model.safetensors"], (source, target)
        assert verify_checkpoint(again, open_checkpoint(begun)).passed


def test_zero_points_and_whole_rows(llama: Path, tmp_path: Path) -> None:
    for scheme, form in (("int4a-g64", "awq"), ("int4-channel", "gptq")):
        plain, other = (written(llama, tmp_path, scheme, f) for f in ("compressed-tensors", form))
        same_numbers(plain, other)
        assert verify_checkpoint(other, open_checkpoint(llama)).passed
        back = written(other, tmp_path, scheme, "compressed-tensors")
        assert files_of(back)["model.safetensors"] == files_of(plain)["model.safetensors"]
        if scheme == "int4a-g64":
            assert dialects.layer(other, MODULE)[2].any(), "the layer has no zero points to lose"


def test_blocks_of_columns_give_the_bytes_of_the_whole(tmp_path: Path) -> None:
    """`up` has 2048 rows of 1024 inputs: several blocks of rows in a small budget, one in a large one."""
    wide = tiny(tmp_path / "wide", "llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=1)
    for form in ("gptq", "awq", "modelopt"):
        small, middle, large = (written(wide, tmp_path, "int4-g128", form, m) for m in (1 << 20, 7 << 20, 1 << 30))
        assert files_of(small) == files_of(middle) == files_of(large), form


def test_one_calibration_many_dialects(llama: Path, tmp_path: Path) -> None:
    from quantkit.quantize.run_source import open_run, plan_of_run

    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"weights:\n  - {{match: {{role: [attention, dense_mlp]}}, scheme: int4-g64, method: gptq}}\n{REST}"
    )
    plan = make_plan(load_recipe(str(recipe)), open_checkpoint(llama))
    calibrate_into(tmp_path / "run", plan, samples(n=8), Settings(memory=1 << 28))
    before = files_of(tmp_path / "run")
    for form in SYMMETRIC:
        run(plan_of_run(open_run(tmp_path / "run"), form, "vllm", ()), tmp_path / form, jobs=2, memory=1 << 20)
        same_numbers(tmp_path / "compressed-tensors", tmp_path / form)
        assert verify_checkpoint(tmp_path / form, open_checkpoint(llama), run=tmp_path / "run").passed
    assert files_of(tmp_path / "run") == before, "nothing was calibrated again"


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_configurations(llama: Path, tmp_path: Path) -> None:
    gptq, v2, awq = (config_of(written(llama, tmp_path, "int4-g64", f)) for f in ("gptq", "gptq-v2", "awq"))
    keys = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    assert keys.items() <= gptq.items()
    assert (gptq["checkpoint_format"], v2["checkpoint_format"]) == ("gptq", "gptq_v2")
    assert gptq["dynamic"] == {r"-:lm_head$": {}}
    assert {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
    }.items() <= awq.items()
    assert awq["modules_to_not_convert"] == ["lm_head"]


def test_a_mix_in_the_modelopt_format_names_every_layer(tmp_path: Path) -> None:
    source = FAMILIES["qwen3_moe"](tmp_path / "m")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "weights:\n  - {match: {role: routed_experts}, scheme: nvfp4}\n"
        f"  - {{match: {{role: attention}}, scheme: fp8-tensor, input_scale: 0.5}}\n{REST}"
    )
    plan = make_plan(load_recipe(str(recipe)), open_checkpoint(source), format_name="modelopt")
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    flat = config_of(tmp_path / "o")
    nested = json.loads((tmp_path / "o" / "hf_quant_config.json").read_text())["quantization"]
    assert flat["quant_algo"] == nested["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"] == nested["quantized_layers"]
    listed = {n: a["quant_algo"] for n, a in nested["quantized_layers"].items()}
    stored = {w.module: w.scheme.name for w in weights_of(open_checkpoint(tmp_path / "o")).values() if w.scheme}
    names = {"nvfp4": "W4A16_NVFP4", "fp8-tensor": "FP8"}
    assert listed == {module: names[scheme] for module, scheme in stored.items()}
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(source))
    assert report.passed, [c for c in report.checks if not c.passed]


@pytest.mark.parametrize(
    ("form", "scheme", "match"),
    [
        ("gptq", "int4a-g64", "cannot hold int4a-g64"),
        ("gptq", "nvfp4", "cannot hold nvfp4"),
        ("awq", "int4-channel", "cannot hold int4-channel"),
        ("modelopt", "int4a-g64", "cannot hold int4a-g64"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_with_the_schemes_that_fit(
    form: str, scheme: str, match: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=match) as refused:
        plan_of(llama, tmp_path, scheme, form)
    assert "int4-g64" in str(refused.value)


def test_several_schemes_in_gptq_are_refused(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    rules = "".join(
        f"  - {{match: {{role: {r}}}, scheme: int4-g{g}}}\n" for r, g in (("attention", 32), ("dense_mlp", 64))
    )
    recipe.write_text(f"weights:\n{rules}{REST}")
    for form in ("gptq", "awq"):
        with pytest.raises(QuantkitError, match="one scheme for all layers"):
            make_plan(load_recipe(str(recipe)), open_checkpoint(llama), format_name=form)
