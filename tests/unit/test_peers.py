"""The table of peers: who speaks, who is silent, and no dead process taken for its successor."""

from __future__ import annotations

import pytest

from edgefl.run.control import CLIENT, EVALUATOR, WORKER
from edgefl.run.peers import CLIENTS, STARTUP_S, Peer, Peers


class Table:
    def __init__(self) -> None:
        self.now = 100.0
        self.peers = Peers(lambda: self.now)

    def silent(self, seconds: float = 5.0) -> list[tuple[str, int]]:
        return [(peer.role, peer.number) for peer, _ in self.peers.silent(seconds)]

    def ready(self, role: str, number: int) -> Peer:
        peer = self.peers.expect(role, number)
        peer.ready = True
        return peer


@pytest.fixture
def table() -> Table:
    return Table()


def test_each_process_has_an_identity_of_its_own(table: Table) -> None:
    made = [table.peers.expect(role, number) for role in (CLIENT, WORKER, EVALUATOR) for number in range(3)]
    made.append(Peer(CLIENT, 0, epoch=1, heard=0.0))
    assert len({peer.identity for peer in made}) == len(made)
    assert all(0 < len(peer.identity) < 256 for peer in made)  # ZeroMQ's bounds
    assert not any(peer.identity.startswith(b"\0") for peer in made)  # ZeroMQ's own names begin so


def test_strangers_are_nobody(table: Table) -> None:
    table.peers.expect(CLIENT, 3)
    for name in (b"", b"client-4-0", b"client-3-1", b"client-3", b"\x00\x01\x02\x03\x04", b"evaluator-3-0"):
        assert table.peers.heard(name) is None
    assert table.peers.get(EVALUATOR, 3) is None


def test_a_message_is_its_senders(table: Table) -> None:
    peer = table.peers.expect(CLIENT, 3)
    table.now += 4
    assert table.peers.heard(peer.identity) is peer
    assert peer.heard == 104.0
    assert table.peers.get(CLIENT, 3) is peer


def test_who_is_ready_is_silent_after_the_time_allowed(table: Table) -> None:
    table.ready(CLIENT, 0)
    talker = table.ready(CLIENT, 1)
    table.now += 5.0
    table.peers.heard(talker.identity)
    assert table.silent() == []
    table.now += 0.1
    assert table.silent() == [(CLIENT, 0)]
    table.now += 5.0
    assert table.silent() == [(CLIENT, 0), (CLIENT, 1)]


def test_who_is_still_starting_has_longer(table: Table) -> None:
    table.peers.expect(CLIENT, 0)
    table.now += STARTUP_S
    assert table.silent() == []
    table.now += 0.1
    assert table.silent() == [(CLIENT, 0)]
    assert table.silent(seconds=STARTUP_S + 1) == []


def test_who_was_expelled_is_not_found_again(table: Table) -> None:
    peer = table.ready(CLIENT, 0)
    table.now += 6
    peer.expelled = True
    assert table.silent() == []


def test_the_table_may_change_while_the_silent_are_gone_through(table: Table) -> None:
    for number in range(5):
        table.ready(CLIENT, number)
    table.now += 6
    for peer, _ in table.peers.silent(5.0):
        table.peers.remove(peer.role, peer.number, peer.epoch)
        table.peers.expect(peer.role, peer.number, peer.epoch + 1)
    assert {peer.epoch for peer in table.peers.of(CLIENT)} == {1}


def test_a_successor_has_its_own_identity_and_its_predecessor_is_forgotten(table: Table) -> None:
    first = table.ready(CLIENT, 0)
    assert table.peers.remove(CLIENT, 0, 0) is first
    assert table.peers.heard(first.identity) is None
    assert table.peers.get(CLIENT, 0) is None
    second = table.peers.expect(CLIENT, 0, epoch=1, deaths_in_a_row=1)
    assert (second.ready, second.expelled, second.deaths_in_a_row) == (False, False, 1)
    assert table.peers.heard(first.identity) is None  # a message of the dead that was still under way
    assert table.peers.heard(second.identity) is second


def test_the_late_news_of_a_predecessors_end_removes_nobody(table: Table) -> None:
    table.peers.expect(CLIENT, 0)
    table.peers.remove(CLIENT, 0, 0)
    second = table.peers.expect(CLIENT, 0, epoch=1)
    assert table.peers.remove(CLIENT, 0, 0) is None
    assert table.peers.remove(CLIENT, 7, 0) is None
    assert table.peers.get(CLIENT, 0) is second
    assert table.peers.heard(second.identity) is second


def test_a_successor_takes_the_place_even_if_its_predecessor_was_never_removed(table: Table) -> None:
    first = table.peers.expect(CLIENT, 0)
    second = table.peers.expect(CLIENT, 0, epoch=1)
    assert table.peers.heard(first.identity) is None
    assert table.peers.get(CLIENT, 0) is second


def test_counts_and_roles(table: Table) -> None:
    assert (table.peers.unready, table.peers.of(*CLIENTS)) == (0, [])
    client, worker = table.peers.expect(CLIENT, 0), table.peers.expect(WORKER, 0)
    evaluator = table.peers.expect(EVALUATOR, 0)
    assert table.peers.unready == 3
    assert table.peers.of(*CLIENTS) == [client, worker]
    assert table.peers.of(EVALUATOR) == [evaluator]
    client.ready = evaluator.ready = True
    assert table.peers.unready == 1


class Looks:
    """A server that means to look every ``every_s``, and one client that hangs from the first look on."""

    def __init__(self, table: Table, seconds: float, every_s: float) -> None:
        self.table, self.seconds, self.every_s = table, seconds, every_s
        table.ready(CLIENT, 0)
        assert not self.after(0.0)

    def after(self, seconds: float) -> bool:
        """Whether a look so much later than the one before finds it."""
        self.table.now += seconds
        return [peer.number for peer, _ in self.table.peers.look(self.seconds, self.every_s)] == [0]


def test_time_in_which_nobody_looked_is_nobodys_silence(table: Table) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    assert not looks.after(60.0)  # the whole host was suspended: a look that should have been after 1.25 s
    assert [looks.after(1.25) for _ in range(3)] == [False] * 3
    assert looks.after(1.25)


def test_looks_that_are_not_late_forgive_nothing(table: Table) -> None:
    looks = Looks(table, seconds=0.15, every_s=0.1)  # the shortest interval there is
    assert not looks.after(0.1)
    assert looks.after(0.1)


@pytest.mark.parametrize(("late_s", "until"), [(3.0, 3), (4.0, 2), (60.0, 2)])
def test_who_hangs_is_found_by_a_server_that_is_always_late(table: Table, late_s: float, until: int) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    assert [looks.after(late_s) for _ in range(until)] == [False] * (until - 1) + [True]


def test_who_speaks_after_a_pause_is_not_heard_in_the_future(table: Table) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    table.now += 59.0
    peer = table.peers.get(CLIENT, 0)
    assert peer is not None
    table.peers.heard(peer.identity)
    assert not looks.after(1.0)
    assert peer.heard == table.now
