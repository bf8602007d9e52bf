"""Run attention on recorded keys and values: an FP8 cache under the stored scales against a BF16 one.

Beside it stands what scale 1.0 would have done, which is what engines use when a scale is missing or has a name they do
not know. Values above 448 times the scale are clipped; values far below it lose their bits.

Letters: T tokens, H KV heads, Q query heads, D values, C values of a latent row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from quantkit.export.checkpoint import Reader, text_config
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight
from quantkit.export.sources.rows import scale_values
from quantkit.kernels.cpu import attention
from quantkit.kernels.cpu.compare import sq_difference
from quantkit.kernels.cpu.convert import f32_to_bf16
from quantkit.kernels.elements import ELEMENTS
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import Batch, new_cache, new_latent_cache
from quantkit.kernels.measure import relative_error
from quantkit.quantize.recorded import sample
from quantkit.quantize.roles import Placed

F32 = NDArray[np.float32]
Format = Literal["bf16", "e4m3"]

PAGE = 16
# Relative error of attention outputs that is always good enough: a mean square of 1.5e-3. Where attention is sharp FP8
# has more, whatever the scale, and chance alone makes two good scales differ by half: there the stored ones may cost
# up to twice what scales cost that were measured on the recorded rows.
BOUND = math.sqrt(1.5e-3)
HEADROOM, SLACK = 1.25, 2.0


@dataclass(frozen=True, slots=True)
class KVRun:
    """One layer: relative errors of attention outputs under the scales of the checkpoint and under 1.0.

    bound    for `error`: from the error under scales that were measured on the recorded rows
    error    infinite when a scale is no positive number
    clipped  share of the recorded keys and values that the scales clip
    """

    layer: int
    k_scale: float
    v_scale: float
    error: float
    error_at_one: float
    bound: float
    clipped: float


def stored_scales(
    weights: Mapping[str, Weight], placed: Mapping[str, Placed], reader: Reader
) -> dict[int, tuple[float, float]]:
    """(k_scale, v_scale) of each layer that stores any; one that is missing is 1.0, as engines take it."""
    found: dict[int, list[float]] = {}
    for name, place in placed.items():
        if place.role.removeprefix("mtp.") == "attention.kv_scale" and place.layer is not None and name in weights:
            info = weights[name].parts["codes"]
            value = float(scale_values(info, reader.read(info))[0])
            found.setdefault(place.layer, [1.0, 1.0])[0 if name.endswith("k_scale") else 1] = value
    return {layer: (k, v) for layer, (k, v) in found.items()}


def kv_runs(
    recorded: Mapping[str, TensorInfo], scales: Mapping[int, tuple[float, float]], config: Mapping[str, Any],
    reader: Reader,
) -> list[KVRun]:  # fmt: skip
    """Every layer with recorded keys and values, or latent rows; layers without a stored scale run at 1.0."""
    layers = sorted({int(m[1]) for n in recorded if (m := re.fullmatch(r"kv\.(\d+)\.(?:k|latent)", n))})
    runs = []
    for layer in layers:
        k_scale, v_scale = scales.get(layer, (1.0, 1.0))
        rows = {n: sample(recorded[f"kv.{layer}.{n}"], reader) for n in "kvq" if f"kv.{layer}.{n}" in recorded}
        if f"kv.{layer}.latent" in recorded:
            rows["latent"] = sample(recorded[f"kv.{layer}.latent"], reader)
        exact = _outputs(layer, rows, config, "bf16", 1.0, 1.0)
        error_at_one = _relative(_outputs(layer, rows, config, "e4m3", 1.0, 1.0), exact)
        error, clipped = math.inf, 1.0
        if usable(k_scale) and usable(v_scale):
            error = _relative(_outputs(layer, rows, config, "e4m3", k_scale, v_scale), exact)
            clipped = _clipped(rows, k_scale, v_scale)
        measured = _relative(_outputs(layer, rows, config, "e4m3", *_measured(rows)), exact)
        bound = max(BOUND, SLACK * measured)
        runs.append(KVRun(layer, k_scale, v_scale, error, error_at_one, bound, clipped))
    return runs


def _measured(rows: Mapping[str, F32]) -> tuple[float, float]:
    """Scales by the largest of the recorded keys and values."""
    k, v = (rows["latent"], rows["latent"]) if "latent" in rows else (rows["k"], rows["v"])
    scales = [HEADROOM * float(np.abs(x).max()) / ELEMENTS["e4m3"].max for x in (k, v)]
    return scales[0] or 1.0, scales[1] or 1.0


def _relative(y: F32, exact: F32) -> float:
    return relative_error(*sq_difference(exact.reshape(1, -1), y.reshape(1, -1))[:2])


def usable(scale: float) -> bool:
    """Whether a scale is a positive normal float32."""
    return math.isfinite(scale) and scale >= float(np.finfo(np.float32).tiny)


def _clipped(rows: Mapping[str, F32], k_scale: float, v_scale: float) -> float:
    largest = ELEMENTS["e4m3"].max
    parts = [(rows[n], s) for n, s in (("k", k_scale), ("v", v_scale), ("latent", k_scale)) if n in rows]
    over = sum(int(np.count_nonzero(np.abs(x) > largest * s)) for x, s in parts)
    return over / max(1, sum(x.size for x, _ in parts))


def _bits(x: F32) -> NDArray[np.uint16]:
    """bfloat16, which is what models cache."""
    flat = np.ascontiguousarray(x.reshape(1, -1))
    out = np.empty(flat.shape, np.uint16)
    f32_to_bf16(flat, out)
    return out.reshape(x.shape)


def _outputs(
    layer: int, rows: Mapping[str, F32], config: Mapping[str, Any], format: Format, k_scale: float, v_scale: float
) -> F32:
    """Causal attention of all recorded tokens over themselves, the rows cached in `format`."""
    if "latent" in rows:
        return _latent_outputs(layer, rows, config, format, k_scale)
    k_THD, v_THD = rows["k"], rows.get("v")
    if k_THD.ndim != 3 or v_THD is None or v_THD.shape[:2] != k_THD.shape[:2]:
        raise _misfit(layer, "k [T, H, D] and v [T, H, D]")
    q_TQD = rows.get("q", _queries(k_THD))
    tokens, heads, width = k_THD.shape
    if q_TQD.ndim != 3 or (len(q_TQD), q_TQD.shape[2]) != (tokens, width) or q_TQD.shape[1] % heads:
        raise _misfit(layer, f"q [{tokens}, a multiple of {heads}, {width}]")
    scaled = {"k_scale": k_scale, "v_scale": v_scale} if format == "e4m3" else {}
    pages = -(-tokens // PAGE)
    cache = new_cache(format, pages, PAGE, heads, width, v_THD.shape[2], **scaled)
    attention.write(cache, np.arange(tokens, dtype=np.int64), _bits(k_THD), _bits(v_THD))
    return attention.attend(np.ascontiguousarray(q_TQD), cache, _batch(tokens), softmax_scale=width**-0.5)


def _latent_outputs(
    layer: int, rows: Mapping[str, F32], config: Mapping[str, Any], format: Format, scale: float
) -> F32:
    latent_TC = rows["latent"]
    text = text_config(config)
    rank = text.get("kv_lora_rank")
    if latent_TC.ndim != 2 or not isinstance(rank, int) or not 0 < rank < latent_TC.shape[1]:
        raise _misfit(layer, f"latent [T, kv_lora_rank {rank} + RoPE values]")
    tokens, width = latent_TC.shape
    cache = new_latent_cache(
        format,
        -(-tokens // PAGE),
        PAGE,
        rank,
        width - rank,
        scale=scale if format == "e4m3" else 1.0,
    )
    bits = _bits(latent_TC)
    slots = np.arange(tokens, dtype=np.int64)
    attention.write_latent(cache, slots, np.ascontiguousarray(bits[:, :rank]), np.ascontiguousarray(bits[:, rank:]))
    q_TQC = np.ascontiguousarray(rows.get("q", _queries(latent_TC[:, None, :])))
    head = int(text.get("qk_nope_head_dim", 128)) + width - rank
    return attention.attend_latent(q_TQC, cache, _batch(tokens), softmax_scale=head**-0.5)


def _queries(k_THD: F32) -> F32:
    """Random queries of the keys' size, where none were recorded."""
    drawn = np.random.default_rng(0).standard_normal(k_THD.shape)
    return (drawn * math.sqrt(np.mean(k_THD**2, dtype=np.float64))).astype(np.float32)


def _batch(tokens: int) -> Batch:
    """One request, all of whose tokens ask."""
    table = np.arange(-(-tokens // PAGE), dtype=np.int32)[None]
    return Batch(np.array([0, tokens], np.int32), table, np.array([tokens], np.int32))


def _misfit(layer: int, allowed: str) -> QuantkitError:
    return QuantkitError("recorded samples of a layer do not fit together", tensor=f"kv.{layer}", allowed=allowed)
