"""The table of peers and their lifecycle: silent, dead and misbehaving peers are found and replaced."""

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
from edgefl.run.peers import MAX_DEATHS_IN_A_ROW, STARTUP_S, Peer, Peers


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


def test_an_unknown_name_has_no_peer(table: Table) -> None:
    table.peers.expect(CLIENT, 3)
    for name in (b"", b"client-4-0", b"client-3-1", b"client-3", b"\x00\x01\x02\x03\x04", b"evaluator-3-0"):
        assert table.peers.sender_of(name) is None
    assert table.peers.get(EVALUATOR, 3) is None


def test_a_ready_peer_is_silent_after_the_heartbeat_time(table: Table) -> None:
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


def test_a_starting_peer_has_more_time_and_an_expelled_one_is_not_found_again(table: Table) -> None:
    peer = table.peers.expect(CLIENT, 0)
    table.now += STARTUP_S
    assert table.silent() == []
    table.now += 0.1
    assert table.silent() == [(CLIENT, 0)]
    assert table.silent(seconds=STARTUP_S + 1) == []
    peer.expelled = True
    assert table.silent() == []


def test_first_processes_have_time_while_others_of_them_become_ready(table: Table) -> None:
    peers = [table.peers.expect(CLIENT, number) for number in range(3)]
    assert table.silent(STARTUP_S) == []
    for peer in peers[:2]:
        table.now += STARTUP_S - 10.0
        peer.ready, peer.last_message_s = True, table.now
        assert table.silent(STARTUP_S) == []
    table.now += STARTUP_S + 0.1
    for peer in peers[:2]:
        peer.last_message_s = table.now
    assert table.silent(STARTUP_S) == [(CLIENT, 2)]
    table.peers.expect(CLIENT, 2, epoch=1)  # a later process has its own time only
    table.now += STARTUP_S + 0.1
    assert (CLIENT, 2) in table.silent(STARTUP_S)


def test_a_dismissed_peer_may_be_silent(table: Table) -> None:
    table.ready(CLIENT, 0).dismissed = True
    table.now += 60.0
    assert table.silent() == []


def test_peers_can_be_replaced_while_silent_ones_are_iterated(table: Table) -> None:
    for number in range(5):
        table.ready(CLIENT, number)
    table.now += 6
    for peer, _ in table.peers.silent(5.0):
        table.peers.remove(peer.role, peer.number, peer.epoch)
        table.peers.expect(peer.role, peer.number, peer.epoch + 1)
    assert {peer.epoch for peer in table.peers.of(CLIENT)} == {1}


@pytest.mark.parametrize("removed", [True, False])
def test_a_late_message_about_a_predecessor_does_not_remove_its_successor(
    table: Table, removed: bool
) -> None:
    first = table.ready(CLIENT, 0)
    if removed:
        assert table.peers.remove(CLIENT, 0, 0) is first
        assert (table.peers.sender_of(first.identity), table.peers.get(CLIENT, 0)) == (None, None)
    second = table.peers.expect(CLIENT, 0, epoch=1, deaths_in_a_row=1)
    assert (second.ready, second.expelled, second.deaths_in_a_row) == (False, False, 1)
    assert table.peers.remove(CLIENT, 0, 0) is table.peers.remove(CLIENT, 7, 0) is None
    assert table.peers.get(CLIENT, 0) is second
    assert table.peers.sender_of(first.identity) is None  # a message that was sent before the death
    assert table.peers.sender_of(second.identity) is second


class SilenceChecks:
    """A server that plans a check every ``every_s``, and a client that hangs after the first check."""

    def __init__(self, table: Table, seconds: float, every_s: float) -> None:
        self.table, self.seconds, self.every_s = table, seconds, every_s
        table.ready(CLIENT, 0)
        assert not self.after(0.0)

    def after(self, seconds: float) -> bool:
        """Check again after this time; return True if the check reports the client as silent."""
        self.table.now += seconds
        return [peer.number for peer, _ in self.table.peers.check_silence(self.seconds, self.every_s)] == [0]


def test_time_without_checks_does_not_count_as_silence(table: Table) -> None:
    checks = SilenceChecks(table, seconds=5.0, every_s=1.25)
    assert not checks.after(60.0)  # the host was suspended: the check was planned after 1.25 s
    assert [checks.after(1.25) for _ in range(4)] == [False] * 3 + [True]
    shortest = SilenceChecks(Table(), seconds=0.15, every_s=0.1)
    assert [shortest.after(0.1) for _ in range(2)] == [False, True]


def test_time_before_the_first_check_does_not_count_as_silence(table: Table) -> None:
    client = table.ready(CLIENT, 0)
    table.now += 60.0
    assert list(table.peers.check_silence(5.0, 1.25)) == []
    table.now += 5.1
    assert [peer for peer, _ in table.peers.check_silence(5.0, 1.25)] == [client]


@pytest.mark.parametrize(("late_s", "until"), [(3.0, 3), (4.0, 2), (60.0, 2)])
def test_a_server_whose_checks_are_always_late_finds_a_peer_that_hangs(
    table: Table, late_s: float, until: int
) -> None:
    checks = SilenceChecks(table, seconds=5.0, every_s=1.25)
    assert [checks.after(late_s) for _ in range(until)] == [False] * (until - 1) + [True]


def test_a_message_after_a_pause_is_not_dated_in_the_future(table: Table) -> None:
    checks = SilenceChecks(table, seconds=5.0, every_s=1.25)
    table.now += 59.0
    peer = table.peers.get(CLIENT, 0)
    table.peers.sender_of(peer.identity)
    assert not checks.after(1.0)
    assert peer.last_message_s == table.now


class Server(Parts):
    """`Parts` with the peers' lifecycle."""

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
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def test_a_peer_is_expelled_once_and_its_death_is_not_a_second_incident(server: Server) -> None:
    peer = server.peer(CLIENT, 2)
    for _ in range(2):
        server.lifecycle.expel(peer, "malformed", "rubbish" * 200)
    assert server.sent == [control.Expel(CLIENT, 2, 0)]
    server.dies(peer)
    assert server.incidents() == [("malformed", 2, ("rubbish" * 200)[:500])]
    assert sum(server.lifecycle.incidents.values()) == 1


def test_a_run_ends_if_a_peer_waits_and_no_connection_can_be_opened(server: Server) -> None:
    there = server.peer(CLIENT, 0)
    server.socket.no_descriptors = "Too many open files"
    waits = server.peer(CLIENT, 1, ready=False)
    server.lifecycle.find_silent(0.0)  # its connection may still come
    server.hand.at += 6.0
    server.peers.sender_of(there.identity)
    with pytest.raises(RunError, match="cannot open any more connections to its clients: Too many open"):
        server.lifecycle.find_silent(0.0)
    waits.ready = True
    server.lifecycle.find_silent(0.0)  # a peer that is connected needs none


def test_a_dead_client_returns_after_the_delay_with_the_next_epoch(server: Server) -> None:
    peer = server.peer(CLIENT, 1)
    assert server.dies(peer) is peer
    assert server.dies(peer) is None  # it was removed before
    assert (server.lifecycle.returning, server.peers.get(CLIENT, 1)) == (0, None)
    server.lifecycle.replace(peer, 60.0)
    assert server.lifecycle.returning == 1
    server.hand.at += 59.0
    server.alarms.run_due()
    assert server.sent == []
    server.hand.at += 1.0
    server.alarms.run_due()
    assert server.sent == [control.Replace(CLIENT, 1, 1)]
    again = server.the(CLIENT, 1)
    assert (again.epoch, again.ready, server.lifecycle.returning) == (1, False, 0)
    assert server.incidents() == [("death", 1, "signal 9")]


@pytest.mark.parametrize("role", [WORKER, EVALUATOR])
def test_workers_and_evaluators_are_replaced_at_once(server: Server, role: control.Role) -> None:
    peer = server.peer(role, 0)
    assert server.dies(peer) is peer
    assert server.lifecycle.retry(peer)
    server.alarms.run_due()
    assert server.sent == [control.Replace(role, 0, 1)]
    assert server.incidents() == [("death", None, "signal 9")]


def test_a_client_out_of_memory_has_its_own_kind_of_incident(server: Server) -> None:
    server.dies(server.peer(CLIENT, 1), f"{control.OUT_OF_MEMORY}: 300 MiB")
    assert server.incidents() == [("oom", 1, f"{control.OUT_OF_MEMORY}: 300 MiB")]


def test_a_peer_that_dies_repeatedly_is_given_up(server: Server) -> None:
    for deaths in range(1, MAX_DEATHS_IN_A_ROW + 1):
        peer = server.peers.get(WORKER, 0) or server.peer(WORKER, 0)
        assert server.dies(peer) is peer
        assert server.lifecycle.retry(peer) is (deaths < MAX_DEATHS_IN_A_ROW)
        server.alarms.run_due()
    assert len(server.sent) == MAX_DEATHS_IN_A_ROW - 1
    assert server.incidents()[-1] == ("gave-up", None, f"died {MAX_DEATHS_IN_A_ROW} times in a row")


def test_a_worker_that_dies_in_a_task_is_never_given_up(server: Server) -> None:
    peer = server.peer(WORKER, 1)
    for _ in range(2 * MAX_DEATHS_IN_A_ROW):
        assert server.dies(peer) is peer
        assert server.lifecycle.retry(peer, blamed=False)
        server.alarms.run_due()
        peer = server.the(WORKER, 1)
    assert peer.deaths_in_a_row == 0
    assert {kind for kind, _, _ in server.incidents()} == {"death"}


@pytest.mark.parametrize("longest_step_s", [0.0, 1000.0])
def test_a_silent_client_is_expelled_unless_steps_take_longer(server: Server, longest_step_s: float) -> None:
    client, evaluator = server.peer(CLIENT, 1), server.peer(EVALUATOR, 0)
    heartbeat_s = experiment().server.heartbeat_s
    server.lifecycle.find_silent(longest_step_s)
    while server.hand.at < 101.0 + heartbeat_s:
        server.hand.at += server.lifecycle.check_every_s
        server.lifecycle.find_silent(longest_step_s)
    assert (client.expelled, evaluator.expelled) == (longest_step_s == 0.0, False)
    assert server.sent == ([control.Expel(CLIENT, 1, 0)] if longest_step_s == 0.0 else [])
