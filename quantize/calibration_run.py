"""A calibration run from start to end: its identity, its blocks, and the result that `export` reads.

The result is `calibration.json` (scales, ranges, coverage, what the text was) and `calibration.safetensors` (samples
for the verifier); with its weights it is all that an export needs beside the source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from quantkit.calibrate.kv_records import LayerKV
from quantkit.calibrate.kv_scales import MIN_TOKENS, KVScale, choose_scales
from quantkit.calibrate.tokens import Samples
from quantkit.export.checkpoint import Reader, read_tensors, text_config
from quantkit.export.digests import sha256_of
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.calibration import Settings, calibrate, wanted_steps
from quantkit.quantize.input_scales import gathered
from quantkit.quantize.modelopt_algorithms import modelopt_version
from quantkit.quantize.plan import Plan
from quantkit.quantize.recorded import FILE
from quantkit.quantize.run_folder import ACTIVATIONS, RESULT, SAMPLES, VERSION, RunFolder, write_json, write_tensors


def identity(plan: Plan, samples: Samples, dtype: torch.dtype) -> dict[str, Any]:
    """What decides the result of a run; `source` alone may change (a folder that was moved)."""
    n, length = samples.ids_NL.shape
    return {
        "source": str(plan.source.folder.resolve()),
        "version": VERSION,
        "recipe": json.loads(plan.recipe.model_dump_json(by_alias=True, exclude_defaults=True)),
        "source tensors": plan.identity()["source tensors"],
        "source config": plan.identity()["source config"],
        "text": {"origin": samples.origin, "digest": samples.digest, "seed": samples.seed},
        "samples": [n, length],
        "dtype": str(dtype).removeprefix("torch."),
        **_modelopt(plan),
    }


def check_recipe(plan: Plan) -> None:
    """Raise QuantkitError for a recipe that asks for nothing a calibration run could give."""
    if not plan.recipe.needs_calibration:
        raise QuantkitError(
            "the recipe needs no calibration", file=plan.recipe.name,
            hint="`quantkit export` carries it out; `method: gptq`, a measured `input_scale` and `kv_cache` need one",
        )  # fmt: skip
    _modelopt(plan)


def _modelopt(plan: Plan) -> dict[str, str]:
    """The version of ModelOpt where a rule asks for it; raises QuantkitError when it is not installed."""
    asked = any(r.method is not None and r.method.name == "modelopt" for r in plan.recipe.weights)
    return {"modelopt": modelopt_version()} if asked else {}


def calibrate_into(
    out: Path, plan: Plan, samples: Samples, settings: Settings, *, min_expert_tokens: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:  # fmt: skip
    """Run, or go on with a run that was interrupted; returns the content of calibration.json.

    min_expert_tokens  a gate: fail when a calibrated routed expert saw fewer tokens

    Raises QuantkitError for a folder of another run, a recipe that needs no calibration, and a gate that is missed.
    """
    check_recipe(plan)
    with RunFolder(out, identity(plan, samples, settings.dtype)) as folder:
        if not (out / RESULT).is_file():
            calibrate(plan, samples.ids_NL, folder, settings, advance)
            _finish(plan, samples, folder)
    result: dict[str, Any] = json.loads((out / RESULT).read_text(encoding="utf-8"))
    _gate(result["layers"], min_expert_tokens, out)
    return result


def _finish(plan: Plan, samples: Samples, folder: RunFolder) -> None:
    """Gather what the blocks have left; the result comes last, and what it replaces is removed after it."""
    blocks = [folder.done[i] for i in sorted(folder.done)]
    layers = {name: facts for block in blocks for name, facts in block["layers"].items()}
    wanted = {t.name for s in wanted_steps(plan) for t in s.tasks if t.fate == "quantize"}
    if wanted != set(layers):
        missing = sorted(wanted - set(layers))
        raise QuantkitError(
            "layers of the plan were not calibrated", file=folder.folder, value=f"{len(layers)} layers",
            allowed=len(wanted), tensor=missing[0] if missing else None,
        )  # fmt: skip
    kv = [LayerKV.from_json(layer) for block in blocks for layer in block["kv"]]
    inputs = gathered(plan, blocks)
    scales = _scales(plan, kv, samples)
    _gather_samples(folder)
    write_json(
        folder.folder / RESULT,
        {
            "quantkit": version("quantkit"),
            "text": {"origin": samples.origin, "digest": samples.digest, "seed": samples.seed,
                     "samples": list(samples.ids_NL.shape)},
            "kv_scales": {str(n): _scale_json(s) for n, s in scales.items()},
            "kv": [layer.to_json() for layer in kv],
            "input_scales": inputs,
            "layers": layers,
            "smoothed": sorted(name for block in blocks for name in block["smoothed"]),
            "weights": _digests(folder),
        },
    )  # fmt: skip
    left = folder.folder.glob(f"{ACTIVATIONS}-*")  # of runs that were killed
    for gone in (folder.folder / ACTIVATIONS, folder.folder / SAMPLES, *left):
        shutil.rmtree(gone, ignore_errors=True)


def _scales(plan: Plan, kv: list[LayerKV], samples: Samples) -> dict[int, KVScale]:
    cache = plan.recipe.kv_cache
    if cache is None:
        return {}
    last = int(text_config(plan.source.config)["num_hidden_layers"])
    own, mtp = [k for k in kv if k.layer < last], [k for k in kv if k.layer >= last]
    per_head = cache.rule == "amax"
    scales = choose_scales(own, cache.rule, cache.headroom, per_head=per_head)
    if mtp:  # it sees a token less of each sample
        least = MIN_TOKENS - len(samples.ids_NL)
        scales |= choose_scales(mtp, cache.rule, cache.headroom, per_head=per_head, min_tokens=least)
    return scales


def _scale_json(scale: KVScale) -> dict[str, Any]:
    shares = {"k": scale.k_shares, "v": scale.v_shares}
    return {
        "k": scale.k,
        "v": scale.v,
        "head_k": list(scale.head_k),
        "head_v": list(scale.head_v),
        "underflow": {n: s.underflow for n, s in shares.items()},
        "clipped": {n: s.clipped for n, s in shares.items()},
    }


def _gather_samples(folder: RunFolder) -> None:
    files = sorted((folder.folder / SAMPLES).glob("*.safetensors"))
    found = read_tensors(files)
    with Reader() as reader:
        write_tensors(folder.folder / FILE, {n: (t.dtype, t.shape, reader.read(t)) for n, t in found.items()})


def _digests(folder: RunFolder) -> dict[str, str]:
    """SHA-256 of every file of weights."""
    return {f.name: sha256_of(f) for f in sorted((folder.folder / "weights").glob("block-*.safetensors"))}


def _gate(layers: Mapping[str, Any], least: int, out: Path) -> None:
    experts = {n: f["tokens"] for n, f in layers.items() if f["role"].removeprefix("mtp.") == "routed_experts"}
    short = {n: tokens for n, tokens in experts.items() if tokens < least}
    if short:
        name = min(short, key=lambda n: short[n])
        raise QuantkitError(
            f"{len(short)} routed experts saw too few tokens", file=out / RESULT, tensor=name, value=short[name],
            allowed=f">= {least} (--min-expert-tokens)", hint="give more text: the run is kept, and shows which",
        )  # fmt: skip
