"""Types for the rows of the run record's tables.

Each type describes one table of ``record.sqlite``: its fields are the columns, and the first field is the
primary key. Rows are created with keyword arguments only, because swapped positional arguments would go
unnoticed. Fields whose names end in ``_s`` are in emulated seconds, and points in time are counted from the
start of the run; ``wall_s`` is in seconds of this machine's clock.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from edgefl.devices.energy import PowerDraw
from edgefl.experiment import Privacy, Secure

APPLICATION_ID = 0x45464C52
"""``EFLR`` in the SQLite header, which distinguishes a run record from other databases."""
SCHEMA_VERSION = 6
FILE_NAME = "record.sqlite"
FATES = ("applied", "discarded", "dropped", "lost")
"""The possible outcomes of a trip's update. Applied: a version used it. Discarded: it was valid but was not
used, or its task was cancelled. Dropped: it was not finite, or was altered in transit. Lost: it is missing,
because the client went offline, died or failed."""


class ClientRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One emulated device."""

    client: int
    profile: str
    network: str
    examples: int
    """Number of training examples."""
    test_examples: int = 0
    """Number of held-out examples."""
    labels: tuple[int, ...] = ()
    """Classes with at least one example on this client, in ascending order."""
    step_s: float | None = None
    """Declared time of a training step on a full batch, in seconds.

    None if the profile has only a delay model.
    """
    memory_mib: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None


class TripRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One client trip: download, local training and upload, possibly incomplete.

    A field ``*_declared_s`` is the duration of a part of the trip according to the profile. The field of the
    same name without ``declared`` is the actual duration, which for the whole trip is ``trip_achieved_s``.
    """

    task: int
    client: int
    base_version: int
    trip: int
    """Index of the trip: the number of the client's earlier tasks."""
    sent_s: float
    received_s: float | None = None
    arrived_s: float | None = None
    """Time at which the complete update was in its slot of shared memory; None if no update arrived."""
    staleness: int | None = None
    applied_version: int | None = None
    """The first version that used the update."""
    weight: float | None = None
    fate: str | None = None
    """One of `FATES`; None while the trip is running or its update waits in the buffer."""
    reason: str = ""
    examples: int | None = None
    steps: int | None = None
    loss: float | None = None
    trained_version: int | None = None
    """The version from which the client trained, according to its report; must equal ``base_version``."""
    down_bytes: int | None = None
    up_bytes: int | None = None
    down_s: float | None = None
    compute_s: float | None = None
    up_s: float | None = None
    down_declared_s: float | None = None
    compute_declared_s: float | None = None
    up_declared_s: float | None = None
    delay_declared_s: float | None = None
    """Sum of the one-way delays of the download and the upload."""
    delay_s: float | None = None
    trip_declared_s: float | None = None
    trip_achieved_s: float | None = None
    work_s: float | None = None
    """Training time at the device's full speed, according to the device's time model."""
    busy_s: float | None = None
    """Declared time for which computing at full power takes as much energy as the computing of this trip.

    It is less than ``compute_declared_s`` if the device throttled, or if it rested after its last step.
    """
    lateness_s: float | None = None
    """How late the trip ended, in emulated seconds after its planned end.

    None if the trip was made by a real device (``edgefl join --as-is``), whose trips do not follow a plan.
    """
    cpu_s: float | None = None
    """CPU time of the training on this machine, in seconds."""
    peak_mib: float | None = None
    """Peak memory of the training, predicted from the trace of its step."""
    process_grew_mib: float | None = None
    """Largest memory growth of the client's process on this machine so far, in MiB; None under the virtual
    clock."""
    checksum_sent: int | None = None
    checksum_seen: int | None = None
    """64-bit checksums of the update.

    The client computes ``checksum_sent``, and the server computes ``checksum_seen`` from the slot.
    """
    metrics: dict[str, float] = {}
    """Metrics logged by the user's own training function. See `Record.metrics`."""


class VersionRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One published version of the global model."""

    version: int
    at_s: float
    wall_s: float
    updates: int
    weight_sum: float
    sum_s: float
    """Duration of the weighted sum, in wall seconds."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Measurement of a version on the server's test examples and on the clients' own held-out examples."""

    version: int
    at_s: float
    wall_s: float
    """Wall time at which the result arrived, which is later than the wall time that belongs to ``at_s``."""
    trips: int
    """Number of client trips that had ended at ``at_s``."""
    accuracy: float
    """Accuracy of the version; NaN for a task without classes, unless the user's function returns one."""
    loss: float
    correct: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    """Numbers of correct predictions (``correct``) and of test examples (``total``) in each class."""
    metrics: dict[str, float] = {}
    """Finite metrics returned by the user's own function."""
    clients: tuple[int, ...] = ()
    """IDs of the clients on whose held-out examples the version was measured."""
    client_loss: tuple[float, ...] = ()
    """Loss of the global model on the held-out examples of each of ``clients``."""
    client_accuracy: tuple[float, ...] = ()
    """Accuracy of the global model on the held-out examples of each of ``clients``."""
    personal_loss: tuple[float, ...] = ()
    """Like ``client_loss``, but for each client's personal model: the global model after training on the
    client's data."""
    personal_accuracy: tuple[float, ...] = ()
    """Like ``client_accuracy``, but for each client's personal model."""


class IncidentRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fault that the run handled. Some values of ``kind`` are death, hang, oom, checksum and rejoin."""

    id: int | None
    at_s: float
    client: int | None
    kind: str
    detail: str = ""


class CostRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Wall time, in seconds, and number of calls of one stage of the server's work."""

    stage: str
    seconds: float
    calls: int


class Aggregation(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all weighted sums. A sum of K updates of D parameters moves (K + 2)·D·4 ``bytes``."""

    backend: str = ""
    threads: int = 1
    """Maximum number of threads that compute one sum."""
    updates: int = 0
    seconds: float = 0.0
    bytes: int = 0


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Proportional set sizes in MiB: a page that n processes share counts as 1/n of a page for each."""

    server_mib: float | None = None
    supervisor_mib: float | None = None
    zygote_mib: float | None = None
    evaluator_mib: float | None = None
    shared_mib: float | None = None
    """Size of the parameter buffer, which the processes share."""
    clients_mib: dict[int, float] = {}
    """Size of each client (wall clock) or each worker (virtual clock), keyed by its id."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node that hosted clients or workers ("peers") of the run."""

    name: str
    cpu: str
    cores: float
    """Number of cores that this node can use; several nodes on one machine divide its cores."""
    system: str
    machine: str
    host_step_s: float
    peers: list[int]
    """IDs of the clients, or of the workers under the virtual clock, that the node has hosted."""
    as_is: bool = False
    """True if the node is a real device and trains at its own speed."""
    lost: str = ""
    """Reason why the run lost the node; empty if the node was not lost."""
    usage: dict[str, float | None] = {}
    """The node's ``used``, ``others``, ``steal`` and ``throttled``, as defined in `Meta`."""


class EarlierCode(msgspec.Struct, frozen=True):
    """The user's own code before a change that took effect when the run was resumed or a killed process was
    replaced; see `edgefl.results.own_code`."""

    version: int
    trips: int
    """The last version that was made with this code, and the number of trips that had ended when the run
    continued with other code."""
    code: dict[str, str]
    """SHA-256 digests of this code, keyed as in `Meta.code`."""


class SecureCost(msgspec.Struct, frozen=True):
    """The settings of a run's secure aggregation, and its costs per trip and per version."""

    settings: Secure
    step: float
    """Each element of an update is rounded to a multiple of this number."""
    share_bytes: int
    """Number of bytes that an upload holds in addition to the masked or encrypted update."""
    held_bytes: tuple[int, int]
    """For a client that helps to unmask sums: bytes that it receives for each update in a sum, and bytes that
    it sends for each sum."""
    masking_s: dict[str, float]
    """Time to mask an update, in emulated seconds, keyed by profile."""


class Resume(msgspec.Struct, frozen=True):
    """A resume of the run, perhaps on another host or on other nodes."""

    at_s: float
    """Emulated time at which the run continued."""
    host_step_s: float
    """CPU time of one training step, in seconds, measured before the resume; see `Meta.host_step_s`."""
    nodes: int
    """Number of entries in `Meta.nodes` at the resume; these nodes left the run before it."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Data about the whole run. In the table ``meta``, each field is a row: see `Store.set_meta`."""

    name: str = ""
    edgefl: str = ""
    """Version of edgefl that created the record."""
    created_unix_s: float | None = None
    base: str = ""
    """Folder from which the user's own modules are imported."""
    status: str = "created"
    """One of created, running, done, interrupted and failed."""
    stop_reason: str = ""
    no_progress: str = ""
    """Reason why the model learned nothing, so that the run has no result; empty if the model learned."""
    strategy: str = ""
    strategy_fields: dict[str, Any] = {}
    remark: str = ""
    """`Strategy.remark`: a warning about hyperparameters that do not fit together."""
    in_phase: str = ""
    """Reason why clients are meant to act together; empty if they should be independent."""
    privacy: Privacy | None = None
    """The table ``[privacy]`` of the experiment."""
    sampling: tuple[float, bool] | None = None
    """`Strategy.sampling`: the probability that a client is drawn, and whether draws are independent."""
    max_weight: float | None = None
    """Maximum weight of one update in a step (`Strategy.max_weight`). The server's noise is scaled to it."""
    clock: str = ""
    seed: int = 0
    clients: int = 0
    secure: SecureCost | None = None
    """Settings and costs of secure aggregation; None if the server sees individual updates."""
    attackers: list[int] = []
    """IDs of the clients that send harmful updates."""
    processes: int = 0
    """Number of training processes: of clients under the wall clock, of workers under the virtual clock."""
    transport: str = ""
    time_scale: float = 1.0
    wall_s: float = 0.0
    emulated_s: float = 0.0
    data: str = ""
    partition: str = ""
    test_examples: int = 0
    model: str = ""
    parameters: int = 0
    first_weights_sha256: str = ""
    """Hash of the weights of version 0 (`ParameterBuffer.weights_digest`)."""
    model_sha256: str = ""
    aggregation: Aggregation = Aggregation()
    server_trip_us: float | None = None
    """Median wall time, in µs, that the server spends on a trip, excluding the weighted sum."""
    memory: MemoryUse = MemoryUse()
    throttle: str = ""
    memory_mechanism: str = ""
    """The mechanism that slowed training (``throttle``: paced, sigstop or cgroup), and the mechanism that
    limited memory (``memory_mechanism``: rlimit, cgroup or off)."""
    model_error_factor: dict[str, float] = {}
    """For each profile, the factor within which 90% of a real device's step times agree with the profile."""
    trip_s: dict[str, float] = {}
    """For each profile, the declared time of a typical trip, in emulated seconds. Empty in records of edgefl
    before 1.0.0."""
    power: dict[str, dict[str, PowerDraw]] = {}
    """Power draw of the fleet's devices, keyed by profile and network, for profiles that contain it."""
    apart_s: dict[str, dict[str, tuple[float, float]]] = {}
    """Seconds that a download and an upload take, keyed by profile and network, if the strategy schedules
    transfers separately; otherwise empty, and the transfers are part of the trips."""
    uploads_on_demand: bool = False
    """True if clients uploaded only the updates that a version used (`Strategy.uploads_on_demand`)."""
    host_step_s: float | None = None
    """CPU time of one training step on this host, in seconds, measured before the run."""
    resumes: list[Resume] = []
    """Each resume of the run, in order."""
    load: float | None = None
    used: float | None = None
    others: float | None = None
    """Shares of the host's cores: predicted for the fleet (``load``), used by the fleet (``used``), and used
    by other processes (``others``). If the run was resumed, ``load`` is the highest load of any part."""
    steal: float | None = None
    """Share of CPU time that the hypervisor gave to other guests during the run. If the run was resumed, this
    is the largest share of any part between two resumes; parts that were killed do not count."""
    throttled: float | None = None
    """Share of the run during which a CPU quota stopped a core. If the run was resumed, this is the largest
    share of any part, as for ``steal``."""
    nodes: list[NodeRow] = []
    """Nodes that hosted the clients or workers; the shares above are then those of the worst node."""
    network: dict[str, int] = {}
    """Since the server was last started: bytes in messages received from nodes (``in``) and sent to nodes
    (``out``), and the number of ``versions`` published."""
    host: dict[str, Any] = {}
    software: dict[str, str] = {}
    toml: str = ""
    """The resolved experiment file."""
    code: dict[str, str] = {}
    """SHA-256 digests of the user's own modules, profiles and data file, keyed by module or path. They
    were computed at the last start, resume or replacement of a killed process."""
    earlier_code: list[EarlierCode] = []
    """The code before each change, in the order of use."""


TABLES: dict[str, type[msgspec.Struct]] = {
    "clients": ClientRow,
    "trips": TripRow,
    "versions": VersionRow,
    "evaluations": EvaluationRow,
    "incidents": IncidentRow,
    "costs": CostRow,
}


@cache
def column_types(row: type[msgspec.Struct]) -> Mapping[str, tuple[type, bool]]:
    """Return each column's Python type (tuple or dict for JSON), and whether a value may be missing.

    >>> column_types(CostRow)["seconds"], column_types(TripRow)["loss"]
    ((<class 'float'>, False), (<class 'float'>, True))
    """
    out: dict[str, tuple[type, bool]] = {}
    for name, hint in typing.get_type_hints(row).items():
        kind, *none = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        out[name] = (typing.get_origin(kind) or kind, bool(none))
    return out


_SQL = {int: "INTEGER", float: "REAL", str: "TEXT", tuple: "TEXT", dict: "TEXT"}


def schema() -> str:
    """Return the SQL that creates an empty record."""
    extra = {
        # `seq` is the number of the last journal entry before the row or, for a version, of the version's own
        # entry; a rewind to an earlier entry deletes the row
        "trips": ", uses INTEGER NOT NULL DEFAULT 0, seq INTEGER NOT NULL DEFAULT 0, fate_seq INTEGER",
        "versions": ", seq INTEGER NOT NULL DEFAULT 0",
    }
    lines = [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;",
        "CREATE TABLE journal (seq INTEGER PRIMARY KEY, event BLOB NOT NULL);",
        # the updates summed in each version: int64 tasks and float64 weights, little-endian, in summing order
        "CREATE TABLE sums (version INTEGER PRIMARY KEY, tasks BLOB NOT NULL, weights BLOB NOT NULL);",
    ]
    for table, row in TABLES.items():
        # SQLite stores NaN as NULL, so a float column must allow NULL
        columns = [
            f"{name} {_SQL[kind]}"
            + (" PRIMARY KEY" if i == 0 else "" if optional or kind is float else " NOT NULL")
            for i, (name, (kind, optional)) in enumerate(column_types(row).items())
        ]
        lines.append(f"CREATE TABLE {table} ({', '.join(columns)}{extra.get(table, '')});")
    return "\n".join(lines)


def to_signed(value: int) -> int:
    """Convert an unsigned 64-bit number to the signed number with the same bits, which SQLite can store."""
    return value - ((value >> 63) << 64)


CHECKSUMS = ("checksum_sent", "checksum_seen")
