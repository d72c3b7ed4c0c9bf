"""The aggregator: sums against a float64 oracle, bad updates, and what its slots and ring entries hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgefl import kernels
from edgefl.core.events import Sum
from edgefl.errors import SlotError
from edgefl.kernels.steps import start
from edgefl.parameters.buffer import ParameterBuffer, Shape, SlotState
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
@pytest.mark.parametrize(("poison", "base_scale"), [(math.nan, 1.0), (math.inf, 0.5), (-math.inf, 1.0)])
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


def test_a_lease_is_of_the_latest_version_only(make: Make) -> None:
    aggregator = make()
    with pytest.raises(SlotError, match="task 5 wants version 1, the latest is 0"):
        aggregator.lease(task=5, client=0, version=1)
    assert aggregator.leases == {}
    lease = aggregator.lease(task=5, client=3, version=0)
    buffer = aggregator.buffer
    assert (lease.entry, lease.client, lease.version) == (0, 3, 0)
    assert (int(buffer.task[lease.slot]), int(buffer.client[lease.slot])) == (5, 3)
    assert buffer.state[lease.slot] == SlotState.LEASED


def test_slots_run_out_with_a_clear_error_and_come_back(make: Make) -> None:
    aggregator = make(slots=3)
    taken = {aggregator.lease(task=task, client=task, version=0).slot for task in range(3)}
    assert taken == {0, 1, 2}
    with pytest.raises(SlotError, match="no update slot is free for task 9; all 3 are taken"):
        aggregator.lease(task=9, client=9, version=0)
    freed = aggregator.leases[1].slot
    aggregator.release(1)
    assert aggregator.buffer.state[freed] == SlotState.FREE
    assert aggregator.lease(task=9, client=9, version=0).slot == freed
    aggregator.release(1)  # long gone: nothing happens
    assert aggregator.buffer.task[freed] == 9
    with pytest.raises(SlotError, match="no update slot is free"):
        aggregator.lease(task=10, client=9, version=0)


def test_a_restored_update_is_one_like_the_others(make: Make) -> None:
    aggregator = make(slots=2)
    update = np.arange(SIZE, dtype=np.float32)
    first = aggregator.buffer.model(0).astype(np.float64)
    aggregator.restore(task=70, client=3, version=0, update=update.view(np.uint8))
    assert aggregator.leases[70].version == 0
    assert aggregator.sum(Sum(1, (70,), (2.0,)), 1).bad == ()
    np.testing.assert_allclose(aggregator.buffer.model(1), first + 2.0 * update, rtol=1e-6)
    assert aggregator.free_entry() is not None
    aggregator.release(70)
    assert aggregator.lease(task=71, client=3, version=1)


def test_an_update_that_does_not_fit_is_not_restored(make: Make) -> None:
    aggregator = make(slots=1)
    for size in (1, SIZE - 1, SIZE + 1):
        with pytest.raises(SlotError, match=r"task 70's update of .* does not fit"):
            aggregator.restore(task=70, client=3, version=0, update=np.ones(size, np.float32).view(np.uint8))
    aggregator.restore(task=70, client=3, version=0, update=np.ones(SIZE, np.float32).view(np.uint8))
    with pytest.raises(SlotError, match=r"task 71's update of .* does not fit"):
        aggregator.restore(task=71, client=3, version=0, update=np.ones(SIZE, np.float32).view(np.uint8))


def test_an_entry_is_not_overwritten_before_every_reader_has_read_it(make: Make) -> None:
    aggregator = make(ring=3)
    for task in (0, 1):
        aggregator.lease(task=task, client=task, version=0)
    slots = [aggregator.leases[task].slot for task in (0, 1)]
    entry = aggregator.free_entry()
    assert entry is not None
    aggregator.buffer.publish(version=1, entry=entry)
    other = aggregator.free_entry()
    assert {0, entry, other} == {0, 1, 2}
    aggregator.pin(other or 0)
    assert aggregator.free_entry() is None
    aggregator.buffer.fetched[slots[0]] = 1
    assert aggregator.free_entry() is None  # task 1 has not read it
    aggregator.buffer.fetched[slots[1]] = 1
    assert aggregator.free_entry() == 0


@pytest.mark.parametrize("how", ["fetched", "released"])
def test_a_model_that_was_sent_or_is_no_longer_wanted_frees_its_entry(make: Make, how: str) -> None:
    aggregator = make(ring=2)
    lease = aggregator.lease(task=0, client=0, version=0)
    aggregator.buffer.publish(version=1, entry=1)
    assert aggregator.free_entry() is None
    if how == "fetched":
        aggregator.fetched(lease.slot)
    else:
        aggregator.release(0)
    assert aggregator.free_entry() == 0


@pytest.mark.parametrize("end", ["delivered", "release"])
def test_a_lent_entry_stays_until_its_borrowers_updates_are_whole(make: Make, end: str) -> None:
    aggregator = make(ring=6)
    aggregator.lends = True
    buffer = aggregator.buffer
    slots = [aggregator.lease(task=task, client=task, version=0).slot for task in (0, 1)]
    assert [int(buffer.lent[slot]) for slot in slots] == [1, 1]
    for slot in slots:
        buffer.fetched[slot] = 1
    for version in range(1, 20):
        entry = aggregator.free_entry()
        assert entry not in (None, 0)
        buffer.publish(version=version, entry=entry or 0)
    for task, slot in enumerate(slots):
        assert aggregator.free_entry() != 0
        getattr(aggregator, end)(slot if end == "delivered" else task)
    assert aggregator.free_entry() == 0
    aggregator.delivered(slots[0])  # once more is nothing
    assert aggregator.free_entry() == 0


def test_only_so_many_entries_are_lent_that_the_run_never_waits_for_one(make: Make) -> None:
    aggregator = make(ring=7, slots=40)
    aggregator.lends = True
    buffer, lent = aggregator.buffer, []
    for version in range(10):
        for client in (0, 1):
            slot = aggregator.lease(task=2 * version + client, client=client, version=version).slot
            lent.append(int(buffer.lent[slot]))
            buffer.fetched[slot] = 1
        entry = aggregator.free_entry()
        assert entry is not None
        buffer.publish(version=version + 1, entry=entry)
    assert lent == [1] * 4 + [0] * 16  # seven entries less the five that a run needs


def test_a_small_ring_lends_nothing(make: Make) -> None:
    aggregator = make(ring=5)
    aggregator.lends = True
    assert not aggregator.buffer.lent[aggregator.lease(task=0, client=0, version=0).slot]
    aggregator = make(ring=6)
    assert not aggregator.buffer.lent[aggregator.lease(task=0, client=0, version=0).slot]


def test_pins_count(make: Make) -> None:
    aggregator = make(ring=2)
    aggregator.pin(1)
    aggregator.pin(1)
    aggregator.unpin(1)
    assert aggregator.free_entry() is None
    aggregator.unpin(1)
    assert aggregator.free_entry() == 1


class RingMachine(RuleBasedStateMachine):
    """Any interleaving of leases, reads, pins, steps and releases, against a list of who still reads what."""

    def __init__(self) -> None:
        super().__init__()
        buffer = ParameterBuffer.create(Shape(size=2, ring=4, slots=5))
        buffer.publish(version=0, entry=0)
        self.aggregator = Aggregator(buffer, SGD)
        self.next_task = 0
        self.reading: dict[int, tuple[int, int]] = {}  # task → entry and the version it must find there
        self.pinned: list[tuple[int, int]] = []
        self.tasks: set[int] = set()

    def teardown(self) -> None:
        self.aggregator.buffer.close()

    @precondition(lambda self: len(self.tasks) < 5)
    @rule()
    def lease(self) -> None:
        version, entry = self.aggregator.buffer.latest
        self.aggregator.lease(task=self.next_task, client=0, version=version)
        self.reading[self.next_task] = entry, version
        self.tasks.add(self.next_task)
        self.next_task += 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.reading)))
        del self.reading[task]
        self.aggregator.buffer.fetched[self.aggregator.leases[task].slot] = 1

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks)))
        self.tasks.remove(task)
        self.reading.pop(task, None)
        self.aggregator.release(task)

    @rule()
    def pin(self) -> None:
        version, entry = self.aggregator.buffer.latest
        self.aggregator.pin(entry)
        self.pinned.append((entry, version))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.aggregator.unpin(self.pinned.pop(0)[0])

    @rule()
    def make_a_version(self) -> None:
        buffer = self.aggregator.buffer
        version, latest = buffer.latest
        read = {entry for entry, _ in (*self.reading.values(), *self.pinned)} | {latest}
        entry = self.aggregator.free_entry()
        assert (entry is None) == (len(read) == 4)
        if entry is not None:
            assert entry not in read
            buffer.retire(entry)
            buffer.publish(version + 1, entry)

    @invariant()
    def readers_find_their_version(self) -> None:
        for entry, version in (*self.reading.values(), *self.pinned):
            assert self.aggregator.buffer.entry_version[entry] == version

    @invariant()
    def slots_are_their_tasks_alone(self) -> None:
        leases = self.aggregator.leases
        assert set(leases) == self.tasks
        assert len({lease.slot for lease in leases.values()}) == len(leases)
        states = self.aggregator.buffer.state.tolist()
        assert len(states) - states.count(SlotState.FREE) == len(leases)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40)
