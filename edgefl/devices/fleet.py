"""Computes each client's device, link, trips and online times.

The results are identical in every process.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from edgefl.devices import Device, code, load_device, load_network
from edgefl.devices.condition import Condition, ConditionModel, power_of
from edgefl.devices.individuals import TripScatter, model_error, phase, unit_factor
from edgefl.devices.link import Link, Message
from edgefl.devices.plan import WHOLE, End, TripPlan, plan_trip
from edgefl.devices.presence import AlternatingRenewal, LateJoin, Presence, Windows, churn, read_availability
from edgefl.devices.schema import Availability, Network
from edgefl.devices.thermal import ThermalModel, thermal_model
from edgefl.experiment import Experiment
from edgefl.learning.growth import GrowingData
from edgefl.learning.operations import BatchWork
from edgefl.learning.rule import LocalRule
from edgefl.seeds import stream
from edgefl.sequences import LazySequence
from edgefl.strategies.base import Client, Strategy

if TYPE_CHECKING:
    from edgefl.secure import SecureRules

K = TypeVar("K")
V = TypeVar("V")


class ClientInfo(msgspec.Struct, frozen=True):
    """Index, device profile and network of one emulated client."""

    client: int
    profile: str
    network: str


class ClientInfos(LazySequence[ClientInfo]):
    """The clients of a fleet, numbered in the order of ``kinds``, a list of (profile, network, count).

    >>> infos = ClientInfos([("pi-4", "wifi", 2), ("pixel-4", "lte", 10**6)])
    >>> len(infos), infos[1].profile, infos[2].profile, infos[-1].client
    (1000002, 'pi-4', 'pixel-4', 1000001)
    """

    def __init__(self, kinds: Sequence[tuple[str, str, int]]) -> None:
        self.kinds = kinds
        self._ends = list(accumulate(count for *_, count in kinds))

    def __len__(self) -> int:
        return self._ends[-1]

    def make(self, index: int) -> ClientInfo:
        profile, network, _ = self.kinds[bisect_right(self._ends, index)]
        return ClientInfo(index, profile, network)


def fleet_of(experiment: Experiment) -> ClientInfos:
    """Return the clients of an experiment, numbered in the order of its profiles."""
    fleet = experiment.fleet
    assert isinstance(fleet.devices, dict)
    of = fleet.network
    return ClientInfos(
        [(name, of if isinstance(of, str) else of[name], count) for name, count in fleet.devices.items()]
    )


def kinds_of(clients: Sequence[ClientInfo]) -> dict[tuple[str, str], ClientInfo]:
    """Return the first client for each pair of profile and network, in the order of the clients."""
    if isinstance(clients, ClientInfos):
        starts = accumulate((count for *_, count in clients.kinds[:-1]), initial=0)
        clients = [clients[start] for start in starts]
    found: dict[tuple[str, str], ClientInfo] = {}
    for info in clients:
        found.setdefault((info.profile, info.network), info)
    return found


network_of = functools.cache(load_network)
_profile = functools.cache(load_device)


@functools.cache
def _varied(network: str, variation: float) -> Network:
    """Return the network with its ``rate_cv`` in both directions multiplied by ``variation``."""
    found = network_of(network)
    ways = {
        name: msgspec.structs.replace(way, rate_cv=way.rate_cv * variation)
        for name, way in (("down", found.down), ("up", found.up))
    }
    return msgspec.structs.replace(found, **ways)


@functools.cache
def _in_runtime(profile: str, runtime: str | None) -> Device:
    device = _profile(profile)
    if runtime not in device.runtime:
        return device
    return msgspec.structs.replace(device, default_runtime=runtime)


def device_of(experiment: Experiment, client: int, profile: str) -> Device:
    """Return the device of one client, set to the fleet's runtime if the profile has that runtime.

    If the profile has a ``slowdown``, the device is drawn from the client's own random stream.
    """
    device = _in_runtime(profile, experiment.fleet.runtime)
    if device.slowdown is None:
        return device
    return device.individual(stream(experiment.seed, "device", client))


def mixed_runtimes(experiment: Experiment, clients: Sequence[ClientInfo]) -> str:
    """Return a note that lists the runtimes of the fleet's devices if they differ; otherwise return ""."""
    found: dict[str, list[str]] = {}
    for profile in dict.fromkeys(profile for profile, _ in kinds_of(clients)):
        if runtime := _in_runtime(profile, experiment.fleet.runtime).runtime_name:
            found.setdefault(runtime, []).append(profile)
    if len(found) < 2:
        return ""
    parts = [f"{runtime} ({', '.join(profiles)})" for runtime, profiles in found.items()]
    return f"devices use {', '.join(parts)}; fleet.runtime selects one library for all devices that have it"


@functools.cache
def thermal_of(profile: str) -> ThermalModel | None:
    """Return the thermal model that all devices of a profile share."""
    return thermal_model(_profile(profile))


def joins_at_s(experiment: Experiment, client: int) -> float:
    """Return the time at which this client first comes online, which does not depend on other clients."""
    if not experiment.fleet.join_spread_s:
        return 0.0
    return experiment.fleet.join_spread_s * float(stream(experiment.seed, "join", client).uniform(0.0, 1.0))


def changes(experiment: Experiment, info: ClientInfo) -> bool:
    """Return True if the client may die during the run, or if its availability, link rate, temperature or
    battery charge may change."""
    fleet, device = experiment.fleet, _profile(info.profile)
    return bool(
        fleet.churn.mean_online_s
        or fleet.churn.die_per_trip
        or _availability(experiment, info) is not None
        or network_of(info.network).replays
        or (fleet.thermal and thermal_of(info.profile) is not None)
        or (fleet.battery and device.battery is not None)
    )


def condition_model(experiment: Experiment, info: ClientInfo) -> ConditionModel:
    """Create the model of a client's condition.

    The model includes heat and the battery only if the experiment enables them.
    """
    fleet = experiment.fleet
    return ConditionModel(
        thermal_of(info.profile) if fleet.thermal else None,
        power_of(_profile(info.profile), network_of(info.network)) if fleet.battery else None,
    )


def presence_of(experiment: Experiment, info: ClientInfo) -> Presence:
    """Create the presence of a client, which determines when the client is online.

    Availability windows from a profile are shifted at random; windows from an availability file are not.
    """
    fleet, seed, client = experiment.fleet, experiment.seed, info.client
    sources: list[LateJoin | Windows | AlternatingRenewal] = []
    if fleet.join_spread_s > 0:
        sources.append(LateJoin(joins_at_s(experiment, client)))
    windows = _availability(experiment, info)
    if windows is not None:
        own = fleet.availability is None
        shift_s = windows.period_s * float(stream(seed, "availability", client).random()) if own else 0.0
        sources.append(Windows(windows.intervals_s, windows.period_s, shift_s))
    if fleet.churn.mean_online_s is not None and fleet.churn.mean_offline_s is not None:
        sources.append(churn(seed, client, fleet.churn.mean_online_s, fleet.churn.mean_offline_s))
    return Presence(sources)


def _availability(experiment: Experiment, info: ClientInfo) -> Availability | None:
    if experiment.fleet.availability is None:
        return _profile(info.profile).availability
    entries = read_availability(experiment.fleet.availability)
    order = _shuffled(experiment.seed, len(entries))
    return entries[order[info.client % len(entries)]]


@functools.cache
def _shuffled(seed: int, count: int) -> list[int]:
    return list(stream(seed, "availability").permutation(count).tolist())


TYPICAL_TRIPS = 25
"""Number of trips of which `Trips.typical_s` takes the median, for each profile whose trip times vary."""
MAX_KEPT = 10_000
"""Maximum number of entries in each cache; a full cache is cleared."""


def _keep(answers: dict[K, V], key: K, answer: V) -> None:
    if len(answers) >= MAX_KEPT:
        answers.clear()
    answers[key] = answer


def _varies(profile: str) -> bool:
    """Return True if the phones (units) of a profile differ in speed, and their trips in duration."""
    device = _profile(profile)
    return not (device.exact or device.timed_by_draw)


def _speed_of(info: ClientInfo) -> int | str:
    """Return a cache key for clients of equal speed.

    The key is the profile, or the client's index if the profile has a ``slowdown``.
    """
    return info.profile if _profile(info.profile).slowdown is None else info.client


def first_tasks(experiment: Experiment, strategy: Strategy, clients: int) -> int:
    """Return the number of initial tasks that start after a random wait: as many as can train simultaneously.

    The number is 0 if phones start together (a strategy with rounds, or ``fleet.phase = "aligned"``) or if
    another setting already spreads their starts.
    """
    fleet = experiment.fleet
    spread = fleet.join_spread_s > 0.0 or strategy.arrivals() is not None
    if fleet.phase == "aligned" or strategy.starts_together or spread:
        return 0
    return strategy.max_training(clients)


def in_phase(experiment: Experiment, strategy: Strategy) -> str:
    """Return the reason why clients are meant to act in step; "" if they should act independently."""
    if strategy.lockstep:
        return "the strategy starts its clients together"
    if getattr(strategy, "max_staleness", None) is not None:
        return "a new version cancels all tasks above strategy.max_staleness: their clients start together"
    if experiment.server.secure is not None and experiment.server.secure.kind == "masks":
        return "no client starts while a sum is unmasked (server.secure.kind = 'masks')"
    profiles, fleet = {profile for profile, _ in kinds_of(fleet_of(experiment))}, experiment.fleet
    if all(_profile(profile).exact for profile in profiles):
        return "all devices are from papers, which state no differences between units"
    if fleet.units == "identical" and fleet.variation == 0.0:
        return "fleet.units = 'identical' and fleet.variation = 0 make all phones of a model alike"
    return ""


def any_exact(clients: Sequence[ClientInfo]) -> bool:
    """Return True if any profile of the fleet is from a paper. Clients with such a profile start at once."""
    return any(_profile(profile).exact for profile, _ in kinds_of(clients))


def masking_time_s(device: Device, rules: SecureRules) -> float:
    """Return the time in seconds that one core needs to mask an update.

    This is the time to encrypt ``rules.cipher_bytes`` and to read and write ``rules.moved_bytes``, at the
    rates of AES-256-CBC and of memcpy on the device's fastest core; a memcpy of n bytes reads and writes 2n.
    The time is 0 if the profile lists no cores, or if a delay model sets the trip's time.
    """
    if device.timed_by_draw or not device.clusters:
        return 0.0
    clusters = code.clusters_of(device)
    cipher, copy = (code.throughput(clusters, kind, 1).value * 1e6 for kind in _MASKING)
    return rules.cipher_bytes / cipher + rules.moved_bytes / (2 * copy)


_MASKING: tuple[code.CodeClass, code.CodeClass] = ("crypto", "copy")


class _Facts(NamedTuple):
    """Properties of a client that are the same for all trips on which it holds ``held`` examples."""

    info: ClientInfo
    device: Device
    held: int
    """Number of examples that the client holds."""
    work_s: float
    """Emulated seconds that the training of a whole trip takes at the device's full speed."""
    steps: int
    """Number of training steps in a whole trip."""
    scatter: TripScatter | None
    """Random variation of the client's compute times; None if they do not vary."""
    masking_s: float = 0.0
    """Emulated seconds that the client spends on masking an update, before the training."""
    steady: TripPlan | None = None
    """Plan of a whole trip without random variation; None if transfers, delays or deaths are random."""
    messages: tuple[Message, Message] | None = None
    """Download and upload messages, if only the transfers and the compute times of whole trips are random;
    otherwise None."""

    def factor(self, trip: int, steps: int | None = None) -> float:
        """Return the ratio of a trip's compute time to the usual compute time of this phone.

        ``steps`` is the number of steps of a shortened trip; None for a whole trip.
        """
        if self.scatter is None:
            return 1.0
        return self.scatter.factor(trip, self.steps if steps is None else steps)


class Trips:
    """Plans the trips of all clients.

    Each of the run's first ``first_tasks`` tasks starts after a random fraction of its client's trip time
    (`wait_s`). If ``rules`` of secure aggregation are given, the computing time of each trip includes the
    masking of its update.
    """

    def __init__(
        self,
        experiment: Experiment,
        clients: Sequence[ClientInfo],
        examples: Sequence[int],
        work: BatchWork,
        down_bytes: int,
        up_bytes: int,
        *,
        transfers_apart: bool = False,
        first_tasks: int = 0,
        rules: SecureRules | None = None,
    ) -> None:
        self._experiment, self._clients = experiment, clients
        self.data = GrowingData(examples, experiment.data.growth, experiment.seed)
        """Number of examples that each client holds in each trip."""
        self._apart, self._first_tasks = transfers_apart, first_tasks
        self._rule = LocalRule.of(experiment.training)
        self._work, self.rules = work, rules
        self._lines: dict[int | str, tuple[float, float]] = {}
        self._work_s: dict[tuple[int | str, int, int | None], float] = {}
        self._up_bytes = up_bytes
        self._down_bytes = down_bytes + (0 if rules is None else rules.download_bytes)
        self._units: dict[int, float] = {}
        self._facts: dict[int, _Facts] = {}
        """Cached properties of the clients for which a trip has already been planned."""

    def step_s(self, client: int, examples: int) -> float:
        """Return the time in seconds of a step on ``examples`` examples, at the device's full speed.

        If a delay model sets the trip's time, each example is assumed to take one second, because only the
        relative lengths of the steps matter.
        """
        return self._step_s(self._clients[client], examples)

    def _step_s(self, info: ClientInfo, examples: int) -> float:
        return self._model_step_s(info, examples) * self._unit(info)

    def _model_step_s(self, info: ClientInfo, examples: int) -> float:
        """Return the time in seconds of a step on the median phone of the client's device model."""
        key = _speed_of(info)
        if (line := self._lines.get(key)) is None:
            device = device_of(self._experiment, info.client, info.profile)
            _keep(self._lines, key, line := self._line(device, info.profile))
        return max(0.0, line[0] + line[1] * examples)

    def _line(self, device: Device, profile: str) -> tuple[float, float]:
        """Return the fixed time of a step on the device and the additional time per example, in seconds."""
        if (model := device.time_model()) is None:
            return 0.0, 1.0
        fixed_s, example_s = model.line(self._work)
        if self._experiment.fleet.model_errors == "drawn" and _varies(profile):
            # The 90% interval of the time t of a step on a full batch is t/factor to t·factor.
            factor = model.error_factor_of(self._work.at(self._rule.batch_size))
            error = model_error(self._experiment.seed, device.id, factor)
            return fixed_s * error, example_s * error
        return fixed_s, example_s

    def _unit(self, info: ClientInfo) -> float:
        """Return the compute time on the client's phone, relative to the median phone of its model."""
        if (factor := self._units.get(info.client)) is None:
            drawn = self._experiment.fleet.units == "individual" and _varies(info.profile)
            factor = unit_factor(self._experiment.seed, info.client) if drawn else 1.0
            _keep(self._units, info.client, factor)
        return factor

    def full_step_s(self, client: int) -> float:
        """Return the time in seconds of a step on a full batch, or on all examples if there are fewer."""
        return self.step_s(client, min(self._rule.batch_size, self.data.final[client]))

    def _whole_s(self, info: ClientInfo, held: int, steps: int | None = None) -> float:
        key = (_speed_of(info), held, steps)
        if (found := self._work_s.get(key)) is None:
            sizes = self._rule.sizes(held, steps)
            found = sum(count * self._model_step_s(info, size) for size, count in sizes.items())
            _keep(self._work_s, key, found)
        return found * self._unit(info)

    def typical_s(self) -> dict[str, float]:
        """Return the planned time of a typical trip for each profile, in emulated seconds.

        A typical trip trains on the fleet's median number of examples. The time is the median over
        `TYPICAL_TRIPS` draws, which are the same for all profiles and seeds.
        """
        held, found = int(np.median(self.data.final)), dict[str, float]()
        sizes, (down, up) = self._rule.sizes(held), (self._down_bytes, self._up_bytes)
        for info in kinds_of(self._clients).values():
            device, network = _in_runtime(info.profile, self._experiment.fleet.runtime), self._network(info)
            fixed_s, example_s = self._line(device, info.profile)
            work_s = sum(count * max(0.0, fixed_s + example_s * size) for size, count in sizes.items())
            masking_s = 0.0 if self.rules is None else masking_time_s(device, self.rules)
            draws = network.draws or network.replays or device.slowdown or device.delay_model
            trips_s = []
            for draw in range(TYPICAL_TRIPS if draws else 1):
                rng = stream(0, "typical trip", draw)
                scatter = 1.0 if device.slowdown is None else device.slowdown.draw(rng)
                link = Link(network, rng, 0.0, float(rng.random()))
                plan = plan_trip(device, link, rng, down, work_s, up, None, held, scatter)
                trips_s.append(masking_s + plan.total_s)
            found[device.id] = float(np.median(trips_s))
        return found

    def apart_s(self, info: ClientInfo) -> tuple[float, float]:
        """Return the times in seconds of a download and an upload at the mean rates of the client's network.

        Return zeros if the strategy does not schedule transfers separately, or if a delay model sets the time
        of whole trips.
        """
        if not self._apart or _profile(info.profile).timed_by_draw:
            return 0.0, 0.0
        link = Link(_varied(info.network, 0.0), stream(0, "typical transfer"))
        return link.down(self._down_bytes).declared_s, link.up(self._up_bytes).declared_s

    def known(self, client: int) -> Client:
        """Return what a strategy may know about a client, such as the times of the client's first trip."""
        held, trip = self.data.held(client, 0), self.in_series(client)
        steps = self._rule.work(held).steps
        profile = self._clients[client].profile
        return Client(client, profile, held, steps, trip.down_s, trip.compute_s, trip.up_s)

    def wait_s(self, client: int, task: int, trip: int) -> float:
        """Return how many emulated seconds the client waits before this task's trip; `plan` omits this wait.

        At the start of a run, phones are at random points in their trips: each of the first tasks waits for a
        random fraction of its client's trip time. Clients with a profile from a paper start immediately.
        """
        return 0.0 if trip or task >= self._first_tasks else self._part_s(client)

    def returns_after_s(self, client: int, resumption: int) -> float:
        """Return the time from the resumption of a wall-clock run to a client's return, in emulated seconds.

        As at the start of the run, phones are at random points in their trips, drawn anew for each
        ``resumption``.
        """
        return self._part_s(client, resumption) if self._first_tasks else 0.0

    def _part_s(self, client: int, *resumption: int) -> float:
        """Return a random fraction of the client's trip time, in emulated seconds."""
        if _profile(self._clients[client].profile).exact:
            return 0.0
        total_s = self.in_series(client).total_s
        return phase(self._experiment.seed, client, *resumption) * total_s if total_s < math.inf else 0.0

    def plan(
        self, client: int, trip: int, end: End | None = None, condition: Condition | None = None
    ) -> TripPlan:
        """Plan one trip of a client, in emulated seconds.

        ``end`` limits the training in this trip. ``condition`` is the client's condition at the start
        of the trip; None if it never changes. Transfers take no time if the strategy schedules them
        separately (`Strategy.transfers_apart`).
        """
        facts = self._of(client, trip)
        if end is None and condition is None:
            if (messages := facts.messages) is not None:
                rng = stream(self._experiment.seed, "trip", client, trip)
                compute_s = facts.work_s * facts.factor(trip)
                down, up = messages[0].transfer(rng), messages[1].transfer(rng)
                return TripPlan(down, facts.work_s, facts.masking_s, facts.work_s / compute_s, up)
            if (plan := facts.steady) is not None:
                return plan if facts.scatter is None else plan.scattered(facts.factor(trip))
        return self._plan(facts, trip, end or WHOLE, condition)

    def in_series(self, client: int) -> TripPlan:
        """Return the plan of a client's first trip, including transfers that are scheduled separately."""
        facts = self._of(client, 0)
        if self._apart:
            facts = facts._replace(info=self._clients[client])
        return self._plan(facts, 0, WHOLE, None)

    def _of(self, client: int, trip: int) -> _Facts:
        """Return a client's cached `_Facts`; compute them if they are missing or the client's data grew."""
        facts, held = self._facts.get(client), self.data.held(client, trip)
        return self._found(client, held) if facts is None or facts.held != held else facts

    def _found(self, client: int, held: int) -> _Facts:
        """Compute the `_Facts` of a client that holds ``held`` examples, and cache them for later trips."""
        experiment, info = self._experiment, self._clients[client]
        if self._apart:
            info = msgspec.structs.replace(info, network="none")
        device, network, work_s = _profile(info.profile), self._network(info), self._whole_s(info, held)
        amount = experiment.fleet.variation if work_s and _varies(info.profile) else 0.0
        scatter = TripScatter(experiment.seed, client, amount) if amount else None
        masking_s = 0.0 if self.rules is None else masking_time_s(device, self.rules) * self._unit(info)
        facts = _Facts(info, device, held, work_s, self._rule.work(held).steps, scatter, masking_s)
        more = network.replays or device.delay_model is not None or experiment.fleet.churn.die_per_trip > 0.0
        if not (more or network.draws):
            facts = facts._replace(steady=self._plan(facts._replace(scatter=None), 0, WHOLE, None))
        elif work_s and not more:
            down = Message(network, "down", self._down_bytes)
            facts = facts._replace(messages=(down, Message(network, "up", self._up_bytes)))
        _keep(self._facts, client, facts)
        return facts

    def reply_s(self, client: int, version: int, at_s: float, down_bytes: int, up_bytes: int) -> float:
        """Return how many emulated seconds a client needs to download a request and upload its reply.

        The request concerns the model ``version``. Computing the reply takes no time. If the connection is
        lost, the transfer resumes at the next byte.
        """
        seed, info, total_s = self._experiment.seed, self._clients[client], 0.0
        if _profile(info.profile).timed_by_draw:
            return 0.0
        rng, shift = stream(seed, "reply", client, version), float(stream(seed, "trace", client).random())
        for way, nbytes in (("down", down_bytes), ("up", up_bytes)):
            arrived: int | None = 0
            while arrived is not None:
                nbytes -= arrived
                link = Link(self._network(info), rng, at_s + total_s, shift)
                transfer = link.down(nbytes) if way == "down" else link.up(nbytes)
                total_s += min(transfer.breaks_s, transfer.declared_s)
                arrived = transfer.breaks_after
        return total_s

    def _network(self, info: ClientInfo) -> Network:
        return _varied(info.network, self._experiment.fleet.variation)

    def _plan(self, facts: _Facts, trip: int, end: End, condition: Condition | None) -> TripPlan:
        experiment, info, client = self._experiment, facts.info, facts.info.client
        held, rng = facts.held, stream(experiment.seed, "trip", client, trip)
        link, thermal = Link(self._network(info), rng), None
        if link.network.replays:
            start_s = 0.0 if condition is None else condition.at_s
            link = Link(link.network, rng, start_s, float(stream(experiment.seed, "trace", client).random()))
        if condition is not None and experiment.fleet.thermal and (model := thermal_of(info.profile)):
            thermal = model, condition.temp_c
        budget_s, steps = end
        down, work_s, up = self._down_bytes, facts.work_s, self._up_bytes
        if steps is not None:
            work_s = self._whole_s(info, held, steps)
        scatter = facts.factor(trip, steps)
        plan = plan_trip(facts.device, link, rng, down, work_s, up, thermal, held, scatter)
        if facts.masking_s:
            plan = plan.delayed(facts.masking_s)
        if steps is not None:
            plan = plan._replace(steps=steps)
        if budget_s < math.inf:
            sizes = self._rule.batches(held, steps)
            plan = plan.within(budget_s, (self._step_s(info, size) for size in sizes))
        chance = experiment.fleet.churn.die_per_trip
        if chance > 0.0:
            fate = stream(experiment.seed, "death", client, trip)
            if fate.random() < chance:
                return plan._replace(dies_s=float(fate.random()) * plan.total_s)
        return plan


class KnownClients(LazySequence[Client]):
    """A sequence that computes, on demand, what a strategy may know about each client."""

    def __init__(self, trips: Trips) -> None:
        self._trips = trips
        self._found: dict[int, Client] = {}

    def __len__(self) -> int:
        return len(self._trips.data.final)

    def make(self, index: int) -> Client:
        if (found := self._found.get(index)) is None:
            found = self._trips.known(index)
            _keep(self._found, index, found)
        return found
