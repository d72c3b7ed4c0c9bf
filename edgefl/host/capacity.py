"""Host capacity: the host's cores, CPU quotas and CPU usage, and the time scale that a fleet needs on it.

The time scale is the number of wall seconds per emulated second. A trip is a client's work for one task:
download, training and upload.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from edgefl.errors import ConfigError
from edgefl.host.fidelity import MINOR_PART
from edgefl.host.groups import NoGroup, Place, locate, read_words, throttled_ns
from edgefl.host.verdict import LOAD_MAX, MEAN_MAX
from edgefl.processes import usable_cores

TRIP_OVERHEAD_S = 0.002
"""Host CPU seconds that a trip needs in addition to its training steps, for messages, copies and the server's
work."""
SERVER_TRIP_S = 0.0003
"""The part of `TRIP_OVERHEAD_S` that the server spends. The server handles clients one by one."""
TARGET_LOAD = 0.5
"""Maximum share of the host's cores that a fleet should use. Up to this load, pacing was accurate to 0.2%."""
MIN_STRETCH = 1.15
"""Smallest time scale above 1 that is chosen to reach the target load. If a scale between 1 and this value
would be enough, the time scale stays at 1."""
CLIENT_SHARE = 0.7  # share of one core that a client may use during its trip
BURST_SHARE = 0.3
"""Share of one core that a client may use until its training is due. The remaining share is the slack that
keeps the client on time when other clients train at the same moment."""

Verdict = Literal["fits", "tight", "overloaded"]
VERDICT_TEXT: dict[Verdict, str] = {
    "fits": "",
    "tight": "; this is above the load at which pacing is exact, so times may be wrong",
    "overloaded": "; the host is overloaded, so the run will be INVALID",
}
Together = Literal["never", "at first", "always"]
"""When the trips of all clients start together: never, only at the start of the run, or in every round."""


class Burst(NamedTuple):
    """Host CPU seconds that a client needs within a window of its trip.

    ``start_s`` and ``emulated_s`` are the start and the length of the window in emulated seconds.
    """

    host_cpu_s: float
    start_s: float
    emulated_s: float


class Demand(NamedTuple):
    """Host CPU seconds that one client's trip needs, emulated seconds that it lasts, and the same two values
    for the training in the trip (``compute``)."""

    host_cpu_s: float
    emulated_s: float
    compute: Burst | None = None

    @property
    def cores(self) -> float:
        """Number of host cores that the client keeps busy at time scale 1."""
        if self.host_cpu_s <= 0:
            return 0.0
        return self.host_cpu_s / self.emulated_s if self.emulated_s > 0 else math.inf

    def due(self) -> Burst | None:
        """Return the CPU time of the training, and the window in which it must run to keep the trip on time.

        Training that is a minor part of its trip (`fidelity.MINOR_PART`) must finish by the end of the trip,
        because the upload can make up for a delay. Other training must finish when the device would finish
        it.

        >>> Demand(0.003, 1.0, Burst(0.001, 0.4, 0.002)).due()
        Burst(host_cpu_s=0.001, start_s=0.4, emulated_s=0.6)
        """
        if self.compute is None or self.compute.emulated_s >= MINOR_PART * self.emulated_s:
            return self.compute
        return self.compute._replace(emulated_s=self.emulated_s - self.compute.start_s)


class TimeScale(NamedTuple):
    """Wall seconds per emulated second, and the resulting load of the host."""

    value: float
    load: float
    """Share of the host's cores that is in use; the target is 0.5."""
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
    """Choose the time scale at which all clients' trips fit the host.

    The load is Σ (host CPU s / emulated s) / (cores · scale), summed over the ``active`` most demanding
    clients, which are assumed to be on trips at all times; by default, these are all clients. ``cores``
    defaults to the number of cores that the CPU affinity and the CPU quotas allow.
    ``auto`` chooses the smallest scale of at least 1 that satisfies the rules of docs/fidelity.md, rounded up
    to two digits; an explicit scale is not changed, only judged. Raises ConfigError if a demand or scale is
    not finite.

    >>> choose_time_scale([Demand(0.2, 1.0)] * 40, cores=2).value      # 8 cores' work on 2, at half load
    8.0
    >>> choose_time_scale([Demand(0.2, 1.0)] * 4, cores=2).value       # fits: never faster than real time
    1.0
    >>> choose_time_scale([Demand(0.2, 1.0)] * 40, cores=2, scale=2).verdict
    'overloaded'
    """
    cores = cores if cores is not None else capacity_cores()
    if not 0 < cores < math.inf:
        raise ConfigError(f"cores must be a finite number above 0 (got {cores})")
    shares = sorted((demand.cores for demand in demands), reverse=True)
    if not all(map(math.isfinite, shares)):
        why = "a client's trip takes no emulated time but needs the host's CPU, so it cannot be paced"
        raise ConfigError(f"clock.time_scale: {why}; use clock.kind = 'virtual'")
    active = len(shares) if active is None else min(active, len(shares))
    asked, largest = sum(shares[:active]), max(shares, default=0.0)
    if scale == "auto":
        value, chosen = _smallest(asked, largest, demands, cores, together, active)
    else:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"clock.time_scale: got {scale}; allowed: 'auto' or a finite number above 0")
        value, chosen = float(scale), "given"
    load, share = asked / (cores * value), largest / (value * min(1.0, cores))
    exact = TARGET_LOAD * (MIN_STRETCH if value == 1.0 else 1.0)
    verdict: Verdict = "tight" if load > exact + 1e-9 or share > CLIENT_SHARE + 1e-9 else "fits"
    if load > LOAD_MAX or share > 1 + MEAN_MAX:  # even alone, that client would be too late
        verdict = "overloaded"
    why = (
        f"time_scale {value:g} was {chosen}; over whole trips the fleet then uses {load:.1%} of the "
        f"host's {cores:g} core{'' if cores == 1 else 's'}, and its most demanding client {share:.1%} of "
        f"a core{VERDICT_TEXT[verdict]}"
    )
    return TimeScale(value, load, share, why, verdict)


def _smallest(
    asked: float, largest: float, demands: Sequence[Demand], cores: float, together: Together, active: int
) -> tuple[float, str]:
    """Return the smallest scale that satisfies all rules, and the reason: the rule that determines it."""
    one = min(1.0, cores)
    bursts = [burst for demand in demands if (burst := demand.due()) and burst.emulated_s > 0]
    densest = max((burst.host_cpu_s / burst.emulated_s for burst in bursts), default=0.0)
    coincident = 0.0 if together == "never" else _coincident(bursts)
    queue_s = active * SERVER_TRIP_S if together == "always" else 0.0
    shortest_s = min((demand.emulated_s for demand in demands if demand.emulated_s > 0), default=math.inf)
    half = f"at most {TARGET_LOAD:.0%} of {cores:g} is allowed"
    whole = f"a load of at most {TARGET_LOAD:.0%}: the fleet needs {asked:.2f} cores at scale 1"
    moment = f"clients that train at the same moment and then need {coincident:.2f} cores at scale 1 ({half})"
    alone = (
        f"one client, which needs {largest:.0%} of a core at scale 1 (at most {CLIENT_SHARE:.0%} is allowed)"
    )
    training = f"one client's training, which needs {densest:.0%} of a core at scale 1"
    answered = f"which the server takes {queue_s * 1e3:.1f} ms to answer"
    late = f"that is {queue_s / shortest_s:.1%} of a trip (at most {MEAN_MAX:.0%} is allowed)"
    rounds = f"rounds of {active} clients, {answered}, and trips of {shortest_s * 1e3:.3g} ms: {late}"
    of_all = [
        (asked / (cores * TARGET_LOAD), whole),
        (coincident / (cores * TARGET_LOAD), moment),
    ]
    others = [
        (largest / (CLIENT_SHARE * one), alone),
        (densest / (BURST_SHARE * one), f"{training} (at most {BURST_SHARE:.0%} is allowed)"),
        (queue_s / (MEAN_MAX * shortest_s), rounds),
    ]
    stretch, why = max(*others, *(rule for rule in of_all if rule[0] >= MIN_STRETCH), (1.0, ""))
    step = 10.0 ** (math.floor(math.log10(stretch)) - 1)  # rounded up to two digits
    value = round(math.ceil(stretch / step - 1e-9) * step, 10)
    if why:
        return value, f"chosen for {why}"
    wanted, rule = max(of_all)
    kept = f", since only scales of {MIN_STRETCH:g} or more are applied for {rule}" if wanted > 1 else ""
    return 1.0, f"chosen: real time{kept}"


def _coincident(bursts: Sequence[Burst]) -> float:
    """Return the number of cores needed in the most demanding interval if all trips start together.

    This is the demand bound of real-time scheduling.
    """
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
    """Return how many cores the CPU affinity and the CPU quotas allow this process and its descendants."""
    quota = cpu_quota()
    return float(usable_cores()) if quota is None else min(quota, float(usable_cores()))


def most_workers() -> int:
    """Return the number of processes that can compute at the same time: `capacity_cores`, rounded up."""
    return math.ceil(capacity_cores())


class Host(NamedTuple):
    """The host machine."""

    cpu: str
    cores: int
    system: str


def host(cpuinfo: Path = Path("/proc/cpuinfo")) -> Host:
    """Return the CPU model, the number of usable cores and the operating system of this machine."""
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    models = [value.strip() for key, _, value in lines if key.strip() in ("model name", "Model", "Hardware")]
    cpu = next(filter(None, models), "") or platform.processor() or platform.machine() or "unknown"
    parts = sorted({value.strip() for key, _, value in lines if key.strip() == "CPU part"})
    if parts and not any(models):  # Linux does not name the processors of ARM servers
        cpu = f"{cpu}, CPU part {', '.join(parts)}"
    return Host(cpu, usable_cores(), f"{platform.system()} {platform.release()}")


def machine() -> str:
    """Return the boot id of this machine, or the host name if the boot id cannot be read.

    All containers of a machine have the same boot id. It changes at each reboot.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def cpu_quota() -> float | None:
    """Return the number of cores that this process's control groups allow; None if there is no quota."""
    quotas = []
    for folder, version in _around("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        found = [word for name in names for word in read_words(folder / name)]
        if len(found) == 2 and found[0].isdecimal():
            quotas.append(int(found[0]) / int(found[1]))
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """Return the memory limit of this process's control groups, in bytes; None if there is no limit."""
    found = [
        read_words(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        for folder, version in _around("memory")
    ]
    limits = [int(text[0]) for text in found if text and text[0].isdecimal()]
    # Control groups of version 1 represent "no limit" by the largest multiple of the page size.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def available_bytes() -> int:
    """Return the host's available memory, or the limit of this process's control groups if it is smaller."""
    free, limit = int(psutil.virtual_memory().available), memory_limit_bytes()
    return free if limit is None else min(free, limit)


def thread_limit() -> int | None:
    """Return the maximum number of processes and threads in this process's control groups.

    Return None if there is no limit.
    """
    found = [read_words(folder / "pids.max") for folder, _ in _around("pids")]
    return min((int(text[0]) for text in found if text and text[0].isdecimal()), default=None)


def _around(controller: str) -> Iterator[Place]:
    """Yield this process's control group and the groups that contain it, as far as they are visible."""
    try:
        folder, version = locate(controller)
    except NoGroup:
        return
    while (folder / "cgroup.procs").exists():
        yield Place(folder, version)
        folder = folder.parent


class StealMeter:
    """Measures the CPU time that the hypervisor gave to other virtual machines since the meter's creation."""

    def __init__(self) -> None:
        self._usable = os.sched_getaffinity(0)
        self._start = _cpu_times(self._usable)

    def share(self) -> float | None:
        """Return the stolen share of CPU time: 0 if no time has passed, None if it is not reported."""
        now, start = _cpu_times(self._usable), self._start
        if not hasattr(now, "steal"):
            return None
        stolen_s = float(now.steal - start.steal)
        total_s = _busy_s(now) - _busy_s(start) + now.idle - start.idle + now.iowait - start.iowait + stolen_s
        return min(1.0, max(0.0, stolen_s / total_s)) if total_s > 0 else 0.0


class ThrottleMeter:
    """Measures how long CPU quotas stop this process's control group, or one of its parent groups."""

    def __init__(self) -> None:
        # Find the groups only once, because the process may be moved to another group later.
        self._places = list(_around("cpu"))
        self._start_s = time.monotonic()
        self._before = self._throttled_s()

    def share(self) -> float | None:
        """Return the share of wall time during which a quota was used up and kept a core idle.

        Return None if the system does not report it.
        """
        now, wall_s = self._throttled_s(), time.monotonic() - self._start_s
        if not now or wall_s <= 0:
            return None
        worst = max(after - before for before, after in zip(self._before, now, strict=True))
        return min(1.0, max(0.0, worst / wall_s))

    def _throttled_s(self) -> list[float]:
        """Return the seconds for which each group has been throttled so far."""
        return [throttled_ns(place) / 1e9 for place in self._places]


class UsageMeter:
    """Measures CPU usage from its creation on, and stolen and throttled time from `begin` to `end`.

    ``elsewhere_s`` returns the CPU seconds used by processes of the run that have ended and that were not
    children of this process.
    """

    def __init__(self, elsewhere_s: Callable[[], float] = float) -> None:
        self._elsewhere_s = elsewhere_s
        self._began_s = time.monotonic()
        self._usable = os.sched_getaffinity(0)
        self._own_s, self._busy_s = self._cpu_s(), _busy_s(_cpu_times(self._usable))
        self._meters: tuple[StealMeter, ThrottleMeter] | None = None
        self._taken: dict[str, float | None] = {"steal": None, "throttled": None}

    def begin(self) -> None:
        """Record that the clients start, and measure stolen and throttled time from now on."""
        self._meters = StealMeter(), ThrottleMeter()

    def end(self) -> None:
        """Record that the clients have ended, and stop measuring stolen and throttled time."""
        if self._meters is not None:
            self._taken = {"steal": self._meters[0].share(), "throttled": self._meters[1].share()}

    def usage(self, idle_s: float = 0.0) -> dict[str, float | None]:
        """Return the shares of time used by the run, used by others, stolen and throttled.

        They are arguments of `verdict.Conditions`. Call this after the run's processes have ended. ``idle_s``
        is the CPU time of `edgefl.host.awake`, which only keeps cores busy; neither share of use includes it.
        """
        core_s = (time.monotonic() - self._began_s) * usable_cores()
        own_s = self._cpu_s() - self._own_s
        if core_s <= 0:
            return {"used": None, "others": None, **self._taken}
        others_s = _busy_s(_cpu_times(self._usable)) - self._busy_s - own_s
        return {"used": (own_s - idle_s) / core_s, "others": max(0.0, others_s) / core_s, **self._taken}

    def _cpu_s(self) -> float:
        return _own_cpu_s() + self._elsewhere_s()


def _own_cpu_s() -> float:
    """Return the CPU seconds that this process and its reaped descendants have used."""
    return sum(os.times()[:4])


def _cpu_times(usable: Set[int]) -> Any:
    """Return psutil's CPU times of the cores ``usable``, on which this process may run.

    Return those of all cores if the cores cannot be told apart, because some are switched off or hidden.
    """
    if len(usable) < (cores := os.sysconf("SC_NPROCESSORS_CONF")):
        each = psutil.cpu_times(percpu=True)
        if len(each) == cores and max(usable) < cores:
            return type(each[0])(*map(sum, zip(*(each[core] for core in usable), strict=True)))
    return psutil.cpu_times()


def _busy_s(times: Any) -> float:
    """Return the CPU seconds during which the host's cores were neither idle nor stolen.

    Guest time is not added, because it is already part of user time.
    """
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))
