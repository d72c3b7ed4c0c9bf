from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from synthetic_record import PROFILES, make

from edgefl.errors import ConfigError, RunError
from edgefl.results.measures import applied_weight, profiles_by_speed, slow_group
from edgefl.results.record import ClientRow, EvaluationRow, Record, TripRow, VersionRow
from edgefl.results.report import write_report
from edgefl.results.run_folder import Result, write_text
from edgefl.results.store import Store
from edgefl.results.summary import summarize, write_summary

CONTRACT: dict[str, type | tuple[type, ...]] = {
    "strategy": str, "clock": str, "seed": int, "clients": int, "processes": int, "versions": int,
    "client_trips": int, "accuracy": float, "loss": float, "emulated_s": float, "wall_s": float,
    "time_scale": float, "model_sha256": str, "dropped_updates": int, "staleness": dict, "fidelity": dict,
    "aggregation": dict,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("run"))


class Page(HTMLParser):
    """Collects what a page is made of, and checks that its tags are closed in order."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "an event handler"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_summary_has_the_contract_and_its_types(run: Path) -> None:
    path = write_summary(run)
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for name, kind in CONTRACT.items():
        assert isinstance(found[name], kind), name
        assert not isinstance(found[name], bool)
    assert {"mean", "max"} <= set(found["staleness"])
    assert {"median_abs_error", "p95_abs_error", "valid"} <= set(found["fidelity"])
    assert {"backend", "updates", "seconds", "gbytes_per_s"} <= set(found["aggregation"])
    assert found["fidelity"]["valid"] is True


def test_the_summary_agrees_with_the_rows(run: Path) -> None:
    found = summarize(run)
    with Record(run) as record:
        trips = record.trips
        ended = ~np.isnan(trips["arrived_s"])
        used = trips["uses"] > 0
        assert found["client_trips"] == ended.sum() == 1997
        assert sum(found["trips"].values()) == trips.rows
        assert found["trips"]["lost"] == 3
        assert found["dropped_updates"] == 2
        assert found["staleness"]["mean"] == pytest.approx(trips["staleness"][used].mean(), rel=1e-5)
        assert found["staleness"]["max"] == trips["staleness"][used].max()
        last = record.evaluations[-1]
        assert found["accuracy"] == pytest.approx(sum(last.correct) / sum(last.total), abs=1e-6)
        slow = sum(last.correct[:4]) / sum(last.total[:4])
        assert found["accuracy_by_profile_labels"]["moto-g4"] == pytest.approx(slow, abs=1e-6)
        assert found["slow_phones"]["labels"] == [0, 1, 2, 3]
        assert found["slow_phones"]["accuracy"] == found["accuracy_by_profile_labels"]["moto-g4"]
        shares = applied_weight(record)
        assert sum(shares.values()) == pytest.approx(24.0)
        mine = np.nansum(trips["weight"][trips["client"] == 5]) / np.nansum(trips["weight"]) * 24
        assert shares[5] == pytest.approx(mine)
    assert found["integrity"] == {"checked": 1997, "checksum_mismatches": 0, "version_mismatches": 0}
    assert found["incidents"] == {"death": 3, "non-finite": 2, "rejoin": 3}
    assert found["aggregation"]["updates"] == 1995
    assert summarize(run, {"note": 1, "seed": 9}) == {**found, "note": 1, "seed": 9}


def fleet(folder: Path, *clients: ClientRow) -> Record:
    with Store(folder) as store:
        store.clients(clients)
    return Record(folder)


def client(number: int, profile: str, gflops: float | None, *labels: int) -> ClientRow:
    return ClientRow(
        client=number, profile=profile, network="wifi", examples=1, labels=labels, train_gflops=gflops
    )


@pytest.mark.parametrize(
    ("clients", "profiles", "labels"),
    [
        ([("slow", 1.0, (0, 1)), ("fast", 9.0, (1, 2))], ("slow",), (0,)),
        # the two slowest share class 0, so both are the group
        ([("a", 1.0, (0,)), ("b", 2.0, (0, 1)), ("c", 9.0, (1,))], ("a", "b"), (0,)),
        ([("slow", 1.0, (0, 1)), ("fast", 9.0, (0, 1))], ("slow",), ()),
        ([("only", 1.0, (0, 1))], ("only",), ()),
        ([], (), ()),
    ],
)
def test_slow_phones_are_the_fewest_slowest_profiles_with_classes_of_their_own(
    tmp_path: Path, clients: list[tuple[str, float, tuple[int, ...]]],
    profiles: tuple[str, ...], labels: tuple[int, ...],
) -> None:  # fmt: skip
    rows = [client(k, name, gflops, *held) for k, (name, gflops, held) in enumerate(clients)]
    with fleet(tmp_path, *rows) as record:
        group = slow_group(record)
    assert (group.profiles, group.labels) == (profiles, labels)


def test_profiles_without_a_rate_are_ordered_by_their_trips(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0, "x", None), client(1, "y", None)])
        store.trip(TripRow(task=0, client=0, base_version=0, trip=0, sent_s=0.0, trip_declared_s=1.0))
        store.trip(TripRow(task=1, client=1, base_version=0, trip=0, sent_s=0.0, trip_declared_s=5.0))
    with Record(tmp_path) as record:
        assert profiles_by_speed(record) == ["y", "x"]


def test_altered_updates_and_wrong_versions_are_counted(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.trip(
            TripRow(
                task=0,
                client=0,
                base_version=5,
                trip=0,
                sent_s=0.0,
                trained_version=5,
                checksum_sent=2**63,
                checksum_seen=2**63,
            )
        )
        store.trip(
            TripRow(
                task=1,
                client=0,
                base_version=5,
                trip=1,
                sent_s=0.0,
                trained_version=4,
                checksum_sent=2**63,
                checksum_seen=0,
            )
        )
        store.trip(TripRow(task=2, client=0, base_version=5, trip=2, sent_s=0.0))
    assert summarize(tmp_path)["integrity"] == {
        "checked": 2,
        "checksum_mismatches": 1,
        "version_mismatches": 1,
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pacing_error": 0.5}, "error"),
    ],
)
def test_an_emulation_that_missed_its_bars_is_invalid(tmp_path: Path, fields: Any, reason: str) -> None:
    make(tmp_path, clients=6, trips=120, **fields)
    found = summarize(tmp_path)
    assert found["fidelity"]["valid"] is False
    assert any(reason in text for text in found["fidelity"]["reasons"])
    page = Page(write_report(tmp_path).read_text())
    assert "INVALID" in page.text
    assert reason in page.text


def test_a_virtual_run_is_exact_and_load_does_not_matter(tmp_path: Path) -> None:
    make(tmp_path, clients=4, trips=60, clock="virtual")
    with Store(tmp_path) as store:
        store.set_meta(load=3.0, steal=0.5, time_scale=0.0)
    fidelity = summarize(tmp_path)["fidelity"]
    assert (fidelity["valid"], fidelity["median_abs_error"], fidelity["p95_abs_error"]) == (True, 0.0, 0.0)


SHAPES: dict[str, dict[str, Any]] = {
    "one client": {"clients": 1, "trips": 30, "lost": 0, "dropped": 0, "buffer_size": 1},
    "one version": {"clients": 3, "trips": 5, "lost": 0, "dropped": 0},
    "no version": {"clients": 3, "trips": 4, "lost": 0, "dropped": 0},
    "no trip": {"clients": 3, "trips": 0, "lost": 0, "dropped": 0},
    "no evaluation": {"clients": 3, "trips": 60, "evaluations": False},
    "nothing finite": {"clients": 3, "trips": 60, "nan": True},
    "all lost": {"clients": 3, "trips": 20, "lost": 20, "dropped": 0},
    "many clients": {"clients": 1000, "trips": 3000, "buffer_size": 50},
    "many classes": {"clients": 6, "trips": 60, "classes": 62},
    "many profiles": {
        "clients": 12, "trips": 200,
        "profiles": {f"profile-with-a-long-name-{k}": (k + 1.0, 64.0, 5.0, 5.0, (k,)) for k in range(12)},
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_run_has_a_report_and_a_summary(tmp_path: Path, shape: str) -> None:
    make(tmp_path, **SHAPES[shape])
    json.loads(write_summary(tmp_path).read_text(), parse_constant=lambda name: pytest.fail(name))
    path = write_report(tmp_path)
    page = Page(path.read_text())
    assert "svg" in page.tags
    assert path.stat().st_size < 1_500_000


def test_an_empty_record_has_a_report_and_a_summary(tmp_path: Path) -> None:
    with Store(tmp_path):
        pass
    found = summarize(tmp_path)
    assert (found["accuracy"], found["client_trips"], found["fidelity"]["valid"]) == (None, 0, False)
    Page(write_report(tmp_path).read_text())


def test_a_row_of_nothing_but_nan_is_no_surprise(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0, "x", math.nan, 0)])
        store.version(
            VersionRow(
                version=0, at_s=0.0, wall_s=0.0, updates=0, weight_sum=math.nan, sum_s=math.nan, norm=math.inf
            )
        )
        store.evaluation(
            EvaluationRow(
                version=0,
                at_s=0.0,
                wall_s=0.0,
                trips=0,
                accuracy=math.nan,
                loss=math.inf,
                correct=(0,),
                total=(0,),
            )
        )
        nan = math.nan
        store.trip(
            TripRow(
                task=0,
                client=0,
                base_version=0,
                trip=0,
                sent_s=0.0,
                received_s=nan,
                arrived_s=1.0,
                staleness=0,
                loss=nan,
                down_s=nan,
                compute_s=nan,
                up_s=nan,
            )
        )
        store.trip(
            TripRow(task=1, client=77, base_version=0, trip=0, sent_s=0.5, fate="lost")
        )  # a client that nobody knows
    json.loads(write_summary(tmp_path).read_text(), parse_constant=lambda name: pytest.fail(name))
    Page(write_report(tmp_path).read_text())


def test_the_report_loads_nothing_and_runs_nothing(run: Path) -> None:
    text = write_report(run).read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert len(page.ids) == len(set(page.ids))
    assert len(text) < 1_500_000
    with Record(run) as record:
        accuracy = f"{record.evaluations[-1].accuracy:.1%}"
    for words in ("Accuracy by class", accuracy, "VALID", "moto-g4", "Applied weight by client", "6f6f6f"):
        assert words in page.text


def test_the_report_is_the_same_bytes_twice(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


EVIL = '<script>alert("x")</script>&amp;"\'$\\frac{1}{2}$ </title></style>'


def test_names_from_outside_are_only_text(tmp_path: Path) -> None:
    gflops, memory, down, up, labels = PROFILES["moto-g4"]
    profiles = {EVIL: (gflops, memory, down, up, labels), "_hidden": PROFILES["pixel-4"]}
    make(tmp_path, clients=4, trips=60, strategy=EVIL, profiles=profiles)
    with Store(tmp_path) as store:
        store.set_meta(
            name=EVIL, toml=EVIL, data=EVIL,
            host={EVIL: EVIL}, software={EVIL: EVIL}, stop_reason=EVIL,
        )  # fmt: skip
        store.incident(0.0, 0, EVIL, EVIL)
        store.cost(EVIL, 1.0)
    page = Page(write_report(tmp_path).read_text())
    assert "script" not in page.tags
    assert page.tags.count("style") == 1
    assert page.text.count('<script>alert("x")</script>&amp;"') >= 8


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        write_text(tmp_path / "file" / "below", "text")
    path = write_text(tmp_path / "new" / "a.txt", "héllo")
    assert path.read_text(encoding="utf-8") == "héllo"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_result_gives_summary_record_and_model(run: Path) -> None:
    write_summary(run)
    result = Result(run)
    assert result.summary()["strategy"] == "fedbuff"
    assert result.record.trips.rows == 2000
    with pytest.raises(ConfigError, match="the run did not end"):
        result.model()
    (run / "checkpoints").mkdir()
    path = run / "checkpoints" / "final.safetensors"
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    assert result.model()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(b"garbage!" * 4)
    with pytest.raises(ConfigError, match=r"final\.safetensors cannot be read"):
        result.model()


def test_a_result_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        Result(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no summary\.json: the run did not end"):
        Result(tmp_path).summary()
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Result(tmp_path).summary()
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="does not hold a summary"):
        Result(tmp_path).summary()
