"""Profiles of devices, networks and fleets as immutable data, with units in the field names.

Bounds on single values are declared here; `edgefl.devices.profiles` validates relations between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from edgefl.devices.time_model import ONE_RATE_FACTOR, NotNegative, Positive, TimeModel, joined
from edgefl.errors import ProfileError, unknown
from edgefl.learning.operations import StepWork
from edgefl.seeds import stream

NOMINAL_V = 3.85  # voltage of a phone's lithium-ion cell, if the profile states no battery.voltage_v
SCHEMA = 2
"""Schema version of the profile files that edgefl writes; also assumed for a file without ``schema``.
Files of schema 1, which has no ``runtime``, can still be read."""

Count = Annotated[int, msgspec.Meta(ge=1)]
NAME_PATTERN = r"\A[a-z0-9][a-z0-9.-]*\Z"
NAME_WORDS = "a name of lower-case letters, digits, dots and dashes"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN, description=NAME_WORDS)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
MIN_MHZ = 10.0
"""Minimum clock frequency, in MHz. A lower number is probably in GHz."""
Schema = Annotated[int, msgspec.Meta(ge=1, le=SCHEMA)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table in a profile file."""


class Cluster(_Table, frozen=True, kw_only=True):
    """Cores of one kind.

    ``power_ma`` lists a core's current at each frequency in ``freq_mhz``; the last current is ``max_ma``.
    """

    uarch: Text
    cores: Count
    max_mhz: Annotated[float, msgspec.Meta(ge=MIN_MHZ)]
    fp32_flop_per_cycle: Positive | None = None
    max_ma: Positive | None = None
    freq_mhz: tuple[Positive, ...] = ()
    power_ma: tuple[Positive, ...] = ()


class ThreadRates(_Table, frozen=True, kw_only=True):
    """Rates with one thread (``1t``) and with the fastest number of threads (``nt``); one may be missing."""

    one: Positive | None = msgspec.field(default=None, name="1t")
    all: Positive | None = msgspec.field(default=None, name="nt")


class RateGflops(_Table, frozen=True, kw_only=True):
    """Sustained fp32 rates for each class of operation, in 10⁹ FLOP per second (a multiply-add is two)."""

    train: Positive
    """Rate of the forward and backward pass of a small CNN on all cores that training uses. The training time
    is computed from this rate if the profile has no runtime."""
    gemm: ThreadRates | None = None
    """Rate of matrix products and 1 × 1 convolutions, measured in the inference of MobileNet-v1-224."""
    conv: ThreadRates | None = None
    """Rate of 3 × 3 convolutions, measured in the inference of ResNet-18."""
    depthwise: ThreadRates | None = None
    elementwise: ThreadRates | None = None
    """Rate of a = b + s·c on arrays far larger than the caches: two operations per 12 bytes moved."""


class Cpu(_Table, frozen=True, kw_only=True):
    """The processor: its computing rates and its cores."""

    rate_gflops: RateGflops
    clusters: tuple[Cluster, ...] = ()


class Memory(_Table, frozen=True, kw_only=True):
    """The memory; ``app_limit_mib`` is enforced on the client's process."""

    ram_mib: Positive
    app_limit_mib: Positive
    bandwidth_gbytes_per_s: Positive | None = None


class Storage(_Table, frozen=True, kw_only=True):
    """Rates of sequential access to the flash memory; 1 MB/s is 10⁶ bytes per second."""

    read_mbytes_per_s: Positive
    write_mbytes_per_s: Positive | None = None


class Battery(_Table, frozen=True, kw_only=True):
    """The battery, the current of the idle device, and the additional currents of a busy radio. The currents
    of the cores are in `Cluster`."""

    capacity_mah: Positive
    voltage_v: Positive | None = None
    idle_ma: NotNegative | None = None
    wifi_ma: NotNegative | None = None
    radio_ma: NotNegative | None = None
    min_soc: Annotated[float, msgspec.Meta(ge=0, le=0.99)] | None = None
    """State of charge (0 to 1) below which the device accepts no work; with 1, it would never accept any."""
    charge_w: Positive | None = None
    """Charging power from ``min_soc`` until the battery is full; None if the battery is never charged."""


class ThrottlingStep(_Table, frozen=True, kw_only=True):
    """At ``temp_c`` and above, the device runs at ``freq_scale`` of its full speed."""

    temp_c: float
    freq_scale: Annotated[float, msgspec.Meta(gt=0, le=1)]


class Thermal(_Table, frozen=True, kw_only=True):
    """Heating and throttling. While the device computes at full speed, its temperature approaches
    ``ambient_c + busy_w · r_c_per_w`` with the time constant ``tau_s``; see `edgefl.devices.thermal`."""

    trips: Annotated[tuple[ThrottlingStep, ...], msgspec.Meta(min_length=1)]
    off_c: Positive | None = None
    ambient_c: float | None = None
    r_c_per_w: Positive | None = None
    tau_s: Positive | None = None
    busy_w: Positive | None = None


Interval = tuple[NotNegative, NotNegative]


class Availability(_Table, frozen=True, kw_only=True):
    """Times at which the device can work: ascending, disjoint intervals within each ``period_s``."""

    intervals_s: Annotated[tuple[Interval, ...], msgspec.Meta(min_length=1)]
    period_s: Positive


class Slowdown(_Table, frozen=True, kw_only=True):
    """Speed differences within one profile: each device is slower by a factor from ``low`` to ``high``."""

    low: Annotated[float, msgspec.Meta(ge=1)]
    high: Annotated[float, msgspec.Meta(ge=1)]
    dist: Literal["uniform", "uniform-speed"] = "uniform"
    """Distribution of the factor: U(low, high), or 1/U(1/high, 1/low), so that the speed is uniform."""

    def draw(self, rng: np.random.Generator) -> float:
        """Draw the factor by which one device is slower.

        >>> rng = np.random.default_rng(0)
        >>> drawn = [Slowdown(low=1.0, high=5.0, dist="uniform-speed").draw(rng) for _ in range(1000)]
        >>> 1.0 <= min(drawn) < max(drawn) <= 5.0, round(float(np.mean(drawn)), 1)  # ln(5)/0.8 = 2.0
        (True, 2.0)
        """
        if self.dist == "uniform":
            return float(rng.uniform(self.low, self.high))
        return 1.0 / float(rng.uniform(1.0 / self.high, 1.0 / self.low))

    def quantile(self, share: float) -> float:
        """Return the factor that this share of the devices does not exceed.

        >>> Slowdown(low=1.0, high=5.0).quantile(0.5)
        3.0
        >>> Slowdown(low=1.0, high=4.0, dist="uniform-speed").quantile(0.5)
        1.6
        """
        if self.dist == "uniform":
            return self.low + share * (self.high - self.low)
        return 1.0 / (1.0 / self.low - share * (1.0 / self.low - 1.0 / self.high))


Dist = Literal["uniform", "half-normal", "exponential", "log-normal", "pareto", "list"]
MAX_S = 1e9
"""Maximum delay in seconds, about 30 years. This limit and the limits of ``sigma`` and ``alpha`` keep every
draw finite."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]


class Delay(_Table, frozen=True, kw_only=True):
    """A delay in emulated seconds, drawn once per trip from the client's seeded stream.

    ====================== ============================== ==================================
    ``dist``               fields                         draw
    ====================== ============================== ==================================
    ``uniform``            ``low_s``, ``high_s``          U(low, high)
    ``half-normal``        ``scale_s``                    abs(N(0, scale²)), mean scale·√(2/π)
    ``exponential``        ``mean_s``                     Exp(1/mean)
    ``log-normal``         ``median_s``, ``sigma``        median·exp(sigma·N(0, 1))
    ``pareto``             ``min_s``, ``alpha``           min·(1−U)^(−1/alpha)
    ``list``               ``values_s``                   one of the values, each equally likely
    ====================== ============================== ==================================

    Depending on ``mode``, the draw replaces the time of the whole trip (FedStaleWeight §6.2, FedBuff §5), or
    is added to the compute time. With ``per = "example"``, the draw is multiplied by the client's number of
    examples (FedBuff, C.2).

    >>> delay = Delay(dist="uniform", low_s=1.0, high_s=2.0)
    >>> 1.0 <= delay.draw(np.random.default_rng(0)) < 2.0
    True
    """

    dist: Dist
    mode: Literal["replace", "add"] = "replace"
    per: Literal["trip", "example"] = "trip"
    low_s: SecondsOrZero | None = None
    high_s: Seconds | None = None
    scale_s: Seconds | None = None
    mean_s: Seconds | None = None
    median_s: Seconds | None = None
    sigma: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    min_s: Seconds | None = None
    alpha: Annotated[float, msgspec.Meta(ge=0.1)] | None = None
    values_s: Annotated[tuple[SecondsOrZero, ...], msgspec.Meta(min_length=1)] | None = None

    FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "uniform": ("low_s", "high_s"),
        "half-normal": ("scale_s",),
        "exponential": ("mean_s",),
        "log-normal": ("median_s", "sigma"),
        "pareto": ("min_s", "alpha"),
        "list": ("values_s",),
    }

    def draw(self, rng: np.random.Generator, examples: int = 1) -> float:
        """Draw the delay of a client with this number of examples, in emulated seconds.

        Only one value is drawn from ``rng``.
        """
        drawn_s: Any = math.nan
        match self.dist, [getattr(self, name) for name in self.FIELDS[self.dist]]:
            case "uniform", [low_s, high_s]:
                drawn_s = low_s + (high_s - low_s) * rng.random()
            case "half-normal", [scale_s]:
                drawn_s = abs(rng.normal(0.0, scale_s))
            case "exponential", [mean_s]:
                drawn_s = rng.exponential(mean_s)
            case "log-normal", [median_s, sigma]:
                drawn_s = median_s * math.exp(sigma * rng.standard_normal())
            case "pareto", [min_s, alpha]:
                drawn_s = min_s * float((1.0 - rng.random()) ** (-1.0 / alpha))
            case "list", [values_s]:
                drawn_s = values_s[int(rng.integers(len(values_s)))]
        return float(drawn_s) * (examples if self.per == "example" else 1)


DeviceClass = Literal["flagship", "mid-range", "budget", "board", "wearable", "desktop", "tier", "paper"]
"""The class ``tier`` is for a profile that represents a share of all devices, or a device of which only the
speed is known."""


class Device(_Table, frozen=True, kw_only=True):
    """One device model. ``cpu`` may be missing only if ``delay_model`` sets the time of whole trips."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    kind: DeviceClass = msgspec.field(name="class")
    sources: dict[str, Text]
    """Source of each value, keyed by the dotted name of its field or of a table that contains it. A source
    starts with ``derived:`` if the value was computed from other values, and with ``assumed:`` if there is no
    published value."""
    uncertainty: dict[str, Annotated[float, msgspec.Meta(ge=1)]] = {}
    """Maps the dotted name of a field to a factor f. The true value is assumed to be between value/f and
    value·f."""
    year: Annotated[int, msgspec.Meta(ge=1990)] | None = None
    soc: Text | None = None
    cpu: Cpu | None = None
    runtime: dict[str, TimeModel] = {}
    """Costs of operations in each library with which steps were measured: ``torch``, ``mnn``, ``dl4j``, …"""
    default_runtime: Name | None = None
    """The runtime that clients use; required if there are several runtimes."""
    units: dict[str, Positive] | None = None
    """Compute time of each measured phone (unit) of this model, divided by the geometric mean over all units;
    None if units were not measured."""
    memory: Memory | None = None
    storage: Storage | None = None
    battery: Battery | None = None
    thermal: Thermal | None = None
    availability: Availability | None = None
    """Times at which the device can work; None if it always can."""
    network: Name | None = None
    """Default network of `edgefl.programs` and of device tests; fleets do not use it."""
    delay_model: Delay | None = None
    slowdown: Slowdown | None = None

    @property
    def train_flop_per_s(self) -> float:
        """Training rate in FLOP per emulated second; infinite if only a delay model sets the time."""
        return self.cpu.rate_gflops.train * 1e9 if self.cpu is not None else math.inf

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The cores; () if the profile lists none."""
        return () if self.cpu is None else self.cpu.clusters

    @property
    def runtime_name(self) -> str | None:
        """The runtime that clients use; None for a profile without runtimes."""
        return self.default_runtime or min(self.runtime, default=None)

    def time_model(self, runtime: str | None = None) -> TimeModel | None:
        """Return the time model of ``runtime``, or of the default runtime.

        For a profile without runtimes, the rate of every class of operation is ``cpu.rate_gflops.train``.
        Return None if only a delay model sets the time. Raises `ProfileError` if the profile does not have
        the runtime.
        """
        if runtime is not None:
            if runtime not in self.runtime:
                raise ProfileError(f"device {self.id!r}: {unknown('runtime', runtime, self.runtime)}")
            return self.runtime[runtime]
        if self.runtime_name is not None:
            return self.runtime[self.runtime_name]
        if self.cpu is None:
            return None
        error_factor = self.uncertainty_of("cpu.rate_gflops.train", ONE_RATE_FACTOR)
        return TimeModel.of_rate(self.cpu.rate_gflops.train, error_factor)

    def uncertainty_of(self, key: str, unstated: float) -> float:
        """Return the uncertainty of the field ``key`` or of a table that contains it, or else ``unstated``.

        >>> phone = {"id": "x", "name": "x", "class": "board", "sources": {}, "uncertainty": {"battery": 1.5}}
        >>> msgspec.convert(phone, Device).uncertainty_of("battery.idle_ma", 2.0)
        1.5
        """
        while key and key not in self.uncertainty:
            key = key.rpartition(".")[0]
        return self.uncertainty.get(key, unstated)

    def model_error_factor(self, work: StepWork) -> float | None:
        """Return the factor within which the profile predicts the step times of 90% of real devices.

        Return None if the profile represents no real device, because it is from a paper or a delay model sets
        its times.
        """
        model = None if self.timed_by_draw or self.exact else self.time_model()
        return None if model is None else model.error_factor_of(work)

    @property
    def app_limit_mib(self) -> float | None:
        """Memory limit of one client process, in MiB; None if the profile does not state one."""
        return self.memory.app_limit_mib if self.memory is not None else None

    @property
    def voltage_v(self) -> float:
        """Nominal voltage of the battery."""
        stated = None if self.battery is None else self.battery.voltage_v
        return NOMINAL_V if stated is None else stated

    @property
    def busy_w(self) -> float | None:
        """Power of computing at full speed, in watts above idle; None if the profile does not state it.

        It is ``thermal.busy_w``, or is computed from the currents of all cores at their highest frequency.

        >>> from edgefl.devices import load_device
        >>> load_device("pixel-4").busy_w
        5.66
        """
        if self.thermal is not None and self.thermal.busy_w is not None:
            return self.thermal.busy_w
        if not self.clusters or any(cluster.max_ma is None for cluster in self.clusters):
            return None
        current_ma = sum(cluster.cores * (cluster.max_ma or 0.0) for cluster in self.clusters)
        return current_ma / 1e3 * self.voltage_v

    @property
    def core_w(self) -> tuple[float, ...]:
        """Power of each core at full speed, in watts, in the order of the clusters; () if it is unknown.

        The powers sum to `busy_w`. They are proportional to the cores' currents at their highest frequency,
        or equal if the profile does not state all currents.

        >>> from edgefl.devices import load_device
        >>> [round(watts, 2) for watts in load_device("pixel-4").core_w]
        [0.86, 1.16, 1.16, 1.16, 0.33, 0.33, 0.33, 0.33]
        """
        if self.busy_w is None:
            return ()
        cores = [cluster for cluster in self.clusters for _ in range(cluster.cores)]
        known = all(core.max_ma for core in cores)
        parts = [(core.max_ma or 0.0) if known else 1.0 for core in cores]
        return tuple(self.busy_w * part / sum(parts) for part in parts)

    @property
    def core_mhz(self) -> tuple[float, ...]:
        """Maximum clock of each core in MHz, in the order of the clusters; () if there are none."""
        return tuple(cluster.max_mhz for cluster in self.clusters for _ in range(cluster.cores))

    @property
    def fastest_core_w(self) -> float | None:
        """Full-speed power of the core with the highest clock, in watts; `busy_w` if no cores are listed.

        >>> from edgefl.devices import load_device
        >>> round(load_device("pixel-4").fastest_core_w, 2)
        0.86
        """
        return max(zip(self.core_mhz, self.core_w, strict=True))[1] if self.core_w else self.busy_w

    @property
    def exact(self) -> bool:
        """True if the profile is from a paper, so that its devices have exactly the stated properties."""
        return self.kind == "paper"

    @property
    def timed_by_draw(self) -> bool:
        """True if a delay model sets the time of whole trips."""
        return self.delay_model is not None and self.delay_model.mode == "replace"

    def individual(self, rng: np.random.Generator) -> Device:
        """Return this device, slowed down by a factor drawn from ``rng``, the client's random stream."""
        if self.slowdown is None or self.cpu is None:
            return self
        return self._slowed(self.slowdown.draw(rng))

    def median(self) -> Device:
        """Return the median device. The error factors of its times include the differences between devices.

        >>> from edgefl.devices import load_device
        >>> fastest = load_device("paper-defedavg-slowdowns")  # slowdown: uniform from 1 to 5
        >>> fastest.train_flop_per_s / fastest.median().train_flop_per_s
        3.0
        """
        if self.slowdown is None or self.cpu is None:
            return self
        low, middle, high = map(self.slowdown.quantile, (0.05, 0.5, 0.95))
        apart = max(middle / low, high / middle)
        made = self._slowed(middle)
        runtime = {
            name: msgspec.structs.replace(model, error_factor=joined(model.error_factor, apart))
            for name, model in made.runtime.items()
        }
        key = "cpu.rate_gflops.train"
        uncertainty = {**self.uncertainty, key: joined(self.uncertainty_of(key, ONE_RATE_FACTOR), apart)}
        return msgspec.structs.replace(made, runtime=runtime, uncertainty=uncertainty)

    def _slowed(self, factor: float) -> Device:
        """Return a copy, without the ``slowdown``, on which training takes ``factor`` times as long."""
        assert self.cpu is not None
        rates = msgspec.structs.replace(self.cpu.rate_gflops, train=self.cpu.rate_gflops.train / factor)
        cpu = msgspec.structs.replace(self.cpu, rate_gflops=rates)
        runtime = {name: model.slowed(factor) for name, model in self.runtime.items()}
        return msgspec.structs.replace(self, cpu=cpu, runtime=runtime, slowdown=None)


class Direction(_Table, frozen=True, kw_only=True):
    """One direction of a network, without queueing."""

    rate_mbps: Positive | None = None
    """Rate in 10⁶ bit/s, including packet headers; None if it is unlimited."""
    rate_cv: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Coefficient of variation of the rate over windows of one second. Each message's rate is log-normal with
    the coefficient ``rate_cv`` / √d, where d is the message's duration in seconds, but at least 1.
    ``rate_cv`` requires ``rate_mbps``, because a trace has its own variation."""
    delay_ms: NotNegative = 0.0
    jitter_ms: NotNegative = 0.0
    """Spread of the delay: σ (normal), mean (exponential), or half the width (uniform)."""
    jitter_dist: Literal["none", "normal", "uniform", "exponential"] = "none"
    """Distribution of the delay. ``normal``: delay + N(0, jitter²), at least 0. ``uniform``: delay +
    U(−jitter, jitter). ``exponential``: delay + Exp(mean jitter)."""
    loss_pct: Annotated[float, msgspec.Meta(ge=0, lt=100)] = 0.0
    on_loss: Literal["retransmit", "disconnect"] = "retransmit"
    """Effect of lost packets. ``retransmit``: each lost packet is sent again, and a message with losses takes
    one more round trip. ``disconnect``: the first lost packet ends the connection, and with it the trip."""
    trace: Text | None = None
    """Path, relative to the profile, of a trace in Mahimahi's format that sets the rate instead of
    ``rate_mbps``. It is absolute in a loaded profile."""


Bearer = Literal["mobile", "wifi", "wired"]
Radio = Literal["5g-low-band", "5g-mmwave"]
"""Radios whose power was measured with a power meter (`edgefl.devices.energy.METERED`)."""


class Network(_Table, frozen=True, kw_only=True):
    """A client's link in both directions."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    down: Direction
    up: Direction
    bearer: Bearer = "mobile"
    """The device's radio for this network; it selects ``radio_ma``, ``wifi_ma`` or no current."""
    radio: Radio | None = None
    """A metered radio, whose power replaces the device's ``radio_ma``."""
    sources: dict[str, Text]
    uncertainty: dict[str, Annotated[float, msgspec.Meta(ge=1)]] = {}
    mtu_bytes: Annotated[int, msgspec.Meta(ge=68)] = 1500
    header_bytes: Annotated[int, msgspec.Meta(ge=0)] = 40
    """Header bytes of each packet: IPv4 and TCP without options take 20 bytes each (RFC 791, RFC 9293)."""

    @property
    def replays(self) -> bool:
        """True if a trace sets the rate, so that the rate depends on the time."""
        return self.down.trace is not None or self.up.trace is not None

    @property
    def draws(self) -> bool:
        """True if messages of equal size may take different times even when sent at the same time."""
        ways = (self.down, self.up)
        return any(way.jitter_dist != "none" or way.loss_pct > 0 or way.rate_cv > 0 for way in ways)

    @property
    def payload_bytes(self) -> int:
        """Number of payload bytes in a full packet."""
        return self.mtu_bytes - self.header_bytes


class FleetFile(_Table, frozen=True, kw_only=True):
    """The devices of a fleet, with their counts and networks."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    devices: Annotated[dict[str, Count], msgspec.Meta(min_length=1, description="a table of PROFILE = COUNT")]
    source: Text
    network: str | Annotated[dict[str, str], msgspec.Meta(min_length=1)] = "wifi"
    draw: Count | None = None
    """Number of devices that each experiment draws with its seed, using the counts of ``devices`` as weights.
    If it is None, the fleet has exactly these counts."""

    @property
    def clients(self) -> int:
        """Total number of devices."""
        return self.draw or sum(self.devices.values())

    def drawn(self, seed: int) -> dict[str, int]:
        """Return the number of devices of each profile, drawn with ``seed``; profiles with none are left out.

        >>> fleet = FleetFile(id="x", name="x", source="x", devices={"pi-4": 3, "pi-5": 1}, draw=400)
        >>> fleet.drawn(1)["pi-4"] > 2 * fleet.drawn(1)["pi-5"], sum(fleet.drawn(2).values())
        (True, 400)
        """
        if self.draw is None:
            return dict(self.devices)
        ends = np.cumsum(list(self.devices.values()))
        places = np.searchsorted(ends / ends[-1], stream(seed, "fleet").random(self.draw), side="right")
        counts = np.bincount(places, minlength=len(ends)).tolist()
        return {name: count for name, count in zip(self.devices, counts, strict=True) if count}

    def network_of(self, devices: Iterable[str]) -> str | dict[str, str]:
        """Return the network that all devices share, or a table with the network of each of ``devices``."""
        of = self.network
        return of if isinstance(of, str) else {name: of[name] for name in devices}


Profile = Device | Network | FleetFile


def to_json(profile: Profile) -> dict[str, Any]:
    """Convert a profile to plain dicts, lists, strings and numbers, without the fields that are not set.

    >>> from edgefl.devices import load_device
    >>> to_json(load_device("pixel-3a"))["memory"]["ram_mib"]
    4096.0
    """

    def given(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: given(inner) for key, inner in value.items() if inner is not None and inner != ()}
        return [given(item) for item in value] if isinstance(value, list | tuple) else value

    plain: dict[str, Any] = given(msgspec.to_builtins(profile))
    return plain
