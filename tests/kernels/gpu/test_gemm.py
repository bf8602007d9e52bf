"""The packed GEMM in Triton against float64, for every layout, odd shapes, extreme numbers and wrong operands."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle.packed_product import bound, nvfp4_activations, product
from packed_matrices import KINDS, ODD_INPUTS, random_matrix, with_all_codes
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gemm import as_tensors
from quantkit.kernels.gpu.activations import quantize_nvfp4
from quantkit.kernels.gpu.gemm import grouped_matmul, matmul


def activations(tokens, inputs, seed=1):
    return np.random.default_rng(seed).standard_normal((tokens, inputs)).astype(np.float32)


def check(x, w, device, dtype=torch.float32):
    given = torch.from_numpy(x).to(dtype)
    y = matmul(given.to(device), as_tensors(w, device))
    assert y.dtype == torch.float32
    x = given.float().numpy()
    error = np.abs(y.cpu().numpy() - product(x, w))
    assert (error <= bound(x, w)).all(), (w.scheme.name, w.outputs, w.inputs, len(x), (error - bound(x, w)).max())


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_is_as_exact_as_a_plain_float32_product(name, scale_format, device):
    """One token (inputs split among programs), a tile with a rest, several tiles; all dtypes."""
    check(activations(1, 512), random_matrix(name, 65, 512, scale_format), device, torch.bfloat16)
    check(activations(70, 256), random_matrix(name, 130, 256, scale_format), device, torch.float16)
    check(activations(33, 128), random_matrix(name, 1, 128, scale_format), device)


@pytest.mark.parametrize(
    ("name", "scale_format", "inputs"),
    ODD_INPUTS,
)
def test_rows_that_are_no_whole_tiles(name, scale_format, inputs, device):
    for outputs, tokens in ((1, 1), (65, 3), (129, 17)):
        check(activations(tokens, inputs), random_matrix(name, outputs, inputs, scale_format), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", ["int4", "int4a", "e2m1", "e4m3"])
def test_every_code_alone(element, dtype, device):
    """Each code in each position of a block, with the other inputs zero: the exact value comes out."""
    name = {"int4": "int4-g128", "int4a": "int4a-g128", "e2m1": "nvfp4", "e4m3": "fp8-block"}[element]
    w = random_matrix(name, 256, 128, {"e2m1": "e4m3", "e4m3": "f32"}.get(element, "bf16"))
    byte = np.arange(256, dtype=np.uint8)[:, None]
    w = replace(w, codes=np.broadcast_to(byte, w.codes.shape).copy(), global_scale=1.0)
    x = np.eye(128, dtype=np.float32)
    exact = product(x, w)
    for rows in (slice(3, 5), slice(0, 128)):
        y = matmul(torch.from_numpy(x[rows]).to(dtype).to(device), as_tensors(w, device)).cpu().numpy()
        np.testing.assert_array_equal(y, exact[rows].astype(np.float32))


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_extreme_numbers(name, scale_format, device):
    w = random_matrix(name, 12, 128, scale_format)
    huge = activations(2, 128)
    huge[:, 17] = 1e30
    for x in (huge, np.full((1, 128), 0.3), np.full((1, 128), 1e-38), np.full((1, 128), -0.0)):
        check(x.astype(np.float32), w, device)
    check(huge, with_all_codes(w, 0), device)
    check(huge, with_all_codes(w, 0x88), device)


def test_infinite_and_nan_activations_stay_with_their_token(device):
    w = as_tensors(random_matrix("int4-g128", 40, 256, "bf16"), device)
    x = torch.from_numpy(activations(6, 256)).to(device)
    good = matmul(x, w).cpu()
    x[2, 5], x[4, 9] = torch.nan, torch.inf
    y = matmul(x, w).cpu()
    assert y[2].isnan().all()
    assert not y[4].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 5]], good[[0, 1, 3, 5]])


def test_scales_of_subnormal_size_and_nan(device):
    w = random_matrix("int4-channel", 3, 64, "bf16")
    check(activations(2, 64), replace(w, scale=np.array([[1], [0], [0x8001]], np.uint16)), device)
    odd = as_tensors(replace(w, scale=np.array([[0x3F80], [0x7FC0], [0x3F80]], np.uint16)), device)
    y = matmul(torch.ones(2, 64, device=device), odd).cpu()
    assert y.isnan().tolist() == [[False, True, False]] * 2
    w = random_matrix("mxfp4", 3, 32, "e8m0")
    for dtype in (torch.float32, torch.bfloat16):
        check(activations(2, 32), replace(w, scale=np.array([[0], [1], [130]], np.uint8)), device, dtype)
    odd = as_tensors(replace(w, scale=np.full((3, 1), 255, np.uint8)), device)
    assert matmul(torch.ones(1, 32, device=device), odd).isnan().all()


def test_no_tokens(device):
    w = as_tensors(random_matrix("int4-g128", 5, 128, "bf16"), device)
    assert matmul(torch.empty(0, 128, device=device), w).shape == (0, 5)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    assert grouped_matmul(torch.empty(0, 128, device=device), starts, [w, w]).shape == (0, 5)


def test_w4a4_quantises_the_activations(device):
    w = random_matrix("nvfp4", 33, 160, "e4m3")
    x = activations(6, 160)
    x[1] = 0
    x[2, 16:32] = 0
    x[3, 40] = 3000.0
    x[4] *= 1e-6
    for input_scale in (0.002, float(np.abs(x).max()) / (6 * 448), 1.0):
        seen = nvfp4_activations(x, input_scale).astype(np.float32)
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.bfloat16:
                rounded = torch.from_numpy(x).bfloat16().float().numpy()
                seen = nvfp4_activations(rounded, input_scale).astype(np.float32)
            given = torch.from_numpy(x).to(dtype).to(device)
            np.testing.assert_array_equal(
                quantize_nvfp4(given, input_scale).float().cpu().numpy() * np.float32(input_scale), seen
            )
            y = matmul(given, as_tensors(w, device), input_scale=input_scale).cpu().numpy()
            assert (np.abs(y - product(seen, w)) <= bound(seen, w)).all()


def test_w4a4_keeps_nan_and_holds_infinity(device):
    x = torch.ones(2, 32, device=device)
    x[0, 3], x[1, 20] = torch.nan, -torch.inf
    q = quantize_nvfp4(x, 1.0).float().cpu()
    assert q.isnan().tolist() == [[True] * 16 + [False] * 16, [False] * 32]
    assert q[1, 20] == -6 * 448


@pytest.mark.parametrize(
    ("name", "scale_format"),
    [("int4-g32", "bf16"), ("int4a-g64", "bf16"), ("nvfp4", "e4m3"), ("mxfp4", "e8m0"), ("fp8-block", "f32")],
)
def test_grouped_is_each_expert_on_its_own_tokens(name, scale_format, device):
    experts = [random_matrix(name, 40, 128, scale_format, seed=e) for e in range(5)]
    experts = [
        replace(w, global_scale=w.global_scale * (1 + e)) if w.scheme.has_global else w for e, w in enumerate(experts)
    ]
    starts = [0, 3, 3, 30, 31, 50]
    x = activations(50, 128)
    tensors = [as_tensors(w, device) for w in experts]
    y = (
        grouped_matmul(torch.from_numpy(x).to(device), torch.tensor(starts, dtype=torch.int32, device=device), tensors)
        .cpu()
        .numpy()
    )
    for e, w in enumerate(experts):
        own = slice(starts[e], starts[e + 1])
        assert (np.abs(y[own] - product(x[own], w)) <= bound(x[own], w)).all() if own.start < own.stop else True


def test_experts_may_lie_anywhere_and_unaligned(device):
    w = [as_tensors(random_matrix("int4-g32", 6, 32, "bf16", seed=e), device) for e in range(3)]
    memory = torch.zeros(1000, dtype=torch.uint8, device=device)
    memory[301:397] = w[1].codes.flatten()
    moved = [w[0], replace(w[1], codes=memory[301:397].view(6, 16)), w[2]]
    x = torch.from_numpy(activations(9, 32)).to(device)
    starts = torch.tensor([0, 2, 6, 9], dtype=torch.int32, device=device)
    assert torch.equal(grouped_matmul(x, starts, moved), grouped_matmul(x, starts, w))


def test_grouped_w4a4(device):
    experts = [random_matrix("nvfp4", 20, 64, "e4m3", seed=e) for e in range(2)]
    x = activations(7, 64)
    starts = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    y = grouped_matmul(
        torch.from_numpy(x).to(device), starts, [as_tensors(w, device) for w in experts], input_scale=0.01
    )
    seen = nvfp4_activations(x, 0.01).astype(np.float32)
    for own, w in ((slice(0, 4), experts[0]), (slice(4, 7), experts[1])):
        assert (np.abs(y.cpu().numpy()[own] - product(seen[own], w)) <= bound(seen[own], w)).all()


def wrong(device):
    w = as_tensors(random_matrix("int4-g128", 8, 256, "bf16"), device)
    x = torch.ones(3, 256, device=device)
    yield "activations do not fit", x[:, :128].contiguous(), w, {}
    yield "wrong dtype", x.double(), w, {}
    yield "must be contiguous", x.new_ones(256, 3).T, w, {}
    yield "wrong dtype", x, replace(w, codes=w.codes.view(torch.int8)), {}
    yield "wrong shape", x, replace(w, scale=w.scale[:, :1].contiguous()), {}
    yield "lie elsewhere", x, replace(w, codes=w.codes.cpu().numpy()), {}
    yield "NVFP4", x, w, {"input_scale": 0.5}
    fp4 = as_tensors(random_matrix("nvfp4", 8, 256, "e4m3"), device)
    yield "does not fit", x, fp4, {"input_scale": 0.0}
    yield "does not fit", x, replace(fp4, global_scale=float("nan")), {}


def test_wrong_operands_are_refused(device):
    for message, x, w, options in wrong(device):
        with pytest.raises(QuantkitError, match=message):
            matmul(x, w, **options)


def test_wrong_experts_are_refused(device):
    w = as_tensors(random_matrix("int4-g128", 8, 256, "bf16"), device)
    other = as_tensors(random_matrix("int4-g128", 9, 256, "bf16"), device)
    x = torch.ones(3, 256, device=device)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    cases = [
        ("needs experts", starts, []),
        ("differs", starts, [w, other]),
        ("do not divide", torch.tensor([0, 1, 2], dtype=torch.int32, device=device), [w, w]),
        ("do not divide", torch.tensor([0, 4, 3], dtype=torch.int32, device=device), [w, w]),
        ("wrong dtype", starts.long(), [w, w]),
        ("wrong shape", starts, [w]),
        ("lie elsewhere", starts, [w, replace(w, codes=w.codes.cpu().numpy())]),
    ]
    for message, offsets, experts in cases:
        with pytest.raises(QuantkitError, match=message):
            grouped_matmul(x, offsets, experts)
