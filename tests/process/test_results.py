"""Tests of the summary, report, trace and comparison of short runs."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import edgefl
from edgefl import Clock, Data, Fleet, Stop
from edgefl.cli import main
from edgefl.devices import load_device, load_network
from edgefl.devices.energy import PowerDraw, draw_of
from edgefl.results.compare import compare
from edgefl.results.energy import energy_of
from edgefl.results.grouping import FIGURES, grouped, load, rows_of
from edgefl.results.groups import applied_weight
from edgefl.results.record import Record
from edgefl.results.report import write_report
from edgefl.results.result import Result
from edgefl.results.summary import summarize, write_summary
from edgefl.results.trace import write_events, write_trace
from tests.reports import Page, read_json, read_trace

from .runs import DEVICES, experiment, virtual

PROMISED: dict[str, type] = {
    "strategy": str, "clock": str, "seed": int, "clients": int, "processes": int, "versions": int,
    "client_trips": int, "accuracy": float, "loss": float, "emulated_s": float, "wall_s": float,
    "time_scale": float, "model_sha256": str, "dropped_updates": int, "staleness": dict,
    "fidelity": dict, "aggregation": dict,
}  # fmt: skip
FAST, SLOW = "pi-zero-2w", "watch-a7"
VERSIONS = 15
"""Number of versions after which the runs under the virtual clock end."""
CLASSES = {FAST: [4, 5, 6, 7, 8, 9], SLOW: [0, 1, 2, 3]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs under the virtual clock, two of which differ only in seed and workers, and one run under the
    wall clock. Only the slow devices hold the classes 0 to 3."""
    folder = tmp_path_factory.mktemp("runs")
    data = Data(name="digits", partition="by-device", labels=CLASSES)
    fair: dict[str, Any] = {"strategy": {"name": "fedstaleweight", "buffer_size": 3}}
    for name, workers, changes in (
        ("fedbuff", 2, {}), ("fair-0", 1, {**fair, "seed": 0}), ("fair-1", 2, {**fair, "seed": 1})
    ):  # fmt: skip
        clock, stop = Clock(kind="virtual", workers=workers), Stop(versions=VERSIONS)
        edgefl.run(experiment(clock=clock, data=data, stop=stop, **changes), folder / name)
    edgefl.run(experiment(data=data), folder / "wall")
    return folder


@pytest.mark.parametrize("name", ["fedbuff", "wall"])
def test_the_summary_has_the_promised_keys_with_their_types(runs: Path, name: str) -> None:
    found = read_json(runs / name / "summary.json")
    for key, kind in PROMISED.items():
        assert isinstance(found[key], kind), key
        assert not isinstance(found[key], bool)
    assert {"mean", "max"} <= set(found["staleness"])
    assert {"median_abs_error", "p95_abs_error"} <= set(found["fidelity"])
    assert isinstance(found["fidelity"]["valid"], bool)
    assert Result(runs / name).summary() == found
    assert read_json(write_summary(runs / name)) == found  # computed again from the record
    assert sum(tensor.size for tensor in Result(runs / name).model().values()) == found["parameters"]


@pytest.mark.parametrize("name", ["fedbuff", "wall"])
def test_the_summary_agrees_with_the_rows(runs: Path, name: str) -> None:
    found = summarize(runs / name)
    with Record(runs / name) as record:
        trips, clients = record.trips, len(record.clients)
        ended, used = ~np.isnan(trips["arrived_s"]), trips["uses"] > 0
        assert found["client_trips"] == ended.sum() >= 3 * found["versions"]
        assert sum(found["trips"].values()) == trips["task"].size
        assert found["dropped_updates"] == 0
        assert found["staleness"]["mean"] == pytest.approx(trips["staleness"][used].mean(), rel=1e-5)
        assert found["staleness"]["max"] == trips["staleness"][used].max()
        last = record.evaluations[-1]
        assert found["accuracy"] == pytest.approx(sum(last.correct) / sum(last.total), abs=1e-6)
        slow = sum(last.correct[:4]) / sum(last.total[:4])
        assert found["accuracy_by_profile_labels"][SLOW] == pytest.approx(slow, abs=1e-6)
        assert (found["slow_phones"]["profiles"], found["slow_phones"]["labels"]) == ([SLOW], [0, 1, 2, 3])
        assert found["slow_phones"]["accuracy"] == found["accuracy_by_profile_labels"][SLOW]
        shares = applied_weight(record)
        assert shares.shares.sum() == pytest.approx(clients)
        mine = np.nansum(trips["weight"][trips["client"] == 5]) / np.nansum(trips["weight"]) * clients
        assert shares.shares[5] == pytest.approx(mine)
        assert found["integrity"]["checked"] == (trips["uses"] > 0).sum()
    assert found["integrity"]["checksum_mismatches"] == found["integrity"]["version_mismatches"] == 0
    assert found["memory"]["shared_mib"] > 0.0


@pytest.mark.parametrize("name", ["fedbuff", "wall"])
def test_the_report_shows_the_run_without_scripts_and_external_files(runs: Path, name: str) -> None:
    path = write_report(runs / name)
    text, page, found = path.read_text(), Page(path), summarize(runs / name)
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    for words in (
        "Accuracy by class", f"{found['accuracy']:.1%}", SLOW, "Applied weight by client",
        "VALID" if found["fidelity"]["valid"] else "INVALID", found["model_sha256"], "Timeline of trips",
    ):  # fmt: skip
        assert words in page.text


def test_a_trace_has_a_slice_for_each_complete_trip_and_each_of_its_parts(runs: Path) -> None:
    events = read_trace(write_trace(runs / "fedbuff"))
    kinds = Counter(event["name"].split()[0] for event in events if event["ph"] == "X")
    whole = summarize(runs / "fedbuff")["client_trips"]
    assert kinds == {"version": VERSIONS, "task": whole, "download": whole, "compute": whole, "upload": whole}
    with Record(runs / "fedbuff") as record:
        row = record.trip(20)
    (event,) = [e for e in events if e["ph"] == "X" and e["name"] == "task 20"]
    assert event["ts"] == pytest.approx(row.sent_s * 1e6, abs=0.001)
    for column in ("staleness", "weight", "fate", "base_version"):
        assert event["args"][column] == getattr(row, column)


def test_a_trace_has_names_of_profiles_and_clients_and_counters(runs: Path) -> None:
    events = read_trace(write_trace(runs / "fedbuff"))
    processes, threads = (
        [event["args"]["name"] for event in events if event["name"] == kind]
        for kind in ("process_name", "thread_name")
    )
    assert processes == ["server", *DEVICES]
    assert {"client 0", "client 5", "versions", "evaluations"} <= set(threads)
    counts = {
        what: [e["args"][what] for e in events if e["ph"] == "C" and e["name"] == what]
        for what in ("updates held", "version", "accuracy")
    }
    assert min(counts["updates held"]) == 0
    assert 3 <= max(counts["updates held"]) <= 6, "a buffer, and updates that arrive at the same instant"
    assert counts["version"] == list(range(1, VERSIONS + 1))
    assert all(0 <= value <= 1 for value in counts["accuracy"])


def test_a_trace_of_several_runs_has_processes_for_each_run(runs: Path, tmp_path: Path) -> None:
    with Record(runs / "fedbuff") as first, Record(runs / "wall") as second:
        events = read_trace(write_events(tmp_path / "trace.json", [first, second]))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == 2 * (1 + len(DEVICES))
    assert {name.partition(": ")[0] for name in names.values()} == {"fedbuff", "wall"}


def test_the_comparison_fits_a_terminal(runs: Path) -> None:
    table = StringIO()
    folders = [runs / name for name in ("wall", "fair-0", "fair-1")]
    Console(file=table, width=80).print(compare(folders))
    lines = table.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    wall, fair = (line for line in lines if line.rstrip().endswith(("VALID", "computed")))
    assert (wall.split()[0], fair.split()[0]) == ("fedbuff", "fedstaleweight")
    assert "×2" in table.getvalue()  # may be on the next line
    assert "±" in fair
    assert fair.rstrip().endswith("computed"), "nothing is measured under the virtual clock"
    assert wall.rstrip().endswith("VALID")
    assert f"held only by {SLOW}" in table.getvalue()


def test_runs_with_different_seeds_are_one_row(runs: Path, tmp_path: Path) -> None:
    rows = rows_of(grouped(load([runs / "fair-0", runs / "fair-1", runs / "fedbuff"])))
    assert [(row.label, len(row.runs)) for row in rows] == [("fedstaleweight ×2", 2), ("fedbuff", 1)]
    again = shutil.copytree(runs / "fair-1", tmp_path / "again")
    rows = rows_of(grouped(load([runs / "fair-1", again])))
    assert [row.label for row in rows] == ["fedstaleweight fair-1", "fedstaleweight again"]
    assert rows[0].figures["accuracy"].half is None


def test_a_comparison_writes_summary_report_and_trace(runs: Path) -> None:
    compare([runs / name for name in ("fedbuff", "fair-0", "fair-1")], runs)
    found = read_json(runs / "summary.json")
    assert found["strategy"] == "fedbuff"
    assert [run["folder"] for run in found["runs"]] == ["fedbuff", "fair-0", "fair-1"]
    first, second = found["comparison"]["rows"]
    assert first["valid"] is True
    assert first["minus_first"]["accuracy"] == 0
    assert set(second["figures"]) == set(FIGURES)
    assert second["seeds"] == [0, 1]
    difference = second["figures"]["accuracy"]["mean"] - first["figures"]["accuracy"]["mean"]
    assert second["minus_first"]["accuracy"] == pytest.approx(difference, abs=1e-5)
    page = Page(runs / "report.html")
    links = [link for link in page.links if not link.startswith("#")]
    assert links == [f"{name}/report.html" for name in ("fedbuff", "fair-0", "fair-1")]
    assert "computed" in page.text
    read_trace(runs / "trace.json")


BAD_VALUES = ("x", "", None, -1, 2**62, 1e308, float("-inf"), b"\xff\x00", "[1, 2", '{"a": 1}')


@pytest.mark.parametrize("apart", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_with_a_damaged_cell_is_read_or_refused_in_one_line(
    apart: int, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell of each table, including the journal, is damaged in turn. With ``apart`` = 4, only one of the
    four commands reads each damaged record."""
    rng = np.random.default_rng(3)
    shutil.copytree(runs / "fedbuff", tmp_path / "whole")
    (tmp_path / "whole" / "record.sqlite-seal").unlink()
    with closing(sqlite3.connect(tmp_path / "whole" / "record.sqlite")) as db:
        found = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        tables = [row[0] for row in found]
        columns = {name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")] for name in tables}
        rows = {name: db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in tables}
    codes = []
    for number, table in enumerate(tables):
        column, row = rng.choice(columns[table]), int(rng.integers(max(1, rows[table])))
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "whole", folder)
        with closing(sqlite3.connect(folder / "record.sqlite")) as db, suppress(sqlite3.Error), db:
            key = columns[table][0]
            where = f"{key} = (SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET {row})"
            value = BAD_VALUES[int(rng.integers(len(BAD_VALUES)))]
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
        for command in ("report", "trace", "verify", "compare")[number % apart :: apart]:
            codes.append(main([command, str(folder)]))
            said = capsys.readouterr().err
            assert len(said.splitlines()) <= 1, (command, table, column, value)
    assert set(codes) <= {0, 1, 2}
    assert 2 in codes


def test_needed_memory_is_the_same_under_both_clocks_and_for_any_number_of_workers(runs: Path) -> None:
    """The growth of the processes' memory is measured only under the wall clock."""
    found, weights_mib = [], 4 * (64 * 16 + 16 + 16 * 10 + 10) / 2**20
    for name in ("fair-0", "fedbuff", "wall"):
        with Record(runs / name) as record:
            grew, reported = record.trips["process_grew_mib"], record.trips["loss"] == record.trips["loss"]
            assert np.isnan(grew[reported]).all() == (name != "wall")
            found.append(set(record.trips["peak_mib"][reported].tolist()))
        assert summarize(runs / name)["memory"]["by_profile"].keys() <= set(DEVICES)
    assert found[0] == found[1] == found[2]
    assert 2 * weights_mib < min(found[0]) < 6 * weights_mib


def test_a_phone_that_waits_for_its_poll_uses_no_energy_of_computing(tmp_path: Path) -> None:
    polls = {"name": "favano", "participants": 2, "interval_s": 5.0}
    phones = Fleet(devices={"pixel-4": 4}, network="lte")
    edgefl.run(virtual(fleet=phones, strategy=polls, stop=Stop(versions=3)), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        found, trips = summarize(record)["energy"], record.trips
    arrived = ~np.isnan(trips["arrived_s"])
    waited_s = trips["compute_declared_s"][arrived] - trips["busy_s"][arrived]
    assert (waited_s > 4.0).all()
    assert 0.0 < found["compute_j"] < found["idle_j"]


def _transfers(folder: Path, strategy: dict[str, Any]) -> tuple[Record, dict[str, float]]:
    phones = Fleet(devices={"pixel-4": 4}, network="3g-slow", variation=0.0)
    edgefl.run(virtual(fleet=phones, strategy=strategy, stop=Stop(versions=5)), folder)
    record = Record(folder)
    return record, summarize(record)["energy"]


def test_transfers_beside_the_training_use_energy(tmp_path: Path) -> None:
    iid = {"name": "defedavg-iid", "buffer_size": 2}
    record, energy = _transfers(tmp_path / "in trips", {**iid, "overlap": False})
    with record:
        count = int((~np.isnan(record.trips["arrived_s"])).sum())
    once_j = [energy[use] / count for use in ("download_j", "upload_j")]
    assert min(once_j) > 0.0
    for name, strategy in {
        "iid": {**iid, "overlap": True},
        "niid": {"name": "defedavg-niid", "participants": 2},
    }.items():
        record, energy = _transfers(tmp_path / name, strategy)
        with record:
            trips = record.trips
            arrived = ~np.isnan(trips["arrived_s"])
            pairs = zip(trips["client"][arrived], trips["base_version"][arrived], strict=True)
            downloads, applied = len({*pairs}), int((arrived & (trips["fate"] == "applied")).sum())
        uploads = applied if name == "niid" else int(arrived.sum())
        assert downloads < int(arrived.sum())
        assert applied < int(arrived.sum())
        assert energy["download_j"] == pytest.approx(downloads * once_j[0])
        assert energy["upload_j"] == pytest.approx(uploads * once_j[1])


def test_the_energy_of_a_run_is_the_sum_over_its_parts(tmp_path: Path) -> None:
    phones = Fleet(devices={"pixel-4": 3, "board-qrb2210": 2}, network="5g")
    edgefl.run(virtual(fleet=phones, stop=Stop(trips=20)), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        found, trips, fleet = summarize(record)["energy"], record.trips, record.fleet
        middle_s = float(np.nanmedian(trips["arrived_s"]))
        half = energy_of(record, middle_s, PowerDraw(idle_w=0.0, compute_w=2.0, download_w=0.0, upload_w=0.0))
    assert "Energy" in Page(tmp_path / "run" / "report.html").text
    parts = [found[part] for part in ("idle_j", "compute_j", "download_j", "upload_j")]
    assert found["total_j"] == sum(parts)
    assert min(parts) > 0.0
    assert found["low_j"] < found["total_j"] < found["high_j"]
    with_battery = fleet["client"][fleet["profile"] == "pixel-4"]
    theirs = np.isin(trips["client"], with_battery) & ~np.isnan(trips["arrived_s"])
    expected = draw_of(load_device("pixel-4"), load_network("5g"))
    assert expected is not None
    assert found["compute_j"] == pytest.approx(
        expected.compute_w * trips["compute_declared_s"][theirs].sum(), rel=1e-12
    )
    assert found["upload_j"] == pytest.approx(
        expected.upload_w * trips["up_declared_s"][theirs].sum(), rel=1e-12
    )
    assert found["unknown_trips"] == int((~np.isnan(trips["arrived_s"])).sum() - theirs.sum()) > 0
    assert [*found["by_profile"]] == ["pixel-4"]
    others = ~np.isin(trips["client"], with_battery) & (trips["arrived_s"] <= middle_s)
    assert half["unknown_trips"] == 0
    assert half["by_profile"]["board-qrb2210"]["total_j"] == pytest.approx(
        2.0 * trips["compute_declared_s"][others].sum(), rel=1e-12
    )
    assert half["by_profile"]["pixel-4"]["total_j"] < found["total_j"]
