"""The server's process: a socket loop around the executor and the pure core.

It binds, waits until every phone has said that it is ready, lets emulated time start, and then turns messages
into events until the core says stop. A peer that is silent, sends what is no message, or dies is counted and
replaced or dropped as the experiment says; nothing a peer does stops the server.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.core import Core
from edgefl.core.events import Failed, Halted, Left, Stop, Ticked
from edgefl.devices.dynamics import dynamics_of
from edgefl.devices.fleet import Trips
from edgefl.errors import EdgeflError, RunError
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.results.store import Store
from edgefl.run import control, messages, resume
from edgefl.run.attendance import Attendance
from edgefl.run.channel import Channel
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.connection import bind
from edgefl.run.description import describe, known_devices
from edgefl.run.engine import Executor
from edgefl.run.evaluation import Assessments
from edgefl.run.gate import Reception
from edgefl.run.outbox import SocketOutbox
from edgefl.run.peers import CLIENTS, Peer, Peers
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.resume import Checkpoints
from edgefl.run.roster import Roster, slowest_step_s
from edgefl.run.slots import Aggregator
from edgefl.run.transport import server_end
from edgefl.strategies import resolve
from edgefl.strategies.optimizer import start

COMMIT_S = 0.05
PROGRESS_S = 0.25
GOODBYE_S = 120.0
"""Longest wait for the last evaluation."""


class Server:
    """One run, from the first `Ready` to the last checkpoint."""

    def __init__(
        self, channel: Channel[control.ToServer], plan: control.Serve, buffer: ParameterBuffer
    ) -> None:
        self._plan, self._channel, self._buffer = plan, channel, buffer
        self._experiment = experiment = plan.experiment
        self._folder = Path(plan.run_dir)
        self._stopped: str | None = None
        self._interrupted = self._started = False
        self._restored: resume.Restored | None = None
        self._watch = Stopwatch("start")
        self._alarms = Alarms()
        self._gauge = Gauge(plan)
        self._peers = Peers(time.monotonic)
        self._store = Store(self._folder)
        self._restore_or_describe()
        largest_bytes = max(messages.MAX_HEADER_BYTES, 4 * buffer.shape.size + 4096)
        self._socket = bind(experiment.server.transport, largest_bytes)
        self._transport = server_end(experiment.server.transport, buffer)
        self._assessments = Assessments(self._aggregator, self._send_assess)
        self._roster = Roster(
            self._peers, experiment, self._store, self._gauge, self._clock, self._alarms, channel
        )
        self._outbox = self._make_outbox()
        self._executor = Executor(
            self._core,
            self._aggregator,
            self._store,
            self._outbox,
            self._clock.now_s,
            self._clock.wall_s,
            self._watch,
            self._dynamics,
            restored=frozenset(self._aggregator.leases),
        )
        self._checkpoints = Checkpoints(self._save, experiment.checkpoint.every_s, self._alarms, self._watch)
        self._attendance = Attendance(
            experiment, self._dynamics, self._executor, self._peers, self._clock, self._alarms, self.note
        )
        self._reception = Reception(
            self._socket,
            self._peers,
            self._transport,
            self._aggregator,
            self._gauge,
            self._watch,
            self,
        )

    def _make_outbox(self) -> SocketOutbox:
        return self._connected(SocketOutbox)

    def _connected(self, outbox: Callable[..., SocketOutbox]) -> SocketOutbox:
        return outbox(
            self._socket,
            self._peers,
            self._transport,
            self._watch,
            fetched=self._aggregator.fetched,
            stuck=lambda peer: self.expel(peer, "hang", "does not take its messages"),
            assess=self._assessments.ask,
            wake=self._wake,
            stopped=self._note_stop,
        )

    def _make_clock(self, emulated_s: float, wall_s: float) -> WallClock:
        return WallClock(self._plan.time_scale, emulated_s=emulated_s, wall_s=wall_s)

    def _restore_or_describe(self) -> None:
        """The core, the aggregator and the clock, as new or as the last checkpoint left them."""
        plan, experiment = self._plan, self._experiment
        strategy = resolve(experiment.strategy, [Path(plan.base)])
        devices = known_devices(plan.clients, plan.prepared)
        every = experiment.evaluation.every_versions
        self._core = Core(strategy, devices, experiment.seed, experiment.stop, every)
        backend, privacy = experiment.server.kernel_backend, strategy.privacy(len(plan.clients))
        self._aggregator = Aggregator(self._buffer, strategy.optimizer(), backend, privacy, experiment.seed)
        self._aggregator.lends = experiment.server.transport == "shm" and experiment.clock.kind == "wall"
        cost, shape = plan.prepared, self._buffer.shape
        self._trips = Trips(
            experiment,
            plan.clients,
            cost.examples,
            cost.flops_per_example,
            4 * shape.size,
            shape.update_bytes,
        )
        self._dynamics = dynamics_of(experiment, plan.clients, self._trips)
        emulated_s = wall_s = 0.0
        if plan.resume:
            self._restored = resume.restore(
                self._folder, self._core, self._aggregator, self._store, self._dynamics
            )
            emulated_s, wall_s = self._restored.checkpoint.emulated_s, self._restored.checkpoint.wall_s
        else:
            start(strategy.optimizer(), self._buffer.vectors(self._buffer.latest[1]))
            describe(self._store, plan, strategy)
        self._clock = self._make_clock(emulated_s, wall_s)
        self._slowest_step_s = slowest_step_s(plan, strategy.max_training(len(devices)))
        self._store.set_meta(status="running")
        self._store.commit()

    # ---- life ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the run is over, then leave the record and a checkpoint behind."""
        try:
            if self._restored is not None:
                self._resume(self._restored)
                self._restored = None
            self._expect_fleet()
            self._channel.send(control.Listening(self._socket.address))
            self._set_alarms()
            self._socket.watch(self._channel.fileno())
            while not self._over:
                self._watch.to("wait" if self._started else "start")
                news = self._socket.wait(self._alarms.wait_ms(self._patience_ms))
                self._reception.drain()
                if news or self._channel.waiting:
                    for message in self._channel.receive_ready():
                        self._hear_supervisor(message)
                if self._executor.deferred is not None:
                    self._executor.retry_sum()
                self._advance()
                self._alarms.run_due()
                self._outbox.flush()
            self._conclude()
        finally:
            self._socket.close()
            self._store.close()

    @property
    def _patience_ms(self) -> int:
        """How long the loop may wait for a message: a client that has fetched its model sends none."""
        return 1 if self._executor.deferred is not None else 0 if self._channel.waiting else 1000

    @property
    def _over(self) -> bool:
        """Stopped, and the last evaluation is in (or nobody waits for it)."""
        return self._stopped is not None and (self._interrupted or not self._assessments.waiting)

    def _expect_fleet(self) -> None:
        for info in self._plan.clients:
            self._peers.expect(control.CLIENT, info.client)
        self._peers.expect(control.EVALUATOR, 0)

    def _start_if_ready(self) -> None:
        if self._started or self._absent:
            return
        self._started = True
        if not self._plan.resume:
            self._checkpoints.write()  # whatever happens from now on, the run can be resumed
        self._clock.start()
        if self._core.stopped is not None:  # it was over but for its last evaluation
            self._executor.carry_out([Stop(self._core.stopped)])
        self._executor.carry_out(self._core.pending())
        self._join_fleet()
        wall_s = self._experiment.stop.wall_s
        if wall_s is not None:
            self._alarms.after(max(0.0, wall_s - self._clock.wall_s()), lambda: self._halt("wall_s"))

    def _join_fleet(self) -> None:
        self._attendance.open()

    def _set_alarms(self) -> None:
        self._alarms.every(COMMIT_S, self._commit)
        self._alarms.every(PROGRESS_S, self._report)
        self._alarms.every(self._roster.look_every_s, self._find_silent)
        self._checkpoints.begin()

    def _commit(self) -> None:
        before = self._watch.to("record")
        self._store.commit()
        self._watch.to(before)

    def _halt(self, reason: str) -> None:
        if self._stopped is None:
            self._executor.handle(Halted(self._clock.now_s(), reason))

    # ---- what comes in (Reception's listener) --------------------------------------------------

    def ready(self, peer: Peer) -> None:
        if peer.role == control.EVALUATOR:
            self._assessments.send()
        elif self._started:
            self._welcome(peer)
        self._start_if_ready()

    def holds(self, peer: Peer, client: int, task: int) -> bool:
        lease = self._aggregator.leases.get(task)
        return lease is not None and lease.client == client == peer.number

    def finished(self, done: messages.Done | messages.Gone) -> None:
        if isinstance(done, messages.Gone):
            if not self._attendance.given_up(done):
                self._executor.handle(Failed(done.client, done.task, self._clock.now_s(), done.reason))
        else:
            self._attendance.delivers(done.client)
            self._executor.arrived(done, self._aggregator.leases[done.task], self._clock.now_s())
            self._gauge.trip(done)

    def assessed(self, answer: messages.Assessed) -> None:
        if self._assessments.answered(answer.version):
            self._gauge.assessed(answer)
            self._executor.assessed(answer)

    def note(self, client: int, kind: str, detail: str) -> None:
        self._store.incident(self._clock.now_s(), client, kind, detail)

    def expel(self, peer: Peer, kind: str, detail: str) -> None:
        self._roster.expel(peer, kind, detail)

    def _welcome(self, peer: Peer) -> None:
        """A process that replaces another is ready."""
        self._attendance.welcome(peer.number)

    def _advance(self) -> None:
        """Take events that are due; on the wall clock they come by themselves."""
        if self._started:
            self._attendance.follow()

    # ---- what the outbox leaves to the server --------------------------------------------------

    def _send_assess(self, version: int, entry: int) -> None:
        peer = self._peers.get(control.EVALUATOR, 0)
        if peer is not None and peer.ready:
            self._outbox.send(peer, messages.Assess(version, entry))

    def _wake(self, at_s: float) -> None:
        def tick() -> None:  # never before it is due, whatever the rounding
            self._executor.handle(Ticked(max(at_s, self._clock.now_s())))

        self._alarms.after(max(0.0, (at_s - self._clock.now_s()) * self._clock.time_scale), tick)

    def _note_stop(self, reason: str) -> None:
        self._stopped = reason
        self._alarms.after(GOODBYE_S, self._assessments.give_up)

    # ---- peers that fail -----------------------------------------------------------------------

    def _find_silent(self) -> None:
        self._roster.find_silent(self._slowest_step_s)
        alone = self._started and self._stopped is None and not self._core.training
        if alone and not self._expected and self._executor.deferred is None:
            raise RunError(
                f"no client is training and none will: {len(self._core.idle)} of "
                f"{len(self._plan.clients)} are connected, {len(self._core.held)} updates wait in the buffer"
            )

    @property
    def _absent(self) -> int:
        """Peers that are on their way."""
        return self._roster.returning + self._peers.unready + self._attendance.expected

    @property
    def _expected(self) -> bool:
        """Whether something will happen although no client trains."""
        return self._absent > 0 or (self._core.awaits and bool(self._core.idle))

    def _left(self, client: int, reason: str) -> None:
        if self._started and self._stopped is None:
            self._attendance.left(client, reason)

    def _given_up(self, peer: Peer) -> None:
        if peer.role == control.EVALUATOR:
            self._assessments.give_up()

    def _departed(self, message: control.Departed) -> None:
        if self._stopped is None:
            self._roster.departed(message, self._left, self._given_up)
            self._start_if_ready()
        elif message.role == control.EVALUATOR:
            self._assessments.give_up()

    def _hear_supervisor(self, message: control.ToServer) -> None:
        match message:
            case control.Departed():
                self._departed(message)
            case control.Interrupt(reason=reason):
                self._interrupted = True
                self._stopped = self._stopped or reason
            case _:
                raise EdgeflError(f"the server cannot do {type(message).__name__} now")

    def _report(self) -> None:
        before = self._watch.to("report")
        self._channel.send(self._gauge.progress(self._core, self._clock, self._peers, self._started))
        self._watch.to(before)

    # ---- end -----------------------------------------------------------------------------------

    def _ahead(self) -> resume.Ahead:
        """Work in flight. Tasks are lost with their phones' processes; versions to be measured are not."""
        return resume.Ahead(entries=self._assessments.entries)

    def _save(self, *, final: bool) -> None:
        layout = self._plan.prepared.layout
        resume.save(self._folder, self._executor, self._clock, layout, self._ahead(), final=final)

    def _conclude(self) -> None:
        interrupted = self._interrupted and self._core.stopped is None
        self._checkpoints.write(final=True)
        self._outbox.goodbye(*CLIENTS, control.EVALUATOR)
        model = self._buffer.model(self._buffer.latest[1])
        self._store.set_meta(
            status="interrupted" if interrupted else "done",
            stop_reason=self._stopped or "",
            wall_s=self._clock.wall_s(),
            emulated_s=self._clock.now_s(),
            model_sha256=hashlib.sha256(model.data).hexdigest(),
            aggregation=self._gauge.aggregation(self._aggregator.totals, self._aggregator.backend),
            server_trip_us=self._gauge.trip_us(
                self._watch.seconds("record") + self._watch.seconds("send"), self._core.trips
            ),
        )
        for stage, ns in self._watch.ns.items():
            self._store.cost(stage, ns / 1e9, self._watch.calls[stage])
        self._store.sync()
        self._report()
        self._channel.send(control.Finished(self._stopped or "", interrupted))

    def _resume(self, restored: resume.Restored) -> None:
        """Go on from a checkpoint: the processes of before are gone, and their tasks with them."""
        self._assess_again(restored)
        for client in sorted((*self._core.running, *self._core.idle)):
            self._executor.handle(Left(client, self._clock.now_s(), "interrupted"))

    def _assess_again(self, restored: resume.Restored) -> None:
        for version, asked in sorted(restored.unfinished.assessing.items()):
            if version in restored.entries:
                self._executor.assessing[version] = asked
                self._assessments.ask(version, restored.entries[version])
