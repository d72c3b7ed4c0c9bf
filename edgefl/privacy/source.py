"""Sources of noise: named normal random numbers, from a secret key or the experiment's seed."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from pathlib import Path
from typing import Protocol

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import flush_folder, read
from edgefl.kernels.arguments import Floats
from edgefl.seeds import stream

KEY_BYTES = 32
KEY_FILE = "noise.key"
"""File in a run's folder with the secret key; deleted when the run is done."""
_CHUNK = 2**15
"""Numbers generated at a time, so that their bits stay in the cache."""


class Source(Protocol):
    """Independent normal numbers for each name (purpose and ids); the same name gives the same numbers."""

    @property
    def seed(self) -> int:
        """Seed for draws that must be as secret as the noise: cohorts whose sampling lowers ε."""

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Numbers from N(0, 1): float32 of shape (size,)."""

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Digest of the summed content, for use in the noise's name; "" if the source needs none."""


class Seeded:
    """Numbers from the experiment's seed. The seed is public, so this noise gives no privacy.

    >>> Seeded(1).normal(2, "tree", 1).tolist() == Seeded(1).normal(2, "tree", 1).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Numbers from N(0, 1): float32 of shape (size,)."""
        return stream(self.seed, purpose, *map(int, ids)).standard_normal(size, np.float32)

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Return "": these numbers do not depend on the summed content."""
        return ""


class Secret:
    """Numbers from a secret key of 32 bytes: SHAKE-256 of key and name, then the Box-Muller transform.

    Without the key they are indistinguishable from random numbers and unpredictable from each other. Uniform
    numbers have 53 bits, which bounds normal ones by 8.6 in magnitude. The result is float32, so the attack
    on its last bits (Mironov 2012, doi:10.1145/2382196.2382264) is not prevented.

    >>> noise = Secret(bytes(32)).normal(100_000, "tree", 1)
    >>> abs(float(noise.mean())) < 0.02, abs(float(noise.std()) - 1) < 0.02
    (True, True)
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key must have {KEY_BYTES} bytes (got {len(key)})")
        self._key = key
        self.seed = int(self.digest(b"seed"), 16)

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Numbers from N(0, 1): float32 of shape (size,)."""
        out, text = np.empty(size, np.float32), " ".join((purpose, *map(str, ids)))
        for first in range(0, size, _CHUNK):
            part = out[first : first + _CHUNK]
            pairs = (part.size + 1) // 2
            bits = hashlib.shake_256(self._key + f"{text} {first}".encode()).digest(16 * pairs)
            uniform = ((np.frombuffer(bits, "<u8") >> np.uint64(11)) + 1.0) * 2.0**-53  # above 0, at most 1
            radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
            angle = 2.0 * math.pi * uniform[pairs:]
            part[:pairs] = radius * np.cos(angle)
            part[pairs:] = (radius * np.sin(angle))[: part.size - pairs]
        return out

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Keyed hash of the content, which reveals nothing without the key."""
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest()


def source_of(experiment: Experiment, folder: Path, *, fresh: bool = False) -> Source:
    """The noise source of an experiment: its seed, or the secret key in the run's ``folder``.

    A ``fresh`` run generates a new key. Otherwise raises `ConfigError` if the key does not exist.
    """
    rules, path = experiment.privacy, folder / KEY_FILE
    if rules is None or rules.noise == "seeded" or not rules.noise_multiplier:
        return Seeded(experiment.seed)
    if fresh:
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "wb") as key:
            key.write(secrets.token_bytes(KEY_BYTES))
            key.flush()
            os.fsync(file)
        flush_folder(folder)
    try:
        return Secret(read(path, KEY_BYTES))
    except (OSError, ValueError):
        missing = f"{folder}: no {KEY_FILE}, the secret noise key, which a run deletes when it is done"
        raise ConfigError(f"{missing}: the run cannot be resumed or verified without it") from None
