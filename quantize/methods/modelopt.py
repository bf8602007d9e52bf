"""The calibration algorithms of NVIDIA's ModelOpt (`nvidia-modelopt`), their result read back as our codes and scales.

ModelOpt wraps the modules it quantises. It is given plain linear layers instead of the block itself: copies of the
weights, fed with the inputs that the block's layers see. So nothing of the model is wrapped, a routed expert is a layer
like any other, and as many layers are held as fit. What comes back is an amax for each scale, and for GPTQ weights that
have moved; scales are rounded to their stored format, codes to the nearest.

NVFP4 is the exception: ModelOpt has its rounding on GPUs of recent make only. Its searches are given ours through
`register_quant_backend`, with block scales as stored under the global scale of the fused set; the integer quantiser
that they then drive only keeps the amax of each block.

Shape suffixes: O outputs, I inputs, G scales of a row, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from quantkit.kernels.cpu.rows import global_scale
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.scheme import BLOCK, QuantScheme
from quantkit.quantize.modelopt_algorithms import WITHOUT_INPUTS
from torch import Tensor

_BACKEND = "quantkit_nvfp4"
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0

Show = Callable[[str, Tensor], None]  # (layer, inputs [T, I])


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer to calibrate: finite float32 weights, their scheme, and the largest weight of the fused set."""

    w_OI: Tensor  # noqa: N815
    scheme: QuantScheme
    amax: float


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What ModelOpt leaves of a layer: weights, which GPTQ has moved, and an amax for each scale, in their order."""

    w_OI: Tensor  # noqa: N815
    amax: Tensor


def calibrated(layers: Mapping[str, Layer], algorithm: str, feed: Callable[[Show], None]) -> dict[str, Found]:
    """Run one of `modelopt_algorithms.READABLE` on layers; `feed` runs all samples once and shows every layer's inputs.

    Raises QuantkitError when ModelOpt fails, or leaves something that codes and scales cannot say.
    """
    found: dict[str, Found] = {}
    sizes = {name: _block_size(layer) for name, layer in layers.items()}
    for size in sorted(set(sizes.values())):  # ModelOpt takes one size for all layers
        found |= _run({n: x for n, x in layers.items() if sizes[n] == size}, algorithm, size, feed)
    return found


def _run(layers: Mapping[str, Layer], algorithm: str, size: int, feed: Callable[[Show], None]) -> dict[str, Found]:
    with _quiet():
        import modelopt.torch.quantization as mtq

    number = {name: str(i) for i, name in enumerate(layers)}
    stand_in = torch.nn.ModuleDict({number[n]: _linear(layer.w_OI) for n, layer in layers.items()})

    def show(name: str, x_TI: Tensor) -> None:
        if name in number:
            stand_in[number[name]](x_TI)

    options: dict[str, Any] = {"method": algorithm}
    if algorithm == "local_hessian":
        options |= {"fp8_scale_sweep": False, "block_size": size}
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            *({"quantizer_name": f"{number[n]}.weight_quantizer", "cfg": _cfg(x)} for n, x in layers.items()),
        ],
        "algorithm": options,
    }
    loop = None if algorithm in WITHOUT_INPUTS else lambda _: feed(show)
    try:
        with torch.no_grad(), _quiet(), _backend():
            mtq.quantize(stand_in, config, loop)
    except (RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError, AssertionError) as e:
        raise QuantkitError(
            f"ModelOpt's {algorithm} failed: {e}",
            tensor=next(iter(layers)),
            hint="another algorithm, or `method: gptq`",
        ) from e
    return {name: _read(name, stand_in[number[name]], algorithm) for name in layers}


def _linear(w_OI: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(w_OI.shape[1], w_OI.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(w_OI.float().clone(), requires_grad=False)
    return layer


def _block_size(layer: Layer) -> int:
    return layer.scheme.group_size or layer.w_OI.shape[1]


def _cfg(layer: Layer) -> dict[str, Any]:
    """The weight quantiser of a scheme, in ModelOpt's terms."""
    scheme = layer.scheme
    if scheme.has_global:
        return {
            "num_bits": 4,
            "block_sizes": {-1: scheme.group_size, "type": "static"},
            "backend": _BACKEND,
            "backend_extra_args": {"scale_2": float(global_scale(scheme, layer.amax))},
        }
    bits: Any = 4 if scheme.element == "int4" else (4, 3)
    if scheme.granularity == "group":
        return {"num_bits": bits, "block_sizes": {-1: scheme.group_size, "type": "static"}}
    if scheme.granularity == "block":
        return {"num_bits": bits, "block_sizes": {-1: BLOCK, -2: BLOCK}}
    return {"num_bits": bits, "axis": 0 if scheme.granularity == "channel" else None}


@contextmanager
def _backend() -> Iterator[None]:
    """Our NVFP4 rounding under a name of its own, for the time of one run."""
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import register_quant_backend, unregister_quant_backend

    register_quant_backend(_BACKEND, _nvfp4)
    try:
        yield
    finally:
        unregister_quant_backend(_BACKEND)


def _nvfp4(x: Tensor, quantizer: Any) -> Tensor:
    """Weights in blocks [N, 16] rounded to e2m1 under `quantizer.amax` [N, 1] as it would be stored."""
    scale_2 = quantizer.backend_extra_args["scale_2"]
    stored = (quantizer.amax / _E2M1_MAX / scale_2).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = (stored * scale_2).reshape(-1, 1)
    size = (x.abs() / scale).clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step * scale, x)


@contextmanager
def _quiet() -> Iterator[None]:
    """What ModelOpt prints and warns of goes nowhere: stdout belongs to `--json`."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield


def _read(name: str, module: Any, algorithm: str) -> Found:
    if getattr(module.input_quantizer, "pre_quant_scale", None) is not None:
        raise QuantkitError(
            f"ModelOpt's {algorithm} scaled the inputs of a layer, which plain codes cannot say", tensor=name
        )
    amax = module.weight_quantizer.amax
    if amax is None or not bool(torch.isfinite(amax).all()):
        raise QuantkitError(
            f"ModelOpt's {algorithm} left no finite scale", tensor=name, hint="another algorithm, or `method: gptq`"
        )
    return Found(module.weight.detach().float(), amax.detach().float())
