"""Seeded random streams, one for each purpose and device, so that no draw depends on the order of others."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray


class _FirstState(ISeedSequence):
    """The four 64-bit words that a PCG64 asks for: a tenth of `SeedSequence`'s time."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        return self._words


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
    first = _FirstState(np.frombuffer(bits, np.uint64))
    return np.random.Generator(np.random.PCG64(first))  # type: ignore[arg-type]  # a stub too narrow
