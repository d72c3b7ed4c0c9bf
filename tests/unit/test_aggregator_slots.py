"""Slots and ring entries: never handed out twice, never overwritten before the last reader has read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgefl.core.events import Sum
from edgefl.errors import SlotError
from edgefl.parameters.buffer import ParameterBuffer, Shape, SlotState
from edgefl.run.slots import Aggregator
from edgefl.strategies.base import ServerOptimizer

SIZE = 300
SGD = ServerOptimizer()

Make = Callable[..., Aggregator]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Aggregator] = []

    def one(ring: int = 3, slots: int = 8) -> Aggregator:
        buffer = ParameterBuffer.create(Shape(SIZE, ring, slots))
        buffer.model(0)[:] = np.random.default_rng(1).normal(size=SIZE)
        buffer.publish(version=0, entry=0)
        made.append(Aggregator(buffer, SGD))
        return made[-1]

    yield one
    for aggregator in made:
        aggregator.buffer.close()


# ---- leases ------------------------------------------------------------------------------------


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


# ---- the ring ----------------------------------------------------------------------------------


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
