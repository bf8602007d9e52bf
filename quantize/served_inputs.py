"""What an engine makes of the inputs of a checkpoint's layers: by the configuration, under the scales that are stored.

Layers that an engine fuses, and the experts of a layer, have one scale: the largest number of theirs that is stored,
as engines take it (of compressed-tensors' divisors that is the smallest range).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quantkit.calibrate.observe import Served
from quantkit.export.activations import Activations, activations_of
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.packed import input_scale, input_scale_tensor
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.inputs import served_inputs
from quantkit.quantize.roles import Placed, shared_inputs

_HINT = "--weights-only leaves the quantisation of activations out"


def asked_activations(
    checkpoint: Checkpoint, weights: Mapping[str, Weight], placed: Mapping[str, Placed]
) -> dict[str, Activations]:
    """Weights of decoder layers whose activations the configuration has quantised."""
    asked = activations_of(checkpoint.config, weights)
    return {n: a for n, a in asked.items() if placed[n].layer is not None and not placed[n].role.startswith("mtp.")}


def served_layers(
    asked: Mapping[str, Activations], weights: Mapping[str, Weight], placed: Mapping[str, Placed], reader: Reader
) -> dict[str, Served]:
    """Layer -> what its input becomes.

    Raises QuantkitError for a form that is not computed here, and where a scale that is asked for is not stored.
    """
    sets = shared_inputs(placed)
    scales: dict[str, float] = {}
    for name, a in asked.items():
        if a.element == "other":
            raise QuantkitError(
                "activations are quantised in a form that is not computed here", tensor=weights[name].module,
                value=a.title, allowed="NVFP4; FP8 by tensor, token or 128 inputs of a token", hint=_HINT,
            )  # fmt: skip
        if a.fixed:
            key, scale = sets.get(name, name), _stored(weights[name], reader)
            smaller = min if _divides(weights[name]) else max
            scales[key] = smaller(scales.get(key, scale), scale)
    made: dict[tuple[Activations, float | None], Served] = {}  # one function for layers that see one tensor
    found: dict[str, Served] = {}
    for name, a in asked.items():
        assert a.element != "other"
        shared = scales[sets.get(name, name)] if a.fixed else None
        served = made.setdefault((a, shared), partial(served_inputs, element=a.element, group=a.group, scale=shared))
        weight = weights[name]
        fused = [weight.module] if len(weight.shape) == 2 else [f"{weight.module}.{e}" for e in range(weight.shape[0])]
        found |= dict.fromkeys(fused, served)
    return found


def _divides(weight: Weight) -> bool:
    info = input_scale_tensor(weight)
    return info is not None and info.name.endswith(".input_global_scale")


def _stored(weight: Weight, reader: Reader) -> float:
    scale = input_scale(weight, reader)
    if scale is None or not 0 < scale < float("inf"):
        raise QuantkitError(
            "the configuration asks for an input scale that is not stored, or is no positive number",
            tensor=weight.module, value=scale, allowed="one positive float32", hint=_HINT,
        )  # fmt: skip
    return scale
