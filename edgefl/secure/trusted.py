"""A trusted aggregator: a separate process that decrypts updates and releases only weighted sums.

It replaces the trusted execution environment that the FedBuff paper proposes. Clients encrypt their updates
with the aggregator's public key; the server stores and relays ciphertext. The aggregator decrypts the updates
of a sum, checks that the request obeys the rules, and returns the weighted sum Σ w_k Δ_k. The result is
bit-identical to the sum of unencrypted updates.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.secure import ID_BYTES, SecureError, digest_of
from edgefl.secure.keys import TAG_BYTES, KeyPair


class TrustedRules(msgspec.Struct, frozen=True, tag="trusted"):
    """Parameters of the protocol. They must be the same for the clients, the aggregator and the server of a
    run. `SecureRules` explains the sizes and costs."""

    size: int
    """Number of elements of an update."""
    least_clients: int
    """Minimum number of clients in a sum. Only clients whose weight is at least the largest weight divided by
    ``resolution`` are counted."""
    resolution: int = 256

    overhead_bytes: ClassVar[int] = ID_BYTES + TAG_BYTES
    download_bytes: ClassVar[int] = 0
    moved_bytes: ClassVar[int] = 0
    held_bytes: ClassVar[tuple[int, int]] = (0, 0)
    step: ClassVar[float] = 0.0
    """0, because the elements of an update are not rounded."""
    clip: ClassVar[float] = 3e38
    """About the largest float32 number, so nothing is clipped."""

    @property
    def cipher_bytes(self) -> int:
        """Number of bytes that a client encrypts for one upload."""
        return 4 * self.size


class SealedUpdate(msgspec.Struct, frozen=True):
    """An encrypted update with its client, its id and its weight in the sum."""

    client: int
    name: bytes
    weight: float
    sealed: bytes


def seal(keys: KeyPair, aggregator: bytes, client: int, trip: int, update: Floats) -> tuple[bytes, bytes]:
    """Encrypt the update of a trip with the ``aggregator``'s public key; return its id and its ciphertext.

    The id is derived from the client's private key, the trip and the content of the update, and the
    encryption key depends on the id. So a repeated trip sends the same bytes, and no key encrypts two
    messages. Raises `SecureError` if the update contains a number that is not finite.
    """
    if not np.isfinite(kernels.sq_norm(update)):
        raise SecureError("the update is not finite")
    content = hashlib.blake2b(b"%d %d " % (client, trip), key=keys.private, digest_size=ID_BYTES)
    data = np.ascontiguousarray(update).data
    content.update(data)
    name = content.digest()
    return name, keys.seal(aggregator, _purpose(client, name), data.cast("B"))


def _purpose(client: int, name: bytes) -> bytes:
    return b"update %d " % client + name


class TrustedAggregator:
    """Decrypts and sums updates. ``clients`` returns a client's public key, or None if the client is unknown.

    ``used`` maps the id of each summed update to the digest of its sum. Each sum adds entries to ``used``.
    """

    def __init__(
        self,
        keys: KeyPair,
        clients: Callable[[int], bytes | None],
        rules: TrustedRules,
        used: dict[bytes, bytes] | None = None,
    ) -> None:
        self._keys, self._clients, self._rules = keys, clients, rules
        self.used: dict[bytes, bytes] = {} if used is None else used

    def sum(self, updates: Sequence[SealedUpdate]) -> Floats:
        """Return the weighted sum Σ w_k Δ_k of the updates in float32. Raises `SecureError` if the request is
        refused."""
        names = [one.name for one in updates]
        if len(set(names)) < len(names):
            raise SecureError("one update is in the sum twice")
        for one in updates:
            if not (math.isfinite(one.weight) and one.weight > 0):
                raise SecureError(
                    f"client {one.client} has weight {one.weight}; it must be finite and above 0"
                )
        least = max((one.weight for one in updates), default=0.0) / self._rules.resolution
        clients = len({one.client for one in updates if one.weight >= least})
        if clients < (required := self._rules.least_clients):
            raise SecureError(
                f"the sum includes updates from {clients} clients; at least {required} are required"
            )
        digest = digest_of(b"%d " % one.client + struct.pack("<d", one.weight) + one.name for one in updates)
        for one in updates:
            if self.used.get(one.name, digest) != digest:
                raise SecureError(f"the update of client {one.client} was used in another sum")
        opened = [self._open(one) for one in updates]
        out = np.empty(self._rules.size, np.float32)
        kernels.weighted_sum(out, None, opened, [one.weight for one in updates])
        self.used.update(dict.fromkeys(names, digest))
        return out

    def _open(self, one: SealedUpdate) -> Floats:
        key = self._clients(one.client)
        if key is None:
            raise SecureError(f"client {one.client} is unknown")
        opened = self._keys.open(key, _purpose(one.client, one.name), one.sealed)
        if len(opened) != 4 * self._rules.size:
            raise SecureError(f"the update of client {one.client} has {len(opened)} bytes")
        return np.frombuffer(opened, np.float32)
