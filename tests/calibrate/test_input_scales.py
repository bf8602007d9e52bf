"""Scales of activations: block statistics and rules against numpy on all values, and against ModelOpt's calibrators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from quantkit.calibrate.input_blocks import InputBlocks, InputBlocksSum
from quantkit.calibrate.input_scales import input_amax, input_scale, input_shares, shared_amax
from quantkit.calibrate.kv_records import Seen
from quantkit.calibrate.log2_histogram import Histogram, count

MODELOPT_BIN = 80 / 512  # octaves; its percentiles are those of the middle of a bin


def activations(kind: str, tokens: int = 3000, inputs: int = 96) -> np.ndarray:
    """float32 [tokens, inputs] with the traits that rules trip over."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((tokens, inputs))
    if kind == "wide":  # blocks over 13 octaves: rho P1 is below P99.99
        x *= np.exp2(rng.uniform(-18, 0, (tokens, inputs // 16))).repeat(16, 1)
    if kind == "noise":  # blocks of zeros, and of what rounding leaves behind
        x[:1000, :16] = 0
        x[1000:2000, :16] *= 1e-9
    if kind == "freak":  # one value beyond everything
        x[7, 3] = 1e4
    return x.astype(np.float32)


def seen_of(x: np.ndarray) -> InputBlocks:
    record = InputBlocksSum()
    for part in np.array_split(x, 4):
        record.update(torch.from_numpy(part))
    return record.finish()


def block_amax(x: np.ndarray) -> np.ndarray:
    return np.abs(x).reshape(len(x), -1, 16).max(2).ravel()


KINDS = ["normal", "wide", "noise", "freak"]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_blocks(kind):
    x = activations(kind)
    seen = seen_of(x)
    assert (seen.amax, seen.tokens, seen.dropped) == (float(np.abs(x).max()), len(x), 0)
    assert seen.histogram.total == x.size // 16
    assert seen.histogram.zeros == int((block_amax(x) == 0).sum())
    for share in (0.01, 0.5, 0.9999):
        true = np.sort(block_amax(x))[math.ceil(share * x.size / 16) - 1]
        assert true <= min(seen.histogram.percentile(share), seen.amax) <= true * (1 + 1 / 32)


def test_bad_tokens_and_ragged_inputs():
    x = activations("normal", 10, 24)
    x[3, 5], x[4, 0] = np.nan, np.inf
    seen = seen_of(x)
    good = np.delete(x, [3, 4], 0)
    assert (seen.tokens, seen.dropped, seen.amax) == (8, 2, float(np.abs(good).max()))
    assert seen.histogram.total == 8 * 2
    assert seen_of(x[3:5]) == InputBlocks(0.0, Histogram(0, 0, ()), 0, 2)


def test_merging_is_one_pass():
    x = activations("noise")
    a, b = InputBlocksSum(), InputBlocksSum()
    a.update(torch.from_numpy(x[:1500]))
    b.update(torch.from_numpy(x[1500:]))
    a.merge(b)
    assert a.finish() == seen_of(x)


@pytest.mark.parametrize("kind", KINDS)
def test_headroom_is_modelopts(kind):
    """Within one bin of ModelOpt's coarser histogram, from the same activations."""
    from modelopt.torch.quantization.calib.nvfp4_act_headroom import NVFP4ActHeadroomCalibrator

    x = activations(kind)
    theirs = NVFP4ActHeadroomCalibrator()
    for part in np.array_split(x, 4):
        theirs.collect(torch.from_numpy(part))
    ours = input_amax(seen_of(x), "nvfp4_act_headroom")
    assert abs(math.log2(ours / float(theirs.compute_amax()))) < MODELOPT_BIN


@pytest.mark.parametrize("kind", KINDS)
def test_headroom_is_the_formula(kind):
    x = activations(kind)
    blocks = np.sort(block_amax(x)[block_amax(x) > 0])
    upper = blocks[math.ceil(0.9999 * len(blocks)) - 1]
    kept = blocks[blocks >= upper / 1e6]
    wanted = max(16384 * kept[math.ceil(0.01 * len(kept)) - 1], upper)
    # up to a bin above for each percentile, and less where a bin below the floor is counted
    assert wanted * 0.999 <= input_amax(seen_of(x), "nvfp4_act_headroom") <= wanted * (1 + 1 / 32)


def test_the_percentile_of_the_cache_is_modelopts():
    """p99.99 of keys against HistogramCalibrator, whose bins are linear."""
    from modelopt.torch.quantization.calib.histogram import HistogramCalibrator

    x = torch.from_numpy(activations("normal", 4000, 64))
    x[:, :2] *= 6
    theirs = HistogramCalibrator(num_bins=4096)
    theirs.collect(x)
    wanted = float(theirs.compute_amax("percentile", percentile=99.99))
    amax = float(x.abs().max())
    ours = Seen((amax,), (amax,), Histogram.of(count(x))).percentile(0.9999)
    assert wanted - amax / 4096 <= ours <= (wanted + amax / 4096) * (1 + 1 / 32)


def test_amax_and_scales():
    seen = seen_of(activations("freak"))
    assert input_amax(seen, "amax") == 1e4
    assert input_amax(seen, "amax", 1.25) == 12500.0
    for amax in (1.0, 0.3, 12500.0, 1e-30):
        for element, largest in (("e2m1", 2688), ("e4m3", 448)):
            scale = input_scale(amax, element)
            assert float(np.float32(scale)) == scale and scale * largest >= amax
            assert scale * largest <= amax * (1 + 2**-23)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="no scale"):
            input_scale(wrong, "e2m1")


def test_peers_share_the_largest():
    small, large = seen_of(activations("normal")), seen_of(activations("freak"))
    nothing, zeros = InputBlocksSum().finish(), seen_of(np.zeros((4, 32), np.float32))
    assert shared_amax([small, nothing, large, zeros], "amax") == (1e4, ("fused", "peer", "own", "peer"))
    assert shared_amax([nothing, zeros], "nvfp4_act_headroom") == (0.0, ("peer", "peer"))


@pytest.mark.parametrize(("element", "largest", "lowest"), [("e2m1", 2688, 6 / 64), ("e4m3", 448, 1 / 64)])
def test_shares_are_those_of_the_blocks(element, largest, lowest):
    x = activations("wide")
    seen, blocks = seen_of(x), block_amax(x)
    for amax in (0.5, 2.0, float(blocks.max()), 1e4):
        scale = input_scale(amax, element)
        found = input_shares(seen, scale, element)
        above, below = (blocks > largest * scale).mean(), (blocks < lowest * scale).mean()
        assert above <= found.saturated <= (blocks > largest * scale / (1 + 1 / 31)).mean()
        assert below <= found.underflow <= (blocks < lowest * scale * (1 + 1 / 31)).mean()
    assert input_shares(seen, input_scale(float(blocks.max()), element), element).saturated == 0
