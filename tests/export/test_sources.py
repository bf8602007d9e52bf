"""Sources in every published layout: rows decode to the exact values, and can be passed, decoded and quantised again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import quantised
import quantised_fp4
from families import FAMILIES, read_config, tiny, write_config
from quantkit.export.checkpoint import Checkpoint, Reader, open_checkpoint
from quantkit.export.sources.detect import weights_of
from quantkit.export.sources.packed import packed_rows
from quantkit.export.sources.rows import Buffers, row_source
from quantkit.kernels.cpu.gemm import matmul
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe, with_int4_group
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint

# The writers of the sources do not share global scales inside fused sets, as careless tools do not: copied, that stays.
CARELESS = "fused sets share scheme and global scale"


def failures(out: Path, source: Checkpoint) -> set[str]:
    """Names of the failed checks."""
    return {c.name for c in verify_checkpoint(out, source).checks if not c.passed}


Writer = Callable[[Path, Path], dict[str, np.ndarray]]

SOURCES: dict[str, Writer] = {
    "fp8 block": quantised.as_fp8_block,
    "fp8 block ue8m0": partial(quantised.as_fp8_block, ue8m0=True),
    "fp8 tensor ct": partial(quantised.as_fp8_tensor, dialect="compressed-tensors"),
    "fp8 tensor modelopt": partial(quantised.as_fp8_tensor, dialect="modelopt"),
    "fp8 channel ct": partial(quantised.as_fp8_channel, dialect="compressed-tensors"),
    "fp8 channel modelopt": partial(quantised.as_fp8_channel, dialect="modelopt"),
    "int4 g32": partial(quantised.as_ct_int4, group=32, symmetric=True),
    "int4 g64 asymmetric": partial(quantised.as_ct_int4, group=64, symmetric=False),
    "int4 channel": partial(quantised.as_ct_int4, group=0, symmetric=True),
    "gptq v1": partial(quantised.as_gptq, v2=False, group=64, symmetric=True),
    "gptq v2": partial(quantised.as_gptq, v2=True, group=64, symmetric=True),
    "gptq asymmetric": partial(quantised.as_gptq, v2=False, group=64, symmetric=False),
    "awq": quantised.as_awq,
    "nvfp4 ct": partial(quantised_fp4.as_nvfp4, dialect="compressed-tensors"),
    "nvfp4 modelopt": partial(quantised_fp4.as_nvfp4, dialect="modelopt"),
    "mxfp4 ct": quantised_fp4.as_mxfp4_ct,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 in small: MLA with its partial blocks, dense and expert layers, an MTP layer."""
    return FAMILIES["deepseek_v3"](tmp_path_factory.mktemp("plain") / "m")


@pytest.fixture(scope="module", params=SOURCES)
def source(
    request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("source") / "m"
    return folder, SOURCES[request.param](plain, folder)


def test_rows_decode_to_the_exact_values(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, exact = source
    weights = weights_of(open_checkpoint(folder))
    with Reader() as reader:
        for name, expected in exact.items():
            rows, inputs = weights[name].shape
            assert expected.shape == (rows, inputs)
            decoder = row_source(weights[name], rows, inputs, 0, None, reader, Buffers())
            got = np.full((rows, inputs), np.nan, np.float32)
            for first in range(0, rows, 72):  # blocks that end inside FP8 blocks and packed words
                n = min(72, rows - first)
                decoder.load(first, n)
                for at in range(0, n, 24):
                    part = got[first + at : first + min(at + 24, n)]
                    decoder.decode(first + at, len(part), part)
            # NVFP4 is rounded twice (scale times global, then times the code) against once: at most 2 ulp of float32
            np.testing.assert_allclose(got, expected, rtol=2**-22, atol=0, err_msg=name)


def test_packed_kernels_read_the_same_numbers(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    """The product with the identity, from the bytes of the file, in blocks that begin inside a scale block's rows."""
    folder, exact = source
    weights = weights_of(open_checkpoint(folder))
    with Reader() as reader:
        for name, expected in exact.items():
            rows, inputs = expected.shape
            packed = packed_rows(weights[name], 0, reader)
            if weights[name].encoding.startswith("gptq") and weights[name].scheme is None:
                assert packed is None, "no engine reads GPTQ's asymmetric codes"
                continue
            assert packed is not None
            step = packed.multiple * (1 if packed.multiple == 128 else 3)
            eye = np.eye(inputs, dtype=np.float32)
            for first in range(0, rows, step):
                part = expected[first : first + step]
                got = matmul(eye, packed.read(first, len(part), reader)).T
                np.testing.assert_allclose(got, part, rtol=2**-22, atol=0, err_msg=name)


def test_kept_as_published(source: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source[0])
    run(make_plan(load_recipe("keep"), checkpoint), tmp_path / "o", jobs=2, memory=1 << 20)
    kept = open_checkpoint(tmp_path / "o")
    assert {n: (t.dtype, t.shape) for n, t in kept.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in checkpoint.tensors.items()
    }
    assert (tmp_path / "o" / "config.json").read_bytes() == (source[0] / "config.json").read_bytes()
    assert failures(tmp_path / "o", checkpoint) <= {CARELESS}


def recipe_of(tmp_path: Path, scheme: str) -> str:
    file = tmp_path / "r.yaml"
    file.write_text(
        f"weights:\n  - {{match: {{role: routed_experts}}, scheme: {scheme}}}\n  - {{match: {{role: '*'}}, scheme: bf16}}\n"
    )
    return str(file)


@pytest.mark.parametrize("scheme", ["int4-g32", "nvfp4", "mxfp4", "fp8-block", "fp8-channel", "fp8-tensor"])
def test_quantised_again_with_the_rest_decoded(
    source: tuple[Path, dict[str, np.ndarray]], scheme: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(source[0])
    recipe = load_recipe(recipe_of(tmp_path, scheme))
    if any(w.extra and w.scheme is not None and w.scheme.name == scheme for w in weights_of(checkpoint).values()):
        with pytest.raises(QuantkitError, match="activation scales"):
            make_plan(recipe, checkpoint)
        return
    plan = make_plan(recipe, checkpoint)
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    assert failures(tmp_path / "o", checkpoint) <= ({CARELESS} if any(t.fate == "pass" for t in plan.tasks) else set())
    weights = weights_of(open_checkpoint(tmp_path / "o"))
    assert {
        w.scheme.name if w.scheme else w.encoding
        for n, w in weights.items()
        if ".experts." in n and "layers.2" not in n
    } == {scheme}
    assert "quantization_config" in open_checkpoint(tmp_path / "o").config


def llama(folder: Path, half: bool) -> Path:
    """A Llama whose layers are whole FP8 blocks; `half`: its dtype is fp16, as GPTQ checkpoints have it."""
    tiny(folder, "llama", num_key_value_heads=4)
    if half:
        write_config(folder, read_config(folder) | {"dtype": "float16"})
    return folder


PASSES = [
    ("int4 g32", "int4-g32", "compressed-tensors"),
    ("gptq v1", "int4-g64", "compressed-tensors"),
    ("gptq v2", "int4-g64", "compressed-tensors"),
    ("awq", "int4a-g64", "compressed-tensors"),
    ("nvfp4 ct", "nvfp4", "modelopt"),
    ("nvfp4 modelopt", "nvfp4", "compressed-tensors"),
    ("nvfp4 modelopt", "nvfp4", "modelopt"),
    ("fp8 block", "fp8-block", "compressed-tensors"),
    ("fp8 block", "fp8-block", "modelopt"),
    ("fp8 block", "fp8-block", "fp8"),
    ("fp8 channel modelopt", "fp8-channel", "compressed-tensors"),
    ("mxfp4 ct", "mxfp4", "compressed-tensors"),
]


@pytest.mark.parametrize(("name", "scheme", "target"), PASSES)
def test_a_source_in_the_target_scheme_passes_bit_exactly(name: str, scheme: str, target: str, tmp_path: Path) -> None:
    plain = llama(tmp_path / "plain", half=name.startswith(("gptq", "awq")))
    SOURCES[name](plain, tmp_path / "src")
    file = tmp_path / "r.yaml"
    file.write_text(
        f"weights:\n  - {{match: {{role: [attention, dense_mlp]}}, scheme: {scheme}}}\n  - {{match: {{role: '*'}}, keep: true}}\n"
    )
    checkpoint = open_checkpoint(tmp_path / "src")
    plan = make_plan(load_recipe(str(file)), checkpoint, format_name=target)
    assert {t.fate for t in plan.tasks} <= {"keep", "pass", "drop"}
    run(plan, tmp_path / "o", jobs=2, memory=1 << 20)
    assert failures(tmp_path / "o", checkpoint) <= ({CARELESS} if scheme == "nvfp4" else set())
    with Reader() as reader:
        before, after = weights_of(checkpoint), weights_of(open_checkpoint(tmp_path / "o"))
        for weight in before.values():
            if weight.encoding == "plain":
                continue
            new = after[weight.name]
            assert new.scheme == weight.scheme
            if not weight.encoding.startswith(("gptq", "awq")):
                for kind in ("codes", "scale"):
                    assert reader.read(weight.parts[kind]).tobytes() == reader.read(new.parts[kind]).tobytes(), (
                        weight.name
                    )


def test_gptq_that_lies_about_symmetry_is_refused(tmp_path: Path) -> None:
    plain = llama(tmp_path / "plain", half=True)
    quantised.as_gptq(plain, tmp_path / "src", v2=False, group=64, symmetric=False)
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    plan = make_plan(with_int4_group(load_recipe("int4"), "64"), open_checkpoint(tmp_path / "src"))
    assert any(t.fate == "pass" for t in plan.tasks)
    with pytest.raises(QuantkitError, match="says symmetric"):
        run(plan, tmp_path / "o", jobs=1, memory=1 << 20)


def test_gpt_oss_experts_to_blocks_and_back(tmp_path: Path) -> None:
    plain = FAMILIES["gpt_oss"](tmp_path / "plain")
    exact = quantised_fp4.as_gptoss_mxfp4(plain, tmp_path / "mx")
    blocks = open_checkpoint(tmp_path / "mx")
    file = tmp_path / "r.yaml"
    file.write_text("weights:\n  - {match: {role: '*'}, scheme: bf16}\n")
    run(make_plan(load_recipe(str(file)), blocks), tmp_path / "bf16", jobs=2, memory=1 << 20)
    assert verify_checkpoint(tmp_path / "bf16", blocks).passed
    decoded = open_checkpoint(tmp_path / "bf16")
    assert "quantization_config" not in decoded.config
    assert set(decoded.tensors) == set(open_checkpoint(plain).tensors)
    with Reader() as reader:
        for name, expected in exact.items():
            info = decoded.tensors[name]
            got = (reader.read(info).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
            # MXFP4 values are exact in BF16; published BF16 experts are [E, I, O]
            np.testing.assert_array_equal(got, expected.swapaxes(1, 2))
    again = make_plan(load_recipe("mxfp4-experts"), decoded, format_name="mxfp4")
    run(again, tmp_path / "again", jobs=2, memory=1 << 20)
    report = verify_checkpoint(tmp_path / "again", decoded)
    assert report.passed, [c for c in report.checks if not c.passed]
    assert max(e.error for e in report.layers) == 0.0, "weights on the grid come back as they were"
