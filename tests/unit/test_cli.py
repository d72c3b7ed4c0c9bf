"""The command line: what each command calls, what it refuses and how, and with which exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edgefl.cli import main
from edgefl.errors import ConfigError, RunError

EXPERIMENT = "[fleet]\ndevices = { pi-4 = 2 }\n[stop]\nversions = 3\n"
SUMMARY: dict[str, Any] = {
    "name": "",
    "strategy": "fedbuff",
    "clock": "wall",
    "seed": 3,
    "versions": 3,
    "client_trips": 30,
    "accuracy": 0.8125,
    "loss": 0.5,
    "emulated_s": 12.0,
    "wall_s": 13.0,
    "model_sha256": "0123456789abcdef" * 4,
    "staleness": {"mean": 1.5, "max": 4},
    "fidelity": {"median_abs_error": 0.001, "p95_abs_error": 0.004, "valid": True},
    "aggregation": {"backend": "c", "gbytes_per_s": 12.5},
}


class Calls(list[tuple[Any, ...]]):
    """What a stand-in was called with; ``then`` says what it does."""

    then: Callable[..., Any] = staticmethod(lambda *_: None)

    def __call__(self, *arguments: Any) -> Any:
        self.append(arguments)
        return self.then(*arguments)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment, an ``old`` run, and a folder that is ``full`` of something else."""
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    for file in ("old/experiment.toml", "full/x"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, leaf = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(package), leaf, module, raising=False)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A supervisor that writes the resolved experiment and is done."""

    def finish(experiment: Any, folder: Path, *_: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text("")
        return SimpleNamespace(summary=lambda: SUMMARY)

    calls = Calls()
    calls.then = finish
    stand_in(monkeypatch, "edgefl.run.supervisor", run=calls)
    return calls


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The one line on standard error; nothing is on standard output."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("edgefl: ")
    assert err.count("\n") == 1
    return err.removeprefix("edgefl: ").removesuffix("\n")


# ---- run ---------------------------------------------------------------------------------------


def test_run_calls_the_supervisor_with_the_checked_experiment(
    here: Path, runs: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "o").mkdir()  # an empty folder will do
    changes = ["--set", "seed=2", "--set", "name=n", "--seed", "3", "--clock", "wall"]
    assert main(["run", "e.toml", *changes, "--out", "o", "-q"]) == 0
    [(experiment, folder, quiet, base)] = runs
    assert (experiment.seed, experiment.name, experiment.clock.kind) == (3, "n", "wall")
    assert (folder, quiet, base) == (Path("o"), True, here)
    assert capsys.readouterr() == ("", "")


def test_runs_go_to_a_folder_of_their_own(here: Path, runs: Calls) -> None:
    for _ in range(3):
        assert main(["run", "e.toml", "-q", "--set", "name=mine"]) == 0
    folders = [call[1] for call in runs]
    assert len(set(folders)) == 3
    assert all(str(folder).startswith("runs/mine-2") for folder in folders)


def test_run_says_how_it_went(here: Path, runs: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "e.toml", "--out", "o"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "fedbuff, wall clock, seed 3",
        "0.8125, 0.5",
        "valid: error median 0.10%, p95 0.40%",
        "12.5",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_an_invalid_emulation_is_said_even_if_quiet(
    here: Path, runs: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUMMARY, "fidelity", {"median_abs_error": 0.5, "p95_abs_error": 0.9, "valid": False})
    assert main(["run", "e.toml", "-q"]) == 0
    assert "INVALID" in capsys.readouterr().err
    monkeypatch.setitem(SUMMARY, "fidelity", None)
    assert main(["run", "e.toml"]) == 0
    assert "not measured" in capsys.readouterr().out


def test_times_that_are_computed_are_not_called_measured(
    here: Path, runs: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUMMARY, "clock", "virtual")
    assert main(["run", "e.toml", "--out", "good"]) == 0
    out = capsys.readouterr().out
    assert "times computed, not enforced" in out
    assert "error median" not in out
    monkeypatch.setitem(SUMMARY, "fidelity", {**SUMMARY["fidelity"], "valid": False})
    assert main(["run", "e.toml", "--out", "bad"]) == 0
    assert "INVALID: error median" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none.toml"], "none.toml: no such file"),
        (["run", "."], ".: a folder, expected a TOML file"),
        (
            ["run", "e.toml", "--out", "old"],
            "--out old: holds a run; give another folder, or carry on: edgefl resume old",
        ),
        (["run", "e.toml", "--out", "full"], "--out full: not empty, expected a new or empty folder"),
        (["run", "e.toml", "--out", "e.toml"], "--out e.toml: a file, expected a new or empty folder"),
        (["run", "e.toml", "--out", "x" * 300], f"{'x' * 59}…: a name too long for the file system"),
        (["run", "e.toml", "--out", ""], "--out '': no name, expected a folder"),
        (["run", "e.toml", "--set", "lr=1"], "--set lr=1: unknown key 'lr'; did you mean 'training.lr'?"),
        (["run", "e.toml", "--set", "nonsense"], "--set 'nonsense': expected KEY=VALUE"),
        (
            ["run", "e.toml", "--clock", "sun"],
            "--clock: clock.kind: must be 'virtual' or 'wall', got 'sun'",
        ),
        (["run", "e.toml", "--seed", "-1"], "--seed: seed: must be a whole number from 0"),
        (["run", "e.toml", "--seed", "x"], "Invalid value for '--seed'"),
        (["run", "e.toml", "--sed", "1"], "No such option"),
        (["run"], "Missing argument 'FILE'; see: edgefl run --help"),
        (["run", "e.toml", "f.toml"], "Got unexpected extra argument"),
        (["rnu"], "No such command 'rnu'"),
        (["resume", "nowhere"], "nowhere: no such folder"),
        (["resume", "e.toml"], "e.toml: a file, expected the folder of a run"),
        (["resume", "."], ".: no run in it (experiment.toml is missing)"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["compare", "nowhere"], "nowhere: no such folder"),
        (["compare"], "Missing argument 'DIR'; see: edgefl compare --help"),
        (["compare", ".", "--out", ""], "--out '': no name, expected a folder"),
        (["reproduce", "fedbuff", "--out", ""], "--out '': no name, expected a folder"),
        (["reproduce", "fedbuff", "--out", "e.toml"], "--out e.toml: a file, expected a folder"),
        (["profiles", "pi4"], "profile 'pi4' not found; did you mean 'pi-4'? have: 3g, "),
        (["profiles", "./x.toml"], "x.toml: no such file"),
        (["profiles", "check"], "Missing argument 'FILE'; see: edgefl profiles check --help"),
        (["profiles", "pi-4", "pi-5"], "Got unexpected extra argument"),
        (["profiles", "--json", "pi-4"], "profiles --json: lists all; for one profile put --json behind"),
        (["profiles", "imprt", "fedscale", "x"], "No such command 'imprt'. Did you mean 'import'?"),
        (["profiles", "import", "fedscal", "x"], "format 'fedscal' not found; did you mean 'fedscale'?"),
        (["profiles", "export", "3g", "power-profile"], "format 'power-profile' is only read"),
        (["profiles", "export", "lte", "mahimahi", "--way", "in"], "Invalid value for '--way'"),
        (["bench", "speed"], "No such command 'speed'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    here: Path, runs: Calls, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert refused(capsys, 2, *arguments).startswith(words)
    assert runs == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("strategy.name: 'x' not found"), 2, "strategy.name: 'x' not found"),
        (RunError("the server\ndied"), 1, "the server died"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device (EDGEFL_TRACEBACK=1"),
        (KeyboardInterrupt(), 130, "interrupted before anything was written"),
    ],
)
def test_errors_of_a_run(
    here: Path, runs: Calls, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    runs.then = fail
    assert refused(capsys, code, "run", "e.toml", "--out", "o").startswith(words)


def test_a_bug_keeps_its_traceback(here: Path, runs: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.then = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        main(["run", "e.toml"])
    monkeypatch.setenv("EDGEFL_TRACEBACK", "1")
    runs.then = lambda *_: Path("/nowhere/at/all").read_text()
    with pytest.raises(FileNotFoundError):
        main(["run", "e.toml"])


@pytest.mark.parametrize("command", [["run", "e.toml", "--out", "new"], ["resume", "old"]])
def test_ctrl_c_says_how_to_carry_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        (here / "new").mkdir()
        (here / "new" / "experiment.toml").touch()
        raise KeyboardInterrupt

    stand_in(monkeypatch, "edgefl.run.supervisor", run=interrupted, resume=interrupted)
    assert refused(capsys, 130, *command) == f"interrupted; carry on with: edgefl resume {command[-1]}"


def test_ctrl_c_anywhere_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgefl.cli.doctor.examine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "edgefl: interrupted"


def test_resume_and_compare_call_what_they_should(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, beside = Calls(), Calls()
    calls.then = lambda *_: SimpleNamespace(summary=lambda: SUMMARY)
    stand_in(monkeypatch, "edgefl.run.supervisor", resume=calls)
    assert main(["resume", "old", "-q"]) == 0
    assert calls == [(Path("old"), True)]

    beside.then = lambda *_: "a beside b"
    stand_in(monkeypatch, "edgefl.results.compare", compare=beside)
    assert main(["compare", "old", "old", "--out", "c"]) == 0
    assert main(["compare", "old"]) == 0
    assert beside == [([Path("old"), Path("old")], Path("c")), ([Path("old")], None)]
    assert capsys.readouterr().out == "a beside b\na beside b\n"


@pytest.mark.parametrize(("command", "file"), [("report", "report.html"), ("trace", "trace.json")])
def test_report_and_trace_say_where_they_are(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    stand_in(monkeypatch, f"edgefl.results.{command}", **{f"write_{command}": lambda folder: folder / file})
    assert main([command, "old"]) == 0
    assert capsys.readouterr().out == f"old/{file}\n"


BENCHES = ["aggregate", "ingest", "spawn"]


@pytest.mark.parametrize("what", BENCHES)
def test_bench_measures(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    calls = Calls()
    stand_in(monkeypatch, f"edgefl.lab.{what}", run=calls)
    assert main(["bench", what, "--json", "f.json", "--quick"]) == 0
    assert main(["bench", what]) == 0
    assert calls == [(Path("f.json"), True), (None, False)]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("", "a folder, expected a file"),
        ("nowhere/f.json", "no folder"),
        ("file/f.json", "no folder"),
        ("run/summary.json", "in the folder of a run"),
    ],
)
@pytest.mark.parametrize("what", ["ingest", "fidelity"])
def test_bench_measures_nothing_that_it_could_not_write(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    what: str,
    file: str,
    says: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.toml").touch()
    calls = Calls()
    stand_in(monkeypatch, f"edgefl.lab.{what}", run=calls)
    assert main(["bench", what, "--json", str(tmp_path / file)]) == 2
    assert calls == []
    err = capsys.readouterr().err
    assert err.startswith(f"edgefl: --json {tmp_path / file}".rstrip("/"))
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("INVALID", 1)])
def test_bench_fidelity_ends_as_its_bars_say(
    monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    asked: list[Any] = []

    def measured(json: Path | None, quick: bool, **more: Any) -> dict[str, Any]:
        asked.append((json, quick, more["slowed"]))
        return {"verdict": verdict}

    stand_in(monkeypatch, "edgefl.lab.fidelity", run=measured)
    assert main(["bench", "fidelity", "--slowed", "--json", "f.json"]) == code
    assert asked == [(Path("f.json"), False, True)]


# ---- help --------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("edgefl")


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_nothing_asked_shows_help_and_fails(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: edgefl")


@pytest.mark.parametrize(
    "command",
    [
        *("", "run", "resume", "compare", "report", "trace", "verify", "reproduce"),
        *("calibrate", "doctor", "bench aggregate", "bench fidelity"),
        *("profiles", "profiles show", "profiles check", "profiles import", "profiles export"),
    ],
)
def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"Usage: edgefl {command}".strip() in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
