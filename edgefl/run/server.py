"""The server's loop, which turns messages into events and events into actions until the core stops the run.

If a peer is silent, sends invalid messages or dies, the server records this, and then replaces or drops the
peer as the experiment specifies. No peer can stop the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgefl.core.events import Halted
from edgefl.errors import RunError
from edgefl.experiment import NO_PROGRESS
from edgefl.host.channel import Channel, Closed
from edgefl.host.pacing import Pauses
from edgefl.run import control, messages, resume
from edgefl.run.clock import Alarms
from edgefl.run.engine import Engine
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Checked, Gate, Refusal, ResendRequest, TaskReturned
from edgefl.run.peers import CLIENTS, Peer, PeerLifecycle, Peers, slowest_step_s
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.timeline import Delivery, Restored, Timeline, TimelineEvent

COMMIT_S = 0.05
PROGRESS_S = 0.25
STATES_EVERY = 4
"""If the clients' states are requested, every fourth progress report includes them."""
MAX_STATES = 100_000
"""The states of clients are reported only for fleets of at most this many clients."""
CHECKPOINT_SHARE = 0.05
"""Maximum share of the run's time that is spent writing checkpoints."""


@dataclass(eq=False)
class ServerLoop:
    """The loop of one run, from the first `Ready` message to the last checkpoint."""

    _channel: Channel[control.ToServer]
    _plan: control.Serve
    _gate: Gate
    _timeline: Timeline
    _engine: Engine
    _evaluation: EvaluationQueue
    _peers: Peers
    _lifecycle: PeerLifecycle
    _alarms: Alarms
    _gauge: Gauge
    _watch: Stopwatch
    _restored: Restored | None = None

    def __post_init__(self) -> None:
        engine, plan = self._engine, self._plan
        self._core, self._aggregator, self._store = engine.core, engine.aggregator, engine.store
        self._experiment, self._clock = plan.experiment, self._timeline.clock
        active = self._core.strategy.max_training(len(self._core.devices))
        self._virtual = self._experiment.clock.kind == "virtual"
        self._slowest_step_s = slowest_step_s(plan, active)
        self._stopped: str | None = None
        self._first_version, self._first_trips = self._core.version, self._core.trips
        self._interrupted = self._started = False
        self._recorded: dict[str, tuple[int, int]] = {}
        """For each stage, the nanoseconds and the number of calls that are already in the record."""
        self._reports = 0
        self._pauses = Pauses(1.0 / CHECKPOINT_SHARE)

    def run(self) -> None:
        """Serve until the run ends, then complete the record and write a checkpoint."""
        if (restored := self._restored) is not None:
            self._engine.assess_again(restored.assessing, restored.entries)
            self._handle_all(self._timeline.restore(restored, self._engine.order))
        self._timeline.expect()
        self._peers.expect(control.EVALUATOR, 0)
        self._gate.socket.watch(self._channel.fileno())
        self._alarms.every(COMMIT_S, self._commit)
        self._alarms.every(PROGRESS_S, self._report)
        self._alarms.every(self._lifecycle.check_every_s, self._find_silent)
        self._alarms.after(self._experiment.checkpoint.every_s, self._checkpoint_again)
        try:
            socket = self._gate.socket
            self._channel.send(socket.listening)
            # Loop until the run has stopped and, unless it was interrupted, the last evaluation is complete.
            while self._stopped is None or (self._evaluation.waiting and not self._interrupted):
                self._turn()
        except Closed:  # the supervisor was killed, so save acknowledged updates in a final checkpoint
            self._interrupted, self._stopped = True, self._stopped or "interrupted"
        self._conclude()

    def _turn(self) -> None:
        self._watch.to(self._idle_stage())
        patience_ms = 0 if self._channel.waiting else self._timeline.wait_ms()
        news = self._gate.wait(self._alarms.wait_ms(patience_ms))
        for peer, message in self._gate.receive():
            self._handle(peer, message)
        if news or self._channel.waiting:
            for order in self._channel.receive_ready():
                if isinstance(order, control.Departed):
                    self._departed(order)
                elif isinstance(order, control.Interrupt):
                    self._interrupted, self._stopped = True, self._stopped or "interrupted"
                elif isinstance(order, control.Grow) and self._stopped is None:
                    self._grow(order)
        if self._interrupted:
            return  # all other work waits until the run is resumed
        self._engine.retry_sum()
        if self._started:
            self._handle_all(self._timeline.due())
        self._alarms.run_due()
        self._flush()

    def _idle_stage(self) -> str:
        """Return the stage of the server's time while it waits for messages."""
        if not self._started:
            return "start"
        if self._stopped is not None:
            return "end"
        held_up = self._evaluation.waiting and self._virtual and self._experiment.stop.measured
        return "evaluation" if held_up else "wait"

    def _handle_all(self, timeline_events: Iterator[TimelineEvent]) -> None:
        for timeline_event in timeline_events:
            self._engine.handle(timeline_event)
            if type(timeline_event) is Delivery:
                self._gauge.trip(timeline_event.times)
        if self._started and self._core.stopped is not None and self._stopped is None:
            self._stop(self._core.stopped)

    def _flush(self) -> None:
        before = self._watch.to("send")
        self._timeline.flush()
        self._watch.to(before)

    def _start_if_ready(self) -> None:
        if self._started or self._lifecycle.returning + self._peers.unready:
            return
        self._started = True
        if not self._plan.resume:
            self._checkpoint()  # from now on the run can be resumed
        self._clock.start()
        if self._core.stopped is not None:  # a resumed run that lacks only its last evaluation
            self._stop(self._core.stopped)
        self._engine.carry_out(self._core.pending())
        self._timeline.start()
        wall_s = self._experiment.stop.wall_s
        if wall_s is not None:
            self._alarms.after(max(0.0, wall_s - self._clock.wall_s()), self._out_of_time)

    def _out_of_time(self) -> None:
        if self._stopped is None:
            self._handle_all(iter([Halted(self._clock.now_s(), "wall_s")]))

    def _commit(self) -> None:
        before = self._watch.to("record")
        self._store.commit()
        self._watch.to(before)

    def _stop(self, reason: str) -> None:
        """Dismiss the clients after the core has stopped; from now on the loop waits only for evaluations.

        An evaluator that dies is still replaced. One that hangs is killed, and its unfinished evaluations are
        then given up.
        """
        self._stopped = reason
        self._flush()
        self._engine.secure()
        self._gate.dismiss(*CLIENTS)

    def _handle(self, peer: Peer, message: Checked) -> None:
        match message:
            case messages.TaskResult() | TaskReturned():
                self._handle_all(self._timeline.task_ended(message))
            case Refusal(kind=kind, detail=detail):
                self._lifecycle.expel(peer, kind, detail)
            case ResendRequest() if peer.role == control.EVALUATOR:
                self._evaluation.send()
            case ResendRequest():
                self._handle_all(self._timeline.resend(peer))
            case messages.Ready():
                if peer.role == control.EVALUATOR:
                    self._evaluation.send()
                elif self._started:
                    self._handle_all(self._timeline.ready(peer))
                self._start_if_ready()
            case messages.Assessed():
                if self._evaluation.complete(message.version):
                    self._engine.assessed(message)
                    self._gauge.assessed(message)
                    self._handle_all(iter(()))

    def _find_silent(self) -> None:
        self._lifecycle.find_silent(self._slowest_step_s)
        core = self._core
        alone = self._started and self._stopped is None and not core.training
        coming = self._lifecycle.returning + self._peers.unready + self._timeline.expected + core.unmasking
        if not alone or coming or (core.awaits and core.idle) or self._aggregator.deferred is not None:
            return
        if self._experiment.stop.measured and self._evaluation.waiting:
            return  # the result of the evaluation may end the run
        if self._timeline.any_gone:  # a sum that still waits is then refused
            self._handle_all(iter([Halted(self._clock.now_s(), core.too_few)]))
            return
        here = f"{sum(core.present)} of {len(core.present)}"
        waits = "" if self._aggregator.waiting is None else "; a sum waits for clients that can unmask it"
        raise RunError(
            f"no client is training and none will start: {here} are connected, "
            f"{len(core.held)} updates wait in the buffer{waits}"
        )

    def _departed(self, message: control.Departed) -> None:
        over = self._stopped is not None
        if over and message.role != control.EVALUATOR:
            self._peers.remove(message.role, message.peer, message.epoch)
            return
        peer = self._lifecycle.departed(message)
        if peer is not None and peer.role != control.EVALUATOR:
            self._handle_all(self._timeline.departed(peer, message))
        elif peer is not None and ((over and peer.expelled) or not self._lifecycle.retry(peer)):
            self._evaluation.give_up()
            stop = self._experiment.stop
            if not over and (stop.versions, stop.trips, stop.emulated_s, stop.wall_s) == (None,) * 4:
                raise RunError("the evaluator died too often; without evaluations, this run would never stop")
        self._start_if_ready()

    def _grow(self, order: control.Grow) -> None:
        """Start more workers on a node that has joined."""
        for number in range(order.first, order.workers):
            self._lifecycle.start(control.WORKER, number)
        self._store.set_meta(processes=order.workers)

    def _report(self) -> None:
        before = self._watch.to("report")
        connected = sum(peer.ready for peer in self._peers.of(*CLIENTS)) if not self._started else None
        incidents = sum(self._lifecycle.incidents.values())
        progress = self._gauge.progress(self._core, self._clock, connected, incidents)
        wanted = self._plan.states and len(self._core.devices) <= MAX_STATES
        if wanted and (self._stopped is not None or self._reports % STATES_EVERY == 0):
            self._watch.to("states")
            progress = msgspec.structs.replace(progress, states=self._timeline.states())
        self._reports += 1
        self._channel.tell(progress)
        self._watch.to(before)

    def _checkpoint(self, *, final: bool = False) -> None:
        before = self._watch.to("checkpoint")
        folder, layout = Path(self._plan.run_dir), self._plan.prepared.layout
        in_flight = self._timeline.save()
        self._record_costs()  # a run that is killed and resumed keeps the trips up to here
        resume.save(folder, self._engine, in_flight, layout, final=final)
        self._watch.to(before)

    def _record_costs(self) -> None:
        """Add the time of each stage since the last call to the record."""
        for stage, ns in self._watch.ns.items():
            earlier_ns, earlier = self._recorded.get(stage, (0, 0))
            calls = self._watch.calls[stage]
            self._store.cost(stage, (ns - earlier_ns) / 1e9, calls - earlier)
            self._recorded[stage] = ns, calls

    def _checkpoint_again(self) -> None:
        """Write a checkpoint, and schedule the next one after ``checkpoint.every_s`` seconds.

        The interval is longer if checkpoints would take more than `CHECKPOINT_SHARE` of the time. A single
        checkpoint during which this process was suspended does not make the interval longer, unless it is the
        first checkpoint.
        """
        started = time.monotonic()
        self._checkpoint()
        pause_s = self._pauses.after(time.monotonic() - started)
        self._alarms.after(max(self._experiment.checkpoint.every_s, pause_s), self._checkpoint_again)

    def _network(self) -> dict[str, int]:
        """Return the numbers of bytes sent and received through the door (the server's socket for other
        machines) and of versions made by this process; empty if the run has no door."""
        moved = self._gate.socket.network
        return moved and {**moved, "versions": self._core.version - self._first_version}

    def _conclude(self) -> None:
        # A run that lacks only its last evaluations is recorded as interrupted, so that resuming the run can
        # complete them.
        interrupted = self._interrupted and (self._core.stopped is None or self._evaluation.waiting)
        reason = "interrupted" if interrupted else self._core.stopped or self._stopped or ""
        self._checkpoint(final=True)
        self._gate.dismiss(*CLIENTS, control.EVALUATOR)
        aggregator, watch = self._aggregator, self._watch
        model_sha256 = aggregator.buffer.digest()
        no_progress = "" if interrupted else self._no_progress(reason)
        together_s = (watch.ns.get("record", 0) + watch.ns.get("send", 0)) / 1e9
        ended_s = self._core.stopped_s  # the wall clock ran on while the last evaluation was awaited
        self._store.set_meta(
            status="interrupted" if interrupted else "done",
            stop_reason=reason,
            wall_s=self._clock.wall_s(),
            emulated_s=self._clock.now_s() if ended_s is None else ended_s,
            no_progress=no_progress,
            model_sha256=model_sha256,
            aggregation=aggregator.cost(),
            network=self._network(),
            server_trip_us=self._gauge.trip_us(together_s, self._core.trips - self._first_trips),
        )
        self._record_costs()
        self._store.sync()
        self._report()
        self._channel.tell(control.Finished(reason, interrupted, no_progress))

    def _no_progress(self, reason: str) -> str:
        """Return the reason why an ended run has no result, or "" if it has one."""
        if reason.startswith(NO_PROGRESS):
            return reason.removeprefix(f"{NO_PROGRESS}: ")
        version = self._core.version
        if version and not self._core.learned:
            return "all trips failed or gave a bad update"
        aggregator = self._aggregator
        weights_sha256 = aggregator.buffer.weights_digest(aggregator.statistics)
        if weights_sha256 != self._store.meta("first_weights_sha256"):
            return ""
        same = f"the weights of version {version:,} equal those of version 0"
        return same if version else "no version was made"
