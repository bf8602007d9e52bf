"""Block by block against the ordinary forward of transformers: the same bits, for every family and source format.

pytest tests/calibrate/test_blocks.py
"""

import re

import pytest
import torch
from families import FAMILIES, load_tensors, read_config, write_config
from model_weights import InMemory, plain, reference, token_ids
from quantised import as_ct_int4, as_fp8_block
from quantised_fp4 import as_gptoss_mxfp4
from quantkit.calibrate.blocks import open_model

KEYS = {"deepseek_v32": 37, "glm4_moe": 34, "glm_moe_dsa": 35, "kimi": 23}  # tensors of MTP layers and vision towers


def run(model, ids, memory=None):
    """Hidden states after the embedding and after each block, and logits."""
    state = model.start(ids)
    hidden = [state.hidden]
    for i in range(model.num_blocks):
        with model.block(i, memory=memory) as block:
            state = block.run(state)
        hidden.append(state.hidden)
    return hidden, model.logits(state)


def assert_same(model, full, ids):
    hidden, logits = run(model, ids)
    with torch.no_grad():
        want = full(ids, use_cache=False, output_hidden_states=True)
    for i, (got, expected) in enumerate(zip(hidden[:-1], want.hidden_states[:-1], strict=True)):
        assert torch.equal(got, expected), f"before block {i}: {(got - expected).abs().max()}"
    assert torch.equal(logits, want.logits.flatten(0, 1)), (logits - want.logits.flatten(0, 1)).abs().max()
    return logits


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tiny checkpoints by family, each made once."""
    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = FAMILIES[family](tmp_path_factory.mktemp(family) / "source")
        return folders[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_bits_of_the_ordinary_forward(family, made):
    folder = made(family)
    model = open_model(folder, plain(folder))
    if family == "kimi":  # transformers knows it as DeepSeek-V3
        tensors = {n: t for n, t in load_tensors(folder).items() if n.startswith("language_model.")}
        full = reference(with_type(folder, "deepseek_v3"), tensors, "language_model.")
    else:
        full = reference(folder)
    assert_same(model, full, token_ids(1, 50, seed=1))  # longer than GLM's top-16 and gpt-oss's window of 32
    ids = token_ids(2, 40)
    logits = assert_same(model, full, ids)
    assert torch.equal(run(model, ids, memory=1)[1], logits)  # every routed expert read when it is needed
    assert len(model.unused) == KEYS.get(family, 0)
    assert not [n for n in model.unused if "layers.0." in n and "vision" not in n]


def with_type(folder, model_type):
    config = read_config(folder)
    config["text_config"]["model_type"] = model_type
    copy = folder.with_name("as-" + model_type)
    copy.mkdir(exist_ok=True)
    write_config(copy, config)
    return copy


def test_bfloat16_gives_the_bits_of_the_ordinary_forward(made):
    folder = made("qwen3_moe")
    ids = token_ids(1, 30)
    full = reference(folder, dtype=torch.bfloat16)
    model = open_model(folder, plain(folder), dtype=torch.bfloat16)
    assert model.start(ids).hidden.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(run(model, ids)[1], full(ids).logits[0].float())


@pytest.mark.parametrize(
    ("family", "quantise"),
    [("deepseek_v3", as_fp8_block), ("qwen3_moe", as_ct_int4), ("gpt_oss", as_gptoss_mxfp4)],
)
def test_a_quantised_source_runs_as_its_decoded_weights(family, quantise, made, tmp_path):
    folder = made(family)
    decoded = {n: torch.from_numpy(t) for n, t in quantise(folder, tmp_path / "quantised").items()}
    left = {n: t for n, t in load_tensors(folder).items() if n not in decoded}
    model = open_model(tmp_path / "quantised", InMemory(left, decoded))
    flip = {n: t.transpose(1, 2) if t.ndim == 3 else t for n, t in decoded.items()}  # gpt-oss's model: inputs first
    full = reference(folder, {n: t.float() for n, t in (left | flip).items()})
    ids = token_ids(2, 40)
    logits = assert_same(model, full, ids)
    assert torch.equal(run(model, ids, memory=1)[1], logits)
    assert not torch.equal(logits, run(open_model(folder, plain(folder)), ids)[1])


def test_nothing_is_read_before_a_block_and_nothing_stays_after_it(made):
    folder = made("glm_moe_dsa")
    weights = plain(folder)
    model = open_model(folder, weights)
    assert weights.read_names == []
    state = model.start(token_ids(1, 8))
    assert weights.read_names == ["model.embed_tokens.weight"]
    for i in range(model.num_blocks):
        weights.read_names.clear()
        with model.block(i) as block:
            state = block.run(state)
        inside = [n for n in load_tensors(folder) if n.startswith(f"model.layers.{i}.")]
        assert sorted(weights.read_names) == sorted(inside)
    with pytest.raises(KeyError), model.block(0):
        raise KeyError
    assert all(p.is_meta for p in model.model.parameters())


def test_embeddings_and_head_are_read_once_for_many_samples(made):
    folder = made("llama_tied")
    weights = plain(folder)
    model = open_model(folder, weights)
    with model.embeddings():
        states = [model.start(token_ids(1, 5, seed=s)) for s in range(3)]
    with model.head():
        logits = [model.logits(s) for s in states]
    assert weights.read_names == ["model.embed_tokens.weight", "model.norm.weight", "model.embed_tokens.weight"]
    assert logits[0].shape == (5, 384)
    assert all(p.is_meta for p in model.model.parameters())


ATTENTION = [["q_proj", "k_proj", "v_proj"], ["o_proj"]]
LATENT = [["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"], ["kv_b_proj"], ["o_proj"]]
SPARSE = [
    ["q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj"], ["q_b_proj", "wq_b"], ["kv_b_proj"], ["o_proj"],
]  # fmt: skip
GATED = [["gate_proj", "up_proj"], ["down_proj"]]
SETS = {  # of the last block, and of one routed expert
    "llama": (ATTENTION + GATED, []),
    "phi3": ([["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]], []),
    "qwen2_moe": (ATTENTION + GATED, GATED),
    "qwen3_moe": (ATTENTION, GATED),
    "mixtral": (ATTENTION, [["w1", "w3"], ["w2"]]),
    "minimax_m2": (ATTENTION, [["w1", "w3"], ["w2"]]),
    "deepseek_v3": (LATENT + GATED, GATED),
    "deepseek_v32": (SPARSE + GATED, GATED),
    "glm_moe_dsa": (LATENT + GATED, GATED),  # its last layer has no indexer
    "gpt_oss": (ATTENTION, [["gate_up_proj"], ["down_proj"]]),
}


@pytest.mark.parametrize("family", SETS)
def test_layers_that_see_the_same_input_are_one_set(family, made):
    folder = made(family)
    model = open_model(folder, plain(folder))
    with model.block(model.num_blocks - 1) as block:
        sets = block.linears()
    common, expert = SETS[family]

    def leaf(name):
        return re.sub(r"\.\d+$", "", name).rpartition(".")[2]

    routed = [s for s in sets if re.search(r"\.experts\.", s[0])]
    assert [[leaf(n) for n in s] for s in sets if s not in routed] == common
    assert [[leaf(n) for n in s] for s in routed] == expert * 4
    fused = family == "gpt_oss"
    numbers = [int(re.search(r"\.(\d+)$" if fused else r"experts\.(\d+)\.", n)[1]) for s in routed for n in s]
    assert numbers == sorted(numbers)
    names = set(load_tensors(folder))
    stored = {re.sub(r"\.\d+$", "", n) if fused and ".experts." in n else n + ".weight" for s in sets for n in s}
    assert stored <= names
    assert not [n for n in stored if re.search(r"(?:mlp|moe)\.(?:gate|router)\.weight|shared_expert_gate", n)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("memory", [None, 1, 2_000_000])
def test_overwritten_weights_are_what_runs(family, memory, made):
    folder = made(family)
    tensors = {n: t.float() for n, t in load_tensors(folder).items()}
    model = open_model(folder, InMemory(tensors))
    ids = token_ids(2, 30)
    state = model.start(ids)
    with model.block(0) as block:
        state = block.run(state)
    changed = dict(tensors)
    with model.block(1, memory=memory) as block:
        for names in block.linears():
            for name in names:
                fused = family == "gpt_oss" and ".experts." in name
                stem, _, number = name.rpartition(".")
                old = tensors[stem][int(number)].T if fused else tensors[f"{name}.weight"]
                assert torch.equal(block.weight(name), old)
                new = old + 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(len(name)))
                block.replace(name, new)
                assert torch.equal(block.weight(name), new)
                if fused:
                    changed[stem] = changed[stem].clone()
                    changed[stem][int(number)] = new.T
                else:
                    changed[f"{name}.weight"] = new
        norm = "model.layers.1.input_layernorm"
        changed[norm + ".weight"] = tensors[norm + ".weight"] * 1.5
        block.replace(norm, changed[norm + ".weight"])
        first, second = block.run(state), block.run(state)
    assert torch.equal(first.hidden, second.hidden)
    with torch.no_grad():
        want = reference(folder, changed)(ids, use_cache=False).logits.flatten(0, 1)
    assert torch.equal(model.logits(first), want)
    with model.block(1, memory=memory) as block:  # loaded again, it is the checkpoint's
        assert torch.equal(block.weight(norm), tensors[norm + ".weight"])
        assert not torch.equal(block.run(state).hidden, first.hidden)


def test_experts_over_the_budget_stay_in_memory_as_far_as_they_fit(made):
    folder = made("qwen3_moe")
    weights = plain(folder)
    model = open_model(folder, weights)
    state = model.start(token_ids(2, 40))
    expert = 3 * 256 * 128 * 4
    dense = sum(t.numel() * 4 for n, t in weights.tensors.items() if "layers.1." in n and "experts" not in n)
    reads = []
    for memory in (None, dense + 4 * expert, dense + 3 * expert, dense, 1):
        with model.block(1, memory=memory) as block:
            block.run(state)
            weights.read_names.clear()
            out = block.run(state).hidden
            reads.append(sum("experts" in n for n in weights.read_names))
            if memory is None:
                first = out
        assert torch.equal(out, first)
    assert reads == [0, 0, 2 * 3, 4 * 3, 4 * 3]  # at dense + 3: two resident, one in use at a time
