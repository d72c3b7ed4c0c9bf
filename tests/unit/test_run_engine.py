"""The engine with a real core, aggregator, buffer and record, and simulated clients and evaluator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_world import CLIENTS, SEED, SIZE, Faults, World, assessed

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Cohort, Halted, Left, Sum, Train
from edgefl.errors import ConfigError
from edgefl.parameters import checkpoint
from edgefl.parameters.checkpoint import SavedState
from edgefl.results.record import Record
from edgefl.results.rows import FATES, TripRow
from edgefl.results.run_folder import CHECKPOINTS
from edgefl.results.store import Store
from edgefl.run import engine, messages, resume
from edgefl.run.aggregator import SumResult
from edgefl.run.timeline import Delivery, InFlightWork, TimelineEvent
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet
from tests.wire_samples import SCORES, TIMES

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


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["no faults", "with faults"])
def test_the_record_agrees_with_the_run(tmp_path: Path, name: str, faults: Faults) -> None:
    world = World(tmp_path, STRATEGIES[name], TRIPS, faults=faults).join().finish()
    core = world.core
    assert core.stopped == "trips"
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
            assert row.applied_version > row.base_version + row.staleness
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


def test_a_replay_of_the_journal_gives_the_same_core(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, faults=FAULTS).join().finish()
    world.close()
    again = Core(STRATEGIES["fedbuff"], fleet(CLIENTS), SEED, TRIPS, evaluate_every=5)
    with Record(tmp_path) as record:
        for _, event in record.events():
            again.handle(event)
    for name in ("version", "trips", "applied", "dropped", "discarded", "failed", "staleness_sum", "stopped"):
        assert getattr(again, name) == getattr(world.core, name)
    assert again.applied_weight.tolist() == world.core.applied_weight.tolist()


def test_the_model_is_the_weighted_sum_of_the_updates_on_record(tmp_path: Path) -> None:
    """Its last element is a running statistic: an average of the clients' values, not a sum of changes."""
    world = World(tmp_path, STRATEGIES["fedbuff"], experiment.Stop(versions=12))
    updates: dict[int, Any] = {}
    bases: dict[int, int] = {}
    real = world.engine.handle

    def keep(event: TimelineEvent) -> None:
        if isinstance(event, Delivery):
            lease = world.aggregator.leases[event.result.task]
            updates[event.result.task] = world.buffer.slot(lease.slot).astype(np.float64)
            bases[event.result.task] = lease.version
        real(event)

    world.engine.handle = keep  # type: ignore[method-assign]
    models = [world.buffer.model(0).astype(np.float64)]
    world.join().finish()
    world.close()
    with Record(tmp_path) as record:
        for _, tasks, weights in record.sums():
            named = list(map(int, tasks))
            model = models[-1] + weights @ np.array([updates[task] for task in named])
            own = np.array([models[bases[task]][-1] + updates[task][-1] for task in named])
            shares = weights / max(1.0, weights.sum())
            model[-1] = (1.0 - shares.sum()) * models[-1][-1] + shares @ own
            models.append(model)
    np.testing.assert_allclose(np.frombuffer(world.model(), np.float32), models[-1], rtol=1e-4, atol=1e-6)


def test_bad_updates_are_dropped_with_an_incident(tmp_path: Path) -> None:
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


def test_a_sum_that_waits_for_room_publishes_and_releases_nothing(tmp_path: Path) -> None:
    slow = Faults(slow_to_read=frozenset({(0, 0)}))
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS, ring=2, faults=slow).join()
    while world.aggregator.deferred is None:
        assert world.turn()
    version, waiting = world.core.version, world.aggregator.deferred
    assert waiting.version == version + 1
    before = world.buffer.latest
    for _ in range(3):
        world.engine.retry_sum()
        assert world.aggregator.deferred == waiting
    assert world.buffer.latest == before
    assert all(task in world.aggregator.leases for task in waiting.tasks)
    while world.aggregator.deferred is not None:
        assert world.turn()
    assert world.core.version >= waiting.version
    assert all(world.store.ends[task] == ["applied"] for task in waiting.tasks)
    world.finish().close()
    assert (world.core.stopped, world.aggregator.deferred) == ("trips", None)
    for row in trip_rows(tmp_path, world):
        assert row.fate != "applied" or row.checksum_seen == row.checksum_sent


def test_the_task_of_a_client_that_leaves_is_lost_and_its_slot_is_freed(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    task = next(task for task in world.tasks.values() if task.client == 6)
    world.engine.handle(Left(6, world.now, "signal 9"))
    assert task.task not in world.aggregator.leases
    world.close()
    with Record(tmp_path) as record:
        row = record.trip(task.task)
    assert (row.fate, row.reason, row.arrived_s) == ("lost", "signal 9", None)


def test_a_halted_run_discards_its_held_updates(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    while len(world.core.held) < 2:
        world.turn()
    held = [update.task for update in world.core.held]
    world.engine.handle(Halted(world.now, "wall_s"))
    assert world.core.stopped == "wall_s"
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
def test_a_run_that_resumes_from_a_checkpoint_applies_each_update_once(
    tmp_path: Path, name: str, moment: str, committed: bool
) -> None:
    strategy = STRATEGIES[name]
    slow = Faults(slow_to_read=frozenset({(0, 5)}))
    first = World(tmp_path, strategy, TRIPS, ring=2, faults=slow).join()
    while first.core.trips < 40 or not (
        first.aggregator.deferred if moment == "a sum waiting" else len(first.core.held) in (2, 3)
    ):
        assert first.turn()
    held = {u.task: first.buffer.slot(first.aggregator.leases[u.task].slot).copy() for u in first.core.held}
    assert held
    resume.save(tmp_path, first.engine, InFlightWork(), [])
    model, version = first.model(), first.core.version
    vectors = [vector.tobytes() for vector in first.buffer.vectors(first.buffer.latest[1])]
    for _ in range(25):
        first.turn()  # after the checkpoint: rewound, or not even written
    first.close(commit=committed)

    world = World(tmp_path, strategy, TRIPS, resuming=True)
    assert (world.core.version, world.model()) == (version, model)
    assert [vector.tobytes() for vector in world.buffer.vectors(0)] == vectors
    for task, update in held.items():
        assert world.buffer.slot(world.aggregator.leases[task].slot).tobytes() == update.tobytes()
    for client in sorted((*world.core.running, *world.core.idle)):
        world.engine.handle(Left(client, world.now, "interrupted"))
    world.engine.carry_out(world.core.pending())
    world.join().finish()
    assert world.core.stopped == "trips"
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


def beside_a_checkpoint(folder: Path, change: Callable[[SavedState], dict[str, Any]]) -> World:
    """Write a changed checkpoint of a run in ``folder / "run"``; return another world to restore it in."""
    for name in ("run", "fresh"):
        (folder / name).mkdir()
    first = World(folder / "run", STRATEGIES["fedbuff"], TRIPS).join()
    while first.core.version < 5 or not first.core.held:
        assert first.turn()
    resume.save(folder / "run", first.engine, InFlightWork(), [])
    first.close()
    last = checkpoint.latest(folder / "run" / CHECKPOINTS)
    checkpoint.write(folder / "run" / CHECKPOINTS, replace(last, **change(last)), [])
    return World(folder / "fresh", STRATEGIES["fedbuff"], TRIPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda last: {"version": last.version + 1}, "does not belong to its record"),
        (lambda last: {"model": last.model[1:]}, "does not belong to its record"),
        (lambda last: {"bases": dict.fromkeys(range(4), last.model)}, "holds 5 versions; a ring of 4 has no"),
        (lambda last: {"held": {}}, "lacks the update of task"),
        (lambda last: {"statistics": {}}, "lacks the running statistics that updates started from"),
    ],
)
def test_a_checkpoint_that_does_not_match_the_run_is_refused(
    tmp_path: Path, change: Callable[[SavedState], dict[str, Any]], message: str
) -> None:
    fresh = beside_a_checkpoint(tmp_path, change)
    with Store(tmp_path / "run") as store, pytest.raises(ConfigError, match=message):
        resume.restore(tmp_path / "run", fresh.core, fresh.aggregator, store)
    fresh.close()


def test_a_checkpoint_with_a_version_for_each_entry_of_the_ring_is_restored(tmp_path: Path) -> None:
    bases = {version: np.full(SIZE, version, np.float32) for version in range(3)}
    fresh = beside_a_checkpoint(tmp_path, lambda last: {"bases": bases})
    with Store(tmp_path / "run") as store:
        entries = resume.restore(tmp_path / "run", fresh.core, fresh.aggregator, store).entries
    assert sorted(entries.values()) == [0, 1, 2, 3]
    for version, model in bases.items():
        assert fresh.buffer.model(entries[version]).tolist() == model.tolist()
    fresh.close()


def test_a_checkpoint_of_events_that_the_record_has_lost_is_removed(tmp_path: Path) -> None:
    first, folder = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join(), tmp_path / CHECKPOINTS
    ends = []
    for version in (3, 6):
        while first.core.version < version:
            assert first.turn()
        resume.save(tmp_path, first.engine, InFlightWork(), [])
        ends.append(first.store.seq)
    first.close()
    with Store(tmp_path, create=False) as store:
        store.truncate(ends[0])  # as if its newest pages were damaged
    assert len(list(folder.iterdir())) == 2
    World(tmp_path, STRATEGIES["fedbuff"], TRIPS, resuming=True).close()
    (left,) = folder.iterdir()
    assert checkpoint.latest(folder).journal_seq == ends[0]
    assert left.name == f"journal-{ends[0]:010d}.safetensors"


def test_an_evaluation_has_the_time_at_which_its_version_was_published(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join().finish()
    world.close()
    with Record(tmp_path) as record:
        made = dict(zip(record.versions["version"].tolist(), record.versions["at_s"].tolist(), strict=True))
        for row in record.evaluations:
            assert row.at_s == made.get(row.version, 0.0)
            assert row.accuracy == min(row.version, 10) / 10
            assert row.metrics == {"mae": -row.version}
            assert (row.correct, row.total) == ((min(row.version, 10), 0), (10, 0))
            assert row.wall_s >= 2 * row.at_s


EVALUATIONS = [
    assessed(0, 0.3),
    assessed(0, 0.2, metrics={"mae": 0.6}),
    assessed(0, 0.1, metrics={"mae": 0.5}),
]


@pytest.mark.parametrize(
    ("stop", "evaluations", "reason"),
    [
        ({"accuracy": 0.1}, [assessed(0, 0.5), assessed(0, 0.5, 0.1, [1], [10])], "accuracy"),
        ({"metric": experiment.MetricGoal(name="mae", at_most=0.5)}, EVALUATIONS, "metric mae"),
        ({"metric": experiment.MetricGoal(name="mae", at_least=0.5)}, EVALUATIONS[:2], "metric mae"),
        ({"metric": experiment.MetricGoal(name="loss", at_most=0.2)}, EVALUATIONS[:2], "metric loss"),
    ],
)
def test_a_run_stops_at_the_first_evaluation_that_reaches_its_goal(
    tmp_path: Path, stop: dict[str, Any], evaluations: list[messages.Assessed], reason: str
) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], experiment.Stop(**stop)).join()
    for evaluation in evaluations:
        assert world.core.stopped is None
        world.engine.assessed(evaluation)
    assert world.core.stopped == reason
    world.close()


def test_an_evaluation_is_on_record_and_its_problem_is_an_incident(tmp_path: Path) -> None:
    world = World(tmp_path, STRATEGIES["fedbuff"], TRIPS).join()
    world.engine.assessed(assessed(0, 0.5, metrics={"mae": 1.5}, clients=SCORES))
    world.engine.assessed(assessed(1, 0.4, problem="it failed"))
    world.close()
    with Record(tmp_path) as record:
        whole, failed = record.evaluations
        (incident,) = record.incidents
    assert (whole.metrics, whole.clients) == ({"mae": 1.5}, tuple(SCORES.clients))
    assert (whole.client_loss, whole.client_accuracy) == (tuple(SCORES.loss), tuple(SCORES.accuracy))
    assert (whole.personal_loss, whole.personal_accuracy) == (tuple(SCORES.personal_loss), ())
    assert math.isnan(whole.accuracy)
    assert (failed.metrics, failed.clients) == ({}, ())
    assert (incident.kind, incident.detail) == ("evaluation", "version 1: it failed")


@pytest.mark.parametrize("long", [True, False])
def test_tasks_are_sent_before_long_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
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


def test_only_tasks_with_pairwise_masks_name_the_clients_of_the_round(tmp_path: Path) -> None:
    """Regression: with thousands of clients in a closed round, the messages were too long."""
    world = World(tmp_path, FedBuff(buffer_size=4), TRIPS)
    action = Train(0, 0, 0, 0, cohort=Cohort(0, (0, 1)))
    lease = world.aggregator.lease(task=0, client=0, version=0)
    assert world.engine.order(action, lease, 0.0, 0.0).cohort is None
    for by_round, cohort in ((False, None), (True, action.cohort)):
        hidden: Any = SimpleNamespace(by_round=by_round)
        world.aggregator.hidden = hidden
        assert world.engine.order(action, lease, 0.0, 0.0).cohort == cohort
    world.close()


@pytest.mark.parametrize("real", [False, True])
def test_each_figure_of_a_trip_is_in_its_column(tmp_path: Path, real: bool) -> None:
    world = World(tmp_path, FedBuff(buffer_size=1), experiment.Stop(versions=1)).join()
    deliveries: dict[int, Delivery] = {}
    usual = world.arrival

    def arrival(task: messages.Task, checksum: int) -> Delivery:
        spent = [messages.Spent(10.0 * part, 10.0 * part + 1.0) for part in range(2, 6)]
        parts = dict(zip(("down", "compute", "up", "delay"), spent, strict=True))
        times = msgspec.structs.replace(TIMES, **parts, lateness_s=0.25, own_pace=real)
        deliveries[task.task] = usual(task, checksum)._replace(times=times)
        return deliveries[task.task]

    world.arrival = arrival  # type: ignore[method-assign]
    world.finish().close()
    task, sent = next(iter(deliveries.items()))
    with Record(tmp_path) as record:
        row = record.trip(task)
    assert (row.client, row.examples) == (sent.client, sent.examples)
    for name in ("steps", "loss", "trained_version", "cpu_s"):
        assert getattr(row, name) == getattr(sent.result, name), name
    assert (row.work_s, row.busy_s) == (sent.times.work_s, sent.times.busy_s)
    assert row.lateness_s == (None if real else 0.25)
    for part in ("down", "compute", "up", "delay"):
        spent = getattr(sent.times, part)
        assert getattr(row, f"{part}_declared_s") == spent.declared_s
        assert getattr(row, f"{part}_s") == spent.achieved_s
    assert (row.trip_declared_s, row.trip_achieved_s) == (90.0, 93.0)
    assert (row.peak_mib, row.process_grew_mib) == (20.0, 1.5)
    assert row.down_bytes == row.up_bytes == 4 * SIZE
    assert row.checksum_sent == row.checksum_seen == sent.result.checksum
    assert row.received_s == row.sent_s + 21.0
    assert (row.fate, row.weight, row.applied_version, row.staleness) == ("applied", 1.0, 1, 0)
