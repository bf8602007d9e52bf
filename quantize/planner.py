"""Make a plan: choose fates, check them, lay out shards, write the configuration. Pure: no weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantkit.export.checkpoint import Checkpoint, has_fp8_kv, quantization_config
from quantkit.export.formats import Layer, Part
from quantkit.export.sources.detect import Weight
from quantkit.export.targets import with_fused_names
from quantkit.kernels.errors import join_errors
from quantkit.kernels.scheme import SCHEMES
from quantkit.quantize.checks import check_engines, check_fused, check_shapes, tensor_parallel
from quantkit.quantize.fates import Fates, as_fp8_block, natural_key
from quantkit.quantize.layout import grouped, lay_out
from quantkit.quantize.plan import Plan, Task
from quantkit.quantize.recipe import Recipe
from quantkit.quantize.roles import matches_role


def is_published(fates: Fates, tasks: Sequence[Task]) -> bool:
    """True when only copies are asked for, and the source is in the target format already or no scheme is named."""
    asked = {t.fate for t in tasks}
    given = any(t.input_scale is not None for t in tasks)
    if asked & {"quantize", "decode"} or fates.source.calibrated or given:
        return False
    quant = quantization_config(fates.source.config)
    method = "gptq-v2" if quant.get("checkpoint_format") == "gptq_v2" else quant.get("quant_method")
    return "pass" not in asked or method == fates.format_name


def _kept(weight: Weight) -> list[Part]:
    """Parts of a weight that is copied under its own names; its activation scales come along."""
    named = [(kind, t) for kind, t in weight.parts.items()] + [(f"extra{i}", t) for i, t in enumerate(weight.extra)]
    return [Part(kind, t.name, t.dtype, t.shape) for kind, t in named]  # type: ignore[arg-type]


def _layers(fates: Fates, tasks: Sequence[Task]) -> tuple[list[Layer], list[str]]:
    """Linear layers of the output, and the names of those that stay unquantised: in full, one per shard."""
    layers, ignore = [], []
    for task in tasks:
        quantized = task.fate in ("quantize", "pass") and task.scheme is not None
        placed = fates.placed[task.weight.name]
        is_matrix = task.weight.name.endswith(".weight") and len(task.weight.shape) == 2
        if quantized:
            layers.append(Layer(task.module, task.scheme, static_input=task.input_scale is not None))
        elif (
            task.fate != "drop"
            and is_matrix
            and not any(matches_role(placed.role.removeprefix("mtp."), r) for r in ("embedding", "norm"))
        ):
            layers.append(Layer(task.weight.module, None))
            ignore.append(task.weight.module)
    heads = [w.module for n, w in fates.weights.items() if fates.placed[n].role == "lm_head"]
    if not heads:  # a tied head has no tensor, but it is a linear layer all the same
        embedding = next((n for n in fates.weights if fates.placed[n].role == "embedding"), "model.embed_tokens.weight")
        ignore.append(embedding.rpartition("model.embed")[0].removesuffix("model.") + "lm_head")
    if fates.format_name == "modelopt":
        ignore += [n for n in _mtp_heads(fates) if n not in ignore]
    return layers, with_fused_names(ignore, experts=fates.format_name in ("modelopt", "fp8"))


def _mtp_heads(fates: Fates) -> list[str]:
    """Names under which engines build the head of an MTP layer, whether the checkpoint holds one or shares the model's.

    vLLM's ModelOpt method quantises every head that is not excluded; it calls this one `head`, not `shared_head.head`.
    """
    stems = {}
    for name, placed in fates.placed.items():
        if placed.role.startswith("mtp.") and placed.layer is not None:
            stem, found, _ = name.partition(f".{placed.layer}.")
            stems[f"{stem}{found}"] = placed.layer
    return [stem + head for stem in sorted(stems, key=natural_key) for head in ("head", "shared_head.head")]


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what it says of the source's quantisation, at the top or inside `text_config`."""
    bare = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    return {k: without_quantization(v) if isinstance(v, dict) and k.endswith("_config") else v for k, v in bare.items()}


def make_plan(
    recipe: Recipe, source: Checkpoint, *, format_name: str | None = None, tp: Sequence[int] = (),
    input_scales: Mapping[str, float] | None = None,
) -> Plan:  # fmt: skip
    """The complete plan of one output; raises QuantkitError with every fault found.

    input_scales  by layer, as a calibration run measured them; a layer that waits for one is planned all the same
    """
    fates = Fates(recipe, source, format_name or recipe.output.format, input_scales or {})
    tasks = fates.tasks()
    published = is_published(fates, tasks)
    if not published:
        tasks = [_without_tied_head(_for_format(fates, t), source.config) for t in tasks]
    else:
        tasks = [replace(t, fate="keep") if t.fate == "pass" else t for t in tasks]
    parts = {id(t): _kept(t.weight) if t.fate == "keep" else fates.parts(t) for t in tasks}
    wanted = tuple(tp) or recipe.output.tp
    table, faults = tensor_parallel(tasks, fates.placed, source.config, wanted)
    errors = fates.errors + check_shapes(tasks, table, recipe.name) + check_fused(tasks, fates.placed)
    errors += [] if published else check_engines(tasks, fates.format_name)
    errors += [] if errors else faults  # a group that does not divide loads nowhere: said once is enough
    if errors:
        raise join_errors("the plan cannot be carried out", errors)
    steps, shards = lay_out(grouped(tasks, fates.placed), parts, recipe.output.shard_size)
    layers, ignore = _layers(fates, tasks)
    files: dict[str, Any] = {"config.json": source.config}
    if not published:
        bare = without_quantization(source.config)
        files = {"config.json": bare}
        fp8_kv = has_fp8_kv(source.config)
        if any(layer.scheme for layer in layers) or (fp8_kv and source.calibrated):
            made = dict(fates.format.config(layers, ignore, fp8_kv=fp8_kv))
            files = {**made, "config.json": {**bare, "quantization_config": made["config.json"]}}
    return Plan(
        source, recipe, "as published" if published else fates.format_name, fates.family, fates.placed,
        tuple(steps), tuple(shards), tuple(layers), tuple(ignore), files, fates.half, table,
    )  # fmt: skip


def _without_tied_head(task: Task, config: Mapping[str, Any]) -> Task:
    """A head that the configuration ties to the embedding is not written a second time."""
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if task.role == "lm_head" and task.fate == "keep" and tied:
        return replace(task, fate="drop", reason="tied to the embedding")
    return task


def _for_format(fates: Fates, task: Task) -> Task:
    """A kept weight that the source has quantised must be passed into the target format, or it would be unreadable."""
    if task.fate != "keep" or task.weight.encoding == "plain":
        return task
    scheme = task.weight.scheme
    if scheme is not None and scheme.name not in fates.format.SCHEMES:
        scheme = SCHEMES.get(as_fp8_block(task.weight) or scheme.name)
    if fates.format_name == "mxfp4" and len(task.weight.shape) == 3:
        return task
    if scheme is None or scheme.name not in fates.format.SCHEMES:
        fates.fault(
            f"a kept weight is stored in a way that the {fates.format_name} format cannot hold",
            task.weight,
            value=scheme.name if scheme else task.weight.encoding,
            allowed=", ".join(fates.format.SCHEMES),
            hint="give it `scheme: bf16` to decode it, or another --format",
        )
        return task
    return replace(task, fate="pass", scheme=scheme)
