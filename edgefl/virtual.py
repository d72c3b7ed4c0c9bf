"""The virtual clock: the same core, messages and training, in the order of emulated time.

Nothing waits for a phone. Each trip's length comes from its device's profile and seeded stream the moment it
starts; events are taken from an agenda in order of their time (ties by client), and an update is waited for
only when its arrival is due. Training runs ahead in worker processes at the host's full speed. So the run's
bits depend on the seed alone: not on how many workers there are, how fast they are, or which of them die.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

from edgefl import control, wire
from edgefl.buffer import SlotState
from edgefl.clock import WallClock
from edgefl.emulation.plan import TripPlan
from edgefl.errors import RunError
from edgefl.events import Failed, Joined, Left, Ticked
from edgefl.outbox import SocketOutbox
from edgefl.peers import Peer
from edgefl.server import Server
from edgefl.workload_devices import joins_at_s

TASKS_AHEAD = 2
"""Tasks that a worker holds: one it computes and one so that it never waits for the next."""


MOST_TURNS = 1000
"""Times that a phone comes and goes, on average, without any of them being given a task, before the run is
given up."""


class VirtualClock(WallClock):
    """Emulated time is what the agenda says; wall time goes on as it does."""

    def __init__(self, *, emulated_s: float, wall_s: float) -> None:
        super().__init__(1.0, emulated_s=emulated_s, wall_s=wall_s)
        self._now_s = emulated_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, at_s: float) -> None:
        """It is ``at_s`` now, unless it is later already."""
        self._now_s = max(self._now_s, at_s)


class Due(NamedTuple):
    """An entry of the agenda; entries of one instant come in the order of these fields."""

    at_s: float
    kind: int
    client: int
    task: int


TICK, JOIN, ARRIVAL, LEAVE = 0, 1, 2, 3


class VirtualServer(Server):
    """A server whose events come from an agenda and whose tasks go to any worker."""

    _clock: VirtualClock

    def _make_clock(self, emulated_s: float, wall_s: float) -> VirtualClock:
        return VirtualClock(emulated_s=emulated_s, wall_s=wall_s)

    def _make_outbox(self) -> SocketOutbox:
        self._agenda: list[Due] = []
        self._due_s: dict[int, float] = {}
        self._queue: deque[wire.Task] = deque()
        self._sent: dict[int, tuple[int, wire.Task]] = {}  # task → worker that computes it
        self._results: dict[int, wire.Done | wire.Gone | str] = {}
        """What came of tasks; of those that no worker computed, why nothing does."""
        self._cancelled: set[int] = set()
        self._doomed: set[int] = set()
        """Tasks whose phones go before they could deliver: nobody needs to compute them."""
        self._turns = 0
        """Phones that came or went since a task was given out."""
        self._assessments.keep_all = True
        outbox = super()._make_outbox()
        outbox.train = self._train  # type: ignore[method-assign]
        outbox.cancel = self._cancel  # type: ignore[method-assign]
        outbox.wake = lambda at_s: self._enter(Due(at_s, TICK, -1, -1))
        return outbox

    # ---- the fleet -----------------------------------------------------------------------------

    def _expect_fleet(self) -> None:
        for worker in range(self._plan.workers):
            self._peers.expect(control.WORKER, worker)
        self._peers.expect(control.EVALUATOR, 0)

    def _join_fleet(self) -> None:
        for info in self._plan.clients:
            if self._dynamics is None or info.client not in self._dynamics:
                at_s = max(self._clock.now_s(), joins_at_s(self._experiment, info.client))
                self._enter(Due(at_s, JOIN, info.client, -1))
        self._follow()

    def _welcome(self, peer: Peer) -> None:
        self._dispatch()

    def holds(self, peer: Peer, client: int, task: int) -> bool:
        return task in self._sent and self._sent[task][0] == peer.number

    def _given_up(self, peer: Peer) -> None:
        super()._given_up(peer)
        if peer.role == control.WORKER:
            raise RunError(f"worker {peer.number} died too often; see the incidents in {self._folder}")

    def _departed(self, message: control.Departed) -> None:
        if message.role == control.WORKER and self._stopped is None:
            orphans = [task for worker, task in self._sent.values() if worker == message.peer]
            for task in sorted(orphans, key=lambda task: task.task, reverse=True):
                del self._sent[task.task]
                self._buffer.state[task.slot] = SlotState.LEASED  # nobody writes to it now
                self._queue.appendleft(task)
        super()._departed(message)

    # ---- tasks ---------------------------------------------------------------------------------

    def _train(self, task: wire.Task) -> None:
        self._turns = 0
        plan = self._plan_of(task)
        at_s = self._clock.now_s() + min(plan.total_s, plan.breaks_s)
        if self._dynamics is not None and self._dynamics.lost_at_s(task.client) < at_s:
            self._doomed.add(task.task)
            return
        self._enter(Due(at_s, ARRIVAL, task.client, task.task))
        if plan.breaks_s < math.inf:
            self._results[task.task] = plan.broken
        else:
            self._queue.append(task)
            self._dispatch()

    def _plan_of(self, task: wire.Task) -> TripPlan:
        """This trip, drawn as the client itself would draw it."""
        plan = self._dynamics.plan(task.client) if self._dynamics is not None else None
        if plan is not None:
            return plan
        budget_s = None if task.cut is None else task.cut.budget_s
        return self._trips.plan(task.client, task.trip, budget_s)

    def _dispatch(self) -> None:
        """Give waiting tasks, oldest first, to the workers that have least to do."""
        before = self._watch.to("send")
        loads = {
            peer.number: 0 for peer in self._peers.of(control.WORKER) if peer.ready and not peer.expelled
        }
        for worker, _ in self._sent.values():
            if worker in loads:
                loads[worker] += 1
        while self._queue and loads:
            worker = min(loads, key=lambda number: (loads[number], number))
            peer = self._peers.get(control.WORKER, worker)
            if loads[worker] >= TASKS_AHEAD or peer is None:
                break
            task = self._queue.popleft()
            loads[worker] += 1
            self._sent[task.task] = (worker, task)
            self._outbox.send(peer, task, self._transport.model_frames(task.entry))
        self._watch.to(before)

    def _cancel(self, client: int, task: int) -> None:
        """The trip ends now. One that no worker has begun is never computed."""
        self._cancelled.add(task)
        waiting = next((item for item in self._queue if item.task == task), None)
        if waiting is not None:
            self._queue.remove(waiting)
        if waiting is not None or task in self._doomed:
            self._doomed.discard(task)
            self._results[task] = "cancelled"
        self._enter(Due(self._clock.now_s(), ARRIVAL, client, task))

    def finished(self, done: wire.Done | wire.Gone) -> None:
        _, task = self._sent.pop(done.task)
        self._aggregator.fetched(task.slot)
        self._results[done.task] = done
        self._dispatch()

    # ---- the agenda ----------------------------------------------------------------------------

    def _enter(self, due: Due) -> None:
        if due.kind == ARRIVAL:
            self._due_s[due.task] = due.at_s
        heapq.heappush(self._agenda, due)

    def _advance(self) -> None:
        """Take events in the order of their time, as far as what they need has been computed."""
        while self._agenda and self._started and self._stopped is None:
            if self._executor.deferred is not None:
                return
            if self._experiment.stop.accuracy is not None and self._assessments.waiting:
                return  # the answer may end the run here, whenever it comes
            due = self._agenda[0]
            if due.kind == ARRIVAL:
                if self._due_s.get(due.task) != due.at_s:  # cancelled: it has an earlier entry
                    heapq.heappop(self._agenda)
                    continue
                if due.task not in self._results:
                    return
            elif due.kind != TICK and not self._turns_up(due):
                heapq.heappop(self._agenda)
                continue
            heapq.heappop(self._agenda)
            self._clock.advance(due.at_s)
            if due.kind == TICK:
                self._executor.handle(Ticked(due.at_s))
            elif due.kind == JOIN:
                self._executor.handle(Joined(due.client, due.at_s))
            elif due.kind == LEAVE:
                self._leave(due)
            else:
                self._arrive(due)
            self._follow()

    def _follow(self) -> None:
        """Enter whatever the phones will do next by themselves."""
        if self._dynamics is not None:
            for client in self._dynamics.moved():
                at_s, why = self._dynamics.move(client)
                if at_s < math.inf:
                    kind = JOIN if why == "back" else LEAVE
                    self._enter(Due(max(at_s, self._clock.now_s()), kind, client, -1))

    def _turns_up(self, due: Due) -> bool:
        """Whether a phone still comes or goes as entered; RunError where that is all that ever happens."""
        if self._dynamics is None or due.client not in self._dynamics:
            return True
        move = self._dynamics.move(due.client)
        if move.comes != (due.kind == JOIN) or max(move.at_s, self._clock.now_s()) != due.at_s:
            return False
        self._turns += 1
        if self._turns > MOST_TURNS * len(self._plan.clients) and not self._core.training:
            raise RunError(
                f"no client is training and none will: phones came and went {self._turns} times meanwhile, "
                f"{len(self._core.held)} updates wait in the buffer"
            )
        return True

    def _leave(self, due: Due) -> None:
        """A phone goes offline, with its task or after it."""
        assert self._dynamics is not None
        client, why = due.client, self._dynamics.move(due.client).why
        if why != "offline":
            self.note(client, "death" if why == "died" else why, "as declared")
        task = self._core.task_of(client)
        finishes = task is not None and self._dynamics.finishes(client)
        if task is not None and not finishes:
            self._doomed.remove(task)
        self._executor.handle(Left(client, due.at_s, why, finishes=finishes))

    def _arrive(self, due: Due) -> None:
        result = self._results.pop(due.task)
        del self._due_s[due.task]
        if due.task in self._cancelled:
            self._cancelled.remove(due.task)
            self._executor.handle(Failed(due.client, due.task, due.at_s, "cancelled"))
        elif isinstance(result, str):
            self.note(due.client, "failed", result)
            self._executor.handle(Failed(due.client, due.task, due.at_s, result))
        elif isinstance(result, wire.Gone):
            self._executor.handle(Failed(due.client, due.task, due.at_s, result.reason))
        else:
            self._executor.arrived(result, self._aggregator.leases[due.task], due.at_s)
            self._gauge.trip(result)
