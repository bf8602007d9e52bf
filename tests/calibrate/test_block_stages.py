"""All samples through a block in step, against the ordinary model whose weights are changed between whole runs.

pytest tests/calibrate/test_block_stages.py
"""

from collections import Counter

import pytest
import torch
from families import FAMILIES
from model_weights import plain, token_ids
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.block_stages import stages
from quantkit.calibrate.blocks import open_model
from transformers import AutoModelForCausalLM

SAMPLES = [token_ids(2, 20 + s, seed=s) for s in range(3)]
FACTOR = 0.75


class Seen:
    """What is shown of each set, in order; keys and latent rows."""

    def __init__(self):
        self.inputs, self.rows, self.calls = {}, [], Counter()

    def linear(self, modules, x_TI):
        self.calls[modules] += 1
        self.inputs.setdefault(modules, []).append(x_TI.clone())

    def kv(self, layer, q_TQD, k_THD, v_THD):
        self.rows.append(torch.cat((k_THD.flatten(), v_THD.flatten())))

    def latent(self, layer, row_TC):
        self.rows.append(row_TC.flatten())


def ordinary(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def inputs_of(model, modules, index):
    """What enters these modules for each sample, and what leaves layer `index`."""
    found, left = {name: [] for name in modules}, []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: found[name].append(args[0].flatten(0, -2).clone())
        )
        for name in modules
    ]
    layer = model.get_submodule(f"model.layers.{index}")
    handles.append(
        layer.register_forward_hook(lambda _, args, out: left.append(out[0] if isinstance(out, tuple) else out))
    )
    with torch.no_grad():
        for ids in SAMPLES:
            model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found, left


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "glm_moe_dsa", "gpt_oss"])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_each_layer_sees_those_before_it_as_they_are_served(family, room, tmp_path):
    folder = FAMILIES[family](tmp_path / "source")
    model, reference = open_model(folder, plain(folder), scratch=tmp_path), ordinary(folder)
    index = 1
    states = Activations((model.start(ids) for ids in SAMPLES), memory=1 << 28, folder=tmp_path)
    with model.block(0) as block:
        for i, state in block.run_all(states):
            states[i] = state
    seen, shown, expected = Seen(), [], {}
    with model.block(index) as block:
        sets = [names for names in block.linears() if block.comes_to([names])]
        assert len(sets) >= 2
        for names in sets:
            expected |= inputs_of(reference, names, index)[0]
            for name in names:
                with torch.no_grad():
                    reference.get_submodule(name).weight.mul_(FACTOR)
        widest = max(block.shape(names[0])[1] for names in sets)
        held = states[0].nbytes * 6 + states[0].hidden.nbytes // states[0].hidden.shape[-1] * widest
        for names in stages(block, states, sets, seen, held * room):
            shown.append(names)
            for name in names:
                for found, wanted in zip(seen.inputs[names], expected[name], strict=True):
                    assert torch.equal(found, wanted), (name, float((found - wanted).abs().max()))
                block.replace(name, block.weight(name) * FACTOR)
    assert sorted(shown) == sorted(sets)
    assert {seen.calls[names] for names in sets} == {len(SAMPLES)}
    assert len(seen.rows) == len(SAMPLES)
    _, left = inputs_of(reference, (), index)
    for state, wanted in zip(states, left, strict=True):
        assert torch.equal(state.hidden, wanted)


def test_a_caller_that_leaves_early_leaves_the_model_as_it_was(tmp_path):
    folder = FAMILIES["llama"](tmp_path / "source")
    model = open_model(folder, plain(folder))
    states = Activations((model.start(ids) for ids in SAMPLES), memory=1 << 28, folder=tmp_path)
    with model.block(0) as block:
        before = [block.run(state).hidden for state in states]
        walk = stages(block, states, block.linears(), Seen(), 1 << 28)
        next(walk)
        next(walk)
        walk.close()
        assert torch.is_grad_enabled()
        assert all(torch.equal(block.run(s).hidden, x) for s, x in zip(states, before, strict=True))


def test_a_set_that_no_sample_comes_to_is_given_all_the_same(tmp_path):
    folder = FAMILIES["llama"](tmp_path / "source")
    model = open_model(folder, plain(folder))
    states = Activations([model.start(SAMPLES[0])], memory=1 << 28, folder=tmp_path)
    with model.block(0) as block:
        never = ("model.layers.0.self_attn.q_proj",)  # a part of a set: nothing is shown under this name
        sets = [*block.linears(), never]
        assert list(stages(block, states, sets, Seen(), 1 << 28))[-1] == never
