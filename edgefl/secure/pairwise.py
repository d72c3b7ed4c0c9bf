"""Pairwise masks for the clients of one round (Bonawitz et al. 2017), with recovery from dropouts.

    1. each client advertises two public keys, and splits two secrets among all clients: its mask key and the
       seed of its own mask (Shamir's scheme; the shares are sealed and relayed by the server)
    2. each client uploads its weighted update plus its own mask, plus or minus one mask per other client
    3. the server names the clients whose upload arrived; these reveal shares of the seeds of the clients that
       arrived, and of the mask keys of those that did not
    4. the server removes the masks from the sum

No client reveals shares of both secrets of another, and more than half of the clients are needed for one
secret, so an update stays hidden even if the server names different clients to different clients.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import PRIME, Words
from edgefl.secure import SecureError, masks
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.keys import KeyPair

MODULUS = 2**521 - 1
"""Prime of Shamir's scheme, above all 32-byte secrets."""
_SHARE_BYTES = 66


def split(secret: bytes, points: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Shares of 32 secret bytes at ``points`` above 0, of which any ``threshold`` recover it (Shamir 1979).

    >>> shares = split(bytes(range(32)), [1, 2, 3], threshold=2)
    >>> join({3: shares[3], 1: shares[1]}, 2) == bytes(range(32))
    True
    """
    terms = [int.from_bytes(secret), *(secrets.randbelow(MODULUS) for _ in range(threshold - 1))]
    values = {x: sum(c * pow(x, i, MODULUS) for i, c in enumerate(terms)) % MODULUS for x in points}
    return {x: value.to_bytes(_SHARE_BYTES) for x, value in values.items()}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of ``threshold`` or more shares. `SecureError` if there are fewer or they contradict."""
    if len(shares) < threshold:
        raise SecureError(f"{len(shares)} shares of a secret arrived; {threshold} are needed")
    points = sorted(shares)
    used, values = points[:threshold], {x: int.from_bytes(share) for x, share in shares.items()}
    for extra in points[threshold:]:
        if _value(used, values, extra) != values[extra]:
            raise SecureError("the shares of a secret contradict each other")
    secret = _value(used, values, 0)
    if secret >= 1 << 256:
        raise SecureError("the shares of a secret contradict each other")
    return secret.to_bytes(32)


def _value(points: Sequence[int], values: Mapping[int, int], at: int) -> int:
    """Value at ``at`` of the polynomial through the points."""
    total = 0
    for x in points:
        term = values[x]
        for other in points:
            if other != x:
                term = term * (at - other) * pow(x - other, -1, MODULUS) % MODULUS
        total += term
    return total % MODULUS


class Advert(msgspec.Struct, frozen=True, array_like=True):
    """A client's public keys: for pairwise masks, and for sealing messages."""

    client: int
    mask_key: bytes
    seal_key: bytes


class Shares(msgspec.Struct, frozen=True, array_like=True):
    """One client's shares for another: of its mask key, and of the seed of its own mask."""

    key: bytes
    seed: bytes


class Revealed(msgspec.Struct, frozen=True, array_like=True):
    """A client's answer: shares of the seeds of arrived clients, and of the keys of missing ones."""

    client: int
    seeds: dict[int, bytes]
    keys: dict[int, bytes]


class RoundRules(msgspec.Struct, frozen=True):
    """Parameters that the clients of a round must share. Each round needs a new ``name``."""

    name: bytes
    size: int
    clients: frozenset[int]
    threshold: int
    """Minimum number of clients whose upload arrives and who reveal shares."""
    fixed: FixedPoint

    def __post_init__(self) -> None:
        need = max(2, len(self.clients) // 2 + 1)
        if not need <= self.threshold <= len(self.clients):
            allowed = f"{need} to {len(self.clients)}, more than half of the clients"
            raise ValueError(f"threshold must be {allowed} (got {self.threshold})")
        if any(client < 1 for client in self.clients):
            raise ValueError("clients must be numbered from 1")


class Participant:
    """One client in one round."""

    def __init__(self, client: int, rules: RoundRules) -> None:
        if client not in rules.clients:
            raise SecureError(f"client {client} is not in this round")
        self.client, self._rules = client, rules
        self._mask_keys, self._seal_keys = KeyPair.new(), KeyPair.new()
        self._seed = masks.new_seed()
        self._peers: dict[int, Advert] = {}
        self._held: dict[int, Shares] = {}
        self._masked = self._revealed = False

    def advert(self) -> Advert:
        return Advert(self.client, self._mask_keys.public, self._seal_keys.public)

    def shares(self, adverts: Iterable[Advert]) -> dict[int, bytes]:
        """Sealed shares for each other client, from the adverts of all."""
        peers = {advert.client: advert for advert in adverts}
        if peers.keys() != self._rules.clients:
            raise SecureError(f"adverts of {len(peers)} clients; the round has {len(self._rules.clients)}")
        keys = {key for advert in peers.values() for key in (advert.mask_key, advert.seal_key)}
        if len(keys) < 2 * len(peers) or peers[self.client] != self.advert():
            raise SecureError("an advert was replaced or copied")
        self._peers, rules = peers, self._rules
        key = split(self._mask_keys.private, rules.clients, rules.threshold)
        seed = split(self._seed, rules.clients, rules.threshold)
        mine = {peer: Shares(key[peer], seed[peer]) for peer in rules.clients}
        self._held[self.client] = mine.pop(self.client)
        return {peer: self._seal(peer, msgspec.msgpack.encode(shares)) for peer, shares in mine.items()}

    def _seal(self, peer: int, message: bytes) -> bytes:
        return self._seal_keys.seal(self._peers[peer].seal_key, self._rules.name, message)

    def receive(self, sender: int, sealed: bytes) -> None:
        """Store the shares of another client. `SecureError` if they were altered."""
        if sender not in self._peers or sender in self._held:
            raise SecureError(f"unexpected shares of client {sender}")
        opened = self._seal_keys.open(self._peers[sender].seal_key, self._rules.name, sealed)
        self._held[sender] = msgspec.msgpack.decode(opened, type=Shares)

    def mask(self, update: Floats, weight: int) -> Words:
        """The masked, weighted update. The client takes part once per round."""
        rules = self._rules
        if self._masked:
            raise SecureError("this client has already uploaded in this round: a mask is used once")
        if self._held.keys() != rules.clients:
            raise SecureError(f"shares of {len(self._held)} clients arrived; {len(rules.clients)} are needed")
        if not 1 <= weight <= rules.fixed.total_weight:
            raise SecureError(f"the weight is {weight}; 1 to {rules.fixed.total_weight} is allowed")
        if not np.isfinite(kernels.sq_norm(update)):
            raise SecureError("the update is not finite")
        self._masked = True
        plain, out = np.zeros(rules.size, np.uint32), np.empty(rules.size, np.uint32)
        rules.fixed.encode(plain, update, plain)
        vectors, weights = [plain, masks.expand(self._seed, rules.size)], [weight, 1]
        for peer in sorted(rules.clients - {self.client}):
            vectors.append(_pair_mask(self._mask_keys, self._peers[peer].mask_key, rules))
            weights.append(_sign(self.client, peer))
        kernels.field_sum(out, vectors, weights)
        return out

    def reveal(self, arrived: frozenset[int]) -> Revealed:
        """Shares that remove the masks of the clients that arrived. A client answers once per round."""
        rules = self._rules
        if self._revealed:
            raise SecureError("this client has already revealed its shares of this round")
        if not arrived <= rules.clients or self.client not in arrived:
            raise SecureError("the clients that arrived are not those of this round")
        if len(arrived) < rules.threshold:
            raise SecureError(f"{len(arrived)} clients arrived; {rules.threshold} are required")
        self._revealed = True
        seeds = {peer: self._held[peer].seed for peer in sorted(arrived)}
        return Revealed(
            self.client, seeds, {peer: self._held[peer].key for peer in sorted(rules.clients - arrived)}
        )


def _sign(client: int, peer: int) -> int:
    return 1 if client < peer else PRIME - 1


def _pair_mask(keys: KeyPair, other: bytes, rules: RoundRules) -> Words:
    return masks.expand(keys.secret(other, b"pairwise mask " + rules.name), rules.size)


def unmasked(
    rules: RoundRules,
    adverts: Mapping[int, Advert],
    masked: Mapping[int, Words],
    weights: Mapping[int, int],
    revealed: Sequence[Revealed],
) -> Floats:
    """The weighted sum of the updates of the clients in ``masked``.

    Raises `SecureError` if fewer than the threshold uploaded or revealed shares, if shares contradict each
    other, or if the masks do not cancel.
    """
    if len({one.client for one in revealed}) < len(revealed):
        raise SecureError("a client revealed its shares twice")
    if len(masked) < rules.threshold:
        raise SecureError(f"{len(masked)} clients arrived; {rules.threshold} are required")
    vectors, signs = list(masked.values()), [1] * len(masked)
    for client in masked:
        shares = {one.client: one.seeds[client] for one in revealed if client in one.seeds}
        vectors.append(masks.expand(join(shares, rules.threshold), rules.size))
        signs.append(PRIME - 1)
    for missing in sorted(rules.clients - masked.keys()):
        shares = {one.client: one.keys[missing] for one in revealed if missing in one.keys}
        keys = KeyPair(join(shares, rules.threshold))
        if keys.public != adverts[missing].mask_key:
            raise SecureError(f"the revealed key of client {missing} is not the one that it advertised")
        for client in masked:  # add what the missing client would have added
            vectors.append(_pair_mask(keys, adverts[client].mask_key, rules))
            signs.append(_sign(missing, client))
    total, out = np.empty(rules.size, np.uint32), np.empty(rules.size, np.float32)
    kernels.field_sum(total, vectors, signs)
    rules.fixed.decode(out, total, np.zeros_like(total), [weights[client] for client in masked])
    return out
