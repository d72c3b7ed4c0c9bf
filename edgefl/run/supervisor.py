"""The supervisor: starts every process of a run, owns the shared memory, watches, and cleans up.

    Prepared   the zygote has loaded data and model: choose the time scale, make the parameter buffer
    Adopted    the first model lies in the buffer: tell the server what to serve
    Listening  the server calls its peers: fork the fleet
    Finished   the record is complete: end everything, write summary, report and trace

It is one loop over two channels. Whatever ends it, an error, Ctrl-C or the run's own end, the same path
closes everything.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from edgefl import config
from edgefl.devices.fleet import any_exact, first_tasks, fleet_of, mixed_runtimes
from edgefl.errors import ConfigError, EdgeflError, RunError
from edgefl.experiment import Experiment
from edgefl.host.capacity import (
    TRIP_OVERHEAD_S,
    Burst,
    Demand,
    TimeScale,
    UsageMeter,
    choose_time_scale,
    memory_limit_bytes,
)
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import Child, end_child, exit_of
from edgefl.host.confinement import Enforcement, enforced
from edgefl.host.fork_server import ForkServer
from edgefl.host.memory import proportional_mib
from edgefl.host.process import start_process, stops
from edgefl.parameters import checkpoint
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.processes import stopped_by, usable_cores
from edgefl.results import run_folder
from edgefl.results.record import MemoryUse
from edgefl.results.result import Result
from edgefl.results.store import Store
from edgefl.results.tables import many
from edgefl.run import control
from edgefl.run.demands import checked, shape_of
from edgefl.run.nodes import Nodes, on_nodes
from edgefl.run.view import RunView, make_view
from edgefl.run.web import with_page
from edgefl.strategies import resolve
from edgefl.terminal import printable, say

GRACE_S = 10.0
"""Time that a process is given to leave before it is killed."""
LAST_CHECKPOINT_S = 3.0
"""Time that a resume waits for the server of a killed supervisor, which writes its last checkpoint."""
MOST_DEATHS = 3
"""A server or zygote that is killed so often without a new version ends the run."""


def run(
    experiment: Experiment,
    out: Path,
    quiet: bool = False,
    base: Path | None = None,
    web: socket.socket | None = None,
    *,
    workload: str | None = None,
    fork_server: ForkServer | None = None,
    nodes: Nodes | None = None,
    passing: bool = False,
) -> Result:
    """Run an experiment into the folder ``out``; returns its result.

    ``workload`` names another class for what the clients compute than `zygote.WORKLOAD`, for measurements.
    A ``fork_server`` starts the run's processes warm.
    ``web`` is a socket of `edgefl.run.web.listening` on which the run is shown as a page while it goes on.
    With ``nodes`` its clients or workers are all on those, and none here.
    A ``passing`` run is one of many: on a terminal it is watched while it goes on, and leaves nothing there.

    Raises `ConfigError` before anything starts where the experiment cannot be done, `RunError` where a run
    could not go on, and KeyboardInterrupt after Ctrl-C, once the run is on disk and can be resumed.
    """
    base = (base or Path.cwd()).absolute()
    _require_text(base, out)
    experiment = checked(experiment, base)
    if nodes is not None:
        experiment = on_nodes(experiment, base)
    out = out.absolute()
    with enforced(experiment) as enforcement, run_folder.new(out, config.dump(experiment)) as lock:
        run_folder.begin(out, base)
        view = with_page(make_view(experiment, quiet, passing), web, out)
        return _Supervisor(
            experiment, out, base, view, enforcement, lock, fork_server, nodes, workload=workload
        ).run()


def resume(
    folder: Path,
    quiet: bool = False,
    web: socket.socket | None = None,
    *,
    fork_server: ForkServer | None = None,
    nodes: Nodes | None = None,
    passing: bool = False,
) -> Result:
    """Carry on with the run in ``folder`` from its last checkpoint, or start it if it has not begun.

    Of a run that was killed between its end and its summary the results that are missing are written.

    Raises `ConfigError` if no checkpoint can be read, if the run is over, or if another process is at it.
    """
    folder = folder.absolute()
    _require_text(folder)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(run_folder.held(folder, LAST_CHECKPOINT_S))
        run_folder.restore_experiment(folder)
        experiment = config.load(folder / run_folder.EXPERIMENT_FILE, recorded=True)
        enforcement = stack.enter_context(enforced(experiment))
        if missing := run_folder.missing_results(folder):
            write_results(folder, missing)
            return Result(folder)
        begun = run_folder.begun(folder)
        base = run_folder.base_of(folder, begun)
        if nodes is not None:
            experiment = on_nodes(experiment, base)
        if begun:
            checkpoint.latest(folder / run_folder.CHECKPOINTS)
            run_folder.remove_results(folder)
        else:
            run_folder.clear(folder)
            run_folder.begin(folder, base)
        view = with_page(make_view(experiment, quiet, passing), web, folder)
        return _Supervisor(
            experiment, folder, base, view, enforcement, lock, fork_server, nodes, resuming=begun
        ).run()


def _require_text(*folders: Path) -> None:
    """`ConfigError` for a folder whose name neither a record nor a message can hold."""
    for folder in folders:
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            try:
                os.fsencode(folder).decode()
                what = "a name that this locale cannot read; set LC_ALL=C.UTF-8"
            except UnicodeDecodeError:
                what = "a name that is not UTF-8, expected one that is"
            raise ConfigError(f"{printable(str(folder))}: {what}") from None


def write_results(folder: Path, names: Collection[str] = run_folder.RESULTS) -> None:
    """Write those of the run's results from its record: summary, timeline, report."""
    from edgefl.results import report, summary, trace

    run_folder.forget_noise(folder)
    for name, write in zip(
        run_folder.RESULTS, (summary.write_summary, trace.write_trace, report.write_report), strict=True
    ):
        if name in names:
            write(folder)


@dataclass(eq=False)
class _Supervisor:
    _experiment: Experiment
    _folder: Path
    _base: Path
    _view: RunView
    _enforcement: Enforcement
    _lock: int
    """Descriptor of the folder's lock: the server, which may live a little longer, has it too."""
    fork_server: ForkServer | None
    nodes: Nodes | None
    resuming: bool = False
    workload: str | None = None

    def __post_init__(self) -> None:
        experiment, base = self._experiment, self._base
        self._clients = fleet_of(experiment)
        self._strategy = resolve(experiment.strategy, [base])
        self._virtual = experiment.clock.kind == "virtual"
        self._workers = (experiment.clock.workers or usable_cores()) if self._virtual else len(self._clients)
        self._children: dict[str, Child] = {}
        self._zygote: Channel[control.FromZygote]
        self._server: Channel[control.FromServer]
        self._prepared: control.Prepared | None = None
        """The answer of this host's zygote."""
        self._buffer: ParameterBuffer | None = None
        self._plan: control.Serve
        self._listening: control.Listening | None = None
        """The server is there, and says how its peers are to wait for it."""
        self._pids: dict[tuple[control.Role, int], int] = {}
        self._memory = MemoryUse()
        self._usage = UsageMeter() if self.fork_server is None else UsageMeter(self.fork_server.cpu_s)
        self._measured_at_trips = 2 * len(self._clients)
        self._interrupts = 0
        self._restarts = self._deaths = self._died_at = 0
        """Restarts of the server; deaths in a row without a new version, and the version at the last."""
        self._serving = False
        """The server has its plan, and hears of what happens."""
        self._broken = ""
        """The end of a process that the run cannot go on without, while the server leaves a checkpoint."""
        self._wakeup = os.pipe()
        self._uncleared: set[str] = set()
        """Zygote and nodes that may still host peers of a killed server."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        self._end: control.Finished | None = None

    def run(self) -> Result:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_children)  # last: the channels are closed by then
            if (nodes := self.nodes) is not None:
                nodes.watch(self._selector.fileno())
                nodes.say = partial(self._view.say, at_once=True)
                if nodes.invitation:
                    say(nodes.invitation, err=True)
                stack.callback(lambda: nodes.close("" if self._end else "interrupted"))
            stack.enter_context(self._signals())
            self._start_zygote()
            stack.callback(lambda: self._zygote.close())
            self._start_server()
            stack.callback(lambda: self._server.close())
            self._prepare()
            self._view.say("loading data and model")
            stack.enter_context(self._view)
            end = self._loop()
        try:
            with Store(self._folder, create=False) as store:
                usage = self._usage.usage()
                if self.nodes is not None:
                    usage = self.nodes.conditions(usage)
                    store.set_meta(nodes=self.nodes.rows)
                store.set_meta(memory=self._memory, **usage)
            write_results(self._folder)
        except (EdgeflError, OSError) as error:
            way_on = run_folder.way_on(self._folder) if end.interrupted else ""
            what = "the run's summary, report or trace cannot be written"
            raise RunError(f"{what}: {error}{way_on}") from error
        if self._broken:
            raise RunError(f"{self._broken}{run_folder.way_on(self._folder)}")
        if end.interrupted:
            raise KeyboardInterrupt
        return Result(self._folder)

    def _loop(self) -> control.Finished:
        while self._end is None:
            channels: dict[str, Channel[Any]] = {"server": self._server}
            if not self._broken:
                channels["zygote"] = self._zygote
            # The sockets do not tell of messages that were taken in while another was being sent.
            unheard = any(channel.waiting for channel in channels.values())
            if self.nodes is not None:
                self.nodes.wait(0 if unheard else None)
                self._hear_nodes(self.nodes.heard())
            ready = {key.fd for key, _ in self._selector.select(0 if unheard or self.nodes else None)}
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 64)
                self._interrupted()
            for name, channel in channels.items():
                if channel.fileno() not in ready and not channel.waiting:
                    continue
                try:
                    for message in channel.receive_ready():
                        self._take(message, name)
                except Closed:
                    if self._end is None:
                        self._ended_early(name)
        return self._end

    def _hear_nodes(self, said: Iterator[control.FromNodes]) -> None:
        for message in said:
            self._take(message, "nodes")

    def _interrupted(self) -> None:
        """Ctrl-C: have the server end the run; a second one ends it without a checkpoint."""
        if self._interrupts > 1 or self._listening is None:
            self._children["server"].kill()
            raise KeyboardInterrupt
        self._view.say("interrupted: writing a checkpoint (again to stop at once)")
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Have the server leave a checkpoint, as soon as it hears."""
        if self._serving and (self._interrupts or self._broken):
            self._server.tell(control.Interrupt("interrupted"))

    def _ended_early(self, name: str) -> None:
        """Go on without a process that has ended. `RunError` where that cannot be done."""
        end = exit_of(self._children[name], 1.0)
        killed = end is not None and bool(end.signal)
        what = f"the {name} process {f'ended early ({end})' if end else 'closed its channel'}"
        if killed and self._listening and not self._broken and not (name == "zygote" and self._interrupts):
            self._restart(name, what)
        elif name == "zygote" and self._listening and self._serving:
            self._broken, self._pids = what, {}
            self._selector.unregister(self._zygote)
            self._view.say(f"{what}: writing a checkpoint")
            self._stop_serving()
        else:
            loading = name == "zygote" and self._listening is None
            when = " while it loaded data and model and tried the training" if loading else ""
            raise RunError(f"{what}{when}{run_folder.way_on(self._folder)}")

    def _start_server(self) -> None:
        self._server = self._start("server", "server_process", control.FromServer)

    def _start_zygote(self) -> None:
        arguments = [self.workload] if self.workload else []
        self._zygote = self._start("zygote", "zygote", control.FromZygote, *arguments)

    def _prepare(self) -> None:
        on_nodes = self.nodes is not None
        prepare = control.Prepare(self._experiment, str(self._base), self._enforcement, nodes=on_nodes)
        self._zygote.tell(prepare)
        if self.nodes is not None:
            self.nodes.prepare(prepare, same_bits=self._virtual)

    def _restart(self, name: str, what: str) -> None:
        """Start another server on the same buffer, as soon as nobody writes into that any more.

        Where the zygote was killed all clients are dead with it: another one is started too, and the server
        ended, whose successor gives the clients' tasks again.
        """
        if name == "zygote":
            self._children["server"].kill()
            self._children["server"].wait()
        assert self._buffer is not None
        version, under_way = self._buffer.latest[0], run_folder.resumable(self._folder)
        self._deaths = 1 if version > self._died_at else self._deaths + 1
        self._died_at = max(version, self._died_at)
        if self._deaths == MOST_DEATHS:
            often = f"{MOST_DEATHS} times in a row without a new version"
            raise RunError(f"{what}, {often}{run_folder.way_on(self._folder)}")
        self._restarts += 1
        self._view.restarted(f"{what}: starting it again")
        self._end_channel(self._server)
        if name == "zygote":
            self._end_channel(self._zygote)
            self._start_zygote()
        self._serving = False
        self._start_server()
        # A server has listened, so the buffer is whole. Under the virtual clock no record is kept up with it.
        recover = under_way and not self._virtual
        self._plan = msgspec.structs.replace(
            self._plan,
            resume=under_way,
            recover=recover,
            restarts=self._restarts,
            killed=name,
            workers=self._workers,
        )
        if name == "zygote":
            self._prepare()
            self._zygote.tell(control.Adopt(initialise=False), self._buffer.fd)
        self._uncleared = {"zygote"}
        self._zygote.tell(control.Clear(self._restarts))
        if self.nodes is not None:
            self._uncleared.add("nodes")
            self._hear_nodes(self.nodes.clear(self._restarts))

    def _end_channel(self, channel: Channel[Any]) -> None:
        self._selector.unregister(channel)
        channel.close()

    def _serve(self) -> None:
        """Tell the server what to serve."""
        assert self._buffer is not None
        self._server.tell(self._plan, self._buffer.fd, self._lock)
        self._serving = True
        self._stop_serving()

    def _take(
        self, message: control.FromZygote | control.FromServer | control.FromNodes, sender: str
    ) -> None:
        match message:
            case control.Prepared() if self._prepared is None:
                self._prepared = message
                if self.nodes is None:
                    self._plan_run(message)
                else:
                    self._hear_nodes(self.nodes.expect(message.fingerprint))
            case control.Gathered(nodes=count):
                if self._buffer is not None:
                    self._grow()
                elif self._prepared and self.nodes and count >= self.nodes.wanted:
                    self._plan_run(self._prepared)
            case control.Adopted() if self._listening is None:
                self._serve()
            case control.Cleared(restarts=restarts):
                if restarts == self._restarts:  # and the server was not killed again meanwhile
                    self._uncleared.discard(sender)
                    if not self._uncleared and not self._serving:
                        self._pids.clear()
                        self._serve()
            case control.Listening():
                if self._listening is None:
                    self._usage.begin()
                self._listening = message
                self._spawn(control.EVALUATOR, 0, 0)
                for number in range(self._plan.workers):
                    self._spawn(control.WORKER if self._virtual else control.CLIENT, number, 0)
            case control.Spawned(role=role, peer=peer, pid=pid):
                self._pids[role, peer] = pid
            case control.Departed(role=role, peer=peer):
                self._pids.pop((role, peer), None)
                if self._serving:
                    self._server.tell(message)
            case control.Progress():
                self._view.update(message)
                if message.trips >= self._measured_at_trips and message.connected is None:
                    self._measured_at_trips *= 8
                    self._memory = self._memory_now()
            case control.Replace(role=role, peer=peer, epoch=epoch):
                self._spawn(role, peer, epoch)
            case control.Expel(role=role):
                if (nodes := self._nodes_of(role)) is None:
                    self._zygote.tell(message)
                elif (end := nodes.expel(message)) is not None:
                    self._take(end, "nodes")
            case control.Finished():
                self._usage.end()
                self._view.no_progress = message.no_progress
                self._end = message
            case Refused():
                if message.config:
                    raise ConfigError(message.message)
                raise RunError(f"{message.message}{run_folder.way_on(self._folder)}")

    def _carried(self) -> int:
        """The workers that the nodes host, where nobody said how many the run has; else as many as it has."""
        if self.nodes is None or not self._virtual or self._experiment.clock.workers is not None:
            return self._workers
        return sum(node.about.workers for node in self.nodes.agreed)

    def _grow(self) -> None:
        """Have as many workers as the nodes host now, if that is more."""
        if (workers := self._carried()) <= self._workers:
            return
        if self._serving:
            self._server.tell(control.Grow(self._workers, workers))
        else:
            self._plan = msgspec.structs.replace(self._plan, workers=workers)
        self._workers = workers
        self._view.say(f"{many(workers, 'worker')} from now on", at_once=True)

    def _plan_run(self, prepared: control.Prepared) -> None:
        """Have the server told what to serve, once the zygote has the parameter buffer."""
        self._workers = self._carried()
        if self.nodes is not None:
            step_s = max(node.host_step_s for node in self.nodes.agreed)
            prepared = msgspec.structs.replace(prepared, host_step_s=step_s)
        why = f"virtual clock: {many(self._workers, 'worker')}, nothing waits for a phone"
        scale = TimeScale(1.0, 0.0, 0.0, why, "fits") if self._virtual else self._wall_scale(prepared)
        remarks = mixed_runtimes(self._experiment, self._clients), self._strategy.remark, prepared.remark
        self._view.describe(self._clients, prepared, scale, "\n".join(filter(None, remarks)))
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
            door="" if self.nodes is None else self.nodes.for_peers,
        )
        shape = shape_of(self._experiment, self._strategy, prepared.size, len(self._clients))
        if self.nodes is not None:
            self.nodes.adopt(shape)
        self._buffer = ParameterBuffer.create(shape, most_bytes=memory_limit_bytes())
        self._zygote.tell(control.Adopt(initialise=not self.resuming), self._buffer.fd)

    def _wall_scale(self, prepared: control.Prepared) -> TimeScale:
        """The time scale that the host carries, or each of the nodes."""
        if self.nodes is None:
            return self._scale(prepared, range(len(self._clients)), prepared.host_step_s)
        found = [
            (self._scale(prepared, its, node.host_step_s, node.cores), node.name)
            for node, its in self.nodes.shares(len(self._clients))
            if its
        ]
        scale, name = max(found, key=lambda one: (one[0].value, one[0].load))
        if scale.value != 1.0 and any(node.about.as_is for node in self.nodes.agreed):
            raise ConfigError(
                f"clock.time_scale: must be 1 with a device as it is, got {scale.value:g} ({scale.why})"
            )
        return scale._replace(why=f"{scale.why} (node {name})")

    def _scale(
        self, prepared: control.Prepared, clients: Sequence[int], step_s: float, cores: float | None = None
    ) -> TimeScale:
        fleet, clients_in_all = self._experiment.fleet, len(self._clients)
        waits = first_tasks(self._experiment, self._strategy, clients_in_all) and not any_exact(self._clients)
        spread = fleet.join_spread_s or waits
        demands = []
        for trip in (prepared.first_trips[client] for client in clients):
            cpu_s = trip.steps * step_s
            burst = Burst(cpu_s, trip.down_s, trip.compute_s)
            demands.append(Demand(cpu_s + TRIP_OVERHEAD_S, trip.total_s, burst))
        return choose_time_scale(
            demands,
            cores=cores,
            scale=self._experiment.clock.time_scale,
            active=self._strategy.max_training(clients_in_all),
            together="always" if self._strategy.lockstep else "never" if spread else "at first",
        )

    def _spawn(self, role: control.Role, peer: int, epoch: int) -> None:
        server, name, nodes = self._listening, control.routing_id(role, peer, epoch), self._nodes_of(role)
        assert server is not None
        password, scale = control.password(server.secret, name), self._plan.time_scale
        if nodes is None:
            where = control.address(server.root, server.secret, name)
            self._zygote.tell(control.Spawn(role, peer, epoch, where, password, server.pid, scale))
        else:
            spawn = control.Spawn(role, peer, epoch, server.door, password, 0, scale, server.key)
            nodes.spawn(spawn)

    def _nodes_of(self, role: control.Role) -> Nodes | None:
        """The nodes, if peers in this role are on them; else None."""
        return None if role == control.EVALUATOR else self.nodes

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

    def _start(self, name: str, module: str, incoming: Any, *arguments: str) -> Channel[Any]:
        child: Child
        environment, whole = dict(os.environ), f"edgefl.run.{module}"
        if self.fork_server is not None:
            child, channel = self.fork_server.start(whole, incoming, environment, *arguments)
        else:
            child, channel = start_process("edgefl.host.child", incoming, environment, whole, *arguments)
        self._children[name] = child
        self._selector.register(channel, selectors.EVENT_READ)
        return channel

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn Ctrl-C, SIGTERM and a closed terminal (without ``nohup``) into an orderly end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: object) -> None:
            if number == signal.SIGHUP and self._interrupts:
                return  # shell and kernel both say that a terminal has closed: nobody asks again
            self._interrupts += 1
            stopped_by.append(number)
            os.write(self._wakeup[1], b"!")

        before = {number: signal.signal(number, note) for number in stops()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_children(self) -> None:
        """Wait for the processes to leave; kill those that do not."""
        for child in self._children.values():
            end_child(child, GRACE_S)
        if self._buffer is not None:
            self._buffer.close()
        self._selector.close()
        for fd in self._wakeup:
            os.close(fd)
