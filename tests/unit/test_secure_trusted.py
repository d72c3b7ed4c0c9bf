"""Tests of the trusted aggregator: it returns plain sums of sealed updates, and refuses each misuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl import kernels

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.secure import SecureError
from edgefl.secure.keys import KeyPair
from edgefl.secure.trusted import SealedUpdate, TrustedAggregator, TrustedRules, seal

SIZE = 501


class World:
    def __init__(self, count: int = 4) -> None:
        self.keys, self.own = [KeyPair.new() for _ in range(count)], KeyPair.new()
        publics = {client: keys.public for client, keys in enumerate(self.keys)}
        self.aggregator = TrustedAggregator(self.own, publics.get, TrustedRules(SIZE, least_clients=3))
        rng = np.random.default_rng(count)
        self.updates = [rng.standard_normal(SIZE, dtype=np.float32) for _ in self.keys]
        self.weights = [0.1 * (k + 1) for k in range(count)]
        pairs = enumerate(zip(self.keys, self.updates, strict=True))
        sealed = [seal(keys, self.own.public, client, 0, update) for client, (keys, update) in pairs]
        parts = zip(sealed, self.weights, strict=True)
        self.sealed = [SealedUpdate(c, name, w, box) for c, ((name, box), w) in enumerate(parts)]

    def refused(self, why: str, **changes: Any) -> None:
        """Check that the sum is refused if the last update has these changes."""
        changed = [*self.sealed[:-1], msgspec.structs.replace(self.sealed[-1], **changes)]
        with pytest.raises(SecureError, match=why):
            self.aggregator.sum(changed)


def test_a_sum_has_the_bits_of_the_plain_sum() -> None:
    world, plain = World(), np.empty(SIZE, np.float32)
    kernels.weighted_sum(plain, None, world.updates, world.weights)
    assert world.aggregator.sum(world.sealed).tobytes() == plain.tobytes()
    assert world.aggregator.sum(world.sealed).tobytes() == plain.tobytes()  # a repeated request


def test_a_sealed_update_is_encrypted_and_has_the_same_bytes_only_for_the_same_trip() -> None:
    world = World()
    keys, update = world.keys[0], world.updates[0]
    first = world.sealed[0]
    assert update[:8].tobytes() not in first.sealed
    assert seal(keys, world.own.public, 0, 0, update) == (first.name, first.sealed)
    other = seal(keys, world.own.public, 0, 1, update)
    assert other[0] != first.name
    assert other[1][:64] != first.sealed[:64]


def test_altered_and_exchanged_updates_and_unknown_clients_are_refused() -> None:
    world = World()
    box = world.sealed[-1].sealed
    world.refused("altered", sealed=bytes([box[0] ^ 1]) + box[1:])
    world.refused("altered", sealed=world.sealed[0].sealed)
    world.refused("altered", name=bytes(16))
    world.refused("client 9 is unknown", client=9)


def test_an_update_that_is_in_two_sums_is_refused() -> None:
    world = World()
    world.refused("one update is in the sum twice", name=world.sealed[0].name)
    world.aggregator.sum(world.sealed)
    world.refused("was used in another sum", weight=0.2)
    with pytest.raises(SecureError, match="was used in another sum"):
        world.aggregator.sum(world.sealed[:3])


def test_sums_of_few_clients_and_weights_that_single_out_a_client_are_refused() -> None:
    world = World()
    with pytest.raises(SecureError, match="updates from 2 clients; at least 3 are required"):
        world.aggregator.sum(world.sealed[:2])
    light = [msgspec.structs.replace(one, weight=1e-6 * one.weight) for one in world.sealed[2:]]
    with pytest.raises(SecureError, match="updates from 2 clients; at least 3 are required"):
        world.aggregator.sum([*world.sealed[:2], *light])
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        world.refused("it must be finite and above 0", weight=weight)


def test_updates_of_wrong_size_or_with_nan_are_refused() -> None:
    world = World()
    name, box = seal(world.keys[3], world.own.public, 3, 5, np.ones(3, np.float32))
    world.refused("has 12 bytes", name=name, sealed=box)
    with pytest.raises(SecureError, match="not finite"):
        seal(world.keys[3], world.own.public, 3, 5, np.full(3, np.nan, np.float32))
