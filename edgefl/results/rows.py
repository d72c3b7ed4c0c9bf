"""The run record's tables, as typed rows: what the server writes down and what reports read.

Each ``NamedTuple`` is one table of ``record.sqlite``, field for column; its first field is the primary
key. Times in ``_s`` are emulated seconds since the start of the run unless they say ``wall_s``.
"""

from __future__ import annotations

import types
import typing
from typing import Any, NamedTuple

import msgspec

APPLICATION_ID = 0x45464C52
"""``EFLR`` in the SQLite header: tells a run record from any other database."""
SCHEMA_VERSION = 2
FILE_NAME = "record.sqlite"
FATES = ("applied", "discarded", "dropped", "lost")
"""What became of a trip: used in a version, valid but not used, bad, or its client was gone."""


class ClientRow(NamedTuple):
    """One emulated device."""

    client: int
    profile: str
    network: str
    examples: int
    labels: tuple[int, ...] = ()
    """Classes of which the client holds at least one example, ascending."""
    train_gflops: float | None = None
    """Declared rate of training, 10⁹ floating-point operations an emulated second."""
    memory_mib: float | None = None
    """Declared limit of the training process."""
    down_mbps: float | None = None
    up_mbps: float | None = None


class TripRow(NamedTuple):
    """One client trip: a download, a local training and an upload; or the part of it that happened.

    ``*_declared_s`` is what the profile says the part takes, the field without ``declared`` what it took.
    """

    task: int
    client: int
    base_version: int
    trip: int
    """How many tasks the client was given before this one."""
    sent_s: float
    """The server sent the task."""
    received_s: float | None = None
    """The client had the model: its download was over."""
    arrived_s: float | None = None
    """The update was in its slot; None for a trip that never ended."""
    staleness: int | None = None
    applied_version: int | None = None
    """The version that used the update first."""
    weight: float | None = None
    """Total weight with which it was summed."""
    fate: str | None = None
    """One of `FATES`; None while the trip runs or its update is held."""
    reason: str = ""
    examples: int | None = None
    steps: int | None = None
    loss: float | None = None
    trained_version: int | None = None
    """The version that the client says it trained from; must be ``base_version``."""
    down_bytes: int | None = None
    up_bytes: int | None = None
    down_s: float | None = None
    compute_s: float | None = None
    up_s: float | None = None
    down_declared_s: float | None = None
    compute_declared_s: float | None = None
    up_declared_s: float | None = None
    delay_declared_s: float | None = None
    """One-way delays of the download and the upload, in all."""
    delay_s: float | None = None
    trip_declared_s: float | None = None
    trip_achieved_s: float | None = None
    flops: float | None = None
    lateness_s: float | None = None
    """Emulated seconds by which the trip ended after its scheduled moment."""
    cpu_s: float | None = None
    """CPU seconds that the training really took on this machine."""
    peak_mib: float | None = None
    checksum_sent: int | None = None
    """The update's 64-bit checksum as the client computed it."""
    checksum_seen: int | None = None
    """The same, as the server computed it from the slot."""


class VersionRow(NamedTuple):
    """One published version of the global model."""

    version: int
    at_s: float
    wall_s: float
    updates: int
    weight_sum: float
    sum_s: float
    """Wall seconds in the kernel."""
    norm: float | None = None
    """L2 norm of the step, where it was computed."""


class EvaluationRow(NamedTuple):
    """One measurement of a version on the server's test examples."""

    version: int
    at_s: float
    wall_s: float
    trips: int
    """Client trips that had ended when the version was published."""
    accuracy: float
    loss: float
    correct: tuple[int, ...] = ()
    """Right answers in each class."""
    total: tuple[int, ...] = ()
    """Test examples in each class."""


class IncidentRow(NamedTuple):
    """Something that went wrong and was dealt with.

    Kinds are death, hang, malformed, oom, non-finite, checksum, rejoin and such.
    """

    id: int | None
    at_s: float
    client: int | None
    kind: str
    detail: str = ""


class CostRow(NamedTuple):
    """Wall seconds that the server spent in one stage of its work, and how often."""

    stage: str
    seconds: float
    calls: int


class Aggregation(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel did in all: ``bytes`` is what it moved, (K + 2)·D·4 a sum."""

    backend: str = ""
    threads: int = 1
    updates: int = 0
    seconds: float = 0.0
    bytes: int = 0


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Proportional set sizes in MiB (a shared page counts once over all who map it)."""

    server_mib: float | None = None
    supervisor_mib: float | None = None
    zygote_mib: float | None = None
    evaluator_mib: float | None = None
    shared_mib: float | None = None
    """The parameter buffer."""
    clients_mib: dict[int, float] = {}
    """Client (wall clock) or worker (virtual clock) to its size."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the run as a whole: one row of table ``meta`` a field, JSON.

    The server and the supervisor write these with ``Store.set_meta(field=value)``, when each is known.
    """

    name: str = ""
    edgefl: str = ""
    """Version of edgefl that made the record."""
    created_unix_s: float | None = None
    base: str = ""
    """Folder in which the user's own modules are looked for."""
    status: str = "created"
    """created, running, done, interrupted or failed."""
    stop_reason: str = ""
    strategy: str = ""
    strategy_fields: dict[str, Any] = {}
    clock: str = ""
    seed: int = 0
    clients: int = 0
    processes: int = 0
    """Processes that trained: one a client under the wall clock, the workers under the virtual one."""
    transport: str = ""
    time_scale: float = 1.0
    wall_s: float = 0.0
    emulated_s: float = 0.0
    data: str = ""
    partition: str = ""
    class_names: tuple[str, ...] = ()
    test_examples: int = 0
    model: str = ""
    parameters: int = 0
    model_sha256: str = ""
    aggregation: Aggregation = Aggregation()
    server_trip_us: float | None = None
    """Median wall time that one trip costs the server, in µs, without the sum."""
    memory: MemoryUse = MemoryUse()
    throttle: str = ""
    """What made training as slow as the device: paced, sigstop or cgroup."""
    memory_by: str = ""
    """What enforced memory limits: rlimit, cgroup or off."""
    host_step_s: float | None = None
    """CPU seconds of one training step on this host, measured before the run."""
    load: float | None = None
    """Share of the host's cores that the fleet was expected to ask for, after ``time_scale``."""
    used: float | None = None
    """Share of the host's cores that the run's processes really used."""
    others: float | None = None
    """Share of the host's cores that others used meanwhile."""
    steal: float | None = None
    """Share of CPU time that the hypervisor gave to others during the run."""
    throttled: float | None = None
    """Share of the run in which a core stood still because of a CPU quota around it."""
    invalid: tuple[str, ...] = ()
    """Reasons, beyond the trips' own figures, why the emulation is not valid (uncalibrated, steal …)."""
    host: dict[str, Any] = {}
    software: dict[str, str] = {}
    toml: str = ""
    """The resolved experiment file."""


TABLES: dict[str, type[tuple[Any, ...]]] = {
    "clients": ClientRow,
    "trips": TripRow,
    "versions": VersionRow,
    "evaluations": EvaluationRow,
    "incidents": IncidentRow,
    "costs": CostRow,
}


def column_types(row: type[tuple[Any, ...]]) -> dict[str, tuple[type, bool]]:
    """Each column's Python type (int, float, str; tuple for JSON) and whether it may be missing.

    >>> column_types(CostRow)["seconds"], column_types(TripRow)["loss"]
    ((<class 'float'>, False), (<class 'float'>, True))
    """
    out: dict[str, tuple[type, bool]] = {}
    for name, hint in typing.get_type_hints(row).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kind = next(m for m in members if m is not type(None))
        out[name] = (typing.get_origin(kind) or kind, type(None) in members)
    return out


_SQL = {int: "INTEGER", float: "REAL", str: "TEXT", tuple: "TEXT"}


def schema() -> str:
    """The SQL that makes an empty record."""
    extra = {
        # `seq` is the last journal entry when the row was written: a rewind removes what came after it
        "trips": ", uses INTEGER NOT NULL DEFAULT 0, seq INTEGER NOT NULL DEFAULT 0, fate_seq INTEGER",
        "versions": ", seq INTEGER NOT NULL DEFAULT 0",
    }
    lines = [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;",
        "CREATE TABLE journal (seq INTEGER PRIMARY KEY, event BLOB NOT NULL);",
        # which updates made which version (int64 tasks, float64 weights, little-endian, in summing order)
        "CREATE TABLE sums (version INTEGER PRIMARY KEY, tasks BLOB NOT NULL, weights BLOB NOT NULL);",
    ]
    for table, row in TABLES.items():
        # SQLite keeps NaN as NULL, so a number that may be NaN may be missing too
        columns = [
            f"{name} {_SQL[kind]}"
            + (" PRIMARY KEY" if i == 0 else "" if optional or kind is float else " NOT NULL")
            for i, (name, (kind, optional)) in enumerate(column_types(row).items())
        ]
        lines.append(f"CREATE TABLE {table} ({', '.join(columns)}{extra.get(table, '')});")
    return "\n".join(lines)


def to_signed(value: int) -> int:
    """An unsigned 64-bit number as SQLite's signed one; `to_unsigned` is its inverse.

    >>> to_signed(2**64 - 1), to_unsigned(-1) == 2**64 - 1
    (-1, True)
    """
    return value - ((value >> 63) << 64)


def to_unsigned(value: int) -> int:
    """The inverse of `to_signed`."""
    return value & 0xFFFFFFFFFFFFFFFF
