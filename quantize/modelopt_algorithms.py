"""ModelOpt's calibration algorithms as data: which of them end in plain codes and scales, and why the others do not.

Nothing of ModelOpt is imported here: recipes and plans are read without it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import QuantScheme

PACKAGE = "nvidia-modelopt"

# algorithm: kinds of schemes (`_kind`) whose result can be read back
READABLE: dict[str, tuple[str, ...]] = {
    "max": ("int4", "int4-channel", "nvfp4", "fp8"),
    "mse": ("int4", "int4-channel", "nvfp4", "fp8"),
    "local_hessian": ("int4", "nvfp4"),  # its Hessian is that of a group of inputs
    "awq_clip": ("int4", "nvfp4"),  # it passes over weights without groups
    "gptq": ("int4", "int4-channel", "nvfp4", "fp8"),
}
WITHOUT_INPUTS = ("max", "mse")  # they look at weights only

_FOLD = "it scales inputs, which has to be folded into the layer before: `method: awq` does that"
REFUSED: dict[str, str] = {
    "awq_lite": _FOLD,
    "awq_full": _FOLD,
    "smoothquant": _FOLD,
    "svdquant": "no format has a place for its low-rank factors",
    "lsq": "it is a start for training, and has two scales for one weight",
    "nvfp4_act_headroom": "it is a rule for the scales of activations; weights are those of `max`",
}


def check_algorithm(name: str) -> str:
    """The name itself; ValueError for one that is unknown, or whose result cannot be written, with the reason."""
    if name in REFUSED:
        raise ValueError(f"ModelOpt's {name} is not offered: {REFUSED[name]}; allowed: {', '.join(READABLE)}")
    if name not in READABLE:
        raise ValueError(f"unknown algorithm {name!r} of ModelOpt; allowed: {', '.join(READABLE)}")
    return name


def algorithms_for(scheme: QuantScheme) -> tuple[str, ...]:
    """The algorithms whose result can be written in a scheme; none where ModelOpt has no such weights."""
    return tuple(name for name, kinds in READABLE.items() if _kind(scheme) in kinds)


def modelopt_version() -> str:
    """The version that is installed; raises QuantkitError when none is."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise QuantkitError(
            "the recipe asks for an algorithm of ModelOpt, which is not installed", value=PACKAGE,
            hint="pip install 'quantkit[modelopt]'",
        ) from None  # fmt: skip


def _kind(scheme: QuantScheme) -> str:
    """`-` for zero points and for powers of two as scales: ModelOpt chooses neither by calibration."""
    if not scheme.symmetric or scheme.scale == "e8m0" or scheme.element == "float":
        return "-"
    if scheme.element == "int4":
        return "int4-channel" if scheme.granularity == "channel" else "int4"
    return "nvfp4" if scheme.has_global else "fp8"
