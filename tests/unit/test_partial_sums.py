"""``server.partial_sums``: a step's bits do not depend on where which updates were summed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from test_aggregator import OPTIMIZERS, SIZE, deliver, numbers

from edgefl import Clock, Experiment, Fleet, Server, Stop, kernels
from edgefl.core.events import Sum
from edgefl.errors import ConfigError
from edgefl.experiment import Privacy
from edgefl.kernels.exact import LARGEST
from edgefl.kernels.steps import apply, start
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.run.demands import checked
from edgefl.run.slots import Aggregator, PartialSum, SumResult
from edgefl.strategies.base import ServerOptimizer

WEIGHTS = (0.4, -0.2, 0.3, 0.1, 0.4)
SGD = ServerOptimizer()


def drawn(seed: int = 3) -> list[Any]:
    draws = np.random.default_rng(seed)
    return [draws.normal(size=SIZE).astype(np.float32) * np.float32(10.0**-k) for k in range(5)]


def part_of(tasks: Sequence[int], updates: Sequence[Any], weights: Sequence[float] = WEIGHTS) -> PartialSum:
    """What a node says of its tasks."""
    total = np.zeros(SIZE)
    made = kernels.exact_sum(total, [updates[task] for task in tasks], [weights[task] for task in tasks])
    return PartialSum(tasks, total, *made, 0.0)


def stepped(
    optimizer: ServerOptimizer,
    updates: Sequence[Any],
    nodes: Sequence[Sequence[int]] = (),
    *,
    base_scale: float = 1.0,
    backend: str | None = None,
    change: Callable[[ParameterBuffer], None] | None = None,
    parts: Sequence[PartialSum] | None = None,
    weights: Sequence[float] = WEIGHTS,
) -> tuple[SumResult, list[bytes], list[bytes]]:
    """One step of which these nodes sum these tasks; its result, and the numbers before and after it."""
    buffer = ParameterBuffer.create(Shape(SIZE, 3, 8, optimizer.vectors))
    buffer.model(0)[:] = np.random.default_rng(1).normal(size=SIZE)
    start(optimizer, buffer.vectors(0))
    buffer.publish(version=0, entry=0)
    aggregator = Aggregator(buffer, optimizer, backend, exact=True)
    elsewhere = set(itertools.chain(*nodes))
    for task, update in enumerate(updates):
        deliver(aggregator, task, np.full(SIZE, 7.0) if task in elsewhere else update)
        buffer.checksum[aggregator.leases[task].slot] = kernels.checksum(update)
    if change is not None:
        change(buffer)
    before, entry = numbers(buffer, 0), aggregator.free_entry()
    assert entry is not None
    if parts is None:
        parts = [part_of(tasks, updates, weights) for tasks in nodes]
    result = aggregator.sum(Sum(1, tuple(range(5)), tuple(weights), base_scale), entry, parts)
    after = numbers(buffer, buffer.latest[1])
    buffer.close()
    return result, before, after


@pytest.mark.parametrize("base_scale", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_equations_whoever_sums_what(name: str, base_scale: float) -> None:
    """By hand: products rounded to multiples of 2⁻⁴⁰, their sum rounded to float32, then the optimiser."""
    optimizer, updates = OPTIMIZERS[name], drawn()
    result, before, after = stepped(optimizer, updates, base_scale=base_scale)
    products = [weight * update.astype(np.float64) for weight, update in zip(WEIGHTS, updates, strict=True)]
    total = sum(np.round(product * 2.0**40) / 2.0**40 for product in products)
    base, *state = (np.frombuffer(numbers, np.float32).copy() for numbers in before)
    step, expected = total.astype(np.float32), np.empty_like(base)
    if base_scale == 1.0 and optimizer.lr == 1.0 and not state:
        apply(optimizer, expected, base, step, state)
        assert after == [expected.tobytes()]
    gradient = (step + (base_scale - 1.0) * base).astype(np.float32)
    apply(optimizer, expected, base, gradient, state)
    for made, wanted in zip(after, [expected, *state], strict=True):
        np.testing.assert_allclose(np.frombuffer(made, np.float32), wanted, rtol=1e-4, atol=1e-6)
    for nodes in ([(0, 1, 2, 3, 4)], [(4, 0), (3, 1)], [(2,), (0, 4), (1, 3)]):
        again = stepped(optimizer, updates, nodes, base_scale=base_scale)
        assert again[2] == after
        assert (again[0].norms, again[0].checksums) == (result.norms, result.checksums)
    for backend, state_of in kernels.backends().items():
        if state_of == "ok" and backend != "cuda":
            assert stepped(optimizer, updates, [(1, 2)], base_scale=base_scale, backend=backend)[2] == after


def test_updates_that_are_bad_elsewhere_are_named_and_nothing_is_published() -> None:
    updates = drawn()
    updates[3][5] = np.nan
    for nodes in ([(0, 1), (3,)], [(0, 3), (1, 2)]):
        result, before, after = stepped(SGD, updates, nodes)
        assert (result.bad, result.altered, after) == ((3,), (), before)

    def alter(buffer: ParameterBuffer) -> None:
        buffer.checksum[buffer.task.tolist().index(1)] ^= 1

    result, before, after = stepped(SGD, drawn(), [(0, 1), (3,)], change=alter)
    assert (result.bad, result.altered, after) == ((1,), (1,), before)


@pytest.mark.parametrize("number", [np.nan, -np.inf, LARGEST, -1e308, 60.0])
def test_a_node_whose_sum_cannot_be_of_its_updates_loses_them_alone(number: float) -> None:
    parts = [part_of(tasks, drawn()) for tasks in ((0, 2), (1, 4))]
    parts[1].total[3] = number
    result, before, after = stepped(SGD, drawn(), [(0, 2), (1, 4)], parts=parts)
    assert (result.bad, result.altered, after) == ((1, 4), (), before)


def test_nobody_else_is_blamed_for_a_sum_that_is_no_number() -> None:
    """Though the norms that its node says are too large together, and the largest is another node's."""
    updates = drawn()
    updates[0][0], updates[1][0], updates[4][0] = 3100.0, 6000.0, 2900.0
    parts = [part_of(tasks, updates) for tasks in ((0, 2), (1, 4))]
    parts[1].total[3] = np.nan
    result, before, after = stepped(SGD, updates, [(0, 2), (1, 4)], parts=parts)
    assert (result.bad, result.altered, after) == ((1, 4), (), before)


def test_honest_nodes_are_believed_up_to_the_largest_sum_there_may_be() -> None:
    """The bits are one host's there, though rounding carries the sum to the bound itself."""
    updates = [np.zeros(SIZE, np.float32) for _ in range(5)]
    for update in updates:
        update[0] = 511.75
    weights = [1.0 - 2.0**-53] * 4 + [0.0]
    made = [
        stepped(SGD, updates, nodes, weights=weights) for nodes in ([], [(0, 1, 2, 3)], [(0, 4), (2, 1, 3)])
    ]
    assert made[0][0].bad == ()
    assert made[0][1] != made[0][2]
    assert len({tuple(after) for _, _, after in made}) == 1


def test_seconds_that_nodes_say_may_be_any() -> None:
    parts = [part_of(tasks, drawn())._replace(seconds=1.7e308) for tasks in ((0, 2), (1, 4))]
    result, before, after = stepped(SGD, drawn(), [(0, 2), (1, 4)], parts=parts)
    assert result.bad == ()
    assert before != after


def test_a_node_that_says_a_squared_norm_below_zero_loses_that_update() -> None:
    parts = [part_of((0, 2), drawn())]
    parts[0].norms[1] = -1.0
    result, before, after = stepped(SGD, drawn(), [(0, 2)], parts=parts)
    assert (result.bad, result.altered, after) == ((2,), (), before)


def test_an_update_too_large_for_the_grid_is_bad() -> None:
    updates = drawn()
    updates[2][0] = 4 * LARGEST
    for nodes in ([], [(2, 3)]):
        result, before, after = stepped(SGD, updates, nodes)
        assert (result.bad, after) == ((2,), before)


@pytest.mark.parametrize(("changes", "says"), [
    ({"server": Server(partial_sums=True, update_format="int8")}, "update_format: must be .float32. with"),
    ({"clock": Clock(kind="wall"), "server": Server(partial_sums=True, durability="disk")}, "must be .mem"),
    ({"privacy": Privacy(clip_norm=1.0)}, "privacy: not together with server.partial_sums"),
    ({"strategy": {"name": "scaffold"}}, "server.partial_sums: not together with strategy 'scaffold'"),
])  # fmt: skip
def test_what_needs_more_of_an_update_than_its_part_of_a_sum_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Any
) -> None:
    given = {"fleet": Fleet(devices={"pixel-4": 3}, network="wifi"), "strategy": {"name": "fedavg"}}
    given |= {"server": Server(partial_sums=True), "stop": Stop(versions=1), **changes}
    with pytest.raises(ConfigError, match=says):
        checked(Experiment(**given), tmp_path)
