"""AWQ beside ModelOpt's AWQ-lite on one layer: same inputs, same bits, outputs at least as close."""

from __future__ import annotations

import copy

import torch
from quantkit.calibrate.stats import AbsMax, HessianSum
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.methods import awq, gptq


def test_outputs_are_as_close_as_those_of_modelopt() -> None:
    import modelopt.torch.quantization as mtq

    generator = torch.Generator().manual_seed(0)
    gain = torch.exp(torch.randn(256, generator=generator))
    gain[::37] *= 15
    x = torch.randn(800, 256, generator=generator) * gain
    layer = torch.nn.Sequential(torch.nn.Linear(256, 96, bias=False))
    w = torch.randn(96, 256, generator=generator) / 16
    layer[0].weight.data.copy_(w)
    peer = mtq.quantize(copy.deepcopy(layer), mtq.INT4_AWQ_CFG, lambda m: m(x[:400]))
    scheme = SCHEMES["int4-g128"]
    hessian, size = HessianSum(256), AbsMax(256)
    hessian.update(x[:400])
    size.update(x[:400])
    h = hessian.finish().h_II
    found = awq.search(h, size.finish().mean_I, [w], scheme, half=False)
    options = gptq.GptqOptions(compensate=False, rules=("search", "weighted", "clip"))
    factor = gptq.factorise(h / found.s_I[:, None] / found.s_I, options)
    ours = gptq.quantize(w * found.s_I, factor, scheme, half=False, options=options).w_hat_OI / found.s_I
    with torch.no_grad():
        truth = x[400:] @ w.T
        errors = [float((y - truth).norm() / truth.norm()) for y in (x[400:] @ ours.T, peer(x[400:]))]
    assert errors[0] <= 1.02 * errors[1]
    assert errors[1] < 0.2  # the peer did quantise, and its scales are of use
