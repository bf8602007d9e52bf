"""What each tensor of a checkpoint is, decided by its dtype and its companions, never by an ignore list.

A quantised linear layer is stored as several tensors; `weights_of` merges them into one `Weight` with a logical shape.
(GLM-5.2's ignore list names a tensor that does not exist; a list can be wrong, the bytes cannot.)

Letters: O outputs (rows), I inputs, G groups, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.export.checkpoint import Checkpoint, quantization_config
from quantkit.export.safetensors_file import TensorInfo
from quantkit.kernels.errors import QuantkitError, join_errors
from quantkit.kernels.scheme import BLOCK, SCHEMES, QuantScheme

FLOATS = ("BF16", "F16", "F32")
NARROW_FLOATS = ("F8_E4M3", "F8_E5M2")
# Companions that describe activations or caches: they never change what the weight's bytes mean.
ACTIVATION_SUFFIXES = (".input_scale", ".input_global_scale", ".activation_scale", ".output_scale")


@dataclass(frozen=True, slots=True)
class Weight:
    """One logical tensor of a checkpoint.

    name      `X.weight` for a linear layer however it is stored, else the tensor's own name
    shape     logical shape: [O, I], or [E, O, I] for fused experts
    encoding  how it is stored: `plain`, or one of the decoders of `export/sources/rows.py`
    parts     kind -> tensor: codes, scale, zero, shape, divisor, multiplier, g_idx, ones (a factor for each input)
    extra     activation scales that stand beside it (kept with a passed weight, dropped with a re-quantised one)
    scheme    the scheme these bytes already are, or None when no scheme of ours is the same
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    parts: Mapping[str, TensorInfo]
    extra: tuple[TensorInfo, ...] = ()
    scheme: QuantScheme | None = None

    @property
    def module(self) -> str:
        """The name of the layer: without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors in the source."""
        return sum(t.nbytes for t in self.parts.values()) + sum(t.nbytes for t in self.extra)


class _Tensors:
    """The tensors of a checkpoint by name, and which of them some weight has claimed."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.all = tensors
        self.claimed: set[str] = set()

    def claim(self, name: str, *, of: TensorInfo, dtypes: Iterable[str], why: str) -> TensorInfo:
        """The companion `name`, which must be there with one of `dtypes`."""
        found = self.all.get(name)
        if found is None:
            raise QuantkitError(
                f"{why} is missing: the values cannot be known",
                file=of.file,
                tensor=of.name,
                value=f"{of.dtype} {list(of.shape)}",
                allowed=f"a tensor {name}",
                hint="the checkpoint is incomplete, or was written by a tool that lost the scales",
            )
        if found.dtype not in dtypes:
            raise QuantkitError(
                f"{why} has the wrong dtype",
                file=found.file,
                tensor=name,
                value=found.dtype,
                allowed=", ".join(dtypes),
            )
        self.claimed.add(name)
        return found

    def optional(self, name: str) -> TensorInfo | None:
        found = self.all.get(name)
        if found is not None:
            self.claimed.add(name)
        return found

    def extras(self, module: str) -> tuple[TensorInfo, ...]:
        found = (self.optional(module + s) for s in ACTIVATION_SUFFIXES)
        return tuple(t for t in found if t is not None)


def _shape_error(tensor: TensorInfo, allowed: object) -> QuantkitError:
    return QuantkitError(
        "the scale's shape does not fit the weight",
        file=tensor.file,
        tensor=tensor.name,
        value=list(tensor.shape),
        allowed=allowed,
    )


def _fp8(t: TensorInfo, found: _Tensors, ue8m0: bool) -> Weight:
    """FP8 E4M3 weight [O, I] with a tensor, channel, block or (MXFP8) group-32 scale."""
    module = t.name.removesuffix(".weight")
    inverse = f"{module}.weight_scale_inv" in found.all
    name = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
    scale = found.claim(name, of=t, dtypes=("F32", "BF16", "F16", "F8_E8M0", "U8"), why="the scale of an FP8 weight")
    if len(t.shape) != 2:
        raise QuantkitError(
            "an FP8 weight that is not a matrix", file=t.file, tensor=t.name, value=list(t.shape), allowed="[out, in]"
        )
    outputs, inputs = t.shape
    shape = tuple(n for n in scale.shape if n != 1) if len(scale.shape) == 4 else scale.shape
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    power = scale.dtype in ("F8_E8M0", "U8")
    block_name = "fp8-block-ue8m0" if power or ue8m0 else "fp8-block"
    if scale.nbytes and all(n == 1 for n in scale.shape) and not (inverse and len(scale.shape) == 2):
        kind, name = "fp8-tensor", "fp8-tensor"
    elif len(scale.shape) == 4 and scale.shape == (blocks[0], 1, blocks[1], 1):
        kind, name = "fp8-block", "fp8-block"
    elif shape in ((outputs, 1), (outputs,)) and not inverse:
        kind, name = "fp8-channel", "fp8-channel"
    elif shape == blocks:
        kind, name = "fp8-block", block_name
    elif power and shape == (outputs, -(-inputs // 32)):
        kind, name = "mxfp8", ""
    else:
        raise _shape_error(scale, f"[1], [{outputs}, 1] or {list(blocks)}")
    own = SCHEMES.get(name) if scale.dtype == "F32" or (power and name == "fp8-block-ue8m0") else None
    parts = {"codes": t, "scale": scale}
    return Weight(t.name, t.shape, kind, parts, found.extras(module), own)


def _int4_scheme(scale: TensorInfo, group: int, groups: int, *, symmetric: bool) -> QuantScheme | None:
    """The scheme of INT4 codes, None for scales that no engine takes. A row of one group is a channel as well."""
    prefix = "int4" if symmetric else "int4a"
    name = f"{prefix}-g{group}"
    name = f"{prefix}-channel" if groups == 1 and name not in SCHEMES else name
    return SCHEMES.get(name) if scale.dtype != "F32" else None


def _packed_ct(t: TensorInfo, found: _Tensors) -> Weight:
    """compressed-tensors `weight_packed`: INT4 words (I32), or FP4 nibbles (U8) with E4M3 or E8M0 scales."""
    module = t.name.removesuffix(".weight_packed")
    scale_name, rows = f"{module}.weight_scale", t.shape[0]
    if t.dtype == "I32":
        scale = found.claim(scale_name, of=t, dtypes=FLOATS, why="the scale of a packed weight")
        claim = found.claim(f"{module}.weight_shape", of=t, dtypes=("I64", "I32"), why="the shape of a packed weight")
        zero = found.optional(f"{module}.weight_zero_point")
        if found.optional(f"{module}.weight_g_idx"):
            raise QuantkitError(
                "activation-ordered groups (weight_g_idx) cannot be read row by row and no current engine loads them",
                file=t.file,
                tensor=f"{module}.weight_g_idx",
            )
        inputs = t.shape[1] * 8
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        if scale.shape[:1] != (rows,) or not groups or (inputs % groups and groups != 1):
            raise _shape_error(scale, f"[{rows}, groups]")
        parts = {"codes": t, "scale": scale, "shape": claim} | ({"zero": zero} if zero else {})
        own = _int4_scheme(scale, inputs // groups, groups, symmetric=zero is None)
        return Weight(f"{module}.weight", (rows, inputs), "int4-ct", parts, found.extras(module), own)
    if t.dtype != "U8":
        raise QuantkitError(
            "packed weight of an unknown kind",
            file=t.file,
            tensor=t.name,
            value=t.dtype,
            allowed="I32 (INT4), U8 (FP4)",
        )
    scale = found.claim(scale_name, of=t, dtypes=("F8_E4M3", "U8", "F8_E8M0"), why="the scale of a packed weight")
    return _fp4(t, scale, module, "divisor", "weight_global_scale", found)


def _fp4(t: TensorInfo, scale: TensorInfo, module: str, second: str, suffix: str, found: _Tensors) -> Weight:
    """NVFP4, whose scale of the tensor is the part `second`, or MXFP4, told apart by the dtype of the scales."""
    rows, inputs = t.shape[0], t.shape[1] * 2
    kind, group = ("nvfp4", 16) if scale.dtype == "F8_E4M3" else ("mxfp4", 32)
    parts = {"codes": t, "scale": scale}
    if kind == "nvfp4":
        parts[second] = found.claim(f"{module}.{suffix}", of=t, dtypes=("F32",), why="the global scale of NVFP4")
    if scale.shape != (rows, inputs // group):
        raise _shape_error(scale, [rows, inputs // group])
    return Weight(f"{module}.weight", (rows, inputs), kind, parts, found.extras(module), SCHEMES[kind])


def _u8_weight(t: TensorInfo, found: _Tensors) -> Weight:
    """ModelOpt's `weight` in U8: NVFP4 (E4M3 scales and a multiplier), MXFP4 (E8M0 scales) or INT4 (float scales)."""
    module = t.name.removesuffix(".weight")
    dtypes = ("F8_E4M3", "U8", "F8_E8M0", *FLOATS)
    scale = found.claim(f"{module}.weight_scale", of=t, dtypes=dtypes, why="the scale of a packed weight")
    if scale.dtype in FLOATS:
        return _row_pairs(t, scale, found)
    return _fp4(t, scale, module, "multiplier", "weight_scale_2", found)


def _row_pairs(t: TensorInfo, scale: TensorInfo, found: _Tensors) -> Weight:
    """ModelOpt's INT4: bytes [O/2, I] of two rows, scales [O, G], a factor for each input that may be 1."""
    module = t.name.removesuffix(".weight")
    rows, inputs = t.shape[0] * 2, t.shape[1]
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if scale.shape[:1] != (rows,) or not groups or inputs % groups:
        raise _shape_error(scale, f"[{rows}, groups]")
    parts = {"codes": t, "scale": scale}
    if f"{module}.pre_quant_scale" in found.all:
        why = "the factor of the inputs"
        ones = found.claim(f"{module}.pre_quant_scale", of=t, dtypes=("BF16", "F16"), why=why)
        if ones.shape != (inputs,):
            raise _shape_error(ones, [inputs])
        parts["ones"] = ones
    own = _int4_scheme(scale, inputs // groups, groups, symmetric=True)
    return Weight(t.name, (rows, inputs), "int4-pairs", parts, found.extras(module), own)


def _kmajor(t: TensorInfo, found: _Tensors, quant: Mapping[str, Any]) -> Weight:
    """GPTQ `qweight` [I/8, O] or AWQ `qweight` [I, O/8], told apart by their shapes against `scales` [G, O]."""
    v2 = quant.get("checkpoint_format", quant.get("format")) == "gptq_v2"
    bits = int(quant.get("bits") or quant.get("w_bit") or 4)
    module = t.name.removesuffix(".qweight")
    scale = found.claim(f"{module}.scales", of=t, dtypes=FLOATS, why="the scales of a GPTQ or AWQ weight")
    zero = found.claim(f"{module}.qzeros", of=t, dtypes=("I32",), why="the zero points of a GPTQ or AWQ weight")
    g_idx = found.optional(f"{module}.g_idx")
    outputs = scale.shape[1]
    if bits != 4:
        raise QuantkitError("GPTQ and AWQ weights of another width", file=t.file, tensor=t.name, value=bits, allowed=4)
    parts = {"codes": t, "scale": scale, "zero": zero}
    if t.shape[1] == outputs:
        parts |= {"g_idx": g_idx} if g_idx else {}
        encoding = "gptq-v2" if v2 else "gptq-v1"
        inputs = t.shape[0] * 8
        # symmetric and in the order of the inputs: the same numbers as INT4 of compressed-tensors, laid out otherwise
        same = quant.get("sym") is True and not quant.get("desc_act")
        own = _int4_scheme(scale, inputs // scale.shape[0], scale.shape[0], symmetric=True) if same else None
        return Weight(f"{module}.weight", (outputs, inputs), encoding, parts, (), own)
    if t.shape[1] * 8 != outputs:
        raise _shape_error(scale, f"[groups, {t.shape[1]}] (GPTQ) or [groups, {t.shape[1] * 8}] (AWQ)")
    symmetric = quant.get("sym") is True or quant.get("zero_point") is False
    own = _int4_scheme(scale, t.shape[0] // scale.shape[0], scale.shape[0], symmetric=symmetric)
    return Weight(f"{module}.weight", (outputs, t.shape[0]), "awq", parts, (), own)


def _gptoss(t: TensorInfo, found: _Tensors) -> Weight:
    """gpt-oss fused experts: `X_blocks` U8 [E, O, I/32, 16] and `X_scales` U8 [E, O, I/32]."""
    name = t.name.removesuffix("_blocks")
    scale = found.claim(f"{name}_scales", of=t, dtypes=("U8",), why="the scales of MXFP4 blocks")
    if len(t.shape) != 4 or t.shape[3] != 16 or scale.shape != t.shape[:3]:
        raise _shape_error(scale, f"{list(t.shape[:3])} for blocks [experts, out, in/32, 16]")
    shape = (t.shape[0], t.shape[1], t.shape[2] * 32)
    return Weight(name, shape, "mxfp4", {"codes": t, "scale": scale}, (), SCHEMES["mxfp4"])


def _unknown_float(t: TensorInfo) -> QuantkitError:
    return QuantkitError(
        "an 8-bit float tensor of unknown meaning",
        file=t.file,
        tensor=t.name,
        value=f"{t.dtype} {list(t.shape)}",
        allowed="F8_E4M3 `.weight` with a scale",
    )


def weights_of(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Every logical tensor of a checkpoint by name, in natural file order; all faults are reported at once."""
    quant = quantization_config(checkpoint.config)
    found = _Tensors(checkpoint.tensors)
    weights: dict[str, Weight] = {}
    errors: list[QuantkitError] = []
    for t in checkpoint.tensors.values():
        try:
            if t.name.endswith(".weight") and t.dtype == "F8_E4M3":
                w = _fp8(t, found, quant.get("scale_fmt") == "ue8m0")
            elif t.name.endswith(".weight_packed") and len(t.shape) == 2:
                w = _packed_ct(t, found)
            elif t.name.endswith(".weight") and t.dtype == "U8" and len(t.shape) == 2:
                w = _u8_weight(t, found)
            elif t.name.endswith(".qweight") and t.dtype == "I32" and len(t.shape) == 2:
                w = _kmajor(t, found, quant)
            elif t.name.endswith("_blocks") and t.dtype == "U8":
                w = _gptoss(t, found)
            elif t.dtype in NARROW_FLOATS and not t.name.endswith((".weight_scale", "_scale_inv")):
                errors.append(_unknown_float(t))
                continue
            else:
                continue
        except QuantkitError as e:
            errors.append(e)
            continue
        found.claimed.update(p.name for p in w.parts.values())
        weights[w.name] = w
    if errors:
        raise join_errors("the checkpoint cannot be read", errors)
    for t in checkpoint.tensors.values():
        if t.name not in found.claimed:
            weights[t.name] = Weight(t.name, t.shape, "plain", {"codes": t})
    return weights
