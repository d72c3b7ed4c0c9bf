"""The core keeps its rules for any events in any order, and a replay gives the same actions."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import (
    Action,
    Arrived,
    Died,
    Drop,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Finish,
    Halted,
    Joined,
    Left,
    Rejoin,
    Release,
    Revoke,
    Sum,
    Summed,
    Ticked,
    Train,
    Wake,
    event_decoder,
    event_encoder,
)
from edgefl.strategies import names, resolve
from edgefl.testing import fleet

EXAMPLES = settings.default.max_examples // 10
"""Number of Hypothesis examples per strategy; larger under HYPOTHESIS_PROFILE=explore."""
CLIENTS = 5
TABLES: list[dict[str, Any]] = [
    {"name": "fedbuff", "buffer_size": 3},
    {"name": "fedbuff", "buffer_size": 2, "concurrency": 3, "max_staleness": 1},
    {"name": "fedbuff", "buffer_size": 5, "restart": "new-version"},
    {"name": "fedstaleweight", "buffer_size": 2},
    {"name": "fedasync"},
    {"name": "fedasync", "arrival_process": "poisson", "arrival_rate_per_s": 0.3, "concurrency": 3},
    {"name": "fedavg", "cohort": 3},
    {"name": "fedavg", "cohort": 3, "over_selection": 1.5},
    {"name": "fedavg", "cohort": 3, "over_selection": 1.5, "redraw": False},
    {"name": "defedavg-niid", "participants": 3},
    {"name": "defedavg-niid", "participants": 3, "pause": True},
    {"name": "defedavg-niid", "participants": 3, "takes": "newest"},
    {"name": "favano", "participants": 2, "interval_s": 3.0},
    {"name": "safa", "participants": 2},
    {"name": "ca2fl", "buffer_size": 2},
    {"name": "mifa"},
    {"name": "pisces", "concurrency": 2},
    {"name": "asysg", "buffer_size": 2},
    {"name": "defedavg-iid", "buffer_size": 2},
    {"name": "defedavg-iid", "buffer_size": 2, "overlap": True},
    {"name": "aso-fed"},
    {"name": "asyncfeded"},
    {"name": "fedat", "tiers": 2, "cohort": 2},
    {"name": "pisces", "concurrency": 4, "credits": 2},
    {"name": "fedfix", "interval_s": 5.0},
    {"name": "quafl", "participants": 2, "interval_s": 3.0},
    {"name": "scaffold", "cohort": 3},
    {"name": "feddyn", "cohort": 3},
    {"name": "fedbuff", "buffer_size": 2, "privacy": {"max_participations": 2, "min_separation": 2}},
]
AS_ANOTHER = {"fedadagrad", "fedadam", "fedavgm", "fednova", "fedprox", "fedyogi"} | {
    "krum", "median", "rfa", "trimmed-mean",
}  # fmt: skip
"""Strategies that look to the core like FedAvg or FedBuff: they differ in the optimiser, the local rule, the
weights or the combination of updates."""

Move = tuple[int, int, int]
"""Numbers from which `event_for` makes an event, which is usually valid in the core's current state."""


def moves_of(seed: int, count: int) -> list[Move]:
    draw = random.Random(seed).randrange
    return [(draw(21), draw(-1, CLIENTS + 1), draw(41)) for _ in range(count)]


MOVES = st.builds(moves_of, st.integers(0, 2**32), st.integers(0, 150))
"""Lists of 75 moves on average. Hypothesis shrinks a failure to the list's first moves. Its own lists would
have only five elements on average."""
LONG = [(13 * k % 21, 3 * k % 7 - 1, 17 * k % 41) for k in range(150)]


class Rules:
    """Checks each action against all previous events and actions."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.connected: set[int] = set()
        self.running: dict[int, Train] = {}
        self.delivered: set[int] = set()
        self.fates: Counter[int] = Counter()
        self.owed: Sum | None = None
        self.started = -1
        self.over = False
        self.evaluated: Counter[int] = Counter()
        self.owners: dict[int, int] = {}
        self.used: dict[int, list[int]] = {}
        """For each client, the versions in which its updates were used."""
        self.limited = core.privacy is not None

    def rests(self, client: int) -> bool:
        """True if a client must not start. Its updates may be used twice, but not in successive versions."""
        used, held = self.used.get(client, []), {self.owners[update.task] for update in self.core.held}
        return self.limited and (
            client in held or len(used) == 2 or self.core.version + 1 - max(used, default=-1) < 2
        )

    def tell(self, event: Event) -> list[Action]:
        was_over = self.over
        if isinstance(event, Arrived | Failed):
            begun = self.running.get(event.client)
            fits = begun is not None and begun.task == event.task
            if fits and (isinstance(event, Failed) or begun.version == event.base_version):
                del self.running[event.client]
                self.delivered.add(event.task)
        if isinstance(event, Joined) and 0 <= event.client < CLIENTS and not was_over:
            self.connected.add(event.client)
        dies = isinstance(event, Died) and (event.declared or not self.limited)
        if isinstance(event, Left) or dies:
            self.connected.discard(event.client)
            self.running.pop(event.client, None)
        if isinstance(event, Summed):
            assert self.owed is not None
            self.owed = None
        actions = self.core.handle(event)
        for action in actions:
            self.check(action)
        if was_over:
            assert all(isinstance(action, Release) for action in actions)
        held = {update.task for update in self.core.held}
        assert self.core.training == len(self.running)
        assert set(self.core.running) == set(self.running)
        free = self.connected - set(self.running)
        assert self.over or self.core.ineligible == {client for client in free if self.rests(client)}
        assert self.core.idle == sorted(free - self.core.ineligible)
        assert self.started + 1 == len(self.running) + len(self.fates) + len(held - set(self.fates))
        assert not held & set(self.fates)
        return actions

    def check(self, action: Action) -> None:
        match action:
            case Train(client, task, version, _):
                assert not self.over
                assert self.owed is None
                assert client in self.connected
                assert client not in self.running
                assert (task, version) == (self.started + 1, self.core.version)
                self.started = task
                self.running[client] = action
                self.owners[task] = client
            case Revoke(client, task):
                assert self.running[client].task == task
            case Sum(version, tasks, weights, _):
                assert not self.over
                assert self.owed is None
                assert version == self.core.version + 1
                assert len(set(tasks)) == len(tasks) == len(weights)
                assert all(self.core.update(task).task == task for task in tasks)
                self.owed = action
            case Release(task, fate, _):
                self.fates[task] += 1
                assert self.fates[task] == 1
                assert fate in {"applied", "discarded", "dropped", "lost"}
                if fate == "applied":
                    client, version = self.owners[task], self.core.version
                    used = self.used.setdefault(client, [])
                    assert not self.limited or (len(used) < 2 and version - max(used, default=-1) >= 2)
                    used.append(version)
            case Evaluate(version):
                self.evaluated[version] += 1
                assert self.evaluated[version] == 1
            case Wake(at_s):
                assert at_s > self.core.now_s
            case Rejoin(client, at_s):
                assert 0 <= client < CLIENTS
                assert at_s == self.core.now_s
            case Drop(client):
                assert 0 <= client < CLIENTS
            case Finish():
                self.over = True


def event_for(rules: Rules, move: Move, at_s: float) -> Event:
    kind, client, number = move
    begun = list(rules.running.values())
    if rules.owed is not None and number % 3:  # the server mostly answers at once
        bad = rules.owed.tasks[: number % 2] if number > 30 else ()
        if rules.limited:
            return Summed(rules.owed.version, at_s, zero=bad)
        return Summed(rules.owed.version, at_s, bad)
    if kind < 3:
        return Joined(client, at_s)
    if kind < 14 and begun:
        train = begun[number % len(begun)]
        return Arrived(train.client, train.task, train.version, number - 1, 5, 0.1, at_s)
    if kind == 14:
        return Left(client, at_s, "left")
    if kind == 15 and begun:
        train = begun[number % len(begun)]
        return Failed(train.client, train.task, at_s, "failed")
    if kind == 16:
        return Arrived(client, number, number % 4, 1, 1, 0.0, at_s)
    if kind == 17:
        return Evaluated(number, at_s, number / 40)
    if kind == 18 and number == 40:
        return Halted(at_s, "halted")
    if kind == 19:
        return Failed(client, number, at_s, "unknown")
    if kind == 20:
        return Died(client, at_s, "signal 9", declared=number % 2 == 0)
    return Ticked(at_s)


def core_of(table: dict[str, Any], stop: experiment.Stop) -> Core:
    strategy = resolve({key: value for key, value in table.items() if key != "privacy"})
    limits = experiment.Privacy(clip_norm=1.0, **table["privacy"]) if "privacy" in table else None
    return Core(strategy, fleet(CLIENTS), 3, stop, 3, limits)


def joined(table: dict[str, Any], stop: experiment.Stop) -> tuple[Rules, list[tuple[Event, list[Action]]]]:
    """Let all clients join a core. Return its `Rules`, and each event so far with the core's actions."""
    rules = Rules(core_of(table, stop))
    return rules, [(event, rules.tell(event)) for event in (Joined(client, 0.0) for client in range(CLIENTS))]


def test_every_strategy_is_tested_here_or_looks_like_one_that_is() -> None:
    assert {table["name"] for table in TABLES} | AS_ANOTHER == set(names())


@pytest.mark.parametrize("table", TABLES, ids=str)
@settings(max_examples=EXAMPLES)
@given(moves=MOVES)
@example(moves=LONG)
def test_any_order_of_events_keeps_the_rules(table: dict[str, Any], moves: list[Move]) -> None:
    """A replay of the journal gives the same actions."""
    stop = experiment.Stop(versions=12, trips=60, emulated_s=140.0, accuracy=1.0)
    rules, history = joined(table, stop)
    for index, move in enumerate(moves):
        event = event_for(rules, move, float(index))
        history.append((event, rules.tell(event)))
    again, core = core_of(table, stop), rules.core
    for event, actions in history:
        journaled = event_decoder.decode(event_encoder.encode(event))
        assert again.handle(journaled) == actions
    assert (again.version, again.trips, again.dropped) == (core.version, core.trips, core.dropped)
    assert again.applied_weight.tobytes() == core.applied_weight.tobytes()
    assert again.finished == core.finished
    assert sum(core.finished) == core.trips


@pytest.mark.parametrize("table", TABLES, ids=str)
@settings(max_examples=EXAMPLES)
@given(moves=MOVES)
@example(moves=LONG)
def test_a_repeated_event_changes_nothing(table: dict[str, Any], moves: list[Move]) -> None:
    rules, _ = joined(table, experiment.Stop(versions=12))
    for index, move in enumerate(moves):
        event = event_for(rules, move, float(index))
        rules.tell(event)
        if isinstance(event, Arrived | Failed | Joined):
            assert rules.tell(event) == []
