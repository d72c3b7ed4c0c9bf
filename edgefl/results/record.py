"""Reader of the run record. Long tables are read by column, as numpy arrays."""

from __future__ import annotations

import json
import math
import sqlite3
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
from edgefl.errors import ConfigError, as_config_error
from edgefl.results import seal
from edgefl.results.rows import (
    APPLICATION_ID,
    CHECKSUMS,
    FILE_NAME,
    SCHEMA_VERSION,
    TABLES,
    ClientRow,
    CostRow,
    EvaluationRow,
    IncidentRow,
    Meta,
    TripRow,
    column_types,
)


def check_file(db: sqlite3.Connection, path: Path, *, sealed: bool = True) -> None:
    """Raise a one-line `ConfigError` unless ``db`` is an undamaged run record of this version of edgefl.

    If ``sealed`` is False, the file is not compared with its seal.
    """
    try:
        stamp = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as error:
        raise ConfigError(f"run record {path} cannot be opened: {error}") from None
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter if SQLite quotes damaged text
        raise ConfigError(f"run record {path} is damaged or not a record: {error}") from None
    if stamp != APPLICATION_ID:
        raise ConfigError(f"{path} is a database of a program other than edgefl (application id {stamp:#x})")
    if version != SCHEMA_VERSION:
        age = "a newer" if version > SCHEMA_VERSION else "an older"
        raise ConfigError(
            f"run record {path} was written by {age} edgefl "
            f"(schema {version}; this one reads {SCHEMA_VERSION})"
        )
    if missing := {*TABLES, "meta", "journal", "sums"} - tables:
        raise ConfigError(f"run record {path} is damaged: no table {', '.join(sorted(missing))}")
    if sealed:
        seal.check(path)


def read_events(db: sqlite3.Connection, until: int = 2**63 - 1) -> Iterator[tuple[int, Event]]:
    """Yield the events of the journal up to number ``until``, each with its number, in ascending order."""
    for seq, event in db.execute("SELECT seq, event FROM journal WHERE seq <= ? ORDER BY seq", (until,)):
        yield seq, event_decoder.decode(event)


class Columns(dict[str, NDArray[Any]]):
    """The columns of a table as arrays, keyed by name; the rows are ordered by the table's primary key.

    For example, ``trips["compute_s"]`` is a float64 array. A column is read when it is first used. A missing
    value is NaN in a float column, −1 in an integer column, "" in a text column and 0 in a checksum column.
    """

    def __init__(self, record: Record, table: str) -> None:
        self._record, self._table = record, table
        self.kinds = dict(column_types(TABLES[table]))
        """The type of each column, and whether its values may be missing: see `column_types`."""
        if table == "trips":
            self.kinds["uses"] = (int, False)

    def __missing__(self, name: str) -> NDArray[Any]:
        if name not in self.kinds:
            raise KeyError(f"{self._table} has no column {name!r}; available: {', '.join(self.kinds)}")
        kind, key = self.kinds[name][0], next(iter(self.kinds))
        missing = "0" if name in CHECKSUMS else {int: "-1", float: "NULL"}.get(kind, "''")
        statement = f"SELECT COALESCE({name}, {missing}) FROM {self._table} ORDER BY {key}"
        dtype, same = {int: np.int64, float: np.float64}.get(kind, object), dict[Any, Any]()
        parts = [np.empty(0, dtype)]
        for rows in self._record.batches(statement):
            found = [value for (value,) in rows]
            if dtype is object:  # a long table has few different strings: equal strings share an object
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

    def rows(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Return the values of the columns ``names``, row by row."""
        return zip(*(self[name].tolist() for name in names), strict=True)


R = TypeVar("R", bound=msgspec.Struct)


def _value(name: str, value: Any, kind: type, optional: bool) -> Any:
    """Decode a value. NaN is stored as NULL, tuples and dicts as JSON, and checksums as signed integers."""
    if value is None:
        return math.nan if kind is float and not optional else None
    if name in CHECKSUMS:
        return value & 0xFFFFFFFFFFFFFFFF
    if kind is dict and value == "":
        return {}
    return kind(json.loads(value)) if kind in (tuple, dict) else value


class Record:
    """Reader of ``<folder>/record.sqlite``. It reads one snapshot of the run, and never blocks the writer.

    If ``sealed`` is False, the record is not compared with its seal: that would read the whole file. Raises
    `ConfigError` if ``folder`` is not a run's folder or its record cannot be read.
    """

    def __init__(self, folder: str | Path, *, sealed: bool = True) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME
        if not self.path.is_file():
            raise ConfigError(f"{self.folder} is not a run's folder: it has no {FILE_NAME}")
        with as_config_error(f"run record {self.path} cannot be read", sqlite3.Error):
            self._db = self._open()  # fails, for example, if too many files are open
        with self._errors():
            check_file(self._db, self.path, sealed=sealed)
            if self._db.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                # In one read transaction, all columns come from the same snapshot even while the run
                # continues. A record without a write-ahead log belongs to an ended run. It needs no
                # transaction, and a transaction would block a later writer.
                self._db.execute("BEGIN")
                self._db.execute("SELECT COUNT(*) FROM meta").fetchone()

    def _open(self) -> sqlite3.Connection:
        probe, log = "SELECT COUNT(*) FROM sqlite_master", self.path.with_name(f"{FILE_NAME}-wal")
        seal.refuse_foreign_journal(self.path)
        db, again = self._connect(), ""
        try:
            db.execute(probe).fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
                with suppress(sqlite3.Error), closing(sqlite3.connect(self.path)) as writer:
                    writer.execute(probe)  # SQLite rolls back the unfinished transaction
            elif log.exists() and log.stat().st_size:
                return db
            else:  # SQLite cannot create the log's index in a read-only folder; without a log, none is needed
                again = "&immutable=1"
            db.close()
            return self._connect(again)
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            pass  # check_file will report the error
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
        """Return the rows of any SQL query on the record."""
        with self._errors():
            return self._db.execute(statement, parameters).fetchall()

    def batches(self, statement: str) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of any SQL query on the record, a few thousand at a time."""
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
        """Data about the run as a whole."""
        with self._errors():
            fields = {key: msgspec.json.decode(value) for key, value in self.select("SELECT * FROM meta")}
            return msgspec.convert(fields, Meta, strict=False)

    @cached_property
    def clients(self) -> list[ClientRow]:
        """The fleet: one row per client, ordered by client id."""
        return self._rows(ClientRow, "clients ORDER BY client")

    @cached_property
    def fleet(self) -> Columns:
        """The columns of `ClientRow`, ordered by client id; faster than `clients` for a large fleet."""
        return Columns(self, "clients")

    def kinds(self) -> list[tuple[str, str, int]]:
        """Return each combination of profile and network in the fleet, with its number of clients."""
        return self.select("SELECT profile, network, COUNT(*) FROM clients GROUP BY profile, network")

    @cached_property
    def trips(self) -> Columns:
        """The columns of `TripRow` and the column ``uses``; the rows are ordered by task.

        ``uses`` is the number of versions that used the trip's update.
        """
        return Columns(self, "trips")

    @cached_property
    def metrics(self) -> Mapping[str, NDArray[np.float64]]:
        """The metrics that the user's training function logged, keyed by name.

        Each metric is a float64 array with one value per row of `trips`; a missing value is NaN.
        """
        ((total,),) = self.select("SELECT COUNT(*) FROM trips")
        found: dict[str, NDArray[np.float64]] = {}
        start = 0
        for rows in self.batches("SELECT metrics FROM trips ORDER BY task"):
            with self._errors():
                for place, (text,) in enumerate(rows, start):
                    for name, value in json.loads(text or "{}").items():
                        if name not in found:
                            found[name] = np.full(total, math.nan)
                        found[name][place] = value
            start += len(rows)
        return dict(sorted(found.items()))

    @cached_property
    def versions(self) -> Columns:
        """The columns of `VersionRow`; the rows are ordered by version."""
        return Columns(self, "versions")

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations, ordered by version. An accuracy or loss that was not measured is NaN."""
        return self._rows(EvaluationRow, "evaluations ORDER BY version")

    @cached_property
    def incidents(self) -> list[IncidentRow]:
        """The incidents, in the order in which they were recorded."""
        return self._rows(IncidentRow, "incidents ORDER BY id")

    @cached_property
    def costs(self) -> list[CostRow]:
        """The server's wall time in each stage of its work, with the most expensive stage first."""
        return self._rows(CostRow, "costs ORDER BY seconds DESC, stage")

    def sums(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """Yield (version, tasks, weights) of the updates in each version's sum, in the order of summation."""
        for version, tasks, weights in self.select("SELECT * FROM sums ORDER BY version"):
            yield version, np.frombuffer(tasks, "<i8"), np.frombuffer(weights, "<f8")

    def trip(self, task: int) -> TripRow:
        """Return one trip with all its fields. Raises `KeyError` for an unknown task."""
        if rows := self._rows(TripRow, "trips WHERE task = ?", (task,)):
            return rows[0]
        raise KeyError(f"no trip has task {task}")

    def phone(
        self, client: int, trips: int, incidents: int, tasks: int
    ) -> tuple[ClientRow | None, list[TripRow], list[IncidentRow]]:
        """Return a client's row, and the client's last trips and incidents, newest first.

        The client's row is None if it has not been recorded yet. At most ``trips`` trips and ``incidents``
        incidents are returned. Only the run's last ``tasks`` tasks are searched for trips, so that the query
        is fast.
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
        """Yield the events of the journal, each with its number, in ascending order of the numbers."""
        with self._errors():
            yield from read_events(self._db)

    def moves(self) -> Iterator[Joined | Left]:
        """Yield the events of clients that join or leave, in chronological order.

        Other events are not decoded. A death is treated as leaving if it disconnects a client that was
        connected or on its last trip.
        """
        tags = (b"\xa6joined", b"\xa4left", b"\xa4died")
        statement = f"SELECT event FROM journal WHERE {' OR '.join(['instr(event, ?)'] * 3)} ORDER BY seq"
        here, finishing, rules = set[int](), set[int](), self.meta.privacy
        with self._errors():
            for (encoded,) in self._db.execute(statement, tags):
                event = event_decoder.decode(encoded)
                if isinstance(event, Died):
                    on_trip = event.client in finishing and (event.declared or event.task is not None)
                    if event.client in here or on_trip:
                        event = consequence(event, private=rules is not None and rules.central) or event
                if isinstance(event, Joined):
                    here.add(event.client)
                    yield event
                elif isinstance(event, Left):
                    here.discard(event.client)
                    (finishing.add if event.finishes else finishing.discard)(event.client)
                    yield event

    def close(self) -> None:
        """Close the file; garbage collection also closes it."""
        self._db.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
