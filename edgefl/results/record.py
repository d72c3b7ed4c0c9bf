"""The run record: its tables as typed rows, and its reader, which gives long tables as numpy arrays.

Each row type is one table of ``record.sqlite``: a field is a column, the first one the primary key. Rows take
keywords only, since nothing would notice two swapped columns. Times in ``_s`` are emulated seconds since the
start of the run, those in ``wall_s`` seconds of this machine.
"""

from __future__ import annotations

import json
import math
import sqlite3
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.core.deaths import consequence
from edgefl.core.events import Died, Event, Joined, Left, event_decoder
from edgefl.devices.energy import PowerDraw
from edgefl.errors import ConfigError
from edgefl.experiment import Privacy
from edgefl.results import seal

APPLICATION_ID = 0x45464C52
"""``EFLR`` in the SQLite header: tells a run record from any other database."""
SCHEMA_VERSION = 5
FILE_NAME = "record.sqlite"
FATES = ("applied", "discarded", "dropped", "lost")
"""Outcomes of a trip: its update was used, was valid but not used, was bad, or its client was gone."""


class ClientRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One emulated device."""

    client: int
    profile: str
    network: str
    examples: int
    """Examples for training."""
    test_examples: int = 0
    """Held-out examples."""
    labels: tuple[int, ...] = ()
    """Classes with at least one example on this client, ascending."""
    step_s: float | None = None
    """Declared seconds of a training step on a whole batch; None if a delay replaces the trip's time."""
    memory_mib: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None


class TripRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One client trip: download, local training and upload, as far as they happened.

    ``*_declared_s`` is a part's duration by the profile, the field without ``declared`` its actual duration.
    """

    task: int
    client: int
    base_version: int
    trip: int
    """Number of the client's tasks before this one."""
    sent_s: float
    received_s: float | None = None
    arrived_s: float | None = None
    """Time at which the update was complete in its slot; None for a trip that did not end."""
    staleness: int | None = None
    applied_version: int | None = None
    """The first version that used the update."""
    weight: float | None = None
    fate: str | None = None
    """One of `FATES`; None while the trip runs or its update waits in the buffer."""
    reason: str = ""
    examples: int | None = None
    steps: int | None = None
    loss: float | None = None
    trained_version: int | None = None
    """The version from which the client trained by its own report; must be ``base_version``."""
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
    """Training time at the device's full speed, by its time model."""
    lateness_s: float | None = None
    """Emulated seconds by which the trip ended too late."""
    cpu_s: float | None = None
    """CPU seconds of the training on this machine."""
    peak_mib: float | None = None
    """Peak memory of the training, predicted from the trace of its step."""
    process_grew_mib: float | None = None
    """Growth of the client's process on this machine so far; None under the virtual clock."""
    checksum_sent: int | None = None
    checksum_seen: int | None = None
    """64-bit checksum of the update, computed by the client and, from the slot, by the server."""
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
    """Wall seconds of the weighted sum."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Measurement of a version on the server's test examples and on the clients' own."""

    version: int
    at_s: float
    wall_s: float
    trips: int
    """Client trips that had ended before the version was published."""
    accuracy: float
    """NaN for a task without classes, unless the user's function returns an accuracy."""
    loss: float
    correct: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    """Correct predictions and test examples in each class."""
    metrics: dict[str, float] = {}
    """Finite metrics returned by the user's own function."""
    clients: tuple[int, ...] = ()
    """Clients on whose held-out examples the version was measured."""
    client_loss: tuple[float, ...] = ()
    client_accuracy: tuple[float, ...] = ()
    personal_loss: tuple[float, ...] = ()
    personal_accuracy: tuple[float, ...] = ()
    """For each of ``clients``: of the global model, and of that model after training on the client's data."""


class IncidentRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fault that the run handled, such as death, hang, oom, checksum or rejoin."""

    id: int | None
    at_s: float
    client: int | None
    kind: str
    detail: str = ""


class CostRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Wall seconds and calls of one stage of the server's work."""

    stage: str
    seconds: float
    calls: int


class Aggregation(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all weighted sums; each moves (K + 2)·D·4 ``bytes``."""

    backend: str = ""
    threads: int = 1
    """Maximum number of threads of one sum."""
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
    """Size by client (wall clock) or by worker (virtual clock)."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node that hosted peers of the run."""

    name: str
    cpu: str
    cores: float
    """Cores for this node alone: nodes on one machine share its cores."""
    system: str
    machine: str
    host_step_s: float
    peers: list[int]
    """Clients, or workers under the virtual clock, that the node has hosted."""
    as_is: bool = False
    """The node is a real device and trains at its own speed."""
    lost: str = ""
    """Reason for which the run lost the node; empty if it did not."""
    usage: dict[str, float | None] = {}
    """``used``, ``others``, ``steal`` and ``throttled`` as in `Meta`."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the whole run; table ``meta`` has one row of JSON for each field. See `Store.set_meta`."""

    name: str = ""
    edgefl: str = ""
    """Version of edgefl that made the record."""
    created_unix_s: float | None = None
    base: str = ""
    """Folder from which the user's own modules are imported."""
    status: str = "created"
    """created, running, done, interrupted or failed."""
    stop_reason: str = ""
    no_progress: str = ""
    """Reason for which the model learned nothing, so that the run has no result; empty if it did learn."""
    strategy: str = ""
    strategy_fields: dict[str, Any] = {}
    remark: str = ""
    """`Strategy.remark`: a warning about hyperparameters that do not fit together."""
    in_phase: str = ""
    """Reason for which clients act together by design; empty if they should be independent."""
    privacy: Privacy | None = None
    """The experiment's ``[privacy]``."""
    sampling: tuple[float, bool] | None = None
    """`Strategy.sampling`: probability with which a client is drawn, and whether draws are independent."""
    clock: str = ""
    seed: int = 0
    clients: int = 0
    attackers: list[int] = []
    """Clients that send harmful updates."""
    processes: int = 0
    """Training processes: one per client under the wall clock, workers under the virtual clock."""
    transport: str = ""
    time_scale: float = 1.0
    wall_s: float = 0.0
    emulated_s: float = 0.0
    data: str = ""
    partition: str = ""
    test_examples: int = 0
    model: str = ""
    parameters: int = 0
    first_model_sha256: str = ""
    """SHA-256 of version 0."""
    model_sha256: str = ""
    aggregation: Aggregation = Aggregation()
    server_trip_us: float | None = None
    """Median wall time of the server per trip without the sum, µs."""
    memory: MemoryUse = MemoryUse()
    throttle: str = ""
    memory_mechanism: str = ""
    """Mechanisms that slowed training (paced, sigstop, cgroup) and limited memory (rlimit, cgroup, off)."""
    model_error_factor: dict[str, float] = {}
    """Factor between a real device's step times and its profile's, for 90% of steps, by profile."""
    power: dict[str, dict[str, PowerDraw]] = {}
    """Power of the fleet's devices, by profile and network; without those whose profile states none."""
    host_step_s: float | None = None
    """CPU seconds of one training step on this host, measured before the run."""
    load: float | None = None
    used: float | None = None
    others: float | None = None
    """Shares of the host's cores: predicted for the fleet, used by it, and used by other processes."""
    steal: float | None = None
    """Share of CPU time that the hypervisor gave to other guests during the run."""
    throttled: float | None = None
    """Share of the run during which a CPU quota stopped a core."""
    nodes: list[NodeRow] = []
    """Nodes that hosted the clients or workers; the shares above are then those of the worst node."""
    network: dict[str, int] = {}
    """Message bytes received from nodes (``in``) and sent to them (``out``), and ``versions`` made, since the
    last start of the server."""
    host: dict[str, Any] = {}
    software: dict[str, str] = {}
    toml: str = ""
    """The resolved experiment file."""


TABLES: dict[str, type[msgspec.Struct]] = {
    "clients": ClientRow,
    "trips": TripRow,
    "versions": VersionRow,
    "evaluations": EvaluationRow,
    "incidents": IncidentRow,
    "costs": CostRow,
}


def column_types(row: type[msgspec.Struct]) -> dict[str, tuple[type, bool]]:
    """Each column's Python type (int, float, str; tuple or dict for JSON) and whether it may be missing.

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
    """The SQL that makes an empty record."""
    extra = {
        # `seq` is the last journal entry before the row, or a version's own entry; a rewind compares it
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
    """An unsigned 64-bit number as SQLite's signed one."""
    return value - ((value >> 63) << 64)


CHECKSUMS = ("checksum_sent", "checksum_seen")


def check_file(db: sqlite3.Connection, path: Path) -> None:
    """Raise `ConfigError`, in one line, unless ``db`` is a run record that this edgefl can use."""
    try:
        stamp = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as error:
        raise ConfigError(f"run record {path} cannot be opened: {error}") from None
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: SQLite quotes damaged text
        raise ConfigError(f"run record {path} is damaged or not a record: {error}") from None
    if stamp != APPLICATION_ID:
        raise ConfigError(f"{path} is a database of something else than edgefl (application id {stamp:#x})")
    if version != SCHEMA_VERSION:
        age = "a newer" if version > SCHEMA_VERSION else "an older"
        raise ConfigError(
            f"run record {path} was written by {age} edgefl "
            f"(schema {version}; this one reads {SCHEMA_VERSION})"
        )
    if missing := {*TABLES, "meta", "journal", "sums"} - tables:
        raise ConfigError(f"run record {path} is damaged: no table {', '.join(sorted(missing))}")


def read_events(db: sqlite3.Connection, until: int = 2**63 - 1) -> Iterator[tuple[int, Event]]:
    """Yield the events up to number ``until`` with their numbers, in order."""
    for seq, event in db.execute("SELECT seq, event FROM journal WHERE seq <= ? ORDER BY seq", (until,)):
        yield seq, event_decoder.decode(event)


class Columns(dict[str, NDArray[Any]]):
    """A table by column, in order of its key: ``trips["compute_s"]`` is a float64 array, read at first use.

    Missing values: NaN in a float column, −1 in an integer one, "" in text, 0 in a checksum.
    """

    def __init__(self, record: Record, table: str) -> None:
        self._record, self._table = record, table
        self.kinds = column_types(TABLES[table])
        """Each column's type, and whether it may be missing: see `column_types`."""
        if table == "trips":
            self.kinds["uses"] = (int, False)

    def __missing__(self, name: str) -> NDArray[Any]:
        if name not in self.kinds:
            raise KeyError(f"{self._table} has no column {name!r}; have: {', '.join(self.kinds)}")
        kind, key = self.kinds[name][0], next(iter(self.kinds))
        missing = "0" if name in CHECKSUMS else {int: "-1", float: "NULL"}.get(kind, "''")
        statement = f"SELECT COALESCE({name}, {missing}) FROM {self._table} ORDER BY {key}"
        dtype, same = {int: np.int64, float: np.float64}.get(kind, object), dict[Any, Any]()
        parts = [np.empty(0, dtype)]
        for rows in self._record.batches(statement):
            found = [value for (value,) in rows]
            if dtype is object:  # equal texts share one object: a long table has few different ones
                found = [same.setdefault(value, value) for value in found]
            if kind is dict:
                found = [_value(name, value, kind, False) for value in found]
            parts.append(np.array(found, dtype))
        values: NDArray[Any] = np.concatenate(parts)
        if name in CHECKSUMS:
            values = values.view(np.uint64)
        values.flags.writeable = False
        self[name] = values
        return values


R = TypeVar("R", bound=msgspec.Struct)


def _value(name: str, value: Any, kind: type, optional: bool) -> Any:
    """A field from its column: SQLite keeps NaN as NULL, tuples and dicts are JSON, checksums signed."""
    if value is None:
        return math.nan if kind is float and not optional else None
    if name in CHECKSUMS:
        return value & 0xFFFFFFFFFFFFFFFF
    if kind is dict and value == "":
        return {}
    return kind(json.loads(value)) if kind in (tuple, dict) else value


class Record:
    """Reader of ``<folder>/record.sqlite`` that shows one moment of the run and never blocks its writer.

    Raises `ConfigError` if ``folder`` is not a run's folder or its record cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME
        if not self.path.is_file():
            raise ConfigError(f"{self.folder} is not a run's folder: no {FILE_NAME} in it")
        try:
            self._db = self._open()
        except sqlite3.Error as error:  # too many open files, say
            raise ConfigError(f"run record {self.path} cannot be read: {error}") from None
        with self._errors():
            check_file(self._db, self.path)
            seal.check(self.path)
            if self._db.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                # One read transaction: all columns are of the same moment, also while the run continues. A
                # record without a log belongs to an ended run; a transaction would block a later writer.
                self._db.execute("BEGIN")
                self._db.execute("SELECT COUNT(*) FROM meta").fetchone()

    def _open(self) -> sqlite3.Connection:
        probe, log = "SELECT COUNT(*) FROM sqlite_master", self.path.with_name(f"{FILE_NAME}-wal")
        db, again = self._connect(), ""
        try:
            db.execute(probe).fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
                with suppress(sqlite3.Error), closing(sqlite3.connect(self.path)) as writer:
                    writer.execute(probe)  # SQLite rolls back the unfinished transaction
            elif log.exists() and log.stat().st_size:
                return db
            else:  # the log's index cannot be created in a read-only folder; without a log none is needed
                again = "&immutable=1"
            db.close()
            return self._connect(again)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            pass  # check_file words the error
        return db

    def _connect(self, more: str = "") -> sqlite3.Connection:
        address = f"{self.path.resolve().as_uri()}?mode=ro{more}"
        return sqlite3.connect(address, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError, ValueError) as error:
            self.close()
            what = "damaged or cannot be read" if isinstance(error, sqlite3.Error) else "damaged"
            raise ConfigError(f"run record {self.path} is {what}: {error}") from None
        except ConfigError:
            self.close()
            raise

    def select(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of any SQL query on the record."""
        with self._errors():
            return self._db.execute(statement, parameters).fetchall()

    def batches(self, statement: str) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of any SQL query on the record, some thousands at a time."""
        with self._errors():
            cursor = self._db.execute(statement)
            while rows := cursor.fetchmany(10_000):
                yield rows

    def _rows(self, kind: type[R], where: str, parameters: tuple[Any, ...] = ()) -> list[R]:
        types = column_types(kind)
        rows = self.select(f"SELECT {', '.join(types)} FROM {where}", parameters)
        with self._errors():
            plain = (zip(types, row, strict=True) for row in rows)
            return [kind(**{name: _value(name, x, *types[name]) for name, x in row}) for row in plain]

    @cached_property
    def meta(self) -> Meta:
        """Facts of the run as a whole."""
        with self._errors():
            fields = {key: msgspec.json.decode(value) for key, value in self.select("SELECT * FROM meta")}
            return msgspec.convert(fields, Meta, strict=False)

    @cached_property
    def clients(self) -> list[ClientRow]:
        """The fleet, by client."""
        return self._rows(ClientRow, "clients ORDER BY client")

    @cached_property
    def fleet(self) -> Columns:
        """Columns of `ClientRow`, by client; faster than `clients` for a large fleet."""
        return Columns(self, "clients")

    def kinds(self) -> list[tuple[str, str, int]]:
        """Profile, network and number of clients of each kind of client."""
        return self.select("SELECT profile, network, COUNT(*) FROM clients GROUP BY profile, network")

    @cached_property
    def trips(self) -> Columns:
        """Columns of `TripRow`, by task, and ``uses``: the number of versions that used the update."""
        return Columns(self, "trips")

    @cached_property
    def metrics(self) -> Mapping[str, NDArray[np.float64]]:
        """Metrics logged by the user's training function: float64 arrays over `trips`; NaN if missing."""
        logged = self.trips["metrics"]
        names = sorted({name for figures in logged for name in figures})
        return {name: np.array([figures.get(name, math.nan) for figures in logged]) for name in names}

    @cached_property
    def versions(self) -> Columns:
        """Columns of `VersionRow`, by version."""
        return Columns(self, "versions")

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The measurements, by version. A NaN accuracy or loss is NaN."""
        return self._rows(EvaluationRow, "evaluations ORDER BY version")

    @cached_property
    def incidents(self) -> list[IncidentRow]:
        """Incidents, in order."""
        return self._rows(IncidentRow, "incidents ORDER BY id")

    @cached_property
    def costs(self) -> list[CostRow]:
        """The server's wall time by stage, most expensive first."""
        return self._rows(CostRow, "costs ORDER BY seconds DESC, stage")

    def sums(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """Each version's updates: (version, tasks, weights), in summing order."""
        for version, tasks, weights in self.select("SELECT * FROM sums ORDER BY version"):
            yield version, np.frombuffer(tasks, "<i8"), np.frombuffer(weights, "<f8")

    def trip(self, task: int) -> TripRow:
        """One trip, whole. Raises `KeyError` for an unknown task."""
        if rows := self._rows(TripRow, "trips WHERE task = ?", (task,)):
            return rows[0]
        raise KeyError(f"no trip has task {task}")

    def phone(
        self, client: int, trips: int, incidents: int, tasks: int
    ) -> tuple[ClientRow | None, list[TripRow], list[IncidentRow]]:
        """A client's row (None before the fleet is recorded), and its last trips and incidents, newest first.

        Only the run's last ``tasks`` are searched for trips, so that the query is fast.
        """
        rows = self._rows(ClientRow, "clients WHERE client = ?", (client,))
        since = "(SELECT COALESCE(MAX(task), 0) FROM trips) - ?"
        last = f"trips WHERE client = ? AND task > {since} ORDER BY task DESC LIMIT ?"
        return (
            next(iter(rows), None),
            self._rows(TripRow, last, (client, tasks, trips)),
            self._rows(
                IncidentRow, "incidents WHERE client = ? ORDER BY id DESC LIMIT ?", (client, incidents)
            ),
        )

    def events(self) -> Iterator[tuple[int, Event]]:
        """The journal in order, each event with its number."""
        with self._errors():
            yield from read_events(self._db)

    def moves(self) -> Iterator[Joined | Left]:
        """The clients' arrivals and departures, in order, without decoding the other events."""
        tags = (b"\xa6joined", b"\xa4left", b"\xa4died")
        statement = f"SELECT event FROM journal WHERE {' OR '.join(['instr(event, ?)'] * 3)} ORDER BY seq"
        here: set[int] = set()
        with self._errors():
            for (encoded,) in self._db.execute(statement, tags):
                event = event_decoder.decode(encoded)
                if isinstance(event, Died):
                    event = consequence(event, private=self.meta.privacy is not None) or event
                if isinstance(event, Joined):
                    here.add(event.client)
                    yield event
                elif isinstance(event, Left) and event.client in here:
                    here.remove(event.client)
                    yield event

    def close(self) -> None:
        """Close the file. Garbage collection closes it too."""
        self._db.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
