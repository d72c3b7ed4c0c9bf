"""Masks: uniformly random numbers modulo p, generated from a seed of 32 bytes by AES-256 in counter mode."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from edgefl.kernels.field import PRIME, Words

SEED_BYTES = 32
_CHUNK = 1 << 15
"""Number of words generated at a time: few enough to stay in the CPU's cache until they are checked."""
_ZEROS = bytes(4 * _CHUNK)


def expand(seed: bytes, size: int) -> Words:
    """Return the mask of a seed: ``size`` uniformly random numbers from 0 to p − 1, as uint32.

    The key stream of AES-256-CTR is read as little-endian words. About one word in 860 million is p or more;
    each such word is replaced with the next word below p of a second stream, so the numbers are exactly
    uniform. A seed must be used for one mask only.

    >>> mask = expand(bytes(32), 5)
    >>> mask.tolist() == expand(bytes(32), 9)[:5].tolist(), mask.max() < PRIME
    (True, np.True_)
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"seed must have {SEED_BYTES} bytes (got {len(seed)})")
    out = np.empty(size, np.uint32)
    stream = _stream(seed, 0)
    spare = _Spare(seed)
    for first in range(0, size, _CHUNK):
        part = out[first : first + _CHUNK]
        stream.update_into(_ZEROS[: part.nbytes], part.view(np.uint8).data)
        if part.max() >= PRIME:
            spare.replace(part)
    return out


def _stream(seed: bytes, number: int) -> Any:
    """Return the encryptor that generates key stream ``number`` of a seed. Different streams use different
    values of the counter."""
    counter = number.to_bytes(8, "big") + bytes(8)
    return Cipher(algorithms.AES(seed), modes.CTR(counter)).encryptor()


class _Spare:
    """Replaces a mask's words that are p or more with words below p from the seed's second key stream."""

    def __init__(self, seed: bytes) -> None:
        self._stream = _stream(seed, 1)

    def replace(self, words: Words) -> None:
        """Replace each word that is at least p with a spare word, in index order."""
        for place in np.flatnonzero(words >= PRIME).tolist():
            while (word := int.from_bytes(self._stream.update(bytes(4)), "little")) >= PRIME:
                pass
            words[place] = word
