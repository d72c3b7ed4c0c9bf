"""Golden runs: facts from the documented files of a run, which a restructuring must not change."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgefl import Experiment, config
from edgefl.cli import main
from edgefl.run.lanes import finished

HERE = Path(__file__).parent
DATA = HERE / "data"
REPLACED = ("strategy", "training", "stop")
"""Tables of an experiment that a case replaces; its other tables are merged with those of the base."""
MEASURED = {
    "aggregation", "memory", "nodes", "processes", "server", "server_time", "server_trip_us", "wall_s",
    # columns of tables
    "cpu_s", "id", "lateness_s", "process_grew_mib", "sum_s",
}  # fmt: skip
"""Fields that vary between runs: measurements of this machine, and the order in which failures were seen."""
TRAINED = {
    "accuracy", "accuracy_by_profile_labels", "applied_weight", "best_accuracy", "curve", "loss", "metrics",
    "model_sha256", "no_progress", "on_clients", "per_class", "slow_phones", "trained", "weight",
    "weight_sum",
}  # fmt: skip
"""Fields that depend on trained numbers, whose last bits depend on the processor and on torch."""
TABLES = ("clients", "evaluations", "incidents", "trips", "versions", "weights")
Facts = dict[str, Any]


def _cases() -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    given = tomllib.loads((HERE / "cases.toml").read_text())
    return given["base"], given["run"]


BASE, CASES = _cases()


def experiment(name: str) -> dict[str, Any]:
    """Return the table of a case's experiment."""
    case = CASES[name]
    table = {**experiment(case["same_as"])} if "same_as" in case else {**BASE}
    for key, value in case.items():
        if key in ("same_as", "stopped", "step", "command", "learned", "refused"):
            continue
        table[key] = {**table.get(key, {}), **value} if type(value) is dict and key not in REPLACED else value
    return {**table, "name": "golden"}


def golden_name(name: str) -> str:
    """Return the name of the case whose recorded facts this case must reproduce."""
    return str(CASES.get(name, {}).get("same_as", name))


def make(name: str, folder: Path, warm: Any) -> None:
    """Make the run of a case; its files are then in ``folder``."""
    case, wanted = CASES[name], msgspec.convert(experiment(name), Experiment)
    if "stopped" in case or "command" in case:
        _make_by_command(wanted, folder, case)
    else:
        finished(wanted, folder, DATA, warm)


def _make_by_command(wanted: Experiment, folder: Path, case: Mapping[str, Any]) -> None:
    """Make the run by ``edgefl run`` and, if the case stops it, ``edgefl resume``."""
    flag = folder.with_name(f"{folder.name}.stopped")
    file = DATA / f"{folder.name}.toml"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    file.write_text(config.dump(wanted))
    try:
        arguments = ["run", str(file), "--out", str(folder), "--quiet"]
        if "stopped" in case:
            stop = {"GOLDEN_STOP": f"{case['stopped']} {case['step']} {flag}"}
            _edgefl(arguments, {**environment, **stop})
            if not flag.exists():
                raise RuntimeError("the run ended before it was stopped")
            arguments = ["resume", str(folder), "--quiet"]
        _edgefl(arguments, environment)
    finally:
        file.unlink()


def _edgefl(arguments: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "edgefl", *arguments], env=environment, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, start_new_session=True, check=False)  # fmt: skip


def facts(folder: Path) -> Facts:
    """Return the facts of a finished run: figures of its summary, and digests of its tables' columns."""
    summary = json.loads((folder / "summary.json").read_text())
    found = {key: short(value) for key, value in summary.items() if key not in MEASURED}
    tables = folder / "tables"
    main(["export", str(folder), "--out", str(tables)])
    for table in TABLES:
        with (tables / f"{table}.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if table != "trips" or row["fate"]]
        if table == "incidents":
            rows.sort(key=lambda row: (float(row["at_s"]), row["client"], row["kind"], row["detail"]))
        names = [name for name in (rows[0] if rows else ()) if not MEASURED & {name, f"{table}.{name}"}]
        columns = {name: [row[name] for row in rows] for name in names}
        if table == "trips":
            found |= {f"trips.{name}": digest(column) for name, column in columns.items()}
            continue
        for kind in ("plain", "trained"):
            part = {name: columns[name] for name in names if (name in TRAINED) == (kind == "trained")}
            found[f"{table}.{kind}"] = f"{len(rows)} rows {digest(part)}"
    return found


def short(value: Any) -> Any:
    """Return a short value as it is, and a digest of a long one."""
    return value if len(json.dumps(value)) <= 70 else digest(value)


def digest(value: Any) -> str:
    """Return the start of a hash of the value."""
    return "#" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
