"""What observers see, against hooks and the KV cache of the ordinary model; and keys and values passed through a cache.

    pytest tests/calibrate/test_observe.py

Letters: N samples, L tokens of a sample, T tokens of all, H KV heads, Q query heads, D head values, E experts.
"""

from unittest.mock import Mock

import pytest
import torch
from families import FAMILIES, load_tensors
from model_weights import plain, reference, token_ids
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.blocks import open_model
from transformers import DynamicCache

LENGTH = 24  # shorter than gpt-oss's window, so that the cache holds every token
MLA = ("deepseek_v3", "glm_moe_dsa")


class Seen:
    """Everything that was observed, in order."""

    def __init__(self):
        self.inputs, self.kv_rows, self.latents = {}, {}, {}

    def linear(self, modules, x_TI):
        assert not x_TI.requires_grad
        for name in modules:
            assert name not in self.inputs, "shown twice in one run"
            self.inputs[name] = x_TI

    def kv(self, layer, q_TQD, k_THD, v_THD):
        self.kv_rows[layer] = (q_TQD, k_THD, v_THD)

    def latent(self, layer, row_TC):
        self.latents[layer] = row_TC


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    runs = {}

    def make(family):
        if family not in runs:
            folder = FAMILIES[family](tmp_path_factory.mktemp(family) / "source")
            runs[family] = folder, open_model(folder, plain(folder)), reference(folder)
        return runs[family]

    return make


def observe(model, ids, cache=None, memory=None):
    seen, state = Seen(), model.start(ids)
    for i in range(model.num_blocks):
        with model.block(i, memory=memory) as block:
            state = block.run(state, seen, cache)
    return seen, model.logits(state)


def hooked(full, ids):
    """Inputs of every linear layer and of every experts module of the ordinary model."""
    inputs, routed, handles = {}, {}, []
    for name, module in full.named_modules():
        if isinstance(module, torch.nn.Linear):

            def keep(_, args, name=name):
                inputs[name] = args[0].flatten(0, -2)

            handles.append(module.register_forward_pre_hook(keep))
        elif name.endswith(".experts"):

            def keep_routed(_, args, name=name):
                routed[name] = args

            handles.append(module.register_forward_pre_hook(keep_routed))
    with torch.no_grad():
        full(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs, routed


def by_value(x_TI):
    """Rows in an order of their own: an expert's tokens come in any order."""
    return x_TI[torch.argsort(x_TI.double() @ torch.arange(1.0, x_TI.shape[1] + 1, dtype=torch.float64))]


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", *MLA])
def test_inputs_of_every_linear_layer_and_of_every_expert(family, memory, made):
    folder, model, full = made(family)
    ids = token_ids(2, LENGTH)
    seen, _ = observe(model, ids, memory=memory)
    inputs, routed = hooked(full, ids)
    tensors = {n: t.float() for n, t in load_tensors(folder).items()}
    expected = {n: x for n, x in inputs.items() if n != "lm_head" and not n.endswith("shared_expert_gate")}
    for module, (hidden, index, _) in routed.items():
        for e in range(4):
            x = hidden[(index == e).any(-1)]
            if len(x):  # no call for an expert that saw nothing
                expected |= expert_inputs(family, module, e, x, tensors)
    assert seen.inputs.keys() == expected.keys()
    for name, x in expected.items():
        got, want = (by_value(x), by_value(seen.inputs[name])) if ".experts." in name else (seen.inputs[name], x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert (len(routed) > 0) == (family != "llama")


def expert_inputs(family, module, e, x, tensors):
    """What enters the matrices of one expert, computed from the weights of the checkpoint."""
    if family == "gpt_oss":
        both = x @ tensors[f"{module}.gate_up_proj"][e] + tensors[f"{module}.gate_up_proj_bias"][e]
        gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
        return {
            f"{module}.gate_up_proj.{e}": x,
            f"{module}.down_proj.{e}": (up + 1) * gate * torch.sigmoid(1.702 * gate),
        }
    if family == "mixtral":
        module, names = module.replace("mlp", "block_sparse_moe"), ("w1", "w3", "w2")
    else:
        names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (f"{module}.{e}.{n}" for n in names)
    h = torch.nn.functional.silu(x @ tensors[f"{gate}.weight"].T) * (x @ tensors[f"{up}.weight"].T)
    return {gate: x, up: x, down: h}


def test_an_expert_without_tokens_is_not_shown(made):
    _, model, full = made("qwen3_moe")
    ids = token_ids(1, 1)
    seen, _ = observe(model, ids)
    _, routed = hooked(full, ids)
    ((module, (_, index, _)),) = routed.items()
    names = {n for n in seen.inputs if ".experts." in n}
    assert names == {f"{module}.{e}.{p}_proj" for e in index.flatten().tolist() for p in ("gate", "up", "down")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "phi3", "gpt_oss"])
def test_keys_and_values_are_those_of_the_cache(family, made):
    _, model, full = made(family)
    ids = token_ids(2, LENGTH)
    seen, logits = observe(model, ids)
    with torch.no_grad():
        want = full(ids, past_key_values=DynamicCache(config=full.config), use_cache=True)
    for i, layer in enumerate(want.past_key_values.layers):
        q_TQD, k_THD, v_THD = seen.kv_rows[i]
        assert torch.equal(k_THD, layer.keys.transpose(1, 2).flatten(0, 1))
        assert torch.equal(v_THD, layer.values.transpose(1, 2).flatten(0, 1))
        assert q_TQD.shape == (2 * LENGTH, 4, k_THD.shape[2])
    assert not seen.latents
    assert torch.equal(logits, want.logits.flatten(0, 1))  # watching changes nothing


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_queries_and_keys_give_the_attention_of_the_ordinary_model(family, made):
    """Scores from what was shown, by softmax in float64, against the input of the output projection."""
    folder, model, _ = made(family)
    seen, _ = observe(model, token_ids(1, LENGTH))
    tensors = load_tensors(folder)
    for i, (q_TQD, k_THD, v_THD) in seen.kv_rows.items():
        q, k, v = q_TQD.double(), *(t.double().repeat_interleave(2, 1) for t in (k_THD, v_THD))
        scores = torch.einsum("tqd,sqd->qts", q, k) / 32**0.5
        scores += torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
        if family == "gpt_oss":
            sinks = tensors[f"model.layers.{i}.self_attn.sinks"].double()
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, LENGTH, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :LENGTH]
        if family == "gpt_oss":
            weights = weights[..., :LENGTH]
        out = torch.einsum("qts,sqd->tqd", weights, v).flatten(1)
        torch.testing.assert_close(
            seen.inputs[f"model.layers.{i}.self_attn.o_proj"].double(), out, rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize("family", MLA)
def test_latent_rows_are_the_normalised_latent_and_the_roped_key(family, made):
    _, model, full = made(family)
    ids = token_ids(2, LENGTH)
    seen, _ = observe(model, ids)
    latents = {}
    handles = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda m, a, out, i=i: latents.update({i: out}))
        for i, layer in enumerate(full.model.layers)
    ]
    with torch.no_grad():
        cache = full(ids, past_key_values=DynamicCache(config=full.config), use_cache=True).past_key_values
    for handle in handles:
        handle.remove()
    assert sorted(seen.latents) == list(range(model.num_blocks))
    assert not seen.kv_rows
    for i, row_TC in seen.latents.items():
        assert torch.equal(row_TC[:, :128], latents[i].flatten(0, 1))
        keys_NHLD = cache.layers[i].keys
        for head in range(4):
            assert torch.equal(row_TC[:, 128:], keys_NHLD[:, head, :, 64:].flatten(0, 1))


def coarse(x):
    """Three bits after the point: far from what went in."""
    return torch.round(x * 8) / 8


class Coarse(DynamicCache):
    """A cache of the ordinary model that gives back rounded keys and values; of MLA only what the latent leaves."""

    def __init__(self, config, nope):
        super().__init__(config=config)
        self.nope = nope

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values, *args, **kwargs)
        if self.nope is None:
            return coarse(keys), coarse(values)
        return torch.cat((keys[..., : self.nope], coarse(keys[..., self.nope :])), -1), values


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", *MLA])
def test_the_attention_reads_what_the_cache_gives_back(family, made):
    _, model, full = made(family)
    ids = token_ids(2, LENGTH)
    layers = []

    def cache(layer, k_THD, v_THD):
        assert k_THD.shape[0] == v_THD.shape[0] == 2 * LENGTH
        layers.append(layer)
        return coarse(k_THD), coarse(v_THD)

    _, plainly = observe(model, ids)
    seen, logits = observe(model, ids, cache)
    mla = family in MLA
    handles = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda m, a, out: coarse(out))
        for layer in full.model.layers
        if mla
    ]
    with torch.no_grad():
        want = full(ids, past_key_values=Coarse(full.config, 64 if mla else None), use_cache=True).logits.flatten(0, 1)
    for handle in handles:
        handle.remove()
    assert torch.equal(logits, want)
    assert not torch.equal(logits, plainly)
    assert layers == sorted([*range(model.num_blocks)] * (2 if mla else 1))
    rows = seen.latents[0] if mla else seen.kv_rows[0][1]
    assert not torch.equal(rows, coarse(rows))  # the observer sees what goes into the cache


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_showing_some_sets_stops_early_and_shows_the_same(family, made):
    _, model, _ = made(family)
    states = Activations([model.start(token_ids(2, LENGTH))], memory=1 << 30)
    for wanted in (slice(None), slice(0, 1)):
        with model.block(0) as block:
            sets = block.linears()[wanted]
            whole, part, ends = Seen(), Seen(), Mock(return_value=None)
            hook = block.module.register_forward_hook(ends)
            block.run(states[0], whole)
            given = list(block.show_all(states, part, sets))
            hook.remove()
        assert torch.equal(given[0].hidden, states[0].hidden)
        for names in sets:
            assert (names[0] in part.inputs) == (names[0] in whole.inputs)  # not every expert gets a token
            if names[0] in whole.inputs:
                assert torch.equal(part.inputs[names[0]], whole.inputs[names[0]])
        stopped = not any(".experts." in n for names in sets for n in names)
        assert ends.call_count == (1 if stopped else 2), "the block was run to its end where it need not be"
    states.close()


def test_tables_of_transformers_are_as_before_even_after_an_error(made):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    _, model, _ = made("qwen3_moe")
    before = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_EXPERTS_FUNCTIONS)

    class Fails(Seen):
        def kv(self, *args):
            raise KeyError

    state = model.start(token_ids(1, 4))
    with model.block(0) as block:
        with pytest.raises(KeyError):
            block.run(state, Fails())
        hooks = [m for m in block.module.modules() if m._forward_pre_hooks or m._forward_hooks]
        assert not hooks
        assert torch.isfinite(block.run(state).hidden).all()
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_EXPERTS_FUNCTIONS)) == before
