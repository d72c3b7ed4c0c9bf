"""Test a strategy in memory. A run uses the real core, emulated time and models of a few numbers, and takes
milliseconds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgefl import experiment
from edgefl.core import Core
from edgefl.core import events as core_events
from edgefl.core.deaths import consequence
from edgefl.core.strategy_calls import check_answers, combined
from edgefl.errors import ConfigError, RunError
from edgefl.kernels import steps as optimizer
from edgefl.privacy.mechanism import Mechanism
from edgefl.privacy.source import Seeded
from edgefl.seeds import stream
from edgefl.strategies.base import Client, Strategy, TripInputs, Update, VectorSum
from edgefl.strategies.rows import Rows
from edgefl.validation import require, whole

Vector = npt.NDArray[Any]
Durations = Callable[[int, int], float] | Sequence[float]
Training = Callable[[int, Vector, int], Vector]
Trip = Callable[[int, Vector, int, TripInputs], Vector]


class TripFails(Exception):
    """The exception that a ``train`` or ``trip`` function of `run_in_memory` raises to make a trip fail."""


def fleet(clients: int, examples: int = 100) -> list[Client]:
    """Return a list of ``clients`` identical devices.

    >>> [(device.client, device.examples) for device in fleet(2)]
    [(0, 100), (1, 100)]
    """
    clients, examples = whole("clients", clients, 0), whole("examples", examples, 0)
    return [Client(client, "test", examples) for client in range(clients)]


def towards_own_number(client: int, model: Vector, trip: int) -> Vector:
    """Take one gradient step of size 0.1 on ½‖w − client‖². At the minimum for client i, every weight equals
    i."""
    return np.asarray(model + 0.1 * (client - model))


@dataclass
class MemoryRun:
    """A record of everything that happened in a run."""

    models: list[Vector]
    """The model of each version."""
    sums: list[tuple[core_events.Sum, tuple[Update, ...]]] = field(default_factory=list)
    """Each ``Sum`` action that created a version, with the updates in it."""
    history: list[tuple[core_events.Event, list[core_events.Action]]] = field(default_factory=list)
    """Each event and the actions with which the core responded, in chronological order."""
    fates: dict[int, str] = field(default_factory=dict)
    """Fate of each task, as given by the task's ``Release`` action, keyed by task."""
    owners: dict[int, int] = field(default_factory=dict)
    """Client of each task, keyed by task."""
    evaluated: list[int] = field(default_factory=list)
    """Versions for which an evaluation was requested."""
    vectors: list[dict[str, Vector]] = field(default_factory=list)
    """For each version, the vectors that the strategy exchanges with clients and the vectors that only the
    server keeps, keyed by name."""
    kept: dict[int, Mapping[str, Vector]] = field(default_factory=dict)
    """Vectors that each client keeps at the end of the run, keyed by client."""

    @property
    def events(self) -> list[core_events.Event]:
        return [event for event, _ in self.history]

    @property
    def actions(self) -> list[core_events.Action]:
        return [action for _, actions in self.history for action in actions]


def run_in_memory(
    core: Core,
    durations: Durations,
    *,
    model: Vector | None = None,
    train: Training = towards_own_number,
    steps: int | Sequence[int] = 1,
    lr: float = 0.1,
    trip: Trip | None = None,
    events: Iterable[core_events.Event] = (),
    join: bool = True,
    accuracy: Callable[[Vector], float] | None = None,
    max_events: int = 1_000_000,
) -> MemoryRun:
    """Run ``core`` until it stops, in a discrete-event simulation that trains small vectors.

    ``durations`` gives the emulated seconds of a trip: one number for each client, or a function
    ``durations(client, trip)``. ``train(client, model, trip)`` takes one local step and returns the resulting
    model, with the shape and the dtype of ``model`` (by default a single float64 zero). A trip consists of
    ``steps`` steps of equal duration, unless `Until.steps` sets another number; ``steps`` is one number for
    all clients, or one number for each client. ``lr`` is the learning rate of these steps; it scales the
    terms that `Strategy.local_rule` adds to the gradient.

    If a strategy trains in its own way, ``trip(client, model, trip, given)`` replaces all steps of a trip and
    modifies ``given``, the trip's `TripInputs`. If ``train`` or ``trip`` raises `TripFails`, the trip fails
    at its end (with local noise, an update of zeros arrives). ``events`` are additional events, such as
    `Left`, each of which contains its time. After a `Died` event, the client joins again when the core allows
    it, if ever. If ``join`` is True, all clients join at 0 s. Simultaneous events are handled in the order of
    client ids.

    Raises `ConfigError` if ``durations`` or ``steps`` has a wrong length, `RunError` if no event is left or
    if there are more than ``max_events``, and `AssertionError` if the core breaks a rule, such as giving two
    tasks to one client.

    >>> from edgefl.strategies.fedavg import FedAvg
    >>> core = Core(FedAvg(cohort=2), fleet(2), seed=0, stop=experiment.Stop(versions=2))
    >>> [float(model[0]) for model in run_in_memory(core, durations=[1.0, 3.0]).models]
    [0.0, 0.05, 0.095]
    >>> core.now_s
    6.0
    """
    first: Any = np.zeros(1) if model is None else model
    require("core", core, isinstance(core, Core), "a Core")
    vector = isinstance(first, np.ndarray) and first.ndim == 1 and first.dtype.kind == "f"
    require("model", model, vector, "a one-dimensional array of floating-point numbers, or None")
    timed = callable(durations) or _is_list(durations)
    require("durations", durations, timed, "a list of seconds or a function")
    counted = isinstance(steps, Integral) or _is_list(steps)
    require("steps", steps, counted, "a whole number or a list of whole numbers")
    require("lr", lr, isinstance(lr, Real), "a number")
    require("events", events, isinstance(events, Iterable), "a list of events")
    require("train", train, callable(train), "a function")
    for name, function in (("trip", trip), ("accuracy", accuracy)):
        require(name, function, function is None or callable(function), "a function or None")
    max_events = whole("max_events", max_events, 1)
    each: list[int] = list(steps) if isinstance(steps, Sequence | np.ndarray) else [steps] * len(core.devices)
    for what, given in (("durations", durations), ("steps", each)):
        if not callable(given) and len(given) != len(core.devices):
            raise ConfigError(
                f"{what}: must be one number for each of {len(core.devices)} clients, got {len(given)}"
            )
    executor = _Executor(core, durations, MemoryRun(models=[first]), train, each, lr, trip, accuracy)
    joined = [core_events.Joined(device.client, 0.0) for device in core.devices] if join else []
    return executor.run((*joined, *events), max_events)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)


@dataclass
class _Executor:
    """Carries out the core's actions in memory, in place of the server, the clients and the kernels."""

    core: Core
    durations: Durations
    result: MemoryRun
    train: Training
    steps: list[int]
    lr: float
    trip: Trip | None
    accuracy: Callable[[Vector], float] | None
    queue: list[tuple[float, int, int, core_events.Event]] = field(default_factory=list)
    queued: int = 0
    in_flight: dict[int, core_events.Train] = field(default_factory=dict)
    updates: dict[int, Vector] = field(default_factory=dict)
    trips: dict[int, TripInputs] = field(default_factory=dict)
    doomed: dict[int, str] = field(default_factory=dict)
    """The reason for each task whose client has died, in a run with ``[privacy]``. Such a task fails only at
    the time at which its update would have arrived."""

    def __post_init__(self) -> None:
        strategy, first = self.core.strategy, self.result.models[0]
        names = (*strategy.vectors, *strategy.server_vectors)
        self.result.vectors.append({name: np.zeros_like(first) for name in names})
        self.optimizer = self.core.strategy.optimizer()
        rules, most = self.core.privacy, self.core.strategy.max_weight(len(self.core.devices))
        self.privacy = None if rules is None else Mechanism(rules, most or 0.0, Seeded(self.core.seed))
        settings = self.core.rules
        self.protects = settings is not None and settings.local_noise_multiplier > 0
        """True if the rules ask clients to add noise. No noise is added here, but as in a real run, a failed
        trip then sends an update of zeros."""
        self.state = [np.zeros_like(self.result.models[0]) for _ in range(self.optimizer.vectors)]
        optimizer.start(self.optimizer, self.state)

    def run(self, events: Iterable[core_events.Event], max_events: int) -> MemoryRun:
        for event in events:
            self.enqueue(event)
        while self.core.stopped is None:
            if not self.queue:
                raise RunError(f"no event is left at version {self.core.version}, {self.core.now_s:g} s")
            if len(self.result.history) >= max_events:
                raise RunError(f"the run did not stop within {max_events} events")
            self.handle(heapq.heappop(self.queue)[3])
        return self.result

    def enqueue(self, event: core_events.Event) -> None:
        self.queued += 1
        heapq.heappush(self.queue, (event.at_s, getattr(event, "client", -1), self.queued, event))

    def handle(self, event: core_events.Event) -> None:
        then: core_events.Event | None = event
        if isinstance(event, core_events.Died):
            then = consequence(event, private=self.core.privacy is not None)
            if then is None and (running := self.in_flight.get(event.client)) is not None:
                self.doomed[running.task] = event.reason
        elif isinstance(event, core_events.Arrived) and event.task in self.doomed:
            why = self.doomed.pop(event.task)
            then = event = core_events.Failed(event.client, event.task, event.at_s, why)
        if isinstance(then, core_events.Left) and not then.finishes:
            self.in_flight.pop(then.client, None)
        elif isinstance(then, core_events.Arrived | core_events.Failed):
            begun = self.in_flight.get(then.client)
            if begun is None or begun.task != then.task:
                return
            del self.in_flight[then.client]
            if isinstance(then, core_events.Failed):
                # with privacy, a failed trip counts as a zero update
                self.updates[then.task] = np.zeros_like(self.result.models[0])
            if isinstance(event, core_events.Arrived) and self.core.strategy.measures:
                change = self.result.models[-1] - self.result.models[event.base_version]
                norms = [float(np.linalg.norm(vector)) for vector in (self.updates[event.task], change)]
                norm = norms[0] if math.isfinite(norms[0]) else math.inf
                event = msgspec.structs.replace(event, norm=norm, distance=norms[1])
        actions = self.core.handle(event)
        if isinstance(event, core_events.Arrived):
            released = [action.task for action in actions if isinstance(action, core_events.Release)]
            kept = {} if event.failed or event.task in released else self.trips[event.task].kept
            if kept and all(np.isfinite(vector).all() for vector in kept.values()):
                self.result.kept[event.client] = kept
        self.result.history.append((event, actions))
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: core_events.Action) -> None:
        now_s = self.core.now_s
        if isinstance(action, core_events.Train):
            self.begin(action)
        elif isinstance(action, core_events.Revoke):
            assert self.in_flight[action.client].task == action.task, f"{action} names no running task"
            self.enqueue(core_events.Failed(action.client, action.task, now_s, "cancelled"))
        elif isinstance(action, core_events.Sum):
            self.sum(action)
        elif isinstance(action, core_events.Release):
            assert action.task not in self.result.fates, f"task {action.task} is released twice"
            self.result.fates[action.task] = action.fate
            self.updates.pop(action.task, None)
            self.trips.pop(action.task, None)
        elif isinstance(action, core_events.Evaluate):
            self.result.evaluated.append(action.version)
            if self.accuracy is not None:
                accuracy = self.accuracy(self.result.models[action.version])
                self.enqueue(core_events.Evaluated(action.version, now_s, accuracy))
        elif isinstance(action, core_events.Wake):
            self.enqueue(core_events.Ticked(action.at_s))
        elif isinstance(action, core_events.Rejoin):
            self.enqueue(core_events.Joined(action.client, max(now_s, action.at_s)))
        else:
            assert isinstance(action, core_events.Finish | core_events.Drop)

    def begin(self, action: core_events.Train) -> None:
        client = action.client
        assert client not in self.in_flight, f"client {client} has two tasks in flight"
        assert action.version == len(self.result.models) - 1, f"{action} is not from the newest version"
        self.in_flight[client] = action
        self.result.owners[action.task] = client
        model = self.result.models[action.version]
        times: Any = self.durations
        given_s = times(client, action.trip) if callable(times) else times[client]
        valid = isinstance(given_s, Real) and 0.0 <= float(given_s) < math.inf  # false for NaN
        require("durations", given_s, valid, "a finite number of seconds of at least 0")
        duration = float(given_s)
        steps, gain = self.steps[client], 1.0
        if (until := action.until) is not None and until.steps is not None:
            steps, duration = until.steps, duration * until.steps / steps
        ends_s = self.core.now_s + duration
        if until is not None:
            if until.at_s < math.inf:
                made = (until.at_s - self.core.now_s) / duration * steps if duration else steps
                steps, ends_s = min(steps, int(made + 1e-9)), until.at_s
            gain = until.gain / max(1, steps) if until.per_step else until.gain
        given, failed = self.given(client, action.version), ""
        self.trips[action.task] = given
        try:
            if self.trip is not None:
                trained = self.trip(client, model.copy(), action.trip, given)
            else:
                trained = self.trained(client, action.trip, steps, given)
        except TripFails as error:
            failed = str(error) or "failed"
            if not self.protects:
                self.enqueue(core_events.Failed(client, action.task, ends_s, failed))
                return
            trained, steps = model, 0
        if gain != 1.0 and steps:
            trained = model + (trained - model) * model.dtype.type(gain)
        if self.protects and not np.isfinite(trained).all():
            trained, failed = model, "not finite"
        self.updates[action.task] = trained - model if self.core.strategy.upload == "delta" else trained
        examples, place = self.core.devices[client].examples, (client, action.task, action.version)
        self.enqueue(core_events.Arrived(*place, examples, steps, 0.0, ends_s, failed=failed))

    def given(self, client: int, version: int) -> TripInputs:
        """Return the inputs of a trip. The vectors to send are zeros, and the client's own vectors are
        copies."""
        model, strategy, kept = self.result.models[version], self.core.strategy, self.result.kept
        zeros = {name: np.zeros_like(model) for name in strategy.client_vectors}
        own = {name: vector.copy() for name, vector in kept.get(client, zeros).items()}
        now = self.result.vectors[version]
        vectors = {name: now[name] for name in strategy.vectors}
        return TripInputs.of(version, model, vectors, {name: np.zeros_like(model) for name in vectors}, own)

    def trained(self, client: int, trip: int, steps: int, given: TripInputs) -> Vector:
        """Return the model after ``steps`` steps with the terms that the strategy adds to the gradient. The
        vectors in ``given`` may be changed."""
        terms, start, y = self.core.strategy.local_rule(), given.start, given.start.copy()
        self.core.strategy.begin_trip(y, given)
        shift = np.zeros_like(start)
        factor = terms.lr_factor(client, self.core.devices[client].profile)
        if terms.control is not None:
            shift += given.vectors[terms.control[0]] - given.kept[terms.control[1]]
        if terms.linear is not None:
            shift -= given.kept[terms.linear]
        for _ in range(steps):
            pull = shift + terms.prox_mu * (y - start)
            moved = self.train(client, y.copy(), trip) - self.lr * pull
            y = moved if factor == 1.0 else y + factor * (moved - y)
        if terms.control is not None and steps:
            common, own = terms.control
            given.send[common][:] = (start - y) / (steps * self.lr * factor) - given.vectors[common]
            given.kept[own][:] += given.send[common]
        if terms.linear is not None:
            given.kept[terms.linear][:] -= terms.prox_mu * (y - start)
        y = np.array(y, start.dtype)
        self.core.strategy.end_trip(y, given)
        return y

    def is_finite(self, task: int) -> bool:
        return all(np.isfinite(one).all() for one in (self.updates[task], *self.trips[task].send.values()))

    def step_vectors(self, action: core_events.Sum, model: Vector) -> None:
        """Compute the next values of the strategy's vectors, and add them to the model with the weights
        (``into_model``) that the strategy chose."""
        made, sent = {}, self.core.strategy.vectors
        for name, vector in self.result.vectors[-1].items():
            part = action.parts.get(name, VectorSum(action.weights if name in sent else ()))
            made[name] = part.base_scale * vector
            for task, weight in zip(action.tasks, part.weights, strict=bool(part.weights)):
                made[name] += weight * (self.trips[task].send[name] if name in sent else self.updates[task])
            model += part.into_model * made[name]
        self.result.vectors.append(made)

    def combined(self, action: core_events.Sum) -> list[float] | Vector:
        """Let the strategy combine the updates; it reads them as float32, as in a real run."""
        rows = [np.asarray(self.updates[task], np.float32) for task in action.tasks]
        clients = [self.result.owners[task] for task in action.tasks]
        return combined(self.core.strategy, Rows(rows, clients=clients), action.weights)

    def sum(self, action: core_events.Sum) -> None:
        model = self.result.models[-1]
        assert action.version == len(self.result.models), f"{action} skips a version"
        bad: tuple[int, ...] = tuple(task for task in action.tasks if not self.is_finite(task))
        zero: tuple[int, ...] = ()
        if self.privacy is not None:
            zero, bad = bad, ()
            self.updates |= {task: np.zeros_like(model) for task in zero}
        next_norm: float | None = None
        if not bad:
            number, weights = model.dtype.type, list(action.weights)
            step = model * number(action.base_scale - 1.0)
            if self.privacy is not None and (norm := action.clip_norm) is not None:
                squares = [float(np.sum(np.square(self.updates[task], dtype=float))) for task in action.tasks]
                clipped = self.privacy.clip(weights, squares, norm)
                weights, next_norm = clipped.weights, self.privacy.next_norm(action.version, clipped, norm)
                noise = self.privacy.noise(action.version, model.size)
                step += noise * number(self.privacy.deviation(norm))
            elif self.core.strategy.reads == "updates":
                found = self.combined(action)
                if isinstance(found, np.ndarray):
                    step += found.astype(model.dtype)
                weights = [0.0] * len(weights) if isinstance(found, np.ndarray) else found
            for task, weight in zip(action.tasks, weights, strict=True):
                step += self.updates[task] * number(weight)
            out = np.empty_like(model)
            optimizer.apply(self.optimizer, out, model, step, self.state)
            self.step_vectors(action, out)
            self.result.models.append(out)
            self.result.sums.append((action, tuple(map(self.core.update, action.tasks))))
        self.handle(core_events.Summed(action.version, self.core.now_s, bad, next_norm, zero=zero))


def check_strategy(strategy: Strategy, clients: int = 12, versions: int = 30, seed: int = 0) -> MemoryRun:
    """Check that a strategy, which may be your own, obeys the rules for all strategies, even if clients
    leave, return and send NaN.

    The strategy must reach ``versions`` versions without stalling, use only updates that it holds, release
    each task at most once, never give two tasks to one client, let at most `Strategy.max_training` clients
    train at the same time, hold at most `Strategy.max_held` updates, and do exactly the same when the same
    events are replayed. Returns the run. Raises `AssertionError` or `RunError` if the strategy breaks a rule,
    and `ConfigError` if it is not a `Strategy` object or if a method that is called before a run, such as
    `Strategy.max_held`, returns a value for which `edgefl run` would refuse the strategy.

    >>> from edgefl.strategies.fedbuff import FedBuff
    >>> check_strategy(FedBuff(buffer_size=4)).models[-1].shape
    (3,)
    """
    require("strategy", strategy, isinstance(strategy, Strategy), "a Strategy object, such as FedBuff()")
    clients, versions = whole("clients", clients, 1), whole("versions", versions, 1)
    seed = whole("seed", seed, 0)
    check_answers(strategy, clients)
    rng = stream(seed, "check-strategy")
    speed = rng.uniform(1.0, 5.0, clients)
    broken = set(rng.choice(versions * clients, versions, replace=False).tolist())
    trained = itertools.count()

    def durations(client: int, trip: int) -> float:
        return float(speed[client] * rng.uniform(0.8, 1.2))

    def train(client: int, model: Vector, trip: int) -> Vector:
        bad = next(trained) in broken
        return np.full_like(model, np.nan) if bad else towards_own_number(client, model, trip)

    absences = np.sort(rng.uniform(0.0, 10.0 * versions, (versions, 2)), axis=1).tolist()
    events: list[core_events.Event] = []
    for client, (gone_s, back_s) in zip(rng.integers(clients, size=versions).tolist(), absences, strict=True):
        events += [core_events.Left(client, gone_s, "test"), core_events.Joined(client, back_s)]

    def core() -> Core:
        return Core(strategy, fleet(clients), seed, experiment.Stop(versions=versions))

    first = core()
    run = run_in_memory(first, durations, model=np.zeros(3), train=train, events=events)
    assert first.stopped == "versions", f"the run was stopped by {first.stopped}, not by versions"
    assert all(np.isfinite(model).all() for model in run.models), "a model is not finite"
    assert len(run.fates) >= len(run.owners) - clients, "a task was neither released nor running at the end"
    again = core()
    for event, actions in run.history:
        assert again.handle(event) == actions, f"replaying {event} gave different actions"
        assert again.training <= strategy.max_training(clients), (
            f"{again.training} clients train, more than max_training"
        )
        assert len(again.held) <= strategy.max_held(clients), (
            f"{len(again.held)} updates are held, more than max_held"
        )
        taken = again.training + len(again.held)
        assert taken <= strategy.slots(clients), f"{taken} tasks train or are held, more than slots"
    return run
