"""Profiles of devices, networks and fleets as plain frozen data, units in the names.

Bounds of single figures stand here; `edgefl.devices.profiles` checks what relates several.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from edgefl.devices.time_model import ONE_RATE_FACTOR, NotNegative, Positive, TimeModel
from edgefl.errors import ProfileError, unknown
from edgefl.learning.operations import StepWork

NOMINAL_V = 3.85  # of a phone's lithium-ion cell, where the profile states no battery.voltage_v
SCHEMA = 2
"""Of the profile files that this edgefl writes; a file that says no ``schema`` is of this one. Those of
schema 1, which has no ``runtime``, are read as well."""

Count = Annotated[int, msgspec.Meta(ge=1)]
NAME_PATTERN = r"^[a-z0-9][a-z0-9.-]*$"
NAME_WORDS = "a name of lower-case letters, digits, dots and dashes"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN, description=NAME_WORDS)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Schema = Annotated[int, msgspec.Meta(ge=1, le=SCHEMA)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table in a profile file."""


class Cluster(_Table, frozen=True, kw_only=True):
    """Cores of one kind; ``power_ma`` is a core's current at each of ``freq_mhz``, up to ``max_ma``."""

    uarch: Text
    cores: Count
    max_mhz: Positive
    fp32_flop_per_cycle: Positive | None = None
    max_ma: Positive | None = None
    freq_mhz: tuple[Positive, ...] = ()
    power_ma: tuple[Positive, ...] = ()


class ThreadRates(_Table, frozen=True, kw_only=True):
    """One rate with one thread (``1t``) and with the fastest number of threads (``nt``); either or both."""

    one: Positive | None = msgspec.field(default=None, name="1t")
    all: Positive | None = msgspec.field(default=None, name="nt")


class RateGflops(_Table, frozen=True, kw_only=True):
    """Sustained fp32 rates in 10⁹ floating-point operations a second (a multiply-add is two) by op class."""

    train: Positive
    """Forward and backward pass of a small CNN with every core that training uses: what paces a client of a
    profile without a runtime."""
    gemm: ThreadRates | None = None
    """Matrix products and 1 × 1 convolutions: inference of MobileNet-v1-224."""
    conv: ThreadRates | None = None
    """3 × 3 convolutions: inference of ResNet-18."""
    depthwise: ThreadRates | None = None
    elementwise: ThreadRates | None = None
    """a = b + s·c over arrays far larger than the caches: two operations for each 12 bytes moved."""


class Cpu(_Table, frozen=True, kw_only=True):
    """The processor."""

    rate_gflops: RateGflops
    clusters: tuple[Cluster, ...] = ()


class Memory(_Table, frozen=True, kw_only=True):
    """The memory; what one application may use of it is enforced on the client's process."""

    ram_mib: Positive
    app_limit_mib: Positive
    bandwidth_gbytes_per_s: Positive | None = None


class Storage(_Table, frozen=True, kw_only=True):
    """The flash memory, read and written in sequence; 10⁶ bytes a second are 1 MB/s."""

    read_mbytes_per_s: Positive
    write_mbytes_per_s: Positive | None = None


class Battery(_Table, frozen=True, kw_only=True):
    """The battery, and currents drawn from it beside the cores': idle, more while a radio transfers."""

    capacity_mah: Positive
    voltage_v: Positive | None = None
    idle_ma: NotNegative | None = None
    wifi_ma: NotNegative | None = None
    radio_ma: NotNegative | None = None
    min_soc: Annotated[float, msgspec.Meta(ge=0, le=0.99)] | None = None
    """State of charge below which the device takes no work; of 1 it would never work."""
    charge_w: Positive | None = None
    """Of its charger, from ``min_soc`` until it is full; None: it is never charged."""


class ThrottlingStep(_Table, frozen=True, kw_only=True):
    """From ``temp_c`` on, the device runs at ``freq_scale`` of its full speed."""

    temp_c: float
    freq_scale: Annotated[float, msgspec.Meta(gt=0, le=1)]


class Thermal(_Table, frozen=True, kw_only=True):
    """Heating and throttling: first-order towards ``ambient_c + busy_w · r_c_per_w``, see `thermal`."""

    trips: Annotated[tuple[ThrottlingStep, ...], msgspec.Meta(min_length=1)]
    off_c: Positive | None = None
    ambient_c: float | None = None
    r_c_per_w: Positive | None = None
    tau_s: Positive | None = None
    busy_w: Positive | None = None


Interval = tuple[NotNegative, NotNegative]


class Availability(_Table, frozen=True, kw_only=True):
    """The times at which the device can work: intervals, ascending and apart, of each ``period_s``."""

    intervals_s: Annotated[tuple[Interval, ...], msgspec.Meta(min_length=1)]
    period_s: Positive


class Slowdown(_Table, frozen=True, kw_only=True):
    """The spread of devices of one profile: each is ``low`` to ``high`` times slower than it says."""

    low: Annotated[float, msgspec.Meta(ge=1)]
    high: Annotated[float, msgspec.Meta(ge=1)]
    dist: Literal["uniform", "uniform-speed"] = "uniform"
    """The factor is U(low, high), or its speed is, so that the factor is 1/U(1/high, 1/low)."""

    def draw(self, rng: np.random.Generator) -> float:
        """The factor by which one device is slower.

        >>> rng = np.random.default_rng(0)
        >>> drawn = [Slowdown(low=1.0, high=5.0, dist="uniform-speed").draw(rng) for _ in range(1000)]
        >>> 1.0 <= min(drawn) < max(drawn) <= 5.0, round(float(np.mean(drawn)), 1)  # ln(5)/0.8 = 2.0
        (True, 2.0)
        """
        if self.dist == "uniform":
            return float(rng.uniform(self.low, self.high))
        return 1.0 / float(rng.uniform(1.0 / self.high, 1.0 / self.low))


Dist = Literal["uniform", "half-normal", "exponential", "log-normal", "pareto", "list"]
MOST_S = 1e9
"""30 years. With it and the bounds of ``sigma`` and ``alpha`` every draw is a finite number."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MOST_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]


class Delay(_Table, frozen=True, kw_only=True):
    """A delay in emulated seconds, drawn once a trip from the client's seeded stream.

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

    ``mode``: the draw replaces the time of the whole trip (FedStaleWeight §6.2, FedBuff §5), or is added to
    that of computing. ``per = "example"``: times the client's examples (FedBuff, C.2).

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
        """One delay, emulated seconds, from exactly one draw of ``rng``, for a client of so many examples."""
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
"""``tier`` stands for a share of all devices or for one known by its speed only."""


class Device(_Table, frozen=True, kw_only=True):
    """One kind of device; ``cpu`` may be left out only where ``delay_model`` replaces the trip's time."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    kind: DeviceClass = msgspec.field(name="class")
    sources: dict[str, Text]
    """Dotted field (or the table above it) to where its figure came from. ``derived:`` starts a figure that
    was computed from others, ``assumed:`` one that nobody published."""
    uncertainty: dict[str, Annotated[float, msgspec.Meta(ge=1)]] = {}
    """Dotted field to a factor f: the true figure is held to lie between figure/f and figure·f."""
    year: Annotated[int, msgspec.Meta(ge=1990)] | None = None
    soc: Text | None = None
    cpu: Cpu | None = None
    runtime: dict[str, TimeModel] = {}
    """The cost of a step in each library that it was measured in: ``torch``, ``mnn``, ``dl4j``, …"""
    default_runtime: Name | None = None
    """The one that clients use; needed where there are several."""
    memory: Memory | None = None
    storage: Storage | None = None
    battery: Battery | None = None
    thermal: Thermal | None = None
    availability: Availability | None = None
    """None: always."""
    network: Name | None = None
    """The network profile that suits it, for fleets that name none."""
    delay_model: Delay | None = None
    slowdown: Slowdown | None = None

    @property
    def train_flop_per_s(self) -> float:
        """Training rate in FLOP per emulated second; infinite where only a delay model sets the pace."""
        return self.cpu.rate_gflops.train * 1e9 if self.cpu is not None else math.inf

    @property
    def runtime_name(self) -> str | None:
        """The runtime that clients use; None for a profile without any."""
        return self.default_runtime or min(self.runtime, default=None)

    def time_model(self, runtime: str | None = None) -> TimeModel | None:
        """The time model of that runtime, or of the default one.

        Of a profile without any it is ``cpu.rate_gflops.train`` for every class of operation; None where
        only a delay model sets the pace. Raises `ProfileError` for a runtime that the profile does not have.
        """
        if runtime is not None:
            if runtime not in self.runtime:
                raise ProfileError(f"device {self.id!r}: {unknown('runtime', runtime, self.runtime)}")
            return self.runtime[runtime]
        if self.runtime_name is not None:
            return self.runtime[self.runtime_name]
        if self.cpu is None:
            return None
        error_factor = self.uncertainty.get("cpu.rate_gflops.train", ONE_RATE_FACTOR)
        return TimeModel.of_rate(self.cpu.rate_gflops.train, error_factor)

    def model_error_factor(self, work: StepWork) -> float | None:
        """The factor within which 90% of real devices' steps that do such work take what the profile says.

        None where no real device is meant: in a paper's profile, or where a delay model sets the time.
        """
        model = None if self.timed_by_draw or self.exact else self.time_model()
        return None if model is None else model.error_factor_of(work)

    @property
    def app_limit_mib(self) -> float | None:
        """Memory that one client process may use, MiB; None where the profile does not say."""
        return self.memory.app_limit_mib if self.memory is not None else None

    @property
    def voltage_v(self) -> float:
        """The battery's nominal voltage."""
        stated = None if self.battery is None else self.battery.voltage_v
        return NOMINAL_V if stated is None else stated

    @property
    def busy_w(self) -> float | None:
        """Watts of computing at full speed, above idle; None where the profile does not say.

        ``thermal.busy_w``, else the currents of all cores at their highest frequency.

        >>> from edgefl.devices import load_device
        >>> load_device("pixel-4").busy_w
        5.66
        """
        if self.thermal is not None and self.thermal.busy_w is not None:
            return self.thermal.busy_w
        clusters = () if self.cpu is None else self.cpu.clusters
        if not clusters or any(cluster.max_ma is None for cluster in clusters):
            return None
        return sum(cluster.cores * (cluster.max_ma or 0.0) for cluster in clusters) / 1e3 * self.voltage_v

    @property
    def exact(self) -> bool:
        """True where the profile is a paper's, whose devices are what the paper says and nothing else."""
        return self.kind == "paper"

    @property
    def timed_by_draw(self) -> bool:
        """True where a delay model sets the time of whole trips."""
        return self.delay_model is not None and self.delay_model.mode == "replace"

    def individual(self, rng: np.random.Generator) -> Device:
        """Draw one of the profile's devices: ``slowdown``, if it has one, from the client's own stream."""
        if self.slowdown is None or self.cpu is None:
            return self
        factor = self.slowdown.draw(rng)
        rates = msgspec.structs.replace(self.cpu.rate_gflops, train=self.cpu.rate_gflops.train / factor)
        cpu = msgspec.structs.replace(self.cpu, rate_gflops=rates)
        runtime = {name: model.slowed(factor) for name, model in self.runtime.items()}
        return msgspec.structs.replace(self, cpu=cpu, runtime=runtime, slowdown=None)


class Direction(_Table, frozen=True, kw_only=True):
    """One way through a network, without queueing."""

    rate_mbps: Positive | None = None
    """10⁶ bit/s of packets, headers included; None is unlimited."""
    rate_cv: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Coefficient of variation of the rate over windows of one second. Each message has a rate of its own:
    log-normal, with this coefficient over the square root of the seconds that the message takes."""
    delay_ms: NotNegative = 0.0
    jitter_ms: NotNegative = 0.0
    """Spread of the delay: σ (normal), mean (exponential), or half the width (uniform)."""
    jitter_dist: Literal["none", "normal", "uniform", "exponential"] = "none"
    """``normal``: delay + N(0, jitter²) cut off at 0. ``uniform``: delay + U(−jitter, jitter).
    ``exponential``: delay + Exp(mean jitter)."""
    loss_pct: Annotated[float, msgspec.Meta(ge=0, lt=100)] = 0.0
    on_loss: Literal["retransmit", "disconnect"] = "retransmit"
    """``retransmit``: each lost packet costs its bytes again, and a message that lost any waits for a round
    trip more. ``disconnect``: the first lost packet ends the connection, and with it the trip."""
    trace: Text | None = None
    """A trace in Mahimahi's format that sets the rate instead of ``rate_mbps``: a file beside the profile's.
    A loaded profile holds its absolute path."""


Bearer = Literal["mobile", "wifi", "wired"]


class Network(_Table, frozen=True, kw_only=True):
    """A client's link, both ways."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    down: Direction
    up: Direction
    bearer: Bearer = "mobile"
    """The device's radio that it takes, for the battery: ``radio_ma``, ``wifi_ma`` or none."""
    sources: dict[str, Text]
    uncertainty: dict[str, Annotated[float, msgspec.Meta(ge=1)]] = {}
    mtu_bytes: Annotated[int, msgspec.Meta(ge=68)] = 1500
    header_bytes: Annotated[int, msgspec.Meta(ge=0)] = 40
    """Of each packet: IPv4 and TCP without options take 20 each (RFC 791, RFC 9293)."""

    @property
    def replays(self) -> bool:
        """True where a trace sets the rate, so that it depends on the time."""
        return self.down.trace is not None or self.up.trace is not None

    @property
    def draws(self) -> bool:
        """True where messages of one size may take different times at the same instant."""
        ways = (self.down, self.up)
        return any(way.jitter_dist != "none" or way.loss_pct > 0 or way.rate_cv > 0 for way in ways)

    @property
    def payload_bytes(self) -> int:
        """Payload of a full packet."""
        return self.mtu_bytes - self.header_bytes


class FleetFile(_Table, frozen=True, kw_only=True):
    """The devices of a fleet, with their counts and networks."""

    schema: Schema = SCHEMA
    id: Name
    name: Text
    devices: Annotated[dict[str, Count], msgspec.Meta(min_length=1, description="a table of PROFILE = COUNT")]
    source: Text
    network: str | Annotated[dict[str, str], msgspec.Meta(min_length=1)] = "wifi"

    @property
    def clients(self) -> int:
        """The number of devices in all."""
        return sum(self.devices.values())


Profile = Device | Network | FleetFile


def to_json(profile: Profile) -> dict[str, Any]:
    """The profile as plain dicts, lists, strings and numbers, without the fields that are not given.

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
