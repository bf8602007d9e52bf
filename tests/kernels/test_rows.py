"""The dispatcher: every scheme and method quantises in chunks, decodes within its error, and gives its codes back."""

import dataclasses

import numpy as np
import pytest
import torch
from quantkit.kernels import float8, microscale
from quantkit.kernels.cpu import rows as dispatch
from quantkit.kernels.cpu import tails
from quantkit.kernels.cpu.nvfp4 import amax_f32
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import SCHEMES
from weights import weights

ROWS, INPUTS = 300, 384
CODED = [s for s in SCHEMES.values() if s.element != "float"]
CASES = [(s.name, m) for s in CODED for m in dispatch.methods_of(s)]
BOUND = {"int4": 0.16, "nvfp4": 0.11, "mxfp4": 0.13, "fp8": 0.04}  # relative error on a Gaussian


def tail_weights(w_RI, method):
    if not dispatch.needs_tails(method):
        return None
    square, fourth = np.zeros((2, w_RI.shape[1]))
    tails.add_moments(w_RI, square, fourth)
    return tails.tail_weights([tails.Moments(square, fourth, len(w_RI))])


def quantize(w_RI, scheme, method, half=False):
    parts = dispatch.row_parts(scheme, *w_RI.shape)
    h_I = tail_weights(w_RI, method)
    assert dispatch.quantize_rows(w_RI, scheme, method, amax_f32(w_RI), half, parts, h_I) == -1
    return parts


def decode_int4(parts, group, half):
    nibble = np.stack((parts.codes & 15, parts.codes >> 4), -1).reshape(ROWS, -1)[:, :INPUTS].astype(np.float64)
    bits = parts.scale if half else parts.scale.astype(np.uint32) << 16
    scale = bits.view(np.float16 if half else np.float32).astype(np.float64)
    zero = 0 if parts.zero is None else np.repeat(parts.zero.astype(np.float64), group, 1)
    return (nibble - 8 - zero) * np.repeat(scale, group, 1)


def decode(scheme, parts, scale_2, half=False):
    codes, scale = torch.from_numpy(parts.codes), torch.from_numpy(parts.scale)
    match dispatch.family(scheme):
        case "int4":
            return decode_int4(parts, scheme.group_size or INPUTS, half)
        case "nvfp4":
            return microscale.dequantize_nvfp4(codes, scale, scale_2).numpy()
        case "mxfp4":
            return microscale.dequantize_mxfp4(codes, scale).numpy()
    if scheme.granularity == "block":
        scale = float8.spread_blocks(scale, ROWS, INPUTS)
    return float8.dequantize(codes, scale).numpy()


@pytest.mark.parametrize(("name", "method"), CASES)
def test_decoded_weights_have_the_error_that_was_reported(name, method):
    scheme, w_RI = SCHEMES[name], weights("gauss", ROWS, INPUTS)
    for half in (False, True) if scheme.element == "int4" else (False,):
        parts = quantize(w_RI, scheme, method, half)
        scale_2 = float(dispatch.global_scale(scheme, amax_f32(w_RI))) if scheme.has_global else None
        error = ((w_RI.astype(np.float64) - decode(scheme, parts, scale_2, half)) ** 2).sum(1)
        np.testing.assert_allclose(parts.sq_err_R, error, rtol=1e-4)
        np.testing.assert_allclose(parts.sq_norm_R, (w_RI.astype(np.float64) ** 2).sum(1), rtol=1e-4)
        assert np.sqrt(parts.sq_err_R.sum() / parts.sq_norm_R.sum()) < BOUND[dispatch.family(scheme)]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_chunks_write_the_same_parts_and_codes_come_back(name, method):
    scheme, w_RI = SCHEMES[name], weights("t5", ROWS, INPUTS)
    shared = amax_f32(w_RI)
    whole, h_I = quantize(w_RI, scheme, method), tail_weights(w_RI, method)
    chunked = dispatch.row_parts(scheme, ROWS, INPUTS)
    for top, bottom in ((0, 128), (128, 256), (256, ROWS)):
        scale = {
            "tensor": chunked.scale,
            "block": chunked.scale[top // 128 : -(-bottom // 128)],
        }.get(scheme.granularity, chunked.scale[top:bottom])
        part = dispatch.RowParts(
            chunked.codes[top:bottom],
            scale,
            None if chunked.zero is None else chunked.zero[top:bottom],
            chunked.sq_err_R[top:bottom],
            chunked.sq_norm_R[top:bottom],
        )
        assert dispatch.quantize_rows(w_RI[top:bottom], scheme, method, shared, False, part, h_I) == -1
    for field in dataclasses.fields(whole):
        expected = getattr(whole, field.name)
        if expected is not None:
            assert np.array_equal(getattr(chunked, field.name), expected), field.name
    again = np.zeros_like(whole.codes)
    scale_2 = float(dispatch.global_scale(scheme, shared)) if scheme.has_global else None
    dispatch.requantize_rows(w_RI, scheme, False, whole.scale, whole.zero, scale_2, again)
    assert np.array_equal(again, whole.codes)


def test_the_default_is_the_last_method_and_the_best_one():
    w_RI = weights("gauss", ROWS, INPUTS)
    for scheme in CODED:
        family = dispatch.family(scheme)
        loss = {m: quantize(w_RI, scheme, m).sq_err_R.sum() for m in dispatch.methods_of(scheme)}
        assert loss[dispatch.DEFAULT_METHOD[family]] == min(loss.values()), scheme.name


@pytest.mark.parametrize("name", [s.name for s in CODED])
def test_a_row_that_is_not_finite_is_named(name):
    w_RI = weights("gauss", 130, INPUTS)
    w_RI[129, 200] = np.inf
    parts = dispatch.row_parts(SCHEMES[name], 130, INPUTS)
    method = dispatch.DEFAULT_METHOD[dispatch.family(SCHEMES[name])]
    assert dispatch.quantize_rows(w_RI, SCHEMES[name], method, 1.0, False, parts) == 129


def test_refusals():
    w_RI = weights("gauss", 2, 128)
    for name in ("nvfp4", "fp8-tensor"):
        with pytest.raises(QuantkitError, match="fused set"):
            dispatch.quantize_rows(w_RI, SCHEMES[name], "plain", None, False, dispatch.row_parts(SCHEMES[name], 2, 128))
    with pytest.raises(QuantkitError, match="unknown method for mxfp4"):
        parts = dispatch.row_parts(SCHEMES["mxfp4"], 2, 128)
        dispatch.quantize_rows(w_RI, SCHEMES["mxfp4"], "sweep", None, False, parts)
    parts = dispatch.row_parts(SCHEMES["int4-g64"], 2, 128)
    for method, h_I in (("tails", None), ("search", np.ones(128, np.float32))):
        with pytest.raises(QuantkitError, match="tail weights"):
            dispatch.quantize_rows(w_RI, SCHEMES["int4-g64"], method, None, False, parts, h_I)
    for method in ("signed", "tails"):
        parts = dispatch.row_parts(SCHEMES["int4a-g64"], 2, 128)
        with pytest.raises(QuantkitError, match="unknown method for int4a-g64"):
            dispatch.quantize_rows(w_RI, SCHEMES["int4a-g64"], method, None, False, parts)
    with pytest.raises(QuantkitError, match="keeps floats"):
        dispatch.family(SCHEMES["bf16"])
    with pytest.raises(QuantkitError, match="without the scale of the tensor"):
        parts = dispatch.row_parts(SCHEMES["nvfp4"], 2, 128)
        dispatch.requantize_rows(w_RI, SCHEMES["nvfp4"], False, parts.scale, None, None, parts.codes)
