"""Compute the weighted averages of a Flower strategy with edgefl's kernels, directly on the bytes of the
clients' replies.

Flower's strategies average with three functions: `aggregate_arrayrecords` in the message-based API, and
`aggregate` and `aggregate_inplace` in the older API. `fast` creates a subclass of the strategy with copies of
the methods that call these functions. In the copies, these functions' names refer to edgefl's functions.
Layers that are not float32 are still averaged by Flower's functions.
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

_AVERAGING = ("aggregate_train", "aggregate_fit")
_log = logging.getLogger("flwr")


def fast(strategy: T) -> T:
    """Return a copy of a Flower strategy that computes its weighted averages with edgefl's kernels.

    The copy's class is a subclass of the class of ``strategy``. It averages the replies in the order given.
    The results for float32 layers are bit-identical to those of Flower's `aggregate_arrayrecords` (except
    that they are +0.0 where all terms are −0.0), and equal to those of the two functions of the older API
    within float32 rounding. Layers of other types are averaged by Flower's function, and a log line reports
    this. If a strategy wraps another one, apply `fast` to the inner strategy:
    ``DifferentialPrivacyServerSideFixedClipping(fast(FedAvg()), …)``.

    Raises `ConfigError` if Flower is not installed, or if the strategy (such as `FedMedian`) does not use
    Flower's weighted average.

    >>> fast(object())  # doctest: +SKIP
    Traceback (most recent call last):
    edgefl.errors.ConfigError: object does not use Flower's weighted average, ...
    """
    kind, replacement = type(strategy), _replacements()
    made: list[type] = []
    for owner, name in _methods_called(kind):
        method = vars(owner)[name]
        names = {key: replacement[value] for key, value in _functions_called(method) if value in replacement}
        if names:
            made.append(type(f"Fast{owner.__name__}", (owner,), {name: _with_globals(method, names)}))
    if not made:
        raise ConfigError(
            f"{kind.__name__} does not use Flower's weighted average, so it cannot be made faster "
            "(for a strategy that wraps another: Wrapper(fast(FedAvg()), ...))"
        )
    bases = made if issubclass(made[0], kind) else [kind, *made]
    result = copy.copy(strategy)
    result.__class__ = type(f"Fast{kind.__name__}", tuple(bases), {})
    return result


# ---- the strategy's averaging methods, and their copies --------------------------------------------


def _replacements() -> dict[object, Callable[..., Any]]:
    """Return the replacement of each of Flower's averaging functions, keyed by the function."""
    found: dict[object, Callable[..., Any]] = {}
    for module, name, replacement in (
        ("flwr.serverapp.strategy.strategy_utils", "aggregate_arrayrecords", _average_records),
        ("flwr.server.strategy.aggregate", "aggregate", _average_arrays),
        ("flwr.server.strategy.aggregate", "aggregate_inplace", _average_results),
    ):
        try:
            original = getattr(importlib.import_module(module), name)
        except ImportError:
            raise ConfigError("Flower is not installed: pip install 'edgefl[flower]'") from None
        found[original] = partial(replacement, original)
    return found


def _methods_called(kind: type) -> Iterator[tuple[type, str]]:
    """Yield each method that runs when an averaging method of a strategy of class ``kind`` is called. The
    first one is that of the first class in the MRO that has such a method. If a method calls `super`, the
    method of the next such class follows."""
    for name in _AVERAGING:
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
    """Return a copy of a method in which each global name in ``names`` refers to its value there."""
    seen = {**method.__globals__, **names}
    made = FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__, made.__doc__ = method.__kwdefaults__, method.__doc__
    return made


# ---- replacements, named after Flower's functions --------------------------------------------------


def _average_records(original: Callable[..., Any], records: Sequence[Any], weighted_by_key: str) -> Any:
    """Return the weighted average of the records as one ArrayRecord. This function replaces Flower's
    `aggregate_arrayrecords`."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    metrics = [_all_of(record, MetricRecord)[0] for record in records]
    factors = _factors([metric[weighted_by_key] for metric in metrics])
    pages = [dict(page.items()) for record in records for page in _all_of(record, ArrayRecord)]
    if factors is None or len(pages) != len(records) or any(page.keys() != pages[0].keys() for page in pages):
        return original(records, weighted_by_key)

    def rest(keys: list[str]) -> list[Any]:
        parts = [ArrayRecord({key: page[key] for key in keys}) for page in pages]
        given = [RecordDict({"arrays": part, "metrics": of}) for part, of in zip(parts, metrics, strict=True)]
        return list(original(given, weighted_by_key).values())

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
    """Return the records of one type in a message. Unlike `array_records`, this makes no copy, which would
    take 10 µs."""
    return [value for value in record.values() if isinstance(value, kind)]


def _average_arrays(
    original: Callable[..., Any], results: Sequence[tuple[list[NDArray[Any]], int]]
) -> list[NDArray[Any]]:
    """Return the weighted average of several lists of arrays. This function replaces Flower's `aggregate`."""
    factors = _factors([examples for _, examples in results])
    if factors is None or len({len(arrays) for arrays, _ in results}) != 1:
        return list(original(results))

    def rest(slow: list[int]) -> list[Any]:
        return list(original([([arrays[i] for i in slow], examples) for arrays, examples in results]))

    def array(layer: int) -> Floats | None:
        return _sum_arrays([arrays[layer] for arrays, _ in results], factors)

    return _each(range(len(results[0][0])), array, rest)


def _average_results(original: Callable[..., Any], results: Sequence[tuple[Any, Any]]) -> list[NDArray[Any]]:
    """Return the weighted average of the clients' results as a list of arrays. This function replaces
    Flower's `aggregate_inplace`."""
    factors = _factors([answer.num_examples for _, answer in results])
    tensors = [answer.parameters.tensors for _, answer in results]
    if factors is None or len({len(each) for each in tensors}) != 1:
        return list(original(results))

    def part(answer: Any, slow: list[int]) -> Any:
        some = [answer.parameters.tensors[i] for i in slow]
        return dataclasses.replace(answer, parameters=dataclasses.replace(answer.parameters, tensors=some))

    def rest(slow: list[int]) -> list[Any]:
        return list(original([(client, part(answer, slow)) for client, answer in results]))

    def array(layer: int) -> Floats | None:
        found = _npys([each[layer] for each in tensors])
        return None if found is None else layers.weighted_layer(found.arrays(), factors)

    return _each(range(len(tensors[0])), array, rest)


def _factors(weights: Sequence[float]) -> list[float] | None:
    """Return each weight divided by the sum of all weights, or None if the sum is zero or not finite."""
    total = sum(weights)
    return [weight / total for weight in weights] if total and math.isfinite(total) else None


def _each(
    keys: Sequence[Any], array: Callable[[Any], Any], rest: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Average every layer with the function ``array``. If it returns None for a layer, average this layer
    with the function ``rest``, which calls Flower."""
    found = {key: array(key) for key in keys}
    slow = [key for key, average in found.items() if average is None]
    if slow:
        _log.info(
            "edgefl: Flower averages %d of %d layers (not float32 arrays of one shape)", len(slow), len(found)
        )
        found.update(zip(slow, rest(slow), strict=True))
    return list(found.values())


# ---- sums of arrays in npy files, the format in which Flower sends arrays --------------------------


class Npys(NamedTuple):
    """npy files of float32 arrays that have the same shape and memory order: the common header of the files,
    and the data of each file."""

    header: bytes
    flat: list[Floats]

    def summed(self, factors: Sequence[float]) -> bytes:
        """Return the weighted sum of the arrays as the content of an npy file."""
        start = len(self.header)
        made = BytesIO(bytes(start + self.flat[0].nbytes))  # zero pages take no memory until they are written
        with made.getbuffer() as view:
            view[:start] = self.header
            out = np.frombuffer(view, np.float32, offset=start)
            layers.sum_into(out, self.flat, factors)
            del out
        return made.getvalue()  # this makes no copy, because a BytesIO copies only shared memory

    def arrays(self) -> list[Floats]:
        shape, fortran, _ = _form(self.header)
        return [each.reshape(shape, order="F" if fortran else "C") for each in self.flat]


@lru_cache(4096)
def _form(header: bytes) -> tuple[tuple[int, ...], bool, Any]:
    """Parse the header of an npy 1.0 file; return the shape, whether the array is in Fortran order, and the
    dtype."""
    return np.lib.format.read_array_header_1_0(BytesIO(header[8:]))


def _npys(files: Sequence[bytes]) -> Npys | None:
    """Parse npy files of float32 arrays with the same header. Return None if the files are anything else."""
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
    """Return the weighted sum of float32 arrays with the same shape. Return None if the arrays have different
    shapes or another dtype."""
    found = [np.asarray(each) for each in arrays]
    if not all(each.shape == found[0].shape and each.dtype == np.float32 for each in found):
        return None
    return layers.weighted_layer(found, factors)
