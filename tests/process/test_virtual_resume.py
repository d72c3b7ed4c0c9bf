"""Killed and resumed runs under the virtual clock are bit-identical to undisturbed ones and are verified."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import edgefl
from edgefl import (
    Checkpoint,
    ConfigError,
    Data,
    Evaluation,
    Fleet,
    Model,
    RunError,
    Server,
    Stop,
    Training,
    cli,
    config,
    files,
)
from edgefl.core.events import Died, Joined, Left
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import listed
from edgefl.experiment import Churn
from edgefl.lab.verify import verify
from edgefl.parameters import checkpoint
from edgefl.results import run_folder
from edgefl.results.record import Record
from edgefl.results.rows import IncidentRow, Meta
from edgefl.run import supervisor

from .disturbed import check_every_kill_was_certain, killed, left, made_in, plan
from .runs import (
    BATCH_NORMALISED,
    PATIENCE_S,
    Command,
    alter,
    experiment,
    summary,
    versions_of,
    virtual,
    wait_for,
    wait_for_versions,
)
from .test_dynamics import CHURN, check_every_task_has_one_fate
from .test_dynamics import fleet as phones

pytestmark = pytest.mark.timeout(300)
NOW_AND_THEN = Checkpoint(every_s=1e-6)
"""Checkpoints at the shortest interval that is allowed."""
COLUMNS = (
    "task", "client", "base_version", "trip", "sent_s", "arrived_s", "staleness", "applied_version", "weight",
    "fate", "steps", "examples", "loss", "checksum_sent", "checksum_seen", "trip_declared_s",
)  # fmt: skip


def resumable(workers: int = 2, **changes: Any) -> edgefl.Experiment:
    given: dict[str, Any] = {
        "fleet": Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte", join_spread_s=3.0),
        "checkpoint": NOW_AND_THEN,
        "stop": Stop(versions=150),
    }
    return virtual(workers, **{**given, **changes})


def outcome(folder: Path) -> dict[str, Any]:
    """Return the results that must not depend on kills or on the number of workers."""
    with Record(folder) as record:
        trips = {name: record.trips[name].tolist() for name in COLUMNS}
        rows = [row for row in zip(*trips.values(), strict=True) if row[COLUMNS.index("fate")]]
        versions = [record.versions[name].tolist() for name in ("version", "at_s", "updates", "weight_sum")]
        measured = [(row.version, row.at_s, row.trips, row.accuracy, row.loss) for row in record.evaluations]
        meta = record.meta
        events = [event for _, event in record.events() if isinstance(event, Joined | Left | Died)]
    return {
        "moves": str([(type(event).__name__, event.client, event.at_s) for event in events]),
        "sha256": meta.model_sha256,
        "emulated_s": meta.emulated_s,
        "trips": str(rows),
        "versions": str(versions),
        "measured": str(measured),
    }


def disturbed(
    wanted: edgefl.Experiment, folder: Path, points: list[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Run to the end, with a server killed at each of these points in turn; return the outcome."""
    assert killed(wanted, folder, points, monkeypatch) == len(points), "the run ended before the last kill"
    check_every_kill_was_certain(folder, points)
    return outcome(folder)


def changing(folder: Path, on_leave: str) -> dict[str, Any]:
    """Clients that heat up, run low on battery, leave, return and die."""
    fields = {"thermal": True, "battery": True, "charge": 0.5, "churn": CHURN, "rejoin_s": 0.2}
    fleet = phones(folder, **fields, on_leave=on_leave)
    return {"fleet": fleet, "training": Training(steps=12), "stop": Stop(versions=45)}


def cancelling(on_leave: str) -> dict[str, Any]:
    """Clients that leave and return on a slow link that loses packets, and a strategy that cancels trips."""
    fleet = Fleet(
        devices={"pixel-4": 8},
        network="hsdpa-lossy",
        churn=Churn(mean_online_s=5.0, mean_offline_s=1.0, die_per_trip=0.05),
        on_leave=on_leave,
    )
    strategy = {"name": "fedasync", "max_staleness": 1}
    return {"fleet": fleet, "strategy": strategy, "stop": Stop(versions=60)}


CODED = {"server": Server(transport="wire", update_format="int8")}
CASES = [
    pytest.param(
        lambda _: {
            "strategy": {"name": "quafl", "participants": 2, "interval_s": 0.2},
            "stop": Stop(versions=40),
        },
        ["event:0:31", "event:0:40"],
        id="polled, own models",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda _: {"stop": Stop(versions=500, patience_evaluations=3, min_improvement=0.01)},
        ["event:0:30", "event:0:70"],
        id="patience",
        marks=pytest.mark.slow,
    ),
    pytest.param(lambda folder: {**changing(folder, "lose"), **CODED}, ["event:0:70"], id="changing, int8"),
    pytest.param(lambda _: cancelling("lose"), ["event:0:70"], id="cancelling", marks=pytest.mark.slow),
    pytest.param(
        lambda _: {
            "strategy": {"name": "fedbuff", "buffer_size": 2, "concurrency": 4, "momentum": 0.5},
            "stop": Stop(versions=70),
        },
        # Also kill servers while they save: they write a checkpoint when they start and when the run ends.
        ["event:0:45", "torn:0:9", "unnamed:0:1", "renamed:0:1", "named:0:1"],
        id="momentum",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda _: {
            "strategy": {"name": "fedstaleweight", "buffer_size": 2, "normalize": "credit", "max_step": 0.9},
            "stop": Stop(versions=60),
        },
        ["event:0:70"],
        id="credit",
    ),
    pytest.param(  # each version is read by at least one task, so the ring is full from version 17 on
        lambda _: {
            "fleet": Fleet(devices={"paper-half-normal": 30}, network="none"),
            "strategy": {"name": "fedasync"},
            "stop": Stop(versions=60),
            "training": Training(steps=4),
        },
        ["event:0:60", "event:0:17", "event:0:8"],  # the first 30 events are those of clients that join
        id="full ring",
    ),
    pytest.param(
        lambda _: {
            "strategy": {"name": "asyncfeded", "max_growth": 3},
            "server": Server(update_format="float16"),
            "stop": Stop(versions=60),
        },
        ["event:0:31", "event:0:25"],
        id="measured, own steps, float16",
    ),
    pytest.param(
        lambda _: {"strategy": {"name": "defedavg-niid"}, "stop": Stop(accuracy=0.8)},
        ["event:0:30", "event:0:70"],
        id="accuracy",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda folder: changing(folder, "finish"), ["event:0:70"], id="finishing", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("changes", "points"), CASES)
def test_a_killed_and_resumed_run_has_the_bits_of_an_undisturbed_one(
    changes: Callable[[Path], dict[str, Any]],
    points: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The undisturbed run has one worker; the killed one has three."""
    changed = changes(tmp_path)
    figures = edgefl.run(resumable(1, **changed), tmp_path / "calm").summary()
    found = disturbed(resumable(3, **changed), tmp_path / "killed", points, monkeypatch)
    assert found == outcome(tmp_path / "calm")
    fleet = changed.get("fleet", Fleet(devices={}))
    if fleet.thermal:
        check_every_task_has_one_fate(tmp_path / "calm", figures)
        assert set(figures["availability"]["reasons"]) == {"offline", "battery", "died"}
    elif fleet.churn.mean_online_s is not None:
        assert min(figures["trips"]["lost"], figures["trips"]["discarded"]) > 0
        assert verify(tmp_path / "killed").model_sha256 == figures["model_sha256"]


def test_running_statistics_are_averages_under_stale_updates_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: changes of stale statistics are added up, so that variances become negative and losses NaN."""
    (tmp_path / "normed.py").write_text(BATCH_NORMALISED)
    changed: dict[str, Any] = {
        "fleet": Fleet(devices={"pixel-3a": 4, "pi-4": 4, "moto-g4": 4}, network="lte"),
        "model": Model(name="normed:net"),
        "data": Data(partition="dirichlet", alpha=0.3),
        "training": Training(steps=8, batch_size=16, lr=0.1),
        "strategy": {"name": "fedbuff", "buffer_size": 3, "exponent": 0.0},
        "stop": Stop(versions=24),
    }
    result = supervisor.run(resumable(1, **changed), tmp_path / "calm", quiet=True, base=tmp_path)
    assert disturbed(resumable(3, **changed), tmp_path / "killed", ["event:0:24"], monkeypatch) == outcome(
        tmp_path / "calm"
    )
    assert (result.model()["2.running_var"] > 0.0).all()
    assert np.isfinite([row.loss for row in result.record.evaluations]).all()
    assert result.summary()["staleness"]["max"] >= 3
    verify(tmp_path / "killed", code=tmp_path)


def test_a_run_is_the_same_after_an_interrupt_and_kills_of_server_and_zygote(tmp_path: Path) -> None:
    wanted = resumable(model=made_in(tmp_path), stop=Stop(versions=60))
    folder = tmp_path / "killed"
    supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path)
    plan(tmp_path, {60: "interrupt"})
    Command.run(wanted, folder).ends(130)
    plan(tmp_path, {60: "kill the server", 61: "kill the zygote"})
    said = Command("resume", str(folder)).ends(0)
    assert left(tmp_path) == []
    ended = re.findall(r"the (\w+) process ended early \(signal 9\): starting it again", said)
    assert len(set(ended)) == len(ended) > 0  # one name if both died at once
    assert summary(folder)["incidents"]["restart"] > 0
    assert outcome(folder) == outcome(tmp_path / "calm")


def test_own_code_that_changed_before_a_resume_is_reported(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SIZE = 64\n")
    (tmp_path / "own_model.py").write_text(
        "import helper\nfrom torch import nn\n\ndef make(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(helper.SIZE, classes))\n"
    )
    wanted = resumable(model=Model(name="own_model:make"), stop=Stop(versions=100_000))
    folder = tmp_path / "cut"
    command = Command.run(wanted, folder)
    wait_for_versions(folder, 1, command)
    command.interrupt()
    command.ends(130)
    assert {"own_model", "helper"} <= set(meta_of(folder).code)
    assert not {"torch", "json", "edgefl"} & set(first := meta_of(folder).code)
    (tmp_path / "helper.py").write_text("SIZE = 8 * 8\n")
    changed = "your own code has changed since the run began (helper): the run goes on with the new code"
    for times, has_changed in ((1, True), (2, False)):  # before the second resume nothing has changed
        assert (changed in resumed(folder), len(meta_of(folder).resumes)) == (has_changed, times)
        (before_it,) = meta_of(folder).earlier_code
        assert before_it.code == first
        assert 0 < before_it.version <= before_it.trips
        since = f", from version {before_it.version} on, after {before_it.trips} trips"
        assert [(row.kind, row.detail) for row in incidents_of(folder)] == [("code", changed + since)]
    assert changed in (folder / "report.html").read_text()


def write_data(file: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    inputs, classes = draw.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    save_file({"train_x": inputs, "train_y": classes, "test_x": inputs, "test_y": classes}, file)


def test_files_that_changed_before_a_resume_are_reported(tmp_path: Path) -> None:
    data = tmp_path / "mine.safetensors"
    write_data(data, 0)
    profile, link = tmp_path / "own.toml", tmp_path / "link.toml"
    text = (bundled_folder() / "devices" / "pi-4.toml").read_text()
    profile.write_text(text.replace('id = "pi-4"', 'id = "own"'))
    way = "delay_ms = 1\ntrace = 'a.trace'\n"
    link.write_text(f"id = 'link'\nname = 'link'\n[down]\n{way}[up]\n{way}[sources]\ndown = 'x'\nup = 'x'\n")
    (tmp_path / "a.trace").write_text("1\n2\n")
    (tmp_path / "day.json").write_text('[{"period_s": 9, "intervals_s": [[0, 9]]}]')
    availability = str(tmp_path / "day.json")
    fleet = Fleet(devices={str(profile): 4}, network=str(link), availability=availability)
    folder = tmp_path / "cut"
    arrays = Data(name="arrays", path=str(data))
    command = Command.run(resumable(fleet=fleet, data=arrays, stop=Stop(versions=100_000)), folder)
    wait_for_versions(folder, 1, command)
    command.interrupt()
    command.ends(130)
    mine = {str(tmp_path / name) for name in ("own.toml", "link.toml", "a.trace", "day.json", data.name)}
    assert set(meta_of(folder).code) == mine
    profile.write_text(profile.read_text().replace("fixed_ms = 1.394", "fixed_ms = 9.0"))
    write_data(data, 1)
    both = listed([str(data), str(profile)])
    changed = f"your own files have changed since the run began ({both}): the run goes on with the new files"
    assert changed in resumed(folder)
    (row,) = incidents_of(folder)
    assert row.detail.startswith(changed)
    write_data(data, 2)
    since = f"; of your own code and files, {data} changed since the run"
    with pytest.raises(RunError, match=f"; the run went on with changed code .*: {both}{since}$"):
        verify(folder)


def test_a_run_that_was_moved_with_its_files_is_resumed_and_verified_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write_data(old / "mine.safetensors", 0)
    wanted = resumable(data=Data(name="arrays", path="mine.safetensors"), stop=Stop(versions=3))
    with run_folder.new(old / "run", config.dump(config.validate(wanted, old))):
        run_folder.begin(old / "run", old)
    old.rename(new)
    monkeypatch.chdir(new)
    supervisor.resume(Path("run"), quiet=True)
    assert verify("run").versions == 3
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", "new/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"edgefl: data.path: {old}/mine.safetensors cannot be read")
    assert f"; the run began in {old}, which does not exist now: start this command in the folder" in line


def resumed(folder: Path) -> str:
    """Resume the run, and interrupt it after its next version; return stderr."""
    before = versions_of(folder)
    command = Command("resume", str(folder))
    wait_for_versions(folder, before + 1, command)
    command.interrupt()
    return command.ends(130)


SLOW_TO_EVALUATE = """
import time
from pathlib import Path

from torch import nn

HERE = Path(__file__).parent


class SlowToEvaluate(nn.Sequential):
    def forward(self, inputs):
        if Path("/proc/self/comm").read_text().startswith("edgefl-eval"):
            (HERE / "evaluates").touch()
            while not (HERE / "go").exists():
                time.sleep(0.05)
        return super().forward(inputs)


def make(input_shape, classes):
    return SlowToEvaluate(nn.Flatten(), nn.Linear(64, classes))
"""


def test_a_run_interrupted_in_its_last_evaluation_is_evaluated_after_a_resume(tmp_path: Path) -> None:
    """Workers that were dismissed before the interrupt are not recorded as hung."""
    (tmp_path / "slow_model.py").write_text(SLOW_TO_EVALUATE)
    wanted = resumable(
        model=Model(name="slow_model:make"),
        server=Server(heartbeat_s=0.2),
        evaluation=Evaluation(every_versions=20),
        stop=Stop(versions=20),
    )
    folder, again = tmp_path / "cut", tmp_path / "go"
    command = Command.run(wanted, folder)
    wait_for(lambda: versions_of(folder) == 20 and (tmp_path / "evaluates").exists(), "its end", command)
    wait_for(lambda: not command.named("edgefl-worker"), "its workers'", command)
    of_a_busy_host = incidents_of(folder)  # a worker that did not get a core for a while counts as hung
    assert {row.kind for row in of_a_busy_host} <= {"hang"}
    until_s = time.monotonic() + 5 * wanted.server.heartbeat_s
    wait_for(lambda: time.monotonic() > until_s, "several heartbeats", command)
    command.interrupt()
    assert "carry on with: edgefl resume" in command.ends(130)
    assert (meta_of(folder).status, meta_of(folder).stop_reason) == ("interrupted", "interrupted")
    assert incidents_of(folder) == of_a_busy_host
    again.touch()
    Command("resume", str(folder)).ends(0)
    assert (meta_of(folder).status, meta_of(folder).stop_reason) == ("done", "versions")
    assert {row.kind for row in incidents_of(folder)} <= {"hang"}
    supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path)
    assert outcome(folder) == outcome(tmp_path / "calm")
    with Record(folder) as record:
        assert [row.version for row in record.evaluations] == [0, 20]


def meta_of(folder: Path) -> Meta:
    with Record(folder) as record:
        return record.meta


KILLED_AS_IT_LOADS = """
import os
import signal
from collections.abc import Callable
from pathlib import Path

from edgefl.learning.published_sets import load_digits


def load(spec, seed):
    fatal = Path(__file__).with_name("fatal")
    if fatal.exists():
        fatal.unlink()
        os.killpg(0, signal.SIGKILL)
    return load_digits(spec, seed)
"""


def test_a_run_that_was_killed_while_it_loaded_data_starts_again(tmp_path: Path) -> None:
    (tmp_path / "loads.py").write_text(KILLED_AS_IT_LOADS)
    wanted = resumable(data=Data(name="loads:load"), stop=Stop(versions=12))
    supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path)
    (tmp_path / "fatal").touch()
    command = Command.run(wanted, tmp_path / "killed")
    assert command.finish()[0] == -signal.SIGKILL
    assert not (tmp_path / "fatal").exists()
    assert not run_folder.begun(tmp_path / "killed")
    Command("resume", str(tmp_path / "killed")).ends()
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "calm")
    with pytest.raises(ConfigError, match=r"data\.name would run code of this run's author; .*: --code \S+"):
        verify(tmp_path / "killed")
    with pytest.raises(ConfigError, match=r"^--code \S+/loads\.py: must be an existing folder$"):
        verify(tmp_path / "killed", code=tmp_path / "loads.py")
    assert verify(tmp_path / "killed", code=tmp_path).versions == 12


def incidents_of(folder: Path) -> list[IncidentRow]:
    """Return the recorded incidents; an empty list if there is no readable record yet."""
    try:
        with Record(folder) as record:
            return record.incidents
    except ConfigError:
        return []


def test_a_resumed_wall_clock_run_with_an_altered_update_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(
        strategy={"name": "fedbuff", "buffer_size": 3, "momentum": 0.5},
        server=Server(update_format="int8", transport="wire", heartbeat_s=PATIENCE_S),
        stop=Stop(versions=100_000),
    )
    command = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "alter:2:1"})
    wait_for(lambda: bool(incidents_of(folder)), "an incident", command)
    command.kill_group()
    command.finish()
    more = versions_of(folder) + 6
    again = Command("resume", str(folder))
    wait_for_versions(folder, more, again)
    again.interrupt()
    again.ends(130)
    figures = summary(folder)
    assert figures["incidents"]["checksum"] == 1
    assert figures["integrity"]["version_mismatches"] == 0
    code, out, err = Command("verify", str(folder)).finish()
    assert (code, err) == (0, "")
    assert f"model_sha256 {figures['model_sha256']}" in out


def test_verification_computes_the_same_model_and_reports_its_progress(finished: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify(finished, lambda made, of: told.append((made, of)))
    figures = summary(finished)
    assert found.model_sha256 == figures["model_sha256"]
    assert (found.versions, found.updates) == (figures["versions"], figures["client_trips"])
    assert told == [(version, 12) for version in range(1, 13)]


def sql(statement: str) -> Callable[[Path], None]:
    return partial(alter, statement=statement)


def other_model(folder: Path) -> None:
    path = folder / "checkpoints" / "final.safetensors"
    metadata, tensors = checkpoint.read_sealed(path)
    name = sorted(tensors)[0]
    first = tensors[name].reshape(-1)
    first[0] = np.nextafter(first[0], np.float32(np.inf))
    files.replace(path, checkpoint._safetensors(tensors, metadata))


def no_model(folder: Path) -> None:
    (folder / "checkpoints" / "final.safetensors").write_bytes(b"nothing")


def other_seed(folder: Path) -> None:
    path = folder / "experiment.toml"
    text = path.read_text()
    assert "seed = 0" in text
    path.write_text(text.replace("seed = 0", "seed = 1"))


def other_summary(folder: Path) -> None:
    path = folder / "summary.json"
    path.write_text(path.read_text().replace('"versions": 12', '"versions": 13'))


def other_report(folder: Path) -> None:
    path = folder / "report.html"
    path.write_bytes(path.read_bytes().replace(b"12", b"13", 1))


CHANGES = [
    (sql("UPDATE trips SET checksum_sent = checksum_sent + 1 WHERE task = 4"), "the update of task 4"),
    (sql("UPDATE trips SET checksum_sent = NULL WHERE task = 4"), "the update of task 4"),
    (
        sql("UPDATE sums SET weights = zeroblob(24) WHERE version = 3"),
        "version 3 was made from other updates",
    ),
    (sql("UPDATE meta SET value = '\"00\"' WHERE key = 'model_sha256'"), "the record says 00"),
    (sql("UPDATE trips SET arrived_s = arrived_s + 1 WHERE task = 4"), "task 4 has arrived_s"),
    (sql("UPDATE trips SET loss = loss / 2 WHERE task = 5"), "task 5 has loss"),
    (sql("UPDATE trips SET staleness = staleness + 1 WHERE task = 6"), "task 6 has staleness"),
    (sql("UPDATE versions SET at_s = at_s / 2 WHERE version = 3"), "version 3 was made at"),
    (sql("UPDATE evaluations SET accuracy = 1.0 WHERE version = 0"), "version 0 has accuracy"),
    (sql("UPDATE evaluations SET loss = 0.0 WHERE version = 12"), "version 12 has loss"),
    (sql("UPDATE evaluations SET at_s = at_s / 2 WHERE version = 12"), "version 12 was evaluated at"),
    (sql("UPDATE evaluations SET trips = trips - 1 WHERE version = 12"), "version 12 was evaluated at"),
    (other_model, "differs from version 12"),
    (no_model, "cannot be read"),
    (other_summary, "summary.json does not match the record"),
    (other_report, "report.html was changed after it was written"),
]


@pytest.mark.parametrize(
    ("error", "change", "says"),
    [
        *((RunError, *change) for change in CHANGES),
        (ConfigError, other_seed, "differs from the experiment that this run began with"),
        (ConfigError, sql("UPDATE meta SET value = '\"running\"' WHERE key = 'status'"), "run has not ended"),
    ],
)
def test_verification_names_what_was_changed(
    finished: Path, tmp_path: Path, error: type[Exception], change: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    change(folder)
    with pytest.raises(error, match=says):
        verify(folder)


DEADLY = """
import os
import signal


def train(model, examples, context):
    for _, y in examples.batches():
        context.step(len(y))
        if context.client == 1 and context.trip == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if context.client == 2:
            os._exit(3)
"""


def test_training_that_ends_its_process_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client rejoins after ``rejoin_s``, and is given up after five deaths in a row."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    phones = Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte", rejoin_s=0.0625)
    training = Training(steps=2, function="deadly:train")
    found = [
        disturbed(
            resumable(workers, fleet=phones, training=training, stop=Stop(versions=30)),
            tmp_path / str(workers),
            points,
            monkeypatch,
        )
        for workers, points in ((1, []), (3, ["event:0:25"]))
    ]
    assert found[0] == found[1]
    with Record(tmp_path / "1") as record:
        own = [(row.client, row.kind, row.detail) for row in record.incidents if row.client is not None]
        at_s = [row.at_s for row in record.incidents if (row.client, row.kind) == (2, "death")]
        moves = [event for _, event in record.events() if isinstance(event, Joined | Left | Died)]
    assert sorted(own) == [
        (1, "death", "signal 9"),
        *[(2, "death", "exit code 3")] * 5,
        (2, "gave-up", "died 5 times in a row"),
    ]
    assert [event.at_s for event in moves if event.client == 2 and isinstance(event, Died)] == at_s
    back = [event.at_s for event in moves if event.client == 2 and isinstance(event, Joined)]
    assert back[1:] == [gone_s + 0.0625 for gone_s in at_s[:4]]
