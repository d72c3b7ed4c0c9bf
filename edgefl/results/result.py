"""Reader of a finished run's folder: its summary, record, tables and model."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError, as_config_error, damaged
from edgefl.results import columns
from edgefl.results.columns import Table
from edgefl.results.record import Record
from edgefl.results.run_folder import CHECKPOINTS, SUMMARY_FILE, refuse_sweep
from edgefl.results.tables import FittedTable, as_text
from edgefl.validation import path


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the content of ``summary.json`` in the folder of a run or a sweep.

    Raises `ConfigError` if the file cannot be read.
    """
    file = folder / SUMMARY_FILE
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {SUMMARY_FILE}: the run did not end") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} does not hold a summary")
    return found


class Result:
    """A finished run's folder. Raises `ConfigError` if the folder does not exist or is a sweep's."""

    def __init__(self, folder: str | Path) -> None:
        self.dir = path("folder", folder)
        if not self.dir.is_dir():
            raise ConfigError(f"run folder {self.dir} not found")
        refuse_sweep(self.dir)

    def __repr__(self) -> str:
        return f"Result({str(self.dir)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the folder alone, because an open `record` can be neither pickled nor copied."""
        return {"dir": self.dir}

    def __str__(self) -> str:
        """Return the results that `edgefl run` prints."""
        try:
            return as_text(self._figures())
        except ConfigError as error:
            return f"{self!r}: {error}"

    def _repr_html_(self) -> str | None:
        try:
            return self._figures()._repr_html_()
        except ConfigError:
            return None

    def _figures(self) -> FittedTable:
        from edgefl.results.report import summary_table  # imported late, because it needs matplotlib

        with damaged(str(self.dir)):
            return summary_table(self.summary(), self.dir)

    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        return summary_in(self.dir)

    @cached_property
    def record(self) -> Record:
        """The complete record, with every trip, version and evaluation."""
        return Record(self.dir)

    def evaluations(self) -> Table:
        """Return the learning curve, with one row per evaluation: see `columns.evaluations`."""
        return self._table("evaluations")

    def trips(self) -> Table:
        """Return one row per client trip: see `columns.trips`."""
        return self._table("trips")

    def weights(self) -> Table:
        """Return one row for each update in each version, with its weight: see `columns.weights`."""
        return self._table("weights")

    def staleness(self) -> Table:
        """Return one row per update that arrived, with its staleness: see `columns.staleness`."""
        return self._table("staleness")

    def clients(self) -> Table:
        """Return one row per client, with its share of the applied weight: see `columns.clients`."""
        return self._table("clients")

    def versions(self) -> Table:
        """Return one row per version: see `columns.versions`."""
        return self._table("versions")

    def _table(self, name: str) -> Table:
        with Record(self.dir) as record:
            found: Table = getattr(columns, name)(record)
        return found

    def track(self, tracker: str) -> str:
        """Copy the run to "tensorboard", "mlflow" or "wandb"; return the copy's address or folder.

        Raises `ConfigError` if the tracker is unknown or not installed, and `RunError` if the tracker fails.
        """
        from edgefl.results.trackers import track

        return track(self.dir, tracker)

    def model(self) -> dict[str, NDArray[np.float32]]:
        """Return the tensors of the final global model as float32 arrays, keyed by name."""
        from safetensors import SafetensorError

        from edgefl.parameters.checkpoint import read_sealed

        file = self.dir / CHECKPOINTS / "final.safetensors"
        if not file.is_file():
            raise ConfigError(f"{self.dir} has no {file.relative_to(self.dir)}: the run did not end")
        with as_config_error(f"{file} cannot be read", SafetensorError, OSError, ValueError):
            return read_sealed(file)[1]
