"""The server's process: builds the parts of a new, resumed or recovered run, and runs the loop.

For a new run, it first writes the run's settings, fleet and host to the record.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from edgefl import failpoints, kernels
from edgefl.core import Core
from edgefl.core.deaths import Deaths
from edgefl.devices.dynamics import Dynamics, dynamics_of
from edgefl.devices.energy import PowerDraw, draw_of
from edgefl.devices.fleet import (
    ClientInfo,
    KnownClients,
    Trips,
    device_of,
    first_tasks,
    fleet_of,
    in_phase,
    kinds_of,
    masking_time_s,
    network_of,
)
from edgefl.devices.link import mean_mbps
from edgefl.devices.profiles import own_files
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError, EdgeflError, ProfileError, RunError, damaged, of_system
from edgefl.experiment import Experiment
from edgefl.host.capacity import host, most_workers
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.confinement import memory_mechanism
from edgefl.host.pacing import set_time_slice
from edgefl.host.process import allow_open_files, become_child, die_soon_after_parent
from edgefl.learning.attacks import attacking_clients
from edgefl.learning.operations import StepWork
from edgefl.learning.partition import Parts
from edgefl.loading import code_change, digests
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.privacy.source import Source, source_of
from edgefl.results.own_code import earlier_code
from edgefl.results.rows import ClientRow, EarlierCode, Resume, SecureCost
from edgefl.results.store import Store
from edgefl.results.tables import many
from edgefl.results.tail import Tail
from edgefl.run import control, messages, resume
from edgefl.run.aggregator import Aggregator
from edgefl.run.clock import Alarms, VirtualClock, WallClock
from edgefl.run.connection import ServerSocket
from edgefl.run.engine import Engine, WriteAhead
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Gate
from edgefl.run.hidden import HiddenSums, rules_of
from edgefl.run.peers import PeerLifecycle, Peers
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.server import ServerLoop
from edgefl.run.timeline import Restored, Timeline
from edgefl.run.transport import PART_BYTES, SERVER_ENDS
from edgefl.run.virtual import VirtualTimeline
from edgefl.run.wall import WallTimeline
from edgefl.sequences import LazySequence
from edgefl.strategies import hyperparameters, resolve
from edgefl.strategies.base import Client, Strategy
from edgefl.terminal import printable
from edgefl.zeromq import strangers

SPARE_DESCRIPTORS = 32
"""Number of file descriptors that the server needs in addition to its connections, for the record, the
checkpoints and ZeroMQ."""
YOUNG_OBJECTS = 10_000
"""Number of new objects that triggers a garbage collection."""
SOFTWARE = ("edgefl", "torch", "numpy", "numba", "pyzmq", "msgspec", "safetensors")


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-server")
    die_soon_after_parent()
    set_time_slice()
    allow_open_files()
    channel: Channel[control.ToServer] = Channel.inherit(channel_fd, control.ToServer)
    try:
        plan = channel.receive()
        assert isinstance(plan, control.Serve)
        failpoints.restarts = plan.restarts
        return _serve(channel, plan)
    except Closed:
        return 1


def build(
    channel: Channel[control.ToServer],
    plan: control.Serve,
    buffer: ParameterBuffer,
    store: Store,
    socket: ServerSocket,
    hidden: HiddenSums | None,
) -> ServerLoop:
    """Build the loop and the other parts of a new, resumed or recovered run."""
    experiment, prepared = plan.experiment, plan.prepared
    clients = fleet_of(experiment)
    strategy = resolve(experiment.strategy, [Path(plan.base)])
    source = source_of(experiment, Path(plan.run_dir), fresh=not (plan.resume or plan.recover))
    virtual, transport = experiment.clock.kind == "virtual", experiment.server.transport
    aggregator = Aggregator.of(experiment, strategy, buffer, prepared.size, source, prepared.buffers)
    aggregator.hidden = hidden
    aggregator.lends = transport == "shm" and not virtual and not plan.door
    trips = Trips(
        experiment,
        clients,
        control.column(prepared.examples),
        prepared.work,
        4 * buffer.shape.size,
        buffer.shape.update_bytes,
        transfers_apart=strategy.transfers_apart,
        first_tasks=first_tasks(experiment, strategy, len(clients)),
        rules=None if hidden is None else hidden.rules,
    )
    core = core_of(experiment, strategy, KnownClients(trips), source)
    if hidden is not None:
        hidden.online, hidden.reply_s = core.connected, trips.reply_s
    dynamics = dynamics_of(experiment, clients, trips)
    emulated_s = wall_s = 0.0
    if buffer.shape.tail:
        store.follow(Tail(buffer.tail))
    restored = _restored(plan, core, aggregator, store, dynamics)
    if restored is not None:
        last, emulated_s = restored.checkpoint, restored.emulated_s
        wall_s = last.wall_s + (0.0 if virtual else (emulated_s - last.emulated_s) * plan.time_scale)
    else:
        aggregator.begin()
        describe(store, plan, strategy, trips)
        store.set_meta(first_weights_sha256=buffer.weights_digest(aggregator.statistics))
    store.set_meta(status="running")
    if plan.resume:
        _record_code(store, _code(plan), emulated_s, core)
    if plan.resume and not plan.restarts:
        here = Resume(emulated_s, prepared.host_step_s, len(store.meta("nodes") or ()))
        store.set_meta(resumes=[*(store.meta("resumes") or ()), here])
    if plan.restarts:
        from_here = f"from version {core.version} with {many(len(core.held), 'held update')}"
        what = f"the {plan.killed} was killed: the run goes on {from_here}"
        store.incident(emulated_s, None, "restart", what)
    if _forbids_repetition(experiment):
        store.sync()  # if a power failure restored the status "interrupted", the run could be resumed twice
    else:
        store.commit()

    watch, gauge, alarms = Stopwatch("start"), Gauge(plan), Alarms()
    if restored is not None and restored.evaluated is not None:
        gauge.remember(restored.evaluated)
    peers = Peers(time.monotonic, socket, by_door=plan.door != "")
    gate = Gate(socket, SERVER_ENDS[transport](buffer), peers, aggregator, gauge, watch)
    evaluation = EvaluationQueue(aggregator, gate, peers, keep_all=virtual)
    instant = VirtualClock(emulated_s=emulated_s, wall_s=wall_s)
    clock = instant if virtual else WallClock(plan.time_scale, emulated_s=emulated_s, wall_s=wall_s)
    lifecycle = PeerLifecycle(peers, experiment, store, clock, alarms, channel)
    parts = (core, dynamics, aggregator, evaluation, peers, lifecycle, gate, store, trips)
    timeline: Timeline
    write_ahead = None
    if virtual:
        timeline = VirtualTimeline(experiment, instant, *parts, plan.workers)
    else:
        write_ahead = WriteAhead(store, aggregator, watch)
        timeline = WallTimeline(experiment, clock, *parts, write_ahead)
    engine = Engine(
        core,
        aggregator,
        store,
        timeline,
        evaluation,
        watch,
        dynamics,
        restored=aggregator.leases,
        running={} if restored is None else restored.tasks,
        write_ahead=write_ahead,
        exchange_bytes=0 if trips.rules is None else trips.rules.download_bytes,
        wait_s=trips.wait_s,
    )
    return ServerLoop(
        channel, plan, gate, timeline, engine, evaluation, peers, lifecycle, alarms, gauge, watch, restored
    )


@contextlib.contextmanager
def _hidden(plan: control.Serve, buffer: ParameterBuffer) -> Iterator[HiddenSums | None]:
    """Provide the run's `HiddenSums`, or None if the run does not use secure aggregation.

    The process that unmasks or decrypts sums ends when the context exits.
    """
    experiment, clients = plan.experiment, len(fleet_of(plan.experiment))
    strategy, secure = resolve(experiment.strategy, [Path(plan.base)]), experiment.server.secure
    rules = rules_of(experiment, strategy, plan.prepared.size, clients)
    if rules is None or secure is None:
        yield None
        return
    from edgefl.run.secure_process import SecureProcess

    with closing(SecureProcess(experiment, Path(plan.run_dir), clients, rules, buffer)) as process:
        yield HiddenSums(secure.kind, rules, process, experiment.seed, clients)


def core_of(experiment: Experiment, strategy: Strategy, clients: Sequence[Client], source: Source) -> Core:
    """Create the core of a run.

    If the privacy guarantee relies on the random choice of clients, this choice uses the seed of
    ``source``, which also makes the noise, so that it is as secret as the noise.
    """
    rules = experiment.privacy
    seed = source.seed if rules is not None and rules.mechanism == "gaussian" else experiment.seed
    deaths = Deaths(experiment.fleet.on_death, experiment.fleet.rejoin_s)
    return Core(strategy, clients, seed, experiment.stop, experiment.evaluation, rules, deaths)


def _restored(
    plan: control.Serve, core: Core, aggregator: Aggregator, store: Store, dynamics: Dynamics | None
) -> Restored | None:
    """Restore an interrupted run's state into these parts; return None for a new run.

    If an earlier server was killed before the run's first checkpoint, the run begins again. Events of that
    server, such as the death of a client that was starting, are then removed from the journal.
    """
    folder = Path(plan.run_dir)
    if plan.recover:
        return resume.recover(folder, core, aggregator, store, dynamics)
    if not plan.resume:
        if plan.restarts:
            store.truncate(0)
        return None
    if plan.restarts:
        aggregator.buffer.clear()
    return resume.restore(
        folder, core, aggregator, store, dynamics, once=_forbids_repetition(plan.experiment)
    )


def _code(plan: control.Serve) -> dict[str, str]:
    """Return the digests of the user's own code and files. Those of modules and files that this process has
    read itself are computed here, because they may have changed since the zygote read them."""
    return plan.prepared.code | digests(own_files(plan.experiment.fleet))


def _record_code(store: Store, code: dict[str, str], emulated_s: float, core: Core) -> None:
    """Record the digests of the user's own code with which a run continues; if the code has changed, record
    an incident too."""
    last = store.meta("code") or {}
    if change := code_change(last, code):
        since = f", from version {core.version} on, after {many(core.trips, 'trip')}"
        store.incident(emulated_s, None, "code", change + since)
    codes = msgspec.convert(store.meta("earlier_code") or [], list[EarlierCode])
    store.set_meta(code=code, earlier_code=earlier_code(codes, last, code, core.version, core.trips))


def _forbids_repetition(experiment: Experiment) -> bool:
    """Return True if a repeated version or trip would get different noise.

    The two results together would then reveal more about the clients' data.
    """
    rules = experiment.privacy
    if rules is None or experiment.clock.kind != "wall":
        return False
    return bool(rules.local_noise_multiplier or (rules.noise == "secure" and rules.noise_multiplier))


def describe(store: Store, plan: control.Serve, strategy: Strategy, trips: Trips) -> None:
    """Record the settings, fleet, data, model, software and host of a run before it starts."""
    experiment, prepared = plan.experiment, plan.prepared
    most, drawn = strategy.max_weight(len(trips.data.final)), strategy.sampling(len(trips.data.final))
    store.set_meta(
        name=experiment.name,
        edgefl=_version("edgefl"),
        created_unix_s=time.time(),
        strategy=str(experiment.strategy["name"]),
        strategy_fields=hyperparameters(strategy),
        remark=strategy.remark or "",
        in_phase=in_phase(experiment, strategy),
        privacy=experiment.privacy,
        sampling=None if drawn is None else (float(drawn[0]), drawn[1]),
        max_weight=None if most is None else float(most),
        clock=experiment.clock.kind,
        seed=experiment.seed,
        clients=len(trips.data.final),
        secure=_secure_cost(plan, trips),
        attackers=list(attacking_clients(experiment.fleet.attackers, len(trips.data.final), experiment.seed)),
        processes=plan.workers,
        transport=experiment.server.transport,
        time_scale=plan.time_scale,
        data=prepared.dataset,
        partition=experiment.data.partition,
        test_examples=prepared.test_examples,
        model=experiment.model.name,
        parameters=prepared.size,
        load=plan.load,
        throttle=experiment.fleet.throttle if experiment.clock.kind == "wall" else "",
        memory_mechanism=memory_mechanism(experiment),
        model_error_factor=_model_errors(plan, prepared.work.at(experiment.training.batch_size)),
        trip_s=trips.typical_s(),
        power=_power(plan),
        apart_s=_apart_s(plan, trips) if strategy.transfers_apart else {},
        uploads_on_demand=strategy.uploads_on_demand,
        host_step_s=prepared.host_step_s,
        host=host()._asdict(),
        software={"python": platform.python_version(), **{name: _version(name) for name in SOFTWARE}},
        code=_code(plan),
    )
    store.clients(_ClientRows(plan, trips))


def _secure_cost(plan: control.Serve, trips: Trips) -> SecureCost | None:
    """Return the bytes and seconds that secure aggregation adds to trips and versions.

    Return None if the run does not use secure aggregation.
    """
    rules, settings = trips.rules, plan.experiment.server.secure
    if rules is None or settings is None:
        return None
    seconds = {device.id: masking_time_s(device, rules) for _, device, _ in _networked(plan)}
    return SecureCost(settings, rules.step, rules.overhead_bytes, rules.held_bytes, seconds)


class _ClientRows(LazySequence[ClientRow]):
    """The clients' rows for the record; each row is created when it is read."""

    def __init__(self, plan: control.Serve, trips: Trips) -> None:
        self._experiment, self._trips, self._clients = plan.experiment, trips, fleet_of(plan.experiment)
        prepared = plan.prepared
        self._held_out, sizes = control.column(prepared.held_out), np.frombuffer(prepared.classes, np.int64)
        self._labels = Parts(np.frombuffer(prepared.labels, np.int64), sizes)
        self._alike = {kind: self._facts(info) for kind, info in kinds_of(self._clients).items()}

    def _facts(self, info: ClientInfo) -> tuple[bool, dict[str, Any]]:
        """Return whether the profile declares step times, and the row's fields that are the same for all
        clients of this profile and network."""
        device, network = device_of(self._experiment, info.client, info.profile), network_of(info.network)
        return device.time_model() is not None, {
            "profile": device.id,
            "network": network.id,
            "memory_mib": device.app_limit_mib,
            "down_mbps": mean_mbps(network.down),
            "up_mbps": mean_mbps(network.up),
        }

    def __len__(self) -> int:
        return len(self._clients)

    def make(self, index: int) -> ClientRow:
        info = self._clients[index]
        timed, alike = self._alike[info.profile, info.network]
        return ClientRow(
            client=index,
            examples=self._trips.data.final[index],
            test_examples=self._held_out[index],
            labels=tuple(self._labels[index].tolist()),
            step_s=self._trips.full_step_s(index) if timed else None,
            **alike,
        )


def _model_errors(plan: control.Serve, work: StepWork) -> dict[str, float]:
    """Return the model error factor of each profile that has one, for steps with this work."""
    factors = {device.id: device.model_error_factor(work) for _, device, _ in _networked(plan)}
    return {name: factor for name, factor in factors.items() if factor is not None}


def _networked(plan: control.Serve) -> Iterator[tuple[ClientInfo, Device, Network]]:
    """Yield one client for each pair of profile and network, with its device and network."""
    for info in kinds_of(fleet_of(plan.experiment)).values():
        yield info, device_of(plan.experiment, info.client, info.profile), network_of(info.network)


def _power(plan: control.Serve) -> dict[str, dict[str, PowerDraw]]:
    """Return the power that the fleet's devices draw, keyed by profile and network.

    Profiles without power figures are left out.
    """
    found: dict[str, dict[str, PowerDraw]] = {}
    for _, device, network in _networked(plan):
        with contextlib.suppress(ProfileError):
            if draw := draw_of(device, network):
                found.setdefault(device.id, {})[network.id] = draw
    return found


def _apart_s(plan: control.Serve, trips: Trips) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the seconds of a download and of an upload at mean rates, keyed by profile and network.

    Both are 0 unless the strategy schedules transfers separately from training.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for info, device, network in _networked(plan):
        found.setdefault(device.id, {})[network.id] = trips.apart_s(info)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _require_descriptors(peers: int, *, door: bool = False) -> None:
    """Raise RunError if this process may not open enough files for its connections to ``peers`` processes.

    Without this check, some peers would wait for a connection forever.
    """
    unknown = strangers.MAX_STRANGERS + strangers.SPARE_DESCRIPTORS if door else 0
    needed = psutil.Process().num_fds() + peers + SPARE_DESCRIPTORS + unknown
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > allowed:
        raise RunError(
            f"{peers} processes need {needed} open files, but the limit is {allowed}: raise it (ulimit -n)"
        )


def _serve(channel: Channel[control.ToServer], plan: control.Serve) -> int:
    # With more threads than the CPU quota allows, a sum would use up the quota early in each period, and the
    # whole run would then stop until the next period.
    kernels.set_threads(min(kernels.threads(), most_workers()))
    try:
        _require_descriptors(plan.workers + 1, door=bool(plan.door))
        buffer = ParameterBuffer.attach(channel.descriptor())
        channel.descriptor()  # the folder's lock, held until this process ends
        largest_bytes = max(messages.MAX_HEADER_BYTES, PART_BYTES, 4 * buffer.shape.size + 4096)
        with (
            kernels.page_locked(buffer.memory, plan.experiment.server.kernel_backend),
            Store(Path(plan.run_dir), create=False) as store,
            closing(ServerSocket(largest_bytes, plan.door)) as socket,
            _hidden(plan, buffer) as hidden,
        ):
            with damaged(plan.run_dir) if plan.resume else nullcontext():
                loop = build(channel, plan, buffer, store, socket, hidden)
            # Exclude the objects that live as long as the run from garbage collection, and collect rarely.
            gc.freeze()
            gc.set_threshold(YOUNG_OBJECTS)
            loop.run()
    except (EdgeflError, OSError) as error:
        what = str(error)
        if isinstance(error, OSError):
            what = f"the run's folder cannot be written: {of_system(error)}"
        channel.send(Refused(printable(what), config=isinstance(error, ConfigError)))
        return 1
    return 0
