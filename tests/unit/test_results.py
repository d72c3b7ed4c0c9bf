"""Summary, report, trace and comparison of hand-written records, some with odd values and hostile names."""

from __future__ import annotations

import math
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import msgspec
import numpy as np
import pytest

from edgefl.core.events import Arrived, Died, Event, Joined, Left, Summed
from edgefl.errors import ConfigError
from edgefl.experiment import Privacy
from edgefl.privacy.accounting import PrivacyAccount
from edgefl.results import summary
from edgefl.results.compare import compare
from edgefl.results.groups import profiles_by_speed, slow_group
from edgefl.results.record import Record
from edgefl.results.report import summary_table, write_report
from edgefl.results.result import Result
from edgefl.results.rows import Aggregation, CostRow, Meta
from edgefl.results.run_pictures import profile_roles
from edgefl.results.store import Store
from edgefl.results.summary import rounded, summarize, write_summary
from edgefl.results.tables import table
from edgefl.results.trace import write_trace
from tests.reports import (
    EVIL,
    Page,
    client,
    evaluation,
    printed,
    read_json,
    read_trace,
    trip,
    version,
    write_run,
)


@pytest.mark.parametrize(
    ("clients", "profiles", "labels"),
    [
        ([("slow", 9.0, (0, 1)), ("fast", 1.0, (1, 2))], ("slow",), (0,)),
        # the two slowest profiles share class 0, so both are in the group of slow profiles
        ([("a", 9.0, (0,)), ("b", 2.0, (0, 1)), ("c", 1.0, (1,))], ("a", "b"), (0,)),
        ([("slow", 9.0, (0, 1)), ("fast", 1.0, (0, 1))], ("slow",), ()),
        ([("only", 1.0, (0, 1))], ("only",), ()),
        ([], (), ()),
    ],
)
def test_slow_phones_are_the_fewest_slowest_profiles_that_alone_hold_a_class(
    tmp_path: Path, clients: list[tuple[str, float, tuple[int, ...]]],
    profiles: tuple[str, ...], labels: tuple[int, ...],
) -> None:  # fmt: skip
    with Store(tmp_path) as store:
        store.clients([client(k, name, step_s, *held) for k, (name, step_s, held) in enumerate(clients)])
    with Record(tmp_path) as record:
        group = slow_group(record)
    assert (group.profiles, group.labels) == (profiles, labels)


def test_profiles_are_ordered_by_the_time_of_their_trips_and_not_of_their_steps(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0, "slow-cpu", 3.0), client(1, "slow-link", 0.1), client(2, "never-back", 0.1)])
        store.trip(trip(0, 0, trip_declared_s=4.0))
        store.trip(trip(1, 1, trip_declared_s=5.0))
    with Record(tmp_path) as record:
        assert profiles_by_speed(record) == ["never-back", "slow-link", "slow-cpu"]


def test_the_order_of_profiles_does_not_depend_on_which_clients_trained(tmp_path: Path) -> None:
    for taken in (0, 1):
        (folder := tmp_path / str(taken)).mkdir()
        with Store(folder) as store:
            store.clients([client(0, "fast", 0.1), client(1, "slow", 3.0), client(2, "slow-link", 0.1)])
            store.trip(trip(0, taken, trip_declared_s=4.0))
            store.set_meta(trip_s={"slow-link": 9.0, "slow": 3.0, "fast": 0.1})
        with Record(folder) as record:
            assert profiles_by_speed(record) == ["slow-link", "slow", "fast"]


def test_the_same_profile_is_slow_in_summary_report_and_comparison(tmp_path: Path) -> None:
    """The profile slow-link computes fastest, but its trips take longest."""
    run = tmp_path / "run"
    run.mkdir()
    with Store(run) as store:
        store.clients([client(0, "slow-cpu", 3.0, 0), client(1, "slow-link", 0.1, 1)])
        for task, (owner, trip_s, weight) in enumerate([(0, 4.0, 0.9), (1, 5.0, 0.3)]):
            fields = {"trip_declared_s": trip_s, "arrived_s": trip_s, "weight": weight, "fate": "applied"}
            store.trip(trip(task, owner, **fields))
        for k in range(2):
            store.evaluation(evaluation(k, 5.0 * k, accuracy=0.6, correct=(9, 3), total=(10, 10)))
        store.set_meta(strategy="fedbuff", clock="virtual")
    found = read_json(write_summary(run))
    assert found["slow_phones"] == {
        "profiles": ["slow-link"], "clients": 1, "labels": [1], "accuracy": 0.3, "applied_weight": 0.5,
    }  # fmt: skip
    page = Page(write_report(run)).text
    assert re.search(r"Slow phones' classes\s+30.0%\s+weight 0.5 of the fair share", page)
    assert "classes only on slow-link" in page
    assert "classes only on slow-cpu" not in page
    with Record(run) as record:
        assert list(profile_roles(record)) == ["slow-cpu", "slow-link"]
    text = printed(compare([run]))
    assert "the classes held only by slow-link" in " ".join(text.split())
    assert re.search(r"60.0%\s+30.0%", text)


@pytest.mark.parametrize("on", ["test", "validation"])
def test_pages_name_the_examples_on_which_models_are_evaluated(tmp_path: Path, on: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "experiment.toml").write_text(f"[data]\nevaluate_on = '{on}'\n")
    assert f"On the server's {on} examples." in Page(write_report(run)).text
    compare([run], tmp_path / "out")
    assert f"Measured on the {on} examples." in Page(tmp_path / "out" / "report.html").text


def test_the_report_has_the_median_step_of_a_profiles_phones(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(k, "slow", step_s, 0) for k, step_s in enumerate((0.5, 2.0, 3.0))])
        store.set_meta(strategy="fedbuff", clock="virtual", status="done")
    page = " ".join(Page(write_report(tmp_path)).text.split())
    assert "Median training step, s" in page
    assert "slow lte 3 2 0" in page


def test_a_page_has_no_staleness_of_a_profile_without_an_applied_update(tmp_path: Path) -> None:
    runs = [tmp_path / str(seed) for seed in (1, 2)]
    for seed, run in enumerate(runs, 1):
        run.mkdir()
        with Store(run) as store:
            store.clients([client(0, "slow", 1.0), client(1, "fast", 0.1)])
            for task, staleness in enumerate((8, 2)):
                store.trip(trip(task, task, arrived_s=1.0, staleness=staleness))
            store.applied(1, [1] if seed == 1 else [0, 1], [1.0] * seed)
            store.set_meta(strategy="fedbuff", clock="virtual", status="done", seed=seed)
    assert "0 / 0" not in Page(write_report(runs[0])).text
    compare(runs, tmp_path / "out")
    page = " ".join(Page(tmp_path / "out" / "report.html").text.split())
    assert "Profile fedbuff ×2 slow 8 fast 2 ±0" in page.partition("Staleness by profile")[2]


def test_altered_updates_wrong_versions_and_incidents_are_counted(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.trip(trip(0, base_version=5, trained_version=5, checksum_sent=2**63, checksum_seen=2**63))
        store.trip(trip(1, base_version=5, trained_version=4, checksum_sent=2**63, checksum_seen=0))
        store.trip(trip(2, base_version=5))
        for kind in ("death", "rejoin", "death"):
            store.incident(1.0, 0, kind)
    found = summarize(tmp_path)
    assert found["integrity"] == {"checked": 2, "checksum_mismatches": 1, "version_mismatches": 1}
    assert found["incidents"] == {"death": 2, "rejoin": 1}
    assert "Mismatch." in Page(write_report(tmp_path)).text


def test_cancelled_trips_count_as_client_trips_and_lost_and_open_ones_do_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trips=60, lost=10)
    with Store(folder) as store:
        for task in (60, 61, 62):
            store.trip(trip(task, 0, 60.0, fate="discarded", reason="cancelled"))
        store.trip(trip(63, 0, 60.0))
    found = summarize(folder)
    assert found["client_trips"] == 50 + 3
    assert (found["trips"]["discarded"], found["trips"]["lost"], found["trips"]["open"]) == (3, 10, 1)
    assert found["bytes"] == {"down": 50 * 9, "up": 50 * 9}
    page = " ".join(Page(write_report(folder)).text.split())
    assert "Transfers of completed trips" in page
    assert "pixel-4 lte 2 0.1 27 " in page  # 24 completed and the three cancelled ones
    assert "moto-g4 lte 2 1 26 " in page


def test_bytes_of_defedavg_are_those_of_the_downloaded_versions_and_the_applied_updates(
    tmp_path: Path,
) -> None:
    """Clients of DeFedAvg may train twice from one version, and do not upload an update that is replaced."""
    apart = {"pixel-4": {"lte": (1.0, 1.0)}, "moto-g4": {"lte": (1.0, 1.0)}}
    for on_demand in (True, False):
        folder = write_run(tmp_path / str(on_demand), trips=60, apart_s=apart, uploads_on_demand=on_demand)
        with Store(folder) as store:
            for task, base in ((60, 40), (61, 40), (62, 41)):
                times = {"arrived_s": 60.0, "down_bytes": 9, "up_bytes": 9}
                store.trip(trip(task, 0, 59.0, base_version=base, fate="discarded", **times))
        found = summarize(folder)["bytes"]
        assert found["up"] == (60 if on_demand else 63) * 9
        with Record(folder) as record:
            pairs = {(row[0], row[1]) for row in record.trips.rows("client", "base_version")}
        assert found["down"] == len(pairs) * 9 < 63 * 9


def test_a_run_with_large_errors_is_invalid_and_its_report_has_the_reason(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path, evaluations=False, error=0.5))["fidelity"]
    assert found["valid"] is False
    assert any("error" in reason for reason in found["reasons"])
    page = Page(write_report(tmp_path))
    assert "INVALID" in page.text
    assert found["reasons"][0] in page.text


def test_metrics_of_training_are_in_the_record_and_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path, evaluations=False)
    with Store(run) as store:
        for task, logged in ((50, {"drift": 1.5}), (51, {"drift": 0.5, "<b>": math.nan}), (52, {})):
            store.trip(trip(task, 0, 50.0, metrics=logged))
    with Record(run) as record:
        drift = record.metrics["drift"]
        assert "metrics" not in record.trips  # the dicts of a million trips would need 0.6 GB
        assert (record.trip(50).metrics, record.trip(52).metrics) == ({"drift": 1.5}, {})
        assert record.trips["metrics"][record.trips["task"] == 50].tolist() == [{"drift": 1.5}]
        assert drift[record.trips["task"] == 50] == 1.5
        assert np.isfinite(drift).sum() == 2
        assert np.isnan(record.metrics["<b>"]).all()
        assert len(drift) == len(record.trips["task"])
    page = Page(write_report(run)).text
    assert "Training metrics" in page
    assert re.search(r"drift\s+2\s+1.5\s+0.5", page)  # means of the first and the last tenth


def test_a_damaged_metric_is_an_error_of_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, evaluations=False)
    for cell in ('{"drift": 1', '{"drift": "x"}'):
        with closing(sqlite3.connect(run / "record.sqlite")) as db, db:
            db.execute("UPDATE trips SET metrics = ? WHERE task = 3", (cell,))
        with Record(run, sealed=False) as record, pytest.raises(ConfigError, match="is damaged: "):
            _ = record.metrics


def test_a_private_run_reports_epsilon_at_each_evaluation_and_version(tmp_path: Path) -> None:
    rules, clients, measured = Privacy(clip_norm=1.0, noise_multiplier=8.0), 4, [0, 4, 12]
    write_run(tmp_path, clients=clients, evaluations=False, privacy=rules)
    with Store(tmp_path) as store:
        for number in measured:
            store.evaluation(evaluation(number, 5.0 * number))
    account, spent = PrivacyAccount(rules, clients), [0.0]
    for first in range(0, 60, 5):
        account.version([task % clients for task in range(first, first + 5)])
        spent.append(account.epsilon())
    assert 0.0 < spent[4] < spent[12]
    assert Result(tmp_path).evaluations()["epsilon"].tolist() == [spent[number] for number in measured]
    found = read_json(write_summary(tmp_path))
    assert found["curve"]["epsilon"] == [rounded(spent[number]) for number in measured]
    assert found["privacy"]["epsilon"] == spent[-1]
    page = Page(write_report(tmp_path))
    assert f"ε = {spent[-1]:.3g}" in page.text
    (drawn,) = (unquote(link) for link in page.downloads if "ε" in unquote(link))
    assert [row.split(",")[-1] for row in drawn.split("\n")[1:-1]] == [f"{one:.10g}" for one in spent]


def write_numbers(folder: Path, last: float = 0.25, **fields: Any) -> Path:
    """Record a run that has a loss and the metric mae but no classes."""
    folder.mkdir()
    with Store(folder) as store:
        store.clients([client(0, "slow", 9.0), client(1, "fast", 1.0), client(2, "fast", 1.0)])
        for k, loss in enumerate((1.0, last)):
            row = evaluation(
                k, 10.0 * k, trips=5 * k, accuracy=math.nan, loss=loss, metrics={"mae": loss / 2}
            )
            store.evaluation(msgspec.structs.replace(row, **fields) if k else row)
        store.set_meta(strategy="fedbuff", data="numbers", clock="virtual")
    return folder


def test_a_task_without_classes_has_loss_and_metrics_but_no_accuracy(tmp_path: Path) -> None:
    run, other = (write_numbers(tmp_path / name, last) for name, last in (("a", 0.25), ("b", 0.75)))
    found = read_json(write_summary(run))
    assert (found["accuracy"], found["best_accuracy"], found["loss"]) == (None, None, 0.25)
    assert found["metrics"] == {"mae": 0.125}
    assert found["per_class"] == []
    assert found["on_clients"] is None
    assert re.search(r"loss +0.25, mae 0.125", printed(summary_table(found, run)))
    page = Page(write_report(run)).text
    assert "Loss over emulated time" in page
    assert "mae over emulated time" in page
    assert "Accuracy over" not in page
    assert "no trip was timed" in page
    write_trace(run)
    assert any(
        event.get("args", {}).get("metrics") == {"mae": 0.125} for event in read_trace(run / "trace.json")
    )
    text = printed(compare([run, other], tmp_path / "out"))
    assert "accuracy" not in text.lower()
    assert re.search(r"mae +fedbuff b +0.375", text)
    rows = read_json(tmp_path / "out" / "summary.json")["comparison"]["rows"]
    assert [row["figures"]["mae"]["mean"] for row in rows] == [0.125, 0.375]
    assert [row["minus_first"]["loss"] for row in rows] == [0.0, 0.5]
    page = Page(tmp_path / "out" / "report.html").text
    assert "Loss over client trips" in page
    assert "mae over emulated time" in page
    assert "Accuracy over" not in page


def test_a_comparison_of_runs_with_different_metrics_has_all_of_them(tmp_path: Path) -> None:
    one, two = write_numbers(tmp_path / "a"), write_numbers(tmp_path / "b", metrics={"rmse": 3.0})
    text = printed(compare([one, two]))
    assert re.search(r"mae +fedbuff a +0.125 *\n *mae +fedbuff b +–", text)
    assert re.search(r"rmse +fedbuff a +– *\n *rmse +fedbuff b +3", text)


def test_scores_on_clients_are_summarized_by_mean_worst_decile_and_profile(tmp_path: Path) -> None:
    scores = {"clients": (0, 1, 2), "client_loss": (9.0, 1.0, 2.0), "personal_loss": (3.0, 1.0, 1.0)}
    shares = {"client_accuracy": (0.25, 0.5, 1.0), "personal_accuracy": (1.0, 0.5, 0.75)}
    losses = summarize(write_numbers(tmp_path / "losses", **scores))["on_clients"]
    assert losses["measure"] == "loss"
    assert losses["global"] == {"mean": 4.0, "worst_decile": 9.0}
    assert losses["personal"] == {"mean": rounded(5 / 3), "worst_decile": 3.0}
    assert losses["by_profile"] == {
        "slow": {"clients": 1, "global": 9.0, "personal": 3.0},
        "fast": {"clients": 2, "global": 1.5, "personal": 1.0},
    }
    both = write_numbers(tmp_path / "both", **scores, **shares)
    accuracies = summarize(both)["on_clients"]
    assert (accuracies["measure"], accuracies["version"], accuracies["clients"]) == ("accuracy", 1, 3)
    assert accuracies["global"] == {"mean": rounded(1.75 / 3), "worst_decile": 0.25}
    assert accuracies["personal"]["worst_decile"] == 0.5
    page = Page(write_report(both)).text
    assert "On the clients' own examples" in page
    assert re.search(r"slow\s+1\s+25.0%\s+100.0%", page)
    assert re.search(r"Mean of the worst tenth\s+1\s+25.0%\s+50.0%", page)
    text = printed(summary_table(summarize(both), both), compare([both]))
    assert re.search(r"personal accuracy on clients +mean 0.75, worst decile 0.5", text)
    assert re.search(r"global accuracy on clients, worst decile +fedbuff +0.25", text)


@pytest.mark.parametrize(("accuracy", "head"), [(0.1, "accuracy +10.0%, loss"), (math.nan, "loss")])
def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path, accuracy: float, head: str) -> None:
    run = write_numbers(tmp_path / "run", math.nan, accuracy=accuracy, metrics={})
    assert re.search(f"{head} +not finite", printed(summary_table(summarize(run), run)))
    assert "loss is not finite" in Page(write_report(run)).text


def test_model_errors_are_reported_and_do_not_make_a_run_invalid(tmp_path: Path) -> None:
    known = {"pixel-4": 1.25, "moto-g4": 4.0}
    found = summarize(write_run(tmp_path, evaluations=False, model_error_factor=known))
    assert found["model_error_factor"] == known
    assert found["fidelity"]["valid"] is True
    text = Page(write_report(tmp_path)).text
    assert "The device model itself is within a factor of 1.2 to 4 (90%)." in text
    assert "4×" in text


def test_a_virtual_run_is_valid_whatever_the_load_of_the_host(tmp_path: Path) -> None:
    write_run(tmp_path, clock="virtual", load=3.0, steal=0.5, time_scale=0.0)
    fidelity = summarize(tmp_path)["fidelity"]
    assert fidelity["valid"] is True
    assert fidelity["median_abs_error"] == pytest.approx(0.0, abs=1e-12)


SHAPES: dict[str, dict[str, Any]] = {
    "one client": {"clients": 1, "trips": 30, "buffer_size": 1},
    "one version": {"clients": 3, "trips": 5},
    "no version": {"clients": 3, "trips": 4},
    "no trip": {"clients": 3, "trips": 0},
    "no evaluation": {"clients": 3, "evaluations": False},
    "nothing finite": {"clients": 3, "nan": True, "error": 0.5},
    "all lost": {"clients": 3, "trips": 20, "lost": 20},
    "many clients": {"clients": 1000, "trips": 1000, "buffer_size": 50},
    "many classes": {"classes": 62},
    "many profiles": {
        "clients": 12, "trips": 200,
        "fleet": {f"profile-with-a-long-name-{k}": (k + 1.0, (k,)) for k in range(12)},
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_run_has_summary_report_trace_and_comparison(tmp_path: Path, shape: str) -> None:
    run = write_run(tmp_path / "run", strategy=EVIL, **SHAPES[shape])
    read_json(write_summary(run))
    read_trace(write_trace(run))
    path = write_report(run)
    assert "svg" in Page(path).tags
    assert "Training metrics" not in Page(path).text  # no trip has a metric
    assert path.stat().st_size < 1_500_000
    if shape != "many classes":  # which cannot be compared with 10 classes
        printed(compare([run, write_run(tmp_path / "other")], tmp_path / "out"))
        read_json(tmp_path / "out" / "summary.json")
        Page(tmp_path / "out" / "report.html")


def test_a_failed_attack_that_a_resumed_run_repeats_is_counted_once(tmp_path: Path) -> None:
    why = "fleet.attackers.kind: 'mine:attack' raised ValueError: no"
    with Store(tmp_path) as store:
        store.set_meta(attackers=(0,))
        for _ in range(2):
            store.truncate(0)  # as if the run was killed and resumed from its start
            store.incident(3.0, 0, "failed", why)
            store.trip(trip(1, 0, 1.0, fate="failed", reason=why))
        store.trip(trip(2, 1, 1.0, fate="failed", reason="training raised ValueError: no"))
    found = summarize(tmp_path)
    assert found["incidents"] == {"failed": 2}  # both attempts happened
    assert found["attackers"]["failed_trips"] == 1
    assert found["attackers"]["first_failure"] == "'mine:attack' raised ValueError: no"


@pytest.mark.parametrize(
    ("status", "emulated_s", "wall_s"), [("interrupted", 20.0, 7.0), ("running", 60.0, 30.0)]
)
def test_the_times_of_a_run_that_was_resumed_and_killed_are_not_those_of_its_interruption(
    tmp_path: Path, status: str, emulated_s: float, wall_s: float
) -> None:
    run = write_run(tmp_path, trips=60, status=status, emulated_s=20.0, wall_s=7.0)
    with Store(run) as store:
        store.version(version(12, 60.0, wall_s=30.0))
    found = summarize(run)
    assert (found["emulated_s"], found["wall_s"]) == (emulated_s, wall_s)


def test_an_empty_record_has_a_report_and_a_summary(tmp_path: Path) -> None:
    with Store(tmp_path):
        pass
    found = summarize(tmp_path)
    assert (found["accuracy"], found["client_trips"], found["fidelity"]["valid"]) == (None, 0, False)
    Page(write_report(tmp_path))


def test_rows_of_nan_and_inconsistent_trips_are_reported_without_an_error(tmp_path: Path) -> None:
    nan = math.nan
    with Store(tmp_path) as store:
        store.clients([client(0, "x", nan, 0)])
        store.version(version(0, weight_sum=nan, sum_s=nan))
        store.evaluation(evaluation(0, accuracy=nan, loss=math.inf, correct=(0,), total=(0,)))
        store.trip(trip(0, received_s=nan, arrived_s=1.0, staleness=0, loss=nan, down_s=nan, compute_s=nan))
        store.trip(trip(1, 77, 0.5, fate="lost"))  # an unknown client
        # the parts of trip 2 take longer than the trip; trip 3 was sent before trip 2 arrived
        store.trip(trip(2, 0, 1.0, received_s=5.0, arrived_s=2.0, compute_s=9.0))
        store.trip(trip(3, 0, 1.5, arrived_s=3.0))
        store.trip(trip(4, 0, 3.0, fate="lost", loss=nan, weight=nan))
        store.trip(trip(5, 9, 1.0, arrived_s=1.0))  # a trip of no duration
    read_json(write_summary(tmp_path))
    Page(write_report(tmp_path))
    events = read_trace(write_trace(tmp_path))
    lost = [event["name"] for event in events if event["ph"] == "i" and event["name"].startswith("task")]
    assert sorted(lost) == ["task 1 lost", "task 4 lost"]


@pytest.mark.parametrize(("clock", "starts_s"), [("wall", [1.0, 2.0]), ("virtual", [2.0, 3.0])])
def test_the_bar_of_a_version_covers_its_sum(tmp_path: Path, clock: str, starts_s: list[float]) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0)])
        store.version(version(1, 2.0, sum_s=2.0))
        store.version(version(2, 3.0, sum_s=4.0))  # its sum cannot begin before the previous version
        store.set_meta(clock=clock, time_scale=2.0)
    bars = [one for one in read_trace(write_trace(tmp_path)) if one["ph"] == "X"]
    ends_s = [(one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in bars]
    assert ends_s == list(zip(starts_s, (2.0, 3.0), strict=True))


def test_hostile_names_are_escaped_in_the_report(tmp_path: Path) -> None:
    fleet = {EVIL: (0.9, (0, 1)), "_hidden": (9.0, (2, 3))}
    write_run(
        tmp_path, fleet=fleet, strategy=EVIL, name=EVIL, toml=EVIL, data=EVIL, host={EVIL: EVIL},
        software={EVIL: EVIL}, stop_reason=EVIL,
    )  # fmt: skip
    with Store(tmp_path) as store:
        store.incident(0.0, 0, EVIL, EVIL)
        store.cost(EVIL, 1.0)
    assert Page(write_report(tmp_path)).text.count('<script>alert("x")</script>&amp;"') >= 8


def attendance(folder: Path, *events: Event, clients: int = 2, emulated_s: float = 10.0) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    with Store(folder) as store:
        store.clients([client(number) for number in range(clients)])
        for event in events:
            store.journal(event)
    with Record(folder) as record:
        return summary.attendance_of(record, emulated_s)


def test_the_online_share_counts_the_time_between_joining_and_leaving(tmp_path: Path) -> None:
    assert attendance(
        tmp_path,
        Joined(0, 0.0),
        Joined(1, 4.0),
        Arrived(0, 0, 0, 10, 5, 0.5, 5.0),
        Left(0, 6.0, "offline", finishes=True),
        Summed(1, 6.5),
        Joined(0, 9.0),
        Left(1, 9.5, "battery"),
    ) == {
        "online_share": pytest.approx((6 + 1 + 5.5) / 20),
        "left": 2,
        "returned": 1,
        "reasons": {"battery": 1, "offline": 1},
    }


def test_a_death_counts_once_as_a_departure(tmp_path: Path) -> None:
    died = Died(0, 4.0, "died", declared=True)
    found = attendance(tmp_path / "lost", Joined(0, 0.0), Joined(1, 0.0), died, Died(0, 6.0, "signal 9"))
    assert (found["left"], found["reasons"], found["online_share"]) == (1, {"died": 1}, 0.7)
    found = attendance(tmp_path / "finishing", Joined(0, 0.0), Left(0, 3.0, "offline", finishes=True), died)
    assert found["reasons"] == {"died": 1, "offline": 1}


@pytest.mark.parametrize(
    ("events", "emulated_s", "share", "left"),
    [
        # a client that leaves twice
        ([Joined(0, 0.0), Left(0, 5.0, "offline", finishes=True), Left(0, 7.0, "died")], 10.0, 0.5, 2),
        ([], 10.0, 0.0, 0),
        ([Joined(0, 0.0)], 0.0, None, 0),  # a run of no duration
        # a client that leaves while the last evaluation is awaited
        ([Joined(0, 5.0), Left(0, 90.0, "interrupted")], 10.0, 0.5, 1),
    ],
)
def test_the_online_share_of_unusual_journals(
    tmp_path: Path, events: list[Event], emulated_s: float, share: float | None, left: int
) -> None:
    there = attendance(tmp_path, *events, clients=1, emulated_s=emulated_s)
    assert (there["online_share"], there["left"]) == (share, left)


def costs(clock: str, **seconds: float) -> Record:
    """Return the part of a record that `breakdown` reads: four trips, of which three have ended."""
    found: Any = SimpleNamespace(
        meta=Meta(clock=clock, aggregation=Aggregation(seconds=2.0, bytes=30 * 10**9)),
        costs=[CostRow(stage=stage, seconds=spent, calls=1) for stage, spent in seconds.items()],
        trips={"arrived_s": np.array([1.0, 2.0, np.nan, 3.0])},
    )
    return cast(Record, found)


def test_a_server_that_waits_is_limited_by_phones_or_under_the_virtual_clock_by_training() -> None:
    wall = summary.breakdown(costs("wall", start=50.0, wait=9.0, sum=0.6, decide=0.4, end=50.0))
    assert wall["limited_by"] == "phones"
    assert wall["busy"] == pytest.approx(0.1)
    assert wall["says"] == (
        "The phones set the pace: the server waits 90% of the time; summing updates takes 60% of its "
        "busy time, at 15.0 GB/s."
    )
    assert list(wall["stages"]) == ["wait", "sum", "decide"]
    assert wall["stages"]["decide"] == {"share": 0.04, "us_a_trip": pytest.approx(0.4e6 / 3, rel=1e-5)}
    assert summary.breakdown(costs("virtual", wait=9.0, sum=0.6))["limited_by"] == "training"
    evaluated = summary.breakdown(costs("virtual", wait=3.0, evaluation=6.0, sum=1.0))
    assert (evaluated["limited_by"], evaluated["busy"]) == ("evaluation", 0.1)
    assert evaluated["says"].startswith("Evaluations limit this run: the server waits 90% of the time; ")


def test_a_busy_server_is_the_limit() -> None:
    found = summary.breakdown(costs("virtual", wait=0.5, receive=9.0, unheard_of=0.5))
    assert found["limited_by"] == "server"
    assert "busy 95% of the time, and receiving messages takes 95% of its busy time" in found["says"]
    assert found["stages"]["unheard_of"]["share"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ({}, None),
        ({"start": 3.0, "end": 3.0}, None),
        ({"wait": 0.0}, None),
        ({"wait": 3.0, "sum": 0.0}, "phones"),
    ],
)
def test_a_breakdown_of_few_costs_does_not_divide_by_zero(
    seconds: dict[str, float], limit: str | None
) -> None:
    assert summary.breakdown(costs("wall", **seconds))["limited_by"] == limit


def test_a_table_does_not_interpret_markup_in_names() -> None:
    text = printed(table(("eye [red]x", ">[/x]"), [("[b]", 1.0)], title="a [bold]b"))
    assert all(name in text for name in ("eye [red]x", "[/x]", "[b]", "a [bold]b"))
