"""The part of a recipe that says how codes are chosen: a method, and the options that it has.

A method without a calibration run is a search of scales by name. The others have options, each its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from quantkit.quantize.modelopt_algorithms import READABLE, check_algorithm

# options of the methods of `quantkit.quantize.methods`, which need a calibration run
OPTIONS: dict[str, tuple[str, ...]] = {
    "gptq": ("act_order", "damp"),
    "awq": ("clip", "gptq"),
    "modelopt": ("algorithm",),
}
CALIBRATED = tuple(OPTIONS)


class Strict(BaseModel):
    """A frozen record in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def as_method(value: Any) -> Any:
    """A name stands for a method without options."""
    return {"name": value} if isinstance(value, str) else value


class Method(Strict):
    """How codes are chosen: a data-free search of scales by name, or a method that a calibration run carries out.

    act_order  gptq: `static` works on the columns with the largest inputs first, scales and layout unchanged
    damp       gptq: share of the mean of the Hessian's diagonal that is added to it
    clip       awq: also try scales below the largest weight of a group; not for q and k
    gptq       awq: choose the codes of the scaled weights by GPTQ, rather than by rounding to nearest
    algorithm  modelopt: one of `modelopt_algorithms.READABLE`
    """

    name: str
    act_order: Literal["static", "none"] = "static"
    damp: float = Field(default=0.01, gt=0, le=1)
    clip: bool = True
    gptq: bool = False
    algorithm: Annotated[str, AfterValidator(check_algorithm)] | None = None

    @model_validator(mode="after")
    def _options(self) -> Method:
        own = OPTIONS.get(self.name, ())
        strange = self.model_fields_set - {"name", *own}
        if strange:
            has = f"has the options {', '.join(own)}" if own else "has no options"
            raise ValueError(f"the method {self.name!r} {has}, here: {', '.join(sorted(strange))}")
        if self.name == "modelopt" and self.algorithm is None:
            raise ValueError(f"the method 'modelopt' needs an `algorithm`: {', '.join(READABLE)}")
        return self

    @property
    def calibrated(self) -> bool:
        """True when it needs activations."""
        return self.name in CALIBRATED

    def __str__(self) -> str:
        return f"{self.name} {self.algorithm}" if self.name == "modelopt" else self.name
