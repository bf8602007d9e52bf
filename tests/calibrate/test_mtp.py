"""The MTP layer as a block behind the last: states, inputs of its layers and Hessians against a layer written by hand."""

import pytest
import torch
from families import FAMILIES, deepseek_with_mtp, load_tensors
from model_weights import InMemory, plain, reference, token_ids
from mtp_reference import run_mtp
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.watch import Watch
from quantkit.kernels.errors import QuantkitError

MAKERS = {n: FAMILIES[n] for n in ("deepseek_v32", "glm4_moe", "glm_moe_dsa")} | {"deepseek_v3": deepseek_with_mtp}


class Inputs:
    """An observer that keeps what enters every layer, under the name inside its block."""

    def __init__(self):
        self.found = {}
        self.kv_layers = set()

    def linear(self, modules, x_TI):
        for name in modules:
            self.found.setdefault(name.split(".", 3)[3], []).append(x_TI)

    def kv(self, layer, *_):
        self.kv_layers.add(layer)

    def latent(self, layer, *_):
        self.kv_layers.add(layer)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = MAKERS[family](tmp_path_factory.mktemp(family) / "m")
        return folders[family]

    return make


def at_mtp(model, ids, memory=None):
    """Activations that enter the MTP layer."""
    states = Activations((model.start(i) for i in ids), memory=1 << 28)
    for index in range(model.mtp):
        with model.block(index, memory=memory) as block:
            for i, state in block.run_all(states):
                states[i] = state
    model.enter_mtp(states, ids)
    return states


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("memory", [None, 1])
def test_states_and_inputs_are_those_of_a_layer_written_by_hand(family, memory, made):
    ids = token_ids(3, 40).split(2)
    model = open_model(made(family), plain(made(family)), mtp=True)
    assert model.mtp == model.num_blocks - 1 == reference(made(family)).config.num_hidden_layers
    seen = Inputs()
    with at_mtp(model, ids, memory) as states, model.block(model.mtp, memory=memory) as block:
        hidden = [state.hidden for _, state in block.run_all(states, seen)]
        linears = {n.split(".", 3)[3] for names in block.linears() for n in names}
    want = [run_mtp(made(family), i) for i in ids]
    for got, expected in zip(hidden, want, strict=True):
        close(got, expected.hidden)
    assert seen.kv_layers == {model.mtp}
    for name, parts in seen.found.items():
        routed = name.startswith("mlp.experts.")
        key = name.rpartition(".")[0] if routed else name
        if routed and name.endswith("down_proj"):
            continue  # the reference does not look inside of experts
        x_TI, want_TI = torch.cat(parts), torch.cat([w.inputs[key] for w in want if key in w.inputs])
        if not routed:
            close(x_TI, want_TI)
        else:  # tokens come in another order
            close(x_TI[x_TI[:, 0].argsort()], want_TI[want_TI[:, 0].argsort()])
    assert {"eh_proj", "mlp.shared_experts.gate_proj"} <= seen.found.keys() <= linears


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_hessians_are_those_of_brute_force(family, made):
    ids = token_ids(4, 40).split(2)
    model = open_model(made(family), plain(made(family)), mtp=True)
    with at_mtp(model, ids) as states, model.block(model.mtp) as block:
        sets = [names for names in block.linears() if ".experts." not in names[0]]
        watch = Watch(sets)
        for _ in block.show_all(states, watch, sets):
            pass
        found = {names[0].split(".", 3)[3]: watch.hessian(names, block.shape(names[0])[1]) for names in sets}
    inputs = [run_mtp(made(family), i).inputs for i in ids]
    assert {"eh_proj", "self_attn.q_a_proj", "self_attn.o_proj", "mlp.shared_experts.down_proj"} <= found.keys()
    for name, hessian in found.items():
        x_TI = torch.cat([i[name] for i in inputs]).double()
        want_II = 2 / len(x_TI) * x_TI.T @ x_TI
        assert hessian.tokens == len(x_TI) == 4 * 39
        close(hessian.h_II.double(), want_II)


def test_a_model_without_it_is_as_before(made):
    folder = made("deepseek_v3")
    weights, ids = plain(folder), token_ids(2, 20)
    model = open_model(folder, weights)
    assert model.mtp is None and model.num_blocks == 2
    other = open_model(folder, plain(folder), mtp=True)
    states = [m.start(ids) for m in (model, other)]
    for index in range(model.num_blocks):
        for i, m in enumerate((model, other)):
            with m.block(index) as block:
                states[i] = block.run(states[i])
    assert torch.equal(states[0].hidden, states[1].hidden)
    assert torch.equal(model.logits(states[0]), other.logits(states[1]))
    assert not [n for n in weights.read_names if "layers.2." in n]


def test_a_family_without_the_layer_has_none(made, tmp_path):
    folder = FAMILIES["qwen3_moe"](tmp_path / "m")
    assert open_model(folder, plain(folder), mtp=True).mtp is None
    tensors = load_tensors(made("deepseek_v3"))
    without = {n: t for n, t in tensors.items() if "hnorm" not in n}
    assert open_model(made("deepseek_v3"), InMemory(without), mtp=True).mtp is None
    two = tensors | {n.replace("layers.2.", "layers.3."): t for n, t in tensors.items() if "layers.2." in n}
    assert open_model(made("deepseek_v3"), InMemory(two), mtp=True).mtp is None


def test_a_tensor_that_the_layer_has_no_place_for(made):
    tensors = load_tensors(made("deepseek_v3")) | {"model.layers.2.final_layernorm.weight": torch.ones(256)}
    with pytest.raises(QuantkitError, match="no place for a tensor"):
        open_model(made("deepseek_v3"), InMemory(tensors), mtp=True)
    assert open_model(made("deepseek_v3"), InMemory(tensors)).mtp is None
