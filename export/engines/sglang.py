"""SGLang 0.5.23: its tables, and what only it refuses or reads differently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.kernels import shares
from quantkit.export.engines.kv import cache_is_fp8
from quantkit.export.engines.matching import ending, part, part_or_glob
from quantkit.export.engines.rules import Rules
from quantkit.export.engines.subject import Subject
from quantkit.export.kv_json import check_file
from quantkit.export.targets import FUSED

RULES = Rules(
    name="sglang",
    version="0.5.23",
    fused={n: s for n, s in FUSED.items() if n != "fused_qkv_a_proj"},
    methods=dict.fromkeys(("compressed-tensors", "modelopt", "fp8", "gptq", "awq", "mxfp4"), ""),
    algorithms=frozenset({"FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"}),
    order=("name", "class", "fused"),
    ignored=ending,
    excluded=part_or_glob,
    skipped=part,
    unmatched_refused=True,
    head_is_linear=False,
    experts_by_one=frozenset({"fp8"}),
    drafts=True,
    sees_int4=False,
    unknown_name="silently wrong",
)
_LATENT = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})
_MIXED = frozenset({"FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8", "NVFP4", "W4A16_NVFP4"})
# Layers of the class ColumnParallelLinear alone; fused and row layers cast what they are given.
_COLUMN = ("q_b_proj", "kv_b_proj", "q_proj")


def findings(subject: Subject) -> Iterator[Finding]:
    """Rules that are SGLang's own."""
    yield from _gptq(subject)
    if subject.method == "compressed-tensors":
        yield from _compressed(subject)
    if subject.method == "modelopt":
        yield from _modelopt(subject)
    yield from _json(subject)


def _gptq(subject: Subject) -> Iterator[Finding]:
    quant: Any = subject.quant
    if subject.method != "gptq":
        return
    if quant.get("sym") is not True:
        yield Finding("refused", "quantization_config", "GPTQ with zero points (sym is not true)", "symmetric GPTQ")
    if quant.get("desc_act"):
        yield Finding("refused", "quantization_config", "GPTQ in the order of activations (desc_act)", "desc_act false")
    missing = [k for k in ("bits", "group_size", "sym", "desc_act") if k not in quant]
    if missing:
        yield Finding("refused", "quantization_config", f"keys are missing: {', '.join(missing)}", "write them")
    if quant.get("checkpoint_format") == "marlin":
        yield Finding("refused", "quantization_config", "weights in the order of the Marlin kernel", "gptq or gptq_v2")


def _compressed(subject: Subject) -> Iterator[Finding]:
    top = subject.quant.get("format")
    for layer, scheme in subject.quantized():
        if scheme.kind == "mxfp4" and layer.kind != "experts":
            yield Finding(
                "refused", layer.name, "MXFP4 in a layer that is no expert", "MXFP4 for experts alone, or NVFP4"
            )
        if layer.kind == "experts" and scheme.kind == "int4":
            if top != "pack-quantized":
                yield Finding("refused", layer.name, f"INT4 experts where the format at the top is {top}",
                              "INT4 alone, the rest unquantised: one config group")  # fmt: skip
            if not scheme.symmetric:
                yield Finding("silently wrong", layer.name, "INT4 experts with zero points are decoded without them",
                              "symmetric INT4")  # fmt: skip
    for kind in subject.kinds:
        scale = kind.example.tensors.get("weight_scale")
        alone = kind.layer.kind == "linear" and not kind.layer.fused and kind.example.leaf in _COLUMN
        if kind.scheme and kind.scheme.kind == "int4" and alone and scale is not None and scale.dtype == "F32":
            yield Finding("refused", f"{kind.example.name}.weight_scale", "float32 scales for a model in 16 bits: "
                          "Downcasting not allowed", "store scales in the model's dtype", kind.count)  # fmt: skip
        if (
            kind.scheme and kind.scheme.kind == "nvfp4" and kind.layer.kind == "experts"
            and kind.example.split == "row" and shares(subject, kind)[1] % 64
        ):  # fmt: skip
            yield Finding("refused", kind.example.name, "CUTLASS cannot pad the inner size of gated experts: "
                          "a multiple of 64 is needed on a rank", "a smaller --tp", kind.count)  # fmt: skip


def _modelopt(subject: Subject) -> Iterator[Finding]:
    quant = subject.quant
    yield from _latent_names(subject)
    if quant.get("quant_algo") != "MIXED_PRECISION":
        return
    said = {str(e.get("quant_algo")) for e in (quant.get("quantized_layers") or {}).values()}
    if not said & {"NVFP4", "W4A16_NVFP4"}:
        yield Finding("refused", "quantized_layers", "MIXED_PRECISION without an NVFP4 layer is taken for w4afp8",
                      "--format compressed-tensors")  # fmt: skip
    for name in sorted(said - _MIXED):
        yield Finding("refused", "quantized_layers", f"the algorithm {name} in a mix", "--format compressed-tensors")


def _latent_names(subject: Subject) -> Iterator[Finding]:
    """Names that some versions compare by their last part: one layer's entry then leaves out that of every layer."""
    excluded = subject.quant.get("ignore") or subject.quant.get("exclude_modules") or []
    listed = {str(e).rpartition(".")[2] for e in excluded}
    for layer, _ in subject.quantized("linear"):
        for shard in layer.shards:
            if shard.leaf in listed & _LATENT:
                yield Finding("not known", shard.name, f"{shard.leaf} of another layer is excluded: some versions "
                              "leave out that of all layers", "one scheme for all layers of that name")  # fmt: skip


def _json(subject: Subject) -> Iterator[Finding]:
    """The file for `--quantization-param-path`, which has defects of its own in this version."""
    folder, text = subject.files.folder, subject.files.text
    path = folder / f"kv_cache_scales.tp{subject.tp}.json" if folder else None
    if path is None or not path.is_file():
        return
    layers = int(text.get("num_hidden_layers", 0))
    for reason in check_file(path, tp=subject.tp, num_layers=layers, model_type=subject.model_type):
        yield Finding("silently wrong", path.name, f"all scales become 1.0, and the log says Loaded: {reason}",
                      "write the file again")  # fmt: skip
    if subject.method in ("compressed-tensors", "modelopt", "fp8"):
        what = "do not pass it: with scales as parameters, a float from --quantization-param-path is a crash"
    else:
        what = "only --attention-backend trtllm_mha applies these scales right; others write x / s and read unscaled"
    yield Finding("ok", re.sub(r"tp\d+", "tpN", path.name), what)


def flags(subject: Subject) -> list[str]:
    """Of `python -m sglang.launch_server`."""
    found = [f"--tp {subject.tp}"] if subject.tp > 1 else []
    return [*found, "--kv-cache-dtype fp8_e4m3"] if cache_is_fp8(subject) else found
