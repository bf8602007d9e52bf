"""Scales of weights and activations: E4M3 stored as numbers, and global scales that fused layers do not share.

Engines take the largest of the global scales of a fused layer and leave the block scales as they are: the weights of
the other shards grow. Here the largest becomes the scale of all, and the block scales are rounded anew:

    g' = max g_i        s_i' = e4m3(s_i g_i / g')        (compressed-tensors stores 1 / g)

What that costs is known exactly: sum (s - s')^2 c^2 over the codes c of each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader
from quantkit.export.repair.draft import NEEDS_SOURCE, Change, Draft
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.packed import input_scale_tensor
from quantkit.kernels.elements import E2M1_VALUES, E4M3_VALUES, encode_e4m3
from quantkit.kernels.errors import QuantkitError

U8 = NDArray[np.uint8]
LARGEST = 0x7E  # 448
CHUNK = 4 << 20
_SQUARES = E2M1_VALUES.astype(np.float64) ** 2
_OF_BYTE = _SQUARES[np.arange(256) & 15] + _SQUARES[np.arange(256) >> 4]  # both codes of a byte


def mend_uint8(draft: Draft, reader: Reader) -> None:
    """Give E4M3 block scales that are stored as U8 their dtype back, where the bytes can be nothing else.

    The bytes may be E4M3 codes, or scales that were cast to whole numbers, which lost them. The largest block scale of
    NVFP4 is 448, code 126: when that is the largest byte of all such tensors, they are codes. Else it is refused.
    """
    stored = [
        t for n, t in draft.tensors.items() if n.endswith(".weight_scale") and t.dtype == "U8" and _is_nvfp4(draft, t)
    ]
    if not stored:
        return
    largest = [int(reader.read(t).max(initial=0)) for t in stored]
    if max(largest) != LARGEST:
        first = stored[int(np.argmax(largest))]
        raise QuantkitError(
            "block scales of NVFP4 are stored as uint8, and their values do not say whether they are E4M3 codes",
            file=first.file, tensor=first.name, value=f"largest byte {max(largest)}", allowed=f"{LARGEST}, for 448",
            hint=NEEDS_SOURCE,
        )  # fmt: skip
    for t in stored:
        draft.tensors[t.name] = TensorInfo(t.name, "F8_E4M3", t.shape, t.file, t.start, t.nbytes)
    draft.changes.append(Change(f"{len(stored)} tensors of block scales: uint8 is E4M3 again, {stored[0].name} first"))


def _is_nvfp4(draft: Draft, scale: TensorInfo) -> bool:
    module = scale.name.removesuffix(".weight_scale")
    codes = draft.tensors.get(f"{module}.weight_packed") or draft.tensors.get(f"{module}.weight")
    has_global = f"{module}.weight_global_scale" in draft.tensors or f"{module}.weight_scale_2" in draft.tensors
    if codes is None or codes.dtype != "U8" or len(codes.shape) != 2 or not has_global:
        return False
    return scale.shape == (codes.shape[0], codes.shape[1] // 8)


def mend_globals(draft: Draft, weights: Mapping[str, Weight], fused: Mapping[str, str], reader: Reader) -> None:
    """One global scale for each fused set of NVFP4 weights."""
    sets: dict[str, list[Weight]] = {}
    for name, key in fused.items():
        if weights[name].encoding == "nvfp4":
            sets.setdefault(key, []).append(weights[name])
    changed = 0
    sq_err = sq_norm = 0.0
    for members in sets.values():
        kinds = {"divisor" if "divisor" in w.parts else "multiplier" for w in members}
        if len(kinds) != 1:
            raise QuantkitError("fused layers in two dialects of NVFP4", tensor=members[0].name, hint=NEEDS_SOURCE)
        kind = kinds.pop()
        stored = [draft.number(w.parts[kind].name, reader) for w in members]
        if len(set(stored)) == 1:
            continue
        changed += 1
        shared = min(stored) if kind == "divisor" else max(stored)
        for weight, own in zip(members, stored, strict=True):
            factor = shared / own if kind == "divisor" else own / shared
            err, norm = _cost(weight, factor, reader)
            unit = 1 / own if kind == "divisor" else own  # its own global scale
            sq_err, sq_norm = sq_err + err * unit**2, sq_norm + norm * unit**2
            draft.set_number(weight.parts[kind].name, shared, weight.parts[kind])
            if factor != 1:
                draft.factors[weight.parts["scale"].name] = factor
    if changed:
        error = math.sqrt(sq_err / sq_norm) if sq_norm else 0.0
        draft.changes.append(
            Change(f"{changed} fused sets share one global scale; their block scales are rounded anew", error)
        )


def rescaled(codes: U8, factor: float) -> U8:
    """E4M3 block scales times a factor of at most 1, rounded to nearest even; one that is not zero stays so."""
    values = E4M3_VALUES[codes].astype(np.float64) * factor
    out = encode_e4m3(values.astype(np.float32))
    return np.where((out == 0) & (codes != 0), np.uint8(1), out).astype(np.uint8)


def _cost(weight: Weight, factor: float, reader: Reader) -> tuple[float, float]:
    """Sum of (s c - s' c / factor)^2 and of (s c)^2, a block of rows at a time; s' is under the new global scale."""
    codes, scale = weight.parts["codes"], weight.parts["scale"]
    width, groups = codes.shape[1], scale.shape[1]
    rows = max(1, CHUNK // width)
    err = norm = 0.0
    for first in range(0, codes.shape[0], rows):
        n = min(rows, codes.shape[0] - first)
        c = np.empty((n, width), np.uint8)
        s = np.empty((n, groups), np.uint8)
        reader.read_into(codes, first * width, c)
        reader.read_into(scale, first * groups, s)
        energy = _OF_BYTE[c].reshape(n, groups, 8).sum(2)
        before = E4M3_VALUES[s].astype(np.float64)
        after = E4M3_VALUES[rescaled(s, factor)] / np.float64(factor)
        err += float(((before - after) ** 2 * energy).sum())
        norm += float((before**2 * energy).sum())
    return err, norm


def mend_inputs(draft: Draft, weights: Mapping[str, Weight], shared: Mapping[str, str], reader: Reader) -> None:
    """One scale of activations for each set that has one input: the widest range, so that nothing is clipped."""
    sets: dict[str, list[TensorInfo]] = {}
    for name, key in shared.items():
        info = input_scale_tensor(weights[name]) if name in weights else None
        if info is not None:
            sets.setdefault(key, []).append(info)
    changed = 0
    for infos in sets.values():
        divisors = {t.name.endswith(".input_global_scale") for t in infos}
        values = [draft.number(t.name, reader) for t in infos]
        if len(set(values)) == 1 or len(divisors) != 1:
            continue
        changed += 1
        widest = min(values) if divisors.pop() else max(values)
        for info in infos:
            draft.set_number(info.name, widest, info)
    if changed:
        draft.changes.append(
            Change(f"{changed} sets of layers with one input share its scale: the widest range among them")
        )
