"""The rules of SGLang 0.5.23 for --quantization-param-path, written again as a pydantic schema.

Built from a description of those rules; pydantic's own coercion of texts and numbers is the point of it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Cache(BaseModel):
    dtype: str
    scaling_factor: dict[int, dict[int, float]]


class File(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_type: str | None  # null is a value, but the key has no default
    kv_cache: Cache


def accepted(data: Any, tp: int, num_layers: int, model_type: str) -> bool:
    """True when the server would use these scales on every rank."""
    try:
        file = File.model_validate(data)
    except ValidationError:
        return False
    ranks = file.kv_cache.scaling_factor
    return (
        file.model_type == model_type
        and file.kv_cache.dtype == "float8_e4m3fn"
        and len(ranks) == tp
        and all(len(layers) == num_layers for layers in ranks.values())
        and all(rank in ranks for rank in range(tp))
        and all(layer in ranks[rank] for rank in range(tp) for layer in range(num_layers))
    )
