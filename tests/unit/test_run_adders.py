"""What the server asks of nodes that sum, and what it makes of their answers; nodes are buffers here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from run_parts import SIZE, Parts, done, take
from test_run_nodes import SAME, WANTED, joining, spawn
from test_run_nodes import World as Joining
from test_run_wall import Wall

from edgefl import kernels
from edgefl.core.events import Sum
from edgefl.errors import WireError
from edgefl.experiment import Server
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.results.record import Record
from edgefl.run import control, messages
from edgefl.run.adder import partial_sum
from edgefl.run.adders import MOST_TRIES, Adders
from edgefl.run.peers import Peer
from edgefl.run.slots import Aggregator, Lease, SumResult
from edgefl.run.transport import NodeServer
from edgefl.strategies.base import Update

NAMES = {1: "lab-1", 2: "lab-2"}


class Summing(Parts):
    """The parts of a run whose two nodes sum; what their adders are told is done when the test says."""

    def sum_on_nodes(self) -> None:
        assert isinstance(self.gate.transport, NodeServer)
        self.adders = self.gate._adders = Adders(self.aggregator, self.gate.transport.model)
        self.aggregator.exact = True
        self.nodes = {node: ParameterBuffer.create(self.buffer.shape) for node in NAMES}

    def begin(self) -> None:
        new, lost = self.adders.there(NAMES)
        assert (new, lost) == ([1, 2], {})
        for node in new:
            self.peer(control.ADDER, node)

    def errands(self) -> list[tuple[int, messages.Errand, bytes]]:
        found = self.adders.errands(lambda node: True)
        return [(node, errand, b"".join(map(bytes, frames))) for node, errand, frames in found]

    def do(self, node: int, errand: messages.Errand, body: bytes, step: int = 40) -> None:
        """An adder does what it was told, and says it in pieces of so many bytes."""
        said = b""
        if isinstance(errand, messages.Add):
            said = partial_sum(self.nodes[node], body, None).tobytes()
        elif isinstance(errand, messages.Fetch):
            said = self.nodes[node].raw(errand.slot).tobytes()
        for at in range(0, len(said), step):
            self.adders.piece(node, messages.Piece(errand.number, at), said[at : at + step])
        assert self.adders.answered(node, messages.Answered(errand.number, 0.5))

    def close(self) -> None:
        for buffer in self.nodes.values():
            buffer.close()
        super().close()


class World(Summing):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, clients=6, transport="node")
        self.sum_on_nodes()
        self.updates: dict[int, np.ndarray] = {}

    def client(self, number: int, node: int) -> Peer:
        peer = self.peer(control.CLIENT, number)
        self.peers.on_node(control.Hosted(control.CLIENT, number, 0, node))
        return peer

    def hold(self, node: int) -> tuple[int, Lease]:
        """An update that lies on this node, or (0) here."""
        task, lease = self.lease(client=0, holder=0)
        update = np.random.default_rng(task).normal(size=SIZE).astype(np.float32)
        where, checksum = self.nodes.get(node, self.buffer), kernels.checksum(update)
        if node:
            where.lease(lease.slot, task=task, client=0, base_version=0)
            where.written(lease.slot, task=task, checksum=checksum)
        where.slot(lease.slot)[:] = update
        self.buffer.written(lease.slot, task=task, checksum=checksum)
        self.aggregator.lie_at(lease, node)
        self.updates[task] = update
        return task, lease

    def sum(self, action: Sum) -> SumResult:
        entry = self.aggregator.free_entry()
        assert entry is not None
        return self.aggregator.sum(action, entry, self.adders.take_parts())


class Live(Summing, Wall):
    """Three phones under the wall clock, the last on the second node, and a version of every two updates."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, transport="node", join_spread_s=0.0)
        self.sum_on_nodes()
        self.engine.adders = self.adders
        self.begin()
        for number in range(3):
            self.peers.on_node(control.Hosted(control.CLIENT, number, 0, 1 + number // 2))
        self.timeline.start()
        self.due()
        self.timeline.flush()
        for errand in self.errands():
            self.do(*errand)
        self.gate.send_late()

    def deliver(self, client: int) -> int:
        """A phone's update is whole on its node; returns its task."""
        (task,) = self.tasks(client)
        lease, node = self.aggregator.leases[task], self.nodes[1 + client // 2]
        node.lease(lease.slot, task=task, client=client, base_version=lease.version)
        node.slot(lease.slot)[:] = np.arange(SIZE) + client
        checksum = kernels.checksum(node.slot(lease.slot))
        node.written(lease.slot, task=task, checksum=checksum)
        self.say(self.the(control.CLIENT, client), done(task, lease, checksum))
        for _, said in self.received():
            assert isinstance(said, messages.Done)
            take(self.engine, self.timeline.heard(said))
        return task


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def over(*tasks: int) -> Sum:
    return Sum(1, tasks, tuple(0.1 * (1 + task) for task in tasks))


def test_a_sum_waits_for_its_parts_and_has_the_bits_of_one_made_here(world: World) -> None:
    tasks = [world.hold(node)[0] for node in (1, 2, 0, 1, 2)]
    action = over(*tasks)
    assert not world.adders.gathered(action)  # nobody has said which nodes there are
    world.begin()
    assert not world.adders.gathered(action)
    first, second = world.errands()
    assert ([first[0], second[0]], world.errands()) == ([1, 2], [])  # each is told once
    world.do(*first)
    assert not world.adders.gathered(action)
    world.do(*second)
    assert world.adders.gathered(action)
    result = world.sum(action)
    assert (result.bad, world.aggregator.totals.node_seconds) == ((), 1.0)
    made, base = world.buffer.model(world.buffer.latest[1]), world.buffer.model(0)
    total = np.zeros(SIZE)
    kernels.exact_sum(total, [world.updates[task] for task in tasks], action.weights)
    assert made.tobytes() == (base + total.astype(np.float32)).tobytes()
    assert result.checksums == tuple(kernels.checksum(world.updates[task]) for task in tasks)


def test_an_adder_that_is_another_now_is_told_again_and_the_one_before_is_not_heard(world: World) -> None:
    world.begin()
    (task, _), action = world.hold(1), over(0)
    assert task == 0
    assert not world.adders.gathered(action)
    ((_, errand, body),) = world.errands()
    world.adders.piece(1, messages.Piece(errand.number, 0), bytes(40))
    world.adders.again(1)
    ((_, again, same),) = world.errands()
    assert (same, again.number) == (body, errand.number + 1)
    assert not world.adders.answered(1, messages.Answered(errand.number, 0.0))
    world.do(1, again, same)
    assert world.adders.gathered(action)
    assert world.sum(action).bad == ()


def test_answers_with_too_much_or_too_little_are_none(world: World) -> None:
    world.begin()
    world.hold(1)
    world.adders.gathered(over(0))
    for turn in range(MOST_TRIES):
        ((_, errand, _),) = world.errands()
        world.adders.piece(1, messages.Piece(errand.number, 8), bytes(8))  # there is a hole before it
        answer = messages.Answered(errand.number, 0.0)
        if turn < MOST_TRIES - 1:
            assert world.adders.answered(1, answer)
    for _ in range(2):  # the adder that is started in its place fares no better
        with pytest.raises(WireError, match="0 bytes of an answer of 80"):
            world.adders.answered(1, answer)
        world.adders.again(1)
        ((_, errand, _),) = world.errands()
        answer = messages.Answered(errand.number, 0.0)
    world.adders.again(1)
    ((_, errand, _),) = world.errands()
    with pytest.raises(WireError, match="more than 80 bytes"):
        world.adders.piece(1, messages.Piece(errand.number, 0), bytes(81))


def test_what_is_fetched_lies_here_unless_its_slot_is_anothers_now(world: World) -> None:
    world.begin()
    (task, lease), (other, its) = world.hold(1), world.hold(1)
    assert not world.adders.fetch([task, other])
    assert not world.adders.fetch([task, other])  # and is not asked for twice
    world.do(*world.errands()[0])
    assert (lease.node, world.adders.elsewhere([task, other])) == (0, {other})
    assert world.buffer.slot(lease.slot).tobytes() == world.updates[task].tobytes()
    (errand,) = world.errands()
    world.aggregator.release(other)
    world.do(*errand)
    assert world.buffer.slot(its.slot).tolist() == [0.0] * SIZE
    assert world.adders.fetch([task])
    assert world.errands() == []


def test_what_a_lost_node_held_is_bad(world: World) -> None:
    world.begin()
    tasks = [world.hold(node)[0] for node in (1, 2)]
    action = over(*tasks)
    world.adders.gathered(action)
    for errand in world.errands():
        world.do(*errand)
    new, lost = world.adders.there({1: "lab-1"})
    assert (new, lost, set(world.adders.held_by(lost))) == ([], {2: "lab-2"}, {tasks[1]})
    world.adders.lose(lost)
    assert not world.adders.gathered(action)
    world.do(*world.errands()[0])
    assert world.adders.gathered(action)
    assert world.sum(action).bad == (tasks[1],)
    assert world.adders.gone == {tasks[1]: "node lab-2 was lost"}


def test_a_part_of_a_sum_that_is_made_of_others_now_is_none_of_its(world: World) -> None:
    world.begin()
    tasks = [world.hold(node)[0] for node in (1, 2)]
    world.adders.gathered(over(*tasks))
    first, _ = world.errands()
    world.adders.lose(world.adders.there({1: "lab-1"})[1])
    again = Sum(1, tuple(tasks[:1]), (0.75,))  # the same update with another weight
    assert not world.adders.gathered(again)
    world.do(*first)
    assert not world.adders.gathered(again)
    world.do(*world.errands()[0])
    assert world.adders.gathered(again)
    world.sum(again)
    made = world.buffer.model(world.buffer.latest[1])
    np.testing.assert_allclose(made, np.float32(0.75) * world.updates[tasks[0]], rtol=1e-6)


def test_a_server_that_comes_back_learns_what_was_lost_meanwhile(world: World) -> None:
    held = [world.hold(node) for node in (1, 2)]
    successor = Aggregator(world.buffer, world.aggregator.optimizer, exact=True)
    successor.take_over([Update(task, 0, 0, 0, 60, 5, 0.5, 1.0) for task, _ in held])
    assert [successor.leases[task].node for task, _ in held] == [1, 2]
    adders = Adders(successor, world.adders._model)
    assert adders.there({2: "lab-2"}) == ([2], {1: "1"})


def test_tasks_wait_for_their_version_in_order_and_it_goes_to_a_node_once(world: World) -> None:
    world.begin()
    first, second, other = world.client(0, 1), world.client(1, 1), world.client(2, 2)
    orders = []
    for peer in (first, second, other):
        task, lease = world.lease(client=peer.number, holder=peer.number)
        order = messages.Task(peer.number, task, 0, 0, lease.entry, lease.slot, None, None)
        assert world.gate.send(peer, order)
        orders.append(order)
    world.gate.send(first, messages.Cancel(orders[0].task))
    world.gate.send_late()
    assert [world.socket.told(peer) for peer in (first, second, other)] == [[], [], []]
    adders = list(world.peers.of(control.ADDER))
    for adder in adders:
        (keep,) = world.socket.told(adder)
        assert isinstance(keep, messages.Keep)
        assert (keep.version, keep.entry) == (0, 0)
        if adder.number == 1:
            world.say(adder, messages.Answered(keep.number, 0.0))
    assert world.received() == []
    world.gate.send_late()
    assert world.socket.told(first) == [orders[0], messages.Cancel(orders[0].task)]
    assert world.socket.told(second) == [orders[1]]
    assert world.socket.told(other) == []
    lease = world.aggregator.leases[orders[0].task]
    assert lease.slot in world.aggregator._unread
    world.say(first, messages.Taken(orders[0].task))
    assert world.received() == []
    assert lease.slot not in world.aggregator._unread


def test_only_adders_answer_for_nodes(world: World) -> None:
    world.begin()
    client = world.client(0, 1)
    for said in (messages.Answered(1, 0.0), messages.Piece(1, 0)):
        world.socket.incoming.append((client.identity, [messages.encode(said), b"bytes"]))
        ((_, refusal),) = world.received()
        assert "client 0 is no adder" in str(refusal)


def test_a_version_waits_for_its_parts_and_what_a_lost_node_held_is_dropped_by_name(tmp_path: Path) -> None:
    live = Live(tmp_path)
    kept, lost = live.deliver(0), live.deliver(2)
    assert live.aggregator.deferred is not None
    live.engine.retry_sum()
    assert live.aggregator.deferred is not None
    _, names = live.adders.there({1: "lab-1"})
    live.adders.lose(names)
    for turn in range(2):  # the first sum finds what is lost, the second is of another update
        while live.aggregator.deferred is not None:
            for errand in live.errands():
                live.do(*errand)
            live.engine.retry_sum()
        assert (live.core.version, live.core.dropped) == (turn, 1)
        if not turn:
            assert [held.task for held in live.core.held] == [kept]
            live.deliver(1)
    assert live.adders.gone == {}
    live.store.sync()
    with Record(tmp_path) as record:
        assert [(row.kind, row.detail) for row in record.incidents] == [
            ("node", f"update of task {lost}: node lab-2 was lost")
        ]
        fates = dict(zip(record.trips["task"].tolist(), record.trips["reason"].tolist(), strict=True))
    assert fates[lost] == "node lab-2 was lost"
    live.close()


def test_a_part_that_is_not_finite_is_of_bad_updates(world: World) -> None:
    world.begin()
    tasks = [world.hold(node)[0] for node in (1, 2)]
    assert not world.adders.gathered(over(*tasks))
    for errand in world.errands():
        world.do(*errand)
    next(iter(world.adders._parts.values())).total.setflags(write=True)
    world.adders._parts[1].total[3] = np.nan
    assert world.sum(over(*tasks)).bad == (tasks[0],)


def test_the_supervisor_says_who_is_on_which_node_and_which_there_are(world: World) -> None:
    server = Server(partial_sums=True)
    nodes = Joining()
    nodes.prepare(control.Prepare(structs.replace(WANTED, server=server), "", nodes=True), same_bits=True)
    assert list(nodes.expect(SAME)) == []
    assert nodes.ready("a", joining()) == [control.Gathered(1)]
    nodes.adopt(world.buffer.shape)
    assert list(nodes.begin()) == [control.NodesThere({1: "a"})]
    assert nodes.spawn(spawn(0)) == [control.Hosted("worker", 0, 0, 1)]
    adder = structs.replace(spawn(1), role=control.ADDER)
    assert nodes.spawn(adder) == []
    assert nodes.told("a")[-1] == adder
    there, *_ = nodes.ready("b", joining())
    assert there == control.NodesThere({1: "a", 2: "b"})
    ended = control.Departed(control.ADDER, 1, 0, "signal 9")
    assert nodes.hear("a", ended) == [ended]
    assert nodes.hear("a", control.Refused("gone", config=False)) == [
        control.NodesThere({2: "b"}),
        control.Departed("worker", 0, 0, "node a is lost: gone"),
    ]
    nodes._nodes.clear()
    nodes.close()
