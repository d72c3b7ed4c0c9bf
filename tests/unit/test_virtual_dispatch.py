"""Which worker computes what, and in which order, whatever happens to the workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgefl.errors import RunError
from edgefl.run import messages
from edgefl.run.dispatch import AHEAD_S, FEWEST, MOST, MOST_LOSSES, Dispatch


class Workers:
    """Takes down what each worker was given; those in ``gone`` take nothing."""

    def __init__(self) -> None:
        self.given: dict[int, list[int]] = {}
        self.gone: set[int] = set()
        self.dispatch = Dispatch(self.give)

    def give(self, worker: int, tasks: Sequence[messages.Task]) -> bool:
        if worker in self.gone:
            return False
        self.given.setdefault(worker, []).extend(task.task for task in tasks)
        return True

    def add(self, task: int, due_s: float) -> None:
        self.dispatch.add(messages.Task(task, task, 0, 0, 0, task, None, None), due_s)

    def finish(self, task: int, cpu_s: float = 1.0) -> None:
        self.dispatch.finished(messages.TaskResult(task, 0, 1, 0.5, 1, cpu_s, 9.0))


@pytest.fixture
def workers() -> Workers:
    return Workers()


def test_what_is_due_first_is_computed_first(workers: Workers) -> None:
    for task, due_s in enumerate([5.0, 1.0, 3.0, 1.0]):
        workers.add(task, due_s)
    for expected in (1, 3, 2, 0):
        workers.dispatch.fill([0])
        assert workers.given[0][-1] == expected or workers.given[0][-2] == expected
        workers.finish(workers.given[0][len(workers.dispatch.results)])
    assert workers.given == {0: [1, 3, 2, 0]}


def test_while_a_sum_waits_for_room_the_oldest_come_first(workers: Workers) -> None:
    for task, due_s in enumerate([9.0, 8.0, 1.0, 2.0]):
        workers.add(task, due_s)
    workers.dispatch.oldest_first = True
    workers.dispatch.fill([0])
    workers.dispatch.oldest_first = False
    workers.dispatch.fill([0, 1])
    assert workers.given == {0: [0, 1], 1: [2, 3]}


def test_tasks_that_take_long_are_shared_out_by_two(workers: Workers) -> None:
    for task in range(20):
        workers.add(task, float(task))
    workers.dispatch.fill([0, 1, 2])
    assert workers.given == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    workers.dispatch.fill([0, 1, 2])
    assert sum(map(len, workers.given.values())) == 6
    workers.finish(3)
    workers.dispatch.fill([0, 1, 2])
    assert workers.given[1] == [2, 3, 6]


def test_tasks_that_take_no_time_are_given_many_at_once(workers: Workers) -> None:
    for task in range(150):
        workers.add(task, float(task))
        workers.dispatch.fill([0])
        workers.finish(task, AHEAD_S / 1000)
    for task in range(150, 300):
        workers.add(task, float(task))
    workers.dispatch.fill([0])
    assert len(workers.given[0]) == 150 + MOST
    workers.finish(150)
    workers.dispatch.fill([0])  # the hand is more than half full still
    assert len(workers.given[0]) == 150 + MOST


def test_few_tasks_are_shared_by_all(workers: Workers) -> None:
    for task in range(100):  # they take no time, so each worker would take many
        workers.add(task, float(task))
        workers.dispatch.fill([0])
        workers.finish(task, 0.0)
    workers.given.clear()
    for task in range(100, 110):
        workers.add(task, float(task))
    workers.dispatch.fill([0, 1])
    assert {worker: len(tasks) for worker, tasks in workers.given.items()} == {0: 5, 1: 5}


def test_a_dead_worker_s_tasks_go_to_another(workers: Workers) -> None:
    for task in range(6):
        workers.add(task, float(task))
    workers.dispatch.fill([0, 1])
    assert [task.task for task in workers.dispatch.worker_gone(0)] == [0, 1]
    workers.finish(2)
    workers.dispatch.fill([1])
    assert workers.given[1][FEWEST:] == [0]
    assert workers.dispatch.held_by(0) == 1
    assert workers.dispatch.held_by(1) is None


def test_who_takes_nothing_leaves_it_to_others(workers: Workers) -> None:
    workers.gone = {0}
    workers.add(0, 1.0)
    workers.dispatch.fill([0])
    assert workers.dispatch.held_by(0) is None
    workers.dispatch.fill([1])
    assert workers.dispatch.held_by(0) == 1


def test_a_task_that_waits_can_be_taken_back_one_in_hand_cannot(workers: Workers) -> None:
    for task in range(4):
        workers.add(task, float(task))
    workers.dispatch.fill([0])
    assert [workers.dispatch.take_back(task) for task in (0, 1, 2, 3, 2)] == [False, False, True, True, False]
    workers.finish(0)
    workers.finish(1)
    workers.dispatch.fill([0])
    assert workers.given == {0: [0, 1]}


def test_a_task_that_kills_its_workers_ends_the_run(workers: Workers) -> None:
    workers.add(3, 1.0)
    for loss in range(MOST_LOSSES):
        workers.dispatch.fill([0])
        if loss < MOST_LOSSES - 1:
            workers.dispatch.worker_gone(0)
    with pytest.raises(RunError, match="8 workers died with client 3's trip 0 in hand"):
        workers.dispatch.worker_gone(0)


def test_neither_queue_grows_for_ever(workers: Workers) -> None:
    for task in range(20_000):
        workers.dispatch.oldest_first = task % 3 == 0
        workers.add(task, 1e6 - task)
        workers.dispatch.fill([0])
        for number in list(workers.dispatch._at_work):
            workers.finish(number, 0.0)
            workers.dispatch.results.clear()
    assert len(workers.dispatch._by_age) < 1100
    assert len(workers.dispatch._by_due) < 1100
