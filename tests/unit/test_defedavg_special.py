"""Tests of DeFedAvg's special cases: one local step (K = 1), and no delays (λ of Assumption 4)."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.core import Core
from edgefl.core.events import Train
from edgefl.experiment import Stop
from edgefl.lab.quadratic import delays_of
from edgefl.seeds import stream
from edgefl.strategies.asysg import AsySG
from edgefl.strategies.base import Strategy
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.defedavg_niid import DeFedAvgNIID
from edgefl.strategies.fedavg import FedAvg
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

CLIENTS, VERSIONS = 12, 40


def trained(client: int, model: Vector, trip: int) -> Vector:
    """Take one step on the client's quadratic function, with noise."""
    noise = stream(3, "noise", client, trip).normal(size=model.size).astype(np.float32)
    return model - np.float32(0.1) * (model - np.float32(client % 5) + noise)


def run(strategy: Strategy, *, equal: bool = False, clients: int = CLIENTS) -> MemoryRun:
    """Run with float32 numbers. If ``equal``, all trips take 1 s; otherwise each takes a random time."""

    def duration(client: int, trip: int) -> float:
        return 1.0 if equal else float(stream(1, "time", client, trip).uniform(0.5, 3.0 + client))

    core = Core(strategy, fleet(clients), 5, Stop(versions=VERSIONS), evaluate_every=10**9)
    return run_in_memory(core, duration, model=np.zeros(7, np.float32), train=trained)


def bits(run: MemoryRun) -> list[bytes]:
    return [model.tobytes() for model in run.models]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_one_local_step_of_iid_is_asysg_with_a_step_of_one_nth_bit_for_bit(size: int) -> None:
    """See the remark on K = 1 after Theorem 2. The sizes are powers of 2, so division by them is exact."""
    mine = run(DeFedAvgIID(buffer_size=size, server_lr=0.7))
    theirs = run(AsySG(buffer_size=size, server_lr=0.7 / size))
    assert bits(mine) == bits(theirs)
    assert max(delays_of(mine)) > 3
    assert bits(mine) != bits(run(AsySG(buffer_size=size, server_lr=1.4 / size)))


def test_one_local_step_of_niid_is_asynchronous_sgd() -> None:
    """Equation 8 for K = 1 sums one gradient per drawn client, computed at the client's base version."""
    seen = run(DeFedAvgNIID(participants=5, server_lr=0.5))
    trips = {action.task: action.trip for action in seen.actions if isinstance(action, Train)}
    w = [np.zeros(7)]
    for order, updates in seen.sums:
        gradients = np.zeros((0, 7))
        for one, draws in zip(updates, np.multiply(order.weights, 5).round().astype(int), strict=True):
            start = w[one.base_version].astype(np.float32)
            gradient = (start - trained(one.client, start, trips[one.task])) / 0.1
            gradients = np.concatenate([gradients, np.tile(gradient, (draws, 1))])
        assert len(gradients) == 5
        w.append(w[-1] - 0.5 * 0.1 / 5 * gradients.sum(axis=0))
    assert np.array(seen.models) == pytest.approx(np.array(w), abs=1e-5)
    assert max(delays_of(seen)) > 1


def test_without_delays_iid_is_fedavg_bit_for_bit() -> None:
    """Every version uses updates of all clients, and no client starts before the step."""
    mine = run(DeFedAvgIID(buffer_size=CLIENTS, restart="after-step", server_lr=0.7), equal=True)
    theirs = run(FedAvg(cohort=CLIENTS, weighting="uniform", server_lr=0.7), equal=True)
    assert set(delays_of(mine)) == {0}
    assert bits(mine) == bits(theirs)


def test_with_one_client_both_forms_are_fedavg_bit_for_bit() -> None:
    found = [
        run(strategy, clients=1)
        for strategy in (DeFedAvgNIID(participants=1), DeFedAvgIID(buffer_size=1), FedAvg(cohort=1))
    ]
    assert [set(delays_of(each)) for each in found] == [{0}] * 3
    assert bits(found[0]) == bits(found[1]) == bits(found[2])


def test_lambda_of_one_permits_a_delay_of_one_version() -> None:
    """Assumption 4 with λ = 1 is τ_i(t) ≥ t − 1.

    Equally fast clients that restart at once, as in Algorithm 2, satisfy it. But all updates except the last
    that arrives are one version old, so this is not FedAvg: w_{t+1} = w_t + Δ(w_{t−1}).
    """
    mine = run(DeFedAvgIID(buffer_size=CLIENTS), equal=True)
    delays = delays_of(mine)
    assert delays.max() == 1
    assert delays[CLIENTS:].mean() == pytest.approx((CLIENTS - 1) / CLIENTS)
    assert bits(mine) != bits(run(FedAvg(cohort=CLIENTS, weighting="uniform"), equal=True))
    w = [np.zeros(7, np.float32)]
    for t in range(VERSIONS):
        starts = [w[t if client == CLIENTS - 1 else max(0, t - 1)] for client in range(CLIENTS)]
        moves = [trained(client, start, t) - start for client, start in enumerate(starts)]
        w.append(w[t] + np.mean(moves, axis=0))
    assert np.array(mine.models) == pytest.approx(np.array(w), abs=1e-5)
