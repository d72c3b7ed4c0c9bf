"""Sources of noise: normal random numbers, generated from a name and a key. The key is either secret or the
experiment's seed."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Protocol

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import create_secret, read_secret
from edgefl.kernels.arguments import Floats
from edgefl.seeds import stream

KEY_BYTES = 32
KEY_FILE = "noise.key"
"""Name of the file with the secret key in a run's folder. The file is deleted when the run is done."""
_CHUNK = 2**15
"""Number of random numbers generated at a time, so that their random bits stay in the CPU's cache."""


class Source(Protocol):
    """A source of normal random numbers. Each name, which consists of a purpose and ids, has its own
    independent numbers, and the same name always gives the same numbers."""

    @property
    def seed(self) -> int:
        """Seed for random choices that must be as secret as the noise, such as a random choice of clients
        that lowers ε."""

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        """Return ``size`` random numbers from N(0, 1), as float32."""

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Return a digest of the weights and updates of a step, from which the step's noise is derived; "" if
        the source does not need a digest."""


class Seeded:
    """Random numbers generated from the experiment's seed. The seed is public, so this noise gives no
    privacy.

    >>> Seeded(1).normal(2, "tree", 1).tolist() == Seeded(1).normal(2, "tree", 1).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        return stream(self.seed, purpose, *map(int, ids)).standard_normal(size, np.float32)

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Return "", because these numbers do not depend on the content of a step."""
        return ""


class Secret:
    """Random numbers generated from a secret key of 32 bytes. SHAKE-256 of the key and the name gives uniform
    numbers, and the Box-Muller transform turns them into normal numbers.

    Without the key, the numbers cannot be distinguished from truly random numbers, and none can be predicted
    from others. The uniform numbers have 53 bits, so the normal numbers are at most 8.6 in magnitude. Results
    are float32 numbers, so the attack on their last bits (Mironov 2012, doi:10.1145/2382196.2382264) is not
    prevented.

    >>> noise = Secret(bytes(32)).normal(100_000, "tree", 1)
    >>> abs(float(noise.mean())) < 0.02, abs(float(noise.std()) - 1) < 0.02
    (True, True)
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key must be {KEY_BYTES} bytes long (got {len(key)})")
        self._key = key
        self.seed = int(self.digest(b"seed"), 16)

    def normal(self, size: int, purpose: str, *ids: int | str) -> Floats:
        out, text = np.empty(size, np.float32), " ".join((purpose, *map(str, ids)))
        for first in range(0, size, _CHUNK):
            part = out[first : first + _CHUNK]
            pairs = (part.size + 1) // 2
            bits = hashlib.shake_256(self._key + f"{text} {first}".encode()).digest(16 * pairs)
            uniform = ((np.frombuffer(bits, "<u8") >> np.uint64(11)) + 1.0) * 2.0**-53  # in (0, 1]
            radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
            angle = 2.0 * math.pi * uniform[pairs:]
            part[:pairs] = radius * np.cos(angle)
            part[pairs:] = (radius * np.sin(angle))[: part.size - pairs]
        return out

    def digest(self, *pieces: bytes | memoryview) -> str:
        """Return a keyed hash of the weights and updates of a step. Without the key, the hash reveals nothing
        about them."""
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest()


def source_of(experiment: Experiment, folder: Path, *, fresh: bool = False) -> Source:
    """Return the noise source of an experiment, which uses the experiment's seed or the secret key in the
    run's ``folder``.

    If ``fresh`` is True, a new key is generated; otherwise, a key that is missing or cannot be read raises
    `ConfigError`.
    """
    rules, path = experiment.privacy, folder / KEY_FILE
    if rules is None or rules.noise == "seeded" or not rules.noise_multiplier:
        return Seeded(experiment.seed)
    if fresh:
        path.unlink(missing_ok=True)
        create_secret(path, KEY_BYTES)
    try:
        return Secret(read_secret(path, KEY_BYTES))
    except FileNotFoundError:
        missing = f"{folder}: the secret noise key {KEY_FILE} is missing (a run deletes it when it is done)"
        raise ConfigError(f"{missing}; without it, the run cannot be resumed or verified") from None
