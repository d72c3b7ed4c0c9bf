"""A run's record as tables of columns, for a notebook, a data frame or a file."""

from __future__ import annotations

import csv
import importlib
import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.files import write_bytes
from edgefl.results import tables
from edgefl.results.groups import applied_weight, profile_of
from edgefl.results.record import Columns, Record
from edgefl.results.rows import CHECKSUMS
from edgefl.results.spending import spending
from edgefl.results.summary import metric_names, value_of

SHOWN_ROWS = 5
"""Number of rows that are printed from each end of a long table."""


class Table(dict[str, NDArray[Any]]):
    """A table: columns of equal length, keyed by name.

    Numbers are in int64 or float64 arrays, and strings in object arrays. A missing number is NaN.

    >>> table = Table(version=np.array([0, 10]), accuracy=np.array([0.1, 0.9]))
    >>> float(table["accuracy"][table["version"] == 10][0]), table.rows
    (0.9, 2)
    """

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()), ()))

    def __repr__(self) -> str:
        """Return the first and last rows as text, with as many columns as fit into the terminal."""
        return tables.as_text(self._ends([*self][: shutil.get_terminal_size().columns // 10]))

    def _repr_html_(self) -> str:
        """Return the first and last rows as HTML, with all columns."""
        return self._ends([*self])._repr_html_()

    def _ends(self, names: Sequence[str]) -> tables.FittedTable:
        """Return a table of the columns ``names``, with at most `SHOWN_ROWS` rows from each end."""
        long = self.rows > 2 * SHOWN_ROWS
        places = (
            [*range(SHOWN_ROWS), *range(self.rows - SHOWN_ROWS, self.rows)] if long else [*range(self.rows)]
        )
        columns = [
            [None if value != value else value for value in self[name][places].tolist()] for name in names
        ]
        rows: list[Sequence[object]] = [*zip(*columns, strict=True)]
        if long:
            rows.insert(SHOWN_ROWS, ["…"] * len(names))
        heads = [name if self[name].dtype == object else f">{name}" for name in names]
        size = f"{tables.many(self.rows, 'row')}, {tables.many(len(self), 'column')}"
        if more := [*self][len(names) :]:
            size += f"; not shown: {', '.join(more)}"
        return tables.table(heads, rows, caption=size, fold=True)

    def frame(self) -> Any:
        """Return the table as a pandas DataFrame or, if pandas is not installed, as a polars DataFrame.

        Raises `ConfigError` if neither package is installed.
        """
        for name in ("pandas", "polars"):
            try:
                columns = dict(self) if name == "pandas" else self._for_polars()
                return importlib.import_module(name).DataFrame(columns)
            except ModuleNotFoundError as missing:
                if missing.name != name:
                    raise
        raise ConfigError("a data frame needs pandas or polars, but neither is installed: pip install pandas")

    def csv(self) -> str:
        """Return the table as CSV with a header (RFC 4180, but lines end in LF); NaN becomes an empty field.

        >>> Table(x=np.array([1.5, np.nan]), name=np.array(["a", "b,c"], object)).csv()
        'x,name\\n1.5,a\\n,"b,c"\\n'
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self)
        plain = ([None if value != value else value for value in column.tolist()] for column in self.values())
        writer.writerows(zip(*plain, strict=True))
        return text.getvalue()

    def write(self, path: str | Path) -> Path:
        """Write the table to ``path``, which must end in .csv or .parquet; return the path.

        Raises `ConfigError` if ``path`` has another suffix, or if it ends in .parquet and neither polars nor
        pyarrow is installed. Raises `RunError` if the file cannot be written.
        """
        path = Path(path)
        writers: dict[str, Callable[[], bytes]] = {
            ".csv": lambda: self.csv().encode(),
            ".parquet": self._parquet,
        }
        if path.suffix not in writers:
            raise ConfigError(f"{path}: must end in .csv or .parquet")
        return write_bytes(path, writers[path.suffix]())

    def _for_polars(self) -> dict[str, NDArray[Any]]:
        """Return the columns; an empty column of strings becomes an array of numpy's string type.

        Polars infers the type of an object array from its values, and cannot write objects to Parquet.
        """
        return {
            name: values if len(values) or values.dtype != object else values.astype(str)
            for name, values in self.items()
        }

    def _parquet(self) -> bytes:
        file = io.BytesIO()
        try:
            importlib.import_module("polars").DataFrame(self._for_polars()).write_parquet(file)
            return file.getvalue()
        except ModuleNotFoundError:
            pass
        try:
            arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        except ModuleNotFoundError:
            raise ConfigError(
                "Parquet needs polars or pyarrow, but neither is installed: pip install polars"
            ) from None
        parquet.write_table(arrow.table({name: arrow.array(column) for name, column in self.items()}), file)
        return file.getvalue()


def column(values: Iterable[Any], kind: type = float) -> NDArray[Any]:
    """Return the values of one column as an array.

    None becomes NaN, so a column of integers with a None becomes a column of floats.

    >>> column([1, None], int), column([1, 2], int)
    (array([ 1., nan]), array([1, 2]))
    """
    found = list(values)
    if kind is int and None not in found:
        return np.array(found, np.int64)
    if kind is str:
        return np.array(found, object)
    return np.array(found, np.float64)


def _single(columns: Columns) -> Table:
    """Return the columns of a record's table that hold one number or string per row.

    Checksums and ``uses`` are left out.
    """
    table = Table()
    for name, (kind, optional) in columns.kinds.items():
        if kind in (int, float, str) and name not in (*CHECKSUMS, "uses"):
            values = columns[name]
            missing = optional and kind is int and (values < 0).any()
            table[name] = np.where(values < 0, np.nan, values) if missing else values.copy()
    return table


def evaluations(record: Record) -> Table:
    """Return the learning curve: one row per evaluation, ordered by version.

    ``at_s`` is the time at which the version was published, in emulated seconds, and ``trips`` is the number
    of client trips that had ended by then. If the last version is evaluated only because the run ends, both
    refer to the end of the run. ``wall_s`` is the wall time at which the result arrived. The columns after
    ``accuracy`` and ``loss`` are the metrics of the user's ``evaluation.function`` and, in a private run,
    ``epsilon``: the ε spent up to the version.
    """
    rows = record.evaluations
    kinds = {"version": int, "at_s": float, "wall_s": float, "trips": int, "accuracy": float, "loss": float}
    table = Table({name: column((getattr(row, name) for row in rows), kind) for name, kind in kinds.items()})
    for name in metric_names(record):
        table.setdefault(name, column(value_of(row, name) for row in rows))
    if (spent := spending(record)) is not None:
        table["epsilon"] = spent.epsilon[table["version"]]
    return table


def trips(record: Record) -> Table:
    """Return one row per client trip, ordered by task.

    The columns are the fields of `TripRow`, the device profile, and the metrics that the user's training
    function logged; ``logged_`` precedes the name of such a metric if another column has that name. Times are
    in emulated seconds, except ``cpu_s``. If the trip did not reach a phase, such as the upload, the times of
    that phase are NaN.
    """
    table = _single(record.trips)
    table["profile"] = profile_of(record, table["client"])
    for name, logged in record.metrics.items():
        table[f"logged_{name}" if name in table else name] = logged
    return table


def versions(record: Record) -> Table:
    """Return one row per version, with the fields of `VersionRow`.

    For a private run, there are two more columns, ``epsilon`` and ``clip_norm``.
    """
    table = _single(record.versions)
    if (spent := spending(record)) is not None:
        table["epsilon"], table["clip_norm"] = (
            row[table["version"]] for row in (spent.epsilon, spent.clip_norm)
        )
    return table


def clients(record: Record) -> Table:
    """Return one row per client: the fields of `ClientRow`, ``trips`` and ``applied_weight``.

    ``trips`` is the number of the client's trips whose updates arrived. ``applied_weight`` is the client's
    share of the total weight of all applied updates, multiplied by the number of clients; 1 is fair.
    """
    table = _single(record.fleet)
    ended = record.trips["client"][~np.isnan(record.trips["arrived_s"])]
    table["trips"] = np.bincount(ended, minlength=int(table["client"].max(initial=-1)) + 1)[table["client"]]
    shares = applied_weight(record).shares
    table["applied_weight"] = shares if len(shares) else np.zeros(table.rows)
    return table


def incidents(record: Record) -> Table:
    """Return one row per incident, with the fields of `IncidentRow`."""
    return _single(Columns(record, "incidents"))


def weights(record: Record) -> Table:
    """Return one row for each update in each version's sum: its weight, client, profile and staleness."""
    sums = list(record.sums())
    tasks = np.concatenate([tasks for _, tasks, _ in sums]) if sums else np.empty(0, np.int64)
    values = np.concatenate([values for *_, values in sums]) if sums else np.empty(0)
    known = record.trips["task"]
    place = np.searchsorted(known, tasks).clip(0, max(0, len(known) - 1))
    client = record.trips["client"][place] if len(known) else tasks
    stale = record.trips["staleness"][place] if len(known) else tasks
    return Table(
        version=np.repeat(
            np.array([version for version, *_ in sums], np.int64), [len(t) for _, t, _ in sums]
        ),
        task=tasks.astype(np.int64),
        client=client,
        profile=profile_of(record, client),
        staleness=stale,
        weight=values.astype(np.float64),
    )


def staleness(record: Record) -> Table:
    """Return one row per update that arrived, with its task, client, staleness (in versions) and fate."""
    every = trips(record)
    arrived = ~np.isnan(every["arrived_s"])
    names = ("task", "client", "profile", "arrived_s", "staleness", "fate")
    table = Table({name: every[name][arrived] for name in names})
    table["staleness"] = table["staleness"].astype(np.int64)
    return table


TABLES_OF_A_RUN: dict[str, Callable[[Record], Table]] = {
    "evaluations": evaluations,
    "trips": trips,
    "versions": versions,
    "weights": weights,
    "clients": clients,
    "incidents": incidents,
}
"""The tables that `edgefl export` writes."""


def export(folder: Path, out: Path, kind: str = "csv") -> list[Path]:
    """Write each of the run's tables into the folder ``out``, and return the paths of the files.

    ``kind`` is the format of the files, csv or parquet.
    """
    with Record(folder) as record:
        return [make(record).write(out / f"{name}.{kind}") for name, make in TABLES_OF_A_RUN.items()]
