"""Sources of noise: normal numbers by name, of a secret key or of the experiment's seed."""

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
"""Name of the file in a run's folder that holds the secret key until the run is done."""
_CHUNK = 2**15
"""Numbers that are made at a time, so that their bits stay in the cache."""


class Source(Protocol):
    """Independent normal numbers for each name; the same name gives the same ones."""

    @property
    def seed(self) -> int:
        """A seed for draws that are as secret as the noise: of cohorts whose draw counts for privacy."""

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Numbers from N(0, 1): float32 of shape (size,)."""

    def digest(self, *pieces: bytes | memoryview) -> str:
        """A name for what is summed, which another content does not have; "" where names need none."""


class Seeded:
    """The numbers follow from the seed, which whoever sees the experiment knows: they protect nobody.

    >>> Seeded(1).normal(2, "tree", 1).tolist() == Seeded(1).normal(2, "tree", 1).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Numbers from N(0, 1): float32 of shape (size,)."""
        return stream(self.seed, purpose, *map(int, ids)).standard_normal(size, np.float32)

    def digest(self, *pieces: bytes | memoryview) -> str:
        """No name is needed: ""."""
        return ""


class Secret:
    """The numbers follow from a secret key of 32 bytes: SHAKE-256 of the key and the name, by Box and Muller.

    Who does not have the key cannot tell them from chance, nor, from some of them, the others. Uniform
    numbers have 53 bits, so a normal one is below 8.6 in size. float32 holds the result, so the attack on its
    last bits (Mironov 2012, doi:10.1145/2382196.2382264) is not prevented.

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
        """A keyed hash of the content, which tells nothing to who has not the key."""
        found = hashlib.blake2b(key=self._key, digest_size=16)
        for piece in pieces:
            found.update(piece)
        return found.hexdigest()


def source_of(experiment: Experiment, folder: Path, *, fresh: bool = False) -> Source:
    """The source of an experiment's noise: of its seed, or of a secret key in the run's ``folder``.

    For a ``fresh`` run a key is made. Raises `ConfigError` where there is none: nothing goes on without it.
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
        gone = f"{folder}: no {KEY_FILE}, the key of its secret noise, which a run deletes when it is done"
        raise ConfigError(f"{gone}: its versions cannot be made again or gone on from") from None
