"""What tells one engine's loader from another's, as data: orders, ways of matching, and what it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.export.engines.files import Files
from quantkit.export.engines.finding import Verdict
from quantkit.export.engines.matching import Match

Step = Literal["name", "class", "fused"]


@dataclass(frozen=True, slots=True)
class Rules:
    """One engine.

    fused              fused layer -> its shards
    methods            quant_method -> why it is refused, or an empty string
    algorithms         ModelOpt's `quant_algo` that it knows; `other_algorithm` is the verdict on another one
    order              of the steps by which a config group of compressed-tensors is found for a layer
    ignored, excluded, skipped   how the ignore list of compressed-tensors, ModelOpt and fp8 is matched
    unmatched_refused  a linear layer of no group is an error; otherwise it is built unquantised
    head_is_linear     the class `Linear` covers the head
    experts_by_one     methods whose list leaves all experts of a layer out when it names one of them
    drafts             it builds the layers of multi-token prediction, those behind `num_hidden_layers`
    sees_int4          for GPTQ and AWQ the tensors say which layers are quantised
    unknown_name       what happens to a tensor that the built layer has no parameter for
    renamed            parts of names that it renames before it matches patterns
    configuration      which of the two configuration files it believes
    """

    name: str
    version: str
    fused: Mapping[str, tuple[str, ...]]
    methods: Mapping[str, str]
    algorithms: frozenset[str]
    order: tuple[Step, ...]
    ignored: Match
    excluded: Match
    skipped: Match
    unmatched_refused: bool
    head_is_linear: bool
    experts_by_one: frozenset[str]
    drafts: bool
    sees_int4: bool
    unknown_name: Verdict
    other_algorithm: Verdict = "refused"
    renamed: tuple[tuple[str, str], ...] = ()
    configuration: Callable[[Files], Mapping[str, Any]] = lambda files: files.quant

    def named(self, name: str) -> str:
        """The name under which the engine builds the layer."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        return name
