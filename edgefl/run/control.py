"""Messages that the processes of a run send each other over their channels: plain data.

The supervisor starts everything; the zygote makes clients and tells of their ends; the server runs the
experiment. Only the supervisor talks to both.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgefl.devices.fleet import ClientInfo
from edgefl.experiment import Experiment
from edgefl.limits.confinement import Enforcement
from edgefl.strategies.base import Client

Role = Literal["client", "worker", "evaluator"]
CLIENT: Role = "client"
WORKER: Role = "worker"
EVALUATOR: Role = "evaluator"

OUT_OF_MEMORY = "device out of memory"
"""Start of the reason why a process ended that was killed at its memory limit."""


def routing_id(role: str, peer: int, epoch: int) -> bytes:
    """The name of a peer's socket: a new process of the same peer has another."""
    return f"{role}-{peer}-{epoch}".encode()


class _OfPeer(msgspec.Struct, frozen=True):
    """A message about one process of a peer."""

    role: Role
    peer: int
    epoch: int


class Departed(_OfPeer, frozen=True, tag="departed"):
    """A process has ended, so it can write nowhere any more: zygote → supervisor → server."""

    reason: str
    """``exit 0``, ``signal 9``, or `OUT_OF_MEMORY` and the limit."""


class Expel(_OfPeer, frozen=True, tag="expel"):
    """The process hangs or sends rubbish and is to be ended: server → supervisor → zygote."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The run cannot begin or go on; the message is the user's one line. From zygote or server."""

    message: str
    config: bool
    """True if the experiment is at fault (exit code 2), False if the run is (exit code 1)."""


# ---- supervisor → zygote -----------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Load data and model, run one training step, and say what it costs."""

    experiment: Experiment
    base: str
    """Folder in which the user's own modules are looked for."""
    clients: list[ClientInfo]
    enforcement: Enforcement = Enforcement()


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """The parameter buffer, whose descriptor comes with this message; write the first model into entry 0."""

    initialise: bool


class Spawn(_OfPeer, frozen=True, tag="spawn"):
    """Fork one process."""

    endpoint: str
    time_scale: float


ToZygote = Prepare | Adopt | Spawn | Expel

# ---- zygote → supervisor -----------------------------------------------------------------------


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The workload and its cost on this host."""

    size: int
    """Parameters D."""
    layout: list[tuple[str, list[int], int]]
    """Name, shape and offset of each tensor in the flat vector."""
    clients: list[Client]
    labels: list[list[int]]
    """By client: the labels it holds."""
    emulated_trip_s: list[float]
    """By client: how long its first trip takes on its device."""
    flops_per_example: float
    host_step_s: float
    """CPU seconds of one training step on this host."""
    test_examples: int
    dataset: str


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The first model lies in entry 0."""


class Spawned(_OfPeer, frozen=True, tag="spawned"):
    pid: int


FromZygote = Prepared | Adopted | Spawned | Departed | Refused

# ---- supervisor → server -----------------------------------------------------------------------


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Everything the server needs; the parameter buffer's descriptor was inherited."""

    experiment: Experiment
    base: str
    run_dir: str
    clients: list[ClientInfo]
    prepared: Prepared
    time_scale: float
    load: float
    """Share of the host's cores that the fleet is expected to need."""
    workers: int
    resume: bool


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the run now, resumable."""

    reason: str


ToServer = Serve | Departed | Interrupt

# ---- server → supervisor -----------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    endpoint: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The live view's figures, a few times a second."""

    emulated_s: float
    wall_s: float
    version: int
    trips: int
    connected: int | None
    """Clients that are there until all are; None once emulated time runs."""
    staleness_mean: float
    staleness_max: int
    accuracy: float | None
    loss: float | None
    fidelity_median: float | None
    fidelity_p95: float | None
    invalid: str
    """The first bound that the emulation does not hold so far, in words; empty while it holds all."""
    dropped: int
    incidents: int
    """Clients that died, hung or sent rubbish."""
    by_profile: dict[str, list[int]]
    """Profile → [idle, training, absent, trips]."""


class Replace(_OfPeer, frozen=True, tag="replace"):
    """Start this peer again, as a process of this epoch."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The record and the last checkpoint are on disk."""

    reason: str
    interrupted: bool


FromServer = Listening | Progress | Replace | Expel | Finished | Refused
