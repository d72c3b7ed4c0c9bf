"""What the test's process and the measuring one say to each other: plain data, nothing that runs.

Order ──► Ready | Refused          once a function
Repeat ──► Repetition | Ended      once a repetition, each in a process of its own
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

ReferenceName = Literal["train-small", "train-large", "interpreted"]

MOST_AT_A_TIME = 10_000
"""Calls or units in a shot: a call that does nothing is timed a few thousand at a time."""
AtATime = Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_A_TIME)]


class Function(msgspec.Struct, frozen=True):
    """A module-level function, by where it is."""

    module: str
    file: str
    """The module's file: it is imported from there where its name alone does not lead there."""
    qualname: str


class Against(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a function's CPU time is held against, and how much of each is timed at a time.

    It belongs to a function's figures: a shot of two units finds the second one's data in the caches, and is
    not twice one of one unit.
    """

    reference: ReferenceName
    units: AtATime
    """Units of the reference in a shot of it."""
    calls: AtATime
    """Calls of the function in a shot: what is timed as one."""


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """Get ready to run a function as a device would."""

    function: Function
    setup: Function | None
    args: list[Any]
    kwargs: dict[str, Any]
    path: list[str]
    """Where modules are looked for."""
    device: str
    network: str | None
    seed: int
    against: Against | None
    """None: the reference that is most like it, in shots as long as its own."""
    limit_s: float
    """Wall seconds that each of its processes may take."""


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """Run it once as the device would, then time it."""

    index: int
    time_scale: float
    """Wall seconds per emulated second in the first call; 0 does not wait."""


ToWorker = Order | Repeat


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """What was learnt of the function in a process that is thrown away."""

    against: Against
    reference_flop: float
    """Of one unit of the reference."""
    unit_cpu_s: float
    """What that takes this host, at its best."""
    flop: float
    """Of one call, as torch counts them; 0 where it computes nothing in torch."""
    pairs: int
    """Shots of each in a repetition."""
    imported: list[str]
    """Parts of torch that the first call imported, in that order."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It cannot be measured."""

    why: str


class Repetition(msgspec.Struct, frozen=True, kw_only=True, tag="repetition"):
    """What one process measured. CPU seconds are the host's, all others emulated."""

    cpu_s: list[float]
    """Of each shot of the function."""
    reference_cpu_s: list[float]
    """Of each shot of the reference, before and after those."""
    blocked_s: float
    """In the first call: neither computing nor waiting for a core, nor for the link."""
    peak_mib: float
    """Growth of private memory in the first call, at its highest."""
    sent_bytes: int
    radio_s: float
    """Spent in transfers, latency included."""
    declared_s: float
    """What the first call takes the device, by its own CPU time."""
    achieved_s: float
    """What it took here, as the clock reads."""
    waited: float
    """Share of the timed part in which it could have run and had no core."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process ended without a measurement."""

    kind: Literal["memory", "raised", "signal", "late"]
    why: str


FromWorker = Ready | Refused | Repetition | Ended
