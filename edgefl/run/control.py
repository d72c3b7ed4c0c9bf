"""Messages that the processes of a run exchange through channels.

The supervisor starts the other processes. The zygote forks the clients and reports when they end; the server
runs the experiment. On these channels, the zygote and the server communicate only with the supervisor.
"""

from __future__ import annotations

import hmac
from typing import Literal, NamedTuple

import msgspec

from edgefl.experiment import Experiment
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
"""States of a client; during a trip its state is `IDLE` plus the trip's `TripPhase`."""
OUT_OF_MEMORY = "device out of memory"
"""Prefix of the reason that is given when a process was killed at its memory limit."""


def routing_id(role: str, peer: int, epoch: int) -> bytes:
    """Return the name of a peer's socket, which is different for each process of the same peer."""
    return f"{role}-{peer}-{epoch}".encode()


def password(secret: str, name: bytes) -> str:
    """Return the password by which the server recognises the process with this name."""
    return hmac.digest(secret.encode(), name, "sha256").hex()


def secret_key(password: str) -> bytes:
    """Return the CURVE secret key of the process with this password, for its connection to the door (the
    server's socket for other machines)."""
    return hmac.digest(password.encode(), b"curve key", "sha256")


def address(root: str, secret: str, name: bytes) -> str:
    """Return the socket address of a process; it cannot be guessed without the secret."""
    return root + hmac.digest(secret.encode(), b"address of " + name, "sha256").hex()[:32]


class _OfPeer(msgspec.Struct, frozen=True):
    role: Role
    peer: int
    epoch: int


class Departed(_OfPeer, frozen=True, tag="departed"):
    """Zygote → supervisor → server: a process has ended and can no longer write anything."""

    reason: str
    task: int | None = None
    """The task that the worker began last, if any."""


class Expel(_OfPeer, frozen=True, tag="expel"):
    """Server → supervisor → zygote: end a process that hangs or sends invalid messages."""


# ---- supervisor → web process ------------------------------------------------------------------


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """First message to the process that serves the live page: the run, its folder, and the URL path."""

    experiment: Experiment
    folder: str
    path: str


class Activity(msgspec.Struct, frozen=True, tag="activity"):
    """The current activity of a run that is not training, such as loading data.

    If ``restarted`` is True, ``text`` is the reason why the clients are restarted.
    """

    text: str
    restarted: bool = False


class Described(msgspec.Struct, frozen=True, tag="described"):
    """The run's fleet, workload, time scale and remark, for the terminal and the live page."""

    fleet: list[tuple[str, str, int]]
    """Profile, network and number of clients of each group, in the order of the clients' numbers."""
    workload: str
    scale: TimeScale
    remark: str = ""
    """Lines about the run that the terminal shows below the lines about the time scale; "" for none."""


class Verdict(NamedTuple):
    """A verdict on the fidelity of a run, as the run's views show it."""

    word: str
    """VALID, INVALID or ``times computed``; empty while there is no verdict."""
    why: str = ""
    """Reason why the run is INVALID, or the size of the enforcement error if the run is VALID."""


NO_VERDICT = Verdict("")


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run has ended; ``outcome`` is a short description."""

    outcome: str
    verdict: Verdict


# ---- supervisor → zygote -----------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Load the data and the model, train for a few trips, and report the cost of a training step."""

    experiment: Experiment
    base: str
    enforcement: Enforcement = Enforcement()
    fingerprint: bool = False
    """True to fill in `Prepared.fingerprint`, whose digests show whether all hosts compute the same bits."""
    phones: bytes = b""
    """Secret from which the phones' keys are derived; empty without secure aggregation."""


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Map the parameter buffer, whose file descriptor is attached."""

    initialise: bool
    """True to write the first model into ring entry 0; False for a resumed run."""
    shape: Shape | None = None
    """Shape of the buffer that a node, which shares no memory with the server, must create; None if a file
    descriptor is attached."""


class Spawn(_OfPeer, frozen=True, tag="spawn"):
    """Fork a process for a client, a worker or the evaluator."""

    address: str
    password: str
    server: int
    """Process id of the only process that may connect to the address."""
    time_scale: float
    key: bytes = b""
    """The server's public key if the address is the door, its socket for other machines; otherwise empty."""
    as_is: bool = False
    """True if the process runs without the speed and memory limits of its device profile."""


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """End all clients, workers and evaluators, because their server has died."""

    restarts: int


ToZygote = Prepare | Adopt | Spawn | Expel | Clear

# ---- zygote → supervisor -----------------------------------------------------------------------


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of data and training, which must be equal on all hosts of a run."""

    data: str
    """Digest of the examples, their partition and the first model."""
    training: str
    """Digest of the model after the training of one trip."""


class FirstTrip(NamedTuple):
    """The first trip of a client on its device; all times are in emulated seconds.

    ``total_s`` is the planned duration of the trip. ``down_s`` and ``compute_s`` are the times that download
    and training take if they do not overlap.
    """

    steps: int
    down_s: float
    compute_s: float
    total_s: float


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The workload is loaded: its model has ``size`` parameters, and a training step takes ``host_step_s``
    seconds of CPU time on this host.

    ``examples``, ``held_out`` and ``classes`` hold each client's number of training examples, of held-out
    examples and of classes. ``labels`` holds the classes of all clients, one client after another.
    All four are arrays of int64; see `column`.
    """

    size: int
    layout: list[tuple[str, list[int], int]]
    """Name, shape and offset of each tensor in the flat vector."""
    examples: bytes
    held_out: bytes
    classes: bytes
    labels: bytes
    first_trips: list[FirstTrip]
    """The clients' first trips, from which the wall clock's time scale is chosen; empty under the virtual
    clock."""
    work: BatchWork
    """Work of a training step as a function of the batch size."""
    host_step_s: float
    test_examples: int
    dataset: str
    fingerprint: Fingerprint | None = None
    buffers: int = 0
    """Number of running statistics, which are the last elements of the model; see `FlatModel.buffers`."""
    remark: str = ""
    """A warning about the model, for the user."""
    code: dict[str, str] = {}
    """Digests of the user's own modules, from `edgefl.loading.digests`."""

    def sizes(self) -> tuple[object, ...]:
        """Return the sizes of the model and of the clients' data, which must not change during a run."""
        return self.layout, self.buffers, self.examples, self.held_out


def column(numbers: bytes) -> memoryview[int]:
    """Return one of the byte arrays in `Prepared` as a view of 64-bit integers."""
    return memoryview(numbers).cast("q")


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The zygote has mapped the parameter buffer; entry 0 holds the first model of a new run."""


class Spawned(_OfPeer, frozen=True, tag="spawned"):
    pid: int


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Answer to `Clear`: all clients, workers and evaluators have ended."""

    restarts: int


FromZygote = Prepared | Adopted | Spawned | Departed | Cleared | Refused

# ---- hosts → supervisor's loop -----------------------------------------------------------------


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """The number of hosts that are ready for peers has changed to ``hosts``."""

    hosts: int


FromHosts = Gathered | Departed | Cleared | Refused

# ---- supervisor → server -----------------------------------------------------------------------


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Complete configuration of the server; the parameter buffer's descriptor is attached."""

    experiment: Experiment
    base: str
    run_dir: str
    prepared: Prepared
    time_scale: float
    load: float
    workers: int
    resume: bool
    restarts: int = 0
    """Number of servers of this run that were killed before this one was started."""
    killed: str = "server"
    """Process that was killed before this server was started: "server" or "zygote". If it was "zygote", the
    supervisor has also ended the earlier server."""
    recover: bool = False
    """True to continue from the killed server's buffer and record instead of from a checkpoint."""
    door: str = ""
    """Address for peers on other machines, ``tcp://HOST:PORT``, where the port may be ``*``; empty if all
    peers are on this machine."""
    states: bool = False
    """True to report the clients' states for the live page; see `Progress.states`."""

    def with_code(self, code: dict[str, str]) -> Serve:
        """Return the plan with these digests of the user's own code; see `Prepared.code`."""
        replace = msgspec.structs.replace
        return replace(self, prepared=replace(self.prepared, code=code))


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Stop the run now; the run can be resumed later."""


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Start more workers under the virtual clock, with the numbers ``first`` to ``workers`` − 1."""

    first: int
    workers: int


ToServer = Serve | Departed | Interrupt | Grow

# ---- server → supervisor -----------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The server is ready to connect to its peers.

    ``root`` is the prefix of the peers' addresses, ``secret`` the secret from which addresses and passwords
    are derived, and ``pid`` the id of the only process that peers accept. If the server has a door, which is
    a socket for other machines, ``door`` is its address and ``key`` the server's public key.
    """

    root: str
    secret: str
    pid: int
    door: str = ""
    key: bytes = b""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Metrics for the live view, sent a few times per second.

    ``invalid`` is the first reason found so far why the run is INVALID, or "" if there is none.
    """

    emulated_s: float
    wall_s: float
    version: int
    trips: int
    connected: int | None
    """Number of connected clients until all are connected; None once emulated time has begun."""
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
    """For each profile, the numbers of idle clients, training clients, absent clients and trips."""
    states: bytes = b""
    """One byte for each client: `ABSENT`, or `IDLE` plus its `TripPhase`; empty in most messages."""


class Replace(_OfPeer, frozen=True, tag="replace"):
    """Start a process for this peer; ``epoch`` is the number of the peer's earlier processes."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The server has finished, and the record and the last checkpoint are on disk."""

    reason: str
    interrupted: bool
    no_progress: str = ""
    """Reason why the run has no result, or ""; see `edgefl.results.rows.Meta.no_progress`."""


ToWeb = Shown | Activity | Described | Progress | Ended
FromServer = Listening | Progress | Replace | Expel | Finished | Refused
