"""Who may start: the idle clients but for those that trained from this version, whatever the fleet."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Failed, Joined, Sum, Summed, Train
from edgefl.strategies import Client
from edgefl.strategies.asynchronous import _Without
from edgefl.strategies.fedstaleweight import FedStaleWeight


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(-3, 45)))
def test_the_rest_is_the_rest(clients: set[int], others: set[int]) -> None:
    rest = _Without(sorted(clients), others)
    assert [rest[index] for index in range(len(rest))] == sorted(clients - others)


def test_the_ledger_knows_who_trained_from_the_current_version() -> None:
    rng = np.random.default_rng(5)
    devices = [Client(client, "pi-4", 10) for client in range(12)]
    strategy = FedStaleWeight(buffer_size=3, concurrency=6, restart="new-version")
    core = Core(strategy, devices, 1, experiment.Stop())
    actions = [action for client in range(12) for action in core.handle(Joined(client, 0.0))]
    running = {action.task: action for action in actions if isinstance(action, Train)}
    for turn in range(400):
        order = running.pop(list(running)[int(rng.integers(len(running)))])
        at_s = float(turn)
        if rng.random() < 0.2:
            actions = core.handle(Failed(order.client, order.task, at_s, "link"))
        else:
            actions = core.handle(Arrived(order.client, order.task, order.version, 10, 1, 0.0, at_s))
        for action in actions:
            if isinstance(action, Sum):
                actions = [*actions, *core.handle(Summed(action.version, at_s))]
        for action in actions:
            if isinstance(action, Train):
                assert action.client not in running.values()
                running[action.task] = action
        now = {client for client in range(12) if core.trained_from(client) == core.version}
        assert set(core.up_to_date) == now
    assert core.version > 50
