"""What an FP8 cache costs attention, against attention by hand in float64 inside the ordinary model.

    pytest tests/calibrate/test_kv_errors.py

Letters: N samples, L tokens of a sample, Q query heads, H KV heads, D values of a head.
"""

import math

import pytest
import torch
from families import FAMILIES
from model_weights import plain, reference, token_ids
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.evaluate import evaluate
from quantkit.calibrate.kv_errors import CacheErrors, LayerError, fp8_cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SCALES = {0: (0.02, 0.004), 1: (0.0005, 0.0007)}  # those of layer 1 clip


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    s = torch.tensor(scale)
    return (x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s


def attend(q_NQLD, k_NHLD, v_NHLD, scaling):
    q, k, v = (x.double() for x in (q_NQLD, k_NHLD, v_NHLD))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    p = (q @ k.transpose(2, 3) * scaling).masked_fill(future, -math.inf).softmax(-1)
    return (p @ v).transpose(1, 2)


class ByHand:
    """An attention function that returns what the cache leaves, and keeps what it and scale 1.0 change."""

    def __init__(self, latents):
        self.latents = latents  # layer -> (latent, weight of kv_b), of MLA
        self.sums: dict[int, list[float]] = {}
        self.beyond: dict[int, list[float]] = {}

    def __call__(self, module, q, k, v, mask, scaling, **kwargs):
        layer, nope = module.layer_idx, getattr(module, "qk_nope_head_dim", 0)

        def keys_and_values(scales):
            if self.latents is None:
                return (k, v) if scales is None else (fp8(k, scales[0]), fp8(v, scales[1]))
            latent, w = self.latents[layer]
            through = (lambda x: x) if scales is None else (lambda x: fp8(x, scales[0]))
            both = (through(latent) @ w.T).unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
            return torch.cat((both[..., :nope], through(k[..., nope:])), -1), both[..., nope:]

        exact, stored, at_one = (
            attend(q, *keys_and_values(scales), scaling) for scales in (None, SCALES[layer], (1.0, 1.0))
        )
        sums = self.sums.setdefault(layer, [0.0, 0.0, 0.0])
        for i, x in enumerate((exact, stored - exact, at_one - exact)):
            sums[i] += float(x.square().sum())
        cached = (k, v)
        if self.latents is not None:
            cached = (torch.cat((self.latents[layer][0], k[:, 0, :, nope:]), -1), torch.zeros(1))
        self.beyond[layer] = [
            float((x.abs() > 448 * s).double().mean()) for x, s in zip(cached, SCALES[layer], strict=True)
        ]
        return stored.float(), None


@pytest.fixture(params=["llama", "deepseek_v3"])
def both(request, tmp_path):
    """(the errors of the ordinary model by hand, those of the product)."""
    folder = FAMILIES[request.param](tmp_path / "m")
    full, ids = reference(folder), token_ids(3, 40)
    latents = {} if request.param == "deepseek_v3" else None
    if latents is not None:
        for i, layer in enumerate(full.model.layers):

            def keep(_, args, out, i=i, w=layer.self_attn.kv_b_proj.weight):
                latents[i] = (out, w)
                return fp8(out, SCALES[i][0])

            layer.self_attn.kv_a_layernorm.register_forward_hook(keep)
    hand = ByHand(latents)
    ALL_ATTENTION_FUNCTIONS["by hand"] = hand
    try:
        full.config._attn_implementation = "by hand"
        with torch.no_grad():
            full(ids, use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS["by hand"]
    errors = CacheErrors(SCALES)
    models = [open_model(folder, plain(folder)) for _ in range(2)]
    evaluate(*models, list(ids), cache=fp8_cache(SCALES), compare=errors.compare)
    return hand, errors.finish()


def test_errors_and_clipped_shares_are_those_of_attention_by_hand(both):
    hand, found = both
    assert [(x.layer, x.k_scale, x.v_scale) for x in found] == [(i, *SCALES[i]) for i in (0, 1)]
    for x in found:
        exact, stored, at_one = hand.sums[x.layer]
        assert x.error == pytest.approx(stored / exact, rel=2e-3)
        assert x.error_at_one == pytest.approx(at_one / exact, rel=2e-3)
        assert [x.k_clipped, x.v_clipped] == pytest.approx(hand.beyond[x.layer], abs=1e-4)
        assert x.clipped_at_one == 0
    assert 0 < found[0].error < found[1].error and 0 < found[1].k_clipped < 1
    assert found[0].k_clipped == found[0].v_clipped == 0


def test_a_cache_whose_output_is_nothing_is_infinitely_wrong():
    errors = CacheErrors({})
    errors.compare(3, torch.ones(1, 1, 1, 4), lambda cache: torch.zeros(1, 1, 1, 4))
    assert errors.finish() == (LayerError(3, 1.0, 1.0, math.inf, 0.0, 0.0, 0.0, 0.0),)


def test_a_block_whose_experts_are_swept_is_compared_once(tmp_path):
    folder = FAMILIES["qwen3_moe"](tmp_path / "m")
    ids = list(token_ids(3, 20))
    found = []
    for memory in (1 << 30, 100_000):
        errors = CacheErrors({})
        models = [open_model(folder, plain(folder)) for _ in range(2)]
        evaluate(*models, ids, cache=fp8_cache({}), compare=errors.compare, memory=memory, folder=tmp_path)
        found.append((errors.finish(), {n: s.keys for n, s in errors._layers.items()}))
    assert found[0] == found[1]
