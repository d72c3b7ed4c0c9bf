"""The run record, read: typed rows, and numpy arrays for the tables that are long."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.core.events import Event, Joined, Left, event_decoder
from edgefl.errors import ConfigError
from edgefl.results.rows import (
    APPLICATION_ID,
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
    to_unsigned,
)

_CHECKSUMS = ("checksum_sent", "checksum_seen")


def check_file(db: sqlite3.Connection, path: Path) -> None:
    """Raise `ConfigError`, in one line, unless ``db`` is a run record that this edgefl can use."""
    try:
        stamp = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as error:
        raise ConfigError(f"run record {path} cannot be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"run record {path} is damaged or not a record: {error}") from None
    if stamp != APPLICATION_ID:
        raise ConfigError(f"{path} is a database of something else than edgefl (application id {stamp:#x})")
    if version != SCHEMA_VERSION:
        age = "newer" if version > SCHEMA_VERSION else "older"
        raise ConfigError(
            f"run record {path} was written by {'a' if age == 'newer' else 'an'} {age} edgefl "
            f"(schema {version}; this one reads {SCHEMA_VERSION})"
        )
    missing = set(TABLES) | {"meta", "journal", "sums"}
    if missing := missing - tables:
        raise ConfigError(f"run record {path} is damaged: no table {', '.join(sorted(missing))}")


class Columns(Mapping[str, NDArray[Any]]):
    """A table by column, in order of its key: ``trips["compute_s"]`` is a float64 array.

    Missing values: NaN in a float column, −1 in an integer one, "" in text, 0 in a checksum.
    """

    def __init__(self, record: Record, table: str) -> None:
        self._record, self._table = record, table
        self._types = column_types(TABLES[table])
        if table == "trips":
            self._types["uses"] = (int, False)
        self._read: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._types:
            raise KeyError(f"{self._table} has no column {name!r}; have: {', '.join(self._types)}")
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def _load(self, name: str) -> NDArray[Any]:
        kind = self._types[name][0]
        key = next(iter(self._types))
        missing = {int: "-1", float: "NULL", str: "''"}[kind] if name not in _CHECKSUMS else "0"
        rows = self._record.select(f"SELECT COALESCE({name}, {missing}) FROM {self._table} ORDER BY {key}")
        if kind is float:
            values = np.array([row[0] for row in rows], dtype=np.float64)
        elif kind is int:
            values = np.array([row[0] for row in rows], dtype=np.int64)
            if name in _CHECKSUMS:
                values = values.view(np.uint64)
        else:
            values = np.array([row[0] for row in rows], dtype=object)
        values.flags.writeable = False
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    @cached_property
    def rows(self) -> int:
        """How many rows there are."""
        (count,) = next(iter(self._record.select(f"SELECT COUNT(*) FROM {self._table}")))
        return int(count)


class Record:
    """Reader of ``<folder>/record.sqlite``: one moment of the run, also while the writer goes on.

    Raises `ConfigError` if ``folder`` is not a run's folder or its record cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / FILE_NAME
        if not path.is_file():
            raise ConfigError(f"{self.folder} is not a run's folder: no {FILE_NAME} in it")
        self.path = path
        self._db = self._open()
        # one read transaction: every column is of the same moment
        self._db.execute("BEGIN")
        with self._errors():
            check_file(self._db, path)

    def _open(self) -> sqlite3.Connection:
        address = f"{self.path.resolve().as_uri()}?mode=ro"
        db = sqlite3.connect(address, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # a folder that cannot be written has no room for the log's index; without a log none is needed
            log = self.path.with_name(f"{FILE_NAME}-wal")
            if not log.exists() or log.stat().st_size == 0:
                db.close()
                db = sqlite3.connect(
                    f"{address}&immutable=1", uri=True, isolation_level=None, check_same_thread=False
                )
        except sqlite3.DatabaseError:
            pass  # check_file says what is wrong
        return db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"run record {self.path} is damaged or cannot be read: {error}") from None
        except (msgspec.DecodeError, json.JSONDecodeError, ValueError) as error:
            self.close()
            raise ConfigError(f"run record {self.path} is damaged: {error}") from None
        except ConfigError:
            self.close()
            raise

    def select(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of any SQL query on the record."""
        with self._errors():
            return self._db.execute(statement, parameters).fetchall()

    @cached_property
    def meta(self) -> Meta:
        """What is known of the run as a whole."""
        with self._errors():
            known = {field.name for field in msgspec.structs.fields(Meta)}
            fields = {k: msgspec.json.decode(v) for k, v in self.select("SELECT * FROM meta") if k in known}
            return msgspec.convert(fields, Meta, strict=False)

    @cached_property
    def clients(self) -> list[ClientRow]:
        """The fleet, by client."""
        rows = self.select(f"SELECT {', '.join(ClientRow._fields)} FROM clients ORDER BY client")
        with self._errors():
            return [row._replace(labels=tuple(json.loads(row.labels))) for row in map(ClientRow._make, rows)]  # type: ignore[arg-type]

    @cached_property
    def trips(self) -> Columns:
        """Columns of `TripRow`, by task; ``uses`` too: in how many versions the update was summed."""
        return Columns(self, "trips")

    @cached_property
    def versions(self) -> Columns:
        """Columns of `VersionRow`, by version."""
        return Columns(self, "versions")

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The measurements, by version. A NaN accuracy or loss is NaN."""
        rows = self.select(f"SELECT {', '.join(EvaluationRow._fields)} FROM evaluations ORDER BY version")
        nan = float("nan")
        with self._errors():
            return [
                EvaluationRow(
                    version=version,
                    at_s=at_s,
                    wall_s=wall_s,
                    trips=trips,
                    accuracy=nan if accuracy is None else accuracy,
                    loss=nan if loss is None else loss,
                    correct=tuple(json.loads(correct)),
                    total=tuple(json.loads(total)),
                )
                for version, at_s, wall_s, trips, accuracy, loss, correct, total in rows
            ]

    @cached_property
    def incidents(self) -> list[IncidentRow]:
        """What went wrong, in order."""
        return list(map(IncidentRow._make, self.select("SELECT * FROM incidents ORDER BY id")))

    @cached_property
    def costs(self) -> list[CostRow]:
        """The server's wall time by stage, most expensive first."""
        return list(map(CostRow._make, self.select("SELECT * FROM costs ORDER BY seconds DESC, stage")))

    def sums(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """Each version's updates: (version, tasks, weights), in summing order."""
        for version, tasks, weights in self.select("SELECT * FROM sums ORDER BY version"):
            yield version, np.frombuffer(tasks, "<i8"), np.frombuffer(weights, "<f8")

    def trip(self, task: int) -> TripRow:
        """One trip, whole. Raises `KeyError` for an unknown task."""
        rows = self.select(f"SELECT {', '.join(TripRow._fields)} FROM trips WHERE task = ?", (task,))
        if not rows:
            raise KeyError(f"no trip has task {task}")
        row = TripRow._make(rows[0])
        sent, seen = (None if value is None else to_unsigned(value) for value in row[-2:])
        return row._replace(checksum_sent=sent, checksum_seen=seen)

    def events(self, after_seq: int = 0) -> Iterator[tuple[int, Event]]:
        """The journal, with each event's number, in order."""
        with self._errors():
            for seq, event in self._db.execute(
                "SELECT seq, event FROM journal WHERE seq > ? ORDER BY seq", (after_seq,)
            ):
                yield seq, event_decoder.decode(event)

    def moves(self) -> Iterator[Joined | Left]:
        """The coming and going of clients, in order: found without decoding the other events."""
        statement = "SELECT event FROM journal WHERE instr(event, ?) OR instr(event, ?) ORDER BY seq"
        with self._errors():
            for (encoded,) in self._db.execute(statement, (b"\xa6joined", b"\xa4left")):
                event = event_decoder.decode(encoded)
                if isinstance(event, Joined | Left):
                    yield event

    def close(self) -> None:
        """Let the file go. A record that is garbage-collected is closed too."""
        self._db.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
