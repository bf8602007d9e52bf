"""The stand-in for kernels that vLLM's CPU build lacks: dequantise every layer as soon as vLLM has loaded it.

vLLM's CPU wheel has no kernel for NVFP4 and MXFP4, and those for INT4 and FP8 want AVX-512 or AMX. What is tested here is
not the kernels but everything before them, and that stays vLLM's: its reading of the config, its choice of a scheme for
each layer, its parameters, and its loader's names, slices and fusions. When the loader is done, each quantised layer gets
the BF16 weights that its loaded parameters mean, and vLLM's own unquantised method from there on; such a model computes
exactly what the BF16 model of the same weights computes, so a comparison needs no tolerance.

Scales that vLLM keeps once per fused layer must agree between its shards: an engine would use the largest for all.
Shapes: E experts (a leading dimension, absent in linear layers), O outputs, I inputs, G groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1]).double()


class MissingKernel:
    """What a layer holds instead of the kernel that does not exist here; it is never run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def input_quant_key(self) -> None:
        return None


def allow_missing_kernels(asked: list[str]) -> None:
    """Let vLLM build layers for which it finds no kernel; `asked` gets what it said about each."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, mxfp4, nvfp4
    from vllm.model_executor.layers.quantization import modelopt  # noqa: F401
    from vllm.model_executor.layers.quantization import mxfp4 as gpt_oss  # noqa: F401
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (  # noqa: F401
        compressed_tensors_moe_w4a4_nvfp4,
        compressed_tensors_moe_w8a8_fp8,
        compressed_tensors_moe_wna16,
    )

    assert compressed_tensors
    for name in ("nvfp4", "mxfp4", "fp8", "wfp8_a16"):
        _stand_behind(getattr(linear, f"init_{name}_linear_kernel"), MissingKernel(), asked)
    _stand_behind(linear.choose_mp_linear_kernel, MissingKernel, asked)
    _stand_behind(nvfp4.select_nvfp4_moe_backend, (nvfp4.NvFp4MoeBackend.EMULATION, None), asked)
    _stand_behind(mxfp4.select_mxfp4_moe_backend, (mxfp4.Mxfp4MoeBackend.CPU, None), asked)
    _stand_behind(int_wna16.select_wna16_moe_backend, (int_wna16.WNA16MoEBackend.CPU, None), asked)
    _stand_behind(fp8.select_fp8_moe_backend, (fp8.Fp8MoeBackend.NONE, None), asked)
    _allow_sparse_attention(asked)


def _allow_sparse_attention(asked: list[str]) -> None:
    """Let vLLM build models with sparse attention (an indexer), which its CPU platform refuses: enough to load them."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    choose = platform.get_attn_backend_cls

    def choice(selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> Any:
        if attn_selector_config.use_sparse:
            asked.append("Sparse Attention is not supported on CPU.")
            return "sparse.SparseBackend"
        return choose(selected_backend, attn_selector_config, **kwargs)

    platform.get_attn_backend_cls = staticmethod(choice)


def _stand_behind(choose: Callable[..., Any], instead: Any, asked: list[str]) -> None:
    """Where vLLM calls `choose`, give `instead` when it finds nothing that runs on this machine."""

    def choice(*args: Any, **kwargs: Any) -> Any:
        try:
            return choose(*args, **kwargs)
        except (ValueError, NotImplementedError) as error:
            asked.append(str(error).strip().splitlines()[0])
            return instead

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get(choose.__name__) is choose:
            setattr(module, choose.__name__, choice)


def input_scales(model: nn.Module) -> dict[str, bool]:
    """Layers with stored scales of activations: whether each is one positive number for all shards and experts."""
    found: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if leaf.endswith(("input_scale", "input_global_scale")):
            values = parameter.data.double().flatten()
            sound = (
                bool(torch.isfinite(values).all()) and bool((values > 0).all()) and bool((values == values[0]).all())
            )
            found[module] = found.get(module, True) and sound
    return found


def make_dense(model: nn.Module) -> list[str]:
    """Turn every quantised layer of a freshly loaded model into an unquantised one; returns their names."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    names = []
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            if isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
                continue
            for prefix in ("w13_", "w2_"):
                _replace(name, layer, prefix)
            layer._replace_quant_method(UnquantizedFusedMoEMethod(layer.moe_config))
        elif isinstance(layer, LinearBase | ParallelLMHead):
            if not any(hasattr(layer, f"weight{part}") for part in ("_packed", "_scale", "_scale_inv")):
                continue
            _replace(name, layer, "")
            layer.quant_method = UnquantizedLinearMethod()
        else:
            continue
        names.append(name)
    return names


def _replace(name: str, layer: nn.Module, prefix: str) -> None:
    """Put `<prefix>weight` in BF16 in the place of the parameters that `layer` was loaded with."""
    own = {n: p for n, p in layer.named_parameters(recurse=False) if n.startswith(prefix)}
    w_EOI = meaning(name, {n.removeprefix(prefix): p.data for n, p in own.items()}, layer)
    for parameter in own:
        if "bias" not in parameter:
            delattr(layer, parameter)
    setattr(layer, f"{prefix}weight", nn.Parameter(w_EOI.float().bfloat16(), requires_grad=False))


def meaning(name: str, part: dict[str, Tensor], layer: nn.Module) -> Tensor:
    """The weights in float64 that the loaded parameters of one layer mean, before vLLM post-processes them."""
    packed = part.get("weight_packed", part.get("weight"))
    assert packed is not None, f"{name}: no codes among {sorted(part)}"
    if packed.dtype == torch.int32:
        codes_EOI, zeros = _codes(packed, 8), part.get("weight_zero_point")
        if zeros is None:
            return _groups(codes_EOI - 8, part["weight_scale"])
        zeros_EOG = _codes(zeros.transpose(-1, -2), 8).transpose(-1, -2)  # packed along the outputs
        each = codes_EOI.shape[-1] // zeros_EOG.shape[-1]
        return _groups(codes_EOI - zeros_EOG.repeat_interleave(each, -1), part["weight_scale"])
    if packed.dtype == torch.uint8 and part["weight_scale"].dtype == torch.uint8:
        return _groups(E2M1[_codes(packed, 2)], torch.exp2(part["weight_scale"].double() - 127))
    if packed.dtype == torch.uint8:
        product = _groups(E2M1[_codes(packed, 2)], part["weight_scale"])
        if "weight_global_scale" in part:
            return product / _shared(name, part["weight_global_scale"], packed.ndim)
        return product * _shared(name, part["weight_scale_2"], packed.ndim)
    assert packed.dtype == torch.float8_e4m3fn, f"{name}: {packed.dtype}"
    scale = part.get("weight_scale", part.get("weight_scale_inv"))
    assert scale is not None, f"{name}: no scale among {sorted(part)}"
    values, block = packed.double(), getattr(layer, "weight_block_size", None)
    if scale.ndim == packed.ndim + 2:  # ModelOpt's blocks of 128 x 128: [rows, 1, columns, 1]
        scale, block = scale[..., 0, :, 0], (128, 128)
    if block is not None:
        rows = scale.double().repeat_interleave(block[0], -2)[..., : values.shape[-2], :]
        return values * rows.repeat_interleave(block[1], -1)[..., : values.shape[-1]]
    if scale.ndim == packed.ndim and scale.shape[-2] == packed.shape[-2]:
        return values * scale.double()
    if scale.ndim == 1 and scale.shape[0] == packed.shape[0] and packed.ndim == 2:
        return values * scale.double()[:, None]
    return values * _shared(name, scale, packed.ndim)


def _codes(packed: Tensor, count: int) -> Tensor:
    words = packed.long()
    return torch.stack([(words >> (4 * i)) & 15 for i in range(count)], -1).flatten(-2)


def _groups(values_EOI: Tensor, scale_EOG: Tensor) -> Tensor:
    return (values_EOI.double().unflatten(-1, (scale_EOG.shape[-1], -1)) * scale_EOG.double()[..., None]).flatten(-2)


def _shared(name: str, scale: Tensor, ndim: int) -> Tensor:
    """The one scale of each fused tensor: [1, 1] for a linear layer, [E, 1, 1] for experts."""
    of_shards = scale.double().reshape(1 if ndim == 2 else scale.shape[0], -1)
    if bool((of_shards != of_shards[:, :1]).any()):
        raise ValueError(f"{name}: the shards of a fused layer do not share their scale: {of_shards.unique().tolist()}")
    one = of_shards[:, :1]
    return one if ndim == 2 else one[:, :, None]
