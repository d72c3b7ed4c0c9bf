"""LLVM code for the sums of the numba back end, in vectors of 8 or 16 elements.

LLVM does not generate such loops from Python code: it vectorises neither the conversion of float16 nor
several float64 sums in the same loop as a float32 sum. Every product and every sum is rounded separately;
only squares of float32 numbers may be fused with their sum, because they are exact in float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils, codegen, config

from edgefl.kernels.arguments import LANES, SCALE_BLOCK

FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)
"""Types of updates, in the order of `arguments.DTYPES`."""
ITEM_BYTES = (4, 2, 2, 1)
GROUP = 4
"""Maximum number of updates that one pass adds, chosen so that their sums of squares fit into registers."""

Builder = Any
Value = Any
_intrinsic: Any = extending.intrinsic
_cgutils: Any = cgutils
_host_features: Any = codegen.get_host_cpu_features

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FEATURES: str = getattr(config, "CPU_FEATURES", None) or _host_features()
_CONVERTS_HALVES = "+f16c" in _FEATURES.split(",")
"""True if the processor has an instruction that converts float16. Without one, LLVM would call a function for
each element."""
WIDTH = 2 * LANES if "+avx512f" in _FEATURES.split(",") else LANES
"""Number of elements per vector for types that are converted to float32; float32 itself has vectors of 8.
`add_group` takes multiples of `WIDTH` for every type."""
_DOUBLES = ir.VectorType(_DOUBLE, LANES)
STREAM_ALIGNMENT = 64
SOURCE_DIGEST = f"{zlib.crc32(Path(__file__).read_bytes()):08x}"
"""Digest of this file. The names in numba's cache contain it, because the cache notices only changes in the
file of the compiled function itself."""
_AHEAD_BYTES = 1024


def _add_group(
    _: Any,
    kind: Any,
    group: Any,
    stream: Any,
    source: Any,
    target: Any,
    vectors: Any,
    scales: Any,
    weights: Any,
    size: Any,
    norms: Any,
) -> Any:
    """Compute target = source + Σ_j weights[j] · vectors[j] over ``size`` elements.

    All arguments are int64. ``size`` is a multiple of `WIDTH`. ``vectors`` points to the addresses of
    ``group`` (1 to `GROUP`) updates of type ``kind``, ``scales`` points to the addresses of their scales, and
    ``weights`` points to their float32 weights. ``norms`` points to float64[group, 8], which receives the
    sums of squares per lane, or for int8 per scale block. With ``stream`` = 1 the result bypasses the caches;
    ``target`` must then be aligned to `STREAM_ALIGNMENT`.
    """

    def generate(context: Any, builder: Builder, _: Any, arguments: Sequence[Value]) -> Any:
        which, count, past, *rest = arguments
        cases = builder.add(builder.mul(which, _int(2 * GROUP)), past)
        cases = builder.add(cases, builder.mul(builder.sub(count, _int(1)), _int(2)))
        end = builder.append_basic_block("added")
        switch = builder.switch(cases, end)
        for case in range(len(ITEM_BYTES) * GROUP * 2):
            block = builder.append_basic_block(f"case{case}")
            switch.add_case(_int(case), block)
            builder.position_at_end(block)
            _Pass(builder, case // (2 * GROUP), case // 2 % GROUP + 1, bool(case % 2), *rest).emit()
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


def _copy_bytes(_: Any, source: Any, target: Any, size: Any) -> Any:
    """Copy ``size`` bytes from one address to another; all arguments are int64."""

    def generate(context: Any, builder: Builder, _: Any, arguments: Sequence[Value]) -> Any:
        pointer = _INT8.as_pointer()
        places = [builder.inttoptr(address, pointer) for address in (arguments[1], arguments[0])]
        _cgutils.raw_memcpy(builder, *places, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _word_at(_: Any, address: Any) -> Any:
    """Return the int64 at an address."""

    def generate(context: Any, builder: Builder, _: Any, arguments: Sequence[Value]) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _INT64.as_pointer()))

    return types.int64(types.int64), generate


add_group: Any = _intrinsic(_add_group)
copy_bytes: Any = _intrinsic(_copy_bytes)
word_at: Any = _intrinsic(_word_at)


class _Pass:
    """Emits one pass over the elements for ``group`` updates of one type."""

    def __init__(
        self,
        builder: Builder,
        kind: int,
        group: int,
        stream: bool,
        source: Value,
        target: Value,
        vectors: Value,
        scales: Value,
        weights: Value,
        size: Value,
        norms: Value,
    ) -> None:
        self._builder, self._kind, self._stream = builder, kind, stream
        self._width = LANES if kind == FLOAT32 else WIDTH
        self._source, self._target, self._size, self._norms = source, target, size, norms
        self._vectors = [self._entry(vectors, j, _INT64) for j in range(group)]
        self._scales = [self._entry(scales, j, _INT64) for j in range(group)]
        self._weights = [_splat(builder, self._entry(weights, j, _FLOAT), self._width) for j in range(group)]

    def emit(self) -> None:
        if self._kind == INT8:
            self._loop(_int(0), self._size, SCALE_BLOCK, [], self._scale_block)
            return
        zeros = [_constant(_DOUBLES, 0.0)] * len(self._vectors)
        sums = self._loop(_int(0), self._size, self._width, zeros, self._add_lanes)
        for j, lanes in enumerate(sums):
            self._write(self._norms, _int(8 * LANES * j), lanes, 8)

    def _add_lanes(self, i: Value, sums: Sequence[Value]) -> list[Value]:
        """Add one vector of each update to the result, and the squares of its elements to the lane sums.

        The squares are added in ascending order of the elements.
        """
        builder, values = self._builder, [self._floats(vector, i) for vector in self._vectors]
        self._add(i, values)
        made = list(sums)
        for row in range(self._width // LANES):
            for j, value in enumerate(values):
                wide = builder.fpext(_row(builder, value, row), _DOUBLES)
                made[j] = _fused(builder, wide, wide, made[j])
        return made

    def _scale_block(self, first: Value, _: Sequence[Value]) -> list[Value]:
        """Add one scale block of int8 updates.

        Its squared norm is scale² · Σ q², where Σ q² is computed in integers.
        """
        builder = self._builder
        number = builder.sdiv(first, _int(SCALE_BLOCK))
        factors = [self._read(scale, builder.mul(number, _int(4)), _FLOAT) for scale in self._scales]
        end = builder.add(first, _int(SCALE_BLOCK))
        end = builder.select(builder.icmp_signed("<", end, self._size), end, self._size)

        def add(i: Value, sums: Sequence[Value]) -> list[Value]:
            for vector in self._vectors:
                self._prefetch(builder.add(vector, i))
            whole = [
                builder.sext(self._read(vector, i, self._vector(_INT8)), self._vector(_INT32))
                for vector in self._vectors
            ]
            values = [
                builder.fmul(_splat(builder, factor, self._width), builder.sitofp(each, self._vector(_FLOAT)))
                for factor, each in zip(factors, whole, strict=True)
            ]
            self._add(i, values)
            return [
                builder.add(total, builder.mul(each, each)) for total, each in zip(sums, whole, strict=True)
            ]

        sums = self._loop(first, end, self._width, [_constant(self._vector(_INT32), 0)] * len(factors), add)
        for j, (factor, lanes) in enumerate(zip(factors, sums, strict=True)):
            wide, squares = builder.fpext(factor, _DOUBLE), builder.sitofp(_lane_sum(builder, lanes), _DOUBLE)
            place = builder.add(_int(8 * LANES * j), builder.mul(number, _int(8)))
            self._write(self._norms, place, builder.fmul(builder.fmul(wide, wide), squares), 8)
        return []

    def _add(self, i: Value, values: Sequence[Value]) -> None:
        builder, place = self._builder, self._builder.mul(i, _int(4))
        total = self._read(self._source, place, self._vector(_FLOAT))
        for weight, value in zip(self._weights, values, strict=True):
            total = builder.fadd(total, builder.fmul(weight, value))
        written = self._write(self._target, place, total, STREAM_ALIGNMENT if self._stream else 1)
        if self._stream:
            written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))

    def _floats(self, vector: Value, i: Value) -> Value:
        """Return a vector of a float32, float16 or bfloat16 update from element ``i`` on, as float32."""
        builder, place = self._builder, self._builder.mul(i, _int(ITEM_BYTES[self._kind]))
        self._prefetch(builder.add(vector, place))
        if self._kind == FLOAT32:
            return self._read(vector, place, self._vector(_FLOAT))
        halves = self._read(vector, place, self._vector(_INT16))
        if self._kind == BFLOAT16:
            return builder.bitcast(
                builder.shl(builder.zext(halves, self._vector(_INT32)), _constant(self._vector(_INT32), 16)),
                self._vector(_FLOAT),
            )
        if _CONVERTS_HALVES:
            return builder.fpext(builder.bitcast(halves, self._vector(ir.HalfType())), self._vector(_FLOAT))
        return _from_half(builder, builder.zext(halves, self._vector(_INT32)))

    def _prefetch(self, address: Value) -> None:
        """Prefetch the cache line that is `_AHEAD_BYTES` after an address; for float32, into the L2 cache."""
        builder, pointer = self._builder, _INT8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
        ahead = builder.inttoptr(builder.add(address, _int(_AHEAD_BYTES)), pointer)
        reading, level, data = 0, 2 if self._kind == FLOAT32 else 3, 1
        arguments = [ahead, *(ir.Constant(_INT32, number) for number in (reading, level, data))]
        name = "llvm.prefetch.p0" if str(pointer) == "ptr" else "llvm.prefetch.p0i8"
        builder.call(_function(builder, kind, name), arguments)

    def _vector(self, element: Any) -> Any:
        return ir.VectorType(element, self._width)

    def _entry(self, array: Value, j: int, kind: Any) -> Value:
        return self._read(array, _int(j * (8 if kind == _INT64 else 4)), kind)

    def _read(self, address: Value, offset: Value, kind: Any) -> Value:
        place = self._builder.inttoptr(self._builder.add(address, offset), kind.as_pointer())
        value = self._builder.load(place)
        value.align = 1
        return value

    def _write(self, address: Value, offset: Value, value: Value, align: int) -> Any:
        place = self._builder.inttoptr(self._builder.add(address, offset), value.type.as_pointer())
        written = self._builder.store(value, place)
        written.align = align
        return written

    def _loop(
        self,
        start: Value,
        stop: Value,
        step: int,
        carried: Sequence[Value],
        body: Callable[[Value, Sequence[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Emit carried = body(i, carried) for i from ``start`` to ``stop``; return the last ``carried``."""
        builder, before = self._builder, self._builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        i, values = builder.phi(_INT64), [builder.phi(value.type) for value in carried]
        builder.cbranch(builder.icmp_signed("<", i, stop), inside, after)
        builder.position_at_end(inside)
        made = body(i, values)
        following = builder.add(i, _int(step))
        for phi, first, later in zip([i, *values], [start, *carried], [following, *made], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return values


def _int(number: int) -> Value:
    return ir.Constant(_INT64, number)


def _constant(kind: Any, number: float) -> Value:
    return ir.Constant(kind, [number] * kind.count)


def _splat(builder: Builder, scalar: Value, width: int) -> Value:
    kind = ir.VectorType(scalar.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, one, _constant(ir.VectorType(_INT32, width), 0))


def _row(builder: Builder, vector: Value, row: int) -> Value:
    """Return the elements 8 · row to 8 · row + 7 of a vector, as a vector with one element per lane."""
    places = [ir.Constant(_INT32, LANES * row + lane) for lane in range(LANES)]
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT32, LANES), places))


def _fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Return a·b + c in float64. The result may be rounded once or twice, so the product must be exact."""
    kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    return builder.call(_function(builder, kind, f"llvm.fmuladd.v{LANES}f64"), [a, b, c])


def _lane_sum(builder: Builder, lanes: Value) -> Value:
    kind = ir.FunctionType(_INT32, [lanes.type])
    return builder.call(_function(builder, kind, f"llvm.vector.reduce.add.v{lanes.type.count}i32"), [lanes])


def _function(builder: Builder, kind: Any, name: str) -> Any:
    return _cgutils.get_or_insert_function(builder.module, kind, name)


def _from_half(builder: Builder, halves: Value) -> Value:
    """Convert float16 to float32 with integer operations.

    The shifted bits of the magnitude, read as float32, are the number divided by 2^112.
    """
    ints, floats = halves.type, ir.VectorType(_FLOAT, halves.type.count)
    magnitude = builder.and_(halves, _constant(ints, 0x7FFF))
    shifted = builder.bitcast(builder.shl(magnitude, _constant(ints, 13)), floats)
    finite = builder.bitcast(builder.fmul(shifted, _constant(floats, 2.0**112)), ints)
    not_finite = builder.icmp_unsigned(">=", magnitude, _constant(ints, 0x7C00))
    exponent = builder.select(not_finite, _constant(ints, 0x7F800000), _constant(ints, 0))
    sign = builder.shl(builder.and_(halves, _constant(ints, 0x8000)), _constant(ints, 16))
    return builder.bitcast(builder.or_(builder.or_(finite, exponent), sign), floats)
