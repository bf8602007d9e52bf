"""GPTQ: equal to the textbook in float64, never worse than rounding, and true to what it says of itself."""

import math

import numpy as np
import pytest
import torch
from oracle import gptq as oracle
from quantkit.calibrate.stats import HessianSum
from quantkit.kernels.cpu.rows import family, global_scale, quantize_rows, requantize_rows, row_parts
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.linalg import damped_factor, inverse_factor
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.methods import gptq

SCHEME_NAMES = ["int4-g32", "int4-g64", "int4-channel", "int4a-g32", "int4a-channel", "nvfp4", "mxfp4"]
EXACT = gptq.GptqOptions(sweeps=0)


def problem(outputs=20, inputs=192, tokens=700, seed=0):
    """Heavy-tailed weights; correlated inputs with strong channels."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((inputs, inputs)) * (rng.random((inputs, inputs)) < 0.1) + np.eye(inputs)
    gain = np.exp(0.7 * rng.standard_normal(inputs))
    x = (rng.standard_normal((tokens, inputs)) @ mixing * gain).astype(np.float32)
    w = (rng.standard_t(5, (outputs, inputs)) / 20).astype(np.float32)
    return w, x


def hessian(x):
    total = HessianSum(x.shape[1])
    total.update(torch.from_numpy(x))
    return total.finish().h_II


def run(w, h, name, options=EXACT, half=False):
    scheme = SCHEMES[name]
    amax = float(np.abs(w).max()) if scheme.has_global else None
    factor = gptq.factorise(h, options)
    return gptq.quantize(torch.from_numpy(w), factor, scheme, half=half, amax=amax, options=options)


def grid_of(result, w, name, half=False):
    scheme = SCHEMES[name]
    scale_2 = float(global_scale(scheme, float(np.abs(w).max()))) if scheme.has_global else 1.0
    parts = result.parts
    kind = family(scheme)
    return oracle.read(parts.codes, parts.scale, parts.zero, kind, w.shape[1], half=half, scale_2=scale_2)


def levels_of(name):
    return oracle.INT4 if name.startswith("int4") else oracle.E2M1


def rtn_loss(w, h, name):
    """Loss of the data-free default, from the kernels alone."""
    scheme = SCHEMES[name]
    parts = row_parts(scheme, *w.shape)
    amax = float(np.abs(w).max())
    method = {"int4": "search", "nvfp4": "sweep", "mxfp4": "search"}[family(scheme)]
    assert quantize_rows(w, scheme, method, amax, False, parts) == -1
    scale_2 = float(global_scale(scheme, amax)) if scheme.has_global else 1.0
    q, scale, zero = oracle.read(parts.codes, parts.scale, parts.zero, family(scheme), w.shape[1], scale_2=scale_2)
    return oracle.loss(w, (q - zero) * scale, h)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_codes_are_those_of_the_textbook(name, act_order):
    w, x = problem(outputs=6)
    h = hessian(x)
    result = run(w, h, name, gptq.GptqOptions(sweeps=0, act_order=act_order, block=64))
    assert result.kept_rows == 0
    _, scale, zero = grid_of(result, w, name)
    h64 = h.double().numpy()
    order = oracle.descending(h64) if act_order else list(range(len(h64)))
    expected = oracle.quantize(w, h64, scale, zero, levels_of(name), result.damp, order)
    found = result.w_hat_OI.numpy()
    same = np.isclose(found, expected, rtol=1e-6, atol=0).mean()
    assert same > 0.99, f"{name}: {same:.4f} of the codes agree"
    assert oracle.loss(w, found, h64) <= 1.001 * oracle.loss(w, expected, h64)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_parts_decode_to_the_reported_weight_and_loss(name, half):
    w, x = problem()
    h = hessian(x)
    result = run(w, h, name, gptq.GptqOptions(), half)
    q, scale, zero = grid_of(result, w, name, half)
    decoded = (q - zero) * scale
    assert np.array_equal(decoded.astype(np.float32), result.w_hat_OI.numpy())
    assert math.isclose(result.loss, oracle.loss(w, decoded, h), rel_tol=1e-3)
    assert math.isclose(result.norm, oracle.loss(w, np.zeros_like(w), h), rel_tol=1e-3)
    assert np.allclose(result.parts.sq_err_R, ((w - decoded) ** 2).sum(1), rtol=1e-6)
    assert np.allclose(result.parts.sq_norm_R, (w.astype(np.float64) ** 2).sum(1), rtol=1e-6)
    ends = (-8, 7) if name.startswith("int4") else (-6, 6)
    assert result.saturated == np.isin(q, ends).sum()
    again = np.empty_like(result.parts.codes)
    scale_2 = float(global_scale(SCHEMES[name], float(np.abs(w).max()))) if name == "nvfp4" else None
    stored = (result.parts.scale, result.parts.zero, scale_2)
    requantize_rows(result.w_hat_OI.numpy(), SCHEMES[name], half, *stored, again)
    assert np.array_equal(again, result.parts.codes)


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_loses_far_less_than_rounding(name):
    w, x = problem()
    h = hessian(x)
    result = run(w, h, name, gptq.GptqOptions())
    assert math.isclose(result.loss_plain, rtn_loss(w, h, name), rel_tol=1e-3)
    assert result.fallback is None
    assert result.loss <= 0.5 * result.loss_plain


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_sweeps_lower_the_loss_and_end_where_no_code_gains_much(name):
    w, x = problem(outputs=3, inputs=64, tokens=200)
    h = hessian(x)
    plain, swept = run(w, h, name), run(w, h, name, gptq.GptqOptions(sweeps=12))
    assert swept.loss < plain.loss
    gains = []
    for result in (plain, swept):
        _, scale, zero = grid_of(result, w, name)
        gains.append(oracle.descended(w, result.w_hat_OI.numpy(), h, scale, zero, levels_of(name), result.damp))
    assert gains[1] < min(0.01, gains[0] / 3), gains


def test_both_scales_are_no_worse_than_either():
    w, x = problem()
    h = hessian(x)
    both = run(w, h, "int4-g32").loss
    single = [run(w, h, "int4-g32", gptq.GptqOptions(sweeps=0, rules=(rule,))).loss for rule in ("search", "weighted")]
    assert both < min(single)


def test_block_size_changes_nothing_that_matters():
    w, x = problem()
    h = hessian(x)
    losses = [run(w, h, "int4-g32", gptq.GptqOptions(block=b)).loss for b in (1, 32, 128, 1000)]
    assert max(losses) <= 1.01 * min(losses)


def test_no_row_is_worse_than_rounding_even_with_a_useless_hessian():
    w, x = problem(tokens=3)  # rank 3: most of a row can be made up for, on these inputs
    h = hessian(x)
    result = run(w, h, "int4-g64", gptq.GptqOptions())
    assert np.isfinite(result.w_hat_OI.numpy()).all()
    assert 0 <= result.loss <= result.loss_plain
    identity = torch.eye(w.shape[1])
    result = run(w, identity, "int4-g64", gptq.GptqOptions())
    assert result.loss <= result.loss_plain


def test_dead_inputs_are_rounded_to_nearest():
    w, x = problem()
    x[:, [3, 77]] = 0
    result = run(w, hessian(x), "int4-g64")
    assert result.dead == 2
    q, scale, _ = grid_of(result, w, "int4-g64")
    for c in (3, 77):
        for o in range(len(w)):
            assert q[o, c] * scale[o, c] == oracle.nearest(float(w[o, c]), scale[o, c], 0, oracle.INT4)


@pytest.mark.parametrize(
    ("h", "reason"),
    [
        (torch.zeros(192, 192), "saw no input"),
        (torch.full((192, 192), torch.nan), "NaN or infinity"),
        (torch.eye(192).roll(1, 0) * 1e3 + torch.eye(192) * 1e-3, "no Cholesky factor"),
    ],
)
def test_an_unusable_hessian_falls_back_to_rounding_and_says_why(h, reason):
    w, _ = problem()
    result = run(w, h, "int4-g64")
    assert result.fallback is not None
    assert reason in result.fallback
    assert np.isfinite(result.w_hat_OI.numpy()).all()
    parts = row_parts(SCHEMES["int4-g64"], *w.shape)
    assert quantize_rows(w, SCHEMES["int4-g64"], "search", None, False, parts) == -1
    plain_q, plain_scale, _ = oracle.read(parts.codes, parts.scale, None, "int4", 192)
    errors = ((w - result.w_hat_OI.numpy()) ** 2).sum(), ((w - plain_q * plain_scale) ** 2).sum()
    assert errors[0] <= 1.5 * errors[1]


def test_the_ladder_climbs_until_the_matrix_is_definite():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    h = x.T @ x / 64
    shifted = h - 0.05 * h.diagonal().mean() * torch.eye(96)
    assert inverse_factor(shifted, 0.01) is None
    found = damped_factor(shifted)
    assert found is not None
    upper, damp = found
    assert damp == 0.09
    damped = (shifted + damp * shifted.diagonal().mean() * torch.eye(96)).double()
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.double().T @ upper.double() @ damped, torch.eye(96).double(), atol=1e-4)
    assert damped_factor(torch.full((4, 4), torch.nan)) is None


@pytest.mark.parametrize("inputs", [1, 256, 257, 900])  # inverted at once, and by halves of odd sizes
def test_the_factor_is_that_of_the_inverse(inputs):
    x = torch.randn(2 * inputs, inputs, generator=torch.Generator().manual_seed(inputs))
    h = x.T @ x / inputs
    upper = inverse_factor(h, 0.01)
    assert upper is not None
    damped = h.double().numpy() + 0.01 * np.diag(h.double().numpy()).mean() * np.eye(inputs)
    expected = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(upper.numpy(), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_bad_input_is_refused():
    w, x = problem()
    h = hessian(x)
    with pytest.raises(QuantkitError, match="another width"):
        run(np.ascontiguousarray(w[:, :64]), h, "int4-g64")
    with pytest.raises(QuantkitError, match="4-bit"):
        run(w, h, "fp8-channel")
    with pytest.raises(QuantkitError, match="fused set"):
        gptq.quantize(torch.from_numpy(w), gptq.factorise(h), SCHEMES["nvfp4"], half=False)
    w[4, 7] = np.nan
    with pytest.raises(QuantkitError, match="not a finite number"):
        run(w, h, "int4-g64")
