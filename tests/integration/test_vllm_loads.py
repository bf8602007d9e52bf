"""vLLM's own loader takes every checkpoint that quantkit writes: nothing left over, nothing half filled, the right values.

For each family and format: quantise a tiny model, let vLLM build and load it, and look at what its loader did. Then
dequantise each layer from the parameters that vLLM loaded, and compare all of vLLM's weights with those of the twin that the
oracle dequantised from the files, loaded by the same vLLM: they must be equal bit for bit. A swapped gate and up, experts in
the wrong order, a scale taken for its inverse or a layer that the ignore list names wrongly all end here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.checkpoints import calibrate, quantise, write_twin
from integration.engine import Engine
from integration.schemes import CASES, DRAFT_CASES, STATIC_CASES, STATIC_FORMATS, named, options

pytestmark = pytest.mark.vllm

# Parameters that vLLM makes room for and these checkpoints have nothing for:
CACHE = re.compile(r"attn\.([qkv]|prob)_(scale|zero_point)$")  # scales of the KV cache
NOT_STORED = re.compile(
    CACHE.pattern + r"|\.(w13_|w2_)?input_(global_)?scale$"  # activation scales, which weight-only schemes do not use
)
# Each shard of a fused layer has its own, where vLLM keeps one: the shapes, which it does not read, and the static input
# scale of gate and up, which it refuses when they differ.
SEVERAL = re.compile(r"\.(w13_|w2_)?weight_shape$|\.w13_input_scale$")


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value)
def test_loads(family: str, name: str, source: Callable[[str], Path], room: Path, vllm: Engine) -> None:
    plain = source(family)
    written = quantise(plain, room / "out", *options(room, family, name))
    twin = write_twin(plain, written, room / "twin")

    result = vllm.run(task="load", folder=written, twin=twin)

    assert "error" not in result, result["error"]
    later = draft_layers(plain)
    assert [n for n in result["not_consumed"] if not n.startswith(later)] == []
    assert [n for n, *_ in result["half_filled"] if not NOT_STORED.search(n)] == []
    assert [n for n in result["written_twice"] if not SEVERAL.search(n)] == []
    assert result["differ"] == []
    assert [n for n in result["extra"] if not NOT_STORED.search(n)] == []
    assert result["dense"], "vLLM built no quantised layer"


@pytest.mark.parametrize(("family", "name"), STATIC_CASES, ids=lambda value: value)
def test_scales_of_activations_load(
    family: str, name: str, source: Callable[[str], Path], room: Path, vllm: Engine
) -> None:
    """Every scale of activations that vLLM makes room for is filled, and each that is stored is used."""
    plain = source(family)
    recipe, more = STATIC_FORMATS[name]
    written = calibrate(plain, room / "out", room, "-r", named(room, name, recipe), more=more)
    twin = write_twin(plain, written, room / "twin")

    result = vllm.run(task="load", folder=written, twin=twin)

    assert "error" not in result, result["error"]
    assert result["not_consumed"] == []
    assert [n for n, *_ in result["half_filled"] if not CACHE.search(n)] == []
    assert [n for n in result["written_twice"] if not SEVERAL.search(n)] == []
    assert result["differ"] == []
    assert result["dense"], "vLLM built no quantised layer"
    assert all(result["input_scales"].values()), result["input_scales"]
    layers = {n for n in result["dense"] if n in result["input_scales"]}
    assert layers == set(result["dense"]), "a quantised layer has no scale of activations"


@pytest.mark.parametrize(("family", "name"), DRAFT_CASES, ids=lambda value: value)
def test_draft_loads(family: str, name: str, source: Callable[[str], Path], room: Path, vllm: Engine) -> None:
    """The layers that `test_loads` leaves out: multi-token prediction, as vLLM's draft model loads it."""
    plain = source(family)
    written = quantise(plain, room / "out", *options(room, family, name))
    twin = write_twin(plain, written, room / "twin")

    result = vllm.run(task="load", folder=written, twin=twin, draft=True)

    assert "error" not in result, result["error"]
    later = draft_layers(plain)
    assert [n for n in result["not_consumed"] if n.startswith(later)] == []
    # GLM's layer has no head of its own: vLLM makes room for one, and takes the model's after loading
    head = {f"{prefix}shared_head.head.weight" for prefix in later} if family == "glm_moe_dsa" else set()
    assert {n for n, *_ in result["half_filled"] if not NOT_STORED.search(n)} == head
    assert set(result["differ"]) <= head
    assert [n for n in result["extra"] if not NOT_STORED.search(n)] == []
    experts = [n for n in result["dense"] if n.endswith("experts.routed_experts")]
    assert bool(experts) == (name == "int4-mtp"), "these recipes keep the layer as published, but for one"


def draft_layers(folder: Path) -> tuple[str, ...]:
    """Prefixes of the layers that vLLM leaves to the draft model of speculative decoding."""
    config = json.loads((folder / "config.json").read_text())
    count = config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{config['num_hidden_layers'] + i}." for i in range(count))
