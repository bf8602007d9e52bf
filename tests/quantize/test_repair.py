"""Each fault that can be mended, made in a tiny checkpoint: it fails before, passes after, and decodes to what it should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, load_tensors, save_tensors
from quantkit.export.checkpoint import open_checkpoint
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli.main import app, run_app
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import load_recipe
from quantkit.quantize.repair import Repaired, repair
from quantkit.quantize.run import run
from quantkit.quantize.verification import verify_checkpoint

A = "model.layers.{}.self_attn"
Q, K, V = (f"{A.format(0)}.{p}_proj" for p in "qkv")
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INDEX = "model.safetensors.index.json"
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FAMILIES["llama"](tmp_path_factory.mktemp("source") / "m")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def good(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, recipe, form in (
        ("ct", "nvfp4", "compressed-tensors"),
        ("modelopt", "nvfp4", "modelopt"),
        ("shards", "int4", "compressed-tensors"),
    ):
        loaded = load_recipe(recipe)
        if name == "shards":
            loaded = loaded.model_copy(update={"outputs": (loaded.output.model_copy(update={"shard_size": 300_000}),)})
        made[name] = tmp_path_factory.mktemp("good") / name
        run(make_plan(loaded, open_checkpoint(source), format_name=form), made[name], jobs=1, memory=1 << 20)
    return made


def broken(good: Path, tmp_path: Path, change: Callable[[Tensors], object] | None = None) -> Path:
    """A copy without a manifest, as other tools write it, its tensors changed."""
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    (folder / "quantkit.json").unlink()
    if change is not None:
        tensors = load_tensors(folder)
        change(tensors)
        save_tensors(folder, tensors)
    return folder


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def mended(folder: Path, **options: Any) -> tuple[Repaired, Tensors, Path]:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    out = folder.parent / "mended"
    done = repair(folder, out, **options)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before, "the old one is not touched"
    assert not (folder.parent / "mended.partial").exists()
    assert verify_checkpoint(out, None).passed
    return done, load_tensors(out), out


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(QuantkitError, match=message):
        repair(folder, folder.parent / "mended", **options)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing half-written"


def passes(folder: Path) -> bool:
    return verify_checkpoint(folder, None).passed


def decoded(t: Tensors, module: str) -> torch.Tensor:
    """NVFP4 of either dialect by the formats' description, in float64."""
    packed = t.get(f"{module}.weight_packed", t.get(f"{module}.weight"))
    assert packed is not None
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    scale = t[f"{module}.weight_scale"].double().repeat_interleave(16, 1)
    divisor = t.get(f"{module}.weight_global_scale")
    unit = 1 / divisor.double() if divisor is not None else t[f"{module}.weight_scale_2"].double()
    return VALUES[codes] * scale * unit


@pytest.mark.parametrize(
    ("dialect", "name", "factor"), [("ct", "weight_global_scale", 1.3), ("modelopt", "weight_scale_2", 0.7)]
)
def test_fused_global_scales(good: dict[str, Path], tmp_path: Path, dialect: str, name: str, factor: float) -> None:
    def change(t: Tensors) -> None:
        t[f"{K}.{name}"] *= factor
        t[f"{V}.{name}"] *= factor**2

    folder = broken(good[dialect], tmp_path, change)
    old = load_tensors(folder)
    assert not passes(folder)
    done, new, _ = mended(folder)
    globals_ = {float(new[f"{m}.{name}"]) for m in (Q, K, V)}
    stored = [float(old[f"{m}.{name}"]) for m in (Q, K, V)]
    assert globals_ == {min(stored) if dialect == "ct" else max(stored)}
    err = norm = 0.0
    for m in (Q, K, V):
        before, after = decoded(old, m), decoded(new, m)
        assert ((before - after).norm() / before.norm()).item() < 0.04, "half a step of E4M3 at most, 1/16 of a scale"
        err, norm = err + (before - after).square().sum().item(), norm + before.square().sum().item()
    (change_,) = done.changes
    assert change_.error == pytest.approx((err / norm) ** 0.5, rel=1e-6)
    assert change_.error > 0
    assert torch.equal(decoded(old, Q), decoded(new, Q)) is (
        min(stored) == stored[0] if dialect == "ct" else max(stored) == stored[0]
    )
    names = {f"{m}.{s}" for m in (K, V, Q) for s in ("weight_scale", name)}
    assert all(torch.equal(new[n], old[n]) for n in old if n not in names)


A4 = """weights:
  - {match: {role: [attention, dense_mlp]}, scheme: nvfp4, input_scale: 0.01}
  - {match: {role: "*"}, keep: true}
"""


@pytest.mark.parametrize(
    ("form", "name", "widest"),
    [("compressed-tensors", "input_global_scale", min), ("modelopt", "input_scale", max)],
)
def test_input_scales_that_are_not_shared(
    source: Path, tmp_path: Path, form: str, name: str, widest: Callable[[list[float]], float]
) -> None:
    (tmp_path / "r.yaml").write_text(A4)
    made = tmp_path / "room" / "made"
    made.parent.mkdir()
    plan = make_plan(load_recipe(str(tmp_path / "r.yaml")), open_checkpoint(source), format_name=form)
    run(plan, made, jobs=1, memory=1 << 20)

    def change(t: Tensors) -> None:
        t[f"{K}.{name}"] *= 2
        t[f"{V}.{name}"] /= 4

    folder = broken(made, tmp_path / "room", change)
    stored = [float(load_tensors(folder)[f"{m}.{name}"]) for m in (Q, K, V)]
    assert not passes(folder)
    done, new, _ = mended(folder)
    assert {float(new[f"{m}.{name}"]) for m in (Q, K, V)} == {widest(stored)}
    assert new[f"{K}.{name}"].shape == load_tensors(made)[f"{K}.{name}"].shape
    assert [c.error for c in done.changes] == [None]


def test_block_scales_as_uint8(good: dict[str, Path], tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        for n in [n for n in t if n.endswith("weight_scale")]:
            t[n] = t[n].view(torch.uint8)

    folder = broken(good["ct"], tmp_path, change)
    assert not passes(folder)
    _, new, _ = mended(folder)
    kept = load_tensors(good["ct"])
    assert all(
        torch.equal(new[n].view(torch.uint8), kept[n].view(torch.uint8)) and new[n].dtype == kept[n].dtype for n in kept
    )


def test_block_scales_cast_to_numbers_are_refused(good: dict[str, Path], tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        for n in [n for n in t if n.endswith("weight_scale")]:
            t[n] = t[n].float().clamp(0, 255).to(torch.uint8)

    refused(broken(good["ct"], tmp_path, change), "do not say whether they are E4M3")


def with_kv(t: Tensors, folder: Path, k: str, v: str, layers: tuple[int, ...] = (0, 1)) -> None:
    for layer in layers:
        for kind, name in (("k", k), ("v", v)):
            if name:
                t[f"{A.format(layer)}.{name}"] = torch.tensor([0.02 if kind == "k" else 0.01]) * (layer + 1)
    edit(folder / "config.json", lambda c: c["quantization_config"].update(kv_cache_scheme=KV))


def kv_checkpoint(good: Path, tmp_path: Path, k: str, v: str, layers: tuple[int, ...] = (0, 1)) -> Path:
    folder = broken(good, tmp_path)
    tensors = load_tensors(folder)
    with_kv(tensors, folder, k, v, layers)
    save_tensors(folder, tensors)
    return folder


@pytest.mark.parametrize(
    ("dialect", "k", "v", "engine", "names"),
    [
        ("ct", "qkv_proj.k_scale", "qkv_proj.v_scale", "vllm", ("k_scale", "v_scale")),
        ("ct", "k_proj.output_scale", "v_proj.output_scale", "vllm", ("k_scale", "v_scale")),
        ("ct", "attn.k_scale", "attn.v_scale", "sglang", ("k_scale", "v_scale")),
        ("modelopt", "k_scale", "v_scale", "trtllm", ("k_proj.k_scale", "v_proj.v_scale")),
    ],
)
def test_misnamed_kv_scales(
    good: dict[str, Path], tmp_path: Path, dialect: str, k: str, v: str, engine: str, names: tuple[str, str]
) -> None:
    folder = kv_checkpoint(good[dialect], tmp_path, k, v)
    _, new, _ = mended(folder, engine=engine)
    for layer in (0, 1):
        for name, value in zip(names, (0.02, 0.01), strict=True):
            stored = new[f"{A.format(layer)}.{name}"]
            assert (stored.dtype, stored.shape) == (torch.float32, (1,))
            assert stored.item() == pytest.approx(value * (layer + 1))
    assert not {f"{A.format(n)}.{x}" for n in (0, 1) for x in (k, v) if x not in names} & new.keys()


def test_scales_for_another_engine_stay(good: dict[str, Path], tmp_path: Path) -> None:
    folder = kv_checkpoint(good["ct"], tmp_path, "k_scale", "v_scale")
    tensors = load_tensors(folder)
    more = {f"{A.format(n)}.attn.{s}_scale": tensors[f"{A.format(n)}.{s}_scale"].clone() for n in (0, 1) for s in "kv"}
    save_tensors(folder, {**tensors, **more})
    assert repair(folder, tmp_path / "mended").changes == ()


def test_a_missing_side_of_kv_scales(good: dict[str, Path], tmp_path: Path) -> None:
    folder = kv_checkpoint(good["ct"], tmp_path, "k_scale", "")
    done, new, _ = mended(folder)
    assert [new[f"{A.format(n)}.v_scale"].item() for n in (0, 1)] == pytest.approx([0.02, 0.04])
    assert "2 missing KV scales" in done.changes[0].what


def scales_file(folder: Path, scales: dict[str, float], tp: int = 2, **top: Any) -> Path:
    file = folder / f"kv_cache_scales.tp{tp}.json"
    ranks = {str(r): scales for r in range(tp)}
    file.write_text(json.dumps({**top, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks}}))
    return file


def test_a_missing_side_and_a_missing_layer_from_the_json(good: dict[str, Path], tmp_path: Path) -> None:
    folder = kv_checkpoint(good["ct"], tmp_path, "k_scale", "", layers=(0,))
    scales_file(folder, {"0": 0.05, "1": 0.07}, model_type="llama")
    _, new, _ = mended(folder)
    found = [new[f"{A.format(n)}.{s}_scale"].item() for n in (0, 1) for s in "kv"]
    assert found == pytest.approx([0.02, 0.05, 0.07, 0.07])


def test_a_missing_layer_is_refused(good: dict[str, Path], tmp_path: Path) -> None:
    refused(kv_checkpoint(good["ct"], tmp_path, "k_scale", "v_scale", layers=(0,)), "layers have no KV scale")


def test_kv_scales_in_bf16(good: dict[str, Path], tmp_path: Path) -> None:
    folder = kv_checkpoint(good["ct"], tmp_path, "k_scale", "v_scale")
    tensors = load_tensors(folder)
    exact = {n: t.bfloat16() for n, t in tensors.items() if n.endswith(("k_scale", "v_scale"))}
    save_tensors(folder, {**tensors, **exact})
    _, new, _ = mended(folder)
    assert all(new[n].dtype == torch.float32 and torch.equal(new[n], t.float()) for n, t in exact.items())


def test_json_without_model_type(good: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(good["ct"], tmp_path)
    scales_file(folder, {"0": 0.05, "1": 0.07})
    assert not passes(folder)
    done, _, out = mended(folder)
    data = json.loads((out / "kv_cache_scales.tp2.json").read_text())
    assert data["model_type"] == "llama"
    assert data["kv_cache"]["scaling_factor"] == {r: {"0": 0.05, "1": 0.07} for r in "01"}
    assert "model_type: missing" in done.changes[0].what
    shutil.rmtree(out)
    (folder / "kv_cache_scales.tp2.json").write_text("{}")
    refused(folder, "nothing holds its scales")


CONFIG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a quantised layer on the list": ("ct", lambda q: q["ignore"].append(Q)),
    "the head not on it": ("ct", lambda q: q["ignore"].clear()),
    "another group": ("shards", lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=64)),
    "no groups": ("ct", lambda q: q.update(config_groups={})),
    "ModelOpt's list": ("modelopt", lambda q: q["ignore"].append(Q)),
}


@pytest.mark.parametrize("case", CONFIG)
def test_wrong_configuration(good: dict[str, Path], tmp_path: Path, case: str) -> None:
    name, change = CONFIG[case]
    folder = tmp_path / "broken"
    shutil.copytree(good[name], folder)
    edit(folder / "config.json", lambda c: change(c["quantization_config"]))
    assert not passes(folder)
    _, _, out = mended(folder)
    assert json.loads((out / "config.json").read_text()) == json.loads((good[name] / "config.json").read_text())


def test_no_configuration(good: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(good["ct"], tmp_path)
    edit(folder / "config.json", lambda c: c.pop("quantization_config"))
    _, _, out = mended(folder)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "nvfp4-pack-quantized"


def test_two_configurations_that_disagree(good: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(good["modelopt"], tmp_path)
    edit(folder / "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="NVFP4", exclude_modules=[]))
    edit(folder / "config.json", lambda c: c["quantization_config"].update(quant_algo="FP8"))
    assert not passes(folder)
    _, _, out = mended(folder)
    for file in ("config.json", "hf_quant_config.json"):
        assert json.loads((out / file).read_text()) == json.loads((good["modelopt"] / file).read_text())


def test_index_and_stray_shards(good: dict[str, Path], source: Path, tmp_path: Path) -> None:
    folder = broken(good["shards"], tmp_path)
    kept = load_tensors(good["shards"])
    shutil.copy(min(folder.glob("*.safetensors")), folder / "consolidated.safetensors")
    first = min(kept)

    def change(index: dict[str, Any]) -> None:
        index["metadata"]["total_size"] = 7
        del index["weight_map"][first]

    edit(folder / INDEX, change)
    (folder / "tokenizer.json").unlink()
    assert not passes(folder)
    done, new, out = mended(folder, source=open_checkpoint(source))
    assert new.keys() == kept.keys() and all(torch.equal(new[n], kept[n]) for n in kept)
    assert not (out / "consolidated.safetensors").exists()
    assert json.loads((out / INDEX).read_text()) == json.loads((good["shards"] / INDEX).read_text())
    assert (out / "tokenizer.json").read_text() == "{}"
    said = " ".join(c.what for c in done.changes)
    assert "consolidated.safetensors" in said and "total_size was 7" in said and "tokenizer.json" in said


def test_no_index(good: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(good["shards"], tmp_path)
    (folder / INDEX).unlink()
    _, _, out = mended(folder)
    assert json.loads((out / INDEX).read_text()) == json.loads((good["shards"] / INDEX).read_text())
    shutil.rmtree(out)
    max(folder.glob("*.safetensors")).unlink()
    refused(folder, "shards are missing")


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a scale that is NaN": (lambda t: t[f"{Q}.weight_scale"].view(torch.uint8).__setitem__((0, 0), 0x7F), "scales are not usable"),
    "missing codes": (lambda t: t.pop(f"{Q}.weight_packed"), "scales are not usable"),
    "a missing scale": (lambda t: t.pop(f"{Q}.weight_scale"), "scale of a packed weight is missing"),
    "a missing layer": (lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n], "decoder layers are missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_the_source_is_refused(good: dict[str, Path], tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    refused(broken(good["ct"], tmp_path, change), message)


def test_nothing_to_mend_and_bad_requests(
    good: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def quantkit(*words: object) -> int:
        return run_app(lambda: app([str(w) for w in words]))

    assert quantkit("repair", good["ct"], "-o", tmp_path / "o") == 0
    assert "nothing to mend" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert quantkit("repair", good["ct"], "-o", good["ct"]) == 2
    assert quantkit("repair", good["ct"], "-o", good["ct"] / "inside") == 2
    assert quantkit("repair", tmp_path / "none", "-o", tmp_path / "o") == 2


def test_the_manifest_is_kept_and_says_so(good: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(good["ct"], folder)
    tensors = load_tensors(folder)
    tensors[f"{K}.weight_global_scale"] *= 1.5
    save_tensors(folder, tensors)
    assert run_app(lambda: app(["repair", str(folder), "-o", str(tmp_path / "o"), "--json"])) == 0
    manifest = json.loads((tmp_path / "o" / "quantkit.json").read_text())
    assert manifest["recipe"] and manifest["repaired"][0]["error"] > 0
    assert run_app(lambda: app(["verify", str(tmp_path / "o"), "--manifest"])) == 0
