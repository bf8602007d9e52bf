"""ModelOpt's algorithms: what is read back is what ModelOpt itself computes, and what has no place in codes is refused."""

from __future__ import annotations

import contextlib
import io
import math
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_runs import files_of, samples
from families import FAMILIES
from oracle import gptq as oracle
from quantkit.calibrate.stats import HessianSum
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.cpu.rows import global_scale
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.calibration import Settings
from quantkit.quantize.calibration_run import calibrate_into, check_recipe, identity
from quantkit.quantize.methods import from_amax, modelopt
from quantkit.quantize.modelopt_algorithms import READABLE, REFUSED, algorithms_for
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.run import run
from quantkit.quantize.run_source import open_run, plan_of_run
from quantkit.quantize.verification import verify_checkpoint

RULE = """
weights:
  - {{match: {{role: [{role}]}}, scheme: {scheme}, method: {{name: modelopt, algorithm: {algorithm}}}}}
  - {{match: {{role: "*"}}, keep: true}}
"""
LINEAR = "attention, dense_mlp, routed_experts"
CASES = [
    (s, a) for s in ("int4-g32", "int4-channel", "nvfp4", "fp8-tensor", "fp8-channel", "fp8-block") for a in READABLE
]


def problem(outputs: int = 24, inputs: int = 192, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((inputs, inputs)) * (rng.random((inputs, inputs)) < 0.1) + np.eye(inputs)
    x = rng.standard_normal((600, inputs)) @ mixing * np.exp(0.7 * rng.standard_normal(inputs))
    w = rng.standard_t(5, (outputs, inputs)) / 20
    return torch.from_numpy(w).float(), torch.from_numpy(x).float()


def ask(w: torch.Tensor, x: torch.Tensor, name: str, algorithm: str) -> tuple[modelopt.Found, from_amax.Quantized]:
    amax, total = float(w.abs().max()), HessianSum(x.shape[1])
    total.update(x)

    def feed(show: modelopt.Show) -> None:
        for part in x.split(100):
            show("a.b", part)
            show("elsewhere", part)

    found = modelopt.calibrated({"a.b": modelopt.Layer(w, SCHEMES[name], amax)}, algorithm, feed)["a.b"]
    h_II = total.finish().h_II
    return found, from_amax.encode(w, found.w_OI, found.amax, SCHEMES[name], h_II, half=False, largest=amax)


def fake_quantised(w: torch.Tensor, x: torch.Tensor, cfg: dict, algorithm: str) -> torch.Tensor:
    """The weight that ModelOpt itself computes with, from a model of its own."""
    import modelopt.torch.quantization as mtq

    net = torch.nn.Sequential(torch.nn.Linear(w.shape[1], w.shape[0], bias=False))
    net[0].weight.data = w.clone()
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": cfg}],
              "algorithm": {"method": algorithm}}  # fmt: skip
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        mtq.quantize(net, config, lambda m: [m(part) for part in x.split(100)])
        return net[0].weight_quantizer(net[0].weight)


@pytest.mark.parametrize("algorithm", ["max", "mse", "gptq"])
@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("int4-g32", {"num_bits": 4, "block_sizes": {-1: 32, "type": "static"}}),
        ("int4-channel", {"num_bits": 4, "axis": 0}),
        ("fp8-tensor", {"num_bits": (4, 3), "axis": None}),
        ("fp8-channel", {"num_bits": (4, 3), "axis": 0}),
        ("fp8-block", {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}),
    ],
)
def test_codes_are_those_of_modelopt(name: str, cfg: dict, algorithm: str) -> None:
    w, x = problem()
    _, result = ask(w, x, name, algorithm)
    expected = fake_quantised(w, x, cfg, algorithm)
    # INT4 scales are stored in bfloat16, which moves a value by at most 2^-8 and a code that lay between two to the other
    near = torch.isclose(result.w_hat_OI, expected, rtol=2**-8 if name.startswith("int4") else 1e-6, atol=1e-9)
    assert near.float().mean() > (0.97 if name.startswith("int4") else 0.9999)


def test_nvfp4_searches_use_the_scales_as_stored() -> None:
    w, x = problem()
    largest = float(w.abs().max())
    scale_2 = float(global_scale(SCHEMES["nvfp4"], largest))
    losses = {}
    for algorithm in algorithms_for(SCHEMES["nvfp4"]):
        found, result = ask(w, x, "nvfp4", algorithm)
        q, scale, zero = oracle.read(result.parts.codes, result.parts.scale, None, "nvfp4", w.shape[1], scale_2=scale_2)
        assert np.array_equal(((q - zero) * scale).astype(np.float32), result.w_hat_OI.numpy())
        if algorithm == "gptq":  # its weights are on the grid already, and stay
            assert torch.equal(result.w_hat_OI, found.w_OI)
        losses[algorithm] = result.loss
    assert losses["mse"] < losses["max"]
    assert losses["local_hessian"] < losses["mse"]
    assert losses["gptq"] < losses["max"]


@pytest.mark.parametrize(("name", "algorithm"), [c for c in CASES if c[1] in algorithms_for(SCHEMES[c[0]])])
def test_every_algorithm_gives_finite_codes_and_true_losses(name: str, algorithm: str) -> None:
    w, x = problem(outputs=20)
    _, result = ask(w, x, name, algorithm)
    d = (w - result.w_hat_OI).double().numpy()
    assert np.isfinite(d).all()
    h = oracle.hessian(x.numpy())
    assert math.isclose(result.loss, oracle.loss(w.numpy(), result.w_hat_OI.numpy(), h), rel_tol=1e-3)
    assert math.isclose(result.norm, oracle.loss(w.numpy(), np.zeros(w.shape), h), rel_tol=1e-3)
    assert np.allclose(result.parts.sq_err_R, (d**2).sum(1), rtol=1e-5)
    assert result.loss < 5 * result.loss_plain


@pytest.mark.parametrize("algorithm", REFUSED)
def test_what_codes_cannot_say_is_refused_with_the_reason(algorithm: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(RULE.format(role=LINEAR, scheme="int4-g32", algorithm=algorithm))
    with pytest.raises(QuantkitError) as e:
        load_recipe(str(file))
    assert REFUSED[algorithm] in str(e.value)


def test_scaled_inputs_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = problem()
    with pytest.raises(QuantkitError, match="scaled the inputs"):
        ask(w, x, "int4-g32", "awq_lite")
    w[0, 0] = torch.nan
    with pytest.raises(QuantkitError, match="ModelOpt's max"):
        ask(w, x, "int4-g32", "max")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: modelopt}", "needs an `algorithm`"),
        ("{name: modelopt, algorithm: awq}", "unknown algorithm 'awq'"),
        ("{name: modelopt, algorithm: max, damp: 0.1}", "has the options algorithm, here: damp"),
        ("{name: gptq, algorithm: max}", "has the options act_order, damp, here: algorithm"),
        ("{name: plain, damp: 0.1}", "has no options, here: damp"),
    ],
)
def test_options_belong_to_their_method(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        RULE.format(role=LINEAR, scheme="int4-g32", algorithm="max").replace("{name: modelopt, algorithm: max}", text)
    )
    with pytest.raises(QuantkitError, match=message):
        load_recipe(str(file))


@pytest.mark.parametrize(
    ("scheme", "algorithm"), [("mxfp4", "max"), ("int4a-g32", "max"), ("fp8-channel", "local_hessian")]
)
def test_schemes_that_modelopt_does_not_calibrate_are_refused(scheme: str, algorithm: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(RULE.format(role=LINEAR, scheme=scheme, algorithm=algorithm))
    source = FAMILIES["llama"](tmp_path / "s")
    with pytest.raises(QuantkitError, match=f"modelopt {algorithm}"):
        make_plan(load_recipe(str(file)), open_checkpoint(source))


@pytest.mark.parametrize(
    ("model", "role", "scheme", "algorithm"),
    [
        ("llama", "attention", "int4-g32", "awq_clip"),
        ("qwen3_moe", "routed_experts", "nvfp4", "local_hessian"),
        ("llama", LINEAR, "fp8-tensor", "max"),
    ],
)
def test_from_source_to_a_verified_checkpoint(
    model: str, role: str, scheme: str, algorithm: str, tmp_path: Path
) -> None:
    source = FAMILIES[model](tmp_path / "s")
    (tmp_path / "r.yaml").write_text(RULE.format(role=role, scheme=scheme, algorithm=algorithm))
    plan = make_plan(load_recipe(str(tmp_path / "r.yaml")), open_checkpoint(source))
    text = samples(n=4, length=64)
    result = calibrate_into(tmp_path / "run", plan, text, Settings(memory=1 << 28))
    assert set(result["layers"]) == {t.name for t in plan.tasks if t.fate == "quantize"}
    assert {f["method"] for f in result["layers"].values()} == {f"modelopt {algorithm}"}
    assert identity(plan, text, torch.float32)["modelopt"] == metadata.version("nvidia-modelopt")
    run(plan_of_run(open_run(tmp_path / "run"), None, "vllm", ()), tmp_path / "o", jobs=1, memory=1 << 20)
    report = verify_checkpoint(tmp_path / "o", open_checkpoint(source), run=tmp_path / "run")
    assert report.passed, [c.failures for c in report.checks]
    calibrate_into(tmp_path / "again", plan, text, Settings(memory=1 << 20))  # in several waves
    assert files_of(tmp_path / "again" / "weights") == files_of(tmp_path / "run" / "weights")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = FAMILIES["llama"](tmp_path / "s")
    (tmp_path / "r.yaml").write_text(RULE.format(role=LINEAR, scheme="int4-g32", algorithm="max"))
    plan = make_plan(load_recipe(str(tmp_path / "r.yaml")), open_checkpoint(source))

    def gone(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("quantkit.quantize.modelopt_algorithms.version", gone)
    with pytest.raises(QuantkitError, match="not installed") as e:
        check_recipe(plan)
    assert "quantkit[modelopt]" in str(e.value)
