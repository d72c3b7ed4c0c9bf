"""What the server sends, over real sockets: tasks go together, nothing overtakes them, none waits long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from executor_world import SIZE, World

from edgefl import experiment
from edgefl.core.events import Sum
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.results.record import Record
from edgefl.run import control, engine, messages, outbox
from edgefl.run.connection import PeerSocket, bind, connect
from edgefl.run.outbox import SocketOutbox
from edgefl.run.peers import Peers
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import SumResult
from edgefl.run.transport import server_end
from edgefl.strategies.fedbuff import FedBuff

PATIENCE_MS = 10_000


class Office:
    """An outbox and two clients that are connected."""

    def __init__(self) -> None:
        self.peers = Peers(time.monotonic)
        self.server = bind("shm", messages.MAX_HEADER_BYTES)
        self.buffer = ParameterBuffer.create(Shape(4, 2, 2))
        self.clients: list[PeerSocket] = []
        for number in range(2):
            peer = self.peers.expect(control.CLIENT, number)
            client = connect(self.server.address, peer.identity)
            client.send((messages.encode(messages.Beat(number, 0)),))
            heard: list[bytes] = []
            while not heard:
                self.server.wait(PATIENCE_MS)
                heard = [name for name, _ in self.server.receive()]
            self.clients.append(client)
        self.outbox = SocketOutbox(
            self.server, self.peers, server_end("shm", self.buffer), Stopwatch("test"),
            fetched=lambda slot: None, stuck=lambda peer: None, assess=lambda version, entry: None,
            wake=lambda at_s: None, stopped=lambda reason: None,
        )  # fmt: skip

    def task(self, client: int, task: int) -> None:
        self.outbox.train(messages.Task(client, task, 0, 0, 0, 0, None, None))

    def got(self, client: int, timeout_ms: int = 0) -> messages.FromServer | None:
        frames = self.clients[client].receive(timeout_ms)
        return None if frames is None else messages.decode_from_server(frames[0])


@pytest.fixture
def office() -> Iterator[Office]:
    made = Office()
    yield made
    for client in made.clients:
        client.close()
    made.server.close()
    made.buffer.close()


def test_tasks_wait_for_the_flush_and_come_in_order(office: Office) -> None:
    for task in range(3):
        office.task(0, task)
    assert office.got(0) is None
    office.outbox.flush()
    got = [office.got(0, PATIENCE_MS) for _ in range(3)]
    assert [message.task for message in got if isinstance(message, messages.Task)] == [0, 1, 2]
    office.outbox.flush()
    assert office.got(0) is None


def test_what_else_is_sent_does_not_overtake_them(office: Office) -> None:
    office.task(0, 7)
    office.task(1, 8)
    office.outbox.cancel(0, 7)
    assert [type(office.got(0, PATIENCE_MS)) for _ in range(2)] == [messages.Task, messages.Cancel]
    assert isinstance(office.got(1, PATIENCE_MS), messages.Task)


def test_many_do_not_wait_for_the_last(office: Office) -> None:
    for task in range(outbox.AT_ONCE + 1):
        office.task(task % 2, task)
    counts = [0, 0]
    for client in range(2):
        while office.got(client) is not None:
            counts[client] += 1
    assert sum(counts) == outbox.AT_ONCE


@pytest.mark.parametrize("long", [True, False])
def test_tasks_do_not_wait_for_a_long_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    many = 3 * 4 * SIZE  # the bytes of the updates in a sum
    monkeypatch.setattr(engine, "LONG_SUM_BYTES", many if long else many + 1)
    world = World(tmp_path, FedBuff(buffer_size=3), experiment.Stop(versions=20)).join()
    unsent: list[int] = []
    add = world.aggregator.sum

    def summed(action: Sum, entry: int) -> SumResult:
        unsent.append(len(world.unsent))
        return add(action, entry)

    monkeypatch.setattr(world.aggregator, "sum", summed)
    world.finish().close()
    assert len(unsent) == 20
    assert (max(unsent) == 0) is long


def test_each_figure_of_a_trip_is_in_the_column_of_its_name(tmp_path: Path) -> None:
    world = World(tmp_path, FedBuff(buffer_size=1), experiment.Stop(versions=1)).join()
    said: dict[int, messages.Done] = {}

    def done(task: messages.Task, checksum: int) -> messages.Done:
        spent = [messages.Spent(10.0 * part, 10.0 * part + 1.0) for part in range(1, 6)]
        said[task.task] = messages.Done(
            client=task.client, epoch=0, task=task.task, slot=task.slot, trained_version=task.version,
            examples=61, steps=5, loss=0.5, checksum=checksum, flops=1e6, trip=spent[0], down=spent[1],
            compute=spent[2], up=spent[3], lateness_s=0.25, cpu_s=0.125, peak_mib=20.0, delay=spent[4],
        )  # fmt: skip
        return said[task.task]

    world.done = done  # type: ignore[method-assign]
    world.finish().close()
    task, told = next(iter(said.items()))
    with Record(tmp_path) as record:
        row = record.trip(task)
    for name in ("client", "examples", "steps", "loss", "trained_version", "flops", "lateness_s", "cpu_s"):
        assert getattr(row, name) == getattr(told, name), name
    for part in ("down", "compute", "up", "delay"):
        spent = getattr(told, part)
        assert getattr(row, f"{part}_declared_s") == spent.declared_s
        assert getattr(row, f"{part}_s") == spent.achieved_s
    assert (row.trip_declared_s, row.trip_achieved_s) == (10.0, 11.0)
    assert (row.peak_mib, row.down_bytes, row.up_bytes) == (20.0, 4 * SIZE, 4 * SIZE)
    assert row.checksum_sent == row.checksum_seen == told.checksum
    assert row.received_s == row.sent_s + 21.0
    assert (row.fate, row.weight, row.applied_version, row.staleness) == ("applied", 1.0, 1, 0)
