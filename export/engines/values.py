"""The few single numbers that headers cannot tell: global scales of fused sets, directions, zero points of GPTQ.

A number that is zero or not finite is the business of the checks of scales; it is judged here only where an engine
makes more of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.modules import Layer
from quantkit.export.engines.schemes import Stated
from quantkit.export.engines.subject import Subject

# Largest magnitudes that are taken for possible; a scale that stands for more is the reciprocal of the right one.
_WEIGHT_AMAX, _INPUT_AMAX = 1e3, 1e5
_NVFP4 = 448.0 * 6.0
_V1, _V2 = 0x77777777, 0x88888888  # stored zero points of symmetric GPTQ: 8 - 1, and 8
# Largest magnitude that a weight's global scale stands for.
_GLOBAL = {"weight_global_scale": lambda v: _NVFP4 / v, "weight_scale_2": lambda v: _NVFP4 * v}


def check_values(subject: Subject) -> Iterator[Finding]:
    """All rules about values; nothing for a checkpoint that is only planned."""
    if subject.files.reader is None:
        return
    for layer, scheme in subject.quantized():
        if scheme.kind == "nvfp4":
            yield from _globals(subject, layer, scheme)
        if scheme.kind == "fp8-tensor":
            yield from _tensor_scales(subject, layer)
        if scheme.inputs == "static":
            yield from _inputs(subject, layer)
    for kind in subject.kinds:
        if kind.scheme is None:
            continue
        if kind.scheme.kind.startswith("fp8"):
            yield from _reciprocal(subject, kind.example.name)
        if subject.method == "gptq":
            yield from _zeros(subject, kind.example.name)


def _numbers(subject: Subject, layer: Layer, part: str) -> dict[str, float]:
    """The scale of each shard that has one."""
    found = {s.name: subject.files.number(f"{s.name}.{part}") for s in layer.shards if part in s.tensors}
    return {n: v for n, v in found.items() if v is not None}


def _pairs(layer: Layer, values: dict[str, float]) -> Iterator[tuple[str, set[float]]]:
    """The sets that share one weight: all shards of a fused layer, gate and up of each expert."""
    sets: dict[str, set[float]] = {}
    for name, value in values.items():
        stem, _, leaf = name.rpartition(".")
        if layer.kind != "experts":
            sets.setdefault(layer.name, set()).add(value)
        elif leaf not in ("down_proj", "w2"):
            sets.setdefault(stem, set()).add(value)
    yield from sets.items()


def _globals(subject: Subject, layer: Layer, scheme: Stated) -> Iterator[Finding]:
    """One global for all that is fused, in the direction of the format."""
    part = "weight_global_scale" if subject.method == "compressed-tensors" else "weight_scale_2"
    values = _numbers(subject, layer, part)
    for name, value in values.items():
        if math.isfinite(value) and value > 0 and _GLOBAL[part](value) > _WEIGHT_AMAX:
            kind = "a divisor, 448 * 6 / amax" if part == "weight_global_scale" else "a multiplier, amax / (448 * 6)"
            yield Finding("silently wrong", f"{name}.{part}", f"{part} must be {kind}: this one is the reciprocal",
                          "store 1 / x")  # fmt: skip
    fix = "one global for the whole fused set: quantise again, or scale the blocks (`quantkit repair`)"
    for name, found in _pairs(layer, values):
        if len(found) > 1 and subject.rules.name != "transformers":
            strict = subject.rules.name == "trtllm" or (subject.rules.name == "sglang" and scheme.inputs == "none")
            if strict and layer.kind != "experts":
                yield Finding("refused", name, "different globals in a fused layer: the loader wants them equal", fix)
            else:
                takes = "that of gate" if layer.kind == "experts" else "the largest"
                yield Finding("silently wrong", name, f"different globals in a fused layer: the engine takes {takes} "
                              "and leaves the blocks as they are", fix)  # fmt: skip


def _tensor_scales(subject: Subject, layer: Layer) -> Iterator[Finding]:
    values = _numbers(subject, layer, "weight_scale")
    for name, found in _pairs(layer, values):
        if len(found) > 1 and subject.rules.name != "transformers":
            yield Finding("slow", name, "different scales in a fused layer: quantised again at load",
                          "one scale for the whole fused set")  # fmt: skip


def _inputs(subject: Subject, layer: Layer) -> Iterator[Finding]:
    """Scales of activations: positive, finite, in the right direction, one for a fused layer and for the experts."""
    fp4 = any(s.stored == "fp4" for s in layer.shards)
    divisor = fp4 and subject.method == "compressed-tensors"
    part = "input_global_scale" if divisor else "input_scale"
    values = _numbers(subject, layer, part)
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            yield Finding("silently wrong", f"{name}.{part}", f"{part} is not a positive number: an expert or layer "
                          "that saw no tokens", "calibrate with more text; take the peers' scale")  # fmt: skip
        elif (_NVFP4 / value if divisor else (_NVFP4 if fp4 else 448.0) * value) > _INPUT_AMAX:
            yield Finding("silently wrong", f"{name}.{part}", f"{part} stands for activations beyond {_INPUT_AMAX:g}: "
                          "the reciprocal of the right one", "store 1 / x")  # fmt: skip
    sets: dict[str, set[float]] = {}
    for name, value in values.items():
        down = name.rpartition(".")[2] in ("down_proj", "w2")
        sets.setdefault("down" if layer.kind == "experts" and down else "up", set()).add(value)
    if any(len(v) > 1 for v in sets.values()) and subject.rules.name != "transformers":
        yield Finding("silently wrong", layer.name, "different scales of activations: the engine reduces them to one",
                      "one for a fused layer, one for gate and up of all experts, one for their down")  # fmt: skip


def _reciprocal(subject: Subject, name: str) -> Iterator[Finding]:
    """FP8 scales are amax/448, `weight_scale_inv` too."""
    for part in ("weight_scale", "weight_scale_inv"):
        value = subject.files.number(f"{name}.{part}")
        if value is not None and math.isfinite(value) and value * 448 > _WEIGHT_AMAX:
            yield Finding("silently wrong", f"{name}.{part}", f"{part} must be a multiplier, amax / 448: this one is "
                          "the reciprocal", "store 1 / x")  # fmt: skip


def _zeros(subject: Subject, name: str) -> Iterator[Finding]:
    """`checkpoint_format` says whether zero points are stored less one; vLLM and SGLang do not read them."""
    word = subject.files.word(f"{name}.qzeros")
    said = str(subject.quant.get("checkpoint_format") or "gptq")
    right = _V2 if said == "gptq_v2" else _V1
    if word in (_V1, _V2) and word != right and subject.rules.name in ("transformers", "trtllm"):
        yield Finding("silently wrong", f"{name}.qzeros", f"zero points are not those of {said}: all weights are "
                      "shifted by one step", "checkpoint_format: gptq stores 7, gptq_v2 stores 8")  # fmt: skip
