"""Blocks larger than the budget: the same bits with any memory, and each expert read once for all samples.

pytest tests/calibrate/test_block_sweep.py
"""

from collections import Counter

import pytest
import torch
from families import FAMILIES
from model_weights import plain, token_ids
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.blocks import open_model

EXPERT = 3 * 256 * 128 * 4  # bytes of one expert of the tiny models in float32


class Totals:
    """Sums over what is shown, in the order it comes."""

    def __init__(self):
        self.hessians, self.calls, self.rows = {}, Counter(), []

    def linear(self, modules, x_TI):
        self.calls[modules] += 1
        self.hessians[modules] = self.hessians.get(modules, 0) + x_TI.T @ x_TI

    def kv(self, layer, q_TQD, k_THD, v_THD):
        self.rows.append(k_THD)

    def latent(self, layer, row_TC):
        self.rows.append(row_TC)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    runs = {}

    def make(family):
        if family not in runs:
            folder = FAMILIES[family](tmp_path_factory.mktemp(family) / "source")
            weights = plain(folder)
            runs[family] = open_model(folder, weights, scratch=tmp_path_factory.mktemp("scratch")), weights
        return runs[family]

    return make


def dense_bytes(weights, block):
    inside = f"model.layers.{block}."
    return sum(t.numel() * 4 for n, t in weights.tensors.items() if n.startswith(inside) and ".experts." not in n)


def entering(model, index):
    """States of samples of several lengths that enter block `index`."""
    states = [model.start(token_ids(2, 20 + s, seed=s)) for s in range(3)]
    for i in range(index):
        with model.block(i) as block:
            states = [block.run(s) for s in states]
    return states


def coarse(layer, k_THD, v_THD):
    return torch.round(k_THD * 8) / 8, v_THD


@pytest.mark.parametrize(
    ("family", "room", "cache"),
    [
        *(("qwen3_moe", room, None) for room in range(5)),
        *((family, room, coarse) for family in ("deepseek_v3", "glm_moe_dsa", "gpt_oss") for room in (0, 2)),
    ],
)
def test_all_samples_at_once_give_what_each_gives(family, room, cache, made, tmp_path):
    model, weights = made(family)
    index = model.num_blocks - 1  # in GLM, a layer that takes its tokens from an earlier one
    states = entering(model, index)
    each = 3 * 256 * 256 * 4 if family == "gpt_oss" else EXPERT
    fit = room * each + (dense_bytes(weights, index) if room else 1)
    want, alone = Totals(), []
    with model.block(index) as block:
        alone = [block.run(s, want, cache) for s in states]
    got = Totals()
    with Activations(states, memory=0, folder=tmp_path) as chain, model.block(index, memory=fit) as block:
        weights.read_names.clear()
        for i, state in block.run_all(chain, got, cache):
            assert torch.equal(state.hidden, alone[i].hidden)
            assert state.rest is None or torch.equal(state.rest[0], alone[i].rest[0])
            chain[i] = state
        reads = Counter(n for n in weights.read_names if ".experts." in n)
        assert set(reads.values()) <= {1}
        assert len(reads) <= 12
        assert torch.equal(chain[2].hidden, alone[2].hidden)
    assert got.calls == want.calls
    assert all(torch.equal(got.hessians[n], want.hessians[n]) for n in want.hessians)
    assert all(torch.equal(a, b) for a, b in zip(got.rows, want.rows, strict=True))


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_overwritten_experts_outlive_the_waves(room, made, tmp_path):
    model, weights = made("qwen3_moe")
    states = entering(model, 1)
    outs = []
    for memory in (None, dense_bytes(weights, 1) + room * EXPERT):
        with Activations(states, memory=10**9, folder=tmp_path) as chain, model.block(1, memory=memory) as block:
            for scale in (0.5, 0.25):  # before a sweep, and between two
                for names in block.linears():
                    for name in names:
                        block.replace(name, block.weight(name) * scale)
                outs.append([s.hidden for _, s in block.run_all(chain)])
            for name in ("model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.experts.3.down_proj"):
                assert torch.equal(block.weight(name), weights.tensors[name + ".weight"].float() / 8)
            outs.append([block.run(s).hidden for s in states])
    for a, b in zip(outs[:3], outs[3:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(outs[0][0], outs[1][0])
    assert not list(model.scratch.iterdir())


def test_a_layer_says_its_shape_without_being_read(made):
    for family, name, shape in (
        ("qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj", (128, 256)),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj", (256, 128)),
        ("qwen3_moe", "model.layers.1.input_layernorm", (256,)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj.2", (512, 256)),
    ):
        model, weights = made(family)
        with model.block(1, memory=1) as block:
            weights.read_names.clear()
            assert block.shape(name) == shape == tuple(block.weight(name).shape)
            assert len(weights.read_names) == ("experts" in name) * (1 + ("gate_proj" in name))
