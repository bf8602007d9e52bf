"""The verifier's run of the packed kernels: it sees one wrong code, and uses what a calibration run recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, load_tensors
from oracle.packed_product import product, values
from packed_matrices import KINDS, random_matrix
from quantkit.export.checkpoint import Reader, open_checkpoint
from quantkit.kernels.cpu.compare import products
from quantkit.kernels.cpu.gemm import matmul
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.matrix import PackedMatrix
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.kernel_run import outputs_off
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.recorded import FILE, inputs_from, recorded_tensors
from quantkit.quantize.run import run
from quantkit.quantize.verification import Report, verify_checkpoint
from safetensors.torch import save_file

UP = "model.layers.1.mlp.up_proj"


def test_products_against_float64() -> None:
    rng = np.random.default_rng(0)
    for inputs in (1, 15, 16, 100, 4096):
        x, w = rng.standard_normal((3, inputs)).astype(np.float32), rng.standard_normal((5, inputs)).astype(np.float32)
        y, size = np.full((3, 5), np.nan, np.float32), np.full((3, 5), np.nan, np.float32)
        products(x, w, y, size)
        sizes = np.abs(x).astype(np.float64) @ np.abs(w).T
        np.testing.assert_allclose(size, sizes, rtol=1e-5)
        assert (np.abs(y - x.astype(np.float64) @ w.T) <= 2.0**-22 * sizes).all()


@pytest.mark.parametrize(("name", "scale_format"), KINDS)
def test_one_wrong_code_is_seen_and_none_is_not(name: str, scale_format: str) -> None:
    w = random_matrix(name, 130, 4096, scale_format)
    hat = values(w).astype(np.float32)
    x = np.random.default_rng(4096).standard_normal((8, 4096)).astype(np.float32)
    assert outputs_off(matmul(x, w), x, hat) == 0
    for row, byte in ((0, 0), (77, 901), (129, w.codes.shape[1] - 1)):
        codes = w.codes.copy()
        codes[row, byte] ^= 0x40 if w.scheme.element == "e4m3" else 1  # FP8: the exponent; a last bit may weigh nothing
        assert outputs_off(matmul(x, replace(w, codes=codes)), x, hat) > 0, (row, byte)
    assert outputs_off(np.full((8, 130), np.nan, np.float32), x, hat) == 8 * 130


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("made")
    source = FAMILIES["llama"](root / "s")
    run(make_plan(load_recipe("int4"), open_checkpoint(source)), root / "o", jobs=1, memory=1 << 20)
    return source, root / "o"


def layer_of(report: Report) -> float:
    assert report.passed, [c.failures for c in report.checks]
    return next(e.output_error for e in report.layers if e.name == f"{UP}.weight")


def output_error(source: Path, out: Path, x_TI: torch.Tensor) -> float:
    """Relative error of the layer's outputs in float64, from the two files."""
    w_OI = load_tensors(source)[f"{UP}.weight"].double().numpy()
    parts = load_tensors(out)
    codes = parts[f"{UP}.weight_packed"].numpy().view(np.uint8)
    scale = parts[f"{UP}.weight_scale"].view(torch.uint16).numpy()
    scheme = SCHEMES[f"int4-g{w_OI.shape[1] // scale.shape[1]}"]
    exact = x_TI.double().numpy() @ w_OI.T
    packed = product(x_TI.double().numpy(), PackedMatrix(scheme, *w_OI.shape, codes, scale, "bf16"))
    return float(np.linalg.norm(packed - exact) / np.linalg.norm(exact))


def test_output_error_is_that_of_the_written_weight(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = made
    inputs = open_checkpoint(source).tensors[f"{UP}.weight"].shape[1]
    recorded = torch.randn(20, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    recorded[:, 3] *= 40
    save_file({f"inputs.{UP}": recorded}, tmp_path / FILE)
    given = [torch.from_numpy(inputs_from({}, Reader())(UP, inputs)[0]), recorded[:8]]
    for x, folder in zip(given, (None, tmp_path), strict=True):
        report = verify_checkpoint(out, open_checkpoint(source), run=folder)
        assert layer_of(report) == pytest.approx(output_error(source, out, x), rel=1e-4)
        where = next(c.value for c in report.checks if "packed kernels" in c.name)
        assert ("recorded ones for 1" in where) == (folder is not None)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 7), "does not fit its layer"),
        (torch.zeros(4), "does not fit its layer"),
        (torch.zeros(4, 64, dtype=torch.int32), "not a float tensor"),
        (torch.full((4, 64), float("nan")), "NaN or infinity"),
    ],
)
def test_refuses_samples_that_do_not_fit(
    made: tuple[Path, Path], tmp_path: Path, tensor: torch.Tensor, message: str
) -> None:
    source, out = made
    inputs = open_checkpoint(source).tensors[f"{UP}.weight"].shape[1]
    shaped = tensor.repeat(1, inputs // 64) if tensor.ndim == 2 and tensor.shape[1] == 64 else tensor
    save_file({f"inputs.{UP}": shaped}, tmp_path / FILE)
    with pytest.raises(QuantkitError, match=message):
        verify_checkpoint(out, open_checkpoint(source), run=tmp_path)


def test_refuses_a_folder_without_samples(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="without recorded samples"):
        recorded_tensors(tmp_path)
