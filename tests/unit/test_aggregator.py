"""The aggregator: its sums, bad updates, and the contents of slots and ring entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_oracle_optimizer import reference_step

from edgefl import kernels
from edgefl.core.events import Sum
from edgefl.core.strategy_calls import combined
from edgefl.errors import RunError, SlotError
from edgefl.experiment import Privacy
from edgefl.kernels.steps import start
from edgefl.parameters.buffer import ParameterBuffer, Shape, SlotState
from edgefl.privacy.mechanism import Mechanism
from edgefl.privacy.source import Seeded
from edgefl.run.aggregator import Aggregator
from edgefl.strategies.base import ServerOptimizer, Update

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
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)

Make = Callable[..., Aggregator]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Aggregator] = []

    def one(
        optimizer: ServerOptimizer = SGD, ring: int = 3, slots: int = 8, statistics: int = 0, size: int = SIZE
    ) -> Aggregator:
        buffer = ParameterBuffer.create(Shape(size, ring, slots, optimizer.vectors, statistics=statistics))
        buffer.model(0)[:] = np.random.default_rng(1).normal(size=size)
        start(optimizer, buffer.vectors(0))
        buffer.publish(version=0, entry=0)
        made.append(Aggregator(buffer, optimizer, statistics=statistics))
        return made[-1]

    yield one
    for aggregator in made:
        aggregator.buffer.close()


def deliver(aggregator: Aggregator, task: int, update: npt.ArrayLike, client: int = 0) -> None:
    """Simulate a client's task: lease a slot, read the model, write the update and report its checksum."""
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


def numbers(buffer: ParameterBuffer, entry: int) -> list[bytes]:
    return [vector.tobytes() for vector in (buffer.model(entry), *buffer.vectors(entry))]


@each_optimizer
@pytest.mark.parametrize("base_scale", [1.0, 0.4, 0.0])
def test_ten_versions_match_the_optimisers_equations(make: Make, name: str, base_scale: float) -> None:
    optimizer = OPTIMIZERS[name]
    aggregator = make(optimizer)
    buffer, kept = aggregator.buffer, {}
    expected = buffer.model(0).astype(np.float64)
    draw, tasks = np.random.default_rng(7), itertools.count()
    for version in range(1, 11):
        updates = draw.normal(size=(draw.integers(1, 7), SIZE)).astype(np.float32)
        exact, weights = updates.astype(np.float64), draw.uniform(0.05, 1.0, len(updates))
        named = list(itertools.islice(tasks, len(updates)))
        for task, update in zip(named, updates, strict=True):
            deliver(aggregator, task, update)
        before = numbers(buffer, old := buffer.latest[1])
        result = step(aggregator, named, weights.tolist(), base_scale)
        expected = reference_step(optimizer, expected, (base_scale - 1.0) * expected + weights @ exact, kept)
        assert (result.bad, buffer.latest[0]) == ((), version)
        assert numbers(buffer, old) == before, "the previous version is unchanged"
        np.testing.assert_allclose(buffer.model(buffer.latest[1]), expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(result.norms, np.square(exact).sum(1), rtol=1e-12)
        assert result.checksums == tuple(kernels.checksum(update) for update in updates)
        for task in named:
            aggregator.release(task)


def test_an_update_is_measured_against_its_base_version(make: Make) -> None:
    aggregator = make(ring=4)
    aggregator.measures = True
    deliver(aggregator, 0, stale := np.linspace(-1.0, 2.0, SIZE, dtype=np.float32))
    lease, first = aggregator.leases[0], aggregator.buffer.model(0).astype(np.float64)
    assert aggregator.measure(lease) == (pytest.approx(np.linalg.norm(stale.astype(float)), rel=1e-12), 0.0)
    for task in range(1, 6):  # more versions than the ring holds
        deliver(aggregator, task, 0.1 * task)
        aggregator.delivered(aggregator.leases[task].slot)
        step(aggregator, [task], [1.0])
        aggregator.release(task)
    now = aggregator.buffer.model(aggregator.buffer.latest[1]).astype(np.float64)
    assert aggregator.buffer.entry_version[lease.entry] == 0
    assert aggregator.measure(lease)[1] == pytest.approx(np.linalg.norm(now - first), rel=1e-6)
    aggregator.delivered(lease.slot)
    for task in (6, 7, 8):
        deliver(aggregator, task, np.nan)
        assert aggregator.measure(aggregator.leases[task])[0] == np.inf
        aggregator.release(task)
        deliver(aggregator, task, 0.0)
        aggregator.delivered(aggregator.leases[task].slot)
        step(aggregator, [task], [1.0])
        aggregator.release(task)
    assert aggregator.buffer.entry_version[lease.entry] > 0, "nobody needs version 0 any more"


@pytest.mark.parametrize("server", ["calm", "killed", "resumed"])
def test_statistics_of_stale_updates_are_averaged_rather_than_their_changes(make: Make, server: str) -> None:
    """Mutant: a stale update's change is added to newer statistics, which can make a variance negative."""
    aggregator = make(statistics=2)
    buffer = aggregator.buffer
    buffer.model(0)[-2:] = 9.0
    deliver(aggregator, 0, np.full(SIZE, 1.0 - 9.0), client=3)  # the client's statistics are 1
    for task in range(1, 5):
        deliver(aggregator, task, 2.0 - buffer.model(buffer.latest[1]))  # statistics are 2 from now on
        step(aggregator, [task], [1.0])
        aggregator.release(task)
    assert buffer.model(buffer.latest[1])[-2:].tolist() == [2.0, 2.0]
    if server == "killed":
        aggregator = Aggregator(buffer, SGD, statistics=2)
        aggregator.take_over(
            [Update(0, 3, base_version=0, staleness=4, examples=9, steps=1, loss=0.0, at_s=1.0)]
        )
    if server == "resumed":
        update, statistics = buffer.raw(aggregator.leases[0].slot).copy(), np.full(2, 9.0, np.float32)
        aggregator.release(0)
        sent = {"task": 0, "client": 3, "version": 0, "update": update}
        aggregator.restore(**sent, statistics=statistics)
    deliver(aggregator, 9, 4.0 - buffer.model(buffer.latest[1]))  # statistics of this fresh update: 4
    assert not step(aggregator, [0, 9], [0.25, 0.5]).bad
    assert buffer.model(buffer.latest[1])[-2:].tolist() == [0.25 * 2.0 + 0.25 * 1.0 + 0.5 * 4.0] * 2


@pytest.mark.parametrize("size", [1, 7, SIZE, 4096, 4097])
def test_sums_have_the_bits_of_the_kernel(make: Make, size: int) -> None:
    aggregator, weights = make(size=size), [0.5, -0.25, 0.0]
    updates = np.random.default_rng(3).normal(size=(3, size)).astype(np.float32)
    for task, update in enumerate(updates):
        deliver(aggregator, task, update)
    expected = np.empty(size, np.float32)
    kernels.weighted_sum(expected, aggregator.buffer.model(0), list(updates), weights, backend="reference")
    step(aggregator, [0, 1, 2], weights)
    assert aggregator.buffer.model(aggregator.buffer.latest[1]).tobytes() == expected.tobytes()


def test_totals_count_updates_bytes_and_seconds(make: Make) -> None:
    aggregator = make(slots=8)
    for task in range(5):
        deliver(aggregator, task, np.ones(SIZE))
    first = step(aggregator, [0, 1, 2], [1.0, 1.0, 1.0])
    second = step(aggregator, [3, 4], [0.1, 0.1], 0.5)
    totals = aggregator.totals
    assert totals.updates == 5
    assert totals.bytes == ((3 + 2) + (2 + 2)) * SIZE * 4
    assert totals.seconds == first.seconds + second.seconds > 0


def assert_nothing_published(aggregator: Aggregator, before: list[bytes]) -> None:
    buffer = aggregator.buffer
    assert buffer.latest == (0, 0)
    assert numbers(buffer, 0) == before
    assert [version for version in buffer.entry_version.tolist() if version >= 0] == [0]
    for entry in range(1, buffer.shape.ring):
        with pytest.raises(SlotError):
            buffer.read_model(entry, 1, np.empty(SIZE, np.float32))
    assert (aggregator.totals.updates, aggregator.totals.bytes) == (0, 0)


@each_optimizer
@pytest.mark.parametrize(("poison", "base_scale"), [(math.nan, 1.0), (math.inf, 0.5), (-math.inf, 1.0)])
def test_updates_that_are_not_finite_are_named_and_no_version_is_published(
    make: Make, name: str, poison: float, base_scale: float
) -> None:
    aggregator = make(OPTIMIZERS[name])
    before = numbers(aggregator.buffer, 0)
    updates = np.ones((4, SIZE), np.float32)
    updates[1, 17] = updates[3, SIZE - 1] = poison
    for task, update in enumerate(updates, start=10):
        deliver(aggregator, task, update)
    result = step(aggregator, [10, 11, 12, 13], [0.25] * 4, base_scale)
    assert (result.bad, result.altered) == ((11, 13), ())
    assert_nothing_published(aggregator, before)
    again = step(aggregator, [10, 12], [0.25] * 2, base_scale)  # the good updates alone
    version, entry = aggregator.buffer.latest
    assert (again.bad, version) == ((), 1)
    assert np.isfinite(aggregator.buffer.model(entry)).all()


@each_optimizer
def test_finite_updates_that_make_the_model_overflow_are_bad(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name])
    before = numbers(aggregator.buffer, 0)
    for task, value in enumerate((1.0, 3e38, 3.3e38)):
        deliver(aggregator, task, np.full(SIZE, value))
    assert step(aggregator, [0, 1, 2], [1.0, 2.0, 3.0]).bad == (2,)
    assert_nothing_published(aggregator, before)
    assert step(aggregator, [0, 1], [1.0, 5.0]).bad == (1,)
    assert step(aggregator, [0], [1.0]).bad == ()


def test_a_combined_vector_that_is_not_finite_or_too_large_makes_no_version(make: Make) -> None:
    """``combine`` may return numbers larger than the updates'. Mutant: the next model is not finite."""
    aggregator = make(ServerOptimizer(lr=2.0))
    before = numbers(aggregator.buffer, 0)
    deliver(aggregator, 0, 1.0)
    for value in (math.nan, -math.inf):
        wrong: Any = SimpleNamespace(
            combine=lambda rows, given, value=value: np.full(SIZE, value, np.float32)
        )
        aggregator.combine = partial(combined, wrong)
        with pytest.raises(RunError, match=r"combine must return .*, got a vector with NaN or infinity"):
            step(aggregator, [0], [1.0])
        assert_nothing_published(aggregator, before)
    aggregator.combine = lambda rows, given: np.full(SIZE, 3e38, np.float32)
    assert step(aggregator, [0], [1.0]).bad == (0,)
    assert_nothing_published(aggregator, before)


def test_a_combined_vector_may_be_a_column(make: Make) -> None:
    aggregator = make()
    deliver(aggregator, 0, 1.0)
    aggregator.combine = lambda rows, given: np.ones((SIZE, 2), np.float32)[:, 0]
    assert not step(aggregator, [0], [1.0]).bad
    expected = aggregator.buffer.model(0) + np.float32(1.0)
    np.testing.assert_array_equal(aggregator.buffer.model(1), expected)


@each_optimizer
def test_an_altered_update_is_named_and_no_version_is_published(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name])
    before = numbers(aggregator.buffer, 0)
    for task in range(3):
        deliver(aggregator, task, np.full(SIZE, task + 1.0))
    slot = aggregator.buffer.slot(aggregator.leases[1].slot)
    sent = kernels.checksum(slot)
    slot.view(np.uint32)[5] ^= 1
    result = step(aggregator, [0, 1, 2], [1.0] * 3)
    assert (result.bad, result.altered) == ((1,), (1,))
    assert result.checksums[1] != sent
    assert len(result.checksums) == 3
    assert_nothing_published(aggregator, before)
    assert step(aggregator, [0, 2], [1.0] * 2).bad == ()
    never = aggregator.lease(task=3, client=0, version=1)  # its client never reports a checksum
    aggregator.buffer.slot(never.slot)[:] = 1
    assert step(aggregator, [3], [1.0]).altered == (3,)


@each_optimizer
def test_a_late_reader_notices_that_a_failed_sum_overwrote_its_entry(make: Make, name: str) -> None:
    aggregator = make(OPTIMIZERS[name], ring=2)
    deliver(aggregator, 0, np.ones(SIZE))
    assert step(aggregator, [0], [1.0]).bad == ()
    deliver(aggregator, 1, np.full(SIZE, math.nan))
    assert aggregator.free_entry() == 0  # version 0, which has no known reader
    assert step(aggregator, [1], [1.0]).bad == (1,)
    assert aggregator.buffer.entry_version.tolist() == [-1, 1]
    with pytest.raises(SlotError, match="ring entry 0 holds version -1, not 0"):
        aggregator.buffer.read_model(0, 0, np.empty(SIZE, np.float32))
    assert aggregator.buffer.latest == (1, 1)


def test_only_the_latest_version_is_leased(make: Make) -> None:
    aggregator = make()
    with pytest.raises(SlotError, match="task 5 needs version 1, but the latest is 0"):
        aggregator.lease(task=5, client=0, version=1)
    assert aggregator.leases == {}
    lease = aggregator.lease(task=5, client=3, version=0)
    buffer = aggregator.buffer
    assert (lease.entry, lease.client, lease.version) == (0, 3, 0)
    assert int(buffer.task[lease.slot]) == 5
    assert buffer.state[lease.slot] == SlotState.LEASED


def test_a_restored_update_is_summed_like_any_other(make: Make) -> None:
    aggregator = make(slots=1)
    update = np.arange(SIZE + 1, dtype=np.float32)
    first = aggregator.buffer.model(0).astype(np.float64)
    for size in (1, SIZE - 1, SIZE + 1):
        with pytest.raises(SlotError, match=r"task 70's update of .* does not fit"):
            aggregator.restore(task=70, client=3, version=0, update=update[:size].view(np.uint8))
    aggregator.restore(task=70, client=3, version=0, update=update[:SIZE].view(np.uint8))
    with pytest.raises(SlotError, match=r"task 71's update of .* does not fit"):
        aggregator.restore(task=71, client=3, version=0, update=update[:SIZE].view(np.uint8))
    assert aggregator.leases[70].version == 0
    assert aggregator.sum(Sum(1, (70,), (2.0,)), 1).bad == ()
    np.testing.assert_allclose(aggregator.buffer.model(1), first + 2.0 * update[:SIZE], rtol=1e-6)
    assert aggregator.free_entry() is not None
    aggregator.release(70)
    assert aggregator.lease(task=71, client=3, version=1)


@pytest.mark.parametrize("end", ["delivered", "release"])
def test_a_lent_entry_is_kept_until_its_borrowers_updates_are_complete(make: Make, end: str) -> None:
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
    aggregator.delivered(slots[0])  # a second time has no effect
    assert aggregator.free_entry() == 0


def test_the_last_committed_version_is_kept_until_the_next_commit(make: Make) -> None:
    """After a crash, the record ends with the last commit, so the resumed run starts from this version."""
    aggregator = make(ring=3)
    aggregator.recoverable = True
    aggregator.settle()
    for version, entry in ((1, 1), (2, 2), (3, 1)):
        assert aggregator.free_entry() == entry
        aggregator.buffer.publish(version=version, entry=entry)
    aggregator.settle()
    assert aggregator.free_entry() == 0


def test_five_ring_entries_are_never_lent(make: Make) -> None:
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


@pytest.mark.parametrize(("ring", "lends"), [(5, True), (6, False)])
def test_only_a_large_ring_lends_entries_and_only_on_request(make: Make, ring: int, lends: bool) -> None:
    aggregator = make(ring=ring)
    aggregator.lends = lends
    assert not aggregator.buffer.lent[aggregator.lease(task=0, client=0, version=0).slot]


def test_a_lack_of_free_slots_is_an_error_until_one_is_released(make: Make) -> None:
    aggregator = make(slots=3)
    slots = [aggregator.lease(task=task, client=task, version=0).slot for task in range(3)]
    with pytest.raises(SlotError, match="no update slot is free for task 9; all 3 are taken"):
        aggregator.lease(task=9, client=9, version=0)
    aggregator.release(1)
    assert aggregator.lease(task=9, client=9, version=0).slot == slots[1]
    aggregator.release(1)  # released already: no effect
    assert aggregator.buffer.task[slots[1]] == 9
    with pytest.raises(SlotError, match="no update slot is free"):
        aggregator.lease(task=10, client=9, version=0)


class RingMachine(RuleBasedStateMachine):
    """Makes leases, reads, pins, steps and releases in any order; lists the versions that are being read."""

    def __init__(self) -> None:
        super().__init__()
        buffer = ParameterBuffer.create(Shape(size=2, ring=4, slots=5))
        buffer.publish(version=0, entry=0)
        self.aggregator = Aggregator(buffer, SGD)
        self.next_task = 0
        self.reading: dict[int, tuple[int, int]] = {}  # by task: entry and the version in it
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
        slot = self.aggregator.leases[task].slot
        if data.draw(st.booleans()):
            self.aggregator.fetched(slot)  # the model was sent
        else:
            self.aggregator.buffer.fetched[slot] = 1  # the client has read it

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
    def each_task_has_its_own_slot(self) -> None:
        leases = self.aggregator.leases
        assert set(leases) == self.tasks
        assert len({lease.slot for lease in leases.values()}) == len(leases)
        states = self.aggregator.buffer.state.tolist()
        assert len(states) - states.count(SlotState.FREE) == len(leases)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_negative_weight_is_no_share_of_the_statistics(make: Make) -> None:
    """CA2FL, for example, subtracts older updates. Mutant: the weighted sum of the variances is negative."""
    aggregator = make(statistics=2)
    buffer = aggregator.buffer
    buffer.model(0)[-2:] = 1.0
    variances = (0.2, 0.3, 9.0)
    for task, variance in enumerate(variances):
        deliver(aggregator, task, variance - 1.0, client=task)
    weights = (0.5, 0.5, -0.25)
    assert not step(aggregator, [0, 1, 2], weights).bad
    assert np.allclose(buffer.model(buffer.latest[1])[-2:], 0.25)
    made = buffer.model(buffer.latest[1])[:-2] - buffer.model(0)[:-2]
    assert np.allclose(made, sum(w * (v - 1.0) for w, v in zip(weights, variances, strict=True)))


@pytest.mark.parametrize("weights", [(0.25, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("how", ["plain", "private", "chosen", "vector"])
def test_statistics_have_the_weights_of_the_step(make: Make, how: str, weights: tuple[float, float]) -> None:
    """Weights whose total is above 1 are scaled to a total of 1, except in a private step: there, the number
    of updates may be secret."""
    aggregator = make()
    aggregator.statistics, clip_norm = 2, None
    if how == "private":
        clip_norm = 1e6
        aggregator.privacy = Mechanism(Privacy(clip_norm=clip_norm), 1.0, Seeded(1))
    if how == "chosen":
        aggregator.combine = lambda rows, given: [2.0 * weight for weight in given]
    if how == "vector":
        aggregator.combine = lambda rows, given: rows.median()
    before = aggregator.buffer.model(0)[-2:].astype(float)
    for task in range(2):
        deliver(aggregator, task, np.full(SIZE, 1.0 + task))
    assert not aggregator.sum(Sum(1, (0, 1), weights, clip_norm=clip_norm), 1).bad
    first, second = [2.0 * weight for weight in weights] if how == "chosen" else weights
    if how == "vector":
        first = second = 0.5
    total = 1.0 if how == "private" else max(1.0, first + second)
    after = aggregator.buffer.model(1)[-2:]
    assert np.allclose(after, before + (first + 2.0 * second) / total)
