"""What configurations of every dialect say of activations, told of layers whose bytes are codes."""

from __future__ import annotations

from typing import Any

import pytest
from quantkit.export.activations import activations_of
from quantkit.export.sources.detect import Weight

NAMES = ("m.0.q_proj", "m.0.down_proj", "m.0.router")
WEIGHTS = {f"{n}.weight": Weight(f"{n}.weight", (8, 16), "plain" if "router" in n else "codes", {}) for n in NAMES}

CT = {"quant_method": "compressed-tensors"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}


def group(targets: list[str], **inputs: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": {}, "input_activations": inputs or None}


def linear(**inputs: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"g": group(["Linear"], **inputs)}}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


EVERY = [
    (linear(), None),
    (linear(**FP4, dynamic="local"), ("e2m1", 16, True)),
    (linear(**FP4, dynamic=True), ("other", 0, False)),
    (linear(**FP8, strategy="tensor", dynamic=False), ("e4m3", 0, True)),
    (linear(**FP8, strategy="tensor", dynamic=True), ("e4m3", 0, False)),
    (linear(**FP8, strategy="token", dynamic=True), ("e4m3", 0, False)),
    (linear(**FP8, strategy="group", group_size=128, dynamic=True), ("e4m3", 128, False)),
    (linear(**FP8, strategy="group", group_size=32, dynamic=True), ("other", 0, False)),
    (linear(num_bits=8, type="int", strategy="token", dynamic=True), ("other", 0, False)),
    (modelopt("NVFP4"), ("e2m1", 16, True)),  # as published: no groups
    (modelopt("NVFP4", config_groups={"g": {"input_activations": None}}), None),
    (modelopt("W4A16_NVFP4"), None),
    (modelopt("W4A16_AWQ"), None),
    (modelopt("FP8"), ("e4m3", 0, True)),
    (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ("e4m3", 0, False)),
    (modelopt("FP8_PB_WO"), ("e4m3", 128, False)),
    (modelopt("MXFP8"), ("other", 0, False)),
    (modelopt("W4A8_AWQ"), ("other", 0, True)),
    ({"quant_method": "fp8", "activation_scheme": "static"}, ("e4m3", 0, True)),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("e4m3", 0, False)),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, ("e4m3", 128, False)),
    ({"quant_method": "gptq", "bits": 4}, None),
    (None, None),
]


@pytest.mark.parametrize(("quant", "wanted"), EVERY)
def test_one_scheme_for_all_quantised_layers(quant, wanted):
    found = activations_of({"quantization_config": quant}, WEIGHTS)
    assert {n: (a.element, a.group, a.fixed) for n, a in found.items()} == (
        {} if wanted is None else dict.fromkeys(("m.0.q_proj.weight", "m.0.down_proj.weight"), wanted)
    )
    assert all(a.title for a in found.values())


def test_a_group_that_names_a_layer_comes_before_the_class():
    token, fixed = ({**FP8, "strategy": s, "dynamic": s == "token"} for s in ("token", "tensor"))
    groups = {"a": group(["Linear"], **token), "b": group(["re:.*down_proj"], **fixed), "c": group(["m.0.router"])}
    found = activations_of({"quantization_config": {**CT, "config_groups": groups}}, WEIGHTS)
    assert {n: a.fixed for n, a in found.items()} == {"m.0.q_proj.weight": False, "m.0.down_proj.weight": True}
    groups["b"] = group(["re:.*down_proj"])
    found = activations_of({"quantization_config": {**CT, "config_groups": groups}}, WEIGHTS)
    assert set(found) == {"m.0.q_proj.weight"}


def test_layers_of_a_mixed_configuration():
    layers = {"m.0.q_proj": {"quant_algo": "FP8"}, "m.0.down_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128}}
    found = activations_of({"quantization_config": modelopt("MIXED_PRECISION", quantized_layers=layers)}, WEIGHTS)
    assert {n: a.title for n, a in found.items()} == {"m.0.q_proj.weight": "FP8 under a stored scale"}
