"""Recipes: which weights of a checkpoint become what, as YAML with no unknown keys.

A rule matches weights by role (`quantize/roles.py`) or by name; the first rule that matches decides. Shipped recipes
are the files of `quantkit.recipes`; any other path is read as a file.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import SCHEMES, QuantScheme
from quantkit.quantize.recipe_method import Method, Strict, as_method
from quantkit.quantize.roles import matches_role
from quantkit.quantize.shipped import read_recipe


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


def _known_scheme(name: str) -> str:
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}; allowed: {', '.join(SCHEMES)}")
    return name


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Group = Literal["auto", "channel", 32, 64, 128]


class Match(Strict):
    """Which weights a rule speaks of: by `role` or by `name` (a glob, or `re:` and a regular expression)."""

    role: Names = ()
    name: Names = ()
    # roles that the rule leaves to later rules
    except_: Names = Field(default=(), alias="except")

    @model_validator(mode="after")
    def _one_of(self) -> Match:
        if bool(self.role) == bool(self.name):
            raise ValueError("give either `role` or `name`")
        return self

    def hits(self, name: str, role: str) -> bool:
        """Whether the weight `name` (with `.weight`) of `role` is meant."""
        if any(matches_role(role, p) for p in self.except_):
            return False
        if self.role:
            return any(matches_role(role, p) for p in self.role)
        return any(
            re.match(p[3:], name) is not None if p.startswith("re:") else fnmatch.fnmatchcase(name, p)
            for p in self.name
        )

    @property
    def closing(self) -> bool:
        """The rule for everything that is left: the only one that may match nothing."""
        return self.role == ("*",)

    def __str__(self) -> str:
        return f"role {', '.join(self.role)}" if self.role else f"name {', '.join(self.name)}"


def _as_input_scale(value: Any) -> Any:
    return {"rule": value} if isinstance(value, str) else value


class InputScale(Strict):
    """How a calibration run chooses the fixed scale of a layer's inputs: the rules of `calibrate/input_scales.py`.

    rule      amax: headroom * largest magnitude.  nvfp4_act_headroom: room above the blocks that were seen, as much as
              the smallest ones leave
    headroom  amax: room for values that the calibration text did not show, 1.25 unless given
    """

    rule: Literal["nvfp4_act_headroom", "amax"]
    headroom: float | None = Field(default=None, ge=1, le=16)

    def __str__(self) -> str:
        return self.rule if self.rule != "amax" else f"amax x {self.factor:g}"

    @property
    def factor(self) -> float:
        """What the rule amax multiplies with."""
        return 1.25 if self.headroom is None else self.headroom

    @model_validator(mode="after")
    def _options(self) -> InputScale:
        if self.rule != "amax" and self.headroom is not None:
            raise ValueError(f"the rule {self.rule!r} makes its own headroom: `headroom` goes with `amax`")
        return self


class Rule(Strict):
    """One rule: `keep: true` (bytes as published), `drop: <reason>`, or a `scheme`.

    group        int4 only: overrides the group of the scheme; `auto` takes the largest of 128, 64, 32 that divides the
                 inputs of every weight of the rule
    method       how codes are chosen: a search of `quantkit.kernels.cpu.rows.METHODS` (by default the best one), or one
                 of CALIBRATED; a name, or a mapping with options
    input_scale  nvfp4 and fp8-tensor: activations are quantised as well, under one fixed scale for the tensor. A
                 calibration run measures it by a rule (a name, or a mapping with options); a number is taken as it is
    """

    match: Match
    keep: Literal[True] | None = None
    drop: str | None = Field(default=None, min_length=1)
    scheme: Annotated[str, AfterValidator(_known_scheme)] | None = None
    group: Group | None = None
    method: Annotated[Method | None, BeforeValidator(as_method)] = None
    input_scale: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | InputScale | None, BeforeValidator(_as_input_scale)
    ] = None

    @model_validator(mode="after")
    def _one_fate(self) -> Rule:
        if sum(x is not None for x in (self.keep, self.drop, self.scheme)) != 1:
            raise ValueError("a rule says exactly one of `keep: true`, `drop: <reason>`, `scheme: <name>`")
        if self.scheme is None and (self.group or self.method or self.input_scale):
            raise ValueError("`group`, `method` and `input_scale` go with `scheme`")
        if self.group and not (self.scheme or "").startswith("int4"):
            raise ValueError("`group` is for int4 schemes: the groups of the others are fixed by their format")
        if self.input_scale and self.scheme not in ("fp8-tensor", "nvfp4"):
            raise ValueError("`input_scale` is for nvfp4 and fp8-tensor")
        if self.measured and self.scheme != "nvfp4" and self.measured.rule == "nvfp4_act_headroom":
            raise ValueError("the rule nvfp4_act_headroom is for nvfp4, here: amax")
        return self

    @property
    def measured(self) -> InputScale | None:
        """The rule of an input scale that a calibration run measures."""
        return self.input_scale if isinstance(self.input_scale, InputScale) else None

    def with_group(self, group: int | str) -> QuantScheme:
        """The int4 scheme of this rule with another group."""
        prefix = (self.scheme or "").split("-")[0]
        return SCHEMES[f"{prefix}-channel" if group == "channel" else f"{prefix}-g{group}"]


class KVCache(Strict):
    """Scales for an FP8 KV cache, measured by a calibration run.

    rule      amax: headroom * largest value / 448. `percentile` and `mse` are there to compare with: they clip
    headroom  room for values that the calibration text did not show
    """

    dtype: Literal["fp8_e4m3"] = "fp8_e4m3"
    rule: Literal["amax", "percentile", "mse"] = "amax"
    headroom: float = Field(default=1.25, ge=1, le=16)


class Calibration(Strict):
    """How much text a calibration run reads; the command line overrides each."""

    samples: int = Field(default=512, ge=1)
    seq_len: int = Field(default=2048, ge=1)
    seed: int = 0


class Output(Strict):
    """One checkpoint to be written.

    name     its folder, where a recipe has several
    weights  its own rules, in place of the recipe's
    """

    name: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9._-]*)?$")
    weights: tuple[Rule, ...] = ()
    format: Literal["compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt", "fp8", "mxfp4"] = "compressed-tensors"
    tp: tuple[Annotated[int, Field(ge=1)], ...] = ()  # tensor-parallel sizes that have to load
    shard_size: int = Field(default=5_000_000_000, ge=1, le=45_000_000_000)  # bytes


class Recipe(Strict):
    """What a run does. `weights` must end with a rule for everything else."""

    name: str = ""
    weights: tuple[Rule, ...] = ()
    kv_cache: KVCache | None = None
    calibration: Calibration = Calibration()
    outputs: tuple[Output, ...] = Field(default=(Output(),), min_length=1)

    @model_validator(mode="after")
    def _closed(self) -> Recipe:
        for rules in (o.weights or self.weights for o in self.outputs):
            if not rules or not rules[-1].match.closing:
                rest = '{match: {role: "*"}, keep: true}'
                raise ValueError(f"`weights`: the last rule must be the one for everything else: {rest}")
        if len(self.outputs) > 1:
            if not all(o.name for o in self.outputs) or len({o.name for o in self.outputs}) < len(self.outputs):
                raise ValueError("several outputs need names of their own: they become folders")
            if any(r.needs_calibration for r in self.split()):
                raise ValueError("several outputs are written without calibration: leave one, or `quantkit export RUN`")
        return self

    def split(self) -> tuple[Recipe, ...]:
        """One recipe for each output, as if it were the only one."""
        if len(self.outputs) == 1 and not self.outputs[0].weights:
            return (self,)
        bare = [o.model_copy(update={"name": "", "weights": ()}) for o in self.outputs]
        return tuple(
            self.model_copy(update={"weights": own.weights or self.weights, "outputs": (b,)})
            for own, b in zip(self.outputs, bare, strict=True)
        )

    @property
    def needs_calibration(self) -> bool:
        """True when a rule or the cache needs activations."""
        chosen = any(r.method is not None and r.method.calibrated for r in self.weights)
        return chosen or self.kv_cache is not None or any(r.measured for r in self.weights)

    @property
    def output(self) -> Output:
        """The checkpoint to write."""
        return self.outputs[0]


def load_recipe(source: str) -> Recipe:
    """The recipe of a shipped name or of a `.yaml` path; raises QuantkitError with the place of each fault."""
    where, text = read_recipe(source)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise QuantkitError(f"the recipe is not valid YAML: {e}", file=where) from e
    if not isinstance(data, dict):
        raise QuantkitError("the recipe is not a mapping", file=where, hint="it begins with `weights:`")
    try:
        recipe = Recipe.model_validate({"name": where.removesuffix(".yaml"), **data})
        return recipe if len(recipe.outputs) > 1 else recipe.split()[0]
    except ValidationError as e:
        faults = []
        for fault in e.errors():
            place = ".".join(str(p) for p in fault["loc"]) or "recipe"
            text = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, ")
            faults.append(f"  {place}: {text}")
        raise QuantkitError(
            "the recipe is not valid:\n" + "\n".join(faults),
            file=where,
            hint="`quantkit recipes NAME` prints a shipped one",
        ) from e


def with_int4_group(recipe: Recipe, group: str) -> Recipe:
    """The recipe with another group in all INT4 rules: `32`, `64`, `128`, `channel` or `auto`."""
    value: int | str = int(group) if group.isdigit() else group
    if value not in (32, 64, 128, "channel", "auto"):
        raise QuantkitError("unknown group", value=group, allowed="32, 64, 128, channel, auto")
    rules = [
        r.model_copy(update={"group": value}) if (r.scheme or "").startswith("int4") else r for r in recipe.weights
    ]
    if not any(r.group for r in rules):
        raise QuantkitError("--group is for INT4 and the recipe has no INT4 rule", value=group, allowed="no --group")
    return recipe.model_copy(update={"weights": tuple(rules)})
