"""Tests of edgefl chaos: it accepts a correct build, and finds what a broken build loses or repeats."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from edgefl import Checkpoint, Evaluation, Experiment, Model, Server, Stop, Training, failpoints
from edgefl.cli import main
from edgefl.experiment import Privacy, Secure
from edgefl.lab import outcome
from edgefl.lab.chaos import Plan, _RandomKiller, _Round
from edgefl.lab.outcome import PLACES, Findings
from edgefl.results.run_folder import is_done
from edgefl.results.store import Store
from edgefl.seeds import stream
from tests.reports import version

from .runs import PATIENCE_S, Command, alter, experiment, virtual

needs_cryptography = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="needs edgefl[secure]"
)
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
TINY: dict[str, Any] = {
    "model": Model(args={"hidden": [4]}),
    "training": Training(steps=1, batch_size=8),
    "checkpoint": Checkpoint(every_s=0.1),
    "evaluation": Evaluation(every_versions=500),
    "strategy": {"name": "fedbuff", "buffer_size": 5, "momentum": 0.5},
}


def chaos(
    wanted: Experiment, folder: Path, *arguments: str, mutant: str = ""
) -> tuple[int, str, dict[str, Any]]:
    """Return the exit code, stderr and figures of ``edgefl chaos``."""
    file = Command.write(wanted, folder)
    figures = folder.with_suffix(".json")
    environment = {"EDGEFL_TEST_MUTANT": mutant, "PYTHONPATH": f"{ROOT / 'tests' / 'mutants'}:{ROOT}"}
    command = Command(
        "chaos", str(file), "--out", str(folder), "--json", str(figures), *arguments,
        environment=environment if mutant else None,
    )  # fmt: skip
    _, err = command.process.communicate()
    assert "Traceback" not in err, err
    return command.process.returncode, err, json.loads(figures.read_text())


def wall(transport: str, **changes: Any) -> Experiment:
    server = Server(transport=transport, heartbeat_s=PATIENCE_S)
    return experiment(**{**TINY, "server": server, **changes})


def check(code: int, err: str, found: dict[str, Any], kills: int) -> None:
    assert (code, err, found["violations"]) == (0, "", [])
    assert found["kills"] == kills
    assert all(each["judged"] for each in found["rounds"])


def test_acknowledged_updates_survive_kills_of_servers_and_clients(tmp_path: Path) -> None:
    wanted = wall("wire", stop=Stop(trips=300))
    code, err, found = chaos(
        wanted, tmp_path / "c", "--kills", "2", "--every", "0.1", "--only", "server,client"
    )
    check(code, err, found, 2)
    assert sum(each["acknowledged"] for each in found["rounds"]) > 250
    assert not (tmp_path / "c").exists()  # removed, since no check failed


PRIVATE = Privacy(clip_norm=0.1, noise_multiplier=0.5, noise="seeded")
HIDDEN: dict[str, dict[str, Any]] = {
    "masks": {"server": Server(secure=Secure(holders=4, recover=3), heartbeat_s=PATIENCE_S)},
    "trusted": {"server": Server(secure=Secure(kind="trusted"), heartbeat_s=PATIENCE_S)},
    "pairwise": {
        "server": Server(secure=Secure(kind="pairwise"), heartbeat_s=PATIENCE_S),
        "strategy": {"name": "fedavg", "cohort": 4},
    },
}


@pytest.mark.slow
@needs_cryptography
def test_masked_updates_survive_kills_of_servers_and_holders(tmp_path: Path) -> None:
    """Under FedBuff with noise that the server adds, each acknowledged update is in exactly one sum."""
    wanted = wall("shm", **HIDDEN["masks"], privacy=PRIVATE, stop=Stop(trips=600))
    only = ("--kills", "4", "--every", "0.1", "--only", "server,secure")
    code, err, found = chaos(wanted, tmp_path / "c", *only)
    check(code, err, found, 4)
    assert sum(each["acknowledged"] for each in found["rounds"]) > 500


@pytest.mark.slow
@needs_cryptography
@pytest.mark.parametrize("kind", HIDDEN)
def test_any_process_may_be_killed_with_hidden_updates(kind: str, tmp_path: Path) -> None:
    """Kills are at random times, and at each failpoint of the server and of secure aggregation."""
    hidden = HIDDEN[kind] | ({"privacy": PRIVATE} if kind != "pairwise" else {})
    phones = virtual(4, **TINY | hidden, stop=Stop(trips=4000))
    clients = wall("shm", **hidden, stop=Stop(trips=2000))
    check(*chaos(phones, tmp_path / "virtual", "--kills", "20", "--every", "0.1"), 20)
    check(*chaos(clients, tmp_path / "wall", "--kills", "20"), 20)
    for name, wanted in (("places", phones), ("places of clients", clients)):
        code, err, found = chaos(wanted, tmp_path / name, "--failpoints", "1")
        assert (code, err) == (0, "")
        assert found["recovery"].keys() >= {*failpoints.OF_SUMS, "sum", "summed", "published"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_any_process_may_be_killed(transport: str, tmp_path: Path) -> None:
    phones = virtual(4, **TINY, server=Server(transport=transport), stop=Stop(trips=8000))
    check(*chaos(phones, tmp_path / "virtual", "--kills", "20", "--every", "0.1"), 20)
    check(*chaos(wall(transport, stop=Stop(trips=4000)), tmp_path / "wall", "--kills", "20"), 20)


@pytest.mark.slow
def test_server_and_client_may_be_killed_at_each_of_their_failpoints(tmp_path: Path) -> None:
    every: dict[str, Experiment] = {
        "shm": wall("shm", stop=Stop(trips=4000)),
        "wire": wall("wire", stop=Stop(trips=4000)),
        "virtual": virtual(2, **TINY, stop=Stop(trips=8000)),
    }
    passed: set[str] = set()
    for name, wanted in every.items():
        code, err, found = chaos(wanted, tmp_path / name, "--failpoints", "1")
        assert (code, err) == (0, "")
        passed |= found["recovery"].keys()
    assert passed >= set(PLACES) - set(failpoints.OF_SUMS)


def test_a_version_made_before_a_kill_is_no_recovery_from_it(tmp_path: Path) -> None:
    """The next kill waits until the server's replacement has made a version."""
    wanted = wall("shm")
    plan, findings = Plan(file=Command.write(wanted, tmp_path / "c")), Findings("wall", "shm")
    killer = _RandomKiller(plan, stream(0, "test"), one_keeper=True)
    run = _Round(plan, wanted, tmp_path, findings, killer, lambda *_: None)
    run._run.mkdir(parents=True)
    command = Mock(**{"family.return_value": {}})
    with Store(run._run) as store:
        for number in (1, 2):
            store.version(version(number))
            store.commit()
            if number == 1:
                run._note("server", command)
            advanced = run._advanced(findings.kills[0].at_s + 60.0, command)
            assert (advanced, bool(run._waiting)) == (number == 2, number == 1)
    assert findings.kills[0].recovery_s == pytest.approx(60.0)


def test_a_kill_that_was_due_when_a_round_ended_is_made_in_the_next_round(tmp_path: Path) -> None:
    """The time of each round starts at 0, and a round may be shorter than the one before."""
    plan = Plan(file=tmp_path, kills=1, every_s=1.0)
    killer = _RandomKiller(plan, stream(0, "test"), one_keeper=False)
    victim = Mock()
    command = Mock(**{"family.return_value": {victim: "worker"}, "process.poll.return_value": None})
    assert killer.turn(command, 1000.0, [], steady=True) == ""
    assert killer.turn(command, 1.0, [], steady=True) == ""
    assert killer.turn(command, 100.0, [], steady=True) == "worker"
    victim.kill.assert_called_once()


def test_the_first_figure_that_differs_is_named(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(finished, other)
    assert list(outcome.differences(finished, other)) == list(outcome.unreadable(other)) == []
    assert is_done(other)
    alter(other, "UPDATE trips SET staleness = staleness + 1 WHERE task = 6")
    alter(other, "DELETE FROM versions WHERE version = 12")
    assert [line.split("the first: ")[1] for line in outcome.differences(finished, other)] == [
        "6 has staleness 3 instead of 2",
        "12 is only in the undisturbed one",
    ]
    alter(other, "UPDATE meta SET value = '\"running\"' WHERE key = 'status'")
    (other / "report.html").unlink()
    assert list(outcome.unreadable(other)) == [
        "the record says that the run is running",
        "report.html is missing",
    ]


def test_wrong_arguments_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", str(tmp_path / "none.toml")]) == 2
    file = Command.write(virtual(), tmp_path / "e")
    assert main(["chaos", str(file), "--only", "server,kernel"]) == 2
    assert "--only: process 'kernel' not found" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "c" / "seed-0").mkdir(parents=True)
    assert main(["chaos", str(file), "--out", str(tmp_path / "c")]) == 2
    assert "contains runs of an earlier 'edgefl chaos'" in capsys.readouterr().err.splitlines()[-1]
    secret = Command.write(virtual(privacy=Privacy(clip_norm=0.1, noise_multiplier=0.5)), tmp_path / "p")
    assert main(["chaos", str(secret), "--out", str(tmp_path / "d")]) == 2
    assert "privacy.noise: must be 'seeded' with edgefl chaos" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "clock", "says"),
    [
        ("acknowledges-first", "wall", " is lost| does not match the record"),
        ("counts-twice", "wall", "edgefl run, with .* printed a traceback"),
        ("skips-held", "wall", "recomputed from its journal"),
        ("sums-twice", "wall", "recomputed from its journal"),
        ("sums-twice with masks", "wall", "recomputed from its journal"),
        ("skips-held", "virtual", "differ from the undisturbed run's"),
        ("sums-twice", "virtual", "differ from the undisturbed run's"),
    ],
)
def test_a_broken_build_is_found(mutant: str, clock: str, says: str, tmp_path: Path) -> None:
    mutant, _, masks = mutant.partition(" with ")
    arguments = ["--kills", "6", "--only", "server"]
    if clock == "wall":
        wanted = wall("shm", stop=Stop(trips=2000), **(HIDDEN[masks] if masks else {}))
        arguments += ["--every", "0.1"]
    else:
        wanted = virtual(2, **TINY, stop=Stop(trips=4000))
    code, err, found = chaos(wanted, tmp_path / "c", *arguments, mutant=mutant)
    assert code == 1
    assert "VIOLATED: " in err
    assert any(re.search(says, line) for line in found["violations"])
