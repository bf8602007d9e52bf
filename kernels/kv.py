"""The paged KV cache of one layer, a batch of requests over it, and the checks that run before any kernel does.

A page holds S consecutive tokens of one request; a block table lists the pages of each request in order, and a slot is
page * S + offset. Numbers lie as bits in arrays that kernels read directly:

    bf16 f16     uint16 [P, S, H, D]
    e4m3 e5m2    uint8 [P, S, H, D]; x ~ stored * scale, one scale for K and one for V (the k_scale of a checkpoint)
    nvfp4        uint8 [P, S, H, D/2], the even value in the low nibble; e4m3 scale per 16 values times the outer scale
    mxfp4        uint8 [P, S, H, D/2]; e8m0 scale per 32 values, nothing above it

Multi-head latent attention (DeepSeek) caches one row a token for all heads: `rank` latent values, which are also V,
then `rope` rotated ones. `dsa` is the 656-byte row of DeepSeek-V3.2: 512 e4m3 codes, 4 float32 scales (powers of two,
one per 128 codes), 64 bf16 values, little endian.

Arrays are numpy arrays or torch tensors. The checks read lengths, block tables and slots (on a GPU that waits for the
device), never the cache itself; every one of them raises QuantkitError.

Shape suffixes: P pages, S slots of a page, H KV heads (queries: heads), D values of a head, R requests, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor

KVFormat = Literal["bf16", "f16", "e4m3", "e5m2", "nvfp4", "mxfp4"]
LatentFormat = Literal["bf16", "e4m3", "dsa"]

_CARRIER = {"bf16": "uint16", "f16": "uint16", "e4m3": "uint8", "e5m2": "uint8", "nvfp4": "uint8", "mxfp4": "uint8"}
_LATENT_CARRIER = {"bf16": "uint16", "e4m3": "uint8", "dsa": "uint8"}
KV_BLOCK = {"nvfp4": 16, "mxfp4": 32}  # values that share a block scale
_SCALED = ("e4m3", "e5m2", "nvfp4")
DSA_RANK, DSA_ROPE, DSA_BLOCK, DSA_ROW = 512, 64, 128, 656


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer; V may have another head width than K.

    k_scale, v_scale              multipliers: FP8 stores cast(clamp(x / scale)), NVFP4 has them above its block scales;
                                  1.0 in the other formats
    k_block_scale, v_block_scale  FP4 only: uint8 [P, S, H, D/16] e4m3 (nvfp4) or [P, S, H, D/32] e8m0 (mxfp4)
    """

    format: KVFormat
    k: Array
    v: Array
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_block_scale: Array | None = None
    v_block_scale: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentCache:
    """Latent rows of one layer: uint16 or uint8 [P, S, rank + rope], or uint8 [P, S, 656] (dsa).

    scale  e4m3 only: one multiplier for the whole row
    """

    format: LatentFormat
    rows: Array
    rank: int = DSA_RANK
    rope: int = DSA_ROPE
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """R requests whose queries lie one after the other.

    The queries of request r are the last query_start[r + 1] - query_start[r] of its lengths[r] cached tokens, and each
    sees the tokens up to itself. Decoding: one query each. A request without queries is allowed and costs nothing.

    query_start  int32 [R + 1]
    block_table  int32 [R, pages of the longest request]: physical page of each logical page; what no query can see is
                 not looked at and may hold anything
    lengths      int32 [R]: tokens in the cache, those of the queries included
    """

    query_start: Array
    block_table: Array
    lengths: Array


def _values(format: str, array: Array) -> int:
    """Values of a head (or row) that `array` holds along its last axis."""
    return int(array.shape[-1]) * (2 if format in KV_BLOCK else 1)


def k_dim(cache: KVCache | LatentCache) -> int:
    """Values of a key, which is also the width of a query."""
    return _values(cache.format, cache.k) if isinstance(cache, KVCache) else cache.rank + cache.rope


def v_dim(cache: KVCache | LatentCache) -> int:
    """Values of a value vector, which is also the width of an output."""
    return _values(cache.format, cache.v) if isinstance(cache, KVCache) else cache.rank


def pages_and_slots(cache: KVCache | LatentCache) -> tuple[int, int]:
    """Pages of the cache, and token slots of a page."""
    array = cache.k if isinstance(cache, KVCache) else cache.rows
    return int(array.shape[0]), int(array.shape[1])


def token_bytes(cache: KVCache | LatentCache) -> int:
    """Bytes of one token slot, block scales included."""
    pages, slots = pages_and_slots(cache)
    parts = [cache.rows] if isinstance(cache, LatentCache) else [cache.k, cache.v]
    if isinstance(cache, KVCache):
        parts += [s for s in (cache.k_block_scale, cache.v_block_scale) if s is not None]
    return sum(int(p.nbytes) for p in parts) // max(pages * slots, 1)


def new_cache(
    format: KVFormat, pages: int, slots: int, heads: int, k_dim: int, v_dim: int | None = None,
    *, k_scale: float = 1.0, v_scale: float = 1.0,
) -> KVCache:  # fmt: skip
    """A zeroed numpy cache; `v_dim` is `k_dim` unless given."""
    if format not in _CARRIER:
        raise QuantkitError("unknown format of a KV cache", value=format, allowed=", ".join(_CARRIER))
    shape, block = (pages, slots, heads), KV_BLOCK.get(format)
    widths = (k_dim, k_dim if v_dim is None else v_dim)
    codes = [np.zeros((*shape, w // 2 if block else w), _CARRIER[format]) for w in widths]
    scales = [np.zeros((*shape, w // block), np.uint8) if block else None for w in widths]
    cache = KVCache(format, codes[0], codes[1], k_scale, v_scale, scales[0], scales[1])
    check_cache(cache)
    return cache


def new_latent_cache(
    format: LatentFormat, pages: int, slots: int, rank: int = DSA_RANK, rope: int = DSA_ROPE, *, scale: float = 1.0
) -> LatentCache:
    """A zeroed numpy cache of latent rows."""
    if format not in _LATENT_CARRIER:
        raise QuantkitError("unknown format of a latent cache", value=format, allowed=", ".join(_LATENT_CARRIER))
    width = DSA_ROW if format == "dsa" else rank + rope
    cache = LatentCache(format, np.zeros((pages, slots, width), _LATENT_CARRIER[format]), rank, rope, scale)
    check_cache(cache)
    return cache


def device_of(array: Array) -> str:
    """`numpy`, or the device of a torch tensor."""
    return "numpy" if isinstance(array, np.ndarray) else f"torch {array.device}"


def check_array(what: str, array: Array, dtypes: tuple[str, ...], shape: tuple[int | str, ...], like: Array) -> None:
    """Raise unless `array` is contiguous, lies where `like` does, and has a dtype and shape (a letter: any size)."""
    if not hasattr(array, "shape") or device_of(array) != device_of(like):
        place = device_of(array) if hasattr(array, "shape") else type(array).__name__
        raise QuantkitError(f"{what} must lie where the cache does", value=place, allowed=device_of(like))
    if str(array.dtype).removeprefix("torch.") not in dtypes:
        raise QuantkitError(f"{what} has the wrong dtype", value=str(array.dtype), allowed=" or ".join(dtypes))
    sizes = tuple(int(n) for n in array.shape)
    if len(sizes) != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, sizes, strict=True)):
        raise QuantkitError(f"{what} has the wrong shape", value=list(sizes), allowed=f"[{', '.join(map(str, shape))}]")
    flat = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if not flat:
        strides = array.strides if isinstance(array, np.ndarray) else array.stride()
        raise QuantkitError(f"{what} must be contiguous", value=f"strides {tuple(strides)}")


def _check_scale(what: str, scale: float, used: bool, format: str) -> None:
    if not used and scale != 1.0:
        raise QuantkitError(f"a {format} cache has no {what}", value=scale, allowed=1.0)
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(scale)  # as a checkpoint stores it
    if not (np.isfinite(stored) and stored >= np.finfo(np.float32).tiny):
        raise QuantkitError(f"{what} of the cache is not usable", value=scale, allowed="a positive normal float32")


def _check_part(cache: KVCache, name: str, codes: Array, block_scale: Array | None) -> None:
    """K or V of a cache: dtype and layout; whole blocks, with scales just where the format has them."""
    block = KV_BLOCK.get(cache.format)
    check_array(f"{name} of the cache", codes, (_CARRIER[cache.format],), (*cache.k.shape[:3], "D"), cache.k)
    width = _values(cache.format, codes)
    if width == 0 or (block and width % block):
        unit = f"a multiple of {block}" if block else "at least 1"
        raise QuantkitError(f"{name} of a {cache.format} cache has no such width", value=width, allowed=unit)
    if (block_scale is None) != (block is None):
        raise QuantkitError(f"a {cache.format} cache {'needs' if block else 'has no'} block scales", tensor=name)
    if block and block_scale is not None:
        shape = (*(int(n) for n in cache.k.shape[:3]), width // block)
        check_array(f"block scale of {name}", block_scale, ("uint8",), shape, cache.k)


def check_cache(cache: KVCache | LatentCache) -> None:
    """Raise unless arrays, widths and scales are what the format asks for."""
    table: dict[str, str] = _CARRIER if isinstance(cache, KVCache) else _LATENT_CARRIER
    if cache.format not in table:
        raise QuantkitError("unknown format of a cache", value=cache.format, allowed=", ".join(table))
    if isinstance(cache, KVCache):
        check_array("k of the cache", cache.k, (_CARRIER[cache.format],), ("P", "S", "H", "D"), cache.k)
        _check_part(cache, "k", cache.k, cache.k_block_scale)
        _check_part(cache, "v", cache.v, cache.v_block_scale)
        _check_scale("k_scale", cache.k_scale, cache.format in _SCALED, cache.format)
        _check_scale("v_scale", cache.v_scale, cache.format in _SCALED, cache.format)
    else:
        if cache.rank < 1 or cache.rope < 0:
            raise QuantkitError("a latent row has no such widths", value=[cache.rank, cache.rope], allowed="rank >= 1")
        if cache.format == "dsa" and (cache.rank, cache.rope) != (DSA_RANK, DSA_ROPE):
            raise QuantkitError("a dsa row has other widths", value=[cache.rank, cache.rope], allowed=[512, 64])
        width = DSA_ROW if cache.format == "dsa" else cache.rank + cache.rope
        check_array("rows of the cache", cache.rows, (table[cache.format],), ("P", "S", width), cache.rows)
        _check_scale("scale", cache.scale, cache.format == "e4m3", cache.format)
    first = cache.k if isinstance(cache, KVCache) else cache.rows
    if 0 in first.shape:
        raise QuantkitError("a cache needs pages, slots and heads", value=list(first.shape))
