"""What a quantised checkpoint means: every tensor of a folder as float32, computed the slow and obvious way.

Reads what quantkit exports, from the files alone: compressed-tensors INT4, NVFP4, MXFP4 and FP8, ModelOpt NVFP4 and FP8,
and FP8 blocks with `weight_scale_inv`. The meaning of each format follows the engines that load it:

    INT4     (code - zero) * scale          eight codes in an int32, the lowest nibble first; zeros, where they are stored
                                            (8 otherwise), packed the same way along the outputs
    NVFP4    e2m1 * scale / global          compressed-tensors: the global is a divisor
    NVFP4    e2m1 * scale * global          ModelOpt: `weight_scale_2` is a multiplier
    MXFP4    e2m1 * 2^(byte - 127)          gpt-oss: `<name>_blocks` [E, O, I/32, 16] and `<name>_scales`, kept as [E, I, O]
    FP8      e4m3 * scale                   one scale for the tensor, a row, or a block of the size that config.json names

The products are formed in float64, where all but the NVFP4 quotient are exact, and rounded once. O outputs, I inputs,
G groups. Shares no code with the product.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
PARTS = (
    "weight_packed", "weight_zero_point", "weight", "weight_scale", "weight_scale_inv", "weight_scale_2",
    "weight_global_scale",
)  # fmt: skip
UNUSED = ("weight_shape", "input_scale", "input_global_scale")  # what the codes do not need


def dequantize(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint `folder` in float32, quantised ones under the name `<module>.weight`.

    Raises ValueError on parts that make no known format together, and when a stored `weight_shape` disagrees.
    """
    stored = read(folder)
    modules: dict[str, dict[str, Tensor]] = {}
    out = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if name.endswith("_blocks"):
            exponent = torch.exp2(stored[name.replace("_blocks", "_scales")].double() - 127)
            values_EOGg = E2M1[nibbles(tensor, 2)] * exponent[..., None]
            out[name.removesuffix("_blocks")] = values_EOGg.flatten(-2).transpose(1, 2).float()
        elif name.endswith("_scales"):
            continue
        elif part in (*PARTS, *UNUSED):
            modules.setdefault(module, {})[part] = tensor
        else:
            out[name] = tensor.float()
    block = block_size(folder)
    for module, parts in modules.items():
        w_OI = weight(module, parts, block)
        shape = parts.get("weight_shape")
        if shape is not None and shape.tolist() != list(w_OI.shape):
            raise ValueError(f"{module}: weight_shape {shape.tolist()}, decoded {list(w_OI.shape)}")
        out[f"{module}.weight"] = w_OI.float()
    return out


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor as stored; a name in two files is an error."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in tensors:
                    raise ValueError(f"{name} is stored twice")
                tensors[name] = file.get_tensor(name)
    return tensors


def block_size(folder: Path) -> tuple[int, int]:
    """Rows and columns of an FP8 block, as config.json names them (128 x 128 when it names none)."""
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    for group in quantization.get("config_groups", {}).values():
        if "block_structure" in (group.get("weights") or {}):
            rows, columns = group["weights"]["block_structure"]
            return rows, columns
    rows, columns = quantization.get("weight_block_size") or (128, 128)
    return rows, columns


def weight(module: str, parts: dict[str, Tensor], block: tuple[int, int]) -> Tensor:
    """The weight w_OI in float64 that the stored `parts` of one module mean."""
    have = {part: tensor.dtype for part, tensor in parts.items() if part in PARTS}
    match have:
        case {"weight": torch.bfloat16 | torch.float16 | torch.float32, **rest} if not rest:
            return parts["weight"].double()
        case {"weight_packed": torch.int32, "weight_scale": _, **rest} if not rest:
            return spread(nibbles(parts["weight_packed"], 8) - 8, parts["weight_scale"])
        case {"weight_packed": torch.int32, "weight_scale": _, "weight_zero_point": torch.int32}:
            codes_OI = nibbles(parts["weight_packed"], 8)
            zeros_OG = nibbles(parts["weight_zero_point"].T, 8).T
            each = codes_OI.shape[1] // zeros_OG.shape[1]
            return spread(codes_OI - zeros_OG.repeat_interleave(each, dim=1), parts["weight_scale"])
        case {"weight_packed": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_global_scale": _}:
            product = spread(E2M1[nibbles(parts["weight_packed"], 2)], parts["weight_scale"])
            return product / parts["weight_global_scale"].double()
        case {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": _}:
            return spread(E2M1[nibbles(parts["weight"], 2)], parts["weight_scale"]) * parts["weight_scale_2"].double()
        case {"weight_packed": torch.uint8, "weight_scale": torch.uint8, **rest} if not rest:
            exponent = torch.exp2(parts["weight_scale"].double() - 127)
            return spread(E2M1[nibbles(parts["weight_packed"], 2)], exponent)
        case {"weight": torch.float8_e4m3fn, "weight_scale": _, **rest} if not rest:
            return fp8(parts["weight"], parts["weight_scale"], block)
        case {"weight": torch.float8_e4m3fn, "weight_scale_inv": _, **rest} if not rest:
            return fp8(parts["weight"], parts["weight_scale_inv"], block)
    raise ValueError(f"{module}: parts of no known format: {have}")


def nibbles(packed: Tensor, count: int) -> Tensor:
    """The `count` 4-bit codes of each word of packed [O, I / count], lowest first: [O, I]."""
    words = packed.long()
    return torch.stack([(words >> (4 * i)) & 15 for i in range(count)], dim=-1).flatten(-2)


def spread(values_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """Multiply each group of I / G values of a row by its scale."""
    outputs, inputs = values_OI.shape
    groups = values_OI.double().reshape(outputs, scale_OG.shape[1], -1)
    return (groups * scale_OG.double()[:, :, None]).reshape(outputs, inputs)


def fp8(codes_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 times the scale of the tensor (one value), of the row ([O] or [O, 1]) or of the block."""
    values = codes_OI.double()
    outputs, inputs = values.shape
    scale = scale.double()
    if scale.ndim == 4:  # ModelOpt writes block scales as [rows, 1, columns, 1]
        scale = scale[:, 0, :, 0]
    if scale.numel() == 1:
        return values * scale.reshape(())
    if scale.shape[0] == scale.numel() == outputs:
        return values * scale.reshape(outputs, 1)
    rows = scale.repeat_interleave(block[0], dim=0)[:outputs]
    return values * rows.repeat_interleave(block[1], dim=1)[:, :inputs]
