"""Tests of pairwise masks for rounds: sums are exact despite dropouts, and each misuse is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.kernels.field import Words

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.secure import SecureError
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.pairwise import Advert, Participant, Revealed, RoundRules, join, split, unmasked

SIZE = 333


class Round:
    """Clients 1 … count, which have exchanged their shares."""

    def __init__(self, count: int = 5, threshold: int = 3) -> None:
        clients = frozenset(range(1, count + 1))
        self.rules = RoundRules(b"round 1", SIZE, clients, threshold, FixedPoint(4.0, 100 * count))
        self.clients = {client: Participant(client, self.rules) for client in clients}
        self.adverts = {client: one.advert() for client, one in self.clients.items()}
        self.sealed = {client: one.shares(self.adverts.values()) for client, one in self.clients.items()}
        for sender, shares in self.sealed.items():
            for receiver, sealed in shares.items():
                self.clients[receiver].receive(sender, sealed)
        rng = np.random.default_rng(count)
        self.updates = {client: rng.standard_normal(SIZE).astype(np.float32) for client in clients}
        self.weights = {client: 10 * client % 97 + 1 for client in clients}

    def masked(self, *lost: int) -> dict[int, Words]:
        rest = sorted(self.rules.clients - set(lost))
        return {c: self.clients[c].mask(self.updates[c], self.weights[c]) for c in rest}

    def sum(self, masked: dict[int, Words], revealed: list[Revealed]) -> np.ndarray:
        return unmasked(self.rules, self.adverts, masked, self.weights, revealed)

    def revealed(self, masked: dict[int, Words]) -> list[Revealed]:
        return [self.clients[client].reveal(frozenset(masked)) for client in sorted(masked)]


@pytest.mark.parametrize("lost", [(), (2,), (1, 5), (3, 4, 9)])
def test_a_masked_sum_is_the_plain_sum_to_the_step(lost: tuple[int, ...]) -> None:
    world = Round(10, 7)
    masked = world.masked(*lost)
    made = world.sum(masked, world.revealed(masked))
    plain = np.sum([world.weights[c] * world.updates[c].astype(np.float64) for c in masked], axis=0)
    allowed = world.rules.fixed.step * sum(world.weights[c] for c in masked) / 2 + 2.0**-23 * np.abs(plain)
    assert (np.abs(made - plain) <= allowed).all()


def test_too_few_uploads_or_reveals_are_refused() -> None:
    world = Round()
    masked = world.masked(1, 2, 3)
    with pytest.raises(SecureError, match="2 clients uploaded; at least 3 are required"):
        world.clients[4].reveal(frozenset(masked))
    with pytest.raises(SecureError, match="2 clients uploaded; at least 3 are required"):
        world.sum(masked, [])
    world = Round()
    masked = world.masked()
    with pytest.raises(SecureError, match="2 shares of a secret arrived; 3 are needed"):
        world.sum(masked, world.revealed(masked)[:2])


def test_a_client_uploads_once_and_reveals_once() -> None:
    """A second reveal could give the server both secrets of another client."""
    world = Round()
    masked = world.masked()
    with pytest.raises(SecureError, match="already uploaded in this round"):
        world.clients[1].mask(world.updates[1], 1)
    first = world.clients[1].reveal(frozenset(masked))
    assert not first.keys
    with pytest.raises(SecureError, match="already revealed"):
        world.clients[1].reveal(frozenset(masked) - {2})


def test_altered_replayed_and_unexpected_shares_are_refused() -> None:
    world = Round()
    fresh = Participant(1, world.rules)
    with pytest.raises(SecureError, match="unexpected shares from client 2"):
        fresh.receive(2, world.sealed[2][1])
    adverts = world.adverts | {1: fresh.advert()}
    fresh.shares(adverts.values())
    with pytest.raises(SecureError, match="altered, or has another sender"):
        fresh.receive(2, world.sealed[2][1])  # sealed for the keys of another round
    rubbish = world.clients[2]._seal_keys.seal(fresh.advert().seal_key, b"round 1 ", b"rubbish")
    with pytest.raises(SecureError, match="the shares from client 2 are not valid"):
        fresh.receive(2, rubbish)
    with pytest.raises(SecureError, match="unexpected shares from client 2"):
        world.clients[1].receive(2, world.sealed[2][1])


def test_replaced_copied_and_missing_adverts_are_refused() -> None:
    world = Round()
    fresh = Participant(1, world.rules)
    third = world.adverts[3]
    copied = {1: fresh.advert(), 2: Advert(2, third.mask_key, third.seal_key)}
    for adverts in (world.adverts, world.adverts | copied):
        with pytest.raises(SecureError, match="replaced or copied"):
            fresh.shares(adverts.values())
    with pytest.raises(SecureError, match=r"sent keys \(1\) are not those of the round \(5\)"):
        fresh.shares([fresh.advert()])


def test_a_wrong_share_is_detected() -> None:
    world = Round()
    masked = world.masked(5)
    revealed = world.revealed(masked)
    altered = bytearray(revealed[3].seeds[2])
    altered[20] ^= 1
    revealed[3].seeds[2] = bytes(altered)
    with pytest.raises(SecureError, match="contradict each other"):
        world.sum(masked, revealed)
    world = Round()
    masked = world.masked(5)
    revealed = world.revealed(masked)
    for one in revealed:
        one.keys[5] = one.seeds[1]
    with pytest.raises(SecureError, match="is not the one that it advertised"):
        world.sum(masked, revealed)


def test_thresholds_of_half_or_less_are_refused() -> None:
    for count, threshold in ((5, 2), (4, 2), (5, 6), (1, 1)):
        with pytest.raises(ValueError, match="more than half of the clients"):
            Round(count, threshold)


def test_as_many_shares_as_the_threshold_recover_a_secret() -> None:
    shares = split(b"\xff" * 32, range(1, 6), 3)
    assert join({k: shares[k] for k in (5, 1, 3)}, 3) == b"\xff" * 32
    other = split(bytes(32), range(1, 6), 3)
    with pytest.raises(SecureError, match="contradict"):
        join({1: shares[1], 2: other[2], 3: shares[3]}, 3)
