"""Choose the fate of every weight: match rules, resolve schemes, split fused experts, name the tensors to be written.

Pure: no weight is read. Faults are gathered, so that all of them are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.export.checkpoint import Checkpoint, text_config
from quantkit.export.formats import Format, Part, format_module
from quantkit.export.safetensors_file import nbytes_of
from quantkit.export.sources.detect import FLOATS, Weight, weights_of
from quantkit.kernels.cpu.rows import DEFAULT_METHOD, family
from quantkit.kernels.cpu.rows import methods_of as searches_of
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import SCHEMES, QuantScheme
from quantkit.quantize.modelopt_algorithms import algorithms_for
from quantkit.quantize.plan import Matrix, Task
from quantkit.quantize.recipe import InputScale, Recipe, Rule
from quantkit.quantize.roles import Placed, roles_of

AUTO_GROUPS = (128, 64, 32)
_NUMBERS = re.compile(r"(\d+)")


def natural_key(name: str) -> list[str | int]:
    """Sort key under which layer 10 follows layer 9."""
    return [int(p) if i % 2 else p for i, p in enumerate(_NUMBERS.split(name))]


def as_fp8_block(weight: Weight) -> str | None:
    """`fp8-block` for blocks whose float32 scales happen to be powers of two: they are good FP8 blocks as well."""
    is_f32 = "scale" in weight.parts and weight.parts["scale"].dtype == "F32"
    return "fp8-block" if weight.scheme == SCHEMES["fp8-block-ue8m0"] and is_f32 else None


def methods_of(scheme: QuantScheme) -> tuple[str, ...]:
    """The methods that can choose codes of a scheme, each as `str(Method)`."""
    if scheme.element == "float":
        return ()
    own = ("gptq", "awq") if scheme.element in ("int4", "e2m1") else ()
    return (*searches_of(scheme), *own, *(f"modelopt {name}" for name in algorithms_for(scheme)))


class Fates:
    """The inputs of one plan, and the faults found so far. Used once, by `make_plan`."""

    def __init__(self, recipe: Recipe, source: Checkpoint, format_name: str, input_scales: Mapping[str, float]) -> None:
        self.recipe = recipe
        self.input_scales = input_scales
        self.source = source
        self.format_name = format_name
        self.format: Format = format_module(format_name)
        self.weights = dict(sorted(weights_of(source).items(), key=lambda kv: natural_key(kv[0])))
        self.placed, self.family = roles_of({n: w.shape for n, w in self.weights.items()}, source.config)
        text = text_config(source.config)
        dtype = str(
            source.config.get("dtype")
            or source.config.get("torch_dtype")
            or text.get("dtype")
            or text.get("torch_dtype")
        )
        self.half = "float16" in dtype and "bfloat16" not in dtype
        self.errors: list[QuantkitError] = []

    def fault(self, message: str, weight: Weight, **more: Any) -> None:
        file = next(iter(weight.parts.values())).file
        self.errors.append(QuantkitError(message, file=file, tensor=weight.name, **more))

    def rules(self) -> dict[str, Rule]:
        """The rule that decides over each weight; a rule that decides over none is a fault."""
        chosen: dict[str, Rule] = {}
        used = [False] * len(self.recipe.weights)
        by_role: dict[str, int | None] = {}
        named = any(r.match.name for r in self.recipe.weights)
        for name in self.weights:
            role = self.placed[name].role
            if named or role not in by_role:
                by_role[role] = next(i for i, r in enumerate(self.recipe.weights) if r.match.hits(name, role))
            i = by_role[role]
            assert i is not None
            used[i] = True
            chosen[name] = self.recipe.weights[i]
        roles = sorted({p.role for p in self.placed.values()})
        for rule, hit in zip(self.recipe.weights, used, strict=True):
            if not hit and not rule.match.closing:
                self.errors.append(
                    QuantkitError(
                        "a rule matches nothing in this checkpoint",
                        file=self.recipe.name,
                        value=str(rule.match),
                        allowed="roles here: " + ", ".join(roles),
                        hint="an earlier rule may have taken what it names; first match wins",
                    )
                )
        return chosen

    def schemes(self, chosen: Mapping[str, Rule]) -> dict[int, QuantScheme]:
        """The scheme of each rule that has one, by the rule's identity: `group` and `auto` resolved."""
        found: dict[int, QuantScheme] = {}
        for rule in self.recipe.weights:
            if rule.scheme is None:
                continue
            group: int | str | None = rule.group
            if group == "auto":
                inputs = {w.shape[-1] for n, w in self.weights.items() if chosen[n] is rule and self.placed[n].linear}
                group = next((g for g in AUTO_GROUPS if all(i % g == 0 for i in inputs)), 32)
            found[id(rule)] = rule.with_group(group) if group else SCHEMES[rule.scheme]
            known = methods_of(found[id(rule)])
            if rule.method is not None and str(rule.method) not in known:
                self.errors.append(
                    QuantkitError(
                        f"unknown method for {rule.scheme}",
                        file=self.recipe.name,
                        value=str(rule.method),
                        allowed=", ".join(known) or "none",
                    )
                )
        return found

    def tasks(self) -> list[Task]:
        """The fate of every weight, in the order of the output; places of bytes are still open."""
        chosen = self.rules()
        schemes = self.schemes(chosen)
        tasks: list[Task] = []
        for name, weight in self.weights.items():
            rule, placed = chosen[name], self.placed[name]
            scheme = schemes.get(id(rule))
            if rule.drop is not None:
                tasks.append(Task(name, "drop", placed.role, weight, reason=rule.drop))
            elif (
                scheme is None
                or (scheme.element != "float" and not placed.linear)
                or (scheme.element == "float" and weight.encoding == "plain")
            ):
                tasks.append(Task(name, "keep", placed.role, weight))
            elif self.same(weight, scheme):
                scale = self.input_scale(rule, weight.module)
                tasks.append(Task(name, "pass", placed.role, weight, scheme=scheme, input_scale=scale))
            elif scheme.element == "float":
                tasks += self.decoded(weight, placed.role, scheme)
            else:
                if weight.encoding == "plain" and weight.parts["codes"].dtype not in FLOATS:
                    self.fault(
                        "not a float tensor", weight, value=weight.parts["codes"].dtype, allowed=", ".join(FLOATS)
                    )
                method = rule.method.name if rule.method else DEFAULT_METHOD[family(scheme)]
                for module, matrix in self.matrices(weight, placed, scheme):
                    scale = self.input_scale(rule, module)
                    tasks.append(Task(module, "quantize", placed.role, weight, matrix, scheme, method, scale))
        return tasks

    def input_scale(self, rule: Rule, module: str) -> float | InputScale | None:
        """What a rule says of the inputs of a layer: the measured number where a calibration run gave one."""
        return rule.input_scale if rule.measured is None else self.input_scales.get(module, rule.measured)

    def same(self, weight: Weight, scheme: QuantScheme) -> bool:
        """True when the source holds just the numbers that the scheme asks for, scales in a dtype that engines take."""
        if weight.encoding.startswith(("gptq", "awq")) and (weight.parts["scale"].dtype == "F16") != self.half:
            return False
        own = weight.scheme
        grouped = own is not None and own.granularity == "group" and own.group_size == weight.shape[-1]
        if own is not None and grouped and scheme.granularity == "channel":
            own = replace(own, name=scheme.name, granularity="channel", group_size=0)  # one group is the whole row
        return own == scheme or scheme.name == as_fp8_block(weight)

    def decoded(self, weight: Weight, role: str, scheme: QuantScheme) -> list[Task]:
        """Tasks that decode a weight; gpt-oss experts one by one, since BF16 stores them transposed."""
        if len(weight.shape) == 2:
            return [Task(weight.name, "decode", role, weight, scheme=scheme)]
        experts, rows, inputs = weight.shape
        matrices = [Matrix(weight, rows, inputs, e * rows, e) for e in range(experts)]
        return [Task(f"{weight.name}.{m.expert}", "decode", role, weight, m, scheme) for m in matrices]

    def matrices(self, weight: Weight, placed: Placed, scheme: QuantScheme) -> list[tuple[str, Matrix]]:
        """(module, matrix) for each linear layer inside a weight: one, or one an expert for a fused tensor."""
        module = weight.module
        if len(weight.shape) == 2:
            return [(module, Matrix(weight, *weight.shape))]
        experts, rows, inputs = weight.shape
        if placed.transposed:
            rows, inputs = inputs, rows
        if self.family.name == "gpt_oss" or placed.transposed:
            if self.format_name != "mxfp4":
                self.fault(
                    "the fused experts of gpt-oss are read by engines as MXFP4 or BF16 only",
                    weight,
                    value=f"{scheme.name} in the {self.format_name} format",
                    allowed="keep, or scheme mxfp4 with --format mxfp4",
                )
            return [
                (f"{module}.{e}", Matrix(weight, rows, inputs, e * rows, e, placed.transposed)) for e in range(experts)
            ]
        stem, _, last = module.rpartition(".")
        pieces = {"gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
        if rows % len(pieces) or last not in ("gate_up_proj", "down_proj"):
            self.fault(
                "fused experts of an unknown layout",
                weight,
                value=list(weight.shape),
                allowed="gate_up_proj, down_proj",
            )
            return []
        share = rows // len(pieces)
        return [
            (f"{stem}.{e}.{piece}", Matrix(weight, share, inputs, e * rows + i * share, e))
            for e in range(experts)
            for i, piece in enumerate(pieces)
        ]

    def parts(self, task: Task) -> list[Part]:
        """The tensors a task writes, by the name that follows the module's."""
        if task.fate == "drop":
            return []
        if task.fate == "decode":
            return [
                Part("codes", "weight", "BF16", task.weight.shape if task.matrix is None else task.weight.shape[:0:-1])
            ]
        assert task.scheme is not None
        if task.scheme.name not in self.format.SCHEMES:
            self.fault(
                f"the {self.format_name} format cannot hold {task.scheme.name}",
                task.weight,
                allowed=", ".join(self.format.SCHEMES),
                hint="choose another --format, or another scheme; `scheme: bf16` decodes what the source has quantised",
            )
            return []
        if task.fate == "pass":
            return self._passed(task, task.scheme)
        assert task.matrix is not None
        static = task.input_scale is not None
        return self.made(task.scheme, task.matrix.rows, task.matrix.inputs, self.half, static, task.weight)

    def made(
        self, scheme: QuantScheme, rows: int, inputs: int, half: bool, static: bool, weight: Weight
    ) -> list[Part]:  # fmt: skip
        """The parts that the format makes of a layer; a fault, and none, where it refuses its shape."""
        try:
            return self.format.parts(scheme, rows, inputs, half=half, input_scale=static)
        except QuantkitError as e:
            self.fault(e.message, weight, value=e.value, allowed=e.allowed, hint=e.hint)
            return []

    def _passed(self, task: Task, scheme: QuantScheme) -> list[Part]:
        """Parts of a weight whose bytes are copied: dtypes of the source where only the label differs."""
        weight, static = task.weight, task.input_scale is not None
        if weight.extra and not static:
            self.fault(
                "the source has activation scales, which cannot be carried into another format yet",
                weight,
                value=weight.extra[0].name,
                allowed="recipe keep (as published), `input_scale` in the rule, or `scheme: bf16` and another scheme",
            )
        if len(weight.shape) != 2 and self.format_name == "mxfp4":
            experts, rows, inputs = weight.shape
            made = self.made(scheme, rows, inputs, False, static, weight)
            return [replace(part, shape=(experts, *part.shape)) for part in made]
        if len(weight.shape) != 2:
            self.fault("fused experts cannot change their format", weight, allowed="--format mxfp4, or keep")
            return []
        half = "scale" in weight.parts and weight.parts["scale"].dtype == "F16"
        out = []
        for part in self.made(scheme, *weight.shape, half, static, weight):
            own = weight.parts.get(part.kind)
            if own is not None and part.kind == "shape":
                out.append(replace(part, dtype=own.dtype))
                continue
            if own is not None and part.kind != "g_idx" and own.nbytes != nbytes_of(part.dtype, part.shape):
                self.fault("the source's scale does not fit this format", weight, value=f"{own.dtype} {own.shape}",
                           allowed=f"{part.dtype} {part.shape}")  # fmt: skip
            out.append(part)
        return out
