"""Does the fleet fit the host: how far emulated time must be stretched, and what the host is.

Limits that others have set on this process: the quota and memory of the control groups it lies in.

Who used the host during a run: the run itself, others, the hypervisor; and what a quota took from it.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from edgefl.errors import ConfigError
from edgefl.limits.groups import NoGroup, figures, find, words

TRIP_OVERHEAD_S = 0.002
"""CPU seconds of a trip besides its training steps: messages, copies, the server's share."""
TARGET_LOAD = 0.5
"""Share of the host's cores that a fleet may ask for: up to here pacing was exact to 0.2%."""
INVALID_LOAD = 0.9
"""Above this share the emulation falls behind (measured: 11% slow from 70%, 65% when overloaded)."""
CLIENT_SHARE = 0.7
"""Share of one core that a single client may ask for while it is on a trip."""
BURST_SHARE = 0.25
"""Share of one core that a client may ask for while it computes: the slack in which it can still be on time
when other clients compute at that moment."""


class Burst(NamedTuple):
    """The host's work for a trip is all due in the window in which the device computes."""

    host_cpu_s: float
    start_s: float
    """Emulated seconds from the start of the trip to the start of the window."""
    emulated_s: float
    """Length of the window."""


class Demand(NamedTuple):
    """What one client asks of the host on one trip."""

    host_cpu_s: float
    """CPU seconds that the host spends on the trip."""
    emulated_s: float
    """Emulated seconds that the device takes for it."""
    compute: Burst | None = None
    """The part of the trip in which it computes."""

    @property
    def cores(self) -> float:
        """Host cores that the client keeps busy at time scale 1."""
        if self.host_cpu_s <= 0:
            return 0.0
        return self.host_cpu_s / self.emulated_s if self.emulated_s > 0 else math.inf


class TimeScale(NamedTuple):
    """Wall seconds per emulated second, and what the host then has to carry."""

    value: float
    load: float
    """Share of the host's cores asked for, 0.5 is the target."""
    client_share: float
    """Share of one core that the most demanding client asks for."""
    why: str
    verdict: Literal["fits", "tight", "overloaded"]
    """``tight``: above the target, figures may be off. ``overloaded``: figures will be INVALID."""


def choose_time_scale(
    demands: Sequence[Demand],
    *,
    cores: float | None = None,
    scale: float | Literal["auto"] = "auto",
    active: int | None = None,
    lockstep: bool = False,
    target_load: float = TARGET_LOAD,
) -> TimeScale:
    """The time scale at which all clients' trips fit the host.

    load = Σ (host CPU s / emulated s) / (cores · scale), over the ``active`` most demanding clients (all
    by default: each is on a trip all the time). ``cores`` are by default those that affinity and CPU quotas
    leave. ``auto`` is the smallest scale of at least 1 with a load of at most ``target_load`` and no client
    above 0.7 of a core (0.25 while it computes), rounded up to two digits. Clients in ``lockstep`` start
    trips at the same instant, so their windows of computing coincide: then the work due in any stretch of
    time must fit into that stretch too. An explicit scale is taken as it is and judged. ConfigError if a
    demand or the scale is not finite.

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
    one = min(1.0, cores)
    shares = sorted((demand.cores for demand in demands), reverse=True)
    if any(not math.isfinite(share) for share in shares):
        raise ConfigError(
            "clock.time_scale: a client's trip takes no emulated time but needs the host's CPU; it cannot be "
            "paced, use clock.kind = 'virtual'"
        )
    asked = sum(shares[:active])
    largest = shares[0] if shares else 0.0
    bursts = [demand.compute for demand in demands if demand.compute and demand.compute.emulated_s > 0]
    densest = max((burst.host_cpu_s / burst.emulated_s for burst in bursts), default=0.0)
    burst = densest / (BURST_SHARE * one)
    if lockstep:
        burst = max(burst, _coincident(bursts) / (cores * target_load))
    if scale == "auto":
        value = _two_digits_up(max(1.0, asked / (cores * target_load), largest / (CLIENT_SHARE * one), burst))
    else:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"clock.time_scale: got {scale}; allowed: 'auto' or a finite number above 0")
        value = float(scale)
    load, share = asked / (cores * value), largest / (value * one)
    verdict: Literal["fits", "tight", "overloaded"] = "fits"
    if load > INVALID_LOAD or share > INVALID_LOAD:
        verdict = "overloaded"
    elif load > target_load + 1e-9 or share > CLIENT_SHARE + 1e-9:
        verdict = "tight"
    return TimeScale(value, load, share, _why(scale, asked, cores, value, load, share, verdict), verdict)


def _coincident(bursts: Sequence[Burst]) -> float:
    """Cores needed by the densest stretch of time, if all these windows belong to trips that start at once.

    The demand bound of real-time scheduling: over every stretch [a, b], the work of the windows that lie in
    it, divided by its length.

    >>> _coincident([Burst(0.1, 0.0, 1.0), Burst(0.1, 0.0, 1.0), Burst(0.1, 2.0, 1.0)])
    0.2
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


def _why(
    scale: float | str, asked: float, cores: float, value: float, load: float, share: float, verdict: str
) -> str:
    given = "chosen" if scale == "auto" else "given"
    text = (
        f"time_scale {value:g} was {given}: the fleet asks for {asked:.2f} cores at scale 1, the host has "
        f"{cores:g}, load {load:.0%}, most demanding client {share:.0%} of a core"
    )
    if verdict == "tight":
        return f"{text}; that is above what is paced exactly, figures may be off"
    if verdict == "overloaded":
        return f"{text}; the host is overloaded, figures will be INVALID"
    return text


def _two_digits_up(value: float) -> float:
    """``value`` rounded up to two significant digits; 1 stays 1."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / step - 1e-9) * step, 10)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def capacity_cores() -> float:
    """Cores that this process and all it starts may use together: no more than the CPU quota around it.

    >>> 0 < capacity_cores() <= usable_cores()
    True
    """
    quota = cpu_quota()
    return float(usable_cores()) if quota is None else min(quota, float(usable_cores()))


class Host(NamedTuple):
    """The machine that emulates."""

    cpu: str
    cores: int
    system: str


def host() -> Host:
    """CPU model, usable cores and system of this machine.

    >>> host().cores >= 1
    True
    """
    return Host(_cpu_model(), usable_cores(), f"{platform.system()} {platform.release()}")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


class StealMeter:
    """CPU time that the hypervisor gave to others since this was made.

    >>> share = StealMeter().share()
    >>> share is None or 0.0 <= share <= 1.0
    True
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def share(self) -> float | None:
        """Stolen share of all CPU time since the start; 0 if none has passed, None where the system does
        not tell."""
        now = self._read()
        if now is None or self._start is None:
            return None
        total = now[1] - self._start[1]
        return min(1.0, max(0.0, (now[0] - self._start[0]) / total)) if total > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        """Ticks stolen and ticks in all. Guest time is within user time, so it is not added again."""
        try:
            with self._stat.open("rb") as stat:
                fields = stat.readline().split()
            ticks = [int(field) for field in fields[1:9]]
        except (OSError, ValueError):
            return None
        return (ticks[7], sum(ticks)) if fields[:1] == [b"cpu"] and len(ticks) == 8 else None


_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with the largest multiple of a page."""


def cpu_quota() -> float | None:
    """Cores that the control groups around this process allow together, or None if they allow all."""
    quotas = [quota for folder, version in _around("cpu") if (quota := _quota(folder, version)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """Bytes that the control groups around this process allow, or None if they do not limit them."""
    limits = []
    for folder, version in _around("memory"):
        found = words(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        if found and found[0].isdecimal() and int(found[0]) < _UNLIMITED_BYTES:
            limits.append(int(found[0]))
    return min(limits, default=None)


class ThrottleMeter:
    """How long the quotas around this process have kept its group from running, since this was made.

    >>> share = ThrottleMeter().share()
    >>> share is None or 0.0 <= share <= 1.0
    True
    """

    def __init__(self) -> None:
        # The groups of now: the process may be moved, the time counts where it was spent.
        self._files = [(folder / "cpu.stat", version) for folder, version in _around("cpu")]
        self._start_s = time.monotonic()
        self._before = self._read()

    def share(self) -> float | None:
        """Share of the wall time in which a core stood still because the quota was used up.

        None where it cannot be read.
        """
        now, wall_s = self._read(), time.monotonic() - self._start_s
        if not now or wall_s <= 0:
            return None
        worst = max(after - before for before, after in zip(self._before, now, strict=True))
        return min(1.0, max(0.0, worst / wall_s))

    def _read(self) -> list[float]:
        """Seconds so far, a group."""
        return [_throttled_s(figures(file), version) for file, version in self._files]


def _around(controller: str) -> Iterator[tuple[Path, int]]:
    """The group of this process and those around it, as far as they can be seen."""
    try:
        folder, version = find(controller)
    except NoGroup:
        return
    while (folder / "cgroup.procs").exists():
        yield folder, version
        folder = folder.parent


def _throttled_s(stat: dict[str, int], version: int) -> float:
    return stat.get("throttled_usec", 0) / 1e6 if version == 2 else stat.get("throttled_time", 0) / 1e9


def _quota(folder: Path, version: int) -> float | None:
    if version == 1:
        quota, period = words(folder / "cpu.cfs_quota_us"), words(folder / "cpu.cfs_period_us")
        found = [*quota, *period]
    else:
        found = words(folder / "cpu.max")
    return int(found[0]) / int(found[1]) if len(found) == 2 and found[0].isdecimal() else None


STAT = Path("/proc/stat")


class Usage(NamedTuple):
    """Shares of the host's cores, or of time; None where the system does not tell."""

    used: float | None
    """Of the cores, by this process and all that it started and has seen end."""
    others: float | None
    """Of the cores, by everybody else."""
    steal: float | None
    """Of the time, by the hypervisor for others."""
    throttled: float | None
    """Of the wall time, in which a core stood still because of a CPU quota around the run."""


class UsageMeter:
    """Measures from when it was made until `usage` is asked; steal and quota between `begin` and `end`.

    >>> meter = UsageMeter()
    >>> meter.begin()
    >>> meter.end()
    >>> usage = meter.usage()
    >>> usage.used is None or usage.used >= 0.0
    True
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._own_s, self._busy_s = _own_cpu_s(), _busy_s()
        self._steal: StealMeter | None = None
        self._throttle: ThrottleMeter | None = None
        self._taken: tuple[float | None, float | None] = (None, None)

    def begin(self) -> None:
        """The phones start."""
        self._steal, self._throttle = StealMeter(), ThrottleMeter()

    def end(self) -> None:
        """The phones have ended."""
        if self._steal is not None and self._throttle is not None:
            self._taken = self._steal.share(), self._throttle.share()

    def usage(self) -> Usage:
        """What was measured; all processes of the run have ended."""
        core_s = (time.monotonic() - self._began_s) * usable_cores()
        own_s = _own_cpu_s() - self._own_s
        now_s, before_s = _busy_s(), self._busy_s
        others = None
        if now_s is not None and before_s is not None and core_s > 0:
            others = max(0.0, now_s - before_s - own_s) / core_s
        return Usage(own_s / core_s if core_s > 0 else None, others, *self._taken)


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children, theirs too, once they were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_s() -> float | None:
    """CPU seconds that the host's cores have worked since it started: not idle, not stolen."""
    try:
        with STAT.open("rb") as stat:
            fields = stat.readline().split()
        user, nice, system, _idle, _wait, irq, softirq = (int(field) for field in fields[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
