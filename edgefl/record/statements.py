"""The SQL with which `edgefl.record.store` writes the run record, and what its statements take."""

from __future__ import annotations

from typing import Any

from edgefl.record.rows import TABLES, TripRow, to_signed


def _insert(table: str, extra: str = "") -> str:
    columns = list(TABLES[table]._fields) + extra.split()  # type: ignore[attr-defined]
    marks = ", ".join("?" * len(columns))
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})"


_FINISHED = ("task", "applied_version", "weight", "fate", "reason")
"""Columns of a trip that only `Store.applied` and `Store.released` change once its row is there."""
_BEFORE_FINISHED = TripRow._fields.index("applied_version")
_AFTER_FINISHED = TripRow._fields.index("reason") + 1
# A trip whose row is replaced stays the trip of the event that it was first recorded at: a rewind keeps it.
INSERT_TRIP = _insert("trips", "uses seq fate_seq").replace("OR REPLACE ", "") + (
    " ON CONFLICT (task) DO UPDATE SET "
    + "".join(f"{name} = excluded.{name}, " for name in TripRow._fields if name not in _FINISHED)
    + "fate = COALESCE(excluded.fate, fate), "
    "reason = CASE WHEN excluded.reason = '' THEN reason ELSE excluded.reason END, "
    "applied_version = COALESCE(applied_version, excluded.applied_version), "
    "weight = CASE WHEN excluded.uses = 0 THEN weight ELSE COALESCE(weight, 0) + excluded.weight END, "
    "uses = uses + excluded.uses, fate_seq = COALESCE(excluded.fate_seq, fate_seq)"
)
INSERT_VERSION = _insert("versions", "seq")
INSERT_EVALUATION = _insert("evaluations")
INSERT_INCIDENT = _insert("incidents")
INSERT_CLIENT = _insert("clients")
FINISH_TRIP = (
    "UPDATE trips SET fate = COALESCE(?2, fate), reason = CASE WHEN ?3 = '' THEN reason ELSE ?3 END, "
    "applied_version = COALESCE(applied_version, ?4), "
    "weight = CASE WHEN ?5 = 0 THEN weight ELSE COALESCE(weight, 0) + ?6 END, "
    "uses = uses + ?5, fate_seq = ?7 WHERE task = ?1"
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


def trip_columns(row: TripRow, seq: int, finish: list[Any] | None) -> tuple[Any, ...]:
    """What `INSERT_TRIP` takes: a trip's row, and what has become of it since if that is known."""
    sent, seen = row[-2:]
    signed = None if sent is None else to_signed(sent), None if seen is None else to_signed(seen)
    if finish is None:
        return (*row[:-2], *signed, 0, seq, None)
    _, fate, reason, version, uses, weight, fate_seq = finish
    return (
        *row[:_BEFORE_FINISHED],
        version,
        weight if uses else row.weight,
        fate or row.fate,
        reason or row.reason,
        *row[_AFTER_FINISHED:-2],
        *signed,
        uses,
        seq,
        fate_seq,
    )
