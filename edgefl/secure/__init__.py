"""Secure aggregation: the server learns the weighted sum of K updates, but no single update.

    fixed.py      conversion of updates to integers modulo p = 2^32 − 5, and of weights to integers
    masks.py      masks expanded from seeds
    keys.py       key agreement and authenticated encryption between clients
    coding.py     codes that split a mask into N shares: any T of them reveal nothing, any U recover the mask
    coded.py      one-time coded masks (LightSecAgg), for buffers of updates that start from different
                  versions
    trusted.py    a trusted aggregator, a separate process that decrypts updates and releases only their sums
    pairwise.py   pairwise masks (Bonawitz et al.), for strategies that train in rounds

All arithmetic is modulo the prime p and is done by the kernels in `edgefl.kernels.field`. Fixed-point
numbers, masks and shares are elements of the same field, so the same weights can be applied to updates and to
shares.

References: So et al., *LightSecAgg*, arXiv:2109.14236; So et al., *Secure Aggregation for Buffered
Asynchronous Federated Learning*, arXiv:2110.02177; Bonawitz et al., *Practical Secure Aggregation for
Privacy-Preserving Machine Learning*, CCS 2017, doi:10.1145/3133956.3133982.

``keys.py``, ``masks.py`` and the protocols need the package ``cryptography``: pip install 'edgefl[secure]'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from edgefl.errors import EdgeflError

ID_BYTES = 16
"""Length of the id of a mask or of a sealed update, in bytes."""
SECRET_FILE = "phones.key"
"""Name of the file, in a run's folder, with the secret from which the phones' keys are derived. The file is
deleted when the run is done."""
USED_FILE = "phones.used"
"""Name of the file, in a run's folder, that lists the used masks. Each line contains the index of a holder (a
client that stores shares of masks), the id of a mask, and the digest of the sum."""


def digest_of(members: Iterable[bytes]) -> bytes:
    """Return a digest of the members of a sum; their order has no effect on the digest."""
    return hashlib.sha256(b"".join(sorted(members))).digest()


class SecureRules(Protocol):
    """Sizes and costs that the rules of every secure-aggregation protocol provide."""

    @property
    def size(self) -> int:
        """Number of elements of an update."""

    @property
    def step(self) -> float:
        """The elements of an update are rounded to multiples of this number; 0 if they are not rounded."""

    @property
    def clip(self) -> float:
        """Maximum magnitude of an element of an update; larger elements are clipped."""

    @property
    def overhead_bytes(self) -> int:
        """Number of bytes that an upload contains in addition to the masked or encrypted update."""

    @property
    def download_bytes(self) -> int:
        """Number of bytes that a client receives in addition to the model."""

    @property
    def cipher_bytes(self) -> int:
        """Number of bytes that a client encrypts or decrypts for one upload."""

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that a client reads and writes in its computations for one upload."""

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes that a client receives for each update in a sum that it helps to unmask, and bytes that it
        sends for each such sum."""


class SecureError(EdgeflError):
    """A message violates the secure-aggregation protocol; the sum is refused and nothing is revealed."""
