"""Reads pickles of strangers as data: nothing is imported or called, and a file costs what its length is.

Python's own stack machine with the few instructions of plain data: names are never looked up, and the known
calls are those of numpy's numbers, uint8 arrays and bytes. No other module of edgefl may import `pickle`.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
from typing import Any

import numpy as np

_PLAIN = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL
"""
_CODES = [getattr(pickle, name)[0] for name in _PLAIN.split()]
_NAMES = {"_codecs.encode", "builtins.bytes", "numpy.ndarray", "numpy.dtype"}
_NAMES |= {f"numpy._core.multiarray.{name}" for name in ("_reconstruct", "scalar")}
_NUMBERS = {"f8", "f4", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"}
"""Kinds and sizes of numpy's numbers that are read."""
_LARGEST_KEY = 1 << 60
"""Python's hash of a smaller whole number is the number itself: keys cannot be made to collide."""


class PickleError(ValueError):
    """The bytes are not a pickle, or one of more than plain data."""


def read_plain_pickle(data: bytes) -> Any:
    """The value of a pickle of plain data: dict, list, tuple, str, bytes, numbers, None and uint8 arrays.

    numpy's numbers come as Python's. Texts of Python 2 come as str, byte for byte (Latin-1). Keys are texts,
    bytes or whole numbers. Raises `PickleError` for anything else.

    >>> read_plain_pickle(pickle.dumps({"labels": [1, 2], "data": np.zeros((1, 2), np.uint8)}, protocol=2))
    {'labels': [1, 2], 'data': array([[0, 0]], dtype=uint8)}
    >>> read_plain_pickle(pickle.dumps(print))
    Traceback (most recent call last):
    edgefl.plain_pickle.PickleError: not plain data: it names builtins.print
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about odd escapes in the names of a broken file
            return _Machine(data).load()
    except PickleError:
        raise
    except Exception as error:  # what a broken pickle raises is nowhere said
        raise PickleError(f"not a whole pickle of plain data: {str(error) or 'no end'}") from None


def write_plain_pickle(value: Any) -> bytes:
    """A pickle of ``value``, plain data, that any Python reads.

    >>> read_plain_pickle(write_plain_pickle({1: {"computation": 162.0, "seen": [1, None]}}))
    {1: {'computation': 162.0, 'seen': [1, None]}}
    """
    return pickle.dumps(value, protocol=2)


class _Name(str):
    """A name that the pickle gives, or numpy's name of a kind of numbers; never looked up."""


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        known = {ord(instruction.code): instruction.name for instruction in pickletools.opcodes}
        raise PickleError(f"not plain data: instruction {known.get(code, code)}")


class _Machine(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Any

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._left = 2 * len(data)  # protocol 2 gives the bytes of an array twice: as text and encoded

    def find_class(self, module: str, name: str) -> _Name:
        full = f"{module}.{name}".replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
        _require(full in _NAMES, f"it names {module}.{name}"[:180])
        return _Name(full)

    def set_item(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int):  # to hash a nest of tuples may take forever
                raise PickleError(f"not plain data: a {type(key).__name__} as a key")
            if isinstance(key, int) and abs(key) >= _LARGEST_KEY:
                raise PickleError("not plain data: a whole number of more than 60 bits as a key")
            _expect(self.stack[-1], dict)[key] = value

    def call(self) -> None:
        """Put the value that a call of one of the known names gives in its place."""
        arguments, name = self.stack.pop(), _expect(self.stack.pop(), _Name)
        match name, arguments:
            case "numpy._core.multiarray._reconstruct", _:
                value: Any = np.empty(0, np.uint8)
            case "numpy.dtype", (str(kind), *_):
                value = _Name(kind.lstrip("|<"))
                _require(value in _NUMBERS, f"a numpy dtype {kind!r}")
            case "numpy._core.multiarray.scalar", (_Name() as kind, raw) if len(raw) == int(kind[1]):
                value = np.frombuffer(self._bytes(raw), f"<{kind}").item()
            case "_codecs.encode", (str(text), "latin1"):
                value = self._bytes(text)
            case "builtins.bytes", ():
                value = b""
            case _:
                raise PickleError(f"not plain data: it calls {name}")
        self.stack.append(value)

    def build(self) -> None:
        """Fill the array, or check the kind of numbers, on the stack with its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Name):
            _require(_expect(state[1], str) in "<|", f"numbers in byte order {state[1]!r}")
            return
        _, shape, kind, fortran, raw = state
        _require(_expect(kind, _Name) == "u1", f"arrays must be uint8 (got {str(kind)!r})")
        content = self._bytes(raw)
        fits = all(_expect(side, int) >= 0 for side in shape) and math.prod(shape) == len(content)
        _require(fits, f"an array of shape {shape} has {len(content)} bytes")
        _expect(target, np.ndarray).__setstate__((1, shape, np.dtype(np.uint8), bool(fortran), content))

    def _bytes(self, raw: Any) -> bytes:
        """The bytes of an array or number, in all no more than the file has, however often they are named."""
        self._left -= len(raw)
        _require(self._left >= 0, "more bytes in arrays than in the file")
        return raw.encode("latin-1") if isinstance(raw, str) else bytes(_expect(raw, bytes))

    dispatch = _Instructions(
        {code: pickle._Unpickler.dispatch[code] for code in _CODES}
        | {
            pickle.SETITEM[0]: set_item,
            pickle.SETITEMS[0]: set_items,
            pickle.REDUCE[0]: call,
            pickle.BUILD[0]: build,
        }
    )


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise PickleError(f"not plain data: {otherwise}")


def _expect(value: Any, kind: type) -> Any:
    _require(isinstance(value, kind), f"a {type(value).__name__} where a {kind.__name__} must be")
    return value
