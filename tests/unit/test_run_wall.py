"""The wall clock's timeline: when clients join and leave, how tasks end, and when messages are sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from run_parts import Parts, done, experiment, take
from test_run_virtual import FixedTrips

from edgefl.core.deaths import Deaths
from edgefl.core.events import Died, Evaluate, Event, Failed, Joined, Left, Sum, Ticked
from edgefl.devices.dynamics import Dynamics, Transition
from edgefl.errors import RunError
from edgefl.experiment import Experiment, Privacy, Stop
from edgefl.parameters.buffer import TripPhase
from edgefl.results.record import Record
from edgefl.run import control, messages, resume, wall
from edgefl.run.control import ABSENT, CLIENT, EVALUATOR, IDLE, Departed
from edgefl.run.engine import Engine, WriteAhead
from edgefl.run.gate import Refusal, TaskReturned
from edgefl.run.peers import MAX_DEATHS_IN_A_ROW
from edgefl.run.server import ServerLoop
from edgefl.run.timeline import Delivery, TimelineEvent
from edgefl.run.wall import WallTimeline
from edgefl.strategies.fedbuff import FedBuff
from tests.wire_samples import TIMES


class FakeDynamics:
    """Dynamics whose transitions the tests set."""

    def __init__(self) -> None:
        self.moves: dict[int, Transition] = {}
        self.finishing = False
        self._moved: list[int] = []

    def __contains__(self, client: int) -> bool:
        return client in self.moves

    def set(self, client: int, at_s: float, why: str) -> None:
        self.moves[client] = Transition(at_s, why)  # type: ignore[arg-type]
        self._moved.append(client)

    def moved(self) -> list[int]:
        moved, self._moved = self._moved, []
        return moved

    def move(self, client: int) -> Transition:
        return self.moves[client]

    declares_death = Dynamics.declares_death
    never_returns = Dynamics.never_returns

    def finishes(self, client: int) -> bool:
        return self.finishing

    def condition(self, client: int) -> None:
        return None

    def plan(self, client: int) -> None:
        return None

    def observe(self, *_: object) -> None:
        pass


class Wall(Parts):
    """`Parts` with a wall clock's timeline and an engine. All clients are ready."""

    def __init__(
        self, folder: Path, *, transport: str = "shm", privacy: Privacy | None = None, **fleet_fields: object
    ) -> None:
        super().__init__(folder, transport=transport, privacy=privacy)
        self.dynamics, self.trips = FakeDynamics(), FixedTrips([4.0, 4.0, 4.0])
        wanted = experiment(**fleet_fields)
        self.ahead = WriteAhead(self.store, self.aggregator, self.watch)
        self.lifecycle = self.lifecycle_of(wanted, self.clock)
        self.timeline = WallTimeline(
            wanted, self.clock, self.core, self.dynamics, self.aggregator, self.evaluation, self.peers,
            self.lifecycle, self.gate, self.store, self.trips, self.ahead,
        )  # type: ignore[arg-type]  # fmt: skip
        parts = (self.core, self.aggregator, self.store, self.timeline, self.evaluation, self.watch)
        self.engine = Engine(*parts, write_ahead=self.ahead)
        self.timeline.expect()
        for peer in self.peers.of(CLIENT):
            peer.ready = True
        self.clock.start()

    def due(self) -> list[object]:
        return list(take(self.engine, self.timeline.due()))

    def tasks(self, client: int) -> list[int]:
        """Flush, and return the tasks that are sent to this client."""
        self.timeline.flush()
        sent = self.socket.sent_to(self.the(CLIENT, client))
        return [one.task for order in sent if isinstance(order, messages.Tasks) for one in order.tasks]

    def failed(self) -> list[TimelineEvent]:
        """Let client 1 report that task 1 failed; return the events that follow."""
        return take(self.engine, self.timeline.task_ended(TaskReturned(1, 1, "failed", "its data")))

    def restore(self) -> list[TimelineEvent]:
        """Restore the timeline after an interruption."""
        return take(self.engine, self.timeline.restore(SimpleNamespace(), self.engine.order))  # type: ignore[arg-type]

    def client_died(self) -> list[TimelineEvent]:
        """End the process of client 1; return the events that follow."""
        peer = self.the(CLIENT, 1)
        self.peers.remove(CLIENT, 1, 0)
        return take(self.engine, self.timeline.departed(peer, Departed(CLIENT, 1, 0, "signal 9")))

    def loop(self, wanted: Experiment) -> ServerLoop:
        """Return the server's loop of a run that has begun. Messages from the loop are added to ``sent``."""
        prepared = SimpleNamespace(host_step_s=0.0, layout=[])
        plan: Any = SimpleNamespace(experiment=wanted, prepared=prepared, run_dir=".")
        channel: Any = SimpleNamespace(send=self.sent.append, tell=self.sent.append)
        parts = (self.engine, self.evaluation, self.peers, self.lifecycle, self.alarms, self.gauge)
        loop = ServerLoop(channel, plan, self.gate, self.timeline, *parts, self.watch)
        loop._started = True
        return loop


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Wall]:
    made = Wall(tmp_path, join_spread_s=0.0)
    yield made
    made.close()


def started(world: Wall) -> Wall:
    world.timeline.start()
    world.due()
    return world


@pytest.mark.parametrize("at_once", [2, 100])
def test_clients_join_and_get_tasks(world: Wall, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "AT_ONCE", at_once)  # so many tasks are sent without a flush
    world.timeline.start()
    assert [event.client for event in world.due() if isinstance(event, Joined)] == [0, 1, 2]
    assert len(world.socket.sent) == (2 if at_once == 2 else 0)
    assert [world.tasks(client) for client in range(3)] == [[0], [1], [2]]
    assert [world.aggregator.leases[task].holder for task in range(3)] == [0, 1, 2]


def test_the_shown_states_are_those_that_clients_report(world: Wall) -> None:
    assert world.timeline.states() == bytes([ABSENT] * 3)
    started(world)
    buffer, leases = world.buffer, world.aggregator.leases
    for task, phase in ((1, TripPhase.COMPUTE), (2, TripPhase.UP)):  # client 0 has not read its task yet
        buffer.fetched[leases[task].slot] = phase
    assert list(world.timeline.states()) == [IDLE + phase for phase in (1, 2, 3)]
    world.client_died()
    assert world.timeline.states()[1] == ABSENT


def test_the_shown_states_of_phones_on_other_hosts_follow_from_their_plans(world: Wall) -> None:
    """Regression: they were shown as downloading during their whole trips."""
    started(world)
    world.peers.by_door = True
    for seconds, phase in ((3.0, TripPhase.COMPUTE), (2.0, TripPhase.UP)):
        world.hand.at += seconds
        assert list(world.timeline.states()) == [IDLE + phase] * 3
    assert sorted(world.trips.planned) == [0, 1, 2]  # each trip is planned once


def test_a_cancellation_does_not_overtake_its_task(world: Wall) -> None:
    started(world)
    world.timeline.cancel(1, 1)
    peer = world.the(CLIENT, 1)
    assert [type(message) for message in world.socket.sent_to(peer)] == [messages.Tasks, messages.Withdraw]


@pytest.mark.parametrize("given_up", [False, True])
def test_versions_that_will_not_be_evaluated_are_not_kept(world: Wall, given_up: bool) -> None:
    world.peer(EVALUATOR, 0)
    if given_up:
        world.evaluation.give_up()
    for version in range(6):
        world.engine.carry_out([Evaluate(version)])
    assert list(world.evaluation.entries) == ([] if given_up else [0, 5])
    assert list(world.engine._assessing) == list(world.evaluation.entries)


def test_a_model_that_was_sent_over_the_wire_frees_its_ring_entry(tmp_path: Path) -> None:
    world = started(Wall(tmp_path, transport="wire"))
    world.evaluation.give_up()
    world.buffer.publish(version=1, entry=1)
    for entry in range(1, 6):
        world.aggregator.pin(entry)
    assert world.aggregator.free_entry() is None
    world.timeline.flush()
    assert all(len(frames) == 2 for _, frames in world.socket.sent)
    assert world.aggregator.free_entry() == 0
    world.close()


def test_an_update_arrives_with_its_result(world: Wall) -> None:
    started(world)
    lease = world.aggregator.leases[1]
    result = done(1, lease, world.written(1, lease), counted=7)
    world.hand.at += 7.0
    (delivery,) = take(world.engine, world.timeline.task_ended(result))
    assert delivery == Delivery(1, result, TIMES, 7, 7.0)
    assert [held.task for held in world.core.held] == [1]
    (other,) = world.timeline.task_ended(done(2, world.aggregator.leases[2], 5, counted=None))
    assert other.examples == 60  # all of the client's examples


@pytest.mark.parametrize("over", ["shm", "wire"])
def test_a_client_that_missed_its_task_is_sent_it_again(tmp_path: Path, over: str) -> None:
    world = Wall(tmp_path, transport=over, join_spread_s=0.0)
    peer = world.the(CLIENT, 1)
    assert list(world.timeline.resend(peer)) == world.socket.sent_to(peer) == []  # it has no task yet
    started(world)
    world.timeline.flush()
    (order,) = world.socket.sent_to(peer)
    assert isinstance(order, messages.Tasks)
    lease = world.aggregator.leases[1]
    for _ in range(2):
        assert list(world.timeline.resend(peer)) == []
        assert world.socket.sent_to(peer) == [order]  # a client that has it ignores the repetition
    world.buffer.retire(lease.entry)
    back = Failed(1, 1, 0.0, "its client did not receive it")
    assert list(world.timeline.resend(peer)) == ([back] if over == "wire" else [])
    assert world.socket.sent_to(peer) == []
    world.say(peer, done(1, lease, 5))  # the client had received the task, and is late
    if over == "wire":
        assert world.received() == []
    else:
        ((_, refusal),) = world.received()
        assert isinstance(refusal, Refusal)
        assert refusal.detail.endswith("whose slot is not written")
    world.close()


def test_the_record_is_written_before_a_task_is_sent_again(world: Wall) -> None:
    started(world)  # its tasks wait for the next flush
    secured: list[int] = []
    world.ahead.secure = lambda: secured.append(len(world.socket.sent))  # type: ignore[method-assign]
    assert list(world.timeline.resend(world.the(CLIENT, 1))) == []
    assert secured == [0]
    assert world.socket.sent


def test_ticks_come_at_their_time(world: Wall) -> None:
    world.timeline.wake(5.0)
    world.timeline.wake(3.0)
    assert world.timeline.wait_ms() == 1000
    world.hand.at += 2.5
    assert world.due() == []
    assert 0 < world.timeline.wait_ms() <= 501
    world.hand.at += 0.5
    assert world.due() == [Ticked(3.0)]
    world.hand.at += 40.0
    assert world.due() == [Ticked(43.0)]
    assert world.timeline.wait_ms() == 1000
    world.aggregator.deferred = Sum(1, (), ())  # a sum waits for room
    assert world.timeline.wait_ms() == 1


def test_an_offline_client_joins_when_it_returns(world: Wall) -> None:
    world.dynamics.set(1, 10.0, "back")
    world.timeline.start()
    assert [event.client for event in world.due() if isinstance(event, Joined)] == [0, 2]
    assert world.timeline.expected == 1
    world.hand.at += 10.0
    world.dynamics.moves[1] = Transition(99.0, "back")  # postponed
    assert world.due() == []
    world.dynamics.set(1, 10.0, "back")
    assert world.due() == [Joined(1, 10.0)]
    assert world.timeline.expected == 0


def test_a_client_whose_process_is_not_ready_joins_once_it_is(world: Wall) -> None:
    peer = world.the(CLIENT, 1)
    peer.ready = False
    world.timeline.start()
    assert [event.client for event in world.due() if isinstance(event, Joined)] == [0, 2]
    peer.ready = True
    assert list(world.timeline.ready(peer)) == [Joined(1, 0.0)]
    assert list(world.timeline.ready(world.peer(EVALUATOR, 0))) == []


def test_an_idle_client_leaves_at_the_declared_time_with_the_reason(world: Wall) -> None:
    world.dynamics.set(1, 4.0, "battery")
    world.core.handle(Joined(1, 0.0))
    world.core.end(world.core.task_of(1))  # type: ignore[arg-type]
    world.hand.at += 4.0
    assert list(world.timeline.due()) == [Left(1, 4.0, "battery", finishes=False)]


def test_a_death_is_declared_from_its_time_on(world: Wall) -> None:
    world.dynamics.set(1, 3.0, "died")
    world.dynamics.set(2, 0.0, "offline")
    started(world)

    def declared() -> list[bool]:
        ends = [Departed(CLIENT, n, 0, "signal 9") for n in range(3)]
        deaths = [next(world.timeline.departed(world.the(CLIENT, end.peer), end)) for end in ends]
        return [death.declared for death in deaths if isinstance(death, Died)]

    assert declared() == [False] * 3
    world.hand.at += 3.5
    assert declared() == [False, True, False]


@pytest.mark.parametrize("on_death", ["replace", "drop"])
def test_a_dead_client_gets_a_new_process_if_the_core_decides_so(world: Wall, on_death: str) -> None:
    world.core.deaths = Deaths(on_death, rejoin_s=30.0)  # type: ignore[arg-type]
    started(world)
    world.clock.time_scale = 2.0
    now_s = world.clock.now_s()
    assert world.client_died() == [Died(1, now_s, "signal 9")]
    assert not world.core.connected(1)
    for wall_s, sent in ((59.0, []), (1.0, [control.Replace(CLIENT, 1, 1)])):
        world.hand.at += wall_s
        world.alarms.run_due()
        assert world.sent == (sent if on_death == "replace" else [])


def test_a_process_that_dies_before_its_client_joins_is_replaced_at_once(world: Wall) -> None:
    world.core.deaths = Deaths(rejoin_s=3600.0)
    assert world.client_died() == [Died(1, 0.0, "signal 9")]
    world.alarms.run_due()
    assert world.sent == [control.Replace(CLIENT, 1, 1)]


@pytest.mark.parametrize("at_s", [3.0, 5.0])
def test_a_death_declared_during_an_interruption_happens_at_its_end(world: Wall, at_s: float) -> None:
    world.dynamics.set(1, at_s, "died")
    started(world)
    world.engine.handle(Joined(1, 0.0))
    world.hand.at += 4.0
    left = world.restore()
    died, gone = Died(1, 4.0, "interrupted", declared=True), Left(1, 4.0, "interrupted")
    assert [one for one in left if one.client == 1] == [died if at_s < 4.0 else gone]


@pytest.mark.parametrize("answer", ["gives up", "had finished", "dies", "finishes first"])
def test_a_client_that_goes_offline_leaves_when_its_task_has_ended(world: Wall, answer: str) -> None:
    started(world)
    world.tasks(1)
    world.dynamics.finishing = answer == "finishes first"
    world.dynamics.set(1, 4.0, "offline")
    world.hand.at += 4.0
    if world.dynamics.finishing:
        assert world.due() == [Left(1, 4.0, "offline", finishes=True)]
        assert world.core.connected(1)
        return
    assert world.due() == []
    assert world.socket.sent_to(world.the(CLIENT, 1)) == [messages.Withdraw([1])]
    assert world.core.connected(1)
    if answer == "gives up":
        expected: list[Event | Delivery] = [Left(1, 4.0, "offline")]
        got = take(world.engine, world.timeline.task_ended(TaskReturned(1, 1, "", "cancelled")))
    elif answer == "had finished":
        lease = world.aggregator.leases[1]
        result = done(1, lease, world.written(1, lease))
        expected = [Left(1, 4.0, "offline", finishes=True), Delivery(1, result, TIMES, 60, 4.0)]
        got = take(world.engine, world.timeline.task_ended(result))
    else:
        expected = [Died(1, 4.0, "signal 9")]
        got = world.client_died()
    assert got == expected
    assert not world.core.connected(1)
    assert list(world.timeline.task_ended(TaskReturned(1, 1, "", "cancelled"))) == [
        Failed(1, 1, 4.0, "cancelled")
    ]


PRIVATE = Privacy(clip_norm=1.0)


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Wall]:
    made = Wall(tmp_path, join_spread_s=0.0, privacy=PRIVATE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("wait_s", "breaks", "failed_s", "due_s"),
    [(3.0, {}, 2.5, 7.0), (0.0, {1: 1.25}, 1.25, 8.25)],  # the latter trip is also in test_run_virtual.py
    ids=["waits at the start", "link breaks"],
)
def test_a_failed_private_trip_ends_when_its_update_was_due(
    private: Wall, wait_s: float, breaks: dict[int, float], failed_s: float, due_s: float
) -> None:
    private.engine.wait_s = lambda client, task, trip: wait_s
    private.trips.breaks = breaks
    started(private)
    private.tasks(1)
    private.hand.at += failed_s
    assert private.trips.planned == []  # the clients plan their trips
    assert private.failed() == []
    assert private.trips.planned == [1]
    private.hand.at += due_s - failed_s - 0.25
    assert private.due() == []
    private.hand.at += 0.25
    assert private.due() == [Failed(1, 1, due_s, "its data")]


@pytest.mark.parametrize("how", ["raises", "dies", "dies and is given up"])
def test_a_failed_private_trip_is_an_update_of_zero_when_its_update_was_due(private: Wall, how: str) -> None:
    """No other client is started instead. The client gets its next task, which counts, too."""
    started(private)
    private.tasks(1)
    slot = private.aggregator.leases[1].slot
    private.buffer.raw(slot)[:] = 7  # the client had begun to write
    private.hand.at += 2.5
    if how == "raises":
        assert private.failed() == []
    else:
        private.core.deaths = Deaths("replace" if how == "dies" else "drop")
        assert private.client_died() == [Died(1, 2.5, "signal 9")]
        assert private.lifecycle.returning == (how == "dies")
        assert list(private.gate.receive()) == []
    assert private.core.connected(1)
    assert private.due() == []
    assert private.core.task_of(1) == 1
    private.hand.at += 1.5
    (failed,) = private.due()
    assert failed == Failed(1, 1, 4.0, "its data" if how == "raises" else "signal 9")
    assert [held.task for held in private.core.held] == [1]
    assert not private.buffer.slot(slot).any()
    assert private.core.task_of(1) == 3  # it has its next task, even without a process
    if how == "raises":
        assert private.tasks(1) == [3]
        return
    private.timeline.flush()
    private.hand.at += 4.0
    assert private.due() == [Failed(1, 3, 8.0, "its process has died")]
    assert private.core.version == 1  # two updates of zero make a version
    back = private.peers.expect(CLIENT, 1, epoch=1)
    back.ready = True
    assert list(private.timeline.ready(back)) == []


@pytest.mark.parametrize("why", ["offline", "died", "cancelled"])
def test_a_failed_private_trip_ends_early_if_its_client_leaves_or_it_is_cancelled(
    private: Wall, why: str
) -> None:
    started(private)
    private.tasks(1)
    if why == "died":
        private.dynamics.set(1, 3.0, why)
    private.hand.at += 1.0
    private.failed()
    private.hand.at += 2.0
    if why == "cancelled":
        private.core.cancelled.add(1)
        private.timeline.cancel(1, 1)
        assert private.due() == [Failed(1, 1, 3.0, "its data")]
        assert private.core.held == []
        return
    if why == "offline":
        private.dynamics.set(1, 3.0, why)
    gone = Died(1, 3.0, why, declared=True) if why == "died" else Left(1, 3.0, why)
    assert private.due() == [gone]
    assert (private.core.held, private.core.connected(1)) == ([], False)


def test_no_client_joins_or_leaves_after_the_run(world: Wall) -> None:
    started(world)
    world.core.stopped = "versions"
    world.dynamics.set(1, 2.0, "offline")
    world.dynamics.set(2, 2.0, "back")
    world.hand.at += 2.0
    assert world.due() == []


def test_after_an_interruption_all_clients_have_left(world: Wall) -> None:
    started(world)
    world.evaluation.request(0, 0)
    assert world.timeline.save().entries == {0: 0}
    assert world.restore() == [Left(client, 0.0, "interrupted") for client in range(3)]


@pytest.mark.parametrize("changes", [False, True], ids=["static", "dynamic"])
def test_after_an_interruption_clients_return_after_their_delays(world: Wall, changes: bool) -> None:
    """A client returns after its delay even if its process becomes ready late. No client joins twice."""
    started(world)
    world.trips.returns = {0: 2.0, 1: 0.5}
    world.restore()
    for client in range(3):
        if changes:
            world.dynamics.set(client, 0.0, "back")
    world.the(CLIENT, 0).ready = False
    world.timeline.start()
    assert world.due() == [Joined(2, 0.0)]
    world.the(CLIENT, 0).ready = True
    assert take(world.engine, world.timeline.ready(world.the(CLIENT, 0))) == []
    world.hand.at += 0.5
    assert world.due() == [Joined(1, 0.5)]
    assert world.timeline.expected == 1
    world.hand.at += 1.5
    assert world.due() == [Joined(0, 2.0)]
    assert world.timeline.expected == 0
    world.hand.at += 9.0
    assert world.due() == []


@pytest.mark.parametrize("is_private", [False, True])
def test_after_an_interruption_a_client_that_died_still_stays_away(tmp_path: Path, is_private: bool) -> None:
    """Regression: the client was back at once. In a private run it must be, because a return must not
    depend on such a death."""
    world = started(Wall(tmp_path, join_spread_s=0.0, privacy=PRIVATE if is_private else None))
    world.core.deaths = Deaths(rejoin_s=30.0)
    world.client_died()
    world.restore()
    world.peers.expect(CLIENT, 1, epoch=1).ready = True
    world.timeline.start()
    joined = [event.client for event in world.due() if isinstance(event, Joined)]
    assert sorted(joined) == ([0, 1, 2] if is_private else [0, 2])
    if not is_private:
        world.hand.at += 30.0
        assert Joined(1, 30.0) in world.due()
    world.close()


def test_an_interruption_starts_no_client_to_replace_one_that_leaves(world: Wall) -> None:
    world.core.strategy = FedBuff(buffer_size=2, concurrency=2)
    started(world)
    assert (list(world.core.running), list(world.core.idle)) == ([0, 1], [2])
    world.restore()
    assert (world.core.lost, world.core.training, any(world.core.present)) == (2, 0, False)


def test_a_task_that_was_lost_before_it_was_sent_is_not_sent_later(world: Wall) -> None:
    started(world)
    world.timeline.flush()
    world.socket.sent.clear()
    task = world.core.task_of(0)
    order = messages.Task(client=0, task=99, trip=1, version=0, entry=0, slot=0, cut=None, condition=None)
    world.aggregator.leases[99] = world.aggregator.leases[task]
    world.timeline.assign(order)
    del world.aggregator.leases[99]  # it was lost with its client
    world.timeline.flush()
    assert world.socket.sent == []


@pytest.mark.parametrize("endless", [True, False])
def test_a_run_that_only_an_evaluation_can_stop_fails_without_an_evaluator(
    world: Wall, endless: bool
) -> None:
    stop = Stop(accuracy=0.9) if endless else Stop(accuracy=0.9, trips=10)
    loop = world.loop(msgspec.structs.replace(experiment(), stop=stop))
    world.peer(EVALUATOR, 0)
    world.the(CLIENT, 0).ready = False  # so no client trains
    world.engine.carry_out([Evaluate(0)])
    for epoch in range(MAX_DEATHS_IN_A_ROW - 1):
        loop._departed(Departed(EVALUATOR, 0, epoch, "signal 9"))
        world.alarms.run_due()
    assert len(world.sent) == MAX_DEATHS_IN_A_ROW - 1  # it was replaced each time
    fails = pytest.raises(RunError, match="the evaluator died too often") if endless else nullcontext()
    with fails:
        loop._departed(Departed(EVALUATOR, 0, MAX_DEATHS_IN_A_ROW - 1, "signal 9"))
    assert not world.evaluation.waiting


def test_the_servers_time_is_shared_by_the_trips_since_it_was_started(
    world: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.core.trips = 40
    loop = world.loop(experiment())
    world.core.trips = 50
    monkeypatch.setattr(resume, "save", lambda *_, final: world.store.sync())
    for _ in range(3):
        world.watch.to("decide")
        loop._checkpoint()
    with Record(world.store.path.parent) as record:
        assert {row.stage: row.calls for row in record.costs}["decide"] >= 3
    monkeypatch.setattr(loop, "_report", lambda: None)
    monkeypatch.setattr(world.gauge, "trip_us", lambda together_s, trips: float(trips), raising=False)
    loop._conclude()
    assert world.store.meta("server_trip_us") == 10.0
    with Record(world.store.path.parent) as record:
        calls = {row.stage: row.calls for row in record.costs}
        seconds = math.fsum(row.seconds for row in record.costs)
    assert calls == world.watch.calls
    assert seconds == pytest.approx(sum(world.watch.ns.values()) / 1e9)
