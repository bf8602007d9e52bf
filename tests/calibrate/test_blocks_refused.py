"""Models and checkpoints that cannot run block by block are refused with the reason, before a weight is read.

pytest tests/calibrate/test_blocks_refused.py
"""

import json
import re

import pytest
import torch
from families import FAMILIES, load_tensors
from model_weights import InMemory, set_config
from quantkit.calibrate.blocks import open_model
from quantkit.kernels.errors import QuantkitError


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return FAMILIES["qwen3_moe"](tmp_path_factory.mktemp("moe"))


def refused(folder, tensors, message, **options):
    weights = InMemory(tensors)
    with pytest.raises(QuantkitError, match=message) as error:
        open_model(folder, weights, **options)
    assert weights.read_names == []
    return error.value


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_families_whose_layers_share_more_than_hidden_states(model_type, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, num_hidden_layers=6, num_kv_shared_layers=2).save_pretrained(tmp_path)
    error = refused(tmp_path, {}, "cannot be run block by block")
    assert error.value == "num_kv_shared_layers = 2"


def test_weights_beside_the_layers(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    error = refused(tmp_path, {}, "weights beside layers, embedding, norm and head")
    assert error.value == "transformer.wpe"


def test_code_of_the_model_itself_is_not_run(tmp_path):
    config = {"model_type": "own_model", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass M: pass\n")
    error = refused(tmp_path, {}, "brings its own Python code")
    assert "--trust-remote-code" in error.hint
    assert not (tmp_path / "ran").exists()


def test_a_known_model_needs_no_code_of_its_own(moe, tmp_path):
    (tmp_path / "config.json").write_text((moe / "config.json").read_text())
    set_config(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"})
    assert open_model(tmp_path, InMemory(load_tensors(moe))).num_blocks == 2


def test_a_model_that_transformers_lacks(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own_model"}')
    assert refused(tmp_path, {}, "transformers does not know the model").value == "own_model"
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, {}, "config.json cannot be read")


def test_a_model_that_predicts_no_text(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    refused(tmp_path, {}, "no causal language model")


@pytest.mark.parametrize(
    ("change", "message", "name"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"), "1 tensors that the model needs", "q_proj"),
        (lambda t: t.pop("lm_head.weight"), "1 tensors that the model needs", "lm_head"),
        (lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"), "experts of a layer are not complete", "up"),
        (lambda t: t.update({"model.layers.1.mlp.experts.3.down_proj.weight": torch.zeros(8, 8)}), "complete", "down"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(8)}), "shape that config.json implies", "norm"),
        (lambda t: t.update({"model.layers.1.self_attn.sinks": torch.zeros(4)}), "no place for a tensor", "sinks"),
        (lambda t: t.update({"model.layers.1.mlp.gate.per_expert_scale": torch.ones(4)}), "no place", "per_expert"),
        (lambda t: t.update({"layers.1.input_layernorm.weight": torch.zeros(256)}), "two tensors", "input_layernorm"),
    ],
)
def test_checkpoints_that_do_not_fill_the_model(change, message, name, moe):
    tensors = load_tensors(moe)
    change(tensors)
    assert re.search(name, refused(moe, tensors, message).tensor)


def test_cache_scales_and_layers_after_the_last_are_left_out(moe):
    tensors = load_tensors(moe)
    extra = ["model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale", "model.layers.2.eh_proj.weight"]
    assert open_model(moe, InMemory(tensors | dict.fromkeys(extra, torch.zeros(1)))).unused == tuple(extra)


def test_a_name_or_a_shape_that_the_block_does_not_have(moe):
    model = open_model(moe, InMemory(load_tensors(moe)))
    with model.block(0) as block:
        with pytest.raises(QuantkitError, match="no such layer in this block"):
            block.weight("model.layers.1.self_attn.q_proj")
        with pytest.raises(QuantkitError, match="another shape"):
            block.replace("model.layers.0.self_attn.k_proj", torch.zeros(256, 64))
