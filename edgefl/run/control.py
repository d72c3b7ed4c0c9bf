"""Messages that the processes of a run send each other over their channels: plain data.

The supervisor starts everything; the zygote makes clients and tells of their ends; the server runs the
experiment. Only the supervisor talks to both.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal, NamedTuple

import msgspec

from edgefl.experiment import MOST_PROCESSES, Experiment
from edgefl.host.capacity import TimeScale
from edgefl.host.channel import Refused
from edgefl.host.confinement import Enforcement
from edgefl.learning.operations import BatchWork
from edgefl.parameters.buffer import Shape

Role = Literal["client", "worker", "evaluator"]
CLIENT: Role = "client"
WORKER: Role = "worker"
EVALUATOR: Role = "evaluator"

ABSENT, IDLE = range(2)
"""States of a client; on a trip it is IDLE and the trip's phase more."""
Figure = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
"""A figure that a node reports; bounded, since the node may be untrusted."""
OUT_OF_MEMORY = "device out of memory"
"""Start of the reason why a process ended that was killed at its memory limit."""


def routing_id(role: str, peer: int, epoch: int) -> bytes:
    """The name of a peer's socket: a new process of the same peer has another."""
    return f"{role}-{peer}-{epoch}".encode()


def password(secret: str, name: bytes) -> str:
    """The word by which the server knows the process that it gave this name to, and no other."""
    return hmac.digest(secret.encode(), name, "sha256").hex()


def secret_key(password: str) -> bytes:
    """The secret key by which the process with this password is known at a run's door."""
    return hmac.digest(password.encode(), b"curve key", "sha256")


def address(root: str, secret: str, name: bytes) -> str:
    """The address of the process of this name: not to be guessed before it is there."""
    return root + hmac.digest(secret.encode(), b"address of " + name, "sha256").hex()[:32]


class _OfPeer(msgspec.Struct, frozen=True):
    role: Role
    peer: int
    epoch: int


class Departed(_OfPeer, frozen=True, tag="departed"):
    """A process has ended, so it can write nowhere any more: zygote → supervisor → server."""

    reason: str
    task: int | None = None
    """The task that a worker had begun last."""


class Expel(_OfPeer, frozen=True, tag="expel"):
    """The process hangs or sends rubbish and is to be ended: server → supervisor → zygote."""


# ---- supervisor → web process ------------------------------------------------------------------


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """The run that is shown, its folder, and the path by which its page is found."""

    experiment: Experiment
    folder: str
    path: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    """An activity besides training, as `RunView.say` takes it, or `RunView.restarted`."""

    text: str
    restarted: bool = False


class Described(msgspec.Struct, frozen=True, tag="described"):
    """The fleet, the workload in words, and the time scale."""

    fleet: list[tuple[str, str, int]]
    """Profile, network and count of clients, in the clients' order."""
    workload: str
    scale: TimeScale


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run is over; how, in a word or two."""

    outcome: str


# ---- supervisor → zygote -----------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Load data and model, train for a few trips, and say what a step costs."""

    experiment: Experiment
    base: str
    enforcement: Enforcement = Enforcement()
    nodes: bool = False
    """Others will do the same: say by which `Prepared.fingerprint` they know that it is the same."""


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """The parameter buffer, whose descriptor comes with this message."""

    initialise: bool
    """Write the first model into entry 0; false for a run that goes on."""
    shape: Shape | None = None
    """On a node, which shares no memory with the server: make one like it, for what peers note there."""


class Spawn(_OfPeer, frozen=True, tag="spawn"):
    """Fork one process."""

    address: str
    password: str
    server: int
    """The process that may connect to the address."""
    time_scale: float
    key: bytes = b""
    """The server's public key, if the address is that of its door."""
    as_is: bool = False
    """Do not hold it to its profile's pace, or memory."""


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """End every client, worker and evaluator: their server is gone."""

    restarts: int


ToZygote = Prepare | Adopt | Spawn | Expel | Clear

# ---- zygote → supervisor -----------------------------------------------------------------------


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of what must be the same wherever a run computes."""

    data: str
    """Digest of the examples, their partition and the first model."""
    training: str
    """Digest of the model that a trip's training makes."""


class FirstTrip(NamedTuple):
    """A client's first trip as its device makes it, in emulated seconds; ``total_s`` as it goes, the parts of
    it one after the other."""

    steps: int
    down_s: float
    compute_s: float
    total_s: float


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The workload of D = ``size`` parameters, and its cost on this host in CPU seconds a step.

    ``examples`` and ``held_out`` are counts by client, ``classes`` counts of the classes that a client holds,
    and ``labels`` these classes, one client's after the other: int64, as `column` reads them.
    """

    size: int
    layout: list[tuple[str, list[int], int]]
    """Name, shape and offset of each tensor in the flat vector."""
    examples: bytes
    held_out: bytes
    classes: bytes
    labels: bytes
    first_trips: list[FirstTrip]
    """By client, for the time scale of the wall clock; none under the virtual one."""
    work: BatchWork
    """Work of a training step, by batch size."""
    host_step_s: float
    test_examples: int
    dataset: str
    fingerprint: Fingerprint | None = None
    buffers: int = 0
    """Elements at the end of the model that are running statistics: `FlatModel.buffers`."""
    remark: str = ""
    """A warning about the model, for the user."""


def column(numbers: bytes) -> memoryview[int]:
    """The whole numbers of a column of `Prepared`."""
    return memoryview(numbers).cast("q")


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The zygote has the parameter buffer; the first model of a new run lies in entry 0."""


class Spawned(_OfPeer, frozen=True, tag="spawned"):
    pid: int


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """They have ended; the answer to `Clear`."""

    restarts: int


FromZygote = Prepared | Adopted | Spawned | Departed | Cleared | Refused

# ---- node ⇄ supervisor: what supervisor and zygote say to each other, and this -----------------


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A process offers to host peers of the run: node → supervisor."""

    host: tuple[str, int, str]
    """CPU, usable cores and system, as `edgefl.host.capacity.Host`."""
    machine: str
    """The running system that it is on: nodes on one share its cores."""
    cores: Figure
    """Cores that it may use, by affinity and quota."""
    software: dict[str, str]
    """Versions of what the bits depend on, by name."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)]
    """Workers that it hosts under the virtual clock."""
    device: str = ""
    """The profile of the one client that it is, if it is one."""
    as_is: bool = False
    """That client is not held to its profile: the host is such a device."""


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """The node has data and model, and what a step costs there in CPU seconds: node → supervisor."""

    fingerprint: Fingerprint
    host_step_s: Figure


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing to say: sending it tells whether the node is there. Supervisor → node."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The run is over: end everything. Supervisor → node."""

    outcome: str


class NodeEnded(msgspec.Struct, frozen=True, tag="node-ended"):
    """Everything has ended there, as the run is over: node → supervisor."""

    usage: dict[str, float | None]
    """Figures of `edgefl.host.capacity.UsageMeter`."""


ToNode = ToZygote | Alive | Over | Refused
FromNode = Join | Agreed | Adopted | Spawned | Departed | Cleared | Refused | NodeEnded

# ---- nodes → supervisor's loop -----------------------------------------------------------------


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """One more node has joined and agrees; so many do."""

    nodes: int


FromNodes = Gathered | Departed | Cleared | Refused

# ---- supervisor → server -----------------------------------------------------------------------


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Everything the server needs; the parameter buffer's descriptor comes with this message."""

    experiment: Experiment
    base: str
    run_dir: str
    prepared: Prepared
    time_scale: float
    load: float
    workers: int
    resume: bool
    restarts: int = 0
    """Servers of this run before this one, which were killed."""
    killed: str = "server"
    """The process whose death ended the last of them: itself or the zygote."""
    recover: bool = False
    """Their buffer belongs to their record: go on from both, and not from a checkpoint."""
    door: str = ""
    """Address for peers on other hosts, ``tcp://HOST:PORT``; the port may be ``*``."""
    states: bool = False
    """Tell each client's state, for somebody who looks: `Progress.states`."""


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the run now, resumable."""

    reason: str


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """There is room for more workers (virtual clock): from number ``first`` on, ``workers`` in all."""

    first: int
    workers: int


ToServer = Serve | Departed | Interrupt | Grow

# ---- server → supervisor -----------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The server calls its peers: where their addresses begin, the secret that these and their passwords are
    made of, and the process id that they may hear. If it has a door: its address, and the server's key."""

    root: str
    secret: str
    pid: int
    door: str = ""
    key: bytes = b""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The live view's figures, a few times a second; ``invalid`` is the first bound that is not held."""

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
    metrics: dict[str, float]
    fidelity_median: float | None
    fidelity_p95: float | None
    invalid: str
    dropped: int
    incidents: int
    by_profile: dict[str, list[int]]
    """Profile → [idle, training, absent, trips]."""
    states: bytes = b""
    """By client `ABSENT`, or `IDLE` and the `TripPhase` of its trip; now and then, if `Serve` asks for it."""


class Replace(_OfPeer, frozen=True, tag="replace"):
    """Start this peer, as a process of this epoch."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The record and the last checkpoint are on disk."""

    reason: str
    interrupted: bool
    no_progress: str = ""
    """`edgefl.results.record.Meta.no_progress`."""


ToWeb = Shown | Said | Described | Progress | Ended
FromServer = Listening | Progress | Replace | Expel | Finished | Refused
