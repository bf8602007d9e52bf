"""Opening a checkpoint: index against headers, paths, companions; every fault names file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from quantkit.export.checkpoint import open_checkpoint
from quantkit.export.sources.detect import weights_of
from quantkit.kernels.errors import QuantkitError
from safetensors.numpy import save_file

A = {"a.weight": np.arange(8, dtype=np.float32).reshape(2, 4)}
B = {"b.weight": np.ones((2, 2), np.float32)}


def folder_of(
    path: Path, *, weight_map: dict[str, str] | None = None, config: str = "{}", **files: dict[str, np.ndarray]
) -> Path:
    path.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    if weight_map is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(config)
    return path


def test_one_file_and_side_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model=A)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "modeling.py").write_text("x = 1")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == ["a.weight"]
    assert checkpoint.nbytes == 32
    assert [str(p) for p in checkpoint.side_files] == ["sub/modeling.py", "tokenizer.json"]


def test_index_of_two_shards(tmp_path: Path) -> None:
    names = {"a.weight": "x.safetensors", "b.weight": "y.safetensors"}
    checkpoint = open_checkpoint(folder_of(tmp_path, weight_map=names, x=A, y=B))
    assert checkpoint.tensors["b.weight"].file == tmp_path / "y.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "x.safetensors", "b.weight": "z.safetensors"}, "shard of the index is missing"),
        ({"a.weight": "x.safetensors", "b.weight": "x.safetensors"}, "wrong shard|does not name|no shard holds"),
        ({"a.weight": "x.safetensors", "b.weight": "y.safetensors", "c.weight": "y.safetensors"}, "no shard holds"),
        ({"a.weight": "y.safetensors", "b.weight": "x.safetensors"}, "wrong shard"),
        ({"a.weight": "x.safetensors", "b.weight": "../y.safetensors"}, "outside of the checkpoint"),
        ({"a.weight": "x.safetensors", "b.weight": "/etc/passwd"}, "outside of the checkpoint"),
        ({"a.weight": "x.safetensors", "b.weight": "s/../../y.safetensors"}, "outside of the checkpoint"),
        ({"a.weight": "x.safetensors", "b.weight": 7}, "not a name"),
        ({}, "no weight_map"),
    ],
)
def test_lying_index(weight_map: dict[str, str], message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, weight_map=weight_map, x=A, y=B)
    with pytest.raises(QuantkitError, match=message):
        open_checkpoint(folder)


def test_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, weight_map={"a.weight": "x.safetensors"}, x={**A, **B})
    with pytest.raises(QuantkitError, match="does not name") as e:
        open_checkpoint(folder)
    assert "b.weight" in str(e.value)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    names = {"a.weight": "x.safetensors", "b.weight": "y.safetensors"}
    with pytest.raises(QuantkitError, match="two shards"):
        open_checkpoint(folder_of(tmp_path, weight_map=names, x=A, y={**A, **B}))


def test_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="no index"):
        open_checkpoint(folder_of(tmp_path, x=A, y=B))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(QuantkitError, match="no safetensors files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("config", "message"), [("[1]", "not a JSON object"), ("{", "not valid JSON")])
def test_bad_config(config: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=message):
        open_checkpoint(folder_of(tmp_path, model=A, config=config))


@pytest.mark.parametrize("source", ["/no/such/folder", "name-alone", "a/b/c", "", "./x"])
def test_no_such_source(source: str) -> None:
    with pytest.raises(QuantkitError, match=r"no such folder|no config"):
        open_checkpoint(source)


FP8 = np.zeros((256, 256), np.uint8)


def quantized(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """A checkpoint of zero bytes with tensors of any dtype."""
    from quantkit.export.safetensors_file import layout

    header, _, size = layout([(n, d, s) for n, (d, s) in tensors.items()])
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(header + bytes(size - len(header)))
    (path / "config.json").write_text("{}")
    return path


ENCODINGS: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]], str, str | None]] = [
    ("block", {"l.weight": ("F8_E4M3", (576, 256)), "l.weight_scale_inv": ("F32", (5, 2))}, "fp8-block", "fp8-block"),
    ("small block", {"l.weight": ("F8_E4M3", (64, 64)), "l.weight_scale_inv": ("F32", (1, 1))}, "fp8-block", "fp8-block"),
    ("ue8m0 block", {"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale_inv": ("F8_E8M0", (2, 2))}, "fp8-block", "fp8-block-ue8m0"),
    ("ct block", {"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale": ("F32", (2, 2))}, "fp8-block", "fp8-block"),
    ("modelopt block", {"l.weight": ("F8_E4M3", (256, 128)), "l.weight_scale": ("F32", (2, 1, 1, 1))}, "fp8-block", "fp8-block"),
    ("tensor", {"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale": ("F32", ())}, "fp8-tensor", "fp8-tensor"),
    ("tensor [1]", {"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale": ("F32", (1,))}, "fp8-tensor", "fp8-tensor"),
    ("channel", {"l.weight": ("F8_E4M3", (256, 64)), "l.weight_scale": ("F32", (256, 1))}, "fp8-channel", "fp8-channel"),
    ("channel bf16", {"l.weight": ("F8_E4M3", (256, 64)), "l.weight_scale": ("BF16", (256, 1))}, "fp8-channel", None),
    ("channel 1-d", {"l.weight": ("F8_E4M3", (256, 64)), "l.weight_scale": ("F32", (256,))}, "fp8-channel", "fp8-channel"),
    ("int4", {"l.weight_packed": ("I32", (8, 16)), "l.weight_scale": ("BF16", (8, 4)), "l.weight_shape": ("I64", (2,))}, "int4-ct", "int4-g32"),
    ("int4 channel", {"l.weight_packed": ("I32", (8, 32)), "l.weight_scale": ("BF16", (8, 1)), "l.weight_shape": ("I32", (2,))}, "int4-ct", "int4-channel"),
    ("nvfp4 ct", {"l.weight_packed": ("U8", (8, 32)), "l.weight_scale": ("F8_E4M3", (8, 4)), "l.weight_global_scale": ("F32", (1,))}, "nvfp4", "nvfp4"),
    ("nvfp4 modelopt", {"l.weight": ("U8", (8, 32)), "l.weight_scale": ("F8_E4M3", (8, 4)), "l.weight_scale_2": ("F32", ())}, "nvfp4", "nvfp4"),
    ("mxfp4 ct", {"l.weight_packed": ("U8", (8, 32)), "l.weight_scale": ("U8", (8, 2))}, "mxfp4", "mxfp4"),
    ("gptq", {"l.qweight": ("I32", (8, 32)), "l.qzeros": ("I32", (2, 4)), "l.scales": ("F16", (2, 32)), "l.g_idx": ("I32", (64,))}, "gptq-v1", None),
    ("awq", {"l.qweight": ("I32", (64, 4)), "l.qzeros": ("I32", (2, 4)), "l.scales": ("F16", (2, 32))}, "awq", "int4a-g32"),
    ("bf16", {"l.weight": ("BF16", (8, 8))}, "plain", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "encoding", "scheme"), ENCODINGS, ids=[e[0] for e in ENCODINGS])
def test_what_a_weight_is(
    name: str, tensors: dict[str, tuple[str, tuple[int, ...]]], encoding: str, scheme: str | None, tmp_path: Path
) -> None:
    (weight,) = weights_of(open_checkpoint(quantized(tmp_path, tensors))).values()
    assert weight.name == "l.weight"
    assert weight.encoding == encoding
    assert (weight.scheme.name if weight.scheme else None) == scheme
    assert len(weight.shape) == 2


def test_activation_scales_go_with_their_weight(tmp_path: Path) -> None:
    tensors = {"l.weight": ("F8_E4M3", (8, 8)), "l.weight_scale": ("F32", ()), "l.input_scale": ("F32", ())}
    (weight,) = weights_of(open_checkpoint(quantized(tmp_path, tensors))).values()
    assert [t.name for t in weight.extra] == ["l.input_scale"]


BROKEN = [
    ({"l.weight": ("F8_E4M3", (8, 8))}, "scale of an FP8 weight is missing"),
    ({"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale_inv": ("F32", (3, 2))}, "does not fit the weight"),
    ({"l.weight": ("F8_E4M3", (8, 8)), "l.weight_scale": ("I32", (1,))}, "wrong dtype"),
    ({"l.weight": ("F8_E5M2", (8, 8))}, "unknown meaning"),
    ({"l.weight_packed": ("I32", (8, 16)), "l.weight_shape": ("I64", (2,))}, "scale of a packed weight is missing"),
    ({"l.weight_packed": ("I32", (8, 16)), "l.weight_scale": ("BF16", (8, 4))}, "shape of a packed weight is missing"),
    ({"l.weight_packed": ("U8", (8, 32)), "l.weight_scale": ("F8_E4M3", (8, 4))}, "global scale of NVFP4 is missing"),
    ({"l.weight_packed": ("U8", (8, 32)), "l.weight_scale": ("U8", (8, 3))}, "does not fit the weight"),
    ({"l.qweight": ("I32", (8, 32)), "l.scales": ("F16", (2, 32))}, "zero points .* missing"),
    ({"l.weight": ("U8", (8, 32)), "l.weight_scale": ("F8_E4M3", (8, 4))}, "global scale of NVFP4 is missing"),
    ({"x_blocks": ("U8", (2, 4, 3, 16)), "x_scales": ("U8", (2, 4, 2))}, "does not fit the weight"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), BROKEN)
def test_missing_and_misfitting_companions(
    tensors: dict[str, tuple[str, tuple[int, ...]]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=message):
        weights_of(open_checkpoint(quantized(tmp_path, tensors)))
