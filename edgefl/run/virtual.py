"""The server under the virtual clock: its events come from an agenda, its tasks go to any worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from edgefl import failpoints
from edgefl.core.events import Failed, Joined, Left, Ticked, Train
from edgefl.devices.dynamics import Dynamics
from edgefl.devices.fleet import joins_at_s
from edgefl.devices.plan import TripPlan
from edgefl.errors import ConfigError, RunError, WireError
from edgefl.parameters.buffer import ParameterBuffer, SlotState
from edgefl.run import control, messages, resume
from edgefl.run.agenda import ARRIVAL, CELL, JOIN, LEAVE, TICK, Agenda, Due, VirtualClock
from edgefl.run.channel import Channel
from edgefl.run.connection import Frame
from edgefl.run.dispatch import Dispatch, Trip
from edgefl.run.outbox import SocketOutbox
from edgefl.run.peers import Peer
from edgefl.run.server import Server
from edgefl.run.slots import Lease
from edgefl.run.virtual_outbox import VirtualOutbox

EVENTS_AT_ONCE = 128
"""Events between two looks at the socket."""
MOST_TURNS = 1000
"""Times that a phone comes and goes, on average, without any of them being given a task, or arrives at one
instant of a run that only emulated time or an accuracy ends, before the run is given up."""


class VirtualServer(Server):
    """Takes events in the order of emulated time, as soon as what they need has been computed."""

    _clock: VirtualClock

    def __init__(
        self, channel: Channel[control.ToServer], plan: control.Serve, buffer: ParameterBuffer
    ) -> None:
        self._agenda = Agenda()
        self._dispatch = Dispatch(self._give)
        self._under_way: dict[int, Trip] = {}
        self._cancelled: set[int] = set()
        self._doomed: set[int] = set()
        """Tasks whose phones go before they could deliver: nobody needs to compute them."""
        self._broken: dict[int, str] = {}
        """Tasks whose link is lost on the way, and how: nobody needs to compute them either."""
        self._left_with: dict[int, Left] = {}
        """Tasks that end because their phones went, which was not known when they began."""
        self._cell_due_s = math.inf
        self._turns = 0
        self._instant: tuple[float, int] = (-math.inf, 0)
        """The emulated second of the last arrival, and how many there were at it."""
        """Phones that came or went since a task was given out."""
        self._withdrawn: dict[int, list[int]] = {}  # worker → tasks that it must give up
        super().__init__(channel, plan, buffer)
        self._assessments.keep_all = True
        self._reception.handle(messages.Trained, self._trained)

    def _make_clock(self, emulated_s: float, wall_s: float) -> VirtualClock:
        return VirtualClock(emulated_s=emulated_s, wall_s=wall_s)

    def _make_outbox(self) -> SocketOutbox:
        return self._connected(partial(VirtualOutbox, begin=self._begin, end=self._end))

    def _wake(self, at_s: float) -> None:
        self._agenda.enter(Due(at_s, TICK))

    # ---- the fleet and the workers -------------------------------------------------------------

    def _expect_fleet(self) -> None:
        for worker in range(self._plan.workers):
            self._peers.expect(control.WORKER, worker)
        self._peers.expect(control.EVALUATOR, 0)

    def _join_fleet(self) -> None:
        for info in self._plan.clients:
            changes = self._dynamics is not None and info.client in self._dynamics
            if not changes and not self._core.connected(info.client):
                at_s = max(self._clock.now_s(), joins_at_s(self._experiment, info.client))
                self._agenda.enter(Due(at_s, JOIN, info.client))
        self._follow()

    def _welcome(self, peer: Peer) -> None:
        """A worker takes another's place: `_supply` gives it tasks."""

    def holds(self, peer: Peer, client: int, task: int) -> bool:
        return peer.role == control.WORKER and self._dispatch.held_by(task) == peer.number

    def _given_up(self, peer: Peer) -> None:
        super()._given_up(peer)
        if peer.role == control.WORKER:
            raise RunError(f"worker {peer.number} died too often; see the incidents in {self._folder}")

    def _departed(self, message: control.Departed) -> None:
        if message.role == control.WORKER and self._stopped is None:
            self._withdrawn.pop(message.peer, None)
            for task in self._dispatch.worker_gone(message.peer):
                self._buffer.state[task.slot] = SlotState.LEASED  # nobody writes to it now
                if task.task in self._cancelled:
                    self._give_up(task.task)
        super()._departed(message)

    @property
    def _expected(self) -> bool:
        return super()._expected or self._agenda.head is not None

    # ---- tasks ---------------------------------------------------------------------------------

    def _begin(self, task: messages.Task) -> None:
        self._turns = 0
        self._travel(task, self._clock.now_s())

    def _travel(self, task: messages.Task, sent_s: float) -> None:
        """A trip that began at ``sent_s``."""
        plan = self._plan_of(task)
        self._under_way[task.task] = Trip(task, plan)
        due_s = sent_s + min(plan.total_s, plan.breaks_s)
        if self._dynamics is not None and self._dynamics.lost_at_s(task.client) < due_s:
            self._doomed.add(task.task)
            self._aggregator.fetched(task.slot)
            return
        if self._dynamics is None or not self._dynamics.shares:
            self._agenda.enter(Due(due_s, ARRIVAL, task.client, task.task))
        if plan.breaks_s < math.inf:
            self._broken[task.task] = plan.broken
            self._aggregator.fetched(task.slot)
        else:
            self._dispatch.add(task, due_s)

    def _plan_of(self, task: messages.Task) -> TripPlan:
        """This trip, drawn as the client itself would draw it."""
        plan = self._dynamics.plan(task.client) if self._dynamics is not None else None
        if plan is not None:
            return plan
        return self._trips.plan(task.client, task.trip, None if task.cut is None else task.cut.budget_s)

    def _end(self, client: int, task: int) -> None:
        """The trip ends now. If no worker has begun it, it is never computed."""
        self._cancelled.add(task)
        self._doomed.discard(task)
        self._agenda.enter(Due(self._clock.now_s(), ARRIVAL, client, task))
        self._give_up(task)

    def _give_up(self, task: int) -> None:
        if (worker := self._dispatch.held_by(task)) is not None:
            self._withdrawn.setdefault(worker, []).append(task)
        elif self._dispatch.take_back(task):
            self._aggregator.fetched(self._under_way[task].task.slot)

    def _settled(self, task: int) -> bool:
        """Whether nothing more needs to be computed for a task, nor will anybody write into its slot."""
        if task in self._cancelled:
            return self._dispatch.held_by(task) is None
        return task in self._dispatch.results or task in self._broken

    def _give(self, worker: int, tasks: Sequence[messages.Task]) -> bool:
        """Send tasks to a worker; false if it does not take them all."""
        peer = self._peers.get(control.WORKER, worker)
        if peer is None:
            return False
        if not self._transport.carries_updates:
            return self._outbox.send(peer, messages.Work(list(tasks)))
        taken = True
        for entry, same in groupby(tasks, key=lambda task: task.entry):
            frames = self._transport.model_frames(entry)
            taken = taken and self._outbox.send(peer, messages.Work(list(same)), frames)
        return taken

    def _supply(self) -> None:
        """Tell the workers what they are to compute next, and what no more."""
        before = self._watch.to("send")
        for worker, tasks in self._withdrawn.items():
            if (peer := self._peers.get(control.WORKER, worker)) is not None:
                self._outbox.send(peer, messages.Withdraw(tasks))
        self._withdrawn.clear()
        self._dispatch.oldest_first = self._executor.deferred is not None
        workers = self._peers.of(control.WORKER)
        self._dispatch.fill([peer.number for peer in workers if peer.ready and not peer.expelled])
        self._watch.to(before)

    def _trained(self, peer: Peer, message: messages.Trained, _: Sequence[Frame]) -> None:
        """Some tasks of a worker are computed."""
        peer.deaths_in_a_row = 0
        for result in message.results:
            if peer.role != control.WORKER or self._dispatch.held_by(result.task) != peer.number:
                raise WireError(f"an update of task {result.task}, which is not the sender's")
            task = self._dispatch.order(result.task)
            if result.trained_version != task.version:
                detail = f"task {task.task}: trained {result.trained_version}, was given {task.version}"
                self.note(task.client, "version", detail)
                self.finished(messages.Gone(task.client, 0, task.task, detail))
                continue
            self._reception.whole(task.slot, task.task, result.checksum)
            self._dispatch.finished(result)
            self._aggregator.fetched(task.slot)

    def finished(self, done: messages.Done | messages.Gone) -> None:
        """A worker gave a task back."""
        if isinstance(done, messages.Done):
            raise WireError(f"a worker said of task {done.task} what only a client says")
        task = self._dispatch.finished(done)
        self._aggregator.fetched(task.slot)

    # ---- the agenda ----------------------------------------------------------------------------

    @property
    def _patience_ms(self) -> int:
        return 0 if self._channel.waiting or self._more else 1000

    _more = False
    """The last look at the agenda ended before it had to."""

    def _advance(self) -> None:
        self._more = self._started and self._take_events()
        if self._started and self._stopped is None:
            self._supply()

    def _take_events(self) -> bool:
        """Take the next events; whether there may be more that can be taken now."""
        agenda = self._agenda
        for _ in range(EVENTS_AT_ONCE):
            if self._stopped is not None or self._executor.deferred is not None:
                return False
            if self._experiment.stop.accuracy is not None and self._assessments.waiting:
                return False  # the answer may end the run here, whenever it comes
            due = agenda.head
            if due is None or (due.kind == ARRIVAL and not self._settled(due.task)):
                return False
            agenda.take()
            if due.kind in (JOIN, LEAVE) and not self._turns_up(due):
                continue
            self._clock.advance(due.at_s)
            if due.kind == ARRIVAL:
                self._require_time(due.at_s)
                self._arrive(due)
            elif due.kind == JOIN:
                self._executor.handle(Joined(due.client, due.at_s))
            elif due.kind == LEAVE:
                self._leave(due)
            elif due.kind == CELL:
                self._cells_move(due.at_s)
            else:
                self._executor.handle(Ticked(due.at_s))
            if self._dynamics is not None:
                self._follow()
            failpoints.pass_by("event")
        return True

    def _require_time(self, at_s: float) -> None:
        """RunError where trips take no time and nothing but time, or an accuracy, would end the run."""
        last_s, count = self._instant
        self._instant = (at_s, count + 1 if at_s == last_s else 1)
        stop = self._experiment.stop
        ends = (stop.trips, stop.versions, stop.wall_s)
        if count > MOST_TURNS * len(self._plan.clients) and ends == (None, None, None):
            raise RunError(
                f"emulated time stands still at {at_s:g} s: {count} trips took none; give stop.trips or "
                "stop.versions, or a fleet whose trips take time"
            )

    def _arrive(self, due: Due) -> None:
        task = due.task
        trip, result = self._under_way.pop(task), self._dispatch.results.pop(task, None)
        broken = self._broken.pop(task, None)
        if task in self._cancelled:
            self._cancelled.remove(task)
            left = self._left_with.pop(task, None)
            self._executor.handle(left or Failed(due.client, task, due.at_s, "cancelled"))
        elif broken is not None:
            self.note(due.client, "failed", broken)
            self._executor.handle(Failed(due.client, task, due.at_s, broken))
        elif isinstance(result, messages.Gone):
            self._executor.handle(Failed(due.client, task, due.at_s, result.reason))
        else:
            assert result is not None
            done = trip.done(result, self._plan.prepared.examples[due.client])
            self._executor.arrived(done, self._aggregator.leases[task], due.at_s)
            self._gauge.trip(done)

    # ---- stopping and carrying on --------------------------------------------------------------

    def _ahead(self) -> resume.Ahead:
        """What has been computed before it is due, and where the rest starts from."""
        answers = [answer for answer in self._dispatch.results.values() if answer.task not in self._cancelled]
        return resume.Ahead(
            answers=answers,
            tasks=[answer.task for answer in answers if isinstance(answer, messages.Result)],
            entries={task.version: task.entry for task in self._dispatch.unfinished}
            | self._assessments.entries,
        )

    def _resume(self, restored: resume.Restored) -> None:
        """The phones know nothing of an interruption: every trip goes on that was under way."""
        self._assess_again(restored)
        for number in sorted(self._core.tasks):
            order, sent_s = restored.unfinished.tasks[number]
            answer = restored.answers.get(number)
            lease = self._take_up(order, restored)
            task = self._executor.order(order, lease, sent_s, sent_s)
            self._travel(task, sent_s)
            if number in restored.unfinished.cancelled:
                self._end(order.client, number)
            elif answer is not None:
                self._dispatch.take_back(number)
                self._dispatch.results[number] = answer
                self._aggregator.fetched(lease.slot)
            elif lease.entry < 0 and self._dispatch.waits(number):
                raise ConfigError(
                    f"the checkpoint in {self._folder} lacks version {order.version} for task {number}"
                )

    def _take_up(self, order: Train, restored: resume.Restored) -> Lease:
        """A slot for a task that was under way, with its update if that was computed before it was due."""
        task, client, version = order.task, order.client, order.version
        if isinstance(restored.answers.get(task), messages.Result):
            update = restored.checkpoint.held[task]
            return self._aggregator.restore(task=task, client=client, version=version, update=update)
        entry = restored.entries.get(version, -1)
        return self._aggregator.resume(task=task, client=client, version=version, entry=entry)

    # ---- phones that come and go by themselves -------------------------------------------------

    def _follow(self) -> None:
        """Enter whatever the phones will do next by themselves."""
        if self._dynamics is None:
            return
        for client in self._dynamics.moved():
            at_s, why = self._dynamics.move(client)
            if at_s < math.inf:
                kind = JOIN if why == "back" else LEAVE
                self._agenda.enter(Due(max(at_s, self._clock.now_s()), kind, client))
        if self._dynamics.shares:
            self._follow_cells(self._dynamics)

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
        left = Left(client, due.at_s, why, finishes=finishes)
        if task is not None and not finishes:
            if task not in self._doomed:
                self._left_with[task] = left
                self._end(client, task)
                return
            self._doomed.remove(task)
            del self._under_way[task]
        self._executor.handle(left)

    # ---- cells ---------------------------------------------------------------------------------

    def _cells_move(self, at_s: float) -> None:
        """A message is sent in a cell, or is through, unless that has changed since."""
        self._cell_due_s = math.inf
        if self._dynamics is not None:
            self._dynamics.advance(at_s)

    def _follow_cells(self, dynamics: Dynamics) -> None:
        """Enter the ends of trips that are through, and when something happens next."""
        for at_s, task, client, down_s, up_s in dynamics.through():
            if (trip := self._under_way.get(task)) is not None:
                self._under_way[task] = trip._replace(took=(down_s, up_s))
                self._agenda.enter(Due(at_s, ARRIVAL, client, task))
        if dynamics.next_s < math.inf and dynamics.next_s != self._cell_due_s:
            self._cell_due_s = dynamics.next_s
            self._agenda.enter(Due(self._cell_due_s, CELL))
