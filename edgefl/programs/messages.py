"""Messages between edgefl's main process (``run`` below), the keeper and the relay, which trust each other.

run ──► keeper    Launch…, Begin, Pass, SwitchOff, EndPhones
run ◄── keeper    PhoneState, PhoneEnded
run ──► relay     Carry…, Begin, EndPhones
run ◄── relay     TrafficState, Transmitted, Drained
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgefl.devices.presence import AlternatingRenewal, churn

ThrottleBy = Literal["cgroup", "sigstop", "off"]
MemoryKept = Literal["cgroup", "watch", "off"]
Leaves = Literal["stop", "kill"]


class Absence(msgspec.Struct, frozen=True):
    """Phones stay online and offline for exponentially distributed times, emulated seconds."""

    mean_online_s: float
    mean_offline_s: float
    leave: Leaves = "stop"
    """``stop`` suspends an absent phone's processes; ``kill`` kills them and starts the command again
    later."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Message to the keeper: start a phone's command."""

    phone: int
    command: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    folder: bytes | None
    cores: tuple[float, ...]
    """Shares of the device's cores, fastest first, in CPU seconds of this host per wall second."""
    limit_mib: float | None
    throttle: ThrottleBy
    memory: MemoryKept
    stdio: tuple[int, int, int]
    ignored: tuple[int, ...] = ()
    """Signals that the command ignores from its start, such as SIGHUP under ``nohup``."""
    open_files: int | None = None
    """Limit on open files; None: the same limit as the keeper's."""


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Message to the relay: forward a phone's connections."""

    phone: int
    network: str
    doors: tuple[tuple[int, int, tuple[Any, ...]], ...]
    """For each listener: its file descriptor, and the family and address of its server."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Start emulated time."""

    at_ns: int
    """Start, nanoseconds of the monotonic clock."""
    time_scale: float
    seed: int
    absence: Absence | None = None

    def presence(self, phone: int) -> AlternatingRenewal | None:
        """Return when the phone is online; None if it always is."""
        if (absence := self.absence) is None:
            return None
        return churn(self.seed, phone, absence.mean_online_s, absence.mean_offline_s)


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to the process group of each phone's command."""

    number: int


class SwitchOff(msgspec.Struct, frozen=True, tag=True):
    """Kill a phone's processes; ``why`` is recorded."""

    phone: int
    why: str


class EndPhones(msgspec.Struct, frozen=True, tag=True):
    """Keeper: kill all phones. Relay: deliver the data in transit unless ``now`` is set, then exit."""

    now: bool = True


class PhoneState(msgspec.Struct, frozen=True, tag=True):
    """Measurements of a phone so far; times and rates in wall seconds."""

    phone: int
    state: Literal["running", "away", "ended"]
    wall_s: float
    """Time since the start of the command, without absences."""
    cpu_s: float
    wanting_s: float
    """Part of ``wall_s`` in which the phone ran or waited for a core."""
    declared_cpu_s: float
    """CPU time that the cores in use allowed in ``wanting_s``."""
    rss_mib: float
    peak_mib: float
    """Peak memory: the control group's if one limits it, else the highest of the samples."""
    stops: int
    """Number of absences."""
    processes: int
    uncounted_s: float = 0.0
    """Upper estimate of CPU time missing in ``cpu_s``: that of children whose parent ignores SIGCHLD."""


class PhoneEnded(msgspec.Struct, frozen=True, tag=True):
    """A phone's command and all processes started by it have ended."""

    state: PhoneState
    code: int
    """Exit code; −n if signal n ended the command."""
    why: str = ""
    """Reason if the emulation ended the command, such as exceeded memory."""


class TrafficState(msgspec.Struct, frozen=True, tag=True):
    """Traffic and connections of a phone's link so far."""

    phone: int
    up_bytes: int
    down_bytes: int
    open: int
    connections: int
    refused: int
    """Connections refused by the server, or requested while the phone was absent."""
    broken: int
    """Connections broken by packet loss, by the phone's absence, or by a server that stopped reading."""
    up_s: float
    down_s: float
    """Time with bytes on the link in each direction, emulated seconds."""


class Transmitted(msgspec.Struct, frozen=True, tag=True):
    """Durations of the completed busy periods of one direction of a phone's link, emulated seconds."""

    phone: int
    way: Literal["up", "down"]
    declared_s: list[float]
    achieved_s: list[float]


class Drained(msgspec.Struct, frozen=True, tag=True):
    """No data is in transit any more; the relay exits."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process is ready for `Begin`."""


ToKeeper = Launch | Begin | Pass | SwitchOff | EndPhones
FromKeeper = Started | PhoneState | PhoneEnded
ToRelay = Carry | Begin | EndPhones
FromRelay = Started | TrafficState | Transmitted | Drained
