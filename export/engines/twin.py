"""The twin of an engine: all rules on one checkpoint at one tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import ModuleType
from typing import Any, get_args

from quantkit.export.checkpoint import NESTED
from quantkit.export.engines import sglang, transformers, trtllm, vllm
from quantkit.export.engines.files import Files
from quantkit.export.engines.finding import EngineReport, Finding, grouped
from quantkit.export.engines.kernels import check_cuts, check_kernels
from quantkit.export.engines.kv import check_cache
from quantkit.export.engines.stored import check_stored
from quantkit.export.engines.subject import Subject, subject_of
from quantkit.export.engines.values import check_values
from quantkit.export.kv_scales import Engine
from quantkit.kernels.errors import QuantkitError

ENGINES: Mapping[str, ModuleType] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "transformers": transformers}
# Keys of `weights` and activations that compressed-tensors 0.20 has; another one is an error.
_ARGS = frozenset({
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
})  # fmt: skip


def examine(files: Files, engine: str, tp: int = 1) -> EngineReport:
    """Everything the twin of `engine` has to say; raises QuantkitError for an unknown engine or size."""
    if engine not in get_args(Engine):
        raise QuantkitError("unknown engine", value=engine, allowed=", ".join(get_args(Engine)))
    if tp < 1:
        raise QuantkitError("a tensor-parallel size must be 1 or more", value=tp)
    module = ENGINES[engine]
    try:
        subject = subject_of(files, module.RULES, tp)
    except QuantkitError as e:
        finding = Finding("refused", "quantization_config", e.message, f"correct {e.value}")
        return EngineReport(engine, module.RULES.version, tp, (finding,), ())
    first = [*_files(subject), *_configuration(subject)]
    if any(f.verdict == "refused" for f in first):  # it would get no further
        return EngineReport(engine, module.RULES.version, tp, grouped(first), ())
    rules = (
        first, _resolved(subject), check_stored(subject), check_cuts(subject), check_kernels(subject),
        check_values(subject), check_cache(subject), module.findings(subject),
    )  # fmt: skip
    flags = list(module.flags(subject))
    if files.config.get("auto_map"):
        flags.append("--trust-remote-code")
    return EngineReport(engine, module.RULES.version, tp, grouped(chain(*rules)), tuple(flags))


def _files(subject: Subject) -> Iterator[Finding]:
    """Files that engines load besides, and configurations that disagree."""
    for name in subject.files.stray:
        yield Finding("silently wrong", name, "there is no index: every weight file is loaded, the last wins",
                      "remove the file")  # fmt: skip
    nested, quant = subject.files.nested, subject.files.quant
    if nested is None or quant.get("quant_method") != "modelopt":
        return
    inner: Mapping[str, Any] = nested.get("quantization") or {}
    excluded = quant.get("ignore") or quant.get("exclude_modules") or []
    if inner.get("quant_algo") != quant.get("quant_algo") or sorted(inner.get("exclude_modules") or []) != sorted(
        excluded
    ):
        wins = NESTED if subject.rules.name == "trtllm" else "config.json"
        yield Finding("silently wrong", NESTED, f"it disagrees with config.json: {wins} wins here",
                      "write both from one configuration")  # fmt: skip


def _configuration(subject: Subject) -> Iterator[Finding]:
    """Methods, algorithms and keys that the engine does not know."""
    quant, rules, method = subject.quant, subject.rules, subject.method
    if method and method not in ("modelopt", *rules.methods):
        yield Finding("refused", "quantization_config", f"the method {method}", f"one of {', '.join(rules.methods)}")
    elif rules.methods.get(method):
        yield Finding("refused", "quantization_config", f"the method {method}: {rules.methods[method]}",
                      f"one of {', '.join(m for m, why in rules.methods.items() if not why)}")  # fmt: skip
    algorithm = quant.get("quant_algo")
    if method == "modelopt" and rules.algorithms and algorithm not in rules.algorithms:
        yield Finding(
            rules.other_algorithm,
            "quantization_config",
            f"the algorithm {algorithm}",
            f"one of {', '.join(sorted(rules.algorithms))}",
        )
    if method == "mxfp4" and subject.model_type != "gpt_oss":
        yield Finding("refused", "quantization_config", "the method mxfp4 is for gpt-oss alone",
                      "--format compressed-tensors")  # fmt: skip
    if method == "awq" and str(quant.get("version", "gemm")).lower() != "gemm":
        yield Finding("refused", "quantization_config", f"AWQ in the order {quant['version']}", "version gemm")
    for name, group in (quant.get("config_groups") or {}).items() if method == "compressed-tensors" else ():
        for args in (group.get("weights") or {}, group.get("input_activations") or {}):
            if set(args) - _ARGS:
                yield Finding("refused", f"config_groups.{name}", f"unknown keys {sorted(set(args) - _ARGS)}",
                              "only the keys of compressed-tensors")  # fmt: skip
            if args.get("actorder") in ("group", "dynamic", True):
                yield Finding("refused", f"config_groups.{name}", f"groups in the order of activations (actorder "
                              f"{args['actorder']})", "actorder null, weight or static")  # fmt: skip


def _resolved(subject: Subject) -> Iterator[Finding]:
    """Layers that the engine refuses by their names alone, and how many stay unquantised."""
    for layer in subject.layers:
        found = subject.resolved[layer.name]
        if isinstance(found, Finding):
            yield found
        elif found is None and all(s.stored == "plain" for s in layer.shards):
            yield Finding("ok", layer.name, "unquantised")
