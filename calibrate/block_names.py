"""Which tensors of a checkpoint fill which parameters of a transformers model, decided before any is read.

transformers 5 keeps the experts of a layer in one 3-D parameter and renames what older checkpoints call otherwise; its
own conversion mapping says how. Two chains of its operations cover every family met so far: experts stacked, and
experts stacked with gate above up. Another chain is refused. Tensors that no parameter asks for (MTP layers, vision
towers) are listed, not an error, but a tensor inside a decoder layer that the model would leave out is one.

Letters: E experts, O outputs (rows), I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.calibrate.mtp import is_left_out
from quantkit.calibrate.weights import Weights
from quantkit.kernels.errors import QuantkitError

# scales of caches and of activations, and buffers of old checkpoints: they are not part of the forward in float
_IGNORED = re.compile(
    r".*\.(?:(?:q|k|v|kv|qkv|prob|input|output|activation|input_global)_scale|rotary_emb\.inv_freq|attn\.(?:masked_)?bias)"
)
_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """One parameter or buffer of the model and the tensors that fill it.

    sources     ((name,),) when a tensor fills it as it is; else a group for each matrix that is stacked along the
                outputs (gate, up), each with the tensors of experts 0, 1, ...
    stacked     the parameter is [E, ., .] and every expert is a tensor of its own
    transposed  the parameter is [E, I, O] while the checkpoint's rows are outputs
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]
    stacked: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """`targets` by parameter name; `unused` are the checkpoint's tensors that no parameter asks for."""

    targets: dict[str, Target]
    unused: tuple[str, ...]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in _NUMBERS.split(name)]


def _chain(converter: Any) -> list[tuple[str, object]]:
    return [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]


def _inner_name(name: str) -> str:
    """The name inside the language model of a multimodal checkpoint."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _collect(model: Any, names: Iterable[str], *, nested: bool) -> tuple[dict[str, dict[Any, list[str]]], list[str]]:
    """Parameter -> (converter, pattern) -> tensors; and the tensors that fit no parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    wanted = model.state_dict()
    found: dict[str, dict[Any, list[str]]] = {}
    unused = []
    for name in names:
        inner = _inner_name(name) if nested else name
        target, pattern = rename_source_key(inner, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted:
            unused.append(name)
            continue
        converter = next((c for c in converters if pattern in c.source_patterns), None) if pattern else None
        found.setdefault(target, {}).setdefault((converter, pattern), []).append(name)
    return found, unused


def _target(name: str, shape: tuple[int, ...], found: dict[Any, list[str]], weights: Weights, flip: bool) -> Target:
    """One parameter; `flip`: the family's experts are [E, I, O]."""
    if {c for c, _ in found} == {None}:
        (own,) = found.values()
        if len(own) > 1:
            raise QuantkitError("two tensors for one parameter", tensor=own[0], value=own[1], allowed=name)
        transposed = flip and len(shape) == 3 and weights.quantized(own[0])
        have = weights.shape(own[0])
        if have != (shape if not transposed else (shape[0], shape[2], shape[1])):
            raise QuantkitError(
                "the tensor does not have the shape that config.json implies", tensor=own[0], value=list(have),
                allowed=list(shape),
            )  # fmt: skip
        return Target(name, shape, (tuple(own),), transposed=transposed)
    converter = next(c for c, _ in found if c is not None)
    chain = _chain(converter)
    if chain not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]) or flip:
        first = next(iter(found.values()))[0]
        raise QuantkitError(
            "transformers builds this parameter in a way that is not supported", tensor=first, value=chain, allowed=name
        )
    groups = {pattern: tuple(sorted(names, key=_natural)) for (_, pattern), names in found.items()}
    sources = tuple(groups[p] for p in converter.source_patterns if p in groups)
    rows = 0
    for group in sources:
        shapes = {weights.shape(n) for n in group}
        if len(group) != shape[0] or len(shapes) != 1:
            raise QuantkitError(
                "the experts of a layer are not complete", tensor=group[0], value=f"{len(group)} tensors",
                allowed=f"{shape[0]} of one shape",
            )  # fmt: skip
        rows += next(iter(shapes))[0]
    if (rows, weights.shape(sources[0][0])[1]) != shape[1:]:
        raise QuantkitError(
            "the experts do not have the shape that config.json implies", tensor=sources[0][0],
            value=list(weights.shape(sources[0][0])), allowed=f"{len(sources)} matrices that make {list(shape[1:])}",
        )  # fmt: skip
    return Target(name, shape, sources, stacked=True)


def _check(missing: list[str], unused: list[str], layers: str, count: int, mtp: int | None) -> None:
    if missing:
        raise QuantkitError(
            f"{len(missing)} tensors that the model needs are not in the checkpoint", tensor=missing[0],
            hint="the checkpoint is incomplete, or its config.json describes another model",
        )  # fmt: skip
    inside = re.compile(re.escape(_inner_name(layers)) + r"\.(\d+)\.(.*)")
    for name in unused:
        match = inside.match(_inner_name(name))
        if match and int(match[1]) == mtp and is_left_out(match[2]):
            continue
        if match and int(match[1]) < count and not _IGNORED.fullmatch(name):
            raise QuantkitError(
                "the model has no place for a tensor of a decoder layer: the forward would leave it out", tensor=name,
                hint="config.json describes another model, or transformers lacks this variant",
            )  # fmt: skip


def name_plan(model: Any, weights: Weights, *, layers: str, count: int, nested: bool, mtp: int | None = None) -> Names:
    """Fill every parameter and persistent buffer of the meta `model` from the checkpoint.

    `layers` is the name of the list of decoder layers, `count` its length, `mtp` the number of the one that is an MTP
    layer; `nested` strips the prefix of a language model inside a multimodal checkpoint. Raises QuantkitError when
    tensors are missing, do not fit, or would be left out.
    """
    found, unused = _collect(model, weights.names(), nested=nested)
    modules = dict(model.named_modules())
    targets: dict[str, Target] = {}
    missing = []
    embedding = next(n for n, m in modules.items() if m is model.get_input_embeddings()) + ".weight"
    state = model.state_dict()
    for name, tensor in state.items():
        parent = modules[name.rpartition(".")[0]]
        shape = tuple(tensor.shape)
        if name in found:
            flip = bool(getattr(parent, "is_transposed", False))
            targets[name] = _target(name, shape, found[name], weights, flip)
        elif parent is model.get_output_embeddings() and name.endswith(".weight") and embedding in found:
            if not model.config.tie_word_embeddings:
                missing.append(name)
                continue
            targets[name] = _target(name, shape, found[embedding], weights, False)
        else:
            missing.append(name)
    _check(missing, unused, layers, count, mtp)
    return Names(targets, tuple(unused))
