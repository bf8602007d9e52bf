"""`kv_cache_scales.tp{N}.json`: FP8 KV scales as SGLang reads them with --quantization-param-path.

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
     "scaling_factor": {"0": {"0": 0.02, "1": 0.03}, "1": {...}}}}         by rank of tensor parallelism, then by layer

One number serves keys and values: the larger of the two. SGLang 0.5.23 checks the file with a pydantic schema; when any
rule of it is broken it logs the error, runs with every scale at 1.0, and then logs that the scales were loaded. So the
check here is as strict as that schema, and stricter: a scale that is not a positive number passes there.

The same value on every rank is the default: a cache can then move between servers cut in different ways. With scales
of each head, a rank gets the largest of its own heads.

Letters: H KV heads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.kernels.errors import QuantkitError

DTYPE = "float8_e4m3fn"
DEFAULT_TP = (1, 2, 4, 8, 16)

Scales = Mapping[int, tuple[float, float]]
HeadScales = Mapping[int, tuple[Sequence[float], Sequence[float]]]

# config.json model types whose SGLang class reads the file; others stop the server (RuntimeError)
_READERS = frozenset({
    "llama", "mistral", "phi3", "internlm3", "qwen2", "qwen3", "mimo", "mimo_v2", "glm4", "glm5_next", "opt", "solar",
    "arcee", "apertus", "exaone4",
})  # fmt: skip
# whole numbers and numbers as pydantic takes them from a string
_WHOLE = re.compile(r"[+-]?\d+(?:\.0+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)


def file_name(tp: int) -> str:
    """The file for `tp` ranks."""
    return f"kv_cache_scales.tp{tp}.json"


def rank_heads(heads: int, tp: int, rank: int) -> range:
    """The KV heads that a rank holds: its share, or with more ranks than heads the one it shares with its neighbours.

    Raises QuantkitError when neither number divides the other: no engine cuts such a model.
    """
    if heads % tp and tp % heads:
        raise QuantkitError(
            "KV heads and ranks of tensor parallelism do not divide", value=f"{heads} heads, {tp} ranks",
            allowed="ranks that divide the heads, or the other way round",
        )  # fmt: skip
    if tp > heads:
        head = rank // (tp // heads)
        return range(head, head + 1)
    share = heads // tp
    return range(rank * share, (rank + 1) * share)


def scales_json(
    model_type: str, num_layers: int, scales: Scales, tp: int, *, per_rank: HeadScales | None = None
) -> dict[str, Any]:
    """The content of the file for `tp` ranks; numbers are written so that the float32 comes back.

    scales    (k_scale, v_scale) of each layer; layers from `num_layers` up (MTP) are left out
    per_rank  scales (k_H, v_H) of each head: then a rank has the largest among its heads, and `scales` is not used

    Raises QuantkitError when a layer is missing, a scale is no positive number, or heads and ranks do not divide.
    """
    given: Mapping[int, Any] = scales if per_rank is None else per_rank
    missing = [layer for layer in range(num_layers) if layer not in given]
    if missing or tp < 1 or num_layers < 1:
        raise QuantkitError(
            "SGLang's file of KV scales needs every layer", value=f"no scale of layer {_some(missing)}, {tp} ranks",
            allowed=f"layers 0 to {num_layers - 1}, 1 rank or more",
            hint="a model whose layers do not all have attention cannot use this file",
        )  # fmt: skip
    by_rank = {
        str(rank): {str(layer): _on_rank(given[layer], tp, rank) for layer in range(num_layers)} for rank in range(tp)
    }
    data = {"model_type": model_type, "kv_cache": {"dtype": DTYPE, "scaling_factor": by_rank}}
    wrong = check_scales_json(data, tp=tp, num_layers=num_layers, model_type=model_type)
    if wrong:
        raise QuantkitError("these KV scales cannot be written for SGLang", value="; ".join(wrong[:5]))
    return data


def _on_rank(given: tuple[Any, Any], tp: int, rank: int) -> float:
    """The larger of the scales of keys and values, of a layer or of the heads that a rank holds."""
    k, v = given
    if not isinstance(k, Sequence):
        return _larger([float(k), float(v)])
    if not k or len(k) != len(v):
        raise QuantkitError("scales per head are one for each KV head", value=f"{len(k)} of keys, {len(v)} of values")
    return _larger([float(x) for h in rank_heads(len(k), tp, rank) for x in (k[h], v[h])])


def _larger(values: Sequence[float]) -> float:
    """The largest; NaN when one is NaN, for the check to find."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def write_scales_json(folder: Path, data: Mapping[str, Any], tp: int) -> Path:
    """Write the file into `folder` (equal data give equal bytes) and return its path."""
    path = folder / file_name(tp)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def check_file(path: Path, *, tp: int, num_layers: int, model_type: str) -> list[str]:
    """Why SGLang would not take this file (`check_scales_json`), or that it is missing or no JSON; empty: it does."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        return [f"the file cannot be read: {e.strerror}"]
    except ValueError as e:
        return [f"not JSON: {e}"]
    return check_scales_json(data, tp=tp, num_layers=num_layers, model_type=model_type)


def check_scales_json(data: Any, *, tp: int, num_layers: int, model_type: str) -> list[str]:
    """Why SGLang would not take this content on some of `tp` ranks, every reason; empty when it is accepted.

    As in the schema, whole numbers and numbers may be strings, and keys it does not know are ignored.
    """
    if not isinstance(data, Mapping):
        return [f"the file holds {_kind(data)}, not an object"]
    wrong: list[str] = []
    if "model_type" not in data:
        wrong.append(f'model_type: missing, it must be "{model_type}"')
    elif data["model_type"] != model_type:
        wrong.append(f'model_type: {json.dumps(data["model_type"], default=str)}, must be "{model_type}"')
    cache = data.get("kv_cache")
    if not isinstance(cache, Mapping):
        return [*wrong, f"kv_cache: {_kind(cache) if 'kv_cache' in data else 'missing'}, must be an object"]
    if cache.get("dtype") != DTYPE:
        found = json.dumps(cache["dtype"], default=str) if "dtype" in cache else "missing"
        wrong.append(f'kv_cache.dtype: {found}, must be "{DTYPE}"')
    factors = cache.get("scaling_factor")
    if not isinstance(factors, Mapping):
        found = _kind(factors) if "scaling_factor" in cache else "missing"
        return [*wrong, f"kv_cache.scaling_factor: {found}, must be an object by rank, then by layer"]
    return [*wrong, *_check_ranks(factors, tp, num_layers)]


def _check_ranks(factors: Mapping[Any, Any], tp: int, num_layers: int) -> list[str]:
    wrong: list[str] = []
    ranks: dict[int, Any] = {}
    for key, layers in factors.items():
        rank = _whole(key)
        if rank is None:
            wrong.append(f"scaling_factor: {key!r} is no rank, a whole number")
        elif rank in ranks:
            wrong.append(f"scaling_factor: rank {rank} is there twice")
        else:
            ranks[rank] = layers
    if sorted(ranks) != list(range(tp)):
        wrong.append(f"scaling_factor: ranks {_some(sorted(ranks))}, must be 0 to {tp - 1} and no others")
    for rank, layers in ranks.items():
        where = f"scaling_factor of rank {rank}"
        if isinstance(layers, Mapping):
            wrong += _check_layers(layers, where, num_layers)
        else:
            wrong.append(f"{where}: {_kind(layers)}, must be an object by layer")
    return wrong


def _check_layers(layers: Mapping[Any, Any], where: str, num_layers: int) -> list[str]:
    wrong: list[str] = []
    found: dict[int, float] = {}
    for key, value in layers.items():
        layer, scale = _whole(key), _float(value)
        if layer is None:
            wrong.append(f"{where}: {key!r} is no layer, a whole number")
        elif scale is None:
            wrong.append(f"{where}, layer {layer}: {_kind(value)}, must be one number for keys and values")
        elif not (math.isfinite(scale) and scale > 0):
            wrong.append(f"{where}, layer {layer}: {scale}, must be a positive number")
        if layer in found:
            wrong.append(f"{where}: layer {layer} is there twice")
        if layer is not None:
            found[layer] = 0.0 if scale is None else scale
    if len(found) != num_layers or any(layer not in found for layer in range(num_layers)):
        wrong.append(f"{where}: {len(found)} layers, must be 0 to {num_layers - 1} and no others")
    return wrong


def _whole(key: Any) -> int | None:
    """A key as a whole number; JSON has strings only, Python may have numbers. Odd forms ("1_0", "0-1") are none."""
    if isinstance(key, str):
        text = key.strip()
        return int(text.split(".")[0]) if len(text) <= 100 and _WHOLE.fullmatch(text) else None
    return key if isinstance(key, int) else None


def _float(value: Any) -> float | None:
    """A value as a number: none of a list, null or a text that is no number."""
    if isinstance(value, str):
        text = _plain(value)
        return float(text) if _NUMBER.fullmatch(text) else None
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _plain(text: str) -> str:
    """A number without spaces around it, and without single underscores inside it, which pydantic allows."""
    text = text.strip()
    return text if text.startswith("_") or text.endswith("_") or "__" in text else text.replace("_", "")


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) or "none"
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")


def sglang_notes(model_type: str, *, kv_scheme: bool) -> list[str]:
    """What keeps SGLang 0.5.23 from using the file for this model, in sentences.

    kv_scheme  the checkpoint's configuration switches FP8 KV on (kv_cache_scheme or kv_cache_quant_algo)
    """
    notes = []
    if model_type not in _READERS:
        notes.append(
            f"SGLang's class for {model_type} has no load_kv_cache_scales: the server stops when given the file"
        )
    if kv_scheme:
        notes.append(
            "the checkpoint carries FP8 KV scales of its own: SGLang 0.5.23 stops when given the file as well "
            "(TypeError: cannot assign 'float' as parameter)"
        )
    else:
        notes.append(
            "SGLang 0.5.23 applies the file's scales on both sides of attention only with --attention-backend "
            "trtllm_mha: flashinfer reads unscaled, fa3 and triton stop"
        )
    notes.append("the file is used only with --kv-cache-dtype fp8_e4m3, not with auto")
    return notes
