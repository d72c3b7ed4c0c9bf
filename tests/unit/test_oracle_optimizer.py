"""Tests of server optimisers and built-in strategies against their equations, computed in float64.

Three clients with 10, 30 and 60 examples pull the model towards 1, 10 and 100: a local step is
y ← y − 0.1·((y − c) + μ·(y − w_k)). Their trips have 2, 1 and 4 steps and take 2, 3 and 7 s. `CASES` has the
updates of each step of the server (client, base version, weight), from which `model_of` computes the models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.kernels.steps import CHUNK, apply, start
from edgefl.seeds import stream
from edgefl.strategies import Client, ServerOptimizer, names, resolve
from edgefl.testing import Vector, run_in_memory

OPTIMIZERS = [
    ServerOptimizer(),
    ServerOptimizer(lr=0.3),
    ServerOptimizer(lr=0.3, momentum=0.9),
    ServerOptimizer(kind="adam", lr=0.1),
    ServerOptimizer(kind="yogi", lr=0.1, beta1=0.5, beta2=0.8, epsilon=0.1),
    ServerOptimizer(kind="adagrad", lr=0.1, beta1=0.0),
]


def reference_step(optimizer: ServerOptimizer, model: Any, g: Any, kept: dict[str, Any]) -> Any:
    """Apply the equations of `ServerOptimizer` (Reddi et al. 2021, Algorithm 2)."""
    m, v = kept.get("m", 0.0), kept.get("v", optimizer.epsilon**2)
    if optimizer.kind == "sgd":
        kept["m"] = m = optimizer.momentum * m + g
        return model + optimizer.lr * m
    kept["m"] = m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
    if optimizer.kind == "adagrad":
        v = v + g**2
    elif optimizer.kind == "adam":
        v = optimizer.beta2 * v + (1 - optimizer.beta2) * g**2
    else:
        v = v - (1 - optimizer.beta2) * g**2 * np.sign(v - g**2)
    kept["v"] = v
    return model + optimizer.lr * m / (np.sqrt(v) + optimizer.epsilon)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 1000, CHUNK, 2 * CHUNK + 17])
def test_apply_follows_its_equations(optimizer: ServerOptimizer, dtype: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    model = rng.normal(size=size).astype(dtype)
    gradients = [rng.normal(scale=0.1, size=size).astype(dtype) for _ in range(5)]
    state = [np.empty(size, dtype) for _ in range(optimizer.vectors)]
    start(optimizer, state)
    current, expected, kept = model, model.astype(np.float64), dict[str, Any]()
    for gradient in gradients:
        expected = reference_step(optimizer, expected, gradient.astype(np.float64), kept)
        out = np.full(size, np.nan, dtype)
        apply(optimizer, out, current, gradient, state)
        assert out.dtype == dtype
        current = out
    tolerance = 3e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(current, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_bits_do_not_depend_on_an_elements_position_or_on_the_output(optimizer: ServerOptimizer) -> None:
    size = CHUNK + 5
    rng = np.random.default_rng(0)
    model, gradient = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    state = [rng.random(size).astype(np.float32) for _ in range(optimizer.vectors)]
    whole, part, over = np.empty_like(model), np.empty(7, np.float32), gradient.copy()
    apply(optimizer, part, model[-7:], gradient[-7:].copy(), [vector[-7:].copy() for vector in state])
    fresh = [np.empty_like(vector) for vector in state]
    before = [vector.copy() for vector in state]
    apply(optimizer, whole, model, gradient, state, fresh)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(state, before, strict=True))
    apply(optimizer, over, model, over, state)  # gradient and state in place
    assert whole[-7:].tobytes() == part.tobytes()
    assert over.tobytes() == whole.tobytes()
    assert all(one.tobytes() == other.tobytes() for one, other in zip(state, fresh, strict=True))


def test_plain_averaging_only_adds_the_step() -> None:
    model = np.array([1.0, 2.0], np.float32)
    step = np.array([0.1, -0.7], np.float32)
    out = np.empty_like(model)
    apply(ServerOptimizer(), out, model, step)
    assert out.tobytes() == (model + step).tobytes()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": np.zeros(3, np.float32)}, ValueError, "model must be 1-D with the shape of out"),
        ({"step_vector": np.zeros((2, 1), np.float32)}, ValueError, "step_vector must be 1-D"),
        ({"model": np.zeros(2)}, TypeError, "model must have out's dtype float32, got float64"),
        ({"state_vectors": ()}, ValueError, "state_vectors must hold 1 vectors for sgd, got 0"),
        ({"new_state": ()}, ValueError, "new_state must hold 1 vectors for sgd, got 0"),
        ({"state_vectors": [np.zeros(3, np.float32)]}, ValueError, "state vector 0 must be 1-D"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros(2, np.float32),
        "model": np.zeros(2, np.float32),
        "step_vector": np.zeros(2, np.float32),
        "state_vectors": [np.zeros(2, np.float32)],
    }
    with pytest.raises(error) as caught:
        apply(ServerOptimizer(momentum=0.5), **(arguments | change))
    assert message in str(caught.value)
    assert not arguments["out"].any()


TARGETS, STEPS, DURATIONS, RATE = (1.0, 10.0, 100.0), (2, 1, 4), (2.0, 3.0, 7.0), 0.1
DEVICES = [Client(i, "a", n, STEPS[i], 0.0, DURATIONS[i]) for i, n in enumerate((10, 30, 60))]
TWO, THREE = 2**-0.5, 3**-0.5
PLAIN = ServerOptimizer()

Used = Sequence[tuple[int, int, float]]


def local(client: int, start: float, mu: float = 0.0, steps: int | None = None) -> float:
    """Return the client's model after its steps from ``start``."""
    y = start
    for _ in range(STEPS[client] if steps is None else steps):
        y = y - RATE * ((y - TARGETS[client]) + mu * (y - start))
    return y


@dataclass(frozen=True)
class Case:
    """A strategy's fields, and the updates that make each version of the model."""

    fields: dict[str, Any]
    versions: Sequence[Used]
    base_scale: Sequence[float] = (1.0, 1.0, 1.0)
    server: ServerOptimizer = PLAIN
    mu: float = 0.0
    uploads_model: bool = False
    gains: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """Keyed by client and base version: the number of steps that the client made, and the factor of its Δ."""
    models: Sequence[float] | None = None
    """The model of each version, if clients keep vectors, for which `model_of` has no equation."""


def model_of(case: Case) -> list[float]:
    """Return the model of each version of a case."""
    if case.models is not None:
        return list(case.models)
    models, kept = [0.0], dict[str, Any]()
    for used, base_scale in zip(case.versions, case.base_scale, strict=False):
        g = (base_scale - 1.0) * models[-1]
        for client, version, weight in used:
            start = models[version]
            steps, gain = case.gains.get((client, version), (None, 1.0))
            delta = gain * (local(client, start, case.mu, steps) - start)
            g += weight * (start + delta if case.uploads_model else delta)
        models.append(float(reference_step(case.server, models[-1], g, kept)))
    return models


MOMENTUM = ServerOptimizer(lr=0.5, momentum=0.9)
ADAPTIVE = {"server_lr": 0.5, "beta1": 0.6, "epsilon": 0.01}


def adaptive(kind: Any) -> ServerOptimizer:
    return ServerOptimizer(kind=kind, lr=0.5, beta1=0.6, beta2=0.8, epsilon=0.01)


# Rounds: all clients train from each version; weights are proportional to the numbers of examples.
ROUNDS = [[(0, k, 0.1), (1, k, 0.3), (2, k, 0.6)] for k in range(3)]
# A buffer of two, and every client restarts at once. Arrivals with base version and staleness τ:
# - 2 s: client 0, v0, τ = 0; 3 s: client 1, v0, τ = 0 → v1
# - 4 s: client 0, v0, τ = 1; 6 s: client 0, v1, τ = 0 → v2
# - 6 s, after client 0: client 1, v1, τ = 1; 7 s: client 2, v0, τ = 2 → v3
BUFFERS = [[(0, 0), (1, 0)], [(0, 0), (0, 1)], [(1, 1), (2, 0)]]


def buffered(*weights: tuple[float, float]) -> list[Used]:
    return [
        [(client, version, weight) for (client, version), weight in zip(used, given, strict=True)]
        for used, given in zip(BUFFERS, weights, strict=True)
    ]


def niid_versions() -> list[Used]:
    """Each round draws two clients with replacement and ends when both have an update in their buffer.
    (The oracle of Algorithm 1's buffers is in test_oracle_buffers.py.)

    Client 0 has an update (from v0) at 2 s, client 1 at 3 s, client 0 again at 4 s, … A client starts again
    at once from the newest version, without waiting for the server.
    """
    rng = stream(0, "strategy")
    versions: list[Used] = []
    made_s = [0.0]  # time of each version
    taken: dict[int, float] = {0: 0.0, 1: 0.0, 2: 0.0}  # time at which each send buffer was emptied
    now_s = 2.0  # the first update
    for _ in range(3):
        sample = rng.integers(3, size=2).tolist()
        ready_s = []
        for client in sample:
            trip_s = DURATIONS[client]
            # The first arrival after the buffer was emptied.
            first = math.floor(taken[client] / trip_s) + 1
            ready_s.append(first * trip_s)
        now_s = max(now_s, *ready_s)
        used = []
        for client in sample:
            trip_s = DURATIONS[client]
            started_s = math.floor(now_s / trip_s) * trip_s - trip_s  # start of its newest finished trip
            version = max(k for k, at_s in enumerate(made_s) if at_s <= started_s)
            used.append((client, version, 0.5))
        for client in sample:
            taken[client] = now_s
        versions.append(used)
        made_s.append(now_s)
    return versions


def by_distance(lam: float, epsilon: float, **fields: float) -> Case:
    """The weight of an update is λ/(γ + ε) with γ = |w_n − w_k|/|Δ|. Client 0 arrives at 2 s (from v0),
    client 1 at 3 s (from v0), and then client 0 again (from v1).

    With κ > 0, the second trip of client 0 has 2 + ⌊γ̄·κ⌋ = 5 steps, because its γ was 0, and ends at 7 s. By
    then client 1, which had γ < 1 and so makes 1 + 2 steps, has not finished; client 2 arrives next.
    """
    models, rates, steps = [0.0], [], 5 if fields["kappa"] else None
    for client, version, made in ((0, 0, None), (1, 0, None), (0, 1, steps)):
        delta = local(client, models[version], steps=made) - models[version]
        rates.append(lam / (abs(models[-1] - models[version]) / abs(delta) + epsilon))
        models.append(models[-1] + rates[-1] * delta)
    versions = [[(0, 0, rates[0])], [(1, 0, rates[1])], [(0, 1, rates[2])]]
    gains = {(0, 1): (5, 1.0)} if steps else {}
    return Case({"lam": lam, "epsilon": epsilon, **fields}, versions, gains=gains)


def averaged() -> Case:
    """QuAFL polls all clients at 4, 8 and 12 s. By each poll, clients 0, 1 and 2 have made 2, 1 and 2 steps
    from their own models. A polled client mixes its model with the server's model before the poll, so the
    base versions are 0, 0 and 1.
    """
    own, models, steps = [0.0] * 3, [0.0], (2, 1, 2)
    for _ in range(3):
        sent = [local(client, own[client], steps=steps[client]) for client in range(3)]
        own = [(models[-1] + 3 * y) / 4 for y in sent]
        models.append((models[-1] + sum(sent)) / 4)
    used = [[(client, version, 0.25) for client in range(3)] for version in (0, 0, 1)]
    return Case({"participants": 3, "interval_s": 4.0}, used, models=models)


def decayed(mu: float) -> Case:
    """ASO-Fed's first arrivals are client 0 at 2 s and client 1 at 3 s (both from v0), then client 0 at 4 s
    (from v1). The step factor r is ln 3 for trips of 3 s, and 1 for trips of 2 s."""
    first = -local(0, 0.0, mu)
    models = [0.0, -0.1 * first]
    models.append(models[1] + 0.3 * math.log(3.0) * local(1, 0.0, mu))
    second = models[1] - local(0, models[1], mu)
    models.append(models[2] - 0.1 * (second - first))
    used = [[(client, version, math.nan)] for client, version in ((0, 0), (1, 0), (0, 1))]
    return Case({"lam": mu, "beta": 0.5}, used, mu=mu, models=models)


def replaced() -> list[Used]:
    """Each round draws three times with replacement. A client that is drawn twice trains once, and its update
    gets twice the weight (eqs. 2 and 3)."""
    rng = stream(0, "strategy")
    draws = [rng.integers(3, size=3).tolist() for _ in range(3)]
    assert any(len(set(drawn)) < 3 for drawn in draws)
    return [[(i, k, drawn.count(i) / 3) for i in sorted(set(drawn))] for k, drawn in enumerate(draws)]


CASES: dict[str, list[Case]] = {
    "fedavg": [
        Case({}, ROUNDS),
        Case({"weighting": "uniform"}, [[(i, k, 1 / 3) for i in range(3)] for k in range(3)]),
        # The updates of the first two of three members are used; client 2 is cancelled in each round.
        Case({"cohort": 2, "over_selection": 1.5}, [[(0, k, 10 / 40), (1, k, 30 / 40)] for k in range(3)]),
        Case({"cohort": 3, "weighting": "uniform", "replacement": True}, replaced()),
    ],
    "fedprox": [Case({"mu": 0.7}, ROUNDS, mu=0.7)],
    "fedavgm": [Case({"momentum": 0.9, "server_lr": 0.5}, ROUNDS, server=MOMENTUM)],
    "fedadam": [Case({**ADAPTIVE, "beta2": 0.8}, ROUNDS, server=adaptive("adam"))],
    "fedyogi": [Case({**ADAPTIVE, "beta2": 0.8}, ROUNDS, server=adaptive("yogi"))],
    "fedadagrad": [Case(ADAPTIVE, ROUNDS, server=adaptive("adagrad"))],
    # τ_eff = 0.1·2 + 0.3·1 + 0.6·4 = 2.9
    "fednova": [
        Case({}, [[(0, k, 0.1 * 2.9 / 2), (1, k, 0.3 * 2.9), (2, k, 0.6 * 2.9 / 4)] for k in range(3)])
    ],
    # Arrivals: 2 s: client 0, τ = 0; 3 s: client 1, τ = 1; 4 s: client 0, τ = 1. The staleness weight s(1) is
    # 1, (1 + 1)^−½ or 1/(3·(1 − 0.5) + 1).
    "fedasync": [
        Case(
            {"alpha": 0.5, **fields},
            [[(0, 0, 0.5)], [(1, 0, late)], [(0, 1, late)]],
            base_scale=(0.5, 1 - late, 1 - late),
            uploads_model=True,
        )
        for fields, late in (
            ({"scaling": "constant"}, 0.5),
            ({}, 0.5 * TWO),
            ({"scaling": "hinge", "a": 3.0, "h": 0.5}, 0.5 / 2.5),
        )
    ],
    "fedbuff": [
        Case({"buffer_size": 2}, buffered((0.5, 0.5), (TWO / 2, 0.5), (TWO / 2, THREE / 2))),
        Case(
            {"buffer_size": 2, "normalize": True},
            buffered(
                (0.5, 0.5), (TWO / (1 + TWO), 1 / (1 + TWO)), (TWO / (TWO + THREE), THREE / (TWO + THREE))
            ),
        ),
        Case(
            {"buffer_size": 2, "weighting": "examples"},
            buffered((0.25, 0.75), (TWO / 2, 0.5), (TWO / 3, 2 * THREE / 3)),
        ),
        Case(
            {"buffer_size": 2, "weighting": "examples", "normalize": True},
            buffered(
                (0.25, 0.75),
                (TWO / (1 + TWO), 1 / (1 + TWO)),
                (TWO / (TWO + 2 * THREE), 2 * THREE / (TWO + 2 * THREE)),
            ),
        ),
        Case(
            {"buffer_size": 2, "exponent": 1.0, "momentum": 0.9, "server_lr": 0.5},
            buffered((0.5, 0.5), (0.25, 0.5), (0.25, 1 / 6)),
            server=MOMENTUM,
        ),
    ],
    # A client waits for a new version before it restarts. Only the arrival of client 2 has τ > 0: client 0 at
    # 2 s and 1 at 3 s → v1, 0 at 5 s and 1 at 6 s → v2, 2 at 7 s (τ = 2) and 0 at 8 s → v3.
    "fedstaleweight": [
        Case(
            {"buffer_size": 2, **fields},
            [[(0, 0, 0.5), (1, 0, 0.5)], [(0, 1, 0.5), (1, 1, 0.5)], [(2, 0, late), (0, 2, fresh)]],
        )
        for fields, late, fresh in (
            ({}, 3 / 4, 1 / 4),  # 2 + 1 to 1
            ({"form": "derivation"}, 5 / 6, 1 / 6),  # 2·2 + 1 to 1
            # The raw weights of the six updates so far are 1, 1, 1, 1, 3 and 1.
            ({"normalize": "running"}, 3 / (2 * 8 / 6), 1 / (2 * 8 / 6)),
            ({"normalize": "running", "max_step": 1.2}, 1.2 * 3 / 4, 1.2 * 1 / 4),
            ({"average": "exponential", "decay": 0.5}, 3 / 4, 1 / 4),
        )
    ]
    + [  # p_i = 0.1, 0.3, 0.6: raw weights 0.1 and 0.3, twice, then 3 · 0.6 and 0.1
        Case(
            {"buffer_size": 2, "importance_by": "examples", **fields},
            [[(0, 0, 1 / 4), (1, 0, 3 / 4)], [(0, 1, 1 / 4), (1, 1, 3 / 4)], [(2, 0, late), (0, 2, fresh)]],
        )
        for fields, late, fresh in (
            ({}, 18 / 19, 1 / 19),
            ({"form": "derivation"}, 30 / 31, 1 / 31),
            ({"normalize": "running", "max_step": 9.0}, 1.8 / (2 * 2.7 / 6), 0.1 / (2 * 2.7 / 6)),
            ({"normalize": "credit"}, 2.0 * 18 / 19, 2.0 / 19),
        )
    ]
    + [
        # The fair weights are ½ and ½, ½ and ½, then 1½ and 3/10. The weights of a version may sum to 0.8 at
        # most. So clients 0 and 1 get 0.4 each in the first two versions, and a credit that grows to 1/10 and
        # then 2/10. In the third version, 1½ and 3/10 + 2/10 = ½ are scaled to a sum of 0.8.
        Case(
            {"buffer_size": 2, "form": "derivation", "normalize": "credit", "max_step": 0.8},
            [[(0, 0, 0.4), (1, 0, 0.4)], [(0, 1, 0.4), (1, 1, 0.4)], [(2, 0, 0.6), (0, 2, 0.2)]],
        )
    ],
    "defedavg-iid": [Case({"buffer_size": 2}, buffered((0.5, 0.5), (0.5, 0.5), (0.5, 0.5)))],
    "defedavg-niid": [Case({"participants": 2, "takes": "newest"}, niid_versions())],
    "asysg": [Case({"buffer_size": 2}, buffered((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))],
    # All clients are polled every 4 s, so α is the number of steps in 4 s: 2, 1 and ⌊4/1.75⌋ = 2.
    "favano": [
        Case(
            {"participants": 3, "interval_s": 4.0, "form": form},
            [[(i, k, 0.25) for i in range(3)] for k in range(3)],
            base_scale=(0.25, 0.25, 0.25),
            uploads_model=True,
            gains={(i, k): (made, 1 / made) for i, made in enumerate((2, 1, 2)) for k in range(3)},
        )
        for form in ("deterministic", "stochastic")
    ],
    # The server sums at 4, 8 and 12 s; the clients that have delivered then start again.
    # - v1 at 4 s: client 0 arrived at 2 s, client 1 at 3 s.
    # - v2 at 8 s: client 0 arrived at 6 s and 1 at 7 s (from v1), 2 at 7 s (from v0, over two intervals).
    # - v3 at 12 s: client 0 arrived at 10 s, client 1 at 11 s.
    "fedfix": [
        Case(
            {"interval_s": 4.0, "importance_by": by},
            [[(0, 0, p), (1, 0, q)], [(0, 1, p), (1, 1, q), (2, 0, 2 * r)], [(0, 2, p), (1, 2, q)]],
        )
        for by, (p, q, r) in (("examples", (0.1, 0.3, 0.6)), ("uniform", (1 / 3, 1 / 3, 1 / 3)))
    ],
    "asyncfeded": [by_distance(0.5, 1.0, kappa=0.0), by_distance(0.5, 1.0, target=3.0, kappa=1.0)],
    "quafl": [averaged()],
    "aso-fed": [decayed(0.0), decayed(0.7)],
    # All clients train from each version. Rounds end at 7, 14 and 21 s.
    "mifa": [Case({}, [[(i, k, 1 / 3) for i in range(3)] for k in range(3)])],
    # Two tiers, {0, 1} and {2}: at 3 and 6 s all weight is on the slow tier, which has not finished a round;
    # the current model is used in its place. At 7 s the slow tier finishes its first round. It has the weight
    # 2/3, because two of the three rounds so far were the fast tier's. Three tiers: client 0 arrives at 2 s,
    # client 1 at 3 s, client 0 at 4 s; the current model is used in place of client 2's.
    "fedat": [
        Case(
            {"tiers": 2, "lam": 0.4},
            [
                [(0, 0, 0.0), (1, 0, 0.0)],
                [(0, 1, 0.0), (1, 1, 0.0)],
                [(0, 1, 1 / 12), (1, 1, 3 / 12), (2, 0, 2 / 3)],
            ],
            base_scale=(1.0, 1.0, 0.0),
            uploads_model=True,
            mu=0.4,
        ),
        Case(
            {"lam": 0.0},
            [[(0, 0, 0.0)], [(0, 0, 0.0), (1, 0, 1 / 2)], [(0, 1, 0.0), (1, 0, 1 / 3)]],
            base_scale=(1.0, 1 / 2, 2 / 3),
            uploads_model=True,
        ),
    ],
    # b = 1, so the interval between steps is half the latency of the slowest client in training: 3.5 s while
    # client 2 trains. Clients 0 and 1 arrive at 2 and 3 s → v1 at 3.5 s, and at 5.5 and 6.5 s → v2 at 7 s,
    # just before client 2 arrives. Client 1 is then the slowest, and v3 is due at 7 + 3/2 s.
    "pisces": [
        Case(
            {"staleness_bound": 1, "weighting": by},
            [[(0, 0, p), (1, 0, 1 - p)], [(0, 1, p), (1, 1, 1 - p)], [(2, 0, THREE)]],
        )  # 2 is two versions stale
        for by, p in (("examples", 0.25), ("uniform", 0.5))
    ],
}


def test_every_strategy_has_an_oracle() -> None:
    in_test_oracle_clients, in_test_oracle_related = ("feddyn", "scaffold"), ("ca2fl", "safa")
    in_test_strategies_rows = ("krum", "median", "rfa", "trimmed-mean")
    others = (*in_test_oracle_clients, *in_test_oracle_related, *in_test_strategies_rows)
    assert sorted([*CASES, *others]) == names()


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name} {case.fields}") for name, cases in CASES.items() for case in cases],
)
def test_models_are_those_of_the_equations(name: str, case: Case) -> None:
    strategy = resolve({"name": name, **case.fields})
    core = Core(strategy, DEVICES, 0, experiment.Stop(versions=3))

    def step(client: int, model: Vector, trip: int) -> Vector:
        return np.asarray(model - RATE * (model - TARGETS[client]))

    result = run_in_memory(core, DURATIONS, train=step, steps=STEPS, lr=RATE)
    taken = [[(update.client, update.base_version) for update in updates] for _, updates in result.sums]
    assert taken == [list(dict.fromkeys((client, k) for client, k, _ in used)) for used in case.versions]
    assert [float(model[0]) for model in result.models] == pytest.approx(model_of(case), rel=1e-13)
