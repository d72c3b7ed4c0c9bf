"""Seeded random streams, one for each purpose and device, so that no draw depends on the order of others."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray


class _StreamName(ISeedSequence):
    """256 bits from a stream's name, a generator's first state: a seventh of `SeedSequence`'s time."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._bits, dtype=dtype, count=n_words)


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator for ``purpose`` (such as ``"batches"``) of the thing named by ``ids`` (such as a client).

    Its first state is the BLAKE2b hash of the experiment's ``seed``, the purpose and the ids, so streams of
    different purposes or devices are independent, and the same name gives the same numbers on every machine.

    >>> bool(stream(1, "batches", 3).random() == stream(1, "batches", 3).random())
    True
    >>> bool(stream(1, "batches", 3).random() == stream(1, "link", 3).random())
    False
    """
    name = " ".join((purpose, str(seed), *map(str, ids)))
    bits = hashlib.blake2b(name.encode(), digest_size=32).digest()
    return np.random.Generator(np.random.PCG64(_StreamName(bits)))  # type: ignore[arg-type]  # a stub too narrow
