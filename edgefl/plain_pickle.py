"""Pickles read and written as data: no unpickler runs, nothing is imported and nothing is called.

A pickle is a program for a stack machine that may call anything. This is a machine for the few instructions
that build dictionaries, lists, texts, numbers, numpy's numbers and uint8 arrays; it stops at any other.
`pickletools` splits the bytes into instructions, which runs none of them.

What a file costs grows with its length only: a table that is named a thousand times is held and finished
once, and a key is a text or a number, never a nest of tuples that would take forever to hash.
"""

from __future__ import annotations

import math
import pickletools
import struct
import warnings
from typing import Any

import numpy as np

ARRAY = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
KIND = {("numpy", "ndarray")}
DTYPE = {("numpy", "dtype")}
SCALAR = {("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")}
ENCODE = {("_codecs", "encode")}
EMPTY_BYTES = {("__builtin__", "bytes"), ("builtins", "bytes")}

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINFLOAT"),
}
KEYS = (str, bytes, int, float, type(None))
NUMBERS = {"f8", "f4", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"}
"""Kinds and sizes of numpy's numbers that are read."""
EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleError(ValueError):
    """The bytes are not a pickle, or one of more than plain data."""


class _Mark:
    """Where a run of items starts on the stack."""


class _Name(tuple[str, str]):
    """A module and a name in it, never looked up."""


class _Dtype:
    """A numpy dtype that the pickle describes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Array:
    """A numpy array that the pickle describes, empty until it is filled."""

    value: np.ndarray[Any, np.dtype[np.uint8]] | None = None


def read_plain_pickle(data: bytes) -> Any:
    """The value of a pickle of plain data: dict, list, tuple, str, bytes, numbers, None and uint8 arrays.

    numpy's numbers come as Python's. Texts of Python 2 come as str, byte for byte (Latin-1). Raises
    `PickleError` for anything else.

    >>> import pickle
    >>> read_plain_pickle(pickle.dumps({"labels": [1, 2], "data": np.zeros((1, 2), np.uint8)}, protocol=2))
    {'labels': [1, 2], 'data': array([[0, 0]], dtype=uint8)}
    >>> read_plain_pickle(pickle.dumps(print))
    Traceback (most recent call last):
    edgefl.plain_pickle.PickleError: not plain data: it names builtins.print
    """
    machine = _Machine()
    literals, push = LITERALS, machine.stack.append
    try:
        with warnings.catch_warnings(action="ignore"):  # about odd escapes in the names of a broken file
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name in literals:  # nine of ten instructions
                    push(argument)
                elif opcode.name == "STOP":
                    return _finished(machine.stack.pop(), {})
                else:
                    machine.run(opcode.name, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PickleError(f"not a whole pickle of plain data: {error}") from None
    raise PickleError("not a whole pickle of plain data: no end")


def write_plain_pickle(value: Any) -> bytes:
    """A pickle (protocol 2) of dicts, lists, str, int, float, bool and None that any Python reads.

    TypeError for anything else.

    >>> read_plain_pickle(write_plain_pickle({1: {"computation": 162.0, "seen": [1, None]}}))
    {1: {'computation': 162.0, 'seen': [1, None]}}
    """
    parts = [b"\x80\x02"]
    _put(parts, value)
    return b"".join([*parts, b"."])


def _put(parts: list[bytes], value: Any) -> None:
    """The instructions that leave ``value`` on the stack."""
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        parts.append(b"\x8b" + struct.pack("<i", len(raw)) + raw)
    elif isinstance(value, float):
        parts.append(b"G" + struct.pack(">d", value))
    elif isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(raw)) + raw)
    elif isinstance(value, dict):
        parts.append(b"}(")
        for key, item in value.items():
            _put(parts, key)
            _put(parts, item)
        parts.append(b"u")
    elif isinstance(value, list):
        parts.append(b"](")
        for item in value:
            _put(parts, item)
        parts.append(b"e")
    else:
        raise TypeError(f"a {type(value).__name__} is no plain data")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        stack = self.stack
        if name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in TUPLES:
            count = TUPLES[name]
            stack[-count:] = [tuple(self._top(count))]
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            at = len(self._memo) if name == "MEMOIZE" else argument
            self._memo[at] = self._top(1)[0]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "MARK":
                stack.append(_Mark())
            case "TUPLE":
                stack.append(tuple(self._items()))
            case "APPEND":
                item = stack.pop()
                _expect(stack[-1], list).append(item)
            case "APPENDS":
                items = self._items()
                _expect(stack[-1], list).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _expect(stack[-1], dict)[_key(key)] = value
            case "SETITEMS":
                items = self._items()
                keys = map(_key, items[::2])
                _expect(stack[-1], dict).update(zip(keys, items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_name(*argument.split(" ")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_name(module, attribute))
            case "REDUCE":
                arguments, what = stack.pop(), stack.pop()
                stack.append(_make(what, arguments))
            case "BUILD":
                state = stack.pop()
                _fill(stack[-1], state)
            case _:
                raise PickleError(f"not plain data: instruction {name}")

    def _items(self) -> list[Any]:
        """What lies above the last mark, taken off with it."""
        items: list[Any] = []
        while not isinstance(item := self.stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _top(self, count: int) -> list[Any]:
        top = self.stack[-count:]
        if len(top) != count or any(isinstance(item, _Mark) for item in top):
            raise PickleError("not a whole pickle of plain data: stack too short")
        return top


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleError(f"not plain data: a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, KEYS):
        raise PickleError(f"not plain data: a {type(value).__name__} as a key")
    return value


def _name(module: Any, attribute: Any) -> _Name:
    name = _Name((str(module), str(attribute)))
    if name not in ARRAY | KIND | DTYPE | SCALAR | ENCODE | EMPTY_BYTES:
        raise PickleError(f"not plain data: it names {module}.{attribute}")
    return name


def _make(what: Any, arguments: Any) -> Any:
    """What a call of one of the few known names would give."""
    name = _expect(what, _Name)
    if name in ARRAY:
        return _Array()
    if name in DTYPE:
        kind = _expect(arguments[0], str).lstrip("|<")
        if kind not in NUMBERS:
            raise PickleError(f"not plain data: a numpy dtype {arguments[0]!r}")
        return _Dtype(kind)
    if name in SCALAR:
        dtype, raw = arguments
        content = raw.encode("latin-1") if isinstance(raw, str) else _expect(raw, bytes)
        return np.frombuffer(content, f"<{_expect(dtype, _Dtype).kind}", count=1).item()
    if name in ENCODE and arguments[1] == "latin1":
        encoded: bytes = _expect(arguments[0], str).encode("latin-1")
        return encoded
    if name in EMPTY_BYTES and arguments == ():
        return b""
    raise PickleError(f"not plain data: it calls {'.'.join(name)}")


def _fill(target: Any, state: Any) -> None:
    """Fill the array or dtype on the stack with its state."""
    if isinstance(target, _Dtype):
        if state[1] not in ("<", "|"):
            raise PickleError(f"not plain data: numbers in byte order {state[1]!r}")
        return
    _, shape, dtype, fortran, raw = state
    _expect(target, _Array), _expect(shape, tuple)
    if _expect(dtype, _Dtype).kind != "u1":
        raise PickleError(f"not plain data: arrays must be uint8 (got {dtype.kind!r})")
    content = raw.encode("latin-1") if isinstance(raw, str) else _expect(raw, bytes)
    if any(_expect(side, int) < 0 for side in shape) or math.prod(shape) != len(content):
        raise PickleError(f"not plain data: an array of shape {shape} has {len(content)} bytes")
    target.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """The value with every described array replaced by the array; ``done`` has what was finished, by id."""
    if isinstance(value, _Array):
        if value.value is None:
            raise PickleError("not plain data: an array without content")
        return value.value
    if isinstance(value, _Mark | _Name | _Dtype):
        raise PickleError("not plain data: it ends in a name")
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _finished(item, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_finished(item, done) for item in value)
    return done[id(value)]
