"""Pairwise masks for the clients of one round (Bonawitz et al. 2017), with recovery from dropouts.

    1. Each client advertises two public keys. It splits two secrets among all clients by Shamir's scheme: its
       private mask key, and the seed of its own mask. The server relays the encrypted shares.
    2. Each client uploads its weighted update plus its own mask, plus or minus one mask for each other
       client.
    3. The server sends each client whose upload arrived the list of all such clients. Each of them reveals
       shares of the seeds of the listed clients, and shares of the mask keys of all other clients.
    4. The server recovers the masks from these shares and removes them from the sum.

No client reveals shares of both secrets of another client, and more than half of the clients are needed to
recover one secret. So an update stays hidden even if the server sends different lists to different clients,
unless at least 2 · threshold − n of the n clients help the server.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import PRIME, Words
from edgefl.secure import ID_BYTES, SecureError, masks
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.keys import KEY_BYTES, TAG_BYTES, KeyPair

MODULUS = 2**521 - 1
"""Prime modulus of Shamir's scheme. It is larger than every secret of 32 bytes."""
_SHARE_BYTES = 66


def _random(_: int) -> int:
    return secrets.randbelow(MODULUS)


def split(
    secret: bytes, points: Iterable[int], threshold: int, term: Callable[[int], int] = _random
) -> dict[int, bytes]:
    """Split a secret of 32 bytes into one share for each point; ``threshold`` shares recover the secret
    (Shamir 1979).

    The ``points`` are integers above 0. ``term(i)`` returns coefficient i of the polynomial, which must be a
    uniformly random number below `MODULUS`.

    >>> shares = split(bytes(range(32)), [1, 2, 3], threshold=2)
    >>> join({3: shares[3], 1: shares[1]}, 2) == bytes(range(32))
    True
    """
    terms = [int.from_bytes(secret), *map(term, range(1, threshold))]
    shares = {}
    for x in points:
        value = 0
        for coefficient in reversed(terms):
            value = (value * x + coefficient) % MODULUS
        shares[x] = value.to_bytes(_SHARE_BYTES)
    return shares


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recover a secret from at least ``threshold`` shares. Raises `SecureError` if there are fewer shares or
    if the shares contradict each other."""
    if len(shares) < threshold:
        raise SecureError(f"{len(shares)} shares of a secret arrived; {threshold} are needed")
    points = tuple(sorted(shares))
    used, values = points[:threshold], {x: int.from_bytes(share) for x, share in shares.items()}
    for extra in points[threshold:]:
        if _value(used, values, extra) != values[extra]:
            raise SecureError("the shares of a secret contradict each other")
    secret = _value(used, values, 0)
    if secret >= 1 << 256:
        raise SecureError("the shares of a secret contradict each other")
    return secret.to_bytes(32)


def _value(points: tuple[int, ...], values: Mapping[int, int], at: int) -> int:
    """Return the value at the point ``at`` of the polynomial with the given ``values`` at ``points``."""
    factors = _factors(points, at)
    return sum(values[x] * factor for x, factor in zip(points, factors, strict=True)) % MODULUS


@lru_cache(maxsize=1024)
def _factors(points: tuple[int, ...], at: int) -> list[int]:
    """Return the Lagrange factors with which a polynomial's values at ``points`` add up to its value at
    ``at``."""
    factors = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * (at - other) % MODULUS, below * (x - other) % MODULUS
        factors.append(above * pow(below, -1, MODULUS) % MODULUS)
    return factors


class Advert(msgspec.Struct, frozen=True, array_like=True):
    """The two public keys of a client: one for pairwise masks, and one for encrypting messages."""

    client: int
    mask_key: bytes
    seal_key: bytes


class Shares(msgspec.Struct, frozen=True, array_like=True):
    """The two shares that one client sends to another: a share of its mask key, and a share of the seed of
    its own mask."""

    key: bytes
    seed: bytes


class Revealed(msgspec.Struct, frozen=True, array_like=True):
    """The shares that a client reveals: shares of the seeds of the clients that uploaded, and shares of the
    mask keys of the clients that did not upload."""

    client: int
    seeds: dict[int, bytes]
    keys: dict[int, bytes]


SEALED_BYTES = len(msgspec.msgpack.encode(Shares(bytes(_SHARE_BYTES), bytes(_SHARE_BYTES)))) + TAG_BYTES
"""Length of the encrypted shares that one client sends to another, in bytes."""
ADVERT_BYTES = 2 * KEY_BYTES


def least_threshold(clients: int) -> int:
    """Return the minimum threshold of a round: more than half of its clients, and at least 2."""
    return max(2, clients // 2 + 1)


class RoundRules(msgspec.Struct, frozen=True):
    """Parameters that must be the same for all clients of a round. Each round needs a new ``name``."""

    name: bytes
    size: int
    clients: frozenset[int]
    threshold: int
    """Minimum number of clients that must upload, and minimum number that must reveal shares."""
    fixed: FixedPoint

    def __post_init__(self) -> None:
        need = least_threshold(len(self.clients))
        if not need <= self.threshold <= len(self.clients):
            allowed = f"{need} to {len(self.clients)}, more than half of the clients"
            raise ValueError(f"threshold must be {allowed} (got {self.threshold})")
        if any(client < 1 for client in self.clients):
            raise ValueError("clients must be numbered from 1")


class PairRules(msgspec.Struct, frozen=True, tag="pairwise"):
    """Parameters that are the same in all rounds of a run."""

    size: int
    """Number of elements of an update."""
    members: int
    """Maximum number of clients in a round."""
    fixed: FixedPoint
    resolution: int
    """Integer that represents the largest weight in the fleet. Other weights are scaled by the same factor
    and rounded to integers."""
    least_clients: int
    """Minimum number of clients in a sum. A sum must also include more than half of the clients of the
    round."""

    def of_round(self, name: bytes, clients: frozenset[int]) -> RoundRules:
        """Return the parameters of one round. Raises `SecureError` if it has too few or too many clients."""
        threshold = max(self.least_clients, least_threshold(len(clients)))
        if not threshold <= len(clients) <= self.members:
            allowed = f"{threshold} to {self.members} are allowed"
            raise SecureError(f"the round has {len(clients)} clients; {allowed}")
        return RoundRules(name, self.size, clients, threshold, self.fixed)

    @property
    def header_bytes(self) -> int:
        """Length in bytes of the header of an upload, which contains the id, the round, the weight and the
        clients of the round. The client's public keys follow the header."""
        return ID_BYTES + 12 + 4 * self.members

    @property
    def overhead_bytes(self) -> int:
        """Number of bytes that an upload contains in addition to the masked update: the header, the client's
        public keys and the encrypted shares."""
        return self.header_bytes + ADVERT_BYTES + self.members * SEALED_BYTES

    @property
    def download_bytes(self) -> int:
        """Number of bytes that a client receives in addition to the model: the public keys and the encrypted
        shares of the other clients."""
        return (self.members - 1) * (ADVERT_BYTES + SEALED_BYTES)

    @property
    def cipher_bytes(self) -> int:
        """Number of bytes that a client encrypts or decrypts for one upload: the key streams of the masks,
        and the shares."""
        return 4 * self.size * self.members + 2 * (self.members - 1) * SEALED_BYTES

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that a client reads and writes to encode one upload and to add the masks to it."""
        return 12 * self.size * (1 + self.members)

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes that a client receives for each update in a sum (the id of the update's client), and bytes
        that it sends for each sum (shares)."""
        return 4, _SHARE_BYTES * self.members

    @property
    def step(self) -> float:
        """The elements of an update are rounded to multiples of this number."""
        return self.fixed.step

    @property
    def clip(self) -> float:
        """Maximum magnitude of an element of an update; larger elements are clipped."""
        return self.fixed.clip


class Participant:
    """A client's part in the protocol of one round.

    All secrets of the client in this round are derived from ``secret``, which is 32 random bytes by default.
    A restarted client can therefore repeat its messages. ``content`` is a digest of the update. The client's
    own mask depends on this digest, so two different updates never have the same mask.
    """

    def __init__(
        self, client: int, rules: RoundRules, secret: bytes | None = None, content: bytes = b""
    ) -> None:
        if client not in rules.clients:
            raise SecureError(f"client {client} is not in this round")
        self.client, self._rules = client, rules
        self.clipped = 0
        """Number of elements of the masked update that were clipped."""
        self._secret, self._content = secret or secrets.token_bytes(KEY_BYTES), content
        self._mask_keys, self._seal_keys = (
            KeyPair(self._derived(name)[:KEY_BYTES]) for name in (b"mask key", b"seal key")
        )
        self._seed = self._derived(b"seed" + content)[: masks.SEED_BYTES]
        self._peers: dict[int, Advert] = {}
        self._held: dict[int, Shares] = {}
        self._masked = self._revealed = False

    def _derived(self, purpose: bytes) -> bytes:
        """Derive 64 secret bytes for a purpose."""
        return hashlib.blake2b(self._rules.name + b" " + purpose, key=self._secret).digest()

    def _term(self, purpose: bytes, number: int) -> int:
        """Derive a polynomial coefficient from 128 secret bytes, which are enough to make the coefficient
        almost exactly uniform below `MODULUS`."""
        pieces = (self._derived(b"%d %d " % (number, half) + purpose) for half in (0, 1))
        return int.from_bytes(b"".join(pieces)) % MODULUS

    def advert(self) -> Advert:
        return Advert(self.client, self._mask_keys.public, self._seal_keys.public)

    def meet(self, adverts: Iterable[Advert]) -> dict[int, Shares]:
        """Store the public keys of all clients, and the shares that this client keeps for itself; return
        the shares for the other clients."""
        peers, rules = {advert.client: advert for advert in adverts}, self._rules
        if peers.keys() != rules.clients:
            sent, ours = len(peers), len(rules.clients)
            raise SecureError(f"the clients that sent keys ({sent}) are not those of the round ({ours})")
        keys = {key for advert in peers.values() for key in (advert.mask_key, advert.seal_key)}
        if len(keys) < 2 * len(peers) or peers[self.client] != self.advert():
            raise SecureError("the public keys of a client were replaced or copied")
        self._peers = peers
        secrets_of = {b"key share": self._mask_keys.private, b"seed share" + self._content: self._seed}
        key, seed = (
            split(secret, rules.clients, rules.threshold, partial(self._term, purpose))
            for purpose, secret in secrets_of.items()
        )
        mine = {peer: Shares(key[peer], seed[peer]) for peer in rules.clients}
        self._held[self.client] = mine.pop(self.client)
        return mine

    def shares(self, adverts: Iterable[Advert]) -> dict[int, bytes]:
        """Return the encrypted shares for each other client, given the public keys of all clients."""
        keys, purpose, encode = self._seal_keys, self._purpose(self._content), msgspec.msgpack.encode
        mine = self.meet(adverts)
        return {peer: keys.seal(self._peers[peer].seal_key, purpose, encode(mine[peer])) for peer in mine}

    def _purpose(self, content: bytes) -> bytes:
        return self._rules.name + b" " + content

    def receive(self, sender: int, sealed: bytes, content: bytes = b"") -> None:
        """Decrypt and store the shares from the client ``sender``; ``content`` is the digest of that client's
        update. Raises `SecureError` if the shares were altered, not expected or not valid."""
        if sender not in self._peers or sender in self._held:
            raise SecureError(f"unexpected shares from client {sender}")
        opened = self._seal_keys.open(self._peers[sender].seal_key, self._purpose(content), sealed)
        try:
            self._held[sender] = msgspec.msgpack.decode(opened, type=Shares)
        except msgspec.DecodeError as error:
            raise SecureError(f"the shares from client {sender} are not valid: {error}") from None

    def mask(self, update: Floats, weight: int) -> Words:
        """Return the weighted update plus all masks. This may be called only once per round."""
        rules = self._rules
        if self._masked:
            raise SecureError("this client has already uploaded in this round; a mask is used only once")
        if self._held.keys() != rules.clients:
            raise SecureError(f"shares of {len(self._held)} clients arrived; {len(rules.clients)} are needed")
        self._masked = True
        return self.masked(update, weight)

    def masked(self, update: Floats, weight: int) -> Words:
        """Return the weighted update plus all masks, even if shares of other clients have not arrived yet."""
        rules = self._rules
        if not 1 <= weight <= rules.fixed.total_weight:
            raise SecureError(f"the weight is {weight}; 1 to {rules.fixed.total_weight} is allowed")
        if not np.isfinite(kernels.sq_norm(update)):
            raise SecureError("the update is not finite")
        plain = np.zeros(rules.size, np.uint32)
        self.clipped = rules.fixed.encode(plain, update, plain)
        pairs = (
            (_pair_mask(self._mask_keys, self._peers[peer].mask_key, rules), _sign(self.client, peer))
            for peer in sorted(rules.clients - {self.client})
        )
        own = (masks.expand(self._seed, rules.size), 1)
        return _added([plain], [weight], chain((own,), pairs))

    def reveal(self, arrived: frozenset[int]) -> Revealed:
        """Return the shares that the server needs to remove the masks from the sum of the updates of the
        clients in ``arrived``.

        This may be called only once per round.
        """
        rules = self._rules
        if self._revealed:
            raise SecureError("this client has already revealed its shares of this round")
        if not arrived <= rules.clients or self.client not in arrived:
            raise SecureError("the list of clients that uploaded does not match this round")
        if len(arrived) < rules.threshold:
            raise SecureError(f"{len(arrived)} clients uploaded; at least {rules.threshold} are required")
        self._revealed = True
        seeds = {peer: self._held[peer].seed for peer in sorted(arrived)}
        return Revealed(
            self.client, seeds, {peer: self._held[peer].key for peer in sorted(rules.clients - arrived)}
        )


def _sign(client: int, peer: int) -> int:
    return 1 if client < peer else PRIME - 1


def _pair_mask(keys: KeyPair, other: bytes, rules: RoundRules) -> Words:
    return masks.expand(keys.secret(other, b"pairwise mask " + rules.name), rules.size)


def _added(vectors: Sequence[Words], weights: Sequence[int], terms: Iterable[tuple[Words, int]]) -> Words:
    """Return the weighted sum of ``vectors`` plus the masks in ``terms``, each multiplied by its factor.

    Only one mask is in memory at a time.
    """
    total, spare = np.empty_like(vectors[0]), np.empty_like(vectors[0])
    kernels.field_sum(total, vectors, weights)
    for mask, factor in terms:
        kernels.field_sum(spare, [total, mask], [1, factor])
        total, spare = spare, total
    return total


def unmasked(
    rules: RoundRules,
    adverts: Mapping[int, Advert],
    masked: Mapping[int, Words],
    weights: Mapping[int, int],
    revealed: Sequence[Revealed],
) -> Floats:
    """Return the weighted sum of the updates of the clients in ``masked``, without the masks.

    Raises `SecureError` if fewer clients than the threshold uploaded or revealed shares, if shares contradict
    each other, or if the masks do not cancel.
    """
    if len({one.client for one in revealed}) < len(revealed):
        raise SecureError("a client revealed its shares twice")
    if len(masked) < rules.threshold:
        raise SecureError(f"{len(masked)} clients uploaded; at least {rules.threshold} are required")
    terms = _terms(rules, adverts, masked, revealed)
    total, out = _added(list(masked.values()), [1] * len(masked), terms), np.empty(rules.size, np.float32)
    rules.fixed.decode(out, total, np.zeros_like(total), [weights[client] for client in masked])
    return out


def _terms(
    rules: RoundRules,
    adverts: Mapping[int, Advert],
    masked: Mapping[int, Words],
    revealed: Sequence[Revealed],
) -> Iterator[tuple[Words, int]]:
    """Yield each mask that remains in the sum of the ``masked`` updates, with the factor that removes it."""
    for client in masked:
        shares = {one.client: one.seeds[client] for one in revealed if client in one.seeds}
        yield masks.expand(join(shares, rules.threshold), rules.size), PRIME - 1
    for missing in sorted(rules.clients - masked.keys()):
        shares = {one.client: one.keys[missing] for one in revealed if missing in one.keys}
        keys = KeyPair(join(shares, rules.threshold))
        if keys.public != adverts[missing].mask_key:
            raise SecureError(f"the revealed key of client {missing} is not the one that it advertised")
        for client in masked:  # add the mask that the missing client would have added
            yield _pair_mask(keys, adverts[client].mask_key, rules), _sign(missing, client)
