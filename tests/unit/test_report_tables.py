"""The tables and the lead sentence of a report: each figure is under its own heading."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec

from edgefl.results.record import Record
from edgefl.results.report import _attackers, _energy, _fidelity, _profiles, in_a_sentence
from edgefl.results.store import Store
from edgefl.results.summary import summarize
from tests.reports import client, evaluation, trip, version


def rows(html: str) -> list[dict[str, str]]:
    """Return the rows of all tables, keyed by heading."""
    found = []
    for table in html.split("<table")[1:]:
        heads, *cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr")[1:])
        names = [unescape(name).replace("\N{NO-BREAK SPACE}", " ") for name in heads]
        found += [dict(zip(names, row, strict=True)) for row in cells]
    return found


def test_the_energy_of_each_part_of_a_trip_is_under_its_heading() -> None:
    parts = {"compute_j": 1.0, "download_j": 2.0, "upload_j": 3.0, "idle_j": 4.0, "total_j": 10.0}
    phone = {**parts, "low_j": 5.0, "high_j": 20.0}
    both = {name: 2 * value for name, value in phone.items()}
    (card,) = _energy({**both, "by_profile": {"pixel-4": phone}, "unknown_trips": 3})
    names = ("Profile", "Computing", "Download", "Upload", "Idle", "Sum", "90% interval")
    heads = [name if name == "Profile" else f"{name}, J" for name in names]
    assert rows(card) == [
        dict(zip(heads, ("pixel-4", "1", "2", "3", "4", "10", "5 to 20"), strict=True)),
        dict(zip(heads, ("all", "2", "4", "6", "8", "20", "10 to 40"), strict=True)),
    ]
    assert "3 trips are missing" in card


def test_the_errors_of_each_part_of_a_trip_are_under_its_heading() -> None:
    names = ("mean_error", "median_error", "median_abs_error", "p95_abs_error")
    training, upload = (
        {"measured": 4, **dict(zip(names, numbers, strict=True))}
        for numbers in ((0.01, -0.02, 0.03, 0.04), (0.05, 0.06, 0.07, 0.08))
    )
    found: dict[str, Any] = {
        "compute": training,
        "up": upload,
        "delay": {"measured": 0, **dict.fromkeys(names)},
    }
    html = _fidelity({"by_quantity": found, "by_device": {"pi-4": found}}, {"pi-4": 1.5}, enforced=True)
    heads = (
        "Error of the total",
        "Median error",
        "Median absolute error",
        "95th percentile, absolute",
        "Trips",
    )
    assert rows(html) == [
        {
            "Part of a trip": "Training",
            **dict(zip(heads, ("+1.00%", "-2.00%", "3.00%", "4.00%", "4"), strict=True)),
        },
        {
            "Part of a trip": "Upload",
            **dict(zip(heads, ("+5.00%", "+6.00%", "7.00%", "8.00%", "4"), strict=True)),
        },
        {
            "Median error / 95th percentile, by device": "pi-4",
            "Training": "-2.00% / 4.00%",
            "Upload": "+6.00% / 8.00%",
        },
        {
            "Error of the total, by device": "pi-4",
            "Training": "+1.00%",
            "Upload": "+5.00%",
            "Device model within (90%)": "1.5×",
        },
    ]


def test_the_figures_of_each_profile_are_under_their_headings(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        slow = msgspec.structs.replace(client(0, "pi-4", 0.5, 0), memory_mib=512.0)
        store.clients([slow, client(1, "fast", 0.25, 1)])
        for task, (owner, took_s, staleness) in enumerate(((0, 3.0, 2), (0, 4.0, 4), (1, 1.0, 0))):
            times = {"arrived_s": 4.0, "trip_declared_s": took_s, "trip_achieved_s": took_s}
            sizes = {"peak_mib": 3.0 - owner, "process_grew_mib": 7.0 - owner}
            store.trip(trip(task, owner, staleness=staleness, **times, **sizes))
        store.applied(1, [0, 1, 2], [0.5, 0.25, 0.25])
        for task in range(3):
            store.released(task, "applied")
        store.version(version(1, 4.0))
        store.evaluation(evaluation(1, 4.0, accuracy=0.45, correct=(3, 6), total=(10, 10)))
        store.set_meta(strategy="fedbuff", clock="virtual", status="done")
    with Record(tmp_path) as record:
        found = rows(_profiles(record, summarize(record)))
    heads = (
        "Profile", "Network", "Clients", "Median training step, s", "Trips", "Median trip time, s",
        "Staleness, mean / 95th percentile", "Applied weight", "Accuracy on its classes",
        "Peak memory / limit, MiB", "Process growth, MiB",
    )  # fmt: skip
    assert found == [
        dict(zip(heads, row, strict=True))
        for row in (
            ("pi-4", "lte", "1", "0.5", "2", "3.5", "3 / 3.9", "1.5", "30.0%", "3 / 512", "7"),
            ("fast", "lte", "1", "0.25", "1", "1", "0 / 0", "0.5", "60.0%", "2", "6"),
        )
    ]


def test_honest_clients_and_attackers_each_have_their_own_weight_and_accuracy(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(k) for k in range(3)])
        for task in range(3):
            store.trip(trip(task, task, arrived_s=1.0, staleness=0))
        store.applied(1, [0, 1, 2], [0.5, 0.3, 0.2])
        store.version(version(1, 1.0))
        scores = (0.2, 0.4, 0.9)
        store.evaluation(evaluation(1, 1.0, clients=(0, 1, 2), client_accuracy=scores, client_loss=scores))
        store.set_meta(strategy="fedbuff", clock="virtual", attackers=[2])
    found = summarize(tmp_path)["attackers"]
    assert found["honest"] == {"weight_share": 0.8, "weight": 1.2, "accuracy": 0.3}
    assert found["attacking"] == {"weight_share": 0.2, "weight": 0.6, "accuracy": 0.9}
    (card,) = _attackers(found)
    heads = ("Clients", "Share of weight", "Applied weight", "Accuracy")
    assert rows(card) == [
        dict(zip(heads, ("Honest", "80.0%", "1.2", "30.0%"), strict=True)),
        dict(zip(heads, ("Attacking", "20.0%", "0.6", "90.0%"), strict=True)),
    ]
    assert "1 client sent harmful updates. Accuracy is that of the last model on their own" in card


def test_the_lead_sentence_gives_the_best_accuracy_if_the_last_is_a_percentage_point_lower() -> None:
    slow = {"profiles": ["a", "b", "c"], "accuracy": 0.2, "applied_weight": 0.5}
    known = {"client_trips": 1, "versions": 2, "emulated_s": 60.0, "strategy": "fedavg", "clients": 10}
    record: Any = None
    for best, after in ((0.5, ", after 50.0% at its best"), (0.405, "")):
        found = {**known, "accuracy": 0.4, "best_accuracy": best, "loss": 1.0, "slow_phones": slow}
        assert in_a_sentence(record, found) == (
            "10 phones reached 40.0% accuracy with fedavg in 60 s of emulated time "
            f"(1 client trip, 2 versions){after}; on the classes held only by the slowest profiles, the "
            "accuracy is 20.0%; each phone of the slowest profiles had 0.5 times its fair share of the "
            "weight."
        )
