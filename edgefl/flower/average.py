"""A Flower strategy whose weighted averages are summed by our kernels, straight from the replies' bytes.

Flower's strategies average in three functions of its own: `aggregate_arrayrecords` for messages, `aggregate`
and `aggregate_inplace` in the older API. `fast` takes the methods that call them, as they are, with ours
under these names, and puts them before Flower's in the order in which Python looks for methods. Layers
that are not float32 go through Flower's function.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from io import BytesIO
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.kernels import layers
from edgefl.kernels.arguments import Floats

T = TypeVar("T")

_METHODS = ("aggregate_train", "aggregate_fit")
_log = logging.getLogger("flwr")


def fast(strategy: T) -> T:
    """Returns a copy of a Flower strategy that sums its weighted averages with edgefl's kernels.

    The copy is of a subclass of the strategy's own class. It averages what Flower averages, in the order of
    the replies: float32 layers with the bits of Flower's `aggregate_arrayrecords` (but +0.0 where all terms
    are −0.0), and within float32's rounding of the older API's two functions. Layers of another type are
    averaged by Flower's own function, and its log says so. A strategy that wraps another is given a fast
    one: ``DifferentialPrivacyServerSideFixedClipping(fast(FedAvg()), …)``.

    Raises `ConfigError` if Flower is not installed, or if the strategy does not use Flower's weighted average
    (`FedMedian` and others: there is nothing to make faster).

    >>> fast(object())  # doctest: +SKIP
    Traceback (most recent call last):
    edgefl.errors.ConfigError: object does not use Flower's weighted average, ...
    """
    kind, ours = type(strategy), _replacements()
    made: list[type] = []
    for owner, name in _reached(kind):
        method = vars(owner)[name]
        names = {key: ours[value] for key, value in _functions_called(method) if value in ours}
        if names:
            made.append(type(f"Fast{owner.__name__}", (owner,), {name: _with_globals(method, names)}))
    if not made:
        raise ConfigError(
            f"{kind.__name__} does not use Flower's weighted average, so nothing of it can be made faster "
            "(a strategy that wraps another takes a fast one: Wrapper(fast(FedAvg()), ...))"
        )
    bases = made if issubclass(made[0], kind) else [kind, *made]
    result = copy.copy(strategy)
    result.__class__ = type(f"Fast{kind.__name__}", tuple(bases), {})
    return result


# ---- which methods average, and how they are made to call ours -------------------------------------


def _replacements() -> dict[object, Callable[..., Any]]:
    """Our function for each of Flower's that its strategies average with."""
    found: dict[object, Callable[..., Any]] = {}
    for module, name, ours in (
        ("flwr.serverapp.strategy.strategy_utils", "aggregate_arrayrecords", _average_records),
        ("flwr.server.strategy.aggregate", "aggregate", _average_arrays),
        ("flwr.server.strategy.aggregate", "aggregate_inplace", _average_results),
    ):
        try:
            theirs = getattr(importlib.import_module(module), name)
        except ImportError:
            raise ConfigError("Flower is not installed: pip install 'edgefl[flower]'") from None
        found[theirs] = partial(ours, theirs)
    return found


def _reached(kind: type) -> Iterator[tuple[type, str]]:
    """The methods that a call goes through: a class's own, and the next one's while `super` is called."""
    for name in _METHODS:
        for owner in kind.__mro__:
            method = vars(owner).get(name)
            if isinstance(method, FunctionType):
                yield owner, name
                if "super" not in method.__code__.co_names:
                    break


def _functions_called(method: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    for name in method.__code__.co_names:
        value = method.__globals__.get(name)
        if isinstance(value, FunctionType):
            yield name, value


def _with_globals(method: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same method, in which some global names mean something else."""
    seen = {**method.__globals__, **names}
    made = FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__, made.__doc__ = method.__kwdefaults__, method.__doc__
    return made


# ---- ours, each beside Flower's function that it stands for ----------------------------------------


def _average_records(theirs: Callable[..., Any], records: Sequence[Any], weighted_by_key: str) -> Any:
    """`aggregate_arrayrecords`: one ArrayRecord of the records' weighted averages."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    metrics = [_all_of(record, MetricRecord)[0] for record in records]
    factors = _factors([metric[weighted_by_key] for metric in metrics])
    pages = [dict(page.items()) for record in records for page in _all_of(record, ArrayRecord)]
    if factors is None or len(pages) != len(records) or any(page.keys() != pages[0].keys() for page in pages):
        return theirs(records, weighted_by_key)

    def rest(keys: list[str]) -> list[Any]:
        parts = [ArrayRecord({key: page[key] for key in keys}) for page in pages]
        given = [RecordDict({"arrays": part, "metrics": of}) for part, of in zip(parts, metrics, strict=True)]
        return list(theirs(given, weighted_by_key).values())

    def array(key: str) -> Any:
        first = pages[0][key]
        found = _npys([page[key].data for page in pages])
        if found is None:
            return None
        return Array(first.dtype, tuple(first.shape), first.stype, found.summed(factors))

    average, keys = ArrayRecord(), list(pages[0])
    for key, value in zip(keys, _each(keys, array, rest), strict=True):
        average[key] = value
    return average


def _all_of(record: Any, kind: type) -> list[Any]:
    """A message's records of one kind (what its `array_records` and `metric_records` copy, at 10 µs each)."""
    return [value for value in record.values() if isinstance(value, kind)]


def _average_arrays(
    theirs: Callable[..., Any], results: Sequence[tuple[list[NDArray[Any]], int]]
) -> list[NDArray[Any]]:
    """`aggregate`: the weighted average of lists of arrays."""
    factors = _factors([examples for _, examples in results])
    if factors is None or len({len(arrays) for arrays, _ in results}) != 1:
        return list(theirs(results))

    def rest(slow: list[int]) -> list[Any]:
        return list(theirs([([arrays[i] for i in slow], examples) for arrays, examples in results]))

    def array(layer: int) -> Floats | None:
        return _sum_arrays([arrays[layer] for arrays, _ in results], factors)

    return _each(range(len(results[0][0])), array, rest)


def _average_results(theirs: Callable[..., Any], results: Sequence[tuple[Any, Any]]) -> list[NDArray[Any]]:
    """`aggregate_inplace`: the weighted average of what clients answered, as arrays."""
    factors = _factors([answer.num_examples for _, answer in results])
    tensors = [answer.parameters.tensors for _, answer in results]
    if factors is None or len({len(each) for each in tensors}) != 1:
        return list(theirs(results))

    def part(answer: Any, slow: list[int]) -> Any:
        some = [answer.parameters.tensors[i] for i in slow]
        return dataclasses.replace(answer, parameters=dataclasses.replace(answer.parameters, tensors=some))

    def rest(slow: list[int]) -> list[Any]:
        return list(theirs([(client, part(answer, slow)) for client, answer in results]))

    def array(layer: int) -> Floats | None:
        found = _npys([each[layer] for each in tensors])
        return None if found is None else layers.weighted_layer(found.arrays(), factors)

    return _each(range(len(tensors[0])), array, rest)


def _factors(weights: Sequence[float]) -> list[float] | None:
    """Each weight over their sum; None where that is not a number to divide by."""
    total = sum(weights)
    return [weight / total for weight in weights] if total and math.isfinite(total) else None


def _each(
    keys: Sequence[Any], array: Callable[[Any], Any], rest: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Every layer's average: ours, and for those where that is None Flower's."""
    found = {key: array(key) for key in keys}
    slow = [key for key, average in found.items() if average is None]
    if slow:
        _log.info("edgefl: Flower averages %d of %d layers: not float32 of one shape", len(slow), len(found))
        found.update(zip(slow, rest(slow), strict=True))
    return list(found.values())


# ---- sums over NumPy's file format, in which Flower sends arrays -----------------------------------


class Npys(NamedTuple):
    """Files in NumPy's format of float32 arrays of one shape and order: their header, and their numbers."""

    header: bytes
    flat: list[Floats]

    def summed(self, factors: Sequence[float]) -> bytes:
        """The weighted sum as such a file."""
        start = len(self.header)
        made = BytesIO(
            bytes(start + self.flat[0].nbytes)
        )  # zeros that take no memory before they are written
        with made.getbuffer() as view:
            view[:start] = self.header
            out = np.frombuffer(view, np.float32, offset=start)
            layers.sum_into(out, self.flat, factors)
            del out
        return made.getvalue()  # the same memory: a BytesIO copies only what two hold

    def arrays(self) -> list[Floats]:
        shape, fortran, _ = _form(self.header)
        return [each.reshape(shape, order="F" if fortran else "C") for each in self.flat]


@lru_cache(4096)
def _form(header: bytes) -> tuple[tuple[int, ...], bool, Any]:
    """The shape, order of memory (True: Fortran's) and type that a header of version 1.0 states."""
    return np.lib.format.read_array_header_1_0(BytesIO(header[8:]))


def _npys(files: Sequence[bytes]) -> Npys | None:
    """The files of float32 arrays of one form; None where they are something else."""
    first = files[0]
    start = 10 + int.from_bytes(first[8:10], "little")
    header = first[:start]
    try:
        shape, _, dtype = _form(header) if header.startswith(b"\x93NUMPY\x01\x00") else ((), False, None)
    except ValueError:
        return None
    size = start + 4 * math.prod(shape)
    if dtype != np.float32 or not all(len(file) == size and file.startswith(header) for file in files):
        return None
    return Npys(header, [np.frombuffer(file, np.float32, offset=start) for file in files])


def _sum_arrays(arrays: Sequence[NDArray[Any]], factors: Sequence[float]) -> Floats | None:
    """The weighted sum of float32 arrays of one shape; None where they are something else."""
    found = [np.asarray(each) for each in arrays]
    if not all(each.shape == found[0].shape and each.dtype == np.float32 for each in found):
        return None
    return layers.weighted_layer(found, factors)
