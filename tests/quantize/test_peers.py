"""Our GPTQ beside the peers, on one layer with correlated inputs: what its output loses, tr(D H D^T) in float64.

Measured: 0.17 of compressed-tensors' rounding in INT4, 0.21 in NVFP4; of ModelOpt's GPTQ 0.30 and 0.37, of its AWQ-lite 0.22.
"""

from __future__ import annotations

import contextlib
import io
from functools import cache

import numpy as np
import pytest
import torch
from oracle import gptq as oracle
from quantkit.calibrate.stats import HessianSum
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.methods import from_amax, gptq, modelopt

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
ARGS = {"int4-g64": INT4, "nvfp4": NVFP4}


@cache
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """W [128, 256] with heavy tails, X [2048, 256] with correlated inputs and strong channels."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((256, 256)) * (rng.random((256, 256)) < 0.1) + np.eye(256)
    x = rng.standard_normal((2048, 256)) @ mixing * np.exp(0.7 * rng.standard_normal(256))
    return torch.from_numpy(rng.standard_t(5, (128, 256)) / 20).float(), torch.from_numpy(x).float()


def lost(w_hat: torch.Tensor) -> float:
    """tr(D H D^T) in float64."""
    w, x = problem()
    return oracle.loss(w.numpy(), w_hat.numpy(), 2 * x.double().numpy().T @ x.double().numpy() / len(x))


def hessian() -> torch.Tensor:
    total = HessianSum(256)
    total.update(problem()[1])
    return total.finish().h_II


@cache
def ours(name: str) -> gptq.Quantized:
    w, _ = problem()
    return gptq.quantize(w, gptq.factorise(hessian()), SCHEMES[name], half=False, amax=float(w.abs().max()))


def rounded_by_compressed_tensors(name: str) -> torch.Tensor:
    """Its own scales from the largest weights, its own rounding."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    w, _ = problem()
    args = QuantizationArgs(**ARGS[name])
    blocks = w.reshape(len(w), -1, args.group_size)
    low, high = blocks.amin(-1), blocks.amax(-1)
    over = generate_gparam(w.min(), w.max()) if name == "nvfp4" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=over)
    return fake_quantize(w, scale.float(), zero, args, global_scale=over).float()


@cache
def modelopt_int4(algorithm: str) -> torch.Tensor:
    """The weights that ModelOpt itself computes with: its own rounding, its own scales."""
    import modelopt.torch.quantization as mtq

    w, x = problem()
    net = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    net[0].weight.data = w.clone()
    cfg = {"num_bits": 4, "block_sizes": {-1: 64, "type": "static"}}
    quant = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": cfg}]
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        mtq.quantize(
            net, {"quant_cfg": quant, "algorithm": {"method": algorithm}}, lambda m: [m(part) for part in x.split(512)]
        )
        scale = getattr(net[0].input_quantizer, "pre_quant_scale", None)
        found = net[0].weight_quantizer(net[0].weight)
        return found if scale is None else found * scale  # AWQ: inputs are multiplied, weights were divided


def modelopt_nvfp4(algorithm: str) -> torch.Tensor:
    """ModelOpt's search over block scales with our rounding: its own needs a GPU."""
    w, x = problem()
    layer = modelopt.Layer(w, SCHEMES["nvfp4"], float(w.abs().max()))
    found = modelopt.calibrated({"a": layer}, algorithm, lambda show: [show("a", part) for part in x.split(512)])["a"]
    scheme, amax = SCHEMES["nvfp4"], layer.amax
    return from_amax.encode(w, found.w_OI, found.amax, scheme, hessian(), half=False, largest=amax).w_hat_OI


@pytest.mark.parametrize(("name", "bound"), [("int4-g64", 0.25), ("nvfp4", 0.3)])
def test_gptq_beside_compressed_tensors_rounding(name: str, bound: float) -> None:
    theirs = rounded_by_compressed_tensors(name)
    w, _ = problem()
    assert 0 < float((w - theirs).norm() / w.norm()) < 0.15
    assert lost(ours(name).w_hat_OI) < bound * lost(theirs)


@pytest.mark.parametrize(("algorithm", "bound"), [("gptq", 0.4), ("awq_lite", 0.3), ("awq_clip", 0.35)])
def test_int4_gptq_beside_modelopt(algorithm: str, bound: float) -> None:
    assert lost(ours("int4-g64").w_hat_OI) < bound * lost(modelopt_int4(algorithm))


@pytest.mark.parametrize(("algorithm", "bound"), [("gptq", 0.5), ("local_hessian", 0.5)])
def test_nvfp4_gptq_beside_modelopt(algorithm: str, bound: float) -> None:
    assert lost(ours("nvfp4").w_hat_OI) < bound * lost(modelopt_nvfp4(algorithm))
