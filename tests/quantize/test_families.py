"""The test checkpoints themselves: giants against published sizes, quantised sources against other decoders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import headers
import numpy as np
import pytest
import quantised as q
import quantised_fp4 as q4
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from families import FAMILIES, load_tensors, read_config

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sizes_golden.json").read_text())
PUBLISHED = [k for k in GOLDEN if k.split("/")[1] in ("bf16", "fp8_block128")]


@pytest.mark.parametrize("key", PUBLISHED)
def test_giants_have_the_published_counts_and_bytes(key: str) -> None:
    name, store, part = key.split("/")
    model = headers.GIANTS[name] if part == "all" else headers.GIANTS[name].without_mtp()
    listed = list(headers.tensors(model, store))
    params = sum(math.prod(shape) for tensor, _, shape in listed if not tensor.endswith("_scale_inv"))
    assert {"bytes": sum(map(headers.nbytes, listed)), "tensors": len(listed), "params": params} == GOLDEN[key]


def test_kimi_int4_has_the_published_bytes() -> None:
    listed = list(headers.tensors(headers.GIANTS["KIMI-K2.6-text"], "int4g32"))
    golden = GOLDEN["KIMI-K2.6-text/experts_int4g32/rest_bf16"]
    shapes = sum(name.endswith("weight_shape") for name, _, _ in listed)
    # the golden size counts weight_shape as two int64; the published files hold two int32
    assert (sum(map(headers.nbytes, listed)) + 8 * shapes, len(listed)) == (golden["bytes"], golden["tensors"])


def test_a_giant_on_disk_has_true_sizes_and_takes_no_space(tmp_path: Path) -> None:
    folder = headers.write(tmp_path / "glm", headers.GIANTS["GLM-5.2"], "fp8_block128")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 141
    assert index["metadata"]["total_size"] == 755_617_140_416
    assert len(index["weight_map"]) == 118_629
    sizes = [f.stat() for f in files]
    headers_bytes = sum(s.st_size for s in sizes) - 755_617_140_416
    assert abs(headers_bytes - 14_909_904) < 0.1 * 14_909_904  # the published files hold 755,632,050,320 bytes
    assert sum(s.st_blocks * 512 for s in sizes) < 40e6
    listed = [n for n in read_config(folder)["quantization_config"]["modules_to_not_convert"] if "indexers_proj" in n]
    assert listed
    assert not set(index["weight_map"]) & {n + ".weight" for n in listed}


@pytest.mark.parametrize(("name", "store"), [("GLM-5.2", "fp8_block128"), ("KIMI-K2.6-text", "int4g32")])
def test_a_miniature_keeps_what_is_awkward(tmp_path: Path, name: str, store: Any) -> None:
    model = headers.miniature(name)
    folder = headers.write(tmp_path / "mini", model, store, shard_bytes=1 << 20, seed=0)
    tensors = load_tensors(folder)
    assert {n: list(t.shape) for n, t in tensors.items()} == {n: list(s) for n, _, s in headers.tensors(model, store)}
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert all(t.float().isfinite().all() for t in tensors.values())
    if name == "GLM-5.2":
        attention = "model.layers.{}.self_attn."
        assert tensors[attention.format(0) + "kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
        assert tensors["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == torch.float32
        owners = [i for i in range(9) if attention.format(i) + "indexer.k_norm.bias" in tensors]
        assert owners == [0, 1, 2, 6, 8]
        assert "model.layers.8.eh_proj.weight" in tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_small_and_finite(family: str, tmp_path: Path) -> None:
    tensors = load_tensors(FAMILIES[family](tmp_path / "m"))
    assert sum(t.nbytes for t in tensors.values()) < 9 << 20
    assert all(t.isfinite().all() and t.float().std() > 0 for t in tensors.values())


# weights are compared with what compressed-tensors decodes; group 32 everywhere but where the format fixes it
CT_WRITERS: dict[str, Callable[..., q.Oracle]] = {
    "int4": q.as_ct_int4,
    "int4_asymmetric": partial(q.as_ct_int4, group=64, symmetric=False),
    "int4_channel": partial(q.as_ct_int4, group=0),
    "nvfp4": q4.as_nvfp4,
    "mxfp4": q4.as_mxfp4_ct,
    "fp8_tensor": q.as_fp8_tensor,
    "fp8_channel": q.as_fp8_channel,
}


@pytest.mark.parametrize("writer", CT_WRITERS)
def test_compressed_tensors_decodes_our_sources(writer: str, qwen3_moe: Path, tmp_path: Path) -> None:
    oracle = CT_WRITERS[writer](qwen3_moe, tmp_path / "q")
    raw = read_config(tmp_path / "q")["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_tensors(tmp_path / "q")
    for name, exact in oracle.items():
        stem = name.removesuffix("weight")
        parts = {n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)}
        decoded = compressor.decompress(parts, scheme)["weight"].float().numpy()
        # it rounds to bfloat16 at the end, and for NVFP4 the scale over the global as well
        np.testing.assert_allclose(decoded, exact, rtol=2**-7, atol=1e-9, err_msg=name)


PLAIN_WRITERS: dict[str, Callable[..., q.Oracle]] = {
    "fp8_block": q.as_fp8_block,
    "fp8_block_ue8m0": partial(q.as_fp8_block, ue8m0=True, scale_dtype=torch.float8_e8m0fnu),
    "gptq_v1": q.as_gptq,
    "gptq_v2": partial(q.as_gptq, v2=True, symmetric=False),
    "awq": q.as_awq,
    "nvfp4_modelopt": partial(q4.as_nvfp4, dialect="modelopt", activations=True),
    "fp8_tensor_modelopt": partial(q.as_fp8_tensor, dialect="modelopt"),
    "fp8_channel_modelopt": partial(q.as_fp8_channel, dialect="modelopt"),
}
ERROR = {"fp8": 0.05, "int4": 0.2, "fp4": 0.2}


@pytest.mark.parametrize("writer", PLAIN_WRITERS | CT_WRITERS)
def test_sources_stay_close_to_the_plain_weights(writer: str, qwen3_moe: Path, tmp_path: Path) -> None:
    oracle = (PLAIN_WRITERS | CT_WRITERS)[writer](qwen3_moe, tmp_path / "q")
    plain, tensors = load_tensors(qwen3_moe), load_tensors(tmp_path / "q")
    kind = next((k for k in ERROR if k in writer), "int4")
    assert len(oracle) == 23  # 8 of attention, 3 of the dense MLP, 12 of experts
    for name, exact in oracle.items():
        w = plain[name].float().numpy()
        assert np.linalg.norm(exact - w) < ERROR[kind] * np.linalg.norm(w), name
    kept = [n for n in plain if n not in oracle]
    assert all(torch.equal(plain[n], tensors[n]) for n in kept)


def nibbles(words: torch.Tensor) -> np.ndarray:
    """The eight 4-bit codes of every int32, lowest first, in a new last axis."""
    return words.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15


@pytest.mark.parametrize("v2", [False, True])
def test_gptq_follows_its_formula(v2: bool, qwen3_moe: Path, tmp_path: Path) -> None:
    oracle = q.as_gptq(qwen3_moe, tmp_path / "q", v2=v2, symmetric=False)
    tensors = load_tensors(tmp_path / "q")
    for name, exact_OI in oracle.items():
        stem = name.removesuffix("weight")
        codes_IO = nibbles(tensors[stem + "qweight"]).swapaxes(1, 2).reshape(exact_OI.T.shape)  # code[8r + i, n]
        zeros_GO = nibbles(tensors[stem + "qzeros"]).reshape(-1, exact_OI.shape[0]) + (0 if v2 else 1)
        group_I = tensors[stem + "g_idx"].numpy()
        scales_GO = tensors[stem + "scales"].float().numpy()
        decoded = (codes_IO.astype(np.float32) - zeros_GO[group_I]) * scales_GO[group_I]
        np.testing.assert_array_equal(decoded.astype(np.float32), exact_OI.T)


def test_awq_follows_its_formula(qwen3_moe: Path, tmp_path: Path) -> None:
    oracle = q.as_awq(qwen3_moe, tmp_path / "q", group=64)
    tensors = load_tensors(tmp_path / "q")
    for name, exact_OI in oracle.items():
        stem = name.removesuffix("weight")
        order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # nibble i holds column order[i]
        codes_IO = nibbles(tensors[stem + "qweight"])[..., order].reshape(exact_OI.T.shape)
        zeros_GO = nibbles(tensors[stem + "qzeros"])[..., order].reshape(-1, exact_OI.shape[0])
        scales_GO = tensors[stem + "scales"].float().numpy()
        decoded = (codes_IO.astype(np.float32) - zeros_GO.repeat(64, 0)) * scales_GO.repeat(64, 0)
        np.testing.assert_array_equal(decoded.astype(np.float32), exact_OI.T)


def test_gpt_oss_blocks_decode_as_transformers_decodes_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    FAMILIES["gpt_oss"](tmp_path / "plain")
    oracle = q4.as_gptoss_mxfp4(tmp_path / "plain", tmp_path / "q")
    tensors = load_tensors(tmp_path / "q")
    assert len(oracle) == 4
    for name, exact_EOI in oracle.items():
        blocks, scales = tensors[name + "_blocks"], tensors[name + "_scales"]
        assert blocks.shape == (*exact_EOI.shape[:2], exact_EOI.shape[2] // 32, 16)
        decoded_EIO = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        np.testing.assert_array_equal(decoded_EIO.transpose(1, 2).numpy(), exact_EOI)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3_moe"](tmp_path_factory.mktemp("families") / "qwen3_moe")
