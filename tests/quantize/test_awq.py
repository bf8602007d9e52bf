"""AWQ: the search of a slow oracle with real outputs, folds that change nothing, and losses that are those of outputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import awq as oracle
from oracle import gptq as gptq_oracle
from quantkit.calibrate.stats import AbsMax, HessianSum
from quantkit.kernels.cpu.rows import family, global_scale, quantize_rows, row_parts
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.methods import awq, gptq
from quantkit.quantize.methods.clip import clipped
from quantkit.quantize.methods.grid import make_grid, nearest_to


def problem(inputs=128, tokens=300):
    rng = np.random.default_rng(1)
    gain = np.ones(inputs)
    gain[::16] = 20
    x = (rng.standard_normal((tokens, inputs)) * gain).astype(np.float32)
    return x, [(rng.standard_normal((o, inputs)) / 10).astype(np.float32) for o in (24, 8)]


def statistics(x):
    h, size = HessianSum(x.shape[1]), AbsMax(x.shape[1])
    h.update(torch.from_numpy(x))
    size.update(torch.from_numpy(x))
    return h.finish().h_II, size.finish().mean_I


def rounded_to(name, amax=None):
    scheme = SCHEMES[name]

    def rounded(w):
        parts = row_parts(scheme, *w.shape)
        method = "sweep" if name == "nvfp4" else "search"
        assert quantize_rows(np.ascontiguousarray(w), scheme, method, amax, False, parts) == -1
        scale_2 = float(global_scale(scheme, amax)) if amax else 1.0
        kind = family(scheme)
        q, scale, zero = gptq_oracle.read(parts.codes, parts.scale, parts.zero, kind, w.shape[1], scale_2=scale_2)
        return (q - zero) * scale

    return rounded


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64", "int4a-g64", "mxfp4"])
def test_search_finds_what_a_search_over_real_outputs_finds(name):
    x, weights = problem()
    h, mean = statistics(x)
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES[name], half=False)
    exponent, s, error = oracle.search(x, weights, SCHEMES[name].group_size, rounded_to(name))
    assert found.exponent == exponent
    assert exponent is not None
    assert np.allclose(found.s_I.numpy(), s, rtol=1e-4)
    assert np.isclose(found.loss, error, rtol=1e-3)
    plain = oracle.output_error(x, weights, np.ones(x.shape[1]), rounded_to(name))
    assert np.isclose(found.loss_plain, plain, rtol=1e-3)
    assert found.loss < 0.9 * found.loss_plain


def test_nvfp4_shares_the_scale_of_the_set():
    x, weights = problem()
    h, mean = statistics(x)
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["nvfp4"], half=False)
    s = found.s_I.numpy()
    amax = max(float(np.abs(w * s).max()) for w in weights)
    assert np.isclose(found.loss, oracle.output_error(x, weights, s, rounded_to("nvfp4", amax)), rtol=1e-3)


def test_equal_channels_are_left_alone():
    x, weights = problem()
    x /= np.where(np.arange(128) % 16 == 0, 20, 1).astype(np.float32)
    h, mean = statistics(x)
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["int4-g64"], half=False)
    assert found.loss <= found.loss_plain
    assert found.exponent is None or found.loss < found.loss_plain


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_into_a_norm_changes_no_output(dtype, offset):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator, dtype=torch.float64)
    norm = (torch.rand(64, generator=generator) + 0.5 - offset).to(dtype)
    w = torch.randn(16, 64, generator=generator)
    s = torch.exp(torch.randn(64, generator=generator))
    folded, exact = awq.fold_norm(norm, s, offset=offset)
    assert folded.dtype == dtype
    assert torch.allclose(exact, s, rtol=0.02 if dtype == torch.bfloat16 else 1e-5)
    before = (x * (norm.double() + offset)) @ w.double().T
    after = (x * (folded.double() + offset)) @ (w * exact).double().T
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-5)


def test_a_channel_without_gain_keeps_its_weight():
    norm = torch.tensor([0.0, 1.0, -2.0, 1.0])
    folded, exact = awq.fold_norm(norm, torch.tensor([5.0, 4.0, 2.0, torch.inf]))
    assert folded.tolist() == [0.0, 0.25, -1.0, 1.0]
    assert exact.tolist() == [1.0, 4.0, 2.0, 1.0]


def test_folding_into_a_projection_changes_no_output():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 32, generator=generator, dtype=torch.float64)
    up, bias = torch.randn(64, 32, generator=generator), torch.randn(64, generator=generator)
    down, s = torch.randn(8, 64, generator=generator), torch.exp(torch.randn(64, generator=generator))
    new_up, new_bias = awq.fold_rows(up, bias, s)
    assert new_bias is not None
    before = (x @ up.double().T + bias) @ down.double().T
    after = (x @ new_up.double().T + new_bias) @ (down * s).double().T
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4)
    assert awq.fold_rows(up, None, s)[1] is None


def test_heads_that_share_a_kv_head_get_one_scale():
    x, weights = problem()
    h, mean = statistics(x)
    rows = torch.arange(32).reshape(2, 1, 16).expand(2, 4, 16).reshape(-1)  # 8 query heads of 16 values, 2 KV heads
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["int4-g32"], half=False, rows_I=rows)
    assert found.exponent is not None
    by_head = found.s_I.reshape(2, 4, 16)
    assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
    assert len(set(by_head[:, 0].flatten().tolist())) > 16


def test_powers_of_two_are_searched_as_such():
    x, weights = problem()
    h, mean = statistics(x)
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["int4-g64"], half=False, powers=True)
    assert torch.equal(torch.frexp(found.s_I).mantissa, torch.full_like(found.s_I, 0.5))
    assert found.loss < 0.95 * found.loss_plain
    s = found.s_I.numpy()
    assert np.isclose(found.loss, oracle.output_error(x, weights, s, rounded_to("int4-g64")), rtol=1e-3)


def test_an_input_that_was_always_zero_keeps_its_scale_and_moves_no_other():
    x, weights = problem()
    x[:, 40] = 0
    h, mean = statistics(x)
    found = awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["int4-g64"], half=False)
    assert found.exponent is not None
    assert found.s_I[40] == 1
    live = found.s_I[torch.arange(128) != 40]
    assert np.isclose(float(live.max() * live.min()), 1, rtol=1e-4)


def rounding(w, h, scheme, rules=("search", "weighted")):
    options = gptq.GptqOptions(compensate=False, rules=rules)
    return gptq.quantize(w, gptq.factorise(h, options), scheme, half=False, options=options)


def test_rounding_of_the_scaled_weight_keeps_the_loss_of_the_pair():
    x, weights = problem()
    h, mean = statistics(x)
    scheme = SCHEMES["int4-g64"]
    found = awq.search(h, mean, [torch.from_numpy(weights[0])], scheme, half=False)
    scaled = torch.from_numpy(weights[0]) * found.s_I
    result = rounding(scaled, h / found.s_I[:, None] / found.s_I, scheme)
    d = weights[0] - result.w_hat_OI.numpy() / found.s_I.numpy()
    assert np.isclose(result.loss, 2 * float(((d @ x.T) ** 2).sum()) / len(x), rtol=1e-3)
    assert np.isclose(result.loss_plain, found.loss, rtol=1e-3)
    assert result.loss <= result.loss_plain
    assert result.fallback is None


@pytest.mark.parametrize("name", ["int4-g32", "int4a-g64", "nvfp4", "mxfp4"])
def test_clip_finds_the_best_ratio_of_each_group(name):
    """Of a Hessian without correlations between groups: a row then loses what its groups lose."""
    scheme, group = SCHEMES[name], SCHEMES[name].group_size
    rng = np.random.default_rng(2)
    w = torch.from_numpy(rng.standard_t(4, (12, 128)).astype(np.float32))
    x = rng.standard_normal((400, 128)) * np.exp(rng.standard_normal(128))
    h = np.kron(np.eye(128 // group), np.ones((group, group))) * (2 / 400 * x.T @ x)
    amax = float(w.abs().max()) if scheme.has_global else None
    plain = make_grid(w.numpy(), scheme, "plain", None, half=False, amax=amax)
    searched = make_grid(w.numpy(), scheme, "search", None, half=False, amax=amax)

    def cost(grid):
        d = (w - nearest_to(grid, w)).double().numpy()
        return np.stack([np.einsum("oi,ij,oj->o", d[:, g], h[g, g], d[:, g]) for g in groups], axis=1)

    groups = [slice(i, i + group) for i in range(0, 128, group)]
    best = cost(searched)
    for k in range(11):
        shrunk = replace(plain, stored_OG=plain.rounded(plain.scale_OG * (1 - 0.05 * k)))
        best = np.minimum(best, cost(shrunk))
    found = clipped(w, torch.from_numpy(h).float(), plain, searched)
    assert np.allclose(cost(found), best, rtol=1e-4)
    assert best.sum() < cost(searched).sum()


def test_clip_never_loses_by_row():
    x, weights = problem()
    h, _ = statistics(x)
    w = torch.from_numpy(weights[0])
    without = rounding(w, h, SCHEMES["int4-g64"])
    assert rounding(w, h, SCHEMES["int4-g64"], ("search", "weighted", "clip")).loss < without.loss


def test_activations_that_are_not_numbers_are_named():
    x, weights = problem()
    h, mean = statistics(x)
    h[5, :], h[:, 5], mean[5] = torch.nan, torch.nan, torch.nan
    with pytest.raises(QuantkitError, match=r"no AWQ scale(.|\n)*inputs"):
        awq.search(h, mean, [torch.from_numpy(w) for w in weights], SCHEMES["int4-g64"], half=False)
