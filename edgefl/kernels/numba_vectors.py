"""The numba back end's inner loop, written in LLVM's vectors: numba's own pass leaves the norms' eight
interleaved lanes one by one, which is a quarter as fast. LLVM maps the vectors to what the machine has.

No instruction carries a fast-math flag, so products and sums are rounded one by one as numpy's are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types
from numba.core import cgutils as untyped_cgutils

intrinsic: Any = extending.intrinsic  # called with arguments that numba's types do not know
cgutils: Any = untyped_cgutils

LANES = 8
GROUP = 6
"""Most updates in one pass over a tile; more would not fit the registers."""

WIDTH = 16
"""Elements of one step: 64 bytes, for which one prefetch is enough."""

_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_NARROW = ir.VectorType(ir.FloatType(), LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
_AHEAD = 256
"""Elements ahead of the loads that are asked for: far enough to hide memory."""


def _pointer(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """A pointer to ``kind`` at ``index`` floats after ``address``."""
    byte = builder.add(address, builder.mul(index, ir.Constant(index.type, 4)))
    return builder.inttoptr(byte, kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    lane0 = ir.Constant(ir.IntType(32), 0)
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, lane0)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(single, ir.Constant(_FLOATS, ir.Undefined), zeros)


def _prefetch(builder: Any, address: Any, index: Any) -> None:
    pointer = _pointer(builder, address, builder.add(index, ir.Constant(index.type, _AHEAD)), ir.IntType(8))
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, number(0), number(2), number(1)])


@intrinsic  # type: ignore[untyped-decorator]
def sum_group(
    typingctx: Any,
    count: Any,
    stream: Any,
    out: Any,
    source: Any,
    vectors: Any,
    weights: Any,
    lanes: Any,
    n: Any,
) -> Any:
    """out[i] = source[i] + Σ_k weights[k]·vectors[k][i] for i < n, a multiple of 16; lanes[k] += squares.

    ``count`` is a literal, and so is ``stream``: whether to write around the caches, to an ``out`` that is
    aligned to 64 bytes. Arrays are given by their addresses: ``vectors`` points to the addresses of
    ``count`` float32 arrays, ``weights`` to as many floats, ``lanes`` to 8 doubles for each.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(stream, types.IntegerLiteral):
        return None
    size, around = count.literal_value, stream.literal_value
    signature = types.void(count, stream, *[types.uintp] * 5, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, out, source, vectors, weights, lanes, n = arguments
        word = n.type
        # The square of a float32 is exact in a double: fused or not, the sum has the same bits.
        kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
        square_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v8f64")

        def entry(address: Any, index: int, kind: Any, size_bytes: int) -> Any:
            return builder.inttoptr(
                builder.add(address, ir.Constant(word, index * size_bytes)), kind.as_pointer()
            )

        addresses = [builder.load(entry(vectors, k, word, 8)) for k in range(size)]
        factors = [_splat(builder, builder.load(entry(weights, k, ir.FloatType(), 4))) for k in range(size)]
        sums = [entry(lanes, k, _DOUBLES, 64) for k in range(size)]
        running = [cgutils.alloca_once_value(builder, builder.load(p, align=8)) for p in sums]
        step = ir.Constant(word, WIDTH)
        with cgutils.for_range_slice(builder, ir.Constant(word, 0), n, step, word) as (i, _):
            total = builder.load(_pointer(builder, source, i, _FLOATS), align=1)
            for k in range(size):
                _prefetch(builder, addresses[k], i)
                x = builder.load(_pointer(builder, addresses[k], i, _FLOATS), align=1)
                total = builder.fadd(total, builder.fmul(factors[k], x))
                lanes = builder.load(running[k])
                for half in (0, LANES):
                    # Loaded again: widening from memory spares a shuffle.
                    at = builder.add(i, ir.Constant(word, half))
                    narrow = builder.load(_pointer(builder, addresses[k], at, _NARROW), align=1)
                    wide = builder.fpext(narrow, _DOUBLES)
                    lanes = builder.call(square_add, [wide, wide, lanes])
                builder.store(lanes, running[k])
            stored = builder.store(total, _pointer(builder, out, i, _FLOATS), align=64 if around else 1)
            if around:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        for k in range(size):
            builder.store(builder.load(running[k]), sums[k], align=8)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """What was written around the caches is seen by all before what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 at ``index`` of the array at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], arguments[1], ir.FloatType()), align=1)

    return types.float32(types.uintp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def put_float(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a float32 at ``index`` of the array at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, value = arguments
        builder.store(value, _pointer(builder, address, index, ir.FloatType()), align=1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def next_number(typingctx: Any, counter: Any) -> Any:
    """What the int64 at this address was before it was raised by one, for one thread at a time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, number(1), "monotonic")

    return types.int64(types.uintp), generate
