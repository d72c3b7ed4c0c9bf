"""Messages between the process that the user started, the keeper and the relay; each trusts the others.

run ──► keeper    Launch…, Begin, Pass, SwitchOff, EndPhones
run ◄── keeper    PhoneState, PhoneEnded
run ──► relay     Carry…, Begin, EndPhones
run ◄── relay     TrafficState, Transmitted, Drained
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ThrottleBy = Literal["cgroup", "sigstop", "off"]
MemoryKept = Literal["cgroup", "watch", "off"]
Leaves = Literal["stop", "kill"]


class Absence(msgspec.Struct, frozen=True):
    """Phones come and go: on and off for exponentially distributed emulated seconds of these means."""

    mean_online_s: float
    mean_offline_s: float
    leave: Leaves = "stop"
    """The processes of one that is away stand still, or are killed and the command is started again."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """One phone's command, for the keeper."""

    phone: int
    command: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    folder: bytes | None
    share: float
    """Cores of this host, wall time."""
    limit_mib: float | None
    throttle: ThrottleBy
    memory: MemoryKept
    stdio: tuple[int, int, int]
    ignored: tuple[int, ...] = ()
    """Stop signals that the command ignores, such as SIGHUP under ``nohup``."""
    open_files: int | None = None
    """The limit; None: the keeper's own."""


class Carry(msgspec.Struct, frozen=True, tag=True):
    """One phone's link, for the relay: descriptors of listeners, and the servers behind them."""

    phone: int
    network: str
    doors: tuple[tuple[int, int, tuple[Any, ...]], ...]
    """Descriptor of the listener, family and address of the server."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Emulated time begins."""

    at_ns: int
    """On the monotonic clock."""
    time_scale: float
    seed: int
    absence: Absence | None = None


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Send every phone's processes this signal."""

    number: int


class SwitchOff(msgspec.Struct, frozen=True, tag=True):
    """Kill a phone's processes, for a reason."""

    phone: int
    why: str


class EndPhones(msgspec.Struct, frozen=True, tag=True):
    """The keeper: kill what lives. The relay: carry what is on its way (or, ``now``, do not), and end."""

    now: bool = True


class PhoneState(msgspec.Struct, frozen=True, tag=True):
    """Figures of a phone so far; seconds and rates are the host's."""

    phone: int
    state: Literal["running", "away", "ended"]
    wall_s: float
    """Since its command was started, without times of absence."""
    cpu_s: float
    wanting_s: float
    """Part of ``wall_s`` in which it ran or waited for a core, seconds."""
    rss_mib: float
    peak_mib: float
    stops: int
    """Times it was absent."""
    processes: int
    uncounted_s: float = 0.0
    """Upper estimate of the CPU time missing in ``cpu_s``: of children whose parent ignores SIGCHLD."""


class PhoneEnded(msgspec.Struct, frozen=True, tag=True):
    """A phone's command has ended, and with it all that it had started."""

    state: PhoneState
    code: int
    """Its exit code; −n where signal n ended it."""
    why: str = ""
    """Set where it was ended by the emulation, such as for want of memory."""


class TrafficState(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a phone's link has carried, and connections."""

    phone: int
    up_bytes: int
    down_bytes: int
    open: int
    connections: int
    refused: int
    """Connections that the server refused, or that were asked for while the phone was away."""
    broken: int
    """Connections that the link broke, or the phone's absence, or a server that took nothing at the end."""
    radio_s: float
    """Emulated seconds in which bytes were on the wire, both directions together."""


class Transmitted(msgspec.Struct, frozen=True, tag=True):
    """Some busy periods of one direction of a phone's link; emulated seconds."""

    phone: int
    way: Literal["up", "down"]
    declared_s: list[float]
    achieved_s: list[float]


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Nothing is on its way any more; the relay ends."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process has all it needs to begin."""


ToKeeper = Launch | Begin | Pass | SwitchOff | EndPhones
FromKeeper = Started | PhoneState | PhoneEnded
ToRelay = Carry | Begin | EndPhones
FromRelay = Started | TrafficState | Transmitted | Drained
