"""TensorRT-LLM, read from stored versions that are not one release: what is not known of it is said to be so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.export.engines.files import Files
from quantkit.export.engines.finding import Finding
from quantkit.export.engines.matching import inside_or_glob, whole
from quantkit.export.engines.rules import Rules
from quantkit.export.engines.subject import Subject
from quantkit.export.targets import FUSED


def configuration(files: Files) -> Mapping[str, Any]:
    """hf_quant_config.json goes before config.json."""
    if files.nested is None:
        return files.quant
    inner: Mapping[str, Any] = files.nested.get("quantization") or {}
    return {"quant_method": "modelopt", **inner}


RULES = Rules(
    name="trtllm",
    version="stored versions, no release",
    fused={n: FUSED[n] for n in ("qkv_proj", "gate_up_proj")},
    methods=dict.fromkeys(("compressed-tensors", "modelopt", "fp8", "mxfp4"), "")
    | dict.fromkeys(("gptq", "awq"), "not a format of this engine"),
    algorithms=frozenset({
        "FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_AWQ", "W4A8_AWQ", "MIXED_PRECISION",
    }),
    order=("name", "fused", "class"),
    ignored=whole,
    excluded=inside_or_glob,
    skipped=inside_or_glob,
    unmatched_refused=False,
    head_is_linear=False,
    experts_by_one=frozenset({"fp8", "modelopt"}),
    drafts=True,
    sees_int4=False,
    unknown_name="silently wrong",
    other_algorithm="not known",
    configuration=configuration,
)  # fmt: skip


def findings(subject: Subject) -> Iterator[Finding]:
    """Rules that are TensorRT-LLM's own."""
    groups = subject.quant.get("config_groups") or {}
    if subject.method == "compressed-tensors":
        if len(groups) > 1 and any("Linear" in (g.get("targets") or ()) for g in groups.values()):
            yield Finding(
                "refused", "config_groups", "a class among the targets of several groups", "patterns of names"
            )
        scheme = subject.quant.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
            yield Finding("refused", "kv_cache_scheme", "only 8-bit float is known", "num_bits 8, type float")


def flags(subject: Subject) -> list[str]:
    """Of `trtllm-serve`."""
    return [f"--tp_size {subject.tp}"] if subject.tp > 1 else []
