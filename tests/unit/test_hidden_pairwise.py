"""Tests of pairwise masks in one process: sums with dropouts, and misuse that must be refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgefl.core.events import Cohort
from edgefl.experiment import Secure
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fednova import FedNova

pytest.importorskip("cryptography", reason="needs edgefl[secure]")

from edgefl.run.hidden import HiddenSums, Members, Phones, Trip
from edgefl.run.hidden_pairwise import PairWriter, Participants, check_weights, rules_of
from edgefl.run.secure_parties import SumReply
from edgefl.secure import SecureError

SIZE, CLIENTS = 333, 8
COHORT = Cohort(40, (1, 3, 4, 6, 7))
WEIGHTS = {1: 0.5, 3: 0.25, 4: 1.0, 6: 0.125, 7: 0.75}
"""Each client's weight divided by the largest weight in the fleet: exact multiples of 1 / ``resolution``."""


class World:
    """A buffer, clients that write to it, and the process that reveals shares. Client k has slot k."""

    def __init__(self, folder: Path) -> None:
        secure = Secure(kind="pairwise", resolution=64, least_clients=2)
        self.rules = rules_of(secure, FedAvg(cohort=5, redraw=False), SIZE, CLIENTS)
        extra = self.rules.overhead_bytes
        self.buffer = ParameterBuffer.create(Shape(size=SIZE, ring=2, slots=2 * CLIENTS, extra=extra))
        self.phones, self.file = Phones(b"s" * 32, 1, CLIENTS), folder / "used"
        self.writer = PairWriter(self.phones, self.rules)
        rng = np.random.default_rng(7)
        self.updates = {k: rng.uniform(-0.9, 0.9, SIZE).astype(np.float32) for k in range(CLIENTS)}
        self.offline: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """(Re)start the process that reveals shares. It reads from its file which sums it has revealed."""
        self.parties = Participants(self.phones, self.rules, self.buffer, self.file)

    def ask(self, members: Members, online: Sequence[int]) -> SumReply:
        reply = self.parties.reply(members, online)
        self.parties.used.save()
        return reply

    def write(self, *clients: int, cohort: Cohort = COHORT, slots: int = 0) -> None:
        for client in clients:
            trip = Trip(client, cohort.first_task + client, cohort, WEIGHTS[client])
            self.writer.write(self.buffer.raw(client + slots), self.updates[client].copy(), trip)

    def sum(self, clients: Sequence[int], weights: Sequence[float] | None = None) -> np.ndarray:
        if weights is None:
            total = sum(WEIGHTS[client] for client in clients)
            weights = [WEIGHTS[client] / total for client in clients]
        members = [(client, client, weight) for client, weight in zip(clients, weights, strict=True)]
        sums = HiddenSums("pairwise", self.rules, self, 1, CLIENTS)
        sums.online = lambda client: client not in self.offline
        vector, unit = sums.sum(self.buffer, members)
        return unit * vector.astype(np.float64)

    def refused(self, why: str, *clients: int, weights: Sequence[float] | None = None) -> None:
        with pytest.raises(SecureError, match=why):
            self.sum(clients, weights)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.buffer.close()


@pytest.mark.parametrize("lost", [(), (3,), (1, 7)])
def test_the_masked_sum_is_the_plain_sum_to_the_step(lost: tuple[int, ...], world: World) -> None:
    """Mutants: a dropout's masks stay in the sum, or are removed with the wrong sign; a client does not apply
    its weight."""
    here = [client for client in COHORT.clients if client not in lost]
    world.write(*here)
    total = sum(WEIGHTS[client] for client in here)
    plain = sum(WEIGHTS[client] / total * world.updates[client].astype(np.float64) for client in here)
    assert np.abs(world.sum(here) - plain).max() <= world.rules.step / 2 + 2.0**-22


def test_half_of_a_round_is_not_summed(world: World) -> None:
    """Mutant: the threshold is half of the cohort, which permits two disjoint sums."""
    world.write(1, 3)
    world.refused("2 clients uploaded; at least 3 are required", 1, 3)
    reply = world.ask([(1, 1, 1.0), (3, 3, 1.0)], [1, 3])  # a server that asks anyway
    assert (reply.revealed, reply.refused) == ([], "2 clients uploaded; at least 3 are required")


def test_offline_clients_reveal_nothing_and_the_others_suffice(world: World) -> None:
    """Mutants: offline clients answer; a request is sent although fewer than the threshold are online."""
    world.write(*COHORT.clients)
    members = [(client, client, 0.2) for client in COHORT.clients]
    online = world.ask(members, [3, 4, 7]).revealed
    assert [one.client for one in online] == [4, 5, 8]  # numbered from 1
    world.restart()
    world.offline = {1, 6}
    total = sum(WEIGHTS.values())
    plain = sum(WEIGHTS[c] / total * world.updates[c].astype(np.float64) for c in COHORT.clients)
    assert np.abs(world.sum(COHORT.clients) - plain).max() <= world.rules.step / 2 + 2.0**-22
    world.offline = {1, 6, 7}
    world.refused("2 of 5 clients that can unmask the sum are online; 3 are needed", *COHORT.clients)


def test_only_one_sum_of_a_round_is_revealed_also_after_a_restart(world: World) -> None:
    """The difference of the sums of {1, 3, 4, 6} and {1, 3, 4} is client 6's update.

    Mutants: the revealed sums are not saved, or not compared with the requested sum.
    """
    world.write(1, 3, 4, 6)
    first = world.sum((1, 3, 4, 6))
    world.restart()
    world.refused("revealed their shares for another sum", 1, 3, 4)
    assert world.sum((1, 3, 4, 6)).tobytes() == first.tobytes()


def test_another_update_of_a_revealed_round_is_refused(world: World) -> None:
    """Mutant: the digest of a revealed sum does not cover the updates' ids."""
    world.write(1, 3, 4)
    world.sum((1, 3, 4))
    world.updates[3] = world.updates[3] + np.float32(0.01)
    world.write(3)
    world.refused("revealed their shares for another sum", 1, 3, 4)


def test_a_repeated_trip_sends_the_same_bytes_and_another_update_has_another_mask(world: World) -> None:
    """The difference of two uploads with the same mask is the difference of the updates.

    Mutant: a client's own mask does not depend on its update.
    """
    world.write(1, 3)
    world.write(1, 3, slots=CLIENTS)
    same = [world.buffer.raw(at).tobytes() for at in (1, 1 + CLIENTS)]
    assert same[0] == same[1]
    change = np.zeros(SIZE, np.float32)
    change[0] = 0.25
    world.updates[3] = world.updates[3] + change
    world.write(3, slots=CLIENTS)
    words = [world.buffer.slot(at).view(np.uint32).astype(np.int64) for at in (3, 3 + CLIENTS)]
    assert np.count_nonzero(words[0] - words[1]) > SIZE - 3


def test_updates_of_different_rounds_or_other_clients_are_not_summed(world: World) -> None:
    """Mutant: only the round of the first update is checked."""
    world.write(1, 3, 4)
    world.write(6, cohort=Cohort(45, COHORT.clients))
    world.refused("not all from the same round", 1, 3, 4, 6)
    world.buffer.raw(2)[:] = world.buffer.raw(1)
    world.refused("not from the clients of this round", 1, 2, 3, 4, weights=[0.25] * 4)


def test_altered_shares_are_refused(world: World) -> None:
    """Mutant: the shares of clients that have delivered are derived again instead of being decrypted."""
    world.write(1, 3, 4, 6, 7)
    world.buffer.raw(4)[-1] ^= 1  # the last client's share
    world.refused("a sealed message was altered", 1, 3, 4, 6, 7)


def test_weights_other_than_the_clients_own_are_refused(world: World) -> None:
    """A strategy may compute its weights from the results of trips. Mutant: they are not compared with the
    weights that the clients applied."""
    world.write(1, 3, 4)
    world.refused(
        r"weighted its update with 32 of 112; the strategy used 0\.333", 1, 3, 4, weights=[1 / 3] * 3
    )


def test_rounded_weights_are_accepted() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        examples = rng.integers(1, 500, size=int(rng.integers(2, 30)))
        whole = [max(1, round(each / 600 * 64)) for each in examples.tolist()]
        check_weights((examples / examples.sum()).tolist(), whole)


def test_own_weights_are_the_weights_of_the_strategy() -> None:
    """Mutants: FedNova's ``own_weight`` ignores the number of steps; a subclass that overrides ``weights``
    inherits FedAvg's ``own_weight``."""

    class Other(FedAvg):
        def weights(self, state: object, updates: object, view: object) -> list[float]:
            return []

    assert FedAvg().own_weight(30, 5) == 30.0
    assert FedAvg(weighting="uniform").own_weight(30, 5) == 1.0
    assert FedNova().own_weight(30, 5) == 6.0
    assert Other().own_weight(30, 5) is None
