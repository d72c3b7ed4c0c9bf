"""Compares predicted with measured inference times of phones, for three kinds of prediction ("bases").

The basis of a prediction is the information about the phone that it uses:

- ``profile``: edgefl has a profile of this phone model;
- ``core``: there is no such profile, but the type of core, its clock rate and the RAM are known;
- ``one-network``: in addition to the facts of ``core``, the measured time of one network (`REFERENCE`) is
  known. This network is therefore not judged.

The error is |predicted ÷ measured − 1|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.devices import phones
from edgefl.devices.phone_fit import REFERENCE
from edgefl.devices.phone_networks import networks_named, read_networks
from edgefl.devices.phone_rows import PhoneRow, read_rows
from edgefl.devices.phones import PhoneTable
from edgefl.devices.profiles import phone_table
from edgefl.devices.time_model import TimeModel
from edgefl.lab.bench import Say, machine, silent
from edgefl.learning.operations import StepWork
from edgefl.results import tables
from edgefl.results.tables import percent

Works = dict[str, StepWork]
NUMBERS = ("max_ghz", "ram_gib", "first_ms", "median_ms", "p10_ms", "p90_ms")
"""Columns whose values are converted to numbers, if they are finite numbers."""


def run(quick: bool = False, *, rows: Path, networks: Path, say: Say = silent) -> dict[str, Any]:
    """Predict the times of all rows; ``phones`` in the result has an entry for each row and basis.

    Times are in seconds. ``quick`` changes nothing, because all rows together take only a second.
    """
    measured, layers, table = read_rows(rows), read_networks(networks), phone_table()
    networks_named(layers, [row.network for row in measured], networks)
    say(f"predicting {len(measured)} rows")
    works = {name: table.work(own) for name, own in layers.items()}
    judged = list(judge(table, measured, works))
    return {"machine": machine(), "groups": groups(judged), "phones": judged}


def judge(table: PhoneTable, rows: Sequence[PhoneRow], works: Works) -> Iterator[dict[str, Any]]:
    """Yield a result for each measured row and each basis on which its time can be predicted."""
    by_unit: dict[phones.About, list[PhoneRow]] = {}
    for row in rows:
        by_unit.setdefault(row.about, []).append(row)
    for about, own in by_unit.items():
        for basis, model in _models(table, about, own, works):
            for row in own:
                if basis != "one-network" or row.network != REFERENCE:
                    yield _judged(row, basis, model, works[row.network])


def _models(
    table: PhoneTable, about: phones.About, rows: Sequence[PhoneRow], works: Works
) -> Iterator[tuple[str, TimeModel]]:
    """Yield each basis on which a phone's times can be predicted, with the time model for that basis."""
    own = next((phone for phone in table.phones if phone.model == about.model), None)
    if own is not None:
        yield "profile", phones.of_measured(table, own, about.unit)
        return
    yield "core", phones.of_core(table, about)
    for row in rows:
        if row.network == REFERENCE:
            yield "one-network", phones.of_one_network(table, about, works[REFERENCE], row.seconds)
            return


def _judged(row: PhoneRow, basis: str, model: TimeModel, work: StepWork) -> dict[str, Any]:
    found = model.predict(work)
    keys = {name: _number_in(text) if name in NUMBERS else text for name, text in row.keys.items()}
    return {
        **keys,
        "quantity": "median",
        "measured": row.seconds,
        "predicted": found.seconds,
        "low": found.low_s,
        "high": found.high_s,
        "basis": basis,
    }


def _number_in(text: str) -> float | str:
    """Return the number in a field, or the field if it is not a finite number."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def groups(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise the prediction errors, grouped by the basis of the prediction."""
    return [
        {"basis": basis, **_errors([row for row in judged if row["basis"] == basis])}
        for basis in dict.fromkeys(row["basis"] for row in judged)
    ]


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the errors of predictions.

    Returns the number of rows and of phones, the median and the 90th percentile of the errors, the 90th
    percentile of the phones' median errors, and the share of rows within their predicted intervals.
    """
    errors = np.array([abs(row["predicted"] / row["measured"] - 1) for row in rows])
    units = np.array([row["unit"] for row in rows])
    of_unit = [float(np.median(errors[units == unit])) for unit in dict.fromkeys(units)]
    return {
        "rows": len(rows),
        "units": len(of_unit),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "worst_tenth": float(np.quantile(of_unit, 0.9)),
        "held": sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows),
    }


def show(result: dict[str, Any]) -> None:
    heads = ["what is known", ">phones", ">rows", ">median", ">90%", ">worst tenth", ">held"]
    lines = [
        [group["basis"], group["units"], group["rows"]]
        + [percent(group[name]) for name in ("median", "p90", "worst_tenth")]
        + [percent(group["held"], 0)]
        for group in result["groups"]
    ]
    tables.show(
        tables.table(heads, lines, "Inference on phones"),
        "median, 90%: |predicted ÷ measured - 1|; worst tenth: exceeded by the median error of a\n"
        "tenth of the phones; held: share within their 90% intervals",
    )
