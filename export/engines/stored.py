"""Do the tensors of a layer fit the scheme that the engine gives it: which are missing, of another dtype or shape.

Letters: N outputs, K inputs, G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.modules import Module
from quantkit.export.engines.schemes import Stated
from quantkit.export.engines.subject import Kind, Subject
from quantkit.kernels.scheme import BLOCK

Shape = tuple[int, ...]
_ONE: tuple[Shape, ...] = ((1,), ())
_MODEL = ("BF16", "F16")
_LISTS = "correct the ignore list and the targets: full names, one per shard"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of a layer: dtypes and shapes that are read as they are; `needed` False where engines do without it."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    needed: bool = True


def wanted(method: str, scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted] | None:
    """The tensors of a layer of w_OI [rows, inputs] by name; None for a scheme that is not known here."""
    makers = {"compressed-tensors": _compressed, "modelopt": _modelopt, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
    maker = makers.get(method)
    return None if maker is None or scheme.kind == "other" else maker(scheme, rows, inputs)


def _up(n: int, step: int) -> int:
    return -(-n // step)


def _groups(scheme: Stated, inputs: int) -> int:
    return _up(inputs, scheme.group) if scheme.group else 1


def _scale8(scheme: Stated, rows: int, inputs: int) -> Wanted:
    """Scale of FP8 weights under the names of compressed-tensors."""
    shapes: dict[str, tuple[Shape, ...]] = {
        "fp8-tensor": _ONE,
        "fp8-channel": ((rows, 1), (rows,)),
        "fp8-block": ((_up(rows, BLOCK), _up(inputs, BLOCK)),),
    }
    return Wanted(("F32", *_MODEL), shapes[scheme.kind])


def _compressed(scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted]:
    groups = _groups(scheme, inputs)
    if scheme.kind == "int4":
        found = {
            "weight_packed": Wanted(("I32",), ((rows, _up(inputs, 8)),)),
            "weight_scale": Wanted(_MODEL, ((rows, groups),)),
            "weight_shape": Wanted(("I64", "I32"), ((2,),), needed=False),
        }
        zeros = {"weight_zero_point": Wanted(("I32",), ((_up(rows, 8), groups),))}
        return found if scheme.symmetric else found | zeros
    if scheme.kind == "nvfp4":
        found = {
            "weight_packed": Wanted(("U8",), ((rows, inputs // 2),)),
            "weight_scale": Wanted(("F8_E4M3",), ((rows, inputs // 16),)),
            "weight_global_scale": Wanted(("F32",), _ONE),
        }
        return found if scheme.inputs == "none" else found | {"input_global_scale": Wanted(("F32",), _ONE)}
    if scheme.kind == "mxfp4":
        return {
            "weight_packed": Wanted(("U8",), ((rows, inputs // 2),)),
            "weight_scale": Wanted(("U8",), ((rows, inputs // 32),)),
        }
    codes = {"weight": Wanted(("F8_E4M3",), ((rows, inputs),))}
    if scheme.kind == "mxfp8":
        return codes | {"weight_scale": Wanted(("U8",), ((rows, inputs // 32),))}
    codes["weight_scale"] = _scale8(scheme, rows, inputs)
    return codes | ({"input_scale": Wanted(("F32",), _ONE)} if scheme.inputs == "static" else {})


def _modelopt(scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted]:
    given = {"input_scale": Wanted(("F32",), _ONE)} if scheme.inputs == "static" else {}
    if scheme.kind == "int4":
        return given | {
            "weight": Wanted(("U8", "I8"), ((_up(rows, 2), inputs),)),
            "weight_scale": Wanted((*_MODEL, "F32"), ((rows, _groups(scheme, inputs)),)),
        }
    if scheme.kind == "nvfp4":
        return given | {
            "weight": Wanted(("U8",), ((rows, inputs // 2),)),
            "weight_scale": Wanted(("F8_E4M3",), ((rows, inputs // 16),)),
            "weight_scale_2": Wanted(("F32",), _ONE),
        }
    codes = given | {"weight": Wanted(("F8_E4M3",), ((rows, inputs),))}
    if scheme.kind == "mxfp8":
        return codes | {"weight_scale": Wanted(("U8",), ((rows, inputs // 32),))}
    if scheme.kind == "fp8-block":
        shape = (_up(rows, BLOCK), 1, _up(inputs, BLOCK), 1)
        return codes | {"weight_scale": Wanted(("F32",), (shape, shape[::2]))}
    return codes | {"weight_scale": _scale8(scheme, rows, inputs)}


def _fp8(scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted]:
    codes = {"weight": Wanted(("F8_E4M3",), ((rows, inputs),))}
    if scheme.kind == "fp8-block":
        shape = (_up(rows, BLOCK), _up(inputs, BLOCK))
        return codes | {"weight_scale_inv": Wanted(("F32", "F8_E8M0", "BF16"), (shape,))}
    codes["weight_scale"] = Wanted(("F32",), _ONE)
    return codes | ({"input_scale": Wanted(("F32",), _ONE)} if scheme.inputs == "static" else {})


def _gptq(scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted]:
    groups = _groups(scheme, inputs)
    return {
        "qweight": Wanted(("I32",), ((_up(inputs, 8), rows),)),
        "qzeros": Wanted(("I32",), ((groups, _up(rows, 8)),)),
        "scales": Wanted(_MODEL, ((groups, rows),)),
        "g_idx": Wanted(("I32",), ((inputs,),), needed=False),
    }


def _awq(scheme: Stated, rows: int, inputs: int) -> dict[str, Wanted]:
    groups = _groups(scheme, inputs)
    return {
        "qweight": Wanted(("I32",), ((inputs, _up(rows, 8)),)),
        "qzeros": Wanted(("I32",), ((groups, _up(rows, 8)),)),
        "scales": Wanted(_MODEL, ((groups, rows),)),
    }


def check_stored(subject: Subject) -> Iterator[Finding]:
    """What is wrong with each kind of module; nothing for those that fit."""
    for name in subject.orphans:
        yield Finding("silently wrong", name, "scales are there, codes are not: the parameter keeps what is in memory",
                      "the checkpoint is incomplete: write it again")  # fmt: skip
    for kind in subject.kinds:
        module, scheme = kind.example, kind.scheme
        if scheme is None:
            if module.stored != "plain":
                yield _lost(subject, kind, "is quantised, but the configuration has this layer unquantised")
            continue
        parts = wanted(subject.method, scheme, module.rows, module.inputs)
        if parts is None:
            continue
        if module.stored == "plain":
            yield _unexpected(subject, kind, parts)
            continue
        yield from _differences(subject, kind, scheme, parts)


def _lost(subject: Subject, kind: Kind, why: str) -> Finding:
    """Tensors that the built layer has no parameter for."""
    verdict = subject.rules.unknown_name
    how = "dropped, at most with a warning" if verdict == "silently wrong" else "refused: no parameter of that name"
    return Finding(verdict, kind.example.name, f"{why}: its tensors are {how}", _LISTS, kind.count)


def _unexpected(subject: Subject, kind: Kind, parts: Mapping[str, Wanted]) -> Finding:
    """An unquantised weight for a layer that is built quantised."""
    assert kind.scheme is not None
    module = kind.example
    what = f"is not quantised, but the configuration has this layer as {kind.scheme.title}"
    if "weight" not in parts:
        return _lost(subject, kind, what)
    shape = module.tensors["weight"].shape
    if shape in parts["weight"].shapes or _is_cut_off(module, shape, parts["weight"].shapes[0]):
        what = f"{what}: values are converted, scales stay unset"
        return Finding("silently wrong", module.name, what, _LISTS, kind.count)
    return Finding("refused", module.name, f"{what}: shapes differ", _LISTS, kind.count)


def _is_cut_off(module: Module, shape: Shape, right: Shape) -> bool:
    """Too long along the cut over ranks alone: a rank takes its share from the start, in silence."""
    cut = {"column": 0, "row": 1}.get(module.split)
    return len(shape) == len(right) == 2 and all(
        a > b if i == cut else a == b for i, (a, b) in enumerate(zip(shape, right, strict=True))
    )


def _differences(subject: Subject, kind: Kind, scheme: Stated, parts: Mapping[str, Wanted]) -> Iterator[Finding]:
    module, count = kind.example, kind.count
    for name, want in parts.items():
        header = module.tensors.get(name)
        full = f"{module.name}.{name}"
        if header is None:
            if want.needed:
                yield _missing(subject, scheme, name, full, count)
        elif header.dtype not in want.dtypes:
            yield _other_dtype(module, name, header.dtype, want.dtypes, scheme, count)
        elif header.shape not in want.shapes:
            yield _other_shape(subject, kind, name, header.shape, want)


def _other_shape(subject: Subject, kind: Kind, name: str, shape: Shape, want: Wanted) -> Finding:
    """Too long along the cut is cut off in silence; every other difference is an error."""
    module, right = kind.example, want.shapes[0]
    what = f"{name} is {list(shape)}, a layer of [{module.rows}, {module.inputs}] needs {list(right)}"
    fix = "store it plain and row-major, as the format's description has it"
    turned = subject.method in ("gptq", "awq")  # [inputs, outputs]
    if not turned and subject.rules.name in ("vllm", "sglang") and _is_cut_off(module, shape, right):
        return Finding("silently wrong", f"{module.name}.{name}", f"{what}: the rest is cut off", fix, kind.count)
    return Finding("refused", f"{module.name}.{name}", what, fix, kind.count)


def _missing(subject: Subject, scheme: Stated, name: str, full: str, count: int) -> Finding:
    fix = "write the tensor; a scale of activations has to be measured by `quantkit calibrate`"
    engine = subject.rules.name
    if name.startswith("input_"):
        taken = {"vllm": "whatever is in memory", "sglang": "1.0"}.get(engine, "an arbitrary number")
        return Finding(
            "silently wrong", full, f"{name} is missing: activations are quantised under {taken}", fix, count
        )
    if (scheme.kind, engine, name) == ("nvfp4", "vllm", "weight_scale"):
        return Finding("refused", full, f"{name} is missing: the loader's sentinel stays NaN", fix, count)
    return Finding("silently wrong", full, f"{name} is missing: the parameter keeps whatever is in memory", fix, count)


def _other_dtype(module: Module, name: str, dtype: str, dtypes: tuple[str, ...], scheme: Stated, count: int) -> Finding:
    full = f"{module.name}.{name}"
    if dtype == "F32" and dtypes == _MODEL:
        what = f"{name} is F32: rounded to the model's dtype after the codes were chosen"
        return Finding("silently wrong", full, what, "store scales in the model's dtype", count)
    what = f"{name} of {scheme.kind} is {dtype}, copied by value into {dtypes[0]}: byte 126 becomes 128.0"
    return Finding("silently wrong", full, what, f"store it as {dtypes[0]}", count)
