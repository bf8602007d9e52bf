"""Recipes: every shipped one loads, and each kind of mistake is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.recipe import load_recipe, with_int4_group
from quantkit.quantize.shipped import shipped

REST = '  - {match: {role: "*"}, keep: true}\n'


def test_every_shipped_recipe_loads_and_says_what_it_does() -> None:
    names = dict(shipped())
    assert {
        "int4",
        "int4-experts",
        "nvfp4",
        "nvfp4-experts",
        "mxfp4-experts",
        "fp8-block",
        "fp8-channel",
        "keep",
    } <= set(names)
    assert {"models/glm-5.2-int4", "models/kimi-k2.6"} <= set(names)
    for name, line in names.items():
        assert line.endswith("."), name
        assert all(r.weights for r in load_recipe(name).split())


BAD = [
    ("weights: [", "not valid YAML"),
    ("- 1", "not a mapping"),
    ("weights: []", "weights"),
    ("weight:\n" + REST, "weight: unknown key"),
    ("weights:\n  - {match: {role: attention}, scheme: int3}\n" + REST, "unknown scheme 'int3'"),
    ("weights:\n  - {match: {role: attention}, scheme: nvfp4, group: 64}\n" + REST, "`group` is for int4"),
    ("weights:\n  - {match: {role: attention}, scheme: int4-g64, keep: true}\n" + REST, "exactly one"),
    ("weights:\n  - {match: {role: attention}}\n" + REST, "exactly one"),
    ("weights:\n  - {match: {}, keep: true}\n" + REST, "either `role` or `name`"),
    ("weights:\n  - {match: {role: attention, name: x}, keep: true}\n" + REST, "either `role` or `name`"),
    ("weights:\n  - {match: {role: attention}, keep: true, methd: plain}\n" + REST, "methd: unknown key"),
    ("weights:\n  - {match: {role: attention}, scheme: int4-g64}\n", "for everything else"),
    ("weights:\n" + REST + "outputs: [{format: gguf}]", "format"),
    ("weights:\n" + REST + "outputs: [{shard_size: 50000000000}]", "shard_size"),
    (
        "weights:\n  - {match: {role: attention}, scheme: int4-g64, method: {name: awq, damp: 0.1}}\n" + REST,
        "the method 'awq' has the options clip, gptq, here: damp",
    ),
    (
        "weights:\n  - {match: {role: attention}, scheme: int4-g64, method: {name: gptq, clip: false}}\n" + REST,
        "the method 'gptq' has the options act_order, damp, here: clip",
    ),
    (
        "weights:\n  - {match: {role: attention}, scheme: int4-g64, method: {name: search, gptq: true}}\n" + REST,
        "the method 'search' has no options, here: gptq",
    ),
    ("weights:\n  - {match: {role: attention}, scheme: int4-g64, input_scale: 1.0}\n" + REST, "fp8-tensor"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(QuantkitError) as e:
        load_recipe(str(file))
    assert message in str(e.value)
    assert str(file) in str(e.value)


def test_unknown_name_says_which_there_are() -> None:
    with pytest.raises(QuantkitError) as e:
        load_recipe("int4-expert")
    assert "int4-experts" in str(e.value)
    assert "did you mean" in str(e.value)


def test_missing_file() -> None:
    with pytest.raises(QuantkitError, match="cannot read the recipe"):
        load_recipe("nothing.yaml")


def test_group_of_all_int4_rules() -> None:
    assert with_int4_group(load_recipe("int4"), "64").weights[0].group == 64
    with pytest.raises(QuantkitError, match="no INT4 rule"):
        with_int4_group(load_recipe("nvfp4"), "64")
    with pytest.raises(QuantkitError, match="unknown group"):
        with_int4_group(load_recipe("int4"), "48")
