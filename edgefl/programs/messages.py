"""Messages between three processes that trust each other: the main process (``run``), keeper and relay.

run ──► keeper    Launch…, Begin, Pass, SwitchOff, EndPhones
run ◄── keeper    PhoneState, PhoneEnded
run ──► relay     Carry…, Begin, EndPhones
run ◄── relay     TrafficState, Transmitted, Drained
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgefl.devices.presence import AlternatingRenewal, churn


class Absence(msgspec.Struct, frozen=True):
    """Phones go online and offline alternately, each time for an exponentially distributed time.

    ``mean_online_s`` and ``mean_offline_s`` are the means of these times, in emulated seconds.
    """

    mean_online_s: float
    mean_offline_s: float
    leave: Literal["stop", "kill"] = "stop"
    """With ``stop``, the processes of an absent phone are suspended; with ``kill``, they are killed, and the
    command is started again when the phone returns."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Message that tells the keeper to start a phone's command."""

    phone: int
    command: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    folder: bytes | None
    cores: tuple[float, ...]
    """Shares of the device's cores, in CPU seconds of this host per wall second, fastest core first."""
    limit_mib: float | None
    throttle: Literal["cgroup", "sigstop", "off"]
    memory: Literal["cgroup", "watch", "off"]
    stdio: tuple[int, int, int]
    ignored: tuple[int, ...] = ()
    """Signals that the command ignores from its start, such as SIGHUP under ``nohup``."""
    open_files: int | None = None
    """Limit on open files; None for the keeper's own limit."""
    descriptors: tuple[int, ...] = ()
    """Descriptors above 2 that the command inherits, in ascending order."""


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Message that tells the relay to forward a phone's connections."""

    phone: int
    network: str
    doors: tuple[tuple[int, tuple[tuple[int, tuple[Any, ...]], ...]], ...]
    """The phone's listening sockets: for each, its file descriptor, and the addresses (family and socket
    address) of the server for its connections. These addresses are tried in order."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Message that starts emulated time."""

    at_ns: int
    """Start of emulated time, in nanoseconds of the monotonic clock."""
    time_scale: float
    seed: int
    absence: Absence | None = None

    def presence(self, phone: int) -> AlternatingRenewal | None:
        """Return the schedule of the phone's online times; None if it is always online."""
        if (absence := self.absence) is None:
            return None
        return churn(self.seed, phone, absence.mean_online_s, absence.mean_offline_s)


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Message that tells the keeper to send a signal to the process group of each phone's command."""

    number: int


class SwitchOff(msgspec.Struct, frozen=True, tag=True):
    """Message that tells the keeper to kill a phone's processes, and to record ``why``."""

    phone: int
    why: str


class EndPhones(msgspec.Struct, frozen=True, tag=True):
    """Tells the keeper and the relay to shut down the phones.

    The keeper kills all phones. The relay delivers the data in transit unless ``now`` is set, and exits.
    """

    now: bool = True


class PhoneState(msgspec.Struct, frozen=True, tag=True):
    """Measurements of a phone so far. Times and rates are in wall seconds."""

    phone: int
    state: Literal["running", "away", "ended"]
    wall_s: float
    """Time since the start of the command, excluding absences."""
    age_s: float
    """Time from the start of the run to now, or to the end of the phone, including absences."""
    cpu_s: float
    wanting_s: float
    """Part of ``wall_s`` during which the phone ran or waited for a core."""
    declared_cpu_s: float
    """CPU time that the shares of the cores in use allowed during ``wanting_s``."""
    in_use_s: tuple[float, ...]
    """Part of ``wanting_s`` during which each core was in use, fastest core first."""
    rss_mib: float
    peak_mib: float
    """Peak memory, as counted by the control group if it limits memory; otherwise the highest sample."""
    stops: int
    """Number of absences."""
    processes: int
    uncounted_s: float = 0.0
    """Upper estimate of the CPU time that is missing from ``cpu_s`` because it was used by children that
    no process waited for."""
    unlimited: bool = False
    """True if a process of another user ran without a limit (see `ProcessTree.unlimited`)."""


class PhoneEnded(msgspec.Struct, frozen=True, tag=True):
    """A phone's command and all processes started by it have ended."""

    state: PhoneState
    code: int
    """Exit code of the command; −n if signal n ended the command."""
    why: str = ""
    """Reason why the emulation ended the command, such as a memory limit; "" if it did not."""


class TrafficState(msgspec.Struct, frozen=True, tag=True):
    """Traffic and connections of a phone's link so far."""

    phone: int
    up_bytes: int
    down_bytes: int
    open: int
    connections: int
    refused: int
    """Number of connections refused by the server, or requested while the phone was absent."""
    broken: int
    """Number of connections broken by packet loss, the phone's absence, or a server that stopped reading."""
    up_s: float
    down_s: float
    """Emulated seconds during which the uplink (``up_s``) and downlink (``down_s``) were sending bytes."""
    out_of_files: bool = False
    """True if connections were refused or delayed because the relay could open no more files."""


class Transmitted(msgspec.Struct, frozen=True, tag=True):
    """Durations of completed busy periods in one direction of a phone's link, in emulated seconds."""

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
