"""The server's loop at the end of a run, and after a restart: evaluators, dropped clients, stale events."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import test_run_wall
from run_parts import experiment
from test_run_wall import Wall

from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.core.events import Arrived, Died, Evaluate, Evaluated, Halted, Joined, Left, Ticked
from edgefl.errors import RunError
from edgefl.experiment import Clock, Privacy, Stop
from edgefl.run import control, messages, resume, server, server_process, supervisor
from edgefl.run.clock import WallClock
from edgefl.run.control import CLIENT, EVALUATOR, Departed
from edgefl.run.progress import Gauge
from edgefl.run.supervisor import State
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet
from tests.wire_samples import TIMES

world = test_run_wall.world


@pytest.mark.parametrize("hung", [False, True])
def test_after_the_run_an_evaluator_that_dies_is_replaced_unless_it_hung(world: Wall, hung: bool) -> None:
    loop, evaluator = world.loop(experiment()), world.peer(EVALUATOR, 0)
    world.engine.carry_out([Evaluate(0)])
    loop._stopped = "versions"
    if hung:
        world.lifecycle.expel(evaluator, "hang", "silent")
    world.sent.clear()
    loop._departed(Departed(EVALUATOR, 0, 0, "signal 9"))
    world.alarms.run_due()
    assert world.sent == ([] if hung else [control.Replace(EVALUATOR, 0, 1)])
    assert world.evaluation.waiting != hung


def test_a_run_without_clients_waits_for_an_evaluation_that_may_end_it(world: Wall) -> None:
    loop = world.loop(msgspec.structs.replace(experiment(), stop=Stop(versions=9, accuracy=0.9)))
    world.peer(EVALUATOR, 0)
    world.engine.carry_out([Evaluate(0)])
    loop._find_silent()
    assert world.evaluation.complete(0)
    with pytest.raises(RunError, match="no client is training and none will start: 0 of 3 are connected"):
        loop._find_silent()


@pytest.mark.parametrize(("stop", "stage"), [(Stop(accuracy=0.9), "evaluation"), (Stop(versions=3), "wait")])
def test_a_virtual_run_is_delayed_only_by_evaluations_that_can_end_it(
    world: Wall, stop: Stop, stage: str
) -> None:
    loop = world.loop(msgspec.structs.replace(experiment(), stop=stop))
    world.peer(EVALUATOR, 0)
    world.engine.carry_out([Evaluate(0)])
    assert loop._idle_stage() == stage
    assert world.evaluation.complete(0)
    assert loop._idle_stage() == "wait"


def test_a_checkpoint_that_was_suspended_does_not_delay_the_next_ones(
    world: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third checkpoint takes ten minutes, because somebody pressed Ctrl-Z."""
    loop, pauses = world.loop(experiment()), list[float]()
    monkeypatch.setattr(loop, "_checkpoint", lambda: None)
    monkeypatch.setattr(loop._alarms, "after", lambda seconds, _: pauses.append(seconds))
    now = iter([0.0, 0.1, 30.0, 32.0, 80.0, 680.0, 720.0, 723.0]).__next__
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=now))
    for _ in range(4):
        loop._checkpoint_again()
    assert pauses == pytest.approx([30.0, 30.0, 40.0, 60.0])


def test_the_emulated_time_of_a_run_is_that_of_its_end(world: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it included the time in which the server waited for the last evaluation."""
    loop = world.loop(experiment())
    monkeypatch.setattr(resume, "save", lambda *_, final: world.store.sync())
    monkeypatch.setattr(loop, "_report", lambda: None)
    monkeypatch.setattr(world.gauge, "trip_us", lambda together_s, trips: None, raising=False)
    world.hand.at += 5.0
    ended_s = world.clock.now_s()
    loop._handle_all(iter([Halted(ended_s, "wall_s")]))
    world.hand.at += 7.0
    loop._conclude()
    assert (world.store.meta("stop_reason"), world.store.meta("emulated_s")) == ("wall_s", ended_s)


@pytest.mark.parametrize("back_s", [math.inf, 9.0])
def test_a_run_whose_phones_are_gone_for_good_ends_with_its_results(world: Wall, back_s: float) -> None:
    """Regression: a run failed after a phone without a charger ran out of battery."""
    loop = world.loop(experiment())
    world.dynamics.set(1, back_s, "back")
    if back_s == math.inf:
        loop._find_silent()
        assert world.core.stopped == "too few clients are left: 0 of 3"
        return
    with pytest.raises(RunError, match="no client is training and none will start: 0 of 3 are connected"):
        loop._find_silent()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("changes", [False, True], ids=["static", "dynamic"])
def test_a_dropped_client_does_not_return_after_an_interruption(
    tmp_path: Path, changes: bool, private: bool
) -> None:
    """A client whose process died is dropped, but not in a private run."""
    world = Wall(tmp_path, join_spread_s=0.0, privacy=Privacy(clip_norm=1.0) if private else None)
    world.core.deaths = Deaths("drop")
    world.timeline.start()
    world.due()
    world.client_died()
    world.restore()
    back = world.peers.expect(CLIENT, 1, epoch=1)
    back.ready = True
    for client in range(3) if changes else ():
        world.dynamics.set(client, 0.0, "back")
    world.timeline.start()
    joined = [event.client for event in world.due() if isinstance(event, Joined)]
    assert sorted(joined) == ([0, 1, 2] if private else [0, 2])
    assert world.timeline.expected == 0
    assert list(world.timeline.ready(back)) == []
    world.close()


def test_a_client_whose_process_dies_before_it_joins_does_not_join_earlier(tmp_path: Path) -> None:
    world = Wall(tmp_path, join_spread_s=100.0)
    world.timeline.start()
    world.client_died()
    world.alarms.run_due()
    back = world.the(CLIENT, 1)
    back.ready = True
    assert (back.epoch, list(world.timeline.ready(back))) == (1, [])
    world.hand.at += 100.0
    assert 1 in [event.client for event in world.due() if isinstance(event, Joined)]
    world.close()


def test_ticks_that_follow_faster_than_they_are_handled_do_not_occupy_the_loop(world: Wall) -> None:
    readings = itertools.count(200.0, 0.001)
    world.clock._monotonic = lambda: next(readings)
    world.timeline.wake(1.0)
    for number, tick in enumerate(world.timeline.due()):
        assert (number, type(tick)) == (0, Ticked)
        world.timeline.wake(world.clock.now_s() + 1e-4)
    assert world.timeline.wait_ms() <= 1


@pytest.mark.parametrize(("unserved", "deserted"), [(False, False), (True, False), (False, True)])
def test_a_run_whose_absent_phones_never_return_ends_if_timers_start_no_training(
    world: Wall, unserved: bool, deserted: bool
) -> None:
    """Regression: polls went on for ever after the batteries of all phones were empty."""
    parts = {"awaits": True, "present": [1, 0, 0], "deaths": Deaths(), "too_few": "few"}
    core: Any = SimpleNamespace(unserved=unserved, deserted=deserted, **parts)
    world.timeline.core = core
    world.dynamics.set(1, math.inf, "back")
    for back_s in (5.0, math.inf):
        world.dynamics.set(2, back_s, "back")
        ends = (unserved or deserted) and back_s == math.inf
        assert world.timeline._tick(1.0) == (Halted(1.0, "few") if ends else Ticked(1.0))


def test_a_run_is_deserted_without_clients_and_updates_unless_a_time_ends_it() -> None:
    core = Core(FedBuff(buffer_size=2), fleet(1), 1, Stop(versions=3))
    found = [core.deserted]
    for event in (Joined(0, 0.0), Left(0, 1.0, "offline"), Joined(0, 2.0)):
        core.handle(event)
        found.append(core.deserted)
    core.handle(Arrived(0, 1, 0, 60, 2, 1.0, 3.0))
    core.handle(Left(0, 4.0, "offline"))
    assert [*found, core.deserted] == [True, False, True, False, False]  # at the end, an update is held
    assert not Core(FedBuff(), fleet(1), 1, Stop(emulated_s=9.0)).deserted


@pytest.mark.parametrize("started", [1, 3, 6])
def test_an_interrupted_run_starts_no_more_clients(started: int) -> None:
    spawned: list[tuple[str, int]] = []
    plan = {"_usage": SimpleNamespace(begin=lambda: None), "_plan": SimpleNamespace(workers=5)}
    parts: Any = SimpleNamespace(_state=State.STARTING, **plan, _virtual=False, _interrupts=0)

    def spawn(role: str, number: int, epoch: int) -> None:
        spawned.append((role, number))
        parts._interrupts = int(len(spawned) == started)

    parts._spawn = spawn
    supervisor._Supervisor._handle(parts, control.Listening("", "", 1), "server")
    clients = [(CLIENT, number) for number in range(5)]
    assert spawned == [(EVALUATOR, 0), *clients][:started]


@pytest.mark.parametrize(
    ("state", "interrupts", "killed"),
    [(State.LOADING, 1, ["server", "zygote"]), (State.SERVING, 1, []), (State.SERVING, 2, ["server"])],
)
def test_an_interrupt_does_not_wait_for_a_zygote_that_is_loading_data(
    state: State, interrupts: int, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(supervisor, "kill_tree", ended.append)
    parts: Any = SimpleNamespace(_state=state, _interrupts=interrupts, _view=Mock(), _stop_serving=Mock())
    parts._children = {"server": "server", "zygote": "zygote"}
    with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
        supervisor._Supervisor._interrupt(parts)
    assert ended == killed
    assert parts._stop_serving.called != bool(killed)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_that_begins_again_has_no_events_of_the_killed_server(world: Wall, restarts: int) -> None:
    world.store.journal(Died(1, 0.0, "signal 9"))
    world.store.commit()
    plan: Any = SimpleNamespace(run_dir=".", recover=False, resume=False, restarts=restarts)
    parts = (world.core, world.aggregator, world.store, None)
    assert server_process._restored(plan, *parts) is None
    assert world.store.seq == len(list(world.store.replay())) == 1 - restarts


def test_the_trips_by_profile_include_those_before_a_restart() -> None:
    """The gauge is created with the restarted server, but the core has replayed the whole journal."""
    core = Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    for client, task in ((0, 0), (1, 2)):
        core.handle(Joined(client, 0.0))
        core.handle(Arrived(client, task, 0, 60, 2, 1.0, 1.0))
    plan: Any = SimpleNamespace(experiment=experiment(), time_scale=1.0, load=0.0)
    progress = Gauge(plan).progress(core, WallClock(1.0), None, 0)
    assert progress.by_profile == {"pixel-4": [1, 1, 1, 2]}


def test_the_last_evaluation_before_a_restart_is_shown() -> None:
    """Regression: until the next one, the accuracy was "not measured"."""
    core = Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    replay = resume._JournalReplay(core, None)
    for version, accuracy in ((0, 0.25), (1, 0.5)):
        replay.handle(Evaluated(version, 1.0, accuracy, {"loss": 2.0, "f1": accuracy}))
    plan: Any = SimpleNamespace(experiment=experiment(), time_scale=1.0, load=0.0)
    gauge = Gauge(plan)
    assert replay.evaluated is not None
    gauge.remember(replay.evaluated)
    progress = gauge.progress(core, WallClock(1.0), None, 0)
    assert (progress.accuracy, progress.loss, progress.metrics) == (0.5, 2.0, {"f1": 0.5})


@pytest.mark.parametrize("real", [False, True])
def test_the_live_verdict_leaves_out_the_trips_of_a_real_device(real: bool) -> None:
    """Regression: a run with a device that joined with --as-is was shown as INVALID until it ended."""
    wall = msgspec.structs.replace(experiment(), clock=Clock(kind="wall"))
    plan: Any = SimpleNamespace(experiment=wall, time_scale=1.0, load=0.0)
    gauge, core = Gauge(plan), Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    gauge.trip(msgspec.structs.replace(TIMES, own_pace=real))
    progress = gauge.progress(core, WallClock(1.0), None, 0)
    assert (progress.fidelity_median is None, "error" in progress.invalid) == (real, not real)


def test_the_live_verdict_leaves_out_the_trips_that_are_too_short_to_be_judged() -> None:
    """Regression: unlike the summary, it counted them in the sum of all trips: "trips took 100.0% longer"."""
    wall = msgspec.structs.replace(experiment(), clock=Clock(kind="wall"))
    plan: Any = SimpleNamespace(experiment=wall, time_scale=1.0, load=0.0)
    gauge, core = Gauge(plan), Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    late = messages.Spent(0.001, 0.002)
    gauge.trip(messages.TripTimes(0.001, late, late, late, late))
    progress = gauge.progress(core, WallClock(1.0), None, 0)
    assert progress.fidelity_median is None
    assert "trips took" not in progress.invalid


@pytest.mark.parametrize(("training_s", "median"), [(4.0, 0.0), (6.0, 0.5)])
def test_the_live_verdict_leaves_out_training_that_is_a_minor_part_of_its_trip(
    training_s: float, median: float
) -> None:
    """The summary leaves it out, too. The trip takes 100 s, as a fast upload makes up for slow training."""
    wall = msgspec.structs.replace(experiment(), clock=Clock(kind="wall"))
    plan: Any = SimpleNamespace(experiment=wall, time_scale=1.0, load=0.0)
    gauge, core = Gauge(plan), Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    training = messages.Spent(training_s, 2 * training_s)
    down, up = messages.Spent(50.0, 50.0), messages.Spent(50.0 - training_s, 50.0 - 2 * training_s)
    gauge.trip(messages.TripTimes(training_s, down, training, up, messages.Spent(0.0, 0.0)))
    assert gauge.progress(core, WallClock(1.0), None, 0).fidelity_median == median


def test_the_live_views_show_the_emulated_time_of_the_end_of_the_run() -> None:
    core = Core(FedBuff(buffer_size=2), fleet(3), 1, Stop(versions=3))
    core.handle(Halted(5.0, "wall_s"))
    plan: Any = SimpleNamespace(experiment=experiment(), time_scale=1.0, load=0.0)
    progress = Gauge(plan).progress(core, WallClock(1.0, emulated_s=12.0), None, 0)
    assert progress.emulated_s == 5.0
