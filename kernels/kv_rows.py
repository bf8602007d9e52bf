"""Rows of a KV cache to bits and back, in plain torch: the readable definition that the fast twins are tested against.

    bf16 f16   rounded to nearest, ties to even
    e4m3 e5m2  cast(clamp(x / scale)): a value beyond 448 or 57344, infinity too, becomes that; NaN stays NaN. Without
               the clamp an E4M3 cast would turn large values into NaN
    nvfp4      block scale e4m3(clamp(amax / (6 scale), 2^-9, 448)), codes e2m1(x / (block scale * scale)); a block of
               zeros has scale 1.0
    mxfp4      block scale 2^(exponent of amax - 2) after rounding a mantissa of 1.75 and more up; 1.0 for zeros
    dsa        per 128 values 2^ceil(log2(max(amax / 448, 1e-4))), the rule of vLLM's cache writer; codes as e4m3

FP4 has no NaN, so a block with one gets a scale that is NaN, and all of it reads as NaN. NaN has no part in a dsa
scale: it stays alone. Divisions are float32 divisions; by a Python number they would be multiplications on a GPU.

Shape suffixes: the last axis is D values, or B bytes of codes, or G blocks; `...` is whatever rows there are.
"""

from __future__ import annotations

import torch
from quantkit.kernels.kv import DSA_BLOCK, DSA_RANK, KV_BLOCK
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16}
_FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0, 0x7F), "e5m2": (torch.float8_e5m2, 57344.0, 0x7E)}


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=x.device)


def _encode_fp8(x: Tensor, format: str) -> Tensor:
    dtype, largest, nan = _FP8[format]
    codes = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    sign = (x.view(torch.int32) >> 24 & 0x80).to(torch.uint8)
    return torch.where(x.isnan(), sign | nan, codes)  # the payload of a NaN differs from one library to the next


def _encode_e2m1(x: Tensor) -> Tensor:
    """Codes of the nearest values, ties to the even one; bytes of two, the even value low."""
    a = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for up_from, tie_goes_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += (a >= up_from) if tie_goes_up else (a > up_from)
    code += a > 5.0
    code |= (x < 0).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def _decode_e2m1(codes: Tensor) -> Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device)
    return table[nibbles]


def _power(code: Tensor) -> Tensor:
    """2^(code - 127), NaN for 255."""
    bits = torch.where(code == 0, 1 << 22, code.int() << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def _block_scale(amax: Tensor, format: str, scale: float) -> tuple[Tensor, Tensor]:
    """Code and float32 value of the scale of each block."""
    if format == "nvfp4":
        outer = _like(amax, scale)
        wanted = torch.where(amax == 0, 1.0, (amax / (6 * outer)).clamp(2.0**-9, 448.0))
        code = _encode_fp8(wanted, "e4m3")
        return code, code.view(torch.float8_e4m3fn).float() * outer
    exponent = (amax.view(torch.int32) + (1 << 21)) >> 23
    code = torch.where(amax == 0, 127, (exponent - 2).clamp(min=0))
    code = torch.where(amax.isnan(), 255, code).to(torch.uint8)
    return code, _power(code)


def encode_rows(x: Tensor, format: str, scale: float) -> tuple[Tensor, Tensor | None]:
    """float32 [..., D] to codes as `KVCache` stores them, and the codes of the block scales of FP4."""
    if format in _FLOATS:
        return x.to(_FLOATS[format]).view(torch.uint16), None
    if format in _FP8:
        return _encode_fp8(x / _like(x, scale), format), None
    blocks = x.reshape(*x.shape[:-1], -1, KV_BLOCK[format])
    code, value = _block_scale(blocks.abs().amax(-1), format, scale)
    return _encode_e2m1((blocks / value[..., None]).flatten(-2)), code


def decode_rows(codes: Tensor, format: str, scale: float, block_scale: Tensor | None) -> Tensor:
    """float32 [..., D] that stored rows stand for."""
    if format in _FLOATS:
        return codes.view(_FLOATS[format]).float()
    if format in _FP8:
        return codes.view(_FP8[format][0]).float() * _like(codes, scale)
    assert block_scale is not None
    if format == "nvfp4":
        value = block_scale.view(torch.float8_e4m3fn).float() * _like(codes, scale)
    else:
        value = _power(block_scale)
    return _decode_e2m1(codes) * value.repeat_interleave(KV_BLOCK[format], -1)


def encode_latent(latent: Tensor, rope: Tensor, format: str, scale: float) -> Tensor:
    """float32 latent [..., rank] and rope [..., D] to rows as `LatentCache` stores them."""
    if format != "dsa":
        return encode_rows(torch.cat([latent, rope], -1), format, scale)[0]
    blocks = latent.reshape(*latent.shape[:-1], -1, DSA_BLOCK)
    amax = blocks.abs().nan_to_num(0.0).amax(-1)  # nan_to_num: infinity becomes the largest float32
    least = torch.maximum(amax / _like(amax, 448.0), _like(amax, 1e-4))
    power = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # the next power of two
    codes = _encode_fp8((blocks / power[..., None]).flatten(-2), "e4m3")
    rope_bits = rope.to(torch.bfloat16).contiguous()
    return torch.cat([codes, power.view(torch.uint8), rope_bits.view(torch.uint8)], -1)


def decode_latent(rows: Tensor, format: str, scale: float) -> Tensor:
    """float32 [..., rank + rope] that stored latent rows stand for."""
    if format != "dsa":
        return decode_rows(rows, format, scale, None)
    scales_end = DSA_RANK + 4 * DSA_RANK // DSA_BLOCK
    codes, scales, rope = rows[..., :DSA_RANK], rows[..., DSA_RANK:scales_end], rows[..., scales_end:]
    values = codes.contiguous().view(torch.float8_e4m3fn).float()
    power = scales.contiguous().view(torch.float32).repeat_interleave(DSA_BLOCK, -1)
    return torch.cat([values * power, rope.contiguous().view(torch.bfloat16).float()], -1)
