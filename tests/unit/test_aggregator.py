"""The aggregator's sums against a float64 oracle, and bad updates, of which nothing is published."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import kernels
from edgefl.core.events import Sum
from edgefl.errors import SlotError
from edgefl.kernels.steps import start
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.run.slots import Aggregator
from edgefl.strategies.base import ServerOptimizer

SIZE = 300
SGD = ServerOptimizer()
OPTIMIZERS = {
    "sgd": SGD,
    "sgd with a rate": ServerOptimizer(lr=0.3),
    "momentum": ServerOptimizer(lr=0.5, momentum=0.9),
    "adam": ServerOptimizer(kind="adam", lr=0.1, beta1=0.9, beta2=0.99),
    "yogi": ServerOptimizer(kind="yogi", lr=0.1, beta1=0.9, beta2=0.99),
    "adagrad": ServerOptimizer(kind="adagrad", lr=0.1),
}

Make = Callable[..., Aggregator]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Aggregator] = []

    def one(
        optimizer: ServerOptimizer = SGD, size: int = SIZE, ring: int = 3, slots: int = 8, seed: int = 1
    ) -> Aggregator:
        buffer = ParameterBuffer.create(Shape(size, ring, slots, optimizer.vectors))
        buffer.model(0)[:] = np.random.default_rng(seed).normal(size=size)
        start(optimizer, buffer.vectors(0))
        buffer.publish(version=0, entry=0)
        made.append(Aggregator(buffer, optimizer))
        return made[-1]

    yield one
    for aggregator in made:
        aggregator.buffer.close()


def deliver(aggregator: Aggregator, task: int, update: npt.ArrayLike, client: int = 0) -> None:
    """A client does a task: leases, reads, writes and says what it wrote."""
    version, _ = aggregator.buffer.latest
    lease = aggregator.lease(task=task, client=client, version=version)
    slot = aggregator.buffer.slot(lease.slot)
    slot[:] = update
    aggregator.buffer.fetched[lease.slot] = 1
    aggregator.buffer.written(lease.slot, task=task, checksum=kernels.checksum(slot))


def step(aggregator: Aggregator, tasks: Sequence[int], weights: Sequence[float], base_scale: float = 1.0):
    version = aggregator.buffer.latest[0] + 1
    entry = aggregator.free_entry()
    assert entry is not None
    return aggregator.sum(Sum(version, tuple(tasks), tuple(weights), base_scale), entry)


class Oracle:
    """`ServerOptimizer`'s equations in float64, as its docstring has them."""

    def __init__(self, optimizer: ServerOptimizer, model: npt.NDArray[np.float32]) -> None:
        self.o, self.w = optimizer, model.astype(np.float64)
        self.m = np.zeros_like(self.w)
        self.v = np.full_like(self.w, 0.0 if optimizer.kind == "sgd" else optimizer.epsilon**2)

    def step(
        self, updates: Sequence[npt.NDArray[np.float64]], weights: Sequence[float], base_scale: float
    ) -> None:
        o = self.o
        g = (base_scale - 1.0) * self.w + sum(w * u for w, u in zip(weights, updates, strict=True))
        if o.kind == "sgd":
            self.v = o.momentum * self.v + g
            self.w = self.w + o.lr * self.v
            return
        self.m = o.beta1 * self.m + (1 - o.beta1) * g
        if o.kind == "adagrad":
            self.v = self.v + g**2
        elif o.kind == "adam":
            self.v = o.beta2 * self.v + (1 - o.beta2) * g**2
        else:
            self.v = self.v - (1 - o.beta2) * g**2 * np.sign(self.v - g**2)
        self.w = self.w + o.lr * self.m / (np.sqrt(self.v) + o.epsilon)


# ---- the sum -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("base_scale", [1.0, 0.4, 0.0])
def test_ten_versions_are_those_of_the_equations(make: Make, name: str, base_scale: float) -> None:
    optimizer = OPTIMIZERS[name]
    aggregator = make(optimizer)
    oracle = Oracle(optimizer, aggregator.buffer.model(0))
    draw, tasks = np.random.default_rng(7), itertools.count()
    for version in range(1, 11):
        updates = draw.normal(size=(draw.integers(1, 7), SIZE)).astype(np.float32)
        weights = draw.uniform(0.05, 1.0, len(updates)).tolist()
        named = list(itertools.islice(tasks, len(updates)))
        for task, update in zip(named, updates, strict=True):
            deliver(aggregator, task, update)
        result = step(aggregator, named, weights, base_scale)
        oracle.step(updates.astype(np.float64), weights, base_scale)
        assert (result.bad, aggregator.buffer.latest[0]) == ((), version)
        model = aggregator.buffer.model(aggregator.buffer.latest[1])
        np.testing.assert_allclose(model, oracle.w, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(result.norms, np.square(updates.astype(np.float64)).sum(1), rtol=1e-12)
        assert result.checksums == tuple(kernels.checksum(update) for update in updates)
        for task in named:
            aggregator.release(task)


def test_plain_sums_have_the_kernels_bits(make: Make) -> None:
    aggregator = make()
    draw = np.random.default_rng(3)
    updates = draw.normal(size=(3, SIZE)).astype(np.float32)
    for task, update in enumerate(updates):
        deliver(aggregator, task, update)
    expected = np.empty(SIZE, np.float32)
    kernels.weighted_sum(
        expected, aggregator.buffer.model(0).copy(), list(updates), [0.5, 0.25, 0.1], backend="reference"
    )
    step(aggregator, [0, 1, 2], [0.5, 0.25, 0.1])
    assert aggregator.buffer.model(aggregator.buffer.latest[1]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_version_before_stays_as_it_was(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name])
    model = aggregator.buffer.model(0).copy()
    vectors = [vector.copy() for vector in aggregator.buffer.vectors(0)]
    deliver(aggregator, 0, np.ones(SIZE))
    step(aggregator, [0], [1.0])
    assert aggregator.buffer.latest == (1, 1)
    assert aggregator.buffer.model(0).tobytes() == model.tobytes()
    for now, then in zip(aggregator.buffer.vectors(0), vectors, strict=True):
        assert now.tobytes() == then.tobytes()
    out = np.empty(SIZE, np.float32)
    aggregator.buffer.read_model(0, 0, out)
    assert out.tobytes() == model.tobytes()


def test_updates_stay_as_they_were_and_may_be_summed_again(make: Make) -> None:
    aggregator = make()
    deliver(aggregator, 0, np.full(SIZE, 2.0))
    first = aggregator.buffer.model(0).astype(np.float64)
    step(aggregator, [0], [1.0])
    step(aggregator, [0], [0.5])
    assert aggregator.buffer.latest[0] == 2
    np.testing.assert_allclose(
        aggregator.buffer.model(aggregator.buffer.latest[1]), first + 3.0, rtol=1e-6, atol=1e-6
    )


def test_totals_count_what_was_moved(make: Make) -> None:
    aggregator = make(slots=8)
    for task in range(5):
        deliver(aggregator, task, np.ones(SIZE))
    first = step(aggregator, [0, 1, 2], [1.0, 1.0, 1.0])
    second = step(aggregator, [3, 4], [0.1, 0.1], 0.5)
    totals = aggregator.totals
    assert totals.updates == 5
    assert totals.bytes == ((3 + 2) + (2 + 2)) * SIZE * 4
    assert totals.seconds == first.seconds + second.seconds > 0


# ---- bad updates -------------------------------------------------------------------------------


def assert_nothing_published(aggregator: Aggregator, model: npt.NDArray[np.float32]) -> None:
    buffer = aggregator.buffer
    assert buffer.latest == (0, 0)
    assert buffer.model(0).tobytes() == model.tobytes()
    assert [version for version in buffer.entry_version.tolist() if version >= 0] == [0]
    for entry in range(1, buffer.shape.ring):
        with pytest.raises(SlotError):
            buffer.read_model(entry, 1, np.empty(SIZE, np.float32))
    assert (aggregator.totals.updates, aggregator.totals.bytes) == (0, 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("base_scale", [1.0, 0.5])
def test_updates_that_are_not_finite_are_named_and_nothing_is_published(
    make: Make, name: str, poison: float, base_scale: float
) -> None:
    aggregator = make(OPTIMIZERS[name])
    model = aggregator.buffer.model(0).copy()
    vectors = [vector.copy() for vector in aggregator.buffer.vectors(0)]
    updates = np.ones((4, SIZE), np.float32)
    updates[1, 17] = updates[3, SIZE - 1] = poison
    for task, update in enumerate(updates, start=10):
        deliver(aggregator, task, update)
    result = step(aggregator, [10, 11, 12, 13], [0.25] * 4, base_scale)
    assert (result.bad, result.altered) == ((11, 13), ())
    assert_nothing_published(aggregator, model)
    for now, then in zip(aggregator.buffer.vectors(0), vectors, strict=True):
        assert now.tobytes() == then.tobytes()
    again = step(aggregator, [10, 12], [0.25] * 2, base_scale)  # the good ones, as if nothing had been
    assert (again.bad, aggregator.buffer.latest[0]) == ((), 1)
    assert np.isfinite(aggregator.buffer.model(aggregator.buffer.latest[1])).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_updates_that_make_the_model_overflow_are_bad_too(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name])
    model = aggregator.buffer.model(0).copy()
    deliver(aggregator, 0, np.ones(SIZE))
    deliver(aggregator, 1, np.full(SIZE, 3e38))
    deliver(aggregator, 2, np.full(SIZE, 3.3e38))
    result = step(aggregator, [0, 1, 2], [1.0, 2.0, 3.0])
    assert result.bad == (2,)
    assert_nothing_published(aggregator, model)
    assert step(aggregator, [0, 1], [1.0, 5.0]).bad == (1,)
    assert step(aggregator, [0], [1.0]).bad == ()


def test_large_updates_that_fit_are_not_bad(make: Make) -> None:
    aggregator = make()
    deliver(aggregator, 0, np.full(SIZE, 1e30))
    assert step(aggregator, [0], [1.0]).bad == ()
    assert aggregator.buffer.latest[0] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_altered_after_it_was_sent_is_named_and_nothing_is_published(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name])
    model = aggregator.buffer.model(0).copy()
    for task in range(3):
        deliver(aggregator, task, np.full(SIZE, task + 1.0))
    slot = aggregator.buffer.slot(aggregator.leases[1].slot)
    sent = kernels.checksum(slot)
    slot.view(np.uint32)[5] ^= 1
    result = step(aggregator, [0, 1, 2], [1.0] * 3)
    assert (result.bad, result.altered) == ((1,), (1,))
    assert result.checksums[1] != sent
    assert len(result.checksums) == 3
    assert_nothing_published(aggregator, model)
    assert step(aggregator, [0, 2], [1.0] * 2).bad == ()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_late_reader_notices_that_its_entry_was_overwritten_by_a_sum_that_failed(
    make: Make, name: str
) -> None:
    aggregator = make(OPTIMIZERS[name], ring=2)
    deliver(aggregator, 0, np.ones(SIZE))
    assert step(aggregator, [0], [1.0]).bad == ()
    deliver(aggregator, 1, np.full(SIZE, math.nan))
    assert aggregator.free_entry() == 0  # it holds version 0, which nobody is known to read
    assert step(aggregator, [1], [1.0]).bad == (1,)
    assert aggregator.buffer.entry_version.tolist() == [-1, 1]
    with pytest.raises(SlotError, match="ring entry 0 holds version -1, not 0"):
        aggregator.buffer.read_model(0, 0, np.empty(SIZE, np.float32))
    assert aggregator.buffer.latest == (1, 1)


def test_an_update_that_was_never_completed_is_altered(make: Make) -> None:
    aggregator = make()
    lease = aggregator.lease(task=0, client=0, version=0)
    aggregator.buffer.slot(lease.slot)[:] = 1
    assert step(aggregator, [0], [1.0]).altered == (0,)


# ---- any size ----------------------------------------------------------------------------------


@given(
    size=st.sampled_from([1, 7, 4096, 4097]),
    weights=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6),
    base_scale=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_sum_of_any_size_is_the_oracles(
    size: int, weights: list[float], base_scale: float, seed: int
) -> None:
    buffer = ParameterBuffer.create(Shape(size, 2, len(weights)))
    draw = np.random.default_rng(seed)
    buffer.model(0)[:] = draw.normal(size=size)
    buffer.publish(version=0, entry=0)
    aggregator = Aggregator(buffer, ServerOptimizer(lr=0.7))
    oracle = Oracle(aggregator.optimizer, buffer.model(0))
    updates = draw.normal(size=(len(weights), size)).astype(np.float32)
    for task, update in enumerate(updates):
        deliver(aggregator, task, update)
    assert step(aggregator, range(len(weights)), weights, base_scale).bad == ()
    oracle.step(updates.astype(np.float64), weights, base_scale)
    np.testing.assert_allclose(buffer.model(1), oracle.w, rtol=1e-5, atol=2e-5)
    buffer.close()
