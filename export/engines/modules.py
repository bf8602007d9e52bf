"""The layers an engine builds, from tensor names: what it fuses, how it cuts each over ranks, which it never quantises.

Letters: O outputs (rows), I inputs, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.export.engines.files import Header

Split = Literal["column", "row", "replicated"]
LayerKind = Literal["linear", "experts", "head"]
Stored = Literal["plain", "int4", "fp4", "fp8", "bytes", "gptq", "awq"]

# Tensors of one linear layer, by what follows its name. The first three hold the codes.
CODES = ("weight_packed", "qweight", "weight")
PARTS = frozenset({
    *CODES, "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_shape",
    "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "activation_scale", "pre_quant_scale",
    "qzeros", "scales", "g_idx",
})  # fmt: skip
_COLUMN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj",
           "w1", "w3", "fc1", "lm_head")  # fmt: skip
_ROW = ("o_proj", "out_proj", "dense", "down_proj", "w2", "fc2")
SPLIT: dict[str, Split] = {**dict.fromkeys(_COLUMN, "column"), **dict.fromkeys(_ROW, "row")}
# Built without a quantisation config whatever the configuration says.
UNQUANTISED = frozenset({"gate", "router", "wg", "shared_expert_gate", "weights_proj", "eh_proj"})
_NOT_LINEAR = re.compile(r".*(?:norm|ln_?\w*|embed\w*|pos_emb\w*|conv\w*|wte|wpe)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_HEADS = ("lm_head", "shared_head.head")


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer as the checkpoint holds it; `rows` and `inputs` are those of the weight w_OI, not of its codes."""

    name: str
    tensors: Mapping[str, Header]
    stored: Stored
    rows: int
    inputs: int

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def split(self) -> Split:
        """How tensor parallelism cuts it."""
        return SPLIT.get(self.leaf, "replicated")

    @property
    def signature(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Names, dtypes and shapes: what all layers of one kind have in common."""
        return tuple((n, t.dtype, t.shape) for n, t in self.tensors.items())


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the engine: a module, those it fuses into one, or all experts of a decoder layer."""

    name: str
    kind: LayerKind
    shards: tuple[Module, ...]

    @property
    def fused(self) -> bool:
        """Several modules of the checkpoint are one here."""
        return self.kind == "linear" and len(self.shards) > 1

    @property
    def asked(self) -> tuple[str, ...]:
        """The names an engine looks up: those of the shards; for experts, those of expert 0 alone."""
        if self.kind != "experts":
            return tuple(s.name for s in self.shards)
        first = min(int(_EXPERT.fullmatch(s.name)[2]) for s in self.shards)  # type: ignore[index]
        return tuple(s.name for s in self.shards if f".experts.{first}." in s.name)


def template(name: str) -> str:
    """The name with every number replaced: the same for a layer of each block."""
    return _NUMBER.sub("#", name)


def modules_of(headers: Mapping[str, Header]) -> tuple[dict[str, Module], list[str]]:
    """Every linear layer of the checkpoint by name, and the names of those that have companions but no codes."""
    tensors: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            tensors.setdefault(stem, {})[part] = header
    modules, orphans = {}, []
    for name, parts in tensors.items():
        codes = next((c for c in CODES if c in parts), None)
        if codes is None:
            orphans.append(name)
        elif len(parts[codes].shape) != 2 or _NOT_LINEAR.fullmatch(name.rpartition(".")[2]):
            continue
        else:
            stored, rows, inputs = _stored(codes, parts)
            modules[name] = Module(name, parts, stored, rows, inputs)
    return modules, orphans


def _stored(codes: str, parts: Mapping[str, Header]) -> tuple[Stored, int, int]:
    """How the codes are stored, and the shape of the weight, by dtypes and shapes."""
    header = parts[codes]
    rows, inputs = header.shape
    if codes == "weight_packed":
        return ("int4", rows, inputs * 8) if header.dtype == "I32" else ("fp4", rows, inputs * 2)
    if codes == "qweight":
        outputs = parts["scales"].shape[-1] if "scales" in parts else inputs
        return ("gptq", inputs, rows * 8) if outputs == inputs else ("awq", inputs * 8, rows)
    if header.dtype.startswith("F8"):
        return "fp8", rows, inputs
    if header.dtype in ("U8", "I8"):
        # two outputs in a byte (ModelOpt's INT4) unless E4M3 scales or a second scale say FP4, two inputs in a byte
        scale = parts.get("weight_scale")
        fp4 = "weight_scale_2" in parts and "pre_quant_scale" not in parts
        fp4 = fp4 or (scale is not None and scale.dtype in ("F8_E4M3", "U8"))
        return ("fp4", rows, inputs * 2) if fp4 else ("bytes", rows * 2, inputs)
    return "plain", rows, inputs


def layers_of(modules: Mapping[str, Module], fused: Mapping[str, tuple[str, ...]]) -> list[Layer]:
    """The engine's layers in the order of the checkpoint; `fused` maps the name of a fused layer to its shards."""
    owner = {shard: (name, shards) for name, shards in fused.items() for shard in shards}
    layers: dict[str, Layer] = {}
    experts: dict[str, list[Module]] = {}
    for module in modules.values():
        if module.leaf in UNQUANTISED:
            continue
        expert = _EXPERT.fullmatch(module.name)
        if expert:
            experts.setdefault(expert[1], []).append(module)
            continue
        stem, _, leaf = module.name.rpartition(".")
        name, shards = owner.get(leaf, ("", ()))
        members = tuple(modules[f"{stem}.{s}"] for s in shards if f"{stem}.{s}" in modules)
        if shards and len(members) == len(shards):
            layers.setdefault(f"{stem}.{name}", Layer(f"{stem}.{name}", "linear", members))
        else:
            kind: LayerKind = "head" if module.name.endswith(_HEADS) else "linear"
            layers[module.name] = Layer(module.name, kind, (module,))
    return [*layers.values(), *(Layer(n, "experts", tuple(m)) for n, m in experts.items())]
