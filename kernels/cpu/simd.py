"""Vectors of 16 float32 or int32 lanes as values in Numba code, and tiles of several such vectors.

Loops over packed codes are not vectorised well by the compiler alone: a lookup in a table of 16 becomes a gather, a
short run of one scale becomes scalar code. Here an operation is written once as LLVM vector code and used like a
function in `@njit` code; the compiler allocates registers and picks instructions for the CPU at hand (one AVX-512
register, two of AVX2, four of SSE or NEON). What needs a version per instruction set is in `lanes.py`.

A value has one of these types, `width` being a multiple of 16: f32 vectors, i32 vectors. Arithmetic takes two of the
same width; `tile(v, like)` repeats 16 lanes to the width of `like`. Memory operations take a C-contiguous 1-D array and
an index in elements, which nobody checks: the caller does. No alignment is needed.

Kernels that use these functions share work over threads with `numba.prange` over independent rows in a function with
`parallel=True` (0.02 ms to start and join two threads; a pool of Python threads takes 0.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from quantkit.kernels.cpu import widen

LANES = 16
# Numba's annotation of an intrinsic includes the typing context, which callers do not pass.
operation: Callable[[Callable[..., Any]], Any] = intrinsic


class Vector(types.Type):
    """Numba type of `width` lanes of float32 (kind "f") or int32 (kind "i")."""

    def __init__(self, kind: str, width: int) -> None:
        self.kind = kind
        self.width = width
        super().__init__(f"{kind}32x{width}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector))  # type: ignore[no-untyped-call]


_F32, _I32 = ir.FloatType(), ir.IntType(32)
_F16 = Vector("f", LANES)
_I16 = Vector("i", LANES)


def _llvm(vector: Vector) -> ir.VectorType:
    return ir.VectorType(_F32 if vector.kind == "f" else _I32, vector.width)


def mask(lanes: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))


def _undefined(value: Any) -> ir.Constant:
    return ir.Constant(value.type, ir.Undefined)


def spread(builder: Any, scalar: Any, width: int) -> Any:
    """A scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    one = builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, mask([0] * width))


def pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any, target: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.PointerType(target))


def call(builder: Any, name: str, result: Any, args: Sequence[Any], **flags: Any) -> Any:
    signature = ir.FunctionType(result, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, signature, name)  # type: ignore[no-untyped-call]
    return builder.call(function, args, **flags)


def _is(vector: Any, kind: str) -> bool:
    return isinstance(vector, Vector) and vector.kind == kind


def _loader(dtype: Any, kind: str, stored: Any, widen: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic (array, at) -> 16 lanes, each stored in memory as the LLVM type `stored`."""

    def load(typing: Any, array: Any, at: Any) -> Any:
        if not (isinstance(array, types.Array) and array.dtype == dtype and array.ndim == 1 and array.layout == "C"):
            return None

        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            at_pointer = pointer(context, builder, sig.args[0], args[0], args[1], ir.VectorType(stored, LANES))
            return widen(builder, builder.load(at_pointer, align=1))

        return Vector(kind, LANES)(array, types.intp), build

    return operation(load)


load_f32 = _loader(types.float32, "f", _F32, lambda b, v: v)  # float32 array
load_bf16 = _loader(types.uint16, "f", ir.IntType(16), widen.bf16_to_f32)  # uint16 array of bits, to float32
load_f16 = _loader(types.uint16, "f", ir.IntType(16), widen.f16_to_f32)
load_e4m3 = _loader(types.uint8, "f", ir.IntType(8), widen.e4m3_to_f32)  # uint8 array of codes, to float32
load_e5m2 = _loader(types.uint8, "f", ir.IntType(8), widen.e5m2_to_f32)
load_e8m0 = _loader(types.uint8, "f", ir.IntType(8), widen.e8m0_to_f32)
load_words = _loader(types.uint8, "i", _I32, lambda b, v: v)  # 64 bytes as 16 little-endian words
load_bytes = _loader(types.uint8, "i", ir.IntType(8), lambda b, v: b.zext(v, _llvm(_I16)))


@operation
def load_tile(typing: Any, array: Any, at: Any, like: Any) -> Any:
    """As many consecutive float32 as `like` has lanes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer(context, builder, array, args[0], args[1], _llvm(like)), align=4)

    return like(array, types.intp, like), build


@operation
def store(typing: Any, array: Any, at: Any, v: Any) -> Any:
    """Write the lanes to consecutive float32 of an array."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], pointer(context, builder, array, args[0], args[1], _llvm(v)), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, v), build


@operation
def splat(typing: Any, x: Any) -> Any:
    """A float32 in 16 lanes."""
    return _F16(types.float32), lambda context, builder, sig, args: spread(builder, args[0], LANES)


@operation
def splat_i32(typing: Any, x: Any) -> Any:
    """An int32 in 16 lanes."""
    return _I16(types.int32), lambda context, builder, sig, args: spread(builder, args[0], LANES)


@operation
def zeros(typing: Any, tokens: Any) -> Any:
    """The float32 vector of 16 * `tokens` zeros; `tokens` is a literal."""
    if not isinstance(tokens, types.IntegerLiteral):
        return None
    vector = Vector("f", LANES * tokens.literal_value)
    return vector(tokens), lambda context, builder, sig, args: ir.Constant(_llvm(vector), [0.0] * vector.width)


@operation
def tile(typing: Any, v: Any, like: Any) -> Any:
    """16 lanes, repeated to the width of `like`."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], _undefined(args[0]), mask([i % LANES for i in range(like.width)]))

    return Vector(v.kind, like.width)(v, like), build


@operation
def part(typing: Any, v: Any, index: Any) -> Any:
    """The 16 lanes number `index` (a literal) of a tile."""
    if not isinstance(index, types.IntegerLiteral):
        return None
    first = index.literal_value * LANES

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], _undefined(args[0]), mask(range(first, first + LANES)))

    return Vector(v.kind, LANES)(v, index), build


def _binary(kind: str, build: Callable[[Any, Any, Any], Any]) -> Any:
    def binary(typing: Any, a: Any, b: Any) -> Any:
        if not _is(a, kind) or a != b:
            return None
        return a(a, b), lambda context, builder, sig, args: build(builder, args[0], args[1])

    return operation(binary)


def _vector_name(name: str, value: Any) -> str:
    return f"llvm.{name}.v{value.type.count}f32"


add = _binary("f", lambda b, x, y: b.fadd(x, y))
sub = _binary("f", lambda b, x, y: b.fsub(x, y))
mul = _binary("f", lambda b, x, y: b.fmul(x, y))
maximum = _binary("f", lambda b, x, y: b.select(b.fcmp_unordered(">", x, y), x, y))  # x when one of them is NaN
minimum = _binary("f", lambda b, x, y: b.select(b.fcmp_unordered("<", x, y), x, y))
add_i32 = _binary("i", lambda b, x, y: b.add(x, y))
and_i32 = _binary("i", lambda b, x, y: b.and_(x, y))
or_i32 = _binary("i", lambda b, x, y: b.or_(x, y))


@operation
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """The product of `a` and `b`, plus `c`, rounded once."""
    if not _is(a, "f") or not a == b == c:
        return None

    return a(a, a, a), lambda _, builder, sig, args: call(builder, _vector_name("fma", args[0]), args[0].type, args)


def _shift(build: Callable[[Any, Any, Any], Any]) -> Any:
    def shift(typing: Any, v: Any, bits: Any) -> Any:
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return build(builder, args[0], spread(builder, builder.trunc(args[1], _I32), v.width))

        return v(v, types.intp), code

    return operation(shift)


shift_right = _shift(lambda b, v, n: b.lshr(v, n))
shift_left = _shift(lambda b, v, n: b.shl(v, n))


@operation
def as_f32(typing: Any, v: Any) -> Any:
    """The float32 with the bits of an i32 vector."""
    result = Vector("f", v.width)
    return result(v), lambda context, builder, sig, args: builder.bitcast(args[0], _llvm(result))


@operation
def to_i32(typing: Any, v: Any) -> Any:
    """Truncated to integers; the caller keeps the values in range."""
    result = Vector("i", v.width)
    return result(v), lambda context, builder, sig, args: builder.fptosi(args[0], _llvm(result))


@operation
def magnitude(typing: Any, v: Any) -> Any:
    """Absolute values."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, _vector_name("fabs", args[0]), args[0].type, args)

    return v(v), build


@operation
def nearest(typing: Any, v: Any) -> Any:
    """Rounded to the nearest integer, ties to even, as float32."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, _vector_name("rint", args[0]), args[0].type, args)

    return v(v), build


@operation
def total(typing: Any, v: Any) -> Any:
    """Sum of the lanes, in no fixed order."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = ir.Constant(_F32, -0.0)
        return call(builder, _vector_name("vector.reduce.fadd", args[0]), _F32, [start, args[0]], fastmath=("reassoc",))

    return types.float32(v), build


@operation
def width(typing: Any, like: Any) -> Any:
    """Lanes of a vector: known to the compiler, so that a branch on it costs nothing."""
    return types.intp(like), lambda context, builder, sig, args: context.get_constant(types.intp, like.width)


@operation
def store_totals(typing: Any, array: Any, at: Any, v: Any) -> Any:
    """Write the sum of each run of 16 lanes to consecutive float32 of an array."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start = ir.Constant(_F32, -0.0)
        for i in range(v.width // LANES):
            lanes = builder.shuffle_vector(args[2], _undefined(args[2]), mask(range(i * LANES, (i + 1) * LANES)))
            name = _vector_name("vector.reduce.fadd", lanes)
            result = call(builder, name, _F32, [start, lanes], fastmath=("reassoc",))
            index = builder.add(args[1], context.get_constant(types.intp, i))
            builder.store(result, pointer(context, builder, array, args[0], index, _F32), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, v), build


@operation
def largest(typing: Any, v: Any) -> Any:
    """Largest of the lanes; NaN lanes are ignored."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, _vector_name("vector.reduce.fmax", args[0]), _F32, [args[0]])

    return types.float32(v), build
