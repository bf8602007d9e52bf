"""A finished calibration run, opened for `export`: its recipe, and its source with the run laid over it.

Layers come from the run's weights as they are; scales of activations become numbers of the plan. The scales of the KV
cache are numbers until here: which tensors they become depends on the engine and the format, and so does whether an FP8
cache may be switched on at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from quantkit.export.checkpoint import Checkpoint, open_checkpoint, read_json, text_config
from quantkit.export.kv_json import file_name, scales_json
from quantkit.export.kv_scales import attention_kind, kv_rules, mtp_scale_tensors, scale_tensors
from quantkit.export.sources.detect import weights_of
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.overlay import overlaid
from quantkit.quantize.plan import Plan
from quantkit.quantize.planner import make_plan
from quantkit.quantize.recipe import Recipe
from quantkit.quantize.roles import attention_modules, roles_of
from quantkit.quantize.run_folder import RESULT, RUN, VERSION, measured_scales, write_tensors

KV = "kv"
TP = (1, 2, 4, 8, 16)  # sizes that get a JSON of scales unless others are asked for


@dataclass(frozen=True, slots=True)
class Run:
    """`source` is the published checkpoint, with the names of what the run has scaled; `result` is calibration.json."""

    folder: Path
    recipe: Recipe
    source: Checkpoint
    result: dict[str, Any]

    @property
    def scales(self) -> dict[int, tuple[float, float]]:
        """(k_scale, v_scale) of each layer, MTP layers left out."""
        return {n: s for n, s in self._scales.items() if n < self._layers}

    @property
    def mtp_scales(self) -> dict[int, tuple[float, float]]:
        """Those of the MTP layer, by its number."""
        return {n: s for n, s in self._scales.items() if n >= self._layers}

    @property
    def _scales(self) -> dict[int, tuple[float, float]]:
        return {int(n): (s["k"], s["v"]) for n, s in self.result["kv_scales"].items()}

    @property
    def _layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says of the run: its text without the folder it lay in, version, digests of weights."""
        text = dict(self.result["text"])
        if Path(text["origin"]).is_absolute():
            text["origin"] = Path(text["origin"]).name
        return {"quantkit": self.result["quantkit"], "text": text, "weights": self.result["weights"]}

    @property
    def config(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        return text_config(self.source.config)


def is_run(folder: Path) -> bool:
    """True for the folder of a calibration run, finished or not."""
    return (folder / RUN).is_file()


def open_run(folder: Path) -> Run:
    """Open a run; raises QuantkitError when it is unfinished, or its source is gone."""
    made = read_json(folder / RUN)
    if not (folder / RESULT).is_file():
        raise QuantkitError(
            "the calibration run is not finished",
            file=folder,
            hint="run the same `quantkit calibrate` again: it goes on",
        )
    if made.get("version") != VERSION:
        raise QuantkitError(
            "the run was made by another version of quantkit", file=folder / RUN, value=made.get("version"),
            allowed=VERSION, hint="run `quantkit calibrate` again, into another folder",
        )  # fmt: skip
    if not Path(made["source"]).is_dir():
        raise QuantkitError("the source of the run is gone", file=made["source"], hint=f"named in {folder / RUN}")
    recipe = Recipe.model_validate(made["recipe"])
    result = read_json(folder / RESULT)
    source = replace(open_checkpoint(made["source"]), smoothed=frozenset(result["smoothed"]))
    return Run(folder, recipe, source, result)


def plan_of_run(run: Run, format_name: str | None, engine: str, tp: Sequence[int], *, per_rank: bool = False) -> Plan:
    """The plan that writes a run as a checkpoint for an engine; what an engine cannot apply is said on stderr.

    per_rank  SGLang's JSON has a scale for the heads of each rank, rather than one for all ranks
    """
    form = format_name or run.recipe.output.format
    inputs = measured_scales(run.folder)
    if not run.scales:
        plan = make_plan(run.recipe, overlaid(run.source, run.folder), format_name=form, tp=tp, input_scales=inputs)
        return replace(plan, calibration=run.facts)
    rules = kv_rules(engine, form, run.config)
    if rules.reason:
        sys.stderr.write(f"KV cache: {rules.reason}\n")
    placed, _ = roles_of({n: w.shape for n, w in weights_of(run.source).items()}, run.source.config)
    modules = {n: m for n, m in attention_modules(placed).items() if n in run.scales}
    mtp = {n: m for n, m in attention_modules(placed, "mtp.").items() if n in run.mtp_scales}
    tensors = scale_tensors(rules, modules, run.scales) | mtp_scale_tensors(engine, rules, mtp, run.mtp_scales)
    file = None
    if tensors:
        file = run.folder / KV / f"{engine}-{form}.safetensors"
        file.parent.mkdir(exist_ok=True)
        write_tensors(file, {n: ("F32", (1,), np.asarray(x, np.float32)) for n, x in tensors.items()})
    source = overlaid(run.source, run.folder, kv=file, fp8_kv=rules.fp8)
    plan = make_plan(run.recipe, source, format_name=form, tp=tp, input_scales=inputs)
    files = {**plan.files, **_json_files(run, tuple(tp) or TP, per_rank=per_rank)}
    return replace(plan, files=files, calibration=run.facts)


def _json_files(run: Run, sizes: Sequence[int], *, per_rank: bool) -> dict[str, Any]:
    """SGLang's JSON for each size that cuts the KV heads; none for latent attention, whose classes do not read it."""
    if attention_kind(run.config) != "heads":
        return {}
    each = {n: run.result["kv_scales"][str(n)] for n in run.scales}
    heads = {n: (s["head_k"], s["head_v"]) for n, s in each.items()} if per_rank else None
    found = {}
    for tp in sizes:
        count = int(run.config.get("num_key_value_heads") or run.config["num_attention_heads"])
        if count % tp and tp % count:
            continue
        kind, layers = str(run.config["model_type"]), int(run.config["num_hidden_layers"])
        found[file_name(tp)] = scales_json(kind, layers, run.scales, tp, per_rank=heads)
    return found
