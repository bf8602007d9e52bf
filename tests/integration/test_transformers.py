"""transformers reads what quantkit writes, through compressed-tensors, and computes what the oracle's weights compute.

The real model is loaded in float32 and decompressed by compressed-tensors. First every weight is compared with the oracle's,
then the logits with those of the source model that was given the oracle's weights; activations stay unquantised, since it is
the weights that are judged. compressed-tensors decodes INT4 and FP8 to float32, exactly. NVFP4 it decodes to bf16, by a
product of two rounded factors: a weight may be one bf16 step (2^-8) off, and 1 in 2000 is not the oracle's rounded once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integration.checkpoints import quantise
from oracle.dequantize import dequantize

IDS = [[504, 3575, 282, 4649, 314, 7042, 30, 198], [1604, 275, 24, 104, 727, 1003, 216, 35]]


@pytest.mark.parametrize(
    ("options", "weight_bound", "logit_bound"),
    [
        (("-r", "int4", "--group", "64"), 0.0, 1e-3),  # equal weights: equal logits, up to how a matmul is cut up
        (("-r", "nvfp4"), 2**-8, 0.1),
        (("-r", "fp8-channel"), 0.0, 1e-3),
    ],
    ids=["int4", "nvfp4", "fp8-channel"],
)
def test_logits(options: tuple[str, ...], weight_bound: float, logit_bound: float, model: Path, room: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    written = quantise(model, room / "out", *options)
    meaning = dequantize(written)
    load = AutoModelForCausalLM.from_pretrained
    config = CompressedTensorsConfig(run_compressed=False)
    with pytest.warns(UserWarning, match="run_compressed"):  # transformers says that it takes this one setting of ours
        read = load(written, dtype=torch.float32, quantization_config=config)
    stored = {name: tensor for name, tensor in read.state_dict().items() if name in meaning}
    assert set(stored) == set(meaning)
    for name, tensor in stored.items():
        error = (tensor.double() - meaning[name].double()).abs()
        assert bool((error <= weight_bound * meaning[name].abs()).all()), name

    source = load(model, dtype=torch.float32)
    before = logits(source)
    rounded = meaning if weight_bound == 0 else {name: w.bfloat16().float() for name, w in meaning.items()}
    source.load_state_dict(rounded, strict=False)
    expected = logits(source)
    got = logits(read)
    assert (got - expected).abs().max().item() <= logit_bound
    assert (before - expected).abs().max().item() > 20 * logit_bound  # what the scheme itself does to the logits


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of the two prompts, all in float32, without the quantisation of activations that a scheme may ask for."""
    torch.nn.Module.float(model)  # transformers' own `float` refuses a quantised model
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits
