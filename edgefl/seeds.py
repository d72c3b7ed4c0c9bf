"""Seeded random streams, one for each purpose and device, so that no draw depends on the order of others."""

from __future__ import annotations

import zlib

import numpy as np


def sequence(seed: int, purpose: str, *ids: int) -> np.random.SeedSequence:
    """The seed sequence of ``purpose`` and ``ids`` under the experiment's ``seed``.

    The purpose's CRC-32 and the ids are the spawn key, as `numpy.random.SeedSequence.spawn` does with
    its child count, so streams of different purposes or devices are independent.
    """
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *ids))


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator for ``purpose`` (such as ``"batches"``) of the thing named by ``ids`` (such as a client).

    >>> bool(stream(1, "batches", 3).random() == stream(1, "batches", 3).random())
    True
    >>> bool(stream(1, "batches", 3).random() == stream(1, "link", 3).random())
    False
    """
    return np.random.Generator(np.random.PCG64(sequence(seed, purpose, *ids)))
