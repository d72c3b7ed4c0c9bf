"""edgefl emulates a fleet of heterogeneous phones on one machine, and runs federated learning on it.

    >>> import edgefl
    >>> phones = edgefl.Fleet(devices={"pixel-3a": 8, "pi-4": 4}, network="lte")
    >>> experiment = edgefl.Experiment(fleet=phones, stop=edgefl.Stop(versions=20))
    >>> edgefl.run(experiment).summary()["versions"]                                  # doctest: +SKIP
    20

The map, from what the user says to what comes out:

    experiment config/ toml            the experiment: typed, checked, read and written
    strategies/ privacy/ theory/       one paper's algorithm a file; what is proved of them, measured
    supervisor/ children/              the process of a run, and those that it starts
    server/ client/ virtual/           what they do; virtual: the same in the order of emulated time
    core/                              the server's decisions, pure
    messages/ sockets/ channel         what the processes say, and over what
    parameters/ transport/             how a model and an update lie in memory and travel
    emulation/ phones/                 what makes a process behave like a phone; the phones of one run
    learning/                          data, models, local training
    kernels/                           the hot path: weighted sums, checksums, moving averages
    record/ verify                     the run folder; a run made again from it
    report/ result                     what the user sees
    cli/ doctor bench/ reproduce/      the commands; what is measured, and the papers' claims, run here
    pytest_plugin regression/          tests on emulated devices
    interchange/                       other projects' profiles
    testing                            a strategy tried in memory
    errors seeds processes             what all of them use; failpoints, plain_pickle: what few do
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.errors import ConfigError, EdgeflError, ProfileError, RunError
from edgefl.experiment import (
    Checkpoint,
    Clock,
    Data,
    Evaluation,
    Experiment,
    Fleet,
    Model,
    Server,
    Stop,
    Training,
)

if TYPE_CHECKING:
    from edgefl.result import Result

__all__ = [
    "Checkpoint",
    "Clock",
    "ConfigError",
    "Data",
    "EdgeflError",
    "Evaluation",
    "Experiment",
    "Fleet",
    "Model",
    "ProfileError",
    "RunError",
    "Server",
    "Stop",
    "Training",
    "new_run_folder",
    "run",
]


def run(experiment: Experiment, out: str | Path | None = None, *, quiet: bool = True) -> Result:
    """Run an experiment; returns its result, whose files are in the folder ``out``.

    Without ``out`` a new folder under ``runs/`` is made. Raises `ConfigError` if the experiment cannot be
    done and `RunError` if the run could not go on.
    """
    from edgefl.supervisor import supervisor

    return supervisor.run(
        experiment, Path(out) if out is not None else new_run_folder(experiment.name), quiet
    )


def new_run_folder(name: str) -> Path:
    """A folder for a new run that does not exist yet: ``runs/NAME-DATE-TIME``."""
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, count = stem, 1
    while folder.exists():
        count += 1
        folder = stem.with_name(f"{stem.name}-{count}")
    return folder
