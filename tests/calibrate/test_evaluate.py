"""Perplexity, KL divergence and agreement against float64 by hand and against two ordinary models.

    pytest tests/calibrate/test_evaluate.py

Letters: T tokens, V vocabulary, N samples, L tokens of a sample.
"""

import math

import numpy as np
import pytest
import torch
from families import FAMILIES, load_tensors
from model_weights import InMemory, plain, reference, token_ids
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.evaluate import batches, evaluate
from quantkit.calibrate.perplexity import Scores, compare_logits
from quantkit.kernels.errors import QuantkitError
from transformers import DynamicCache


def by_hand(source_TV, candidate_TV, next_T):
    """(mean nll of both, mean KL, agreement), with exponentials of float64 and no log-softmax."""
    p, q = (
        np.exp(x - x.max(-1, keepdims=True)) for x in (source_TV.astype(np.float64), candidate_TV.astype(np.float64))
    )
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    rows = np.arange(len(next_T))
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(-1).mean()
    return -np.log(p[rows, next_T]).mean(), -np.log(q[rows, next_T]).mean(), kl, (p.argmax(-1) == q.argmax(-1)).mean()


@pytest.mark.parametrize("tokens", [1, 2, 7, 128, 129, 300])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0])
def test_scores_are_those_of_float64(tokens, noise):
    rng = np.random.default_rng(tokens)
    source = (4 * rng.standard_normal((tokens, 500))).astype(np.float32)
    candidate = source + np.float32(noise) * rng.standard_normal(source.shape).astype(np.float32)
    ids = rng.integers(0, 500, tokens)
    got = compare_logits(*(torch.from_numpy(x) for x in (source, candidate, ids)))
    a, b, kl, agree = by_hand(source, candidate, ids)
    assert got.tokens == tokens
    assert got.perplexity_source == pytest.approx(math.exp(a), rel=1e-5)
    assert got.perplexity_candidate == pytest.approx(math.exp(b), rel=1e-5)
    assert got.kl == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert got.top1 == agree
    assert (got.kl == 0) == (noise == 0)


def test_the_divergence_runs_from_source_to_candidate_and_in_nats():
    log = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    flat = torch.zeros(2, 3)
    ids = torch.tensor([0, 1])
    got = compare_logits(log, flat, ids)
    assert got.kl == pytest.approx(math.log(3) - 1.5 * math.log(2), rel=1e-6)
    assert compare_logits(flat, log, ids).kl == pytest.approx((math.log(2 / 3) + 2 * math.log(4 / 3)) / 3, rel=1e-6)
    assert got.perplexity_source == pytest.approx(math.sqrt(8), rel=1e-6)
    assert got.perplexity_candidate == pytest.approx(3, rel=1e-6)


def test_impossible_tokens_count_nothing_and_nan_is_not_hidden():
    source = torch.tensor([[0.0, 0.0, -torch.inf]])
    both = compare_logits(source, torch.tensor([[1.0, 0.0, -torch.inf]]), torch.tensor([0]))
    assert 0 < both.kl < 1
    assert compare_logits(torch.zeros(1, 3), source, torch.tensor([0])).kl == math.inf
    assert math.isnan(compare_logits(torch.zeros(1, 3), torch.tensor([[torch.nan, 0, 0]]), torch.tensor([0])).kl)


def test_scores_of_parts_add_up():
    source, candidate = torch.randn(2, 50, 90)
    ids = torch.randint(0, 90, (50,))
    whole = compare_logits(source, candidate, ids)
    parts = sum((compare_logits(source[s], candidate[s], ids[s]) for s in (slice(13), slice(13, 50))), Scores())
    assert (parts.tokens, parts.agree) == (whole.tokens, whole.agree)
    for name in ("nll_source", "nll_candidate", "kl_sum"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    assert math.isnan(Scores().kl)
    assert math.isnan(Scores().perplexity_source)


def test_samples_of_one_length_that_follow_each_other_are_stacked():
    samples = [torch.arange(n) for n in (4, 4, 4, 2, 2, 4, 30)]
    stacked = batches(samples, 8)
    assert [tuple(b.shape) for b in stacked] == [(2, 4), (1, 4), (2, 2), (1, 4), (1, 30)]
    assert torch.equal(torch.cat([b.flatten() for b in stacked]), torch.cat(samples))


def worse(tensors):
    """A candidate: every matrix of the layers rounded to steps of 1/64."""
    return {n: torch.round(t.float() * 64) / 64 if "layers" in n and t.ndim == 2 else t for n, t in tensors.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(family):
        folder = FAMILIES[family](tmp_path_factory.mktemp(family) / "source")
        return folder, load_tensors(folder)

    return make


def ordinary(full, samples, cache=None):
    logits = []
    for ids in samples:
        with torch.no_grad():
            past = None if cache is None else cache(full.config)
            logits.append(full(ids[None], use_cache=past is not None, past_key_values=past).logits[0, :-1])
    return torch.cat(logits).numpy()


def coarse(x):
    return torch.round(x * 4) / 4


class Coarse(DynamicCache):
    def __init__(self, config):
        super().__init__(config=config)

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values, *args, **kwargs)
        return coarse(keys), coarse(values)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("through_cache", [False, True])
def test_equal_to_two_ordinary_models(family, through_cache, made, tmp_path):
    folder, tensors = made(family)
    samples = [*token_ids(5, 20), *token_ids(2, 33, seed=1)]
    changed = worse(tensors)
    models = [open_model(folder, InMemory(t)) for t in (tensors, changed)]
    seen = []
    got = evaluate(
        *models, samples,
        cache=(lambda layer, k, v: (coarse(k), coarse(v))) if through_cache else None,
        memory=100_000, folder=tmp_path, progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    source = ordinary(reference(folder), samples)
    candidate = ordinary(reference(folder, changed), samples, Coarse if through_cache else None)
    a, b, kl, agree = by_hand(source, candidate, torch.cat([s[1:] for s in samples]).numpy())
    assert got.tokens == 5 * 19 + 2 * 32
    assert got.perplexity_source == pytest.approx(math.exp(a), rel=1e-4)
    assert got.perplexity_candidate == pytest.approx(math.exp(b), rel=1e-4)
    assert got.kl == pytest.approx(kl, rel=1e-4)
    assert got.top1 == pytest.approx(agree, abs=0.5 / got.tokens)
    assert got.kl > 1e-4
    assert seen == [(i, 5) for i in range(1, 6)]
    assert not list(tmp_path.glob("activations*"))


def test_a_model_beside_itself_is_the_same_and_one_block_is_loaded_at_a_time(made):
    folder, tensors = made("llama")
    weights = [InMemory(tensors), InMemory(tensors)]
    got = evaluate(*(open_model(folder, w) for w in weights), list(token_ids(3, 9)))
    assert got.kl_sum == 0
    assert got.agree == got.tokens == 24
    assert got.nll_source == got.nll_candidate
    assert len(weights[0].read_names) == len(set(weights[0].read_names)) == len(tensors)


def test_what_cannot_be_compared(made):
    folder, tensors = made("llama")
    model = open_model(folder, InMemory(tensors))
    other = FAMILIES["qwen3"](folder.with_name("deeper"))
    longer = FAMILIES["llama"](folder.with_name("larger"), num_hidden_layers=3)
    wider = FAMILIES["llama"](folder.with_name("wider"), vocab_size=256)
    assert evaluate(model, open_model(other, plain(other)), list(token_ids(1, 5))).kl > 0
    for ids in ([], [torch.tensor([3])], [torch.tensor([3, 4]), torch.tensor([3])]):
        with pytest.raises(QuantkitError, match="at least 2 tokens"):
            evaluate(model, model, ids)
    with pytest.raises(QuantkitError, match="not the same model"):
        evaluate(model, open_model(longer, plain(longer)), list(token_ids(1, 5)))
    with pytest.raises(QuantkitError, match="different vocabularies"):
        evaluate(model, open_model(wider, plain(wider)), list(token_ids(1, 5)))
