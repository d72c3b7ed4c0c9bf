"""The executor with a real core, aggregator, buffer and record; clients and evaluator are a heap of calls."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_world import CLIENTS, SIZE, Faults, World

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Halted, Left, Summed
from edgefl.errors import WireError
from edgefl.results.record import FATES, Record, TripRow
from edgefl.run import messages, resume
from edgefl.run.clock import WallClock
from edgefl.strategies.base import ServerOptimizer
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet

STRATEGIES = {
    "fedbuff": FedBuff(buffer_size=4),
    "fedbuff with momentum": FedBuff(buffer_size=4, momentum=0.9, server_lr=0.3),
    "fedasync": FedAsync(),
}
TRIPS = experiment.Stop(trips=200)
FAULTS = Faults(
    nan=frozenset({(3, 2), (4, 4)}),
    altered=frozenset({(5, 3), (1, 6)}),
    given_back=frozenset({(2, 1), (2, 2), (7, 5)}),
)


def trip_rows(folder: Path, world: World) -> list[TripRow]:
    with Record(folder) as record:
        return [record.trip(task) for task in world.tasks]


# ---- whole runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["all well", "with faults"])
def test_two_hundred_trips_are_on_record_as_they_were(tmp_path: Path, name: str, faults: Faults) -> None:
    world = World(tmp_path, STRATEGIES[name], TRIPS, faults=faults).join().finish()
    core = world.core
    assert world.stopped == core.stopped == "trips"
    assert world.aggregator.leases == {}
    assert core.trips >= 200
    world.close()
    rows = trip_rows(tmp_path, world)

    assert set(world.store.ends) == set(world.tasks)
    assert all(len(ends) == 1 for ends in world.store.ends.values())
    assert [row.fate for row in rows] == [world.store.ends[task][0] for task in world.tasks]
    fates = Counter(row.fate for row in rows)
    assert [fates[fate] for fate in FATES] == [core.applied, core.discarded, core.dropped, core.failed]

    for row in rows:
        task = world.tasks[row.task]
        assert (row.client, row.trip, row.base_version) == (task.client, task.trip, task.version)
        if row.fate == "lost":
            assert row.arrived_s is row.trained_version is row.checksum_sent is None
            continue
        assert row.trained_version == row.base_version
        assert row.checksum_sent is not None
        place = (row.client, row.trip)
        if row.fate in ("applied", "dropped"):
            assert (row.checksum_seen == row.checksum_sent) == (place not in faults.altered)
        assert row.sent_s < row.arrived_s
        assert row.received_s == row.sent_s + 1.25
        assert (row.down_bytes, row.up_bytes, row.examples) == (4 * SIZE, 4 * SIZE, 60 + row.client)
        if row.fate == "applied":
            assert row.applied_version is not None
            assert row.staleness is not None
            assert row.applied_version > row.base_version + row.staleness - 1
            assert row.weight is not None
            assert row.weight > 0

    with Record(tmp_path) as record:
        versions = record.versions
        assert versions["version"].tolist() == list(range(1, core.version + 1))
        assert int(versions["updates"].sum()) == core.applied == world.aggregator.totals.updates
        sums = list(record.sums())
        assert [version for version, _, _ in sums] == versions["version"].tolist()
        for (_, tasks, weights), total in zip(sums, versions["weight_sum"], strict=True):
            assert math.isclose(float(weights.sum()), total)
            assert all(world.store.ends[int(task)] == ["applied"] for task in tasks)
        assert [row.version for row in record.evaluations] == world.assessed


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_run_twice_gives_the_same_bytes_and_the_same_journal(tmp_path: Path, name: str) -> None:
    seen = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        world = World(folder, STRATEGIES[name], TRIPS, faults=FAULTS).join().finish()
        world.close()
        with Record(folder) as record:
            seen.append((world.model(), list(record.events()), trip_rows(folder, world)))
    assert seen[0] == seen[1]
    other = World(tmp_path, STRATEGIES[name], TRIPS, faults=FAULTS, seed=6).join().finish()
    other.close()
    assert other.model() != seen[0][0]


def test_the_journal_alone_makes_the_same_core(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, faults=FAULTS).join().finish()
    world.close()
    again = Core(STRATEGIES["fedbuff"], fleet(CLIENTS), world.seed, TRIPS, evaluate_every=5)
    with Record(tmp_path) as record:
        for _, event in record.events():
            again.handle(event)
    for name in ("version", "trips", "applied", "dropped", "discarded", "failed", "staleness_sum", "stopped"):
        assert getattr(again, name) == getattr(world.core, name)
    assert again.applied_weight.tolist() == world.core.applied_weight.tolist()


def test_the_model_is_the_sum_of_what_is_on_record(tmp_path: Path) -> None:
    """The record's weights on the clients' updates, in float64, give the model."""
    world = World(tmp_path, STRATEGIES["fedbuff"], experiment.Stop(versions=12))
    updates: dict[int, Any] = {}
    real = world.executor.arrived

    def keep(done: messages.Done, lease: Any, at_s: float) -> None:
        updates[done.task] = world.buffer.slot(lease.slot).astype(np.float64)
        real(done, lease, at_s)

    world.executor.arrived = keep  # type: ignore[method-assign]
    model = world.buffer.model(0).astype(np.float64)
    world.join().finish()
    world.close()
    with Record(tmp_path) as record:
        for _, tasks, weights in record.sums():
            model += sum(weight * updates[int(task)] for task, weight in zip(tasks, weights, strict=True))
    np.testing.assert_allclose(np.frombuffer(world.model(), np.float32), model, rtol=1e-4, atol=1e-6)


# ---- bad updates -------------------------------------------------------------------------------


def test_bad_updates_are_incidents_and_never_reach_the_model(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, faults=FAULTS).join().finish()
    world.close()
    assert np.isfinite(np.frombuffer(world.model(), np.float32)).all()
    places = {task.task: (task.client, task.trip) for task in world.tasks.values()}
    with Record(tmp_path) as record:
        seen = {
            (row.kind, places[int(row.detail.removeprefix("update of task "))], row.client)
            for row in record.incidents
        }
        used = {int(task) for _, tasks, _ in record.sums() for task in tasks}
    assert seen == {("non-finite", place, place[0]) for place in FAULTS.nan} | {
        ("checksum", place, place[0]) for place in FAULTS.altered
    }
    bad = {task for task, place in places.items() if place in FAULTS.nan | FAULTS.altered}
    assert not bad & used
    assert all(world.store.ends[task] == ["dropped"] for task in bad)


def test_a_second_end_of_the_same_task_is_the_peers_fault(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    while not world.core.held:
        world.turn()
    held = world.core.held[0]
    seq, lease = world.store.seq, world.aggregator.leases[held.task]
    with pytest.raises(WireError, match=f"an update of task {held.task}, which had been done before"):
        world.executor.arrived(world.done(world.tasks[held.task], 1), lease, world.now)
    assert world.store.seq == seq
    assert world.core.held[0] is held
    world.finish().close()
    assert world.store.ends[held.task] == ["applied"]


# ---- the ring is full --------------------------------------------------------------------------


def test_a_sum_waits_for_readers_and_is_then_made(tmp_path: Path) -> None:
    slow = frozenset((client, trip) for client in (0, 4) for trip in (1, 3))
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, ring=2, faults=Faults(slow_to_read=slow))
    world.join().finish()
    assert world.most_deferred > 0
    assert world.executor.deferred is None
    assert world.stopped == "trips"
    world.close()
    for row in trip_rows(tmp_path, world):
        if row.fate == "applied":
            assert row.checksum_seen == row.checksum_sent


def test_while_a_sum_waits_nothing_is_published_or_released(tmp_path: Path) -> None:
    slow = Faults(slow_to_read=frozenset({(0, 0)}))
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, ring=2, faults=slow).join()
    while world.executor.deferred is None:
        assert world.turn()
    version, waiting = world.core.version, world.executor.deferred
    assert waiting.version == version + 1
    before = world.buffer.latest
    for _ in range(3):
        world.executor.retry_sum()
        assert world.executor.deferred == waiting
    assert world.buffer.latest == before
    assert all(task in world.aggregator.leases for task in waiting.tasks)
    while world.executor.deferred is not None:
        assert world.turn()
    assert world.core.version >= waiting.version
    assert all(world.store.ends[task] == ["applied"] for task in waiting.tasks)
    world.finish().close()


def test_retrying_without_a_deferred_sum_is_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    seq = world.store.seq
    world.executor.retry_sum()
    assert world.store.seq == seq
    world.close()


# ---- leaving, halting, carrying on -------------------------------------------------------------


def test_a_client_that_leaves_loses_its_task_and_frees_its_slot(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    task = next(task for task in world.tasks.values() if task.client == 6)
    world.executor.handle(Left(6, world.now, "signal 9"))
    assert task.task not in world.aggregator.leases
    world.close()
    with Record(tmp_path) as record:
        row = record.trip(task.task)
    assert (row.fate, row.reason, row.arrived_s) == ("lost", "signal 9", None)


def test_a_halted_run_stops_once_and_discards_what_is_held(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    while len(world.core.held) < 2:
        world.turn()
    held = [update.task for update in world.core.held]
    world.executor.handle(Halted(world.now, "wall_s"))
    assert world.stopped == "wall_s"
    assert all(world.store.ends[task] == ["discarded"] for task in held)
    world.finish()
    assert world.aggregator.leases == {}
    assert set(world.store.ends) == set(world.tasks)
    world.close()


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("fedbuff", "updates held"),
        ("fedbuff with momentum", "updates held"),
        *((name, "a sum waiting") for name in STRATEGIES),
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_a_run_that_was_interrupted_carries_on_where_its_checkpoint_was(
    tmp_path: Path, name: str, moment: str, committed: bool
) -> None:
    strategy = STRATEGIES[name]
    slow = Faults(slow_to_read=frozenset({(0, 5)}))
    first = World(tmp_path, strategy, TRIPS, ring=2, faults=slow).join()
    while first.core.trips < 40 or not (
        first.executor.deferred if moment == "a sum waiting" else len(first.core.held) in (2, 3)
    ):
        assert first.turn()
    held = {u.task: first.buffer.slot(first.aggregator.leases[u.task].slot).copy() for u in first.core.held}
    assert held
    resume.save(tmp_path, first.executor, WallClock(1.0, emulated_s=first.now), [])
    model, version = first.model(), first.core.version
    vectors = [vector.tobytes() for vector in first.buffer.vectors(first.buffer.latest[1])]
    for _ in range(25):
        first.turn()  # after the checkpoint: to be undone, or never written at all
    first.close(commit=committed)

    world = World(tmp_path, strategy, TRIPS, resuming=True)
    assert (world.core.version, world.model()) == (version, model)
    assert [vector.tobytes() for vector in world.buffer.vectors(0)] == vectors
    for task, update in held.items():
        assert world.buffer.slot(world.aggregator.leases[task].slot).tobytes() == update.tobytes()
    for client in sorted((*world.core.running, *world.core.idle)):
        world.executor.handle(Left(client, world.now, "interrupted"))
    world.executor.carry_out(world.core.pending())
    world.join().finish()
    assert world.stopped == "trips"
    assert world.aggregator.leases == {}
    world.close()
    assert all(world.store.ends[task] == ["applied"] for task in held)
    with Record(tmp_path) as record:
        assert record.versions["version"].tolist() == list(range(1, world.core.version + 1))
        for task in (*held, *world.tasks):
            row = record.trip(task)
            if row.fate == "applied":
                assert row.checksum_seen == row.checksum_sent
                assert row.trained_version == row.base_version
        applied = [int(task) for _, tasks, _ in record.sums() for task in tasks]
    assert len(applied) == len(set(applied)) == world.core.applied


# ---- the evaluator -----------------------------------------------------------------------------


def test_evaluations_are_dated_when_their_version_was_published(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join().finish()
    world.close()
    with Record(tmp_path) as record:
        made = dict(zip(record.versions["version"].tolist(), record.versions["at_s"].tolist(), strict=True))
        for row in record.evaluations:
            assert row.at_s == made.get(row.version, 0.0)
            assert row.accuracy == min(row.version, 10) / 10
            assert (row.correct, row.total) == ((min(row.version, 10), 0), (10, 0))
            assert row.wall_s >= 2 * row.at_s


def test_a_version_measured_on_nothing_has_no_accuracy(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], experiment.Stop(accuracy=0.1)).join()
    world.executor.assessed(messages.Assessed(0, 0.5, [], [], 0.1))
    assert world.stopped is None
    world.executor.assessed(messages.Assessed(0, 0.5, [1], [10], 0.1))
    assert world.stopped == "accuracy"
    world.close()


def test_everything_the_optimiser_keeps_goes_with_its_version(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff with momentum"], experiment.Stop(versions=3))
    assert world.aggregator.optimizer == ServerOptimizer(lr=0.3, momentum=0.9)
    before = world.buffer.latest[1]
    seen = [world.buffer.vectors(before)[0].copy()]
    real = world.store.version

    def note(row: Any) -> None:
        seen.append(world.buffer.vectors(world.buffer.latest[1])[0].copy())
        real(row)

    world.store.version = note  # type: ignore[method-assign]
    world.join().finish()
    assert len(seen) == 4
    assert not seen[0].any()
    assert len({vector.tobytes() for vector in seen}) == 4
    world.close()


def test_only_a_summed_of_its_own_is_journaled_for_a_sum(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], experiment.Stop(versions=5)).join().finish()
    world.close()
    with Record(tmp_path) as record:
        made = [event for _, event in record.events() if isinstance(event, Summed)]
    assert [event.version for event in made] == [1, 2, 3, 4, 5]
    assert all(event.bad == () for event in made)
    assert sorted(os.listdir(tmp_path)) == ["record.sqlite"]
