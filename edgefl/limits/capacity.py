"""The host's capacity: the time scale at which a fleet fits it, and its cores, quotas and users."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from edgefl.errors import ConfigError
from edgefl.limits.fidelity import LOAD_MAX, MEAN_MAX, MINOR_PART
from edgefl.limits.groups import NoGroup, Place, find, throttled_ns, words
from edgefl.processes import usable_cores

TRIP_OVERHEAD_S = 0.002
"""CPU seconds of a trip besides its training steps: messages, copies, the server's share."""
SERVER_TRIP_S = 0.0003  # seconds of a trip's overhead that the server spends, for one client after another
TARGET_LOAD = 0.5  # share of the host's cores that a fleet may ask for: up to here pacing was exact to 0.2%
LEAST_STRETCH = 1.15  # real time is kept where less than this would bring the load to its target
CLIENT_SHARE = 0.7  # share of one core that a single client may ask for while it is on a trip
BURST_SHARE = 0.3
"""Share of one core that a client may ask for until its training is due: the slack in which it can still be
on time when other clients train at that moment."""

Verdict = Literal["fits", "tight", "overloaded"]
_SAYS: dict[Verdict, str] = {
    "fits": "",
    "tight": "; that is above what is paced exactly, figures may be off",
    "overloaded": "; the host is overloaded, figures will be INVALID",
}
Together = Literal["never", "at first", "always"]
"""The trips of all clients start at one instant: never, at the run's start only, or in each round."""


class Burst(NamedTuple):
    """CPU seconds of the host in a window of a client's trip: its start and length, emulated seconds."""

    host_cpu_s: float
    start_s: float
    emulated_s: float


class Demand(NamedTuple):
    """The host's CPU seconds for one trip of a client, the device's emulated ones, and its training."""

    host_cpu_s: float
    emulated_s: float
    compute: Burst | None = None

    @property
    def cores(self) -> float:
        """Host cores that the client keeps busy at time scale 1."""
        if self.host_cpu_s <= 0:
            return 0.0
        return self.host_cpu_s / self.emulated_s if self.emulated_s > 0 else math.inf

    def due(self) -> Burst | None:
        """The training's work in the window in which it must be done for the trip to be right.

        Training that is a minor part of its trip (`fidelity.MINOR_PART`) is due when the trip ends, because
        the upload makes up for it; other training when the device has done it.

        >>> Demand(0.003, 1.0, Burst(0.001, 0.4, 0.002)).due()
        Burst(host_cpu_s=0.001, start_s=0.4, emulated_s=0.6)
        """
        if self.compute is None or self.compute.emulated_s >= MINOR_PART * self.emulated_s:
            return self.compute
        return self.compute._replace(emulated_s=self.emulated_s - self.compute.start_s)


class TimeScale(NamedTuple):
    """Wall seconds per emulated second, and what the host then has to carry."""

    value: float
    load: float
    """Share of the host's cores asked for, 0.5 is the target."""
    client_share: float
    why: str
    verdict: Verdict


def choose_time_scale(
    demands: Sequence[Demand],
    *,
    cores: float | None = None,
    scale: float | Literal["auto"] = "auto",
    active: int | None = None,
    together: Together = "never",
) -> TimeScale:
    """The time scale at which all clients' trips fit the host.

    load = Σ (host CPU s / emulated s) / (cores · scale), over the ``active`` most demanding clients (all
    by default: each is on a trip all the time). ``cores`` are by default those that affinity and CPU quotas
    leave. ``auto`` is the smallest scale of at least 1 that keeps the rules of docs/fidelity.md, rounded up
    to two digits; an explicit scale is judged. ConfigError if a demand or the scale is not finite.

    >>> choose_time_scale([Demand(0.2, 1.0)] * 40, cores=2).value      # 8 cores' work on 2, at half load
    8.0
    >>> choose_time_scale([Demand(0.2, 1.0)] * 4, cores=2).value       # fits: time is not squeezed
    1.0
    >>> choose_time_scale([Demand(0.2, 1.0)] * 40, cores=2, scale=2).verdict
    'overloaded'
    """
    cores = cores if cores is not None else capacity_cores()
    if not 0 < cores < math.inf:
        raise ConfigError(f"cores must be a finite number above 0 (got {cores})")
    shares = sorted((demand.cores for demand in demands), reverse=True)
    if not all(map(math.isfinite, shares)):
        why = "a client's trip takes no emulated time but needs the host's CPU; it cannot be paced"
        raise ConfigError(f"clock.time_scale: {why}, use clock.kind = 'virtual'")
    active = len(shares) if active is None else min(active, len(shares))
    asked, largest = sum(shares[:active]), max(shares, default=0.0)
    if scale == "auto":
        value, chosen = _smallest(asked, largest, demands, cores, together, active)
    else:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"clock.time_scale: got {scale}; allowed: 'auto' or a finite number above 0")
        value, chosen = float(scale), "given"
    load, share = asked / (cores * value), largest / (value * min(1.0, cores))
    exact = TARGET_LOAD * (LEAST_STRETCH if value == 1.0 else 1.0)
    verdict: Verdict = "tight" if load > exact + 1e-9 or share > CLIENT_SHARE + 1e-9 else "fits"
    if max(load, share) > LOAD_MAX:
        verdict = "overloaded"
    why = (
        f"time_scale {value:g} was {chosen}; over whole trips the fleet then asks for {load:.1%} of the "
        f"host's {cores:g} cores, its most demanding client for {share:.1%} of a core{_SAYS[verdict]}"
    )
    return TimeScale(value, load, share, why, verdict)


def _smallest(
    asked: float, largest: float, demands: Sequence[Demand], cores: float, together: Together, active: int
) -> tuple[float, str]:
    """The smallest scale that keeps the rules; in words the rule that asks for it, and its own figures."""
    one = min(1.0, cores)
    bursts = [burst for demand in demands if (burst := demand.due()) and burst.emulated_s > 0]
    densest = max((burst.host_cpu_s / burst.emulated_s for burst in bursts), default=0.0)
    coincident = 0.0 if together == "never" else _coincident(bursts)
    queue_s = active * SERVER_TRIP_S if together == "always" else 0.0
    shortest_s = min((demand.emulated_s for demand in demands if demand.emulated_s > 0), default=math.inf)
    half = f"at most {TARGET_LOAD:.0%} of {cores:g} is allowed"
    whole = f"a load of at most {TARGET_LOAD:.0%}: the fleet asks for {asked:.2f} cores at scale 1"
    moment = (
        f"clients that train at the same moment and then ask for {coincident:.2f} cores at scale 1, {half}"
    )
    alone = f"{CLIENT_SHARE:.0%} of a core at most for one client, which asks for {largest:.0%} at scale 1"
    training = f"one client's training, which asks for {densest:.0%} at scale 1"
    answered = f"which the server takes {queue_s * 1e3:.1f} ms to answer"
    late = f"that is {queue_s / shortest_s:.1%} of one, at most {MEAN_MAX:.0%} is allowed"
    rounds = f"rounds of {active} clients, {answered}, and trips of {shortest_s * 1e3:.3g} ms: {late}"
    of_all = [
        (asked / (cores * TARGET_LOAD), whole),
        (coincident / (cores * TARGET_LOAD), moment),
    ]
    others = [
        (largest / (CLIENT_SHARE * one), alone),
        (densest / (BURST_SHARE * one), f"{BURST_SHARE:.0%} of a core at most for {training}"),
        (queue_s / (MEAN_MAX * shortest_s), rounds),
    ]
    stretch, why = max(*others, *(rule for rule in of_all if rule[0] >= LEAST_STRETCH), (1.0, ""))
    step = 10.0 ** (math.floor(math.log10(stretch)) - 1)  # rounded up to two digits
    value = round(math.ceil(stretch / step - 1e-9) * step, 10)
    if why:
        return value, f"chosen for {why}"
    wanted, rule = max(of_all)
    kept = f", kept where less than {LEAST_STRETCH:g} is asked for, by {rule}" if wanted > 1 else ""
    return 1.0, f"chosen: real time{kept}"


def _coincident(bursts: Sequence[Burst]) -> float:
    """Cores needed by the densest stretch of windows whose trips start at once: real-time's demand bound."""
    merged: dict[tuple[float, float], float] = {}
    for one in bursts:
        window = (one.start_s, one.start_s + one.emulated_s)
        merged[window] = merged.get(window, 0.0) + one.host_cpu_s
    by_end = sorted(merged.items(), key=lambda item: item[0][1])
    densest = 0.0
    for start in {window[0] for window in merged}:
        work = 0.0
        for (begin, end), host_s in by_end:
            if begin >= start:
                work += host_s
                densest = max(densest, work / (end - start))
    return densest


def capacity_cores() -> float:
    """Cores that this process and all it starts may use together: no more than the CPU quota around it."""
    quota = cpu_quota()
    return float(usable_cores()) if quota is None else min(quota, float(usable_cores()))


class Host(NamedTuple):
    """The machine that emulates."""

    cpu: str
    cores: int
    system: str


def host() -> Host:
    """CPU model, usable cores and system of this machine."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    models = [value.strip() for key, _, value in lines if key.strip() in ("model name", "Model", "Hardware")]
    cpu = next(filter(None, models), "") or platform.processor() or platform.machine() or "unknown"
    return Host(cpu, usable_cores(), f"{platform.system()} {platform.release()}")


def machine() -> str:
    """The running system's own name: the same in its containers, another after a restart. "" if untold."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def cpu_quota() -> float | None:
    """Cores that the control groups around this process allow together, or None if they allow all."""
    quotas = []
    for folder, version in _around("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        found = [word for name in names for word in words(folder / name)]
        if len(found) == 2 and found[0].isdecimal():
            quotas.append(int(found[0]) / int(found[1]))
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """Bytes that the control groups around this process allow, or None if they do not limit them."""
    found = [
        words(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        for folder, version in _around("memory")
    ]
    limits = [int(text[0]) for text in found if text and text[0].isdecimal()]
    # Version 1 says "no limit" with the largest multiple of a page.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def thread_limit() -> int | None:
    """Processes and threads that the control groups around this process allow, or None without a limit."""
    found = [words(folder / "pids.max") for folder, _ in _around("pids")]
    return min((int(text[0]) for text in found if text and text[0].isdecimal()), default=None)


def _around(controller: str) -> Iterator[Place]:
    """The group of this process and those around it, as far as they can be seen."""
    try:
        folder, version = find(controller)
    except NoGroup:
        return
    while (folder / "cgroup.procs").exists():
        yield Place(folder, version)
        folder = folder.parent


class StealMeter:
    """CPU time that the hypervisor gave to others since this was made."""

    def __init__(self) -> None:
        self._start = psutil.cpu_times()

    def share(self) -> float | None:
        """Stolen share of CPU time since the start; 0 if none passed, None where the system does not tell."""
        now, start = psutil.cpu_times(), self._start
        if not hasattr(now, "steal"):
            return None
        stolen_s = float(now.steal - start.steal)
        total_s = _busy_s(now) - _busy_s(start) + now.idle - start.idle + now.iowait - start.iowait + stolen_s
        return min(1.0, max(0.0, stolen_s / total_s)) if total_s > 0 else 0.0


class ThrottleMeter:
    """Time that the quotas around this process have kept its group from running, since this was made."""

    def __init__(self) -> None:
        # The groups of now: the process may be moved, the time counts where it was spent.
        self._places = list(_around("cpu"))
        self._start_s = time.monotonic()
        self._before = self._throttled_s()

    def share(self) -> float | None:
        """Share of the wall time in which a core stood still for want of quota; None where it is not told."""
        now, wall_s = self._throttled_s(), time.monotonic() - self._start_s
        if not now or wall_s <= 0:
            return None
        worst = max(after - before for before, after in zip(self._before, now, strict=True))
        return min(1.0, max(0.0, worst / wall_s))

    def _throttled_s(self) -> list[float]:
        """Seconds so far, a group."""
        return [throttled_ns(place) / 1e9 for place in self._places]


class UsageMeter:
    """Measures from when it was made until `usage` is asked; steal and quota between `begin` and `end`.

    ``elsewhere_s`` gives the CPU seconds of processes of the run that ended and are no children of this one.
    """

    def __init__(self, elsewhere_s: Callable[[], float] = float) -> None:
        self._elsewhere_s = elsewhere_s
        self._began_s = time.monotonic()
        self._own_s, self._busy_s = self._cpu_s(), _busy_s(psutil.cpu_times())
        self._meters: tuple[StealMeter, ThrottleMeter] | None = None
        self._taken: dict[str, float | None] = {"steal": None, "throttled": None}

    def begin(self) -> None:
        """Note that the clients start."""
        self._meters = StealMeter(), ThrottleMeter()

    def end(self) -> None:
        """Note that the clients have ended."""
        if self._meters is not None:
            self._taken = {"steal": self._meters[0].share(), "throttled": self._meters[1].share()}

    def usage(self) -> dict[str, float | None]:
        """Shares of `fidelity.Conditions` by name since this was made, once the processes have ended."""
        core_s = (time.monotonic() - self._began_s) * usable_cores()
        own_s = self._cpu_s() - self._own_s
        if core_s <= 0:
            return {"used": None, "others": None, **self._taken}
        others_s = _busy_s(psutil.cpu_times()) - self._busy_s - own_s
        return {"used": own_s / core_s, "others": max(0.0, others_s) / core_s, **self._taken}

    def _cpu_s(self) -> float:
        return _own_cpu_s() + self._elsewhere_s()


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children, theirs too, once they were waited for."""
    return sum(os.times()[:4])


def _busy_s(times: Any) -> float:
    """CPU seconds that the host's cores have worked: not idle, not stolen; guests' time is user time."""
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))
