"""Seeded random numbers. Each purpose and each device has its own generator, so that no random number depends
on the order in which other random numbers are drawn."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray


class _FirstState(ISeedSequence):
    """A seed sequence that provides the four 64-bit words that PCG64 needs, ten times as fast as numpy's
    `SeedSequence`."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        return self._words


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Create the random generator for a purpose, such as ``"batches"``, and for ids, such as a client's ID.

    The initial state of the generator is the BLAKE2b hash of the experiment's ``seed``, the purpose and the
    ids. So generators for different purposes or devices are independent of each other, and the same arguments
    give the same random numbers on every machine.

    >>> bool(stream(1, "batches", 3).random() == stream(1, "batches", 3).random())
    True
    >>> bool(stream(1, "batches", 3).random() == stream(1, "link", 3).random())
    False
    """
    name = " ".join((purpose, str(seed), *map(str, ids)))
    bits = hashlib.blake2b(name.encode(), digest_size=32).digest()
    first = _FirstState(np.frombuffer(bits, np.uint64))
    return np.random.Generator(np.random.PCG64(first))  # type: ignore[arg-type]  # the stub is too narrow
