"""Tests of `edgefl bench` and `edgefl reproduce` with tiny measurements and a small study."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest

from edgefl import ConfigError, RunError, Stop, config
from edgefl.cli import main
from edgefl.lab import bare, fidelity, ingest, peers, spawn, study, tuning
from edgefl.lab.fidelity import DEVICES
from edgefl.lab.memory import memory_row
from edgefl.lab.study import Arm, Curves, Finding, Study, Tuning, verdict, write_report
from edgefl.lab.workloads import DELTA
from edgefl.learning.benchmark_networks import squeezenet
from edgefl.learning.models import mlp
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.results import run_folder
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.run import sweep

from .runs import virtual

CLIENTS = 3


def test_a_turn_with_too_few_trips_is_repeated_with_twice_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(transport: bare.Transport, parameters: int, clients: int, seconds: float) -> Any:
        return ingest.IngestFigures(int(10 * seconds), 0.0, 0.0, {})

    monkeypatch.setattr(ingest, "measured", measured)
    found, seconds = ingest._long_enough("shm", 1000, CLIENTS, 0.2)
    assert (found.trips, seconds) == (16, 1.6)
    with pytest.raises(
        RunError, match="300 clients with 1,000 parameters made only 600 trips in 60 s, but at least 900"
    ):
        ingest._long_enough("shm", 1000, 300, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["edgefl", "torch"])
def test_peers_measure_real_programs(framework: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = peers.Setting("linear", "digits", clients=20, cohort=4, batch_size=10, lr=0.1)
    monkeypatch.setitem(peers.SETTINGS, "flute", setting)
    monkeypatch.setattr(peers, "LOOK_S", 0.25)
    result = peers.run(True, only=framework, settings="flute", seconds=0.1, venvs=tmp_path)
    (row,) = result["rows"]
    assert row["why"] == ""
    assert min(row["trips_per_s"], row["peak_mib"]) > 0
    assert row["start_s"] >= 0
    assert row["version"]
    assert not list(tmp_path.iterdir())  # neither needs an environment


def test_ingest_reports_its_measurements_in_which_every_update_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: dict[str, tuple[ingest.IngestFigures, Path]] = {}
    measured = ingest.measured

    def kept(transport: bare.Transport, *given: Any) -> ingest.IngestFigures:
        folder = tmp_path / f"{transport}-{given[-1]:g}"
        turns[transport] = measured(transport, *given, folder), folder
        return turns[transport][0]

    monkeypatch.setattr(ingest, "measured", kept)
    monkeypatch.setitem(ingest.LIMITS, "wire", ("socket",))
    said: list[str] = []
    result = ingest.run(sizes=(5000,), clients=CLIENTS, seconds=0.1, repetitions=1, say=said.append)
    assert said == [f"turn 1 of at most 1: {kind}, 5k parameters" for kind in ("shm", "wire")]
    assert json.loads(json.dumps(result)) == result
    kinds = [(case["transport"], case["parameters"]) for case in result["cases"]]
    assert kinds == [("shm", 5000), ("wire", 5000)]
    for case in result["cases"]:
        check_ingest_record(case["transport"], *turns[case["transport"]])
        assert case["turns"] == 1
        assert case["gbytes_per_s"] == pytest.approx(case["trips_per_s"] * 8 * case["parameters"] / 1e9)
        busy = sum(us for stage, us in case["stages_us"].items() if stage != "wait")
        assert case["server_us"] == pytest.approx(busy)
        assert set(case["limits"]) == set(ingest.LIMITS[case["transport"]])
        for limit in case["limits"].values():
            assert limit["of_limit"] == pytest.approx(case["trips_per_s"] / limit["trips_per_s"])
    ingest.show(result)
    shown = capsys.readouterr().out
    assert "5k" in shown
    assert "wire" in shown


def check_ingest_record(transport: str, turn: ingest.IngestFigures, folder: Path) -> None:
    with Record(folder) as record:
        trips, meta = record.trips, record.meta
        applied = trips["fate"] == "applied"
        assert turn.trips == (~np.isnan(trips["arrived_s"])).sum()
        assert (trips["checksum_sent"][applied] == trips["checksum_seen"][applied]).all()
        # Clients send different updates, so an update in another client's slot would have another checksum.
        sums = {int(c): set(trips["checksum_sent"][applied & (trips["client"] == c)]) for c in range(CLIENTS)}
        assert not set.intersection(*sums.values())
        assert applied.sum() == CLIENTS * len(record.versions["version"])
        assert record.incidents == []
        assert (meta.transport, meta.parameters, meta.stop_reason) == (transport, 5000, "wall_s")
    assert turn.trips_per_s > 0
    assert turn.server_trip_us > 0
    assert set(turn.stages_us) == set(ingest.STAGES)
    assert min(turn.stages_us.values()) >= 0
    model = Result(folder).model()["parameters"]
    assert model[0] >= DELTA / 2
    assert not model[1:].any()


def test_ingest_names_the_sizes_that_need_too_much_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take_turns(cases: Sequence[ingest._Case], *_: object) -> None:
        for case in cases:
            case.turns.append(ingest.IngestFigures(30, 1.0, 1.0, dict.fromkeys(ingest.STAGES, 1.0)))

    monkeypatch.setattr(ingest, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(ingest, "_take_turns", take_turns)
    result = ingest.run(sizes=(1000, 25_000_000))
    assert {case["parameters"] for case in result["cases"]} == {1000}
    assert result["too_large"] == ["25M"]
    ingest.show(result)
    assert f"{ingest.TOO_LARGE}: 25M parameters" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RunError, match="25M parameters; choose smaller models"):
        ingest.run(sizes=(25_000_000,))


def test_ingest_starts_no_turn_that_would_exceed_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    class Case:
        transport, parameters = "shm", 1000

        def __init__(self, took_s: float) -> None:
            self.takes_s, self.took_s, self.turns = took_s, 0.0, 0

        def turn(self) -> None:
            now_s[0] += self.takes_s
            self.took_s = self.takes_s
            self.turns += 1

    monkeypatch.setattr(ingest, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for lengths, turns, end_s in (
        ((30, 10), [1, 1], 40),
        ((5, 10), [3, 2], 35),
        ((1, 1), [9, 9], 18),
        ((50, 10), [1, 0], 50),  # on a busy host a case may get no turn
    ):
        now_s[0] = 0.0
        cases = [Case(took_s) for took_s in lengths]
        ingest._take_turns(cases, 9, 40.0, lambda _: None)  # type: ignore[arg-type]
        assert ([case.turns for case in cases], now_s[0]) == (turns, end_s)


def test_bare_trips_use_all_slots_in_turns_and_copy_or_compute_an_update() -> None:
    buffer = ParameterBuffer.create(Shape(size=5, ring=2, slots=5))
    memory, passes = (
        bare.LimitCase(what, "shm", 5, clients=3, updates=2, seconds=1.0) for what in ("memory", "passes")
    )
    clients = [bare.trip_of(memory, buffer, client) for client in range(3)]
    for trip in range(5):
        clients[trip % 3]()
        assert [buffer.slot(slot).tolist() == [1.0] * 5 for slot in range(5)] == [s <= trip for s in range(5)]
    for client in range(3):
        for _ in range(2):
            bare.trip_of(passes, buffer, client)()
    assert buffer.slot(1).tolist() == [0.0] * 5  # no training: the model minus itself
    buffer.close()


@pytest.mark.slow
def test_clients_of_a_limit_end_when_its_process_is_killed() -> None:
    """The fixture `nothing_left` checks that the clients have ended."""
    case = bare.LimitCase("passes", "shm", 1000, clients=2, updates=1, seconds=1e4)
    process = psutil.Popen([sys.executable, "-m", "edgefl.lab.bare", "nowhere", *map(str, case)])
    while len(process.children()) < case.clients:
        assert process.is_running()
    process.kill()
    process.wait()


def test_an_interrupted_measurement_of_a_limit_leaves_no_folder(tmp_path: Path) -> None:
    """Ctrl-C kills the measuring process, so the process that started it must remove the folder."""
    case = bare.LimitCase("socket", "shm", 9, clients=1, updates=1, seconds=1e4)
    code = f"from edgefl.lab.bare import LimitCase; from edgefl.lab import ingest; ingest.limit_of({case})"
    process = psutil.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    while not any(tmp_path.glob("edgefl-bare-*/router")):
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGINT)
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_spawn_reports_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    result = spawn.run(counts=(1, 2), repetitions=1)
    assert json.loads(json.dumps(result)) == result
    assert [row["clients"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["ready_s"] > 0
        assert row["ms_a_client"] == pytest.approx(row["ready_s"] / row["clients"] * 1e3)
        assert row["proportional_mib"] >= row["own_mib"] > 0
        # A forked client shares most of its memory, unlike a process that imports torch.
        assert row["own_mib"] < result["torch"]["own_mib"] / 4
    assert result["torch"]["import_s"] > 0
    spawn.show(result)
    assert "own MiB" in capsys.readouterr().out


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it needs Linux's mechanisms")

TINY = {"fleet": 2.0, "alone": 2.0, "links": 5.0, "fast_links": 1.5, "heat": 60.0, "ranks": 1.2}
KINDS = "compute rate, whole trip, isolation, transfer, delay, jitter, loss, thermal curve, ranks"


@linux
@pytest.mark.slow
def test_fidelity_measures_every_quantity_in_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = fidelity.run(length=TINY, mechanisms=("paced",))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(KINDS.split(", ")) == {line["quantity"] for line in result["lines"]}
    for line in result["lines"]:
        # If the machine stalls, a run of a few seconds may end before its first trip; "why" then says so.
        assert line["measured"] > 0 or line["why"] == "nothing was measured"
        assert (line["verdict"] == "PASS") == (not line["why"])
    assert sum(line["measured"] > 0 for line in result["lines"]) > len(result["lines"]) / 2
    rates = result["rates"]["paced"]
    # A phone that completed no step in this time has no rate. Phones of one profile have different rates.
    assert len(DEVICES) / 2 < len(set(rates["declared"])) <= len(rates["declared"])
    fidelity.show(result)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "whole trip, paced" in shown


def judge(curves: Curves) -> Sequence[Finding]:
    ours, other = curves.accuracy("a"), curves.accuracy("b")
    return [Finding("a is not b", "nowhere", "no", f"{ours} {other}", verdict(ours != other))]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(study, "folder", lambda: tmp_path)
    settings = virtual(stop=Stop(versions=4))
    (tmp_path / "small-quick.toml").write_text(config.dump(settings))
    arms = (Arm("a", ()), Arm("b", ("strategy.buffer_size=2",)))
    return Study("small", "A small study", "none", arms, judge, seeds=(1,), small_seeds=(1,))


@pytest.mark.slow
def test_a_study_repeats_no_finished_run(small: Study, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    curves = small.run(out, "quick", say=said.append)
    assert len(said) == 2
    findings = small.judge(curves)
    write_report(out, small.title, small.citation, findings, curves=curves, notes=("a note",))
    document = json.loads((out / "summary.json").read_text())
    assert [one["claim"] for one in document["findings"]] == ["a is not b"]
    assert document["arms"]["a"]["seeds"] == [1]
    html = (out / "report.html").read_text()
    assert "A small study" in html
    assert "a note" in html
    assert "<script" not in html

    other = replace(small, arms=(Arm("a", ("training.lr=0.1",)),))
    with pytest.raises(ConfigError, match="holds a run with different settings"):
        other.run(out, "quick", say=said.append)

    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/summary.json")}
    folder = out / "runs" / "b-1"
    (folder / "record.sqlite").unlink()
    with pytest.raises(ConfigError, match="b-1"):
        small.run(out, "quick", say=said.append)
    # A run that was killed before its record was complete is repeated.
    settings = (folder / "experiment.toml").read_text()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "experiment.toml").write_text(settings)
    with run_folder.held(folder), pytest.raises(ConfigError, match="is in use by another edgefl process"):
        small.run(out, "quick", say=said.append)
    assert (folder / "experiment.toml").read_text() == settings
    (folder / "record.sqlite").write_bytes(b"")
    again = small.run(out, "quick", say=said.append)
    assert again.accuracy("b") == curves.accuracy("b")  # the same bits
    changed = {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert {path.parent.name for path in changed} == {"b-1"}


def test_tuning_chooses_the_step_size_that_the_study_then_uses(
    small: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "warm", sweep.warm)  # the tests' fork server
    grid = {"training.lr": (1e-6, 0.3)}  # the first is too small to learn anything
    grids = Tuning({"training.lr": (1e-7,)}, "trips", {"quick": 40.0}, seeds_at={"quick": (101,)})
    arms = Arm("a", (), grid_at={"quick": grid}), Arm("b", ("strategy.buffer_size=2",), steps_of="a")
    one = replace(small, tuning=grids, arms=arms)
    said: list[str] = []
    file = tuning.tune(one, tmp_path / "out", "quick", say=said.append)
    assert len(said) == 2
    assert [one.experiment(arm, 1, "quick").training.lr for arm in one.arms] == [0.3, 0.3]
    stamps = [path.stat().st_mtime_ns for path in tmp_path.glob("out/tuning/*/summary.json")]
    assert len(stamps) == 2
    before = file.read_text()
    assert tuning.tune(one, tmp_path / "out", "quick", say=said.append).read_text() == before
    assert stamps == [path.stat().st_mtime_ns for path in tmp_path.glob("out/tuning/*/summary.json")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fedbuf",), "did you mean 'fedbuff'"),
        (("fedbuff", "--out", "{file}"), "is a file; expected a folder"),
        (("fedbuff",), "EDGEFL_DATA"),
        (("fedbuff", "--settings", "cifar"), "available: 1000, quick"),
        (("fedbuff", "--settings", "1000", "--quick"), "cannot be combined with --settings 1000"),
        (("theory", "--tune"), "--tune: theory has no settings"),
        (("fedstaleweight", "--quick", "--tune"), "its paper gives them"),
        (("theory", "--set", "seed=1"), "theory has no settings"),
        (("theory", "--out", "{file}/under"), "cannot be created: Not a directory"),
        (("fedbuff", "--quick", "--set", "stop={trips=9}"), "removes stop.accuracy"),
        (("fedbuff", "--quick", "--set", "stop.version=1"), "did you mean"),
    ],
)
def test_reproduce_refuses_impossible_arguments_in_one_line(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    given = [argument.replace("{file}", str(tmp_path / "file")) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(["reproduce", *given])
    err = capsys.readouterr().err
    assert code == 2, err
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_predicted_memory_is_the_growth_of_a_process() -> None:
    """A prediction that omitted the gradients, or the activations, would be off by more than 25%."""
    wide = memory_row("wide", partial(mlp, (3, 32, 32), 10, hidden=[2000]), (3, 32, 32), 16)
    deep = memory_row("deep", squeezenet, (3, 224, 224), 2)
    assert wide.error < 0.15 > deep.error
    assert abs((wide.predicted_mib - wide.weights_mib) / wide.measured_mib - 1) > 0.25
    assert abs((deep.predicted_mib - deep.live_mib) / deep.measured_mib - 1) > 0.25


def test_memory_names_what_the_networks_need() -> None:
    def make() -> NoReturn:
        raise ConfigError("timm is not installed: pip install 'edgefl[timm]'")

    with pytest.raises(ConfigError, match="timm is not installed"):
        memory_row("resnet18", make, (3, 224, 224), 8)
