"""The writer of the run record, an SQLite file in the run's folder. Only one process at a time writes to it.

Rows wait in memory until `Store.commit` writes them in one transaction. Committed rows survive a ``kill -9``
of the writer at any instant; rows written by `Store.sync` also survive a power cut.
"""

from __future__ import annotations

import functools
import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import convert
from msgspec.structs import astuple

from edgefl.core.events import Event, event_encoder
from edgefl.errors import ConfigError, FolderError, as_config_error
from edgefl.results import seal
from edgefl.results.record import check_file, read_events
from edgefl.results.rows import (
    APPLICATION_ID,
    CHECKSUMS,
    FATES,
    FILE_NAME,
    SCHEMA_VERSION,
    TABLES,
    ClientRow,
    EvaluationRow,
    Meta,
    TripRow,
    VersionRow,
    schema,
    to_signed,
)
from edgefl.results.tail import Tail

WAIT_MS = 10_000
"""Maximum time that a commit waits for another writer, in milliseconds."""
LOG_ROWS = 50_000
"""Number of rows (about 16 MiB) after which the write-ahead log is copied to the record's file."""


class _End(msgspec.Struct):
    """The end of a trip, which may become known only after the trip's row is written."""

    task: int
    fate: str | None = None
    reason: str = ""
    version: int | None = None
    weights: list[float] = []
    """The weight of the update in each version that used it."""
    seq: int = 0
    checksum_seen: int | None = None

    def use(self, version: int, weight: float, seq: int) -> None:
        """Record that ``version``, which event ``seq`` announces, used the update with this weight."""
        if self.version is None:
            self.version = version
        self.weights.append(weight)
        self.seq = seq

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the parameters of `FINISH_TRIP`, with one row per use of the update, in the order of use.

        Each use is added separately, so that the rounding of the total weight does not depend on when rows
        are committed.
        """
        uses = len(self.weights[:1])
        for weight in self.weights or [0.0]:
            how = (self.fate, self.reason, self.version, uses, weight)
            yield self.task, *how, self.seq, self.checksum_seen


class Store:
    """Writer of ``<folder>/record.sqlite``, for use by one thread. If ``create``, a missing file is created.

    Raises `ConfigError` if the file is not a run record of this version of edgefl, and `FolderError` if the
    file cannot be written.

    >>> import tempfile; from edgefl.core.events import Joined; from edgefl.results.record import Record
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Store(folder) as store:
    ...         store.set_meta(strategy="fedbuff")
    ...         store.journal(Joined(client=0, at_s=0.0))
    ...     Record(folder).meta.strategy
    1
    'fedbuff'
    """

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        self.path = Path(folder) / FILE_NAME
        if not (create or self.path.is_file()):
            raise FolderError(f"run record {self.path} not found: it was removed")
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        seal.refuse_foreign_journal(self.path)
        with as_config_error(f"run record {self.path} cannot be opened", sqlite3.Error):
            self._db = sqlite3.connect(self.path, timeout=WAIT_MS / 1000, isolation_level=None)
        try:
            if fresh:
                seal.lift(self.path)
            else:
                check_file(self._db, self.path)
            # with a write-ahead log, readers never wait for the writer, and a commit is one append
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")  # `_copy_log` copies the log instead
            if fresh:
                # one transaction for ids and tables, so that an incomplete file is never taken for a record
                self._db.executescript(
                    f"BEGIN IMMEDIATE;\n{schema()}\nPRAGMA application_id = {APPLICATION_ID};\n"
                    f"PRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;"
                )
            self.seq: int = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()[0]
            """Number of the last journaled event; 0 before the first event."""
        except sqlite3.Error as error:
            self._leave()
            raise ConfigError(f"run record {self.path} cannot be used: {error}") from None
        except ConfigError:
            self._leave()
            raise
        self._costs: dict[str, list[float]] = {}
        self._rows_in_log = 0
        self._tail: Tail | None = None
        self._forget()

    def _forget(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        """Calls since the last `secure` or `commit`: the method's name and its arguments."""
        # Events and trips are encoded only in a commit, since encoding many together takes half the time.
        self._journal: list[Event] = []
        self._trips: list[tuple[TripRow, int]] = []
        self._sums: list[tuple[int, bytes, bytes]] = []
        self._ends: dict[int, _End] = {}
        self._fleet: Collection[ClientRow] = ()
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def journal(self, event: Event) -> int:
        """Append ``event`` to the journal, and return its number; the first event has number 1."""
        self.seq += 1
        self._journal.append(event)
        if self._tail is not None:
            self._calls.append(("journal", event))
        return self.seq

    def trip(self, row: TripRow) -> None:
        """Add a trip whose update arrived or was lost, or replace the row of the same task."""
        self._trips.append((row, self.seq))
        if self._tail is not None:
            self._calls.append(("trip", row))

    def applied(self, version: int, tasks: Sequence[int], weights: Sequence[float]) -> None:
        """Add the tasks and weights of the updates in ``version``, which the next journaled event announces.

        If a task occurs several times, its weights are added up. A rewind to a point before that event
        removes the weights.
        """
        if len(tasks) != len(weights):
            raise ValueError(f"expected a weight per task, got {len(weights)} weights for {len(tasks)} tasks")
        self._sums.append((version, np.array(tasks, "<i8").tobytes(), np.array(weights, "<f8").tobytes()))
        for task, weight in _by_task(tasks, weights).items():
            self._end(task).use(version, weight, self.seq + 1)
        if self._tail is not None:
            self._calls.append(("applied", version, tasks, weights))

    def checksum_seen(self, task: int, checksum: int) -> None:
        """Set, in the row of a recorded trip, the checksum that the server computed from the slot."""
        self._end(task).checksum_seen = to_signed(checksum)
        if self._tail is not None:
            self._calls.append(("checksum_seen", task, checksum))

    def released(self, task: int, fate: str, reason: str = "") -> None:
        """Set the outcome of a trip; ``fate`` is one of `FATES`."""
        if fate not in FATES:
            raise ValueError(f"fate must be one of {', '.join(FATES)} (got {fate!r})")
        end = self._end(task)
        end.fate, end.reason = fate, reason
        if self._tail is not None:
            self._calls.append(("released", task, fate, reason))

    def _end(self, task: int) -> _End:
        end = self._ends.get(task)
        if end is None:
            end = self._ends[task] = _End(task)
        end.seq = self.seq
        return end

    def version(self, row: VersionRow) -> None:
        """Add a published version, which the next journaled event announces."""
        self._rows[_insert("versions", "seq")].append((*astuple(row), self.seq + 1))
        if self._tail is not None:
            self._calls.append(("version", row))

    def evaluation(self, row: EvaluationRow) -> None:
        """Add the evaluation of a version."""
        self._rows[_insert("evaluations")].append(_columns(row))
        if self._tail is not None:
            self._calls.append(("evaluation", row))

    def incident(self, at_s: float, client: int | None, kind: str, detail: str = "") -> None:
        """Add a fault that the run handled. `truncate` keeps it: a rewind does not undo the fault."""
        self._rows[_insert("incidents")].append((None, at_s, client, kind, detail))

    def cost(self, stage: str, seconds: float, calls: int = 1) -> None:
        """Add wall ``seconds`` to a stage of the server's work; `sync` and `close` write the total."""
        entry = self._costs.setdefault(stage, [0.0, 0])
        entry[0] += seconds
        entry[1] += calls

    def clients(self, rows: Collection[ClientRow]) -> None:
        """Set the rows of the table ``clients``. The next commit iterates over ``rows`` and writes them."""
        self._fleet = rows

    def set_meta(self, **fields: Any) -> None:
        """Set fields of `Meta`, such as ``set_meta(status="running", wall_s=12.5)``.

        The next commit writes them. Raises `TypeError` for a field that `Meta` does not have or a value of
        the wrong type.
        """
        for key, value in fields.items():
            if key not in _META_TYPES:
                raise TypeError(f"meta field {key!r} not found; available: {', '.join(sorted(_META_TYPES))}")
            try:
                encoded = msgspec.json.encode(value)
                msgspec.json.decode(encoded, type=_META_TYPES[key])
            except (msgspec.ValidationError, TypeError) as error:
                raise TypeError(f"meta field {key!r}: {error} (got {value!r})") from None
            self._rows["INSERT OR REPLACE INTO meta VALUES (?, ?)"].append((key, encoded.decode()))

    def meta(self, key: str) -> Any:
        """Return the committed value of a field of `Meta`, or None if no value was committed."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._writing():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def follow(self, tail: Tail) -> None:
        """Replay the calls that a killed writer left in ``tail``, and log this writer's later calls there.

        The tail holds events and the rows of trips, versions and evaluations, but no incidents and no meta.
        """
        if tail.seq == self.seq:  # otherwise the calls have already been committed
            for batch in tail:
                for name, *given in _decoder.decode(batch):
                    read = (
                        (convert(one, _CALL_TYPES[name]) for one in given) if name in _CALL_TYPES else given
                    )
                    getattr(self, name)(*read)
        self._tail = tail
        self.commit()
        tail.clear(self.seq)

    def secure(self) -> None:
        """Ensure that the waiting events and their rows survive even if this process is killed.

        They are copied to the tail or, if there is no tail or it is full, written by `commit`.
        """
        if self._tail is None or (self._calls and not self._tail.append(_encoder.encode(self._calls))):
            self.commit()
        self._calls.clear()

    def commit(self) -> None:
        """Write all waiting rows in one transaction, so that they survive even if this process is killed.

        If the transaction fails, for example because the disk is full or the file is locked, this method
        raises `FolderError`, nothing is written, and the rows wait for the next commit.
        """
        events = enumerate(map(event_encoder.encode, self._journal), self.seq + 1 - len(self._journal))
        ends = dict(self._ends)  # an end written together with its trip's row needs no separate statement
        often = {task: ends.pop(task) for task, end in self._ends.items() if len(end.weights) > 1}
        batches: list[tuple[str, list[Any]]] = [
            ("INSERT INTO journal VALUES (?, ?)", list(events)),
            (INSERT_TRIP, [_trip_columns(*trip, ends.pop(trip[0].task, None)) for trip in self._trips]),
            ("INSERT OR REPLACE INTO sums VALUES (?, ?, ?)", self._sums),
            (FINISH_TRIP, [row for end in (*ends.values(), *often.values()) for row in end.rows()]),
            *self._rows.items(),
        ]
        if count := len(self._fleet) + sum(len(rows) for _, rows in batches):
            with self._transaction():
                if self._fleet:
                    self._db.executemany(_insert("clients"), map(_columns, self._fleet))
                for statement, rows in batches:
                    if rows:
                        self._db.executemany(statement, rows)
            self._forget()
            if self._tail is not None:
                self._tail.clear(self.seq)
            self._rows_in_log += count
            if self._rows_in_log > LOG_ROWS:
                self._copy_log()

    def sync(self) -> None:
        """Commit, and flush the rows to disk, so that they survive even a power cut.

        An open reader does not delay the flush, but the log grows until the reader closes.
        """
        self._flush()
        self._copy_log()

    def _flush(self) -> None:
        self.commit()
        costs = [(stage, *entry) for stage, entry in self._costs.items()]
        self._db.execute("PRAGMA synchronous = FULL")  # the next commit flushes the whole log
        try:
            with self._transaction():
                self._db.executemany(ADD_COST, costs or [("checkpoint", 0.0, 0)])
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")
        self._costs.clear()

    def _copy_log(self) -> None:
        """Have SQLite copy the part of its log that no reader needs into the file, and reseal the file."""
        self._rows_in_log = 0
        with self._writing():
            seal.lift(self.path)
            try:
                # TRUNCATE also empties the log. Otherwise, if an entry in it were damaged later, SQLite would
                # read the entries before it instead of newer pages in the file.
                # Do not wait if a reader keeps the log from being emptied: a later call will empty it.
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
            seal.put(self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise FolderError(f"run record {self.path} cannot be written: {error}") from None

    def truncate(self, after_seq: int) -> None:
        """Rewind the record to the moment after event ``after_seq`` was journaled.

        Later events, trips, versions, fates and evaluations are removed; incidents, costs and meta are kept.
        """
        if not 0 <= after_seq <= self.seq:
            raise ValueError(f"after_seq must be from 0 to {self.seq} (got {after_seq})")
        self.commit()  # the waiting incidents and meta are also kept
        with self._transaction():
            for statement in REWIND.strip().split(";"):
                self._db.execute(statement, {"seq": after_seq} if ":seq" in statement else ())
            self._recount(after_seq)
        self.seq = after_seq

    def _recount(self, after_seq: int) -> None:
        # an update that was used both before and after event `after_seq` keeps its earlier uses
        rows = self._db.execute("SELECT task FROM trips WHERE fate_seq > ?", (after_seq,))
        cut = {task for (task,) in rows}
        self._db.execute("UPDATE trips SET fate_seq = NULL WHERE fate_seq > ?", (after_seq,))
        kept: dict[int, _End] = {}
        for version, tasks, weights, seq in self._db.execute(
            "SELECT sums.*, COALESCE(seq, 0) FROM sums LEFT JOIN versions USING (version) ORDER BY version"
        ):
            used = _by_task(np.frombuffer(tasks, "<i8").tolist(), np.frombuffer(weights, "<f8").tolist())
            for task in used.keys() & cut:
                kept.setdefault(task, _End(task)).use(version, used[task], seq)
        self._db.executemany(FINISH_TRIP, [row for end in kept.values() for row in end.rows()])

    def summed(self) -> tuple[int, int, float]:
        """Return the number of committed versions, and the updates and wall seconds of all their sums."""
        (found,) = self._db.execute("SELECT COUNT(*), SUM(updates), TOTAL(sum_s) FROM versions")
        return found[0], found[1] or 0, found[2]

    def unended(self) -> set[int]:
        """Return the tasks of committed trips without a fate."""
        return {task for (task,) in self._db.execute("SELECT task FROM trips WHERE fate IS NULL")}

    def replay(self, *, until: int = 2**63 - 1) -> Iterator[tuple[int, Event]]:
        """Yield the committed events up to number ``until`` in ascending order, with their numbers."""
        return read_events(self._db, until)

    def close(self, *, commit: bool = True) -> None:
        """Commit, close and seal the file. If no reader is open, the write-ahead log is deleted."""
        with closing(self._db), self._writing():
            try:
                seal.lift(self.path)
            except OSError:
                self._leave()
                raise
            if commit:
                self._flush()
                self._db.execute("PRAGMA busy_timeout = 0")
                with suppress(sqlite3.OperationalError):  # a reader has the log open
                    self._db.execute("PRAGMA journal_mode = DELETE").fetchone()
            self._db.close()
            seal.put(self.path)

    def _leave(self) -> None:
        """Close without changing the sealed file.

        When the last connection closes, SQLite copies the log into the file, unless that connection is
        read-only. So a read-only connection is closed last.
        """
        address = f"{self.path.resolve().as_uri()}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as reader:
            reader.execute("PRAGMA user_version").fetchone()
            self._db.close()
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_CALL_TYPES: dict[str, Any] = {
    "journal": Event,
    "trip": TripRow,
    "version": VersionRow,
    "evaluation": EvaluationRow,
}
"""For each method whose argument the tail stores as plain data, the type to which it is converted back."""
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
_META_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Meta)}


@functools.cache
def _insert(table: str, extra: str = "") -> str:
    columns = [*TABLES[table].__struct_fields__, *extra.split()]
    marks = ", ".join("?" * len(columns))
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})"


_FINISHED = ("task", "applied_version", "weight", "fate", "reason")
"""Trip columns that only `Store.applied` and `Store.released` may change after the row is written."""
# An updated row keeps the number of the event that first recorded the trip, which `Store.truncate` needs.
INSERT_TRIP = _insert("trips", "uses seq fate_seq").replace("OR REPLACE ", "") + (
    " ON CONFLICT (task) DO UPDATE SET "
    + "".join(f"{name} = excluded.{name}, " for name in TripRow.__struct_fields__ if name not in _FINISHED)
    + "fate = COALESCE(excluded.fate, fate), "
    "reason = CASE WHEN excluded.reason = '' THEN reason ELSE excluded.reason END, "
    "applied_version = COALESCE(applied_version, excluded.applied_version), "
    "weight = CASE WHEN excluded.uses = 0 THEN weight ELSE COALESCE(weight, 0) + excluded.weight END, "
    "uses = uses + excluded.uses, fate_seq = COALESCE(excluded.fate_seq, fate_seq)"
)
FINISH_TRIP = (
    "UPDATE trips SET fate = COALESCE(?2, fate), reason = CASE WHEN ?3 = '' THEN reason ELSE ?3 END, "
    "applied_version = COALESCE(applied_version, ?4), "
    "weight = CASE WHEN ?5 = 0 THEN weight ELSE COALESCE(weight, 0) + ?6 END, "
    "uses = uses + ?5, fate_seq = ?7, checksum_seen = COALESCE(?8, checksum_seen) WHERE task = ?1"
)
ADD_COST = (
    "INSERT INTO costs VALUES (?, ?, ?) ON CONFLICT (stage) DO UPDATE SET "
    "seconds = seconds + excluded.seconds, calls = calls + excluded.calls"
)
REWIND = """
DELETE FROM journal WHERE seq > :seq;
DELETE FROM trips WHERE seq > :seq;
DELETE FROM versions WHERE seq > :seq;
DELETE FROM sums WHERE version > (SELECT COALESCE(MAX(version), -1) FROM versions);
DELETE FROM evaluations WHERE version > (SELECT COALESCE(MAX(version), 0) FROM versions);
UPDATE trips SET fate = NULL, reason = '', applied_version = NULL, weight = NULL, uses = 0
  WHERE fate_seq > :seq;
"""


def _by_task(tasks: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    used: dict[int, float] = {}
    for task, weight in zip(tasks, weights, strict=True):
        used[task] = used.get(task, 0.0) + weight
    return used


_PLACE = {name: place for place, name in enumerate(TripRow.__struct_fields__)}
_SENT, _SEEN = (_PLACE[name] for name in CHECKSUMS)
_METRICS = _PLACE["metrics"]


def _trip_columns(row: TripRow, seq: int, end: _End | None) -> list[Any]:
    """Return the parameters of `INSERT_TRIP`: a trip's row, and its end if it is known."""
    columns = list(astuple(row))
    for place in (_SENT, _SEEN):
        if columns[place] is not None:
            columns[place] = to_signed(columns[place])
    columns[_METRICS] = json.dumps(row.metrics) if row.metrics else ""
    if end is None:
        return [*columns, 0, seq, None]
    columns[_PLACE["applied_version"]] = end.version
    if end.checksum_seen is not None:
        columns[_SEEN] = end.checksum_seen
    columns[_PLACE["fate"]] = end.fate or row.fate
    columns[_PLACE["reason"]] = end.reason or row.reason
    if end.weights:
        columns[_PLACE["weight"]] = end.weights[0]
    return [*columns, len(end.weights), seq, end.seq]


def _columns(row: msgspec.Struct) -> tuple[Any, ...]:
    """Return a row's columns in the order of its fields; tuples and dicts become JSON."""
    return tuple(json.dumps(value) if isinstance(value, tuple | dict) else value for value in astuple(row))
