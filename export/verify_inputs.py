"""Checks of the stored scales of activations: there where the configuration asks for one, sound, and shared.

An engine that finds none takes whatever is in memory, and one that finds several for a fused layer takes the largest of
what it reads: of compressed-tensors' divisors that is the smallest range, and activations are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from quantkit.export.activations import activations_of
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.packed import input_scale, input_scale_tensor
from quantkit.export.sources.rows import scale_values
from quantkit.export.verify import Check


def check_input_scales(
    checkpoint: Checkpoint, weights: Mapping[str, Weight], shared: Mapping[str, str], reader: Reader,
    measured: Mapping[str, float],
) -> list[Check]:  # fmt: skip
    """No check for a checkpoint without such scales.

    shared    weight -> key of the set that an engine keeps one scale for: fused layers, experts of a layer
    measured  layer -> scale, of the calibration run that the checkpoint comes from; empty when that is not known
    """
    asked = {name for name, a in activations_of(checkpoint.config, weights).items() if a.fixed}
    failures: list[str] = []
    values: dict[str, float] = {}
    for name, weight in weights.items():
        info = input_scale_tensor(weight)
        if info is None:
            if name in asked:
                failures.append(f"{weight.module}: the configuration asks for an input scale, none is stored")
            continue
        if name not in asked:
            failures.append(f"{info.name}: the configuration does not ask for an input scale")
        found = scale_values(info, reader.read(info))
        if info.dtype != "F32" or found.size != 1 or not (np.isfinite(found) & (found > 0)).all():
            failures.append(f"{info.name}: {info.dtype} {list(info.shape)}, not one positive float32 number")
            continue
        values[name] = float(found[0])
        wanted, own = measured.get(weight.module), input_scale(weight, reader)
        if wanted is not None and own is not None and not abs(own - wanted) <= 1e-6 * wanted:
            failures.append(f"{info.name}: {own:.6g}, the calibration run measured {wanted:.6g}")
    sets: dict[str, set[float]] = {}
    for name in values.keys() & shared.keys():
        sets.setdefault(shared[name], set()).add(values[name])
    failures += [f"{key}: several input scales: {sorted(v)}" for key, v in sorted(sets.items()) if len(v) > 1]
    if not values and not failures:
        return []
    where = f"{len(values)} layers" + (f", {len(measured)} measured by the run" if measured else "")
    return [Check("activations have a sound scale, one for a fused set and for the experts", where, tuple(failures))]
