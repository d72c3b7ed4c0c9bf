"""The table of peers and the lifecycle: who is silent, dies or lies is found, and replaced or let go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_parts import FakeSocket, Parts, experiment

from edgefl.errors import RunError
from edgefl.results.record import Record
from edgefl.run import control
from edgefl.run.clock import WallClock
from edgefl.run.control import CLIENT, EVALUATOR, WORKER
from edgefl.run.peers import MOST_DEATHS_IN_A_ROW, STARTUP_S, Peer, Peers


class Table:
    def __init__(self) -> None:
        self.now = 100.0
        self.socket = FakeSocket()
        self.peers = Peers(lambda: self.now, self.socket)  # type: ignore[arg-type]

    def silent(self, seconds: float = 5.0) -> list[tuple[str, int]]:
        return [(peer.role, peer.number) for peer, _ in self.peers.silent(seconds)]

    def ready(self, role: str, number: int) -> Peer:
        peer = self.peers.expect(role, number)
        peer.ready = True
        return peer


@pytest.fixture
def table() -> Table:
    return Table()


def test_strangers_are_nobody(table: Table) -> None:
    table.peers.expect(CLIENT, 3)
    for name in (b"", b"client-4-0", b"client-3-1", b"client-3", b"\x00\x01\x02\x03\x04", b"evaluator-3-0"):
        assert table.peers.sender_of(name) is None
    assert table.peers.get(EVALUATOR, 3) is None


def test_who_is_ready_is_silent_after_the_time_allowed(table: Table) -> None:
    table.ready(CLIENT, 0)
    talker = table.ready(CLIENT, 1)
    table.now += 5.0
    assert table.peers.sender_of(talker.identity) is talker
    assert talker.last_message_s == table.now
    assert table.silent() == []
    table.now += 0.1
    assert table.silent() == [(CLIENT, 0)]
    table.now += 5.0
    assert table.silent() == [(CLIENT, 0), (CLIENT, 1)]


def test_who_is_still_starting_has_longer_and_who_was_expelled_is_not_found_again(table: Table) -> None:
    peer = table.peers.expect(CLIENT, 0)
    table.now += STARTUP_S
    assert table.silent() == []
    table.now += 0.1
    assert table.silent() == [(CLIENT, 0)]
    assert table.silent(seconds=STARTUP_S + 1) == []
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


@pytest.mark.parametrize("removed", [True, False])
def test_late_news_of_a_predecessors_end_removes_nobody(table: Table, removed: bool) -> None:
    first = table.ready(CLIENT, 0)
    if removed:
        assert table.peers.remove(CLIENT, 0, 0) is first
        assert (table.peers.sender_of(first.identity), table.peers.get(CLIENT, 0)) == (None, None)
    second = table.peers.expect(CLIENT, 0, epoch=1, deaths_in_a_row=1)
    assert (second.ready, second.expelled, second.deaths_in_a_row) == (False, False, 1)
    assert table.peers.remove(CLIENT, 0, 0) is table.peers.remove(CLIENT, 7, 0) is None
    assert table.peers.get(CLIENT, 0) is second
    assert table.peers.sender_of(first.identity) is None  # a message of the dead that was still under way
    assert table.peers.sender_of(second.identity) is second


class Looks:
    """A server that means to look every ``every_s``, and one client that hangs from the first look on."""

    def __init__(self, table: Table, seconds: float, every_s: float) -> None:
        self.table, self.seconds, self.every_s = table, seconds, every_s
        table.ready(CLIENT, 0)
        assert not self.after(0.0)

    def after(self, seconds: float) -> bool:
        """Whether a look so much later than the one before finds it."""
        self.table.now += seconds
        return [peer.number for peer, _ in self.table.peers.check_silence(self.seconds, self.every_s)] == [0]


def test_time_in_which_nobody_looked_is_nobodys_silence(table: Table) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    assert not looks.after(60.0)  # the whole host was suspended: a look that should have been after 1.25 s
    assert [looks.after(1.25) for _ in range(4)] == [False] * 3 + [True]
    shortest = Looks(Table(), seconds=0.15, every_s=0.1)
    assert [shortest.after(0.1) for _ in range(2)] == [False, True]


def test_a_server_that_was_stopped_before_its_first_look_forgives_that_too(table: Table) -> None:
    client = table.ready(CLIENT, 0)
    table.now += 60.0
    assert list(table.peers.check_silence(5.0, 1.25)) == []
    table.now += 5.1
    assert [peer for peer, _ in table.peers.check_silence(5.0, 1.25)] == [client]


@pytest.mark.parametrize(("late_s", "until"), [(3.0, 3), (4.0, 2), (60.0, 2)])
def test_who_hangs_is_found_by_a_server_that_is_always_late(table: Table, late_s: float, until: int) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    assert [looks.after(late_s) for _ in range(until)] == [False] * (until - 1) + [True]


def test_who_speaks_after_a_pause_is_not_heard_in_the_future(table: Table) -> None:
    looks = Looks(table, seconds=5.0, every_s=1.25)
    table.now += 59.0
    peer = table.peers.get(CLIENT, 0)
    assert peer is not None
    table.peers.sender_of(peer.identity)
    assert not looks.after(1.0)
    assert peer.last_message_s == table.now


class Office(Parts):
    """A lifecycle whose supervisor is a list."""

    def __init__(self, folder: Path, **fleet: object) -> None:
        super().__init__(folder)
        self.folder = folder
        self.lifecycle = self.lifecycle_of(experiment(**fleet), WallClock(2.0, monotonic=self.hand))

    def dies(self, peer: Peer, reason: str = "signal 9") -> Peer | None:
        return self.lifecycle.departed(control.Departed(peer.role, peer.number, peer.epoch, reason))

    def incidents(self) -> list[tuple[str, int | None, str]]:
        self.store.commit()
        with Record(self.folder) as record:
            return [(row.kind, row.client, row.detail) for row in record.incidents]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    made = Office(tmp_path)
    yield made
    made.close()


def test_a_peer_is_expelled_once_and_its_death_is_no_second_incident(office: Office) -> None:
    peer = office.peer(CLIENT, 2)
    for _ in range(2):
        office.lifecycle.expel(peer, "malformed", "rubbish" * 200)
    assert office.sent == [control.Expel(CLIENT, 2, 0)]
    office.dies(peer)
    assert office.incidents() == [("malformed", 2, ("rubbish" * 200)[:500])]
    assert sum(office.lifecycle.incidents.values()) == 1


def test_where_no_socket_can_be_opened_a_peer_that_waits_in_vain_ends_the_run(office: Office) -> None:
    there = office.peer(CLIENT, 0)
    office.socket.no_descriptors = "Too many open files"
    waits = office.peer(CLIENT, 1, ready=False)
    office.lifecycle.find_silent(0.0)  # it may be on its way
    office.hand.at += 6.0
    office.peers.sender_of(there.identity)
    with pytest.raises(RunError, match="can open no more connections to its clients: Too many open files"):
        office.lifecycle.find_silent(0.0)
    waits.ready = True
    office.lifecycle.find_silent(0.0)  # who is there needs none


def test_a_client_that_dies_comes_back_after_its_time_as_another_epoch(office: Office) -> None:
    peer = office.peer(CLIENT, 1)
    assert office.dies(peer) is peer
    assert office.dies(peer) is None  # it is gone already
    assert (office.lifecycle.returning, office.peers.get(CLIENT, 1)) == (0, None)
    office.lifecycle.replace(peer, 60.0)
    assert office.lifecycle.returning == 1
    office.hand.at += 59.0
    office.alarms.run_due()
    assert office.sent == []
    office.hand.at += 1.0
    office.alarms.run_due()
    assert office.sent == [control.Replace(CLIENT, 1, 1)]
    again = office.the(CLIENT, 1)
    assert (again.epoch, again.ready, office.lifecycle.returning) == (1, False, 0)
    assert office.incidents() == [("death", 1, "signal 9")]


@pytest.mark.parametrize("role", [WORKER, EVALUATOR])
def test_other_processes_come_back_at_once(office: Office, role: control.Role) -> None:
    peer = office.peer(role, 0)
    assert office.dies(peer) is peer
    assert office.lifecycle.retry(peer)
    office.alarms.run_due()
    assert office.sent == [control.Replace(role, 0, 1)]
    assert office.incidents() == [("death", None, "signal 9")]


def test_a_client_that_needs_too_much_memory_is_an_incident_of_its_own(office: Office) -> None:
    office.dies(office.peer(CLIENT, 1), f"{control.OUT_OF_MEMORY}: 300 MiB")
    assert office.incidents() == [("oom", 1, f"{control.OUT_OF_MEMORY}: 300 MiB")]


def test_a_peer_that_dies_again_and_again_is_given_up(office: Office) -> None:
    for deaths in range(1, MOST_DEATHS_IN_A_ROW + 1):
        peer = office.peers.get(WORKER, 0) or office.peer(WORKER, 0)
        assert office.dies(peer) is peer
        assert office.lifecycle.retry(peer) is (deaths < MOST_DEATHS_IN_A_ROW)
        office.alarms.run_due()
    assert len(office.sent) == MOST_DEATHS_IN_A_ROW - 1
    assert office.incidents()[-1] == ("gave-up", None, f"died {MOST_DEATHS_IN_A_ROW} times in a row")


def test_a_worker_that_dies_of_its_tasks_is_never_given_up(office: Office) -> None:
    peer = office.peer(WORKER, 1)
    for _ in range(2 * MOST_DEATHS_IN_A_ROW):
        assert office.dies(peer) is peer
        assert office.lifecycle.retry(peer, blamed=False)
        office.alarms.run_due()
        peer = office.the(WORKER, 1)
    assert peer.deaths_in_a_row == 0
    assert {kind for kind, _, _ in office.incidents()} == {"death"}


@pytest.mark.parametrize("longest_step_s", [0.0, 1000.0])
def test_a_silent_client_is_expelled_but_may_train_or_think(office: Office, longest_step_s: float) -> None:
    client, evaluator = office.peer(CLIENT, 1), office.peer(EVALUATOR, 0)
    heartbeat_s = experiment().server.heartbeat_s
    office.lifecycle.find_silent(longest_step_s)
    while office.hand.at < 101.0 + heartbeat_s:
        office.hand.at += office.lifecycle.check_every_s
        office.lifecycle.find_silent(longest_step_s)
    assert (client.expelled, evaluator.expelled) == (longest_step_s == 0.0, False)
    assert office.sent == ([control.Expel(CLIENT, 1, 0)] if longest_step_s == 0.0 else [])
