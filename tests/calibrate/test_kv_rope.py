"""The pairing that `rope_of` reads from a configuration is the one of transformers' own model code."""

import pytest
import torch
from quantkit.calibrate.kv import rope_of
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("glm4", {"partial_rotary_factor": 0.5}),
        ("cohere", {"head_dim": 8}),
        ("ernie4_5", {}),
        ("gpt_oss", EXPERTS),
        ("phi", {"partial_rotary_factor": 0.5, "head_dim": 8}),
        ("phi3", {"head_dim": 8}),
        ("deepseek_v3", MLA),
    ],
)
def test_pairs_keep_their_length_at_every_position(kind, more):
    """The same token at every position: the keys of the first layer differ by their rotation only."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        cache = model(torch.full((1, 40), 5), use_cache=True).past_key_values
    k_THD = cache.layers[0].keys[0].transpose(0, 1)
    rope = rope_of(config.to_dict())
    if kind == "deepseek_v3":  # its heads begin with values that are not rotated; the roped row is what remains
        k_THD = k_THD[..., -config.qk_rope_head_dim :]
    assert not torch.allclose(k_THD[0], k_THD[20], rtol=1e-2), "RoPE turns keys"
    x = k_THD[..., : rope.width]
    pairs = {True: (x[..., 0::2], x[..., 1::2]), False: x.chunk(2, -1)}
    lengths = {way: torch.hypot(*pair) for way, pair in pairs.items()}
    assert torch.allclose(lengths[rope.interleaved], lengths[rope.interleaved][:1], rtol=1e-4, atol=1e-6)
    other = lengths[not rope.interleaved]
    assert not torch.allclose(other, other[:1], rtol=1e-2)
    if rope.width is not None:
        rest = k_THD[..., rope.width :]
        assert rest.shape[-1] and torch.allclose(rest, rest[:1], rtol=1e-4, atol=1e-6)
