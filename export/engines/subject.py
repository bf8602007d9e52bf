"""A checkpoint as one engine sees it at one tensor-parallel size: its layers and the scheme of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.export.engines.files import Files
from quantkit.export.engines.modules import Layer, LayerKind, Module, layers_of, modules_of, template
from quantkit.export.engines.rules import Rules
from quantkit.export.engines.schemes import Resolved, Stated, resolve

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Kind:
    """Modules that are alike but for the numbers in their names: `example` is the first of `count`."""

    example: Module
    layer: Layer
    scheme: Stated | None
    count: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What the rules look at.

    resolved  scheme, None or a fault for every layer
    kinds     modules of layers without a fault
    orphans   modules that have scales but no codes
    """

    files: Files
    rules: Rules
    tp: int
    layers: tuple[Layer, ...]
    resolved: Mapping[str, Resolved]
    kinds: tuple[Kind, ...]
    orphans: tuple[str, ...]

    @property
    def quant(self) -> Mapping[str, Any]:
        """The quantisation configuration that the engine believes."""
        return self.rules.configuration(self.files)

    @property
    def method(self) -> str:
        """`quant_method`; empty for a plain checkpoint."""
        return str(self.quant.get("quant_method") or "")

    @property
    def model_type(self) -> str:
        """Of the language model."""
        return str(self.files.text.get("model_type"))

    def quantized(self, *kinds: LayerKind) -> Iterator[tuple[Layer, Stated]]:
        """Quantised layers, of these kinds or of all."""
        for layer in self.layers:
            scheme = self.resolved[layer.name]
            if isinstance(scheme, Stated) and (not kinds or layer.kind in kinds):
                yield layer, scheme


def _layer_number(name: str) -> int:
    """Of the decoder layer that a module is in; -1 outside."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def subject_of(files: Files, rules: Rules, tp: int) -> Subject:
    """Raises QuantkitError where the configuration has patterns that are not valid."""
    modules, orphans = modules_of(files.headers)
    if not rules.drafts:
        last = int(files.text.get("num_hidden_layers") or 0)
        modules = {n: m for n, m in modules.items() if not last or _layer_number(n) < last}
    layers = layers_of(modules, rules.fused)
    resolved = resolve(files, layers, rules)
    first: dict[tuple[Any, ...], tuple[Module, Layer, Stated | None]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for layer in layers:
        scheme = resolved[layer.name]
        if scheme is not None and not isinstance(scheme, Stated):
            continue
        for module in layer.shards:
            key = (template(module.name), module.signature, scheme)
            first.setdefault(key, (module, layer, scheme))
            counts[key] = counts.get(key, 0) + 1
    kinds = tuple(Kind(m, layer, s, counts[k]) for k, (m, layer, s) in first.items())
    return Subject(files, rules, tp, tuple(layers), resolved, kinds, tuple(orphans))
