"""`bench peers`: figures are read from the reports of other frameworks, and failures are explained."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from shell import Shell

from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Model
from edgefl.lab import peers
from edgefl.lab.peers import SETTINGS, Case
from edgefl.lab.rivals import task as shared
from edgefl.learning.models import make_model

CASE = Case("flute", "torch", 1, 1)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> peers.Setting:
    """A setting on the bundled digits, whose rounds take milliseconds."""
    setting = peers.Setting("linear", "digits", clients=20, cohort=2, batch_size=10, lr=0.1)
    monkeypatch.setitem(SETTINGS, "flute", setting)
    return setting


def test_networks_have_the_published_numbers_of_parameters() -> None:
    nets = {name: shared.make((1, 28, 28), net=name) for name in shared.NETS}
    sizes = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    assert sizes == {"cnn-pfl": 1_626_442, "linear": 7_850, "cnn-groupnorm": 468_458}
    ours = make_model(Model(name="cnn-groupnorm"), (1, 28, 28), 10, seed=0)
    assert [str(layer) for layer in nets["cnn-groupnorm"]] == [str(layer) for layer in ours]


def test_each_client_reads_its_own_examples(digits: peers.Setting, tmp_path: Path) -> None:
    peers.write_task(CASE, tmp_path, seconds=1.5)
    task, clients = shared.read(str(tmp_path))
    assert (task.clients, task.cohort, task.seconds, task.asynchronous) == (20, 2, 1.5, False)
    assert len(clients) == 20
    x = torch.cat([x for x, _ in clients])
    assert len(x) == task.shape[0] // 20 * 20
    assert len(x.unique(dim=0)) > 0.9 * len(x)  # no client has another's examples
    assert shared.net_of(task)(clients[7][0]).shape == (len(clients[7][1]), 10)


def test_a_trip_is_an_epoch_or_the_given_steps(digits: peers.Setting, tmp_path: Path) -> None:
    peers.write_task(CASE, tmp_path, seconds=1.0)
    task, ((x, y), *_) = shared.read(str(tmp_path))
    for steps, expected in ((None, -(-len(y) // 10)), (1, 1)):
        net, seen = shared.net_of(task), []
        net.register_forward_hook(lambda *call, seen=seen: seen.append(len(call[2])))
        shared.train(net, x, y, task._replace(steps=steps))
        assert len(seen) == expected
        assert sum(seen) == (len(y) if steps is None else 10)


def test_speed_is_measured_from_the_first_model() -> None:
    rounds = [{"trips": 50, "at_s": 20.0}, {"trips": 100, "at_s": 24.0}, {"trips": 150, "at_s": 30.0}]
    turn = peers.speed([{"version": "2"}, *rounds], started_s=8.0, peak_mib=1.0)
    assert turn == ("2", 10.0, 7.0, 1.0)  # 100 trips in 10 s, so the first model's 50 took 5 of its 12 s
    with pytest.raises(RunError, match="only 1 model in the time given; 2 are needed"):
        peers.speed(rounds[:1], started_s=8.0, peak_mib=1.0)


def test_a_report_ends_after_its_time_and_three_models(capsys: pytest.CaptureFixture[str]) -> None:
    report = shared.Report(0.0, "torch")
    assert [report.add(5) for _ in range(3)] == [False, False, True]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["trips"] for line in lines[1:]] == [5, 10, 15]
    assert not any(shared.Report(1e9, "torch").add(5) for _ in range(4))


def test_a_framework_that_pip_cannot_install_has_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PACKAGES, "pfl", (str(tmp_path / "no-such.whl"),))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    finish = peers._finish

    def with_this_pip(command: Sequence[str], what: str) -> None:
        """Create no environment, which would take seconds: use the pip of this one."""
        if what == "pip":
            finish([sys.executable, *command[1:]], what)

    monkeypatch.setattr(peers, "_finish", with_this_pip)
    result = peers.run(only="pfl", settings="flute", venvs=tmp_path / "venvs")
    assert json.loads(json.dumps(result)) == result
    assert {row["framework"] for row in result["rows"]} == {"pfl"}
    assert all(row["why"].startswith("pip: ") and "no-such.whl" in row["why"] for row in result["rows"])
    assert "trips_per_s" not in result["rows"][0]
    peers.show(result)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("no-such.whl") == 1  # one reason for all arrangements
    assert f"rm -r {tmp_path / 'venvs'}" in shown


def test_only_other_packages_rebuild_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    monkeypatch.setattr(peers, "_finish", lambda command, what: made.append(what))
    home = tmp_path / "pfl"
    home.mkdir()
    python = str(home / "bin" / "python")
    assert [peers.interpreter("pfl", tmp_path) for _ in range(2)] == [python, python]
    assert made == ["venv", "pip"]
    monkeypatch.setitem(peers.PACKAGES, "pfl", ("pfl==0.0",))
    peers.interpreter("pfl", tmp_path)
    assert made == ["venv", "pip"] * 2
    assert peers.interpreter("torch", tmp_path) == sys.executable


def test_a_folder_that_is_no_environment_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "_finish", lambda command, what: None)
    (tmp_path / "pfl").mkdir()
    (tmp_path / "pfl" / "setup.py").touch()
    with pytest.raises(ConfigError, match="pfl exists and is not an environment; name another folder"):
        peers.run(only="pfl", settings="flute", venvs=tmp_path)
    (tmp_path / "pfl" / "pyvenv.cfg").touch()
    assert peers.interpreter("pfl", tmp_path) == str(tmp_path / "pfl" / "bin" / "python")


def test_the_folder_of_environments_may_be_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[Path] = []

    def interpreter(framework: str, folder: Path) -> str:
        folders.append(folder)
        raise RunError("none")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "interpreter", interpreter)
    peers.run(only="pfl", settings="flute", venvs=Path("envs"))
    assert folders == [tmp_path / "envs"]  # programs start in another folder, so their paths are absolute


def test_a_failed_program_has_a_row_with_its_last_line(
    digits: peers.Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "interpreter", lambda framework, folder: sys.executable)
    monkeypatch.setattr(peers, "_START", "raise RuntimeError('no {name} here')")
    result = peers.run(only="flsim", settings="flute", venvs=tmp_path)
    assert {row["why"] for row in result["rows"]} == {"RuntimeError: no flsim here"}


def test_a_program_may_print_nothing_for_as_long_as_its_measurement_takes(
    digits: peers.Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """edgefl's program reports its models only when it ends."""
    monkeypatch.setattr(peers, "PATIENCE_S", 0.01)
    monkeypatch.setattr(peers, "interpreter", lambda framework, folder: sys.executable)
    printing = (
        "import json, time; time.sleep(0.3); [print(json.dumps({{'trips': n, 'at_s': n}})) for n in (1, 2)]"
    )
    monkeypatch.setattr(peers, "_START", printing)
    (row,) = peers.run(True, only="edgefl", settings="flute", seconds=60.0, venvs=tmp_path)["rows"]
    assert (row["why"], row["trips_per_s"]) == ("", 1.0)


def test_a_single_turn_has_no_spread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    row = {"why": "", "version": "1", "trips_per_s": 5.0, "spread": 0.0, "start_s": 1.0, "peak_mib": 9.0}
    host = {"cpu": "x", "cores": 1, "load_1min": 0.5}
    result = {"host": host, "seconds": 1.0, "venvs": "v", "rows": [CASE._asdict() | row]}
    for repetitions in (1, 3):
        peers.show(result | {"repetitions": repetitions})
        assert ("0.0%" in capsys.readouterr().out) == (repetitions > 1)


def test_the_load_is_read_before_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = [0.25]

    def interpreter(framework: str, folder: Path) -> str:
        load[0] = 9.0
        raise RunError("none")

    monkeypatch.setattr("os.getloadavg", lambda: (load[0], 0.0, 0.0))
    monkeypatch.setattr(peers, "interpreter", interpreter)
    found = peers.run(only="pfl", settings="flute", venvs=tmp_path)
    assert found["host"]["load_1min"] == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "pfl,plato"], "--only: name 'plato' not found"),
        (["--settings", "femnist"], "--settings: name 'femnist' not found"),
    ],
)
def test_unknown_names_are_refused(options: list[str], message: str, edgefl: Shell) -> None:
    assert message in edgefl.refuses(2, "bench", "peers", *options)
    with pytest.raises(ConfigError, match="--only"):
        peers.chosen("--only", "", ["edgefl"])
