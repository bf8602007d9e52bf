"""transformers 5.14 with compressed-tensors 0.20: nothing is fused but the experts, everything is decoded at load."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.matching import beginning_or_end, ending, inside
from quantkit.export.engines.rules import Rules
from quantkit.export.engines.schemes import stated_group
from quantkit.export.engines.subject import Subject

_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}

RULES = Rules(
    name="transformers",
    version="5.14.1",
    fused={},
    methods=dict.fromkeys(("compressed-tensors", "fp8", "gptq", "awq", "mxfp4"), ""),
    algorithms=frozenset(),
    order=("name", "class"),
    ignored=ending,
    excluded=inside,
    skipped=beginning_or_end,
    unmatched_refused=False,
    head_is_linear=True,
    experts_by_one=frozenset(),
    drafts=False,
    sees_int4=False,
    unknown_name="silently wrong",
)


def findings(subject: Subject) -> Iterator[Finding]:
    """Rules that are transformers' own."""
    quant = subject.quant
    if subject.method == "modelopt":
        yield Finding("silently wrong", "quantization_config", "no reader for ModelOpt: raw codes as weights",
                      "--format compressed-tensors")  # fmt: skip
    if subject.method == "fp8" and "weight_block_size" in quant and not quant["weight_block_size"]:
        yield Finding("silently wrong", "quantization_config", "FP8 per tensor is read under other names "
                      "(weight_scale_inv, activation_scale)", "--format compressed-tensors")  # fmt: skip
    if subject.method != "compressed-tensors":
        return
    groups = quant.get("config_groups") or {}
    for name, group in groups.items():
        if set(group) - _GROUP_KEYS:
            yield Finding("refused", f"config_groups.{name}", f"unknown keys {sorted(set(group) - _GROUP_KEYS)}",
                          "only the keys of compressed-tensors")  # fmt: skip
    first = stated_group(next(iter(groups.values()))) if groups else None
    for layer, scheme in subject.quantized("experts"):
        why = "with zero points" if not scheme.symmetric else "in NVFP4" if scheme.kind == "nvfp4" else ""
        why = why or ("of another group than the first" if scheme != first else "")
        if why:
            yield Finding("refused", layer.name, f"experts {why} cannot be decoded into the fused experts of the model",
                          "symmetric INT4 in the first config group")  # fmt: skip
        elif scheme.kind not in ("int4", "mxfp4"):
            yield Finding("not known", layer.name, f"whether {scheme.kind} experts are decoded into the fused ones")


def flags(subject: Subject) -> list[str]:
    """None are needed."""
    return []
