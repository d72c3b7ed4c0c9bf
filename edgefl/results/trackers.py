"""Copy a finished run to an experiment tracker: TensorBoard, MLflow or Weights & Biases.

A run is copied only after it has ended, because a tracker's threads and connections would take time from the
phones while they train. The step of a value is the model's version. A run that was already copied is not
added a second time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from edgefl import toml
from edgefl.errors import ConfigError, RunError, described, unknown
from edgefl.results.columns import evaluations
from edgefl.results.record import Record
from edgefl.results.rows import FILE_NAME
from edgefl.results.run_folder import SUMMARY_FILE
from edgefl.results.targets import settings_of

PROJECT = "edgefl"
"""Name of the project in Weights & Biases, and of the experiment in MLflow."""
FIGURES = ("accuracy", "loss", "versions", "client_trips", "emulated_s", "wall_s", "time_scale")
"""Fields of summary.json that a tracker shows for the whole run."""
MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Environment variables set for MLflow, unless the user has set them. By default, MLflow waits minutes for a
server that does not answer."""


class Copied(NamedTuple):
    """The parts of a run that are copied to a tracker."""

    folder: Path
    name: str
    group: str | None
    """Name of the sweep, if the run belongs to one."""
    identity: str
    """Hexadecimal id of the run, the same for every copy."""
    settings: dict[str, Any]
    """Values of the experiment's keys, keyed by dotted name."""
    curve: list[dict[str, float]]
    """The known values of each evaluation, with ``version``, ``emulated_s`` and ``trips``."""
    figures: dict[str, float]
    """Results of the whole run."""
    tags: dict[str, str]
    began_unix_s: float
    """Unix time at which the run was started, in seconds; if unknown, when the record last changed."""


def require(name: object) -> None:
    """Raise `ConfigError` if there is no tracker called ``name``, or its package is not installed."""
    if not isinstance(name, str) or name not in TRACKERS:
        raise ConfigError(unknown("tracker", str(name), [*TRACKERS]))
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder instead of a module, for example W&B's output folder
        raise ConfigError(f"tracker {name!r} is not installed: pip install 'edgefl[{name}]'")


def track(folder: Path, name: str, group: str | None = None) -> str:
    """Copy the run in ``folder`` to the tracker ``name``; return the copy's address or folder.

    ``group`` is the name of the run's sweep. Raises `ConfigError` if the tracker is unknown or not installed,
    or if the run has not ended, and `RunError` if the tracker fails.
    """
    require(name)
    run = _read(folder, group)
    try:
        return TRACKERS[name](run)
    except Exception as error:  # trackers raise exceptions from many packages
        line = described(error)[:300]
        whole = folder if group is None else folder.parents[1]
        again = f"to try again: edgefl export {whole} --track {name}"
        raise RunError(f"{name}: {line}; the run is complete; {again}") from error


def _read(folder: Path, group: str | None) -> Copied:
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{folder}: {SUMMARY_FILE} cannot be read: the run did not end") from None
    with Record(folder) as record:
        table, meta, tables = evaluations(record), record.meta, settings_of(record).tables
    if meta.status != "done":  # an interrupted run also has a summary
        raise ConfigError(f"{folder}: the run has not ended; edgefl resume {folder} continues it")
    table["emulated_s"] = table.pop("at_s")
    rows = zip(*(values.tolist() for values in table.values()), strict=True)
    curve = [{key: value for key, value in zip(table, row, strict=True) if value == value} for row in rows]
    identity = hashlib.sha256(f"{folder.resolve()} {meta.seed} {meta.model_sha256}".encode()).hexdigest()
    figures = {name: summary[name] for name in FIGURES}
    figures |= {f"staleness_{name}": value for name, value in summary["staleness"].items()}
    figures |= {name: summary["fidelity"][name] for name in ("median_abs_error", "p95_abs_error", "valid")}
    return Copied(
        folder, folder.resolve().name, group, identity[:16],
        dict(toml.flat(tables)), curve,
        {name: float(value) for name, value in figures.items() if isinstance(value, int | float)},
        {"strategy": meta.strategy, "clock": meta.clock, "model_sha256": meta.model_sha256},
        meta.created_unix_s or (folder / FILE_NAME).stat().st_mtime,
    )  # fmt: skip


def _tensorboard(run: Copied) -> str:
    """Write event files with emulated times, so that TensorBoard's axis "relative" is emulated time."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / "tensorboard"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        writer.add_text(
            "settings", "\n".join(f"    {key} = {value!r}" for key, value in run.settings.items())
        )
        for row in run.curve:
            for name, value in row.items():
                if name not in ("version", "emulated_s"):
                    at_s = run.began_unix_s + row["emulated_s"]
                    writer.add_scalar(name, value, int(row["version"]), at_s)
        for name, value in run.figures.items():
            writer.add_scalar(f"run/{name}", value, 0, run.began_unix_s)
    return f"{folder} (tensorboard --logdir {run.folder.parent})"


def _mlflow(run: Copied) -> str:
    """Add a run to the experiment "edgefl" of the server in MLFLOW_TRACKING_URI."""
    for name, value in MLFLOW_TIMEOUTS.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow.entities import Metric, Param, RunTag

    client = mlflow.MlflowClient()
    known = client.get_experiment_by_name(PROJECT)
    experiment = client.create_experiment(PROJECT) if known is None else known.experiment_id
    where = f"MLflow's experiment {PROJECT!r} at {mlflow.get_tracking_uri()}"
    done = f"tags.`edgefl.run` = '{run.identity}' and attributes.status = 'FINISHED'"
    if client.search_runs([experiment], done):
        return where
    tags = {**run.tags, "edgefl.run": run.identity, "folder": str(run.folder.absolute())}
    if run.group is not None:
        tags["sweep"] = run.group
    made = client.create_run(experiment, run_name=run.name).info.run_id
    metrics = [
        Metric(mlflow_name(name), value, round(row["emulated_s"] * 1000), int(row["version"]))
        for row in run.curve
        for name, value in row.items()
        if name != "version"
    ]
    metrics += [Metric(f"run.{name}", value, 0, 0) for name, value in run.figures.items()]
    settings = {mlflow_name(name): str(value)[:500] for name, value in run.settings.items()}
    params = [Param(name, text) for name, text in settings.items()]
    for start in range(0, len(metrics), 500):
        client.log_batch(made, metrics=metrics[start : start + 500])
    for start in range(0, len(params), 100):
        client.log_batch(made, params=params[start : start + 100])
    client.log_batch(made, tags=[RunTag(name, value) for name, value in tags.items()])
    client.set_terminated(made)
    return where


def mlflow_name(name: str) -> str:
    """Return the name of a metric or a key with ``_`` in place of characters that MLflow refuses.

    >>> mlflow_name("f1[macro]"), mlflow_name("fleet.devices.phones/paper (2)/phone.toml")
    ('f1_macro_', 'fleet.devices.phones/paper _2_/phone.toml')
    """
    return re.sub(r"[^\w./ -]", "_", name)


def _wandb(run: Copied) -> str:
    """Add a run to the project "edgefl"; if WANDB_MODE=offline, only write to the run's folder."""
    import wandb

    settings = wandb.Settings(silent=True, init_timeout=60)
    made = wandb.init(
        project=PROJECT, name=run.name, group=run.group, id=run.identity, resume="allow",
        config=run.settings, dir=str(run.folder), settings=settings,
    )  # fmt: skip
    made.define_metric("*", step_metric="emulated_s")
    for row in run.curve:
        made.log(row, step=int(row["version"]))
    made.summary.update({**run.figures, **run.tags})
    where = made.url or f"{Path(made.dir).parent} (wandb sync uploads it)"
    made.finish()
    wandb.teardown()
    return where


TRACKERS: dict[str, Callable[[Copied], str]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""The function that copies a run to each tracker, keyed by the name of the tracker.

The tracker's Python module and the extra that installs it have the same name.
"""
