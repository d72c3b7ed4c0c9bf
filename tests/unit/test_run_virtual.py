"""The virtual clock's timeline and its dispatch: events happen in the order of emulated time, whatever
the workers do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from run_parts import Parts, done, experiment, take

from edgefl.core.deaths import Deaths
from edgefl.core.events import Died, Failed, Halted, Joined, Left, Sum, Ticked
from edgefl.devices.link import Transfer
from edgefl.devices.plan import TripPlan
from edgefl.errors import RunError
from edgefl.experiment import Privacy, Stop
from edgefl.learning.growth import GrowingData
from edgefl.parameters.buffer import SlotState, TripPhase
from edgefl.results.record import Record
from edgefl.run import control, messages, virtual
from edgefl.run.clock import VirtualClock
from edgefl.run.control import ABSENT, IDLE, WORKER
from edgefl.run.dispatch import MAX_DEATHS, MAX_TASKS, PREFETCH_S, Dispatch, FatalTask
from edgefl.run.engine import Engine
from edgefl.run.gate import TaskReturned
from edgefl.run.peers import MAX_DEATHS_IN_A_ROW
from edgefl.run.timeline import Delivery, TimelineEvent
from edgefl.run.virtual import TRAINING_DEATH, VirtualTimeline

DOWN, COMPUTE, UP = TripPhase.DOWN, TripPhase.COMPUTE, TripPhase.UP
INSTANT = Transfer(4, 4, 0, 0.0, math.inf, 4)


class FixedTrips:
    """Plans each client's trips with a fixed training time. Downloads of the clients in ``breaks`` break."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.data = GrowingData([60] * len(seconds), None, seed=0)
        self.breaks: dict[int, float] = {}
        self.planned: list[int] = []
        self.returns: dict[int, float] = {}

    def returns_after_s(self, client: int, resumption: int) -> float:
        return self.returns.get(client, 0.0)

    def plan(self, client: int, *_: object) -> TripPlan:
        self.planned.append(client)
        down = INSTANT
        if client in self.breaks:  # its download breaks after that many seconds, at 1 byte/s
            down = down._replace(rate_bytes_per_s=1.0, breaks_after=1, lead_s=self.breaks[client] - 1.0)
        return TripPlan(down, 0.0, self.seconds[client], math.inf, INSTANT)


class Virtual(Parts):
    """`Parts` with a virtual clock's timeline and an engine. The tests play the workers."""

    def __init__(
        self, folder: Path, *, workers: int = 1, stop: Stop | None = None, privacy: Privacy | None = None
    ) -> None:
        super().__init__(folder, stop=stop, privacy=privacy)
        self.virtual_clock = VirtualClock(emulated_s=0.0, wall_s=0.0)
        self.trips = FixedTrips([3.0, 1.0, 1.5])
        wanted = experiment(join_spread_s=0.0)
        self.timeline = VirtualTimeline(
            wanted, self.virtual_clock, self.core, None, self.aggregator, self.evaluation, self.peers,
            self.lifecycle_of(wanted, self.virtual_clock), self.gate, self.store, self.trips, workers,  # type: ignore[arg-type]
        )  # fmt: skip
        self.engine = Engine(
            self.core, self.aggregator, self.store, self.timeline, self.evaluation, self.watch
        )
        self.timeline.expect()
        for peer in self.peers.of(WORKER):
            peer.ready = True
        self.timeline.start()

    def due(self) -> list[TimelineEvent]:
        return take(self.engine, self.timeline.due())

    def given(self, number: int = 0) -> list[messages.Task]:
        """Flush, and return the tasks that are sent to this worker."""
        self.timeline.flush()
        sent = self.socket.sent_to(self.the(WORKER, number))
        return [task for message in sent if isinstance(message, messages.Tasks) for task in message.tasks]

    def compute(self, task: messages.Task, worker: int = 0) -> None:
        """Let the worker send this task's result."""
        lease = self.aggregator.leases[task.task]
        checksum = self.written(task.task, lease)
        self.say(self.the(WORKER, worker), done(task.task, lease, checksum, times=None, counted=None))
        for _, result in self.received():
            take(self.engine, self.timeline.task_ended(result))

    def give_back(self, task: messages.Task, reason: str) -> TaskReturned:
        """Let worker 0 return this task; return its message."""
        self.say(self.the(WORKER, 0), messages.Gone(task.client, task.task, reason, task.order))
        ((_, returned),) = self.received()
        assert isinstance(returned, TaskReturned)
        assert list(self.timeline.task_ended(returned)) == []
        return returned


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Virtual]:
    made = Virtual(tmp_path)
    yield made
    made.close()


def test_a_worker_gets_tasks_in_the_order_in_which_they_are_due(world: Virtual) -> None:
    assert [event.client for event in world.due() if isinstance(event, Joined)] == [0, 1, 2]
    tasks = world.given()
    while (more := world.given()) or len(tasks) < 3:
        tasks += more
        for task in tasks:
            if world.aggregator.leases[task.task].holder == 0:
                world.compute(task)
    assert [task.client for task in tasks] == [1, 2, 0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_updates_computed_in_any_order_arrive_when_due(tmp_path: Path, order: Sequence[int]) -> None:
    world = Virtual(tmp_path, workers=3)
    world.due()
    tasks = {task.client: (task, worker) for worker in range(3) for task in world.given(worker)}
    while len(tasks) < 3:
        tasks |= {task.client: (task, worker) for worker in range(3) for task in world.given(worker)}
    seen: list[tuple[int, float]] = []
    for client in order:
        world.compute(*tasks[client])
        seen += [(one.client, one.at_s) for one in world.due() if isinstance(one, Delivery)]
    assert seen[:2] == [(1, 1.0), (2, 1.5)]
    world.close()


def test_ticks_and_arrivals_come_in_the_order_of_time(world: Virtual) -> None:
    world.due()
    world.timeline.wake(0.5)
    world.timeline.wake(1.25)
    assert world.due() == [Ticked(0.5)]
    assert world.virtual_clock.now_s() == 0.5  # the next event is an arrival whose update is not computed
    for task in world.given():
        world.compute(task)
    delivery, tick, *_ = world.due()
    assert isinstance(tick, Ticked)
    times = delivery.times  # those of the plan
    assert times.trip == messages.Spent(1.0, 1.0) == times.compute
    assert (delivery.examples, delivery.result.steps, times.lateness_s) == (60, 5, 0.0)
    assert math.isclose(delivery.at_s, 1.0)


def test_the_tasks_of_a_dead_worker_go_to_its_successor(world: Virtual) -> None:
    world.due()
    (first, second) = tasks = world.given()
    dead = world.peers.remove(WORKER, 0, 0)
    end = control.Departed(WORKER, 0, 0, "signal 9")
    assert list(world.timeline.departed(dead, end)) == []
    assert all(world.aggregator.leases[task.task].holder == -1 for task in tasks)
    assert world.buffer.state[first.slot] == SlotState.LEASED
    world.peers.expect(WORKER, 0, epoch=1).ready = True
    assert [task.task for task in world.given()] == [first.task, second.task]
    dead.deaths_in_a_row = MAX_DEATHS_IN_A_ROW - 1
    with pytest.raises(RunError, match="worker 0 died too often"):
        world.timeline.departed(dead, end)


def kill(world: Virtual, begun: messages.Task | None) -> None:
    """Kill and replace worker 0, which has begun the task ``begun`` (None: no task)."""
    dead = world.the(WORKER, 0)
    end = control.Departed(WORKER, 0, dead.epoch, "exit 7", None if begun is None else begun.task)
    world.peers.remove(WORKER, 0, dead.epoch)
    assert list(world.timeline.departed(dead, end)) == []
    world.alarms.run_due()
    again = world.the(WORKER, 0)
    assert (again.epoch, again.deaths_in_a_row) == (dead.epoch + 1, int(begun is None))
    again.ready = True


def die(world: Virtual, client: int) -> list[TimelineEvent]:
    """Kill `MAX_DEATHS` workers in this client's task, and compute all other tasks; return the events."""
    happened: list[TimelineEvent] = []
    for _ in range(MAX_DEATHS):
        tasks: list[messages.Task] = []
        while not any(task.client == client for task in tasks):
            happened += world.due()
            for task in (tasks := world.given()):
                if task.client != client:
                    world.compute(task)
        (task,) = (task for task in tasks if task.client == client)
        kill(world, task)
    return happened + world.due()


def test_training_that_kills_its_process_is_a_death_of_its_client_until_it_is_given_up(
    tmp_path: Path,
) -> None:
    world = Virtual(tmp_path, stop=Stop(versions=100))
    world.due()
    gone = []
    for _ in range(MAX_DEATHS_IN_A_ROW):
        happened = die(world, 1)
        ((left, at),) = ((one, at) for at, one in enumerate(happened) if isinstance(one, Died))
        assert (left.client, left.reason) == (1, f"{TRAINING_DEATH}: exit 7")
        gone.append(left.at_s)
        back = [one.at_s for one in happened[at:] if isinstance(one, Joined)]
        assert back == ([left.at_s] if len(gone) < MAX_DEATHS_IN_A_ROW else [])
    assert gone == [1.0, 2.0, 3.0, 4.0, 5.0]  # its trips take a second
    world.close()
    with Record(tmp_path) as record:
        assert [(row.at_s, row.client, row.kind, row.detail) for row in record.incidents] == [
            *((at_s, 1, "death", "exit 7") for at_s in gone),
            (5.0, 1, "gave-up", "died 5 times in a row"),
        ]


def test_in_a_private_run_training_that_kills_its_process_is_an_update_of_zero(tmp_path: Path) -> None:
    """If it left, another client would be started: participation would depend on a client's data."""
    world = Virtual(tmp_path, stop=Stop(versions=100), privacy=Privacy(clip_norm=1.0))
    world.due()
    for at_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        happened = die(world, 1)
        assert not [one for one in happened if isinstance(one, Left | Joined)]
        (failed,) = (one for one in happened if isinstance(one, Died))
        assert world.core.connected(1)
        assert (failed.client, failed.at_s, failed.reason) == (1, at_s, f"{TRAINING_DEATH}: exit 7")
    assert (world.core.lost, world.core.failed, world.core.dropped) == (0, 0, 0)
    world.store.commit()
    world.close()
    with Record(tmp_path) as record:
        assert [(row.client, row.kind) for row in record.incidents] == [(1, "death")] * 6
        reasons = {trip.client: trip.reason for trip in map(record.trip, (1, 3)) if trip.fate == "applied"}
    assert reasons == {1: f"summed as zero: {TRAINING_DEATH}: exit 7"}


def test_a_task_that_is_cancelled_before_it_is_sent_is_never_computed(world: Virtual) -> None:
    world.due()
    world.timeline.cancel(0, 0)
    assert [one for one in world.due() if isinstance(one, Failed)] == [Failed(0, 0, 0.0, "cancelled")]
    assert 0 not in {task.task for task in world.given()}


def test_a_cancelled_task_of_a_worker_ends_when_the_worker_returns_it(world: Virtual) -> None:
    world.due()
    task = world.given()[0]
    world.timeline.cancel(task.client, task.task)
    assert world.due() == []  # the worker may still write into the slot
    world.timeline.flush()
    assert messages.Withdraw([task.task]) in world.socket.sent_to(world.the(WORKER, 0))
    world.give_back(task, "cancelled")
    assert world.due()[0] == Failed(task.client, task.task, 0.0, "cancelled")


def test_a_failure_and_its_incident_have_the_time_at_which_the_task_was_due(tmp_path: Path) -> None:
    world = Virtual(tmp_path)
    world.due()
    task = world.given()[0]
    assert world.give_back(task, "ValueError: no").kind == "failed"
    assert world.due()[0] == Failed(1, task.task, 1.0, "ValueError: no")
    world.close()
    with Record(tmp_path) as record:
        assert [(row.at_s, row.client, row.kind, row.detail) for row in record.incidents] == [
            (1.0, 1, "failed", "ValueError: no")
        ]


def test_a_trip_whose_link_breaks_fails_at_that_time_and_is_not_computed(world: Virtual) -> None:
    world.trips.breaks[1] = 1.25
    failed = [one for one in world.due() if isinstance(one, Failed)]
    assert (failed[0].client, failed[0].at_s) == (1, 1.25)
    assert "lost" in failed[0].reason
    assert 1 not in {task.client for task in world.given()}


def test_in_a_private_run_a_broken_trip_fails_when_its_update_would_have_arrived(tmp_path: Path) -> None:
    """The same trip, of 4 bytes at 1 byte/s, is in test_run_wall.py under the wall clock."""
    world = Virtual(tmp_path, privacy=Privacy(clip_norm=1.0))
    world.trips.seconds = [4.0, 4.0, 4.0]
    for client in range(3):
        world.trips.breaks[client] = 1.25
    failed = [one for one in world.due() if isinstance(one, Failed)]
    assert [one.at_s for one in failed[:3]] == [8.25] * 3
    assert world.given() == []
    world.close()


def test_no_event_is_due_while_a_sum_waits_or_after_the_run(world: Virtual) -> None:
    world.aggregator.deferred = Sum(1, (), ())
    assert world.due() == []
    world.aggregator.deferred = None
    assert len(world.due()) == 3
    world.timeline.wake(0.5)
    world.core.stopped = "versions"
    assert world.due() == []
    assert world.given() == []


def test_a_run_that_stops_at_an_accuracy_waits_for_each_evaluation(tmp_path: Path) -> None:
    world = Virtual(tmp_path)
    world.timeline.experiment = msgspec.structs.replace(experiment(), stop=Stop(accuracy=0.9))
    world.evaluation.request(0, 0)
    assert world.due() == []
    assert world.evaluation.complete(0)
    assert len(world.due()) == 1  # the core asks for the evaluation of the first version
    assert world.due() == []
    assert world.evaluation.complete(0)
    assert len(world.due()) == 2
    world.close()


def test_a_run_whose_trips_take_no_time_is_ended(world: Virtual, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STALL_LIMIT", 2)
    world.timeline.experiment = msgspec.structs.replace(experiment(), stop=Stop(emulated_s=5.0))
    for at_s in (1.0,) * 6 + (2.0,) * 6:
        world.timeline._require_time(at_s)
    with pytest.raises(RunError, match="emulated time stands still at 2 s: 7 trips took no time; set stop"):
        world.timeline._require_time(2.0)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_run_in_which_phones_only_join_and_leave_is_ended(
    world: Virtual, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose phones were dropped has results, so it does not fail."""
    monkeypatch.setattr(virtual, "STALL_LIMIT", 2)
    world.core.deaths = Deaths("drop")
    if dropped:
        world.core.deaths.died(Died(1, 0.0, "signal 9"))
    assert [world.timeline._count_change() for _ in range(6)] == [None] * 6
    if dropped:
        assert world.timeline._count_change() == Halted(0.0, "too few clients are left: 0 of 3")
        return
    with pytest.raises(RunError, match="phones joined or left 7 times since the last new task, 0 updates"):
        world.timeline._count_change()


def test_a_turn_handles_at_most_128_events(world: Virtual) -> None:
    world.due()
    for tick in range(300):
        world.timeline.wake(1e-6 * (1 + tick))
    assert len(world.due()) == 128
    assert world.timeline.wait_ms() == 0
    assert len(world.due()) == 128
    assert len(world.due()) == 44
    assert world.timeline.wait_ms() == 1000


def test_results_computed_ahead_are_in_the_checkpoint(world: Virtual) -> None:
    world.due()
    tasks = world.given()
    last = tasks[-1]
    world.compute(last)
    ahead = world.timeline.save()
    assert [answer.task for answer in ahead.answers] == ahead.tasks == [last.task]
    assert ahead.entries == {0: 0}  # the others start from there


def test_the_task_of_a_client_that_is_leaving_needs_no_version_in_the_checkpoint(world: Virtual) -> None:
    world.due()
    task = world.given()[0]
    left = Left(task.client, 0.0, "offline")
    world.timeline._running_trips[task.task].left = left  # a worker has its task
    world.timeline.cancel(task.client, task.task)
    ahead = world.timeline.save()
    assert [(type(answer), answer.task) for answer in ahead.answers] == [(messages.Gone, task.task)]
    assert ahead.tasks == []


class Workers:
    """Records the tasks that each worker gets; workers in ``gone`` accept none."""

    def __init__(self) -> None:
        self.given: dict[int, list[int]] = {}
        self.gone: set[int] = set()
        self.dispatch = Dispatch(self.give)

    def give(self, worker: int, tasks: Sequence[messages.Task]) -> bool:
        if worker in self.gone:
            return False
        self.given.setdefault(worker, []).extend(task.task for task in tasks)
        return True

    def add(self, *due_s: float, first: int = 0) -> None:
        """Add tasks, numbered from ``first``, that are due at these times."""
        for task, at_s in enumerate(due_s, first):
            self.dispatch.add(messages.Task(task, task, 0, 0, 0, task, None, None), at_s)

    def knows(self, tasks: int, cpu_s: float) -> None:
        """Run this many tasks, one after the other; each takes ``cpu_s`` seconds of CPU time."""
        for task in range(tasks):
            self.add(task, first=task)
            self.dispatch.fill([0])
            self.finish(task, cpu_s)

    def finish(self, task: int, cpu_s: float = 1.0) -> None:
        self.dispatch.finished(messages.TaskResult(task, 0, 1, 0.5, 1, cpu_s, 9.0, {}))


@pytest.fixture
def workers() -> Workers:
    return Workers()


def test_while_a_sum_waits_for_room_the_oldest_tasks_come_first(workers: Workers) -> None:
    workers.add(9.0, 8.0, 1.0, 2.0)
    workers.dispatch.oldest_first = True
    workers.dispatch.fill([0])
    workers.dispatch.oldest_first = False
    workers.dispatch.fill([0, 1])
    assert workers.given == {0: [0, 1], 1: [2, 3]}


def test_long_tasks_are_given_out_in_pairs(workers: Workers) -> None:
    workers.add(*range(20))
    workers.dispatch.fill([0, 1, 2])
    assert workers.given == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    workers.dispatch.fill([0, 1, 2])
    assert sum(map(len, workers.given.values())) == 6
    workers.finish(3)
    workers.dispatch.fill([0, 1, 2])
    assert workers.given[1] == [2, 3, 6]


def test_short_tasks_are_given_out_in_large_numbers(workers: Workers) -> None:
    workers.knows(150, PREFETCH_S / 1000)
    workers.add(*range(150, 300), first=150)
    workers.dispatch.fill([0])
    assert len(workers.given[0]) == 150 + MAX_TASKS
    workers.finish(150)
    workers.dispatch.fill([0])  # the worker still has more than half of them
    assert len(workers.given[0]) == 150 + MAX_TASKS


def test_few_tasks_are_divided_among_all_workers(workers: Workers) -> None:
    workers.knows(100, 0.0)  # so each worker could get many
    workers.given.clear()
    workers.add(*range(100, 110), first=100)
    workers.dispatch.fill([0, 1])
    assert {worker: len(tasks) for worker, tasks in workers.given.items()} == {0: 5, 1: 5}


def test_a_task_that_a_worker_does_not_accept_goes_to_another(workers: Workers) -> None:
    workers.gone = {0}
    workers.add(1.0)
    workers.dispatch.fill([0])
    assert workers.dispatch.worker_of(0) is None
    workers.dispatch.fill([1])
    assert workers.dispatch.worker_of(0) == 1


def test_a_task_that_kills_workers_is_given_up_and_its_neighbour_is_not(workers: Workers) -> None:
    workers.add(1.0, 2.0, first=3)
    for loss in range(MAX_DEATHS):
        assert workers.dispatch.results == {}
        workers.dispatch.fill([0])
        assert workers.given == {0: [3, 4] * (loss + 1)}
        workers.dispatch.worker_died(0, 3, "exit 7")
    workers.dispatch.fill([0])
    assert workers.given[0][-1] == 4
    assert workers.dispatch.worker_of(3) is None
    assert workers.dispatch.results == {3: FatalTask(3, 3, "exit 7")}


def test_deaths_between_tasks_are_blamed_on_no_task(workers: Workers) -> None:
    workers.add(1.0)
    for _ in range(2 * MAX_DEATHS):
        workers.dispatch.fill([0])
        workers.dispatch.worker_died(0, None, "signal 9")
    assert workers.dispatch.results == {}


def test_the_queue_by_due_time_keeps_few_entries_of_finished_tasks(workers: Workers) -> None:
    for task in range(5_000):
        workers.dispatch.oldest_first = task % 3 == 0
        workers.add(1e6 - task, first=task)
        workers.dispatch.fill([0])
        for number in list(workers.dispatch._at_work):
            workers.finish(number, 0.0)
            workers.dispatch.results.clear()
    assert len(workers.dispatch._by_due) < 1100


def test_the_shown_states_follow_the_plans_at_the_emulated_time(world: Virtual) -> None:
    assert world.timeline.states() == bytes([ABSENT] * 3)
    world.trips.breaks[0] = 60.0  # its download is long
    world.due()
    world.virtual_clock.advance(1.2)  # past the training of client 1, whose upload takes no time
    assert list(world.timeline.states()) == [IDLE + phase for phase in (DOWN, UP, COMPUTE)]
