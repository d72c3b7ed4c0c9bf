"""Secure aggregation: the server learns the weighted sum of K updates and no single update.

    fixed.py      conversion of updates to integers modulo p = 2^32 − 5, and of weights to integers
    masks.py      masks expanded from seeds
    keys.py       key agreement and authenticated encryption between clients
    coding.py     codes that split a mask into N shares, of which T reveal nothing and U recover it
    coded.py      one-time coded masks (LightSecAgg), for buffers of updates of different versions
    trusted.py    a trusted aggregator in a separate process: sealed updates, plain sums
    pairwise.py   pairwise masks (Bonawitz et al.), for rounds

All arithmetic is modulo the prime p, by the kernels of `edgefl.kernels.field`: fixed-point numbers, masks and
the code's shares are elements of one field, so weights multiply updates and shares alike.

References: So et al., *LightSecAgg*, arXiv:2109.14236; So et al., *Secure Aggregation for Buffered
Asynchronous Federated Learning*, arXiv:2110.02177; Bonawitz et al., *Practical Secure Aggregation for
Privacy-Preserving Machine Learning*, CCS 2017, doi:10.1145/3133956.3133982.

``keys.py``, ``masks.py`` and the protocols need the package ``cryptography``: pip install 'edgefl[secure]'.
"""

from __future__ import annotations

from typing import Protocol

from edgefl.errors import EdgeflError

ID_BYTES = 16
"""Bytes of the id of a mask or a sealed update."""
SECRET_FILE = "phones.key"
"""File in a run's folder with the secret of the phones' keys; deleted when the run is done."""
USED_FILE = "phones.used"
"""File in a run's folder that lists used masks. Each line holds a holder, a mask id and the sum's digest."""


class SecureRules(Protocol):
    """Sizes and costs of a protocol; every protocol's rules provide them."""

    @property
    def size(self) -> int:
        """Elements of an update."""

    @property
    def step(self) -> float:
        """Resolution of the encoded elements; 0 if they are not rounded."""

    @property
    def clip(self) -> float:
        """Limit of the magnitude of an element."""

    @property
    def overhead_bytes(self) -> int:
        """Bytes that an upload has in addition to the hidden numbers."""

    @property
    def download_bytes(self) -> int:
        """Bytes that a client receives besides the model."""

    @property
    def cipher_bytes(self) -> int:
        """Bytes that a client encrypts or decrypts per upload."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that a client's arithmetic reads and writes per upload."""

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes that a helper receives for each update of a sum, and bytes that it sends for each sum."""


class SecureError(EdgeflError):
    """A message violates the secure-aggregation protocol; the sum is refused and nothing is revealed."""
