"""The supervisor: starts and watches every process of a run, owns the shared memory, and cleans up.

One loop handles the messages from the server, the zygote and the run's hosts:

    state       meanwhile                                 next state, when
    LOADING     zygote and nodes load data and model      ADOPTING: enough hosts are ready (`Gathered`);
                                                          the time scale is chosen, the buffer created
    ADOPTING    the zygote writes the first model         STARTING: the buffer holds it (`Adopted`)
    STARTING    the server has its plan                   SERVING: it is ready for peers (`Listening`)
    SERVING     the fleet is forked; the run proceeds     RESTARTING: server or zygote was killed
                                                          LEAVING: the zygote has exited
    RESTARTING  all peers of the killed server end        SERVING: they have ended (`Cleared`)
    LEAVING     the server writes a final checkpoint
    ENDED       the record is complete (`Finished`)

Ctrl-C ends the run immediately in the first three states; later, the server first writes a checkpoint.
However the run ends, the same code stops all processes. If the server has finished (ENDED), the supervisor
then writes the summary, the report and the trace.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from edgefl import config
from edgefl.devices.fleet import fleet_of, mixed_runtimes
from edgefl.errors import ConfigError, EdgeflError, RunError
from edgefl.experiment import Experiment
from edgefl.host.capacity import TimeScale, UsageMeter, memory_limit_bytes
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import Child, end_child, exit_of, kill_tree
from edgefl.host.confinement import Enforcement, enforced
from edgefl.host.fork_server import ForkServer
from edgefl.host.memory import proportional_mib
from edgefl.host.process import handled, start_process, stops, stops_deferred
from edgefl.loading import code_change
from edgefl.parameters import checkpoint
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.processes import stopped_by
from edgefl.results import run_folder
from edgefl.results.result import Result
from edgefl.results.rows import MemoryUse
from edgefl.results.store import Store
from edgefl.results.tables import many
from edgefl.run import control
from edgefl.run.demands import at_recorded_scale, checked, shape_of, wall_scale
from edgefl.run.hidden import phones_secret
from edgefl.run.hosting import Hosts, ThisHost
from edgefl.run.view import RunView, described, make_view, verdict_of
from edgefl.run.web import with_page
from edgefl.strategies import resolve
from edgefl.terminal import printable

GRACE_S = 10.0
"""Time limit in seconds for the exit of a process; a process that takes longer is killed."""
LAST_CHECKPOINT_S = 3.0
"""Seconds for which a resume waits for the last checkpoint of a server whose supervisor was killed."""
MAX_DEATHS = 3
"""The run ends when the server or the zygote has died this many times in a row and no new version was made
in between."""


def run(
    experiment: Experiment,
    out: Path,
    quiet: bool = False,
    base: Path | None = None,
    web: socket.socket | None = None,
    *,
    workload: str | None = None,
    fork_server: ForkServer | None = None,
    hosts: Hosts | None = None,
    passing: bool = False,
) -> Result:
    """Run an experiment, write its files to the folder ``out``, and return the result.

    ``workload`` names a class that replaces `zygote.WORKLOAD`, for measurements.
    ``fork_server`` forks the processes of the run; without it, new interpreters are started.
    ``web`` is a socket from `edgefl.run.web.listening` on which the run is shown as a page.
    ``hosts`` are the hosts on which the clients or workers are started; by default, only this host.
    ``passing`` is True if the run is one of many: its panel on the terminal disappears when the run ends.

    Raises `ConfigError` before anything starts if the experiment cannot be run, `RunError` if the run fails,
    and KeyboardInterrupt after Ctrl-C; the run is then on disk and can be resumed, or is complete if the
    signal came at its end.
    """
    base, out = (base or Path.cwd()).absolute(), out.absolute()
    _require_text(base, out)
    here = ThisHost()
    hosts = hosts or here
    experiment = hosts.adapted(checked(experiment, base), base)
    with enforced(experiment) as enforcement, run_folder.new(out, config.dump(experiment)) as lock:
        run_folder.begin(out, base)
        view = with_page(make_view(experiment, quiet, passing), web, out)
        return _Supervisor(
            experiment, out, base, view, enforcement, lock, fork_server, here, hosts, workload=workload
        ).run()


def resume(
    folder: Path,
    quiet: bool = False,
    web: socket.socket | None = None,
    *,
    fork_server: ForkServer | None = None,
    hosts: Hosts | None = None,
    passing: bool = False,
) -> Result:
    """Resume the run in ``folder`` from its last checkpoint, or start it if it has not begun.

    If the run was killed after its end but before all results were written, write only the missing results.

    Raises `ConfigError` if no checkpoint can be read, the run is over, or another process is running it.
    """
    folder = folder.absolute()
    _require_text(folder)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(run_folder.held(folder, LAST_CHECKPOINT_S))
        run_folder.restore_experiment(folder)
        experiment = config.load(folder / run_folder.EXPERIMENT_FILE, recorded=True)
        enforcement = stack.enter_context(enforced(experiment))
        if missing := run_folder.missing_results(folder):
            with stops_deferred() as signals:
                write_results(folder, missing)
            if signals:
                raise KeyboardInterrupt
            return Result(folder)
        begun = run_folder.begun(folder)
        base = run_folder.base_of(folder, begun)
        here = ThisHost()
        hosts = hosts or here
        experiment = hosts.adapted(experiment, base)
        if begun:
            checkpoint.latest(folder / run_folder.CHECKPOINTS)
            experiment = at_recorded_scale(experiment, folder)
        else:
            run_folder.clear(folder)
            run_folder.begin(folder, base)
        view = with_page(make_view(experiment, quiet, passing), web, folder)
        return _Supervisor(
            experiment, folder, base, view, enforcement, lock, fork_server, here, hosts, resuming=begun
        ).run()


def _require_text(*folders: Path) -> None:
    """Raise `ConfigError` if a folder's name is not UTF-8; the record and the messages require UTF-8."""
    for folder in folders:
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            try:
                os.fsencode(folder).decode()
                what = "the name cannot be read in this locale; set LC_ALL=C.UTF-8"
            except UnicodeDecodeError:
                what = "the name is not UTF-8; use a folder whose name is UTF-8"
            raise ConfigError(f"{printable(str(folder))}: {what}") from None


def write_results(folder: Path, names: Collection[str] = run_folder.RESULTS) -> dict[str, Any]:
    """Write the results listed in ``names`` (summary, trace, report) from the record; return the summary."""
    from edgefl.results import report, summary, trace

    run_folder.forget_noise(folder)
    run_folder.remove_results(folder, names)
    found = summary.summarize(folder)
    writers: tuple[Callable[[Path], Path], ...] = (
        partial(summary.write_summary, summary=found),
        trace.write_trace,
        partial(report.write_report, summary=found),
    )
    for name, write in zip(run_folder.RESULTS, writers, strict=True):
        if name in names:
            write(folder)
    return found


class State(enum.Enum):
    """States of the supervisor; see the table in the module's docstring."""

    LOADING = enum.auto()
    ADOPTING = enum.auto()
    STARTING = enum.auto()
    SERVING = enum.auto()
    RESTARTING = enum.auto()
    LEAVING = enum.auto()
    ENDED = enum.auto()


CHANNELS = ("server", "zygote")
"""Names of the processes that the supervisor starts, in the order in which their messages are handled."""
HAS_LISTENED = {State.SERVING, State.RESTARTING, State.LEAVING}
HAS_PLAN = {State.STARTING, State.SERVING, State.LEAVING}
"""States in which the server has received its plan (`control.Serve`) and reads further messages."""


@dataclass(eq=False)
class _Supervisor:
    _experiment: Experiment
    _folder: Path
    _base: Path
    _view: RunView
    _enforcement: Enforcement
    _lock: int
    """The folder's lock (a descriptor). The server, which may briefly outlive this process, has it, too."""
    fork_server: ForkServer | None
    _here: ThisHost
    """This host. It runs the evaluator and, if it is the only host, all other peers."""
    _hosts: Hosts
    """The hosts that run the clients or workers."""
    resuming: bool = False
    workload: str | None = None

    def __post_init__(self) -> None:
        self._state = State.LOADING
        self._clients = fleet_of(self._experiment)
        self._strategy = resolve(self._experiment.strategy, [self._base])
        self._virtual = self._experiment.clock.kind == "virtual"
        self._all_hosts: list[Hosts] = list(dict.fromkeys((self._here, self._hosts)))
        self._workers = 0
        self._children: dict[str, Child] = {}
        self._channels: dict[str, Channel[Any]] = {}
        self._prepared: control.Prepared | None = None
        """The `Prepared` message of this host's zygote; None until it has arrived."""
        self._buffer: ParameterBuffer | None = None
        self._plan: control.Serve
        self._listening: control.Listening
        self._end: control.Finished
        self._pids: dict[tuple[control.Role, int], int] = {}
        self._memory = MemoryUse()
        self._usage = UsageMeter() if self.fork_server is None else UsageMeter(self.fork_server.cpu_s)
        self._measured_at_trips = 2 * len(self._clients)
        self._interrupts = 0
        self._restarts = self._deaths = self._died_at = 0
        """Number of restarts of the server, number of consecutive deaths without a new version, and model
        version at the last death."""
        self._broken = ""
        """Error message if the state is LEAVING because the zygote ended; otherwise ""."""
        self._uncleared: set[str] = set()
        """Names of hosts on which peers of a killed server may still be running."""
        self._wakeup = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)

    def run(self) -> Result:
        with contextlib.ExitStack() as shown:  # the view stays open to show the results' verdict
            self._run_processes(shown)
            self._view.judged = verdict_of(self._write_results())
        if self._broken:
            raise self._error(self._broken)
        if self._end.interrupted or self._interrupts:  # also if the run had ended before the signal came
            raise KeyboardInterrupt
        return Result(self._folder)

    def _run_processes(self, shown: contextlib.ExitStack) -> None:
        """Run all processes until the run has ended.

        The view is opened when the zygote and the server have started; closing ``shown`` closes the view.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_children)  # called last, after the channels are closed
            self._hosts.open(self._selector.fileno(), partial(self._view.say, at_once=True))
            stack.callback(lambda: self._hosts.close("" if self._state is State.ENDED else "interrupted"))
            stack.enter_context(handled(stops(), self._note_interrupt))
            stack.callback(self._close_channels)
            self._start_zygote()
            self._start("server", "server_process", control.FromServer)
            self._prepare()
            self._view.say("loading data and model")
            shown.enter_context(self._view)
            try:
                while self._state is not State.ENDED:
                    self._turn()
            finally:
                self._view.judged = control.NO_VERDICT

    def _write_results(self) -> dict[str, Any]:
        """Complete the record; write the summary, the report and the trace; return the summary."""
        try:
            with stops_deferred(self._interrupts) as signals:
                with Store(self._folder, create=False) as store:
                    usage = {**self._hosts.usage(self._usage.usage()), "load": self._plan.load}
                    for name in ("steal", "throttled", "load"):  # the worst of a resumed run's parts counts
                        parts = (store.meta(name), usage[name])
                        usage[name] = max((part for part in parts if part is not None), default=None)
                    if self._memory.shared_mib is not None:  # otherwise the figures of an earlier part remain
                        store.set_meta(memory=self._memory)
                    store.set_meta(**usage)
                    if rows := self._hosts.rows:
                        store.set_meta(nodes=[*(store.meta("nodes") or ()), *rows])
                found = write_results(self._folder)
            self._interrupts += len(signals)
            return found
        except (EdgeflError, OSError) as error:
            raise self._error(f"the run's summary, report or trace cannot be written: {error}") from error

    def _error(self, what: str) -> RunError:
        return RunError(f"{what}{run_folder.resume_hint(self._folder)}")

    # ---- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for messages and handle those that have arrived."""
        leaving = self._state is State.LEAVING
        channels = {name: self._channels[name] for name in CHANNELS if not (leaving and name == "zygote")}
        # The selector does not report messages that were already read while another message was being sent.
        unread = any(channel.waiting for channel in channels.values())
        timeout_s = self._hosts.wait(0.0 if unread else None)
        self._handle_all(self._hosts.receive(), self._hosts.name)
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], 64)
            self._interrupt()
        for name, channel in channels.items():
            if channel.fileno() not in ready and not channel.waiting:
                continue
            try:
                self._handle_all(channel.receive_ready(), name)
            except Closed:
                if self._state is not State.ENDED:
                    self._ended_early(name)

    def _handle_all(self, messages: Iterable[Any], sender: str) -> None:
        for message in messages:
            self._handle(message, sender)

    def _handle(
        self, message: control.FromZygote | control.FromServer | control.FromHosts, sender: str
    ) -> None:
        match message:
            case control.Prepared() if self._prepared is None:
                self._prepared = message
                expected = self._hosts.expect(message.fingerprint, message.host_step_s)
                self._handle_all(expected, self._hosts.name)
            case control.Prepared():  # a new zygote has loaded the user's code and data again
                if message.sizes() != self._plan.prepared.sizes():
                    raise self._error("the size of your model or of your data has changed: undo the change")
                self._plan = self._plan.with_code(message.code)
            case control.Gathered(hosts=count):
                if self._state is not State.LOADING:
                    self._grow()
                elif self._prepared and count >= self._hosts.wanted:
                    self._plan_run(self._prepared)
            case control.Adopted() if self._state is State.ADOPTING:
                self._serve(State.STARTING)
            case control.Cleared(restarts=restarts):
                if restarts == self._restarts:  # not the answer to an earlier restart
                    self._uncleared.discard(sender)
                    if not self._uncleared and self._state is State.RESTARTING:
                        self._pids.clear()
                        self._serve(State.SERVING)
            case control.Listening():
                self._listening = message
                if self._state is State.STARTING:
                    self._state = State.SERVING
                    self._usage.begin()
                self._spawn(control.EVALUATOR, 0, 0)
                for number in takewhile(lambda _: not self._interrupts, range(self._plan.workers)):
                    self._spawn(control.WORKER if self._virtual else control.CLIENT, number, 0)
            case control.Spawned(role=role, peer=peer, pid=pid):
                self._pids[role, peer] = pid
            case control.Departed(role=role, peer=peer):
                self._pids.pop((role, peer), None)
                if self._state in HAS_PLAN:
                    self._channels["server"].tell(message)
            case control.Progress():
                self._view.update(message)
                if message.trips >= self._measured_at_trips and message.connected is None:
                    self._measured_at_trips *= 8
                    self._memory = self._memory_now()
            case control.Replace(role=role, peer=peer, epoch=epoch):
                self._spawn(role, peer, epoch)
            case control.Expel(role=role):
                if (end := self._host_of(role).expel(message)) is not None:
                    self._handle(end, sender)
            case control.Finished():
                self._usage.end()
                self._view.no_progress = message.no_progress
                self._end, self._state = message, State.ENDED
            case Refused():
                raise ConfigError(message.message) if message.config else self._error(message.message)

    # ---- start and end of processes ------------------------------------------------------------

    def _start(self, name: str, module: str, incoming: Any, *arguments: str) -> Channel[Any]:
        child: Child
        environment, whole = dict(os.environ), f"edgefl.run.{module}"
        if self.fork_server is not None:
            child, channel = self.fork_server.start(whole, incoming, environment, *arguments)
        else:
            child, channel = start_process("edgefl.host.child", incoming, environment, whole, *arguments)
        self._children[name], self._channels[name] = child, channel
        self._selector.register(channel, selectors.EVENT_READ)
        return channel

    def _start_zygote(self) -> None:
        arguments = [self.workload] if self.workload else []
        self._here.zygote = self._start("zygote", "zygote", control.FromZygote, *arguments)

    def _prepare(self) -> None:
        prepare = control.Prepare(
            self._experiment,
            str(self._base),
            self._enforcement,
            fingerprint=self._hosts.compare,
            phones=phones_secret(self._experiment, self._folder, begun=self.resuming),
        )
        for host in self._all_hosts:
            host.prepare(prepare, same_bits=self._virtual)

    def _serve(self, state: State) -> None:
        """Send the server its plan (`control.Serve`), and change to ``state``."""
        assert self._buffer is not None
        self._channels["server"].tell(self._plan, self._buffer.fd, self._lock)
        self._state = state
        if self._interrupts:
            self._stop_serving()

    def _note_interrupt(self, number: int) -> None:
        """Handle a signal by waking up the loop."""
        self._interrupts += 1
        stopped_by.append(number)
        os.write(self._wakeup[1], b"!")

    def _interrupt(self) -> None:
        """Ask the server to stop. At the second interrupt, kill it. Before it listens, kill all processes."""
        if self._interrupts > 1 or self._state not in HAS_LISTENED:
            for name in ("server",) if self._state in HAS_LISTENED else CHANNELS:
                kill_tree(self._children[name])  # while it loads data, a zygote does not read its channel
            raise KeyboardInterrupt
        self._view.say("interrupted: writing a checkpoint (Ctrl-C again stops at once)")
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Ask the server for a final checkpoint; if the server has no plan yet, `_serve` will ask later."""
        if self._state in HAS_PLAN:
            self._channels["server"].tell(control.Interrupt())

    def _ended_early(self, name: str) -> None:
        """Continue after the server or the zygote has ended. Raises `RunError` if the run cannot continue."""
        end, state = exit_of(self._children[name], GRACE_S), self._state
        what = f"the {name} process {f'ended early ({end})' if end else 'closed its channel'}"
        running = state in (State.SERVING, State.RESTARTING)
        if running and end and end.signal and not (name == "zygote" and self._interrupts):
            self._restart(name, what)
        elif name == "zygote" and state is State.SERVING:
            self._broken, self._pids, self._state = what, {}, State.LEAVING
            self._selector.unregister(self._channels[name])
            self._view.say(f"{what}: writing a checkpoint")
            self._stop_serving()
        else:
            loading = name == "zygote" and state not in HAS_LISTENED
            when = " while it loaded the data and the model and tried to train" if loading else ""
            raise self._error(f"{what}{when}")

    def _restart(self, name: str, what: str) -> None:
        """Start a new server on the same buffer; send it the plan once no old peer can write to the buffer.

        If the zygote was killed, all clients have died with it. The server is then killed too, and its
        successor assigns the clients' tasks again.
        """
        if name == "zygote":
            self._children["server"].kill()
            self._children["server"].wait()
        assert self._buffer is not None
        version, under_way = self._buffer.latest[0], run_folder.resumable(self._folder)
        self._deaths = 1 if version > self._died_at else self._deaths + 1
        self._died_at = max(version, self._died_at)
        if self._deaths == MAX_DEATHS:
            raise self._error(f"{what}, {MAX_DEATHS} times in a row without a new version")
        self._restarts += 1
        self._state = State.RESTARTING
        self._view.restarted(f"{what}: starting it again")
        self._drop_channel("server")
        if name == "zygote":
            self._drop_channel(name)
            self._start_zygote()
        self._start("server", "server_process", control.FromServer)
        # The old server had begun to listen, so the buffer is valid. Under the virtual clock it is not used,
        # because the record may lag behind it.
        self._plan = msgspec.structs.replace(
            self._plan,
            resume=under_way,
            recover=under_way and not self._virtual,
            restarts=self._restarts,
            killed=name,
            workers=self._workers,
        )
        if name == "zygote":
            self._prepare()
            self._here.zygote.tell(control.Adopt(initialise=False), self._buffer.fd)
        self._uncleared = {host.name for host in self._all_hosts}
        for host in self._all_hosts:
            self._handle_all(host.clear(self._restarts), host.name)

    def _drop_channel(self, name: str) -> None:
        channel = self._channels.pop(name)
        self._selector.unregister(channel)
        channel.close()

    def _close_channels(self) -> None:
        for name in CHANNELS:
            if name in self._channels:
                self._channels[name].close()

    def _end_children(self) -> None:
        """Wait for the processes to exit; kill those that do not exit in time."""
        for child in self._children.values():
            end_child(child, GRACE_S)
        if self._buffer is not None:
            self._buffer.close()
        self._selector.close()
        for fd in self._wakeup:
            os.close(fd)

    # ---- the plan ------------------------------------------------------------------------------

    def _plan_run(self, prepared: control.Prepared) -> None:
        """Choose the time scale and the workers, create the buffer, and have the zygote write version 0."""
        self._workers = self._carried()
        shares = self._hosts.shares(self._workers)
        prepared = msgspec.structs.replace(prepared, host_step_s=max(share.step_s for share in shares))
        why = f"virtual clock: {many(self._workers, 'worker')}, nothing waits for a phone"
        scale = TimeScale(1.0, 0.0, 0.0, why, "fits")
        if not self._virtual:
            scale = wall_scale(self._experiment, self._strategy, prepared, shares)
        changed = code_change(run_folder.code_of(self._folder), prepared.code) if self.resuming else ""
        mixed = mixed_runtimes(self._experiment, self._clients)
        remark = "\n".join(filter(None, (changed, mixed, self._strategy.remark, prepared.remark)))
        self._view.describe(described(self._experiment, self._clients, prepared, scale, remark))
        self._plan = control.Serve(
            experiment=self._experiment,
            base=str(self._base),
            run_dir=str(self._folder),
            prepared=prepared,
            time_scale=scale.value,
            load=scale.load,
            workers=self._workers,
            resume=self.resuming,
            states=self._view.states,
            door=self._hosts.door,
        )
        shape = shape_of(
            self._experiment, self._strategy, prepared.size, len(self._clients), statistics=prepared.buffers
        )
        self._hosts.adopt(shape)
        self._buffer = ParameterBuffer.create(shape, most_bytes=memory_limit_bytes())
        run_folder.remove_results(self._folder)  # those of the part that was interrupted
        self._here.zygote.tell(control.Adopt(initialise=not self.resuming), self._buffer.fd)
        self._state = State.ADOPTING

    def _carried(self) -> int:
        """Return the number of workers or, under the wall clock, the number of clients."""
        workers = self._experiment.clock.workers
        return (workers or self._hosts.carries()) if self._virtual else len(self._clients)

    def _grow(self) -> None:
        """Start more workers if a host that has joined can run them."""
        if (workers := self._carried()) <= self._workers:
            return
        if self._state in HAS_PLAN:
            self._channels["server"].tell(control.Grow(self._workers, workers))
        else:
            self._plan = msgspec.structs.replace(self._plan, workers=workers)
        self._workers = workers
        self._view.say(f"{many(workers, 'worker')} from now on", at_once=True)

    # ---- peers ---------------------------------------------------------------------------------

    def _host_of(self, role: control.Role) -> Hosts:
        return self._here if role == control.EVALUATOR else self._hosts

    def _spawn(self, role: control.Role, peer: int, epoch: int) -> None:
        name, host = control.routing_id(role, peer, epoch), self._host_of(role)
        seat, scale = host.seat(self._listening, name), self._plan.time_scale
        password = control.password(self._listening.secret, name)
        host.spawn(control.Spawn(role, peer, epoch, seat.address, password, seat.server, scale, seat.key))

    def _memory_now(self) -> MemoryUse:
        assert self._buffer is not None
        peers = {who: mib for who, pid in self._pids.items() if (mib := proportional_mib(pid)) is not None}
        return MemoryUse(
            server_mib=proportional_mib(self._children["server"].pid),
            supervisor_mib=proportional_mib(os.getpid()),
            zygote_mib=proportional_mib(self._children["zygote"].pid),
            evaluator_mib=peers.get((control.EVALUATOR, 0)),
            shared_mib=self._buffer.shape.total_bytes / 2**20,
            clients_mib={number: mib for (role, number), mib in peers.items() if role != control.EVALUATOR},
        )
