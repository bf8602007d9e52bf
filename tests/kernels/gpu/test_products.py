"""Products on 16-bit operands have the error of float32 sums, whatever the magnitudes."""

import numpy as np
import pytest
import torch
import triton.language as tl
from quantkit.kernels.gpu.jit import BF16, F16, F32, jit
from quantkit.kernels.gpu.products import exact_dot

N = 64


@jit
def product(a_ptr, b_ptr, out_ptr, OPERAND: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out_ptr + at, exact_dot(tl.load(a_ptr + at), tl.load(b_ptr + at).to(OPERAND), PIECES))


def run(a, b, operand, pieces, device):
    out = torch.empty(N, N, device=device)
    product[(1,)](a.to(device), b.to(device), out, operand, pieces, N)
    return out.cpu()


MODES = {"3 of bf16": (BF16, 3, torch.bfloat16), "2 of f16": (F16, 2, torch.float16), "f32": (F32, 1, torch.float32)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spread", [1, 1e-3, 1e-20])
def test_error_is_that_of_float32(mode, spread, device):
    operand, pieces, dtype = MODES[mode]
    rng = torch.Generator().manual_seed(1)
    a = torch.rand(N, N, generator=rng) ** (1 if spread == 1 else 4) * spread ** torch.rand(N, N, generator=rng)
    b = torch.randn(N, N, generator=rng).to(dtype).float()
    exact = a.double() @ b.double()
    plain = torch.zeros(N, N)
    for k in range(N):
        plain += a[:, k : k + 1] * b[k]
    got = run(a, b, operand, pieces, device)
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2.0**-23 * exact.abs().max()


def test_three_pieces_hold_every_bit_of_a_float32(device):
    bits = np.random.default_rng(2).integers(0, 2**32, N * N, np.uint32)
    a = torch.from_numpy(bits.view(np.float32).reshape(N, N).copy())
    a[(a.abs() < 2.0**-100) | ~a.isfinite()] = 1.0 + 2.0**-23
    assert torch.equal(run(a, torch.eye(N), BF16, 3, device), a)


@pytest.mark.parametrize("mode", ["3 of bf16", "f32"])
def test_infinity_and_nan_stay_in_their_row(mode, device):
    operand, pieces, _ = MODES[mode]
    a = torch.rand(N, N) + 0.1
    a[3, 5], a[4, 7], a[5, 1] = torch.inf, torch.nan, -torch.inf
    a.view(torch.int32)[6, 2] = 0x7F800001  # a NaN whose upper half alone would be infinity
    got = run(a, torch.ones(N, N), operand, pieces, device)
    assert (got[3] == torch.inf).all()
    assert (got[5] == -torch.inf).all()
    assert got[[4, 6]].isnan().all()
    assert got[[0, 1, 2, *range(7, N)]].isfinite().all()
