"""Statistics of activations: against float64, in parts and merged, with tokens that are not numbers."""

import numpy as np
import pytest
import torch
from oracle import gptq as oracle
from quantkit.calibrate.stats import AbsMax, HessianSum, blend
from quantkit.kernels.errors import QuantkitError


def tokens(count=300, inputs=40, seed=0):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, inputs)


def close(a, b):
    scale = np.sqrt(np.outer(np.diag(b), np.diag(b)))
    return bool((np.abs(a.double().numpy() - b) <= 1e-5 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 40, 1100])  # more than two blocks of products
def test_hessian_is_the_mean_of_outer_products_however_it_comes(inputs, dtype):
    x = tokens(60, inputs).to(dtype)
    expected = oracle.hessian(x.float().numpy())
    whole = HessianSum(inputs)
    whole.update(x)
    parts = HessianSum(inputs)
    for chunk in x.split(7):
        parts.update(chunk)
    first, second = HessianSum(inputs), HessianSum(inputs)
    first.update(x[:11])
    second.update(x[11:])
    first.merge(second)
    first.merge(HessianSum(inputs))
    for total in (whole, parts, first):
        found = total.finish()
        assert found.tokens == 60
        assert torch.equal(found.h_II, found.h_II.T)
        assert close(found.h_II, expected)


def test_many_tokens_neither_overflow_nor_drown_the_last_ones():
    total = HessianSum(2)
    total.update(torch.tensor([[1e18, 0.0]]))  # squares near the end of float32
    for _ in range(5):
        total.merge(total)
    total.update(torch.tensor([[0.0, 1e18]]).expand(32, 2))
    found = total.finish()
    assert found.tokens == 64
    assert torch.allclose(found.h_II.diagonal(), torch.tensor([1e36, 1e36]), rtol=1e-5)


@pytest.mark.parametrize("kind", [HessianSum, AbsMax])
def test_tokens_that_are_not_numbers_are_left_out_and_counted(kind):
    x = tokens()
    damaged = torch.cat((x, x[:3]))
    damaged[300, 5], damaged[301, 0], damaged[302, 1] = torch.nan, torch.inf, -torch.inf
    clean, dirty = kind(40), kind(40)
    clean.update(x)
    dirty.update(damaged)
    dirty.update(damaged[300:])
    a, b = clean.finish(), dirty.finish()
    assert (b.tokens, b.dropped) == (300, 6)
    name = "h_II" if kind is HessianSum else "mean_I"
    assert torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-6)


def test_large_finite_tokens_are_kept():
    total = AbsMax(2)
    total.update(torch.full((4, 2), 3e38))  # their sum is infinite, they are not
    found = total.finish()
    assert (found.tokens, found.dropped) == (4, 0)
    assert found.amax == pytest.approx(3e38)


def test_ranges_in_parts_are_those_of_the_whole():
    x = tokens().bfloat16()
    whole, first, second = AbsMax(40), AbsMax(40), AbsMax(40)
    whole.update(x)
    first.update(x[:100])
    for chunk in x[100:].split(33):
        second.update(chunk)
    first.merge(second)
    a, b = whole.finish(), first.finish()
    assert a.tokens == b.tokens == 300
    assert a.amax == b.amax == float(x.float().abs().max())
    assert torch.equal(a.amax_I, x.float().abs().amax(0))
    assert torch.equal(a.amax_I, b.amax_I)
    assert torch.allclose(a.mean_I.double(), x.double().abs().mean(0), rtol=1e-6)
    assert torch.allclose(a.mean_I, b.mean_I, rtol=1e-6)


def test_nothing_seen():
    empty = HessianSum(3)
    empty.update(torch.empty(0, 3))
    assert empty.finish().coverage == "none"
    assert not empty.finish().h_II.any()
    seen = AbsMax(3).finish()
    assert (seen.amax, seen.tokens) == (0.0, 0)
    assert not seen.mean_I.any()


@pytest.mark.parametrize(("count", "coverage"), [(4, "low"), (5, "full"), (300, "full")])
def test_coverage(count, coverage):
    total = HessianSum(40)
    total.update(tokens(count))
    assert total.finish().coverage == coverage


def test_blend_moves_from_the_layer_to_the_expert():
    layer, own = HessianSum(40), HessianSum(40)
    layer.update(tokens(400, seed=1))
    whole = layer.finish()
    assert torch.equal(blend(own.finish(), whole).h_II, whole.h_II)
    own.update(tokens(30, seed=2))
    seen = own.finish()
    mixed = blend(seen, whole)
    assert torch.allclose(mixed.h_II, (30 * seen.h_II + 10 * whole.h_II) / 40, rtol=1e-5)
    assert (mixed.tokens, mixed.coverage) == (30, "full")
    assert torch.allclose(blend(seen, whole, kappa=0).h_II, seen.h_II)
    assert torch.equal(blend(seen, HessianSum(40).finish()).h_II, seen.h_II)


def test_other_widths_are_refused():
    for kind in (HessianSum, AbsMax):
        with pytest.raises(QuantkitError, match="another width"):
            kind(4).update(torch.zeros(2, 5))
        with pytest.raises(QuantkitError, match="different layers"):
            kind(4).merge(kind(5))
    a, b = HessianSum(4).finish(), HessianSum(5).finish()
    with pytest.raises(QuantkitError, match="another width"):
        blend(a, b)
