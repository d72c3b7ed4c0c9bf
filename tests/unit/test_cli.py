"""The command line: what each command calls, prints and refuses, and its exit code."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import typer
from rich.text import Text
from shell import Shell

from edgefl.cli import app, command_tree, main
from edgefl.errors import ConfigError, FolderTaken, RunError
from edgefl.host.verdict import Conditions, HeldVerdict
from edgefl.results.tables import PlainConsole, table

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
    "stop_reason": "versions",
    "evaluated_version": 12,
    "staleness": {"mean": 1.5, "max": 4},
    "model_error_factor": {"pi-4": 1.3},
    "fidelity": {
        "median_abs_error": 0.001,
        "p95_abs_error": 0.004,
        "valid": True,
        "reasons": [],
        "worst": None,
        "warnings": [],
    },
    "aggregation": {"backend": "c", "gbytes_per_s": 12.5},
    "processes": 2,
    "trips": {"discarded": 0, "dropped": 0, "lost": 0, "open": 0},
    "slow_phones": {"accuracy": None, "applied_weight": 0.5},
    "metrics": {},
    "on_clients": None,
    "incidents": {},
    "no_progress": "",
    "phase": {"warning": ""},
    "nodes": [],
    "real_devices": [],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment, a run's folder ``old``, and a folder ``full`` with an unrelated file."""
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
def runs(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A supervisor that only writes the resolved experiment."""

    def finish(experiment: Any, folder: Path, *_: Any, **__: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text("")
        return SimpleNamespace(summary=lambda: SUMMARY)

    run = Mock(side_effect=finish)
    stand_in(monkeypatch, "edgefl.run.supervisor", run=run)
    return run


def test_run_calls_the_supervisor_with_the_checked_experiment(here: Path, runs: Mock, edgefl: Shell) -> None:
    (here / "o").mkdir()  # an empty folder is accepted
    changes = ["--set", "seed=2", "--set", "name=n", "--seed", "3", "--clock", "wall"]
    assert edgefl.shows("run", "e.toml", *changes, "--out", "o", "-q") == ""
    [((experiment, folder, quiet, base, page), more)] = runs.call_args_list
    assert (experiment.seed, experiment.name, experiment.clock.kind) == (3, "n", "wall")
    assert (folder, quiet, base, page, more) == (Path("o"), True, here, None, {"hosts": None})


def test_each_run_gets_a_new_folder(here: Path, runs: Mock) -> None:
    for _ in range(3):
        assert main(["run", "e.toml", "-q", "--set", "name=mine"]) == 0
    folders = [each.args[1] for each in runs.call_args_list]
    assert len(set(folders)) == 3
    assert all(str(folder).startswith("runs/mine-2") for folder in folders)


def test_two_runs_started_at_the_same_time_get_two_folders(here: Path, runs: Mock) -> None:
    finish = runs.side_effect

    def slower(experiment: Any, folder: Path, *more: Any, **_: Any) -> Any:
        if runs.call_count == 1:  # another process was faster
            folder.mkdir(parents=True)
            raise FolderTaken(f"{folder}: taken")
        return finish(experiment, folder, *more)

    runs.side_effect = slower
    assert main(["run", "e.toml", "-q"]) == 0
    assert len({each.args[1] for each in runs.call_args_list}) == 2
    assert main(["run", "e.toml", "-q", "--out", "full"]) == 2


def test_run_prints_strategy_accuracy_and_fidelity(here: Path, runs: Mock, edgefl: Shell) -> None:
    out = edgefl.fits("run", "e.toml", "--out", "o")
    fidelity = "VALID, error median 0.10%, p95 0.40%"
    model = "within a factor of 1.3 (90%)"
    for words in ("fedbuff, wall clock, seed 3", "81.2%, loss 0.5", fidelity, model, "12.5"):
        assert words in out


def test_run_names_the_worst_phase_and_device(
    here: Path, runs: Mock, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = {"device": "pixel-4", "phase": "compute", "median_error": 0.57, "p95_abs_error": 2.52}
    judged = {**SUMMARY["fidelity"], "worst": worst, "warnings": []}
    monkeypatch.setitem(SUMMARY, "fidelity", judged)
    named = "training of pixel-4: median +57.00%, p95 252.00%"
    out = edgefl.fits("run", "e.toml", "--out", "o")
    assert named in out
    assert "warning" not in out
    monkeypatch.setitem(SUMMARY, "fidelity", {**judged, "warnings": ["one", "other"]})
    assert "warning: one; 1 more" in " ".join(edgefl.shows("run", "e.toml").split())


def test_an_invalid_emulation_is_reported_even_if_quiet(
    here: Path, runs: Mock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["median error 50.0%, at most 5% is allowed", "other processes used 60% of the host", "more"]
    judged = {**SUMMARY["fidelity"], "median_abs_error": 0.5, "valid": False, "reasons": reasons}
    monkeypatch.setitem(SUMMARY, "fidelity", judged)
    assert main(["run", "e.toml", "-q"]) == 3
    assert f"INVALID: {'; '.join(reasons[:2])}; see" in capsys.readouterr().err
    assert main(["run", "e.toml", "-q", "--accept-invalid"]) == 0
    assert "INVALID" in capsys.readouterr().err
    monkeypatch.setitem(SUMMARY, "clock", "virtual")
    assert main(["run", "e.toml"]) == 3
    assert "INVALID, error median" in capsys.readouterr().out


def test_a_run_without_participations_left_says_why_it_ended(
    here: Path, runs: Mock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUMMARY, "stop_reason", "participations")
    assert main(["run", "e.toml", "-q"]) == 0
    assert "[privacy] allows too few clients to take part in another version" in capsys.readouterr().err


def test_computed_times_are_not_called_measured(
    here: Path, runs: Mock, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUMMARY, "clock", "virtual")
    out = edgefl.shows("run", "e.toml")
    assert "times computed, not enforced" in out
    assert "error median" not in out
    monkeypatch.setitem(SUMMARY, "fidelity", {**SUMMARY["fidelity"], "median_abs_error": None})
    assert "no trip was timed" in edgefl.shows("run", "e.toml")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run none.toml", "none.toml: no such file"),
        ("run .", ".: this is a folder; expected a TOML file"),
        ("run e.toml --out old", "--out old holds a run; name another folder, or carry on: edgefl resume"),
        ("run e.toml --out full", "--out full is not empty; expected a new or empty folder"),
        ("run e.toml --out e.toml", "--out e.toml is a file; expected a new or empty folder"),
        (f"run e.toml --out {'x' * 300}", f"{'x' * 59}…: the name is too long for the file system"),
        ("run e.toml --out ''", "DIR '': must be the name of a folder"),
        ("run e.toml --set lr=1", "--set lr=1: unknown key 'lr'; did you mean 'training.lr'?"),
        ("run e.toml --set nonsense", "--set 'nonsense': expected KEY=VALUE"),
        ("run e.toml --clock sun", "--clock: clock.kind: must be 'virtual' or 'wall', got 'sun'"),
        ("run e.toml --seed -1", "--seed: seed: must be a whole number from 0"),
        ("run e.toml --seed x", "Invalid value for '--seed'"),
        ("run e.toml --sed 1", "No such option"),
        ("run", "Missing argument 'FILE'; see: edgefl run --help"),
        ("run e.toml f.toml", "Got unexpected extra argument"),
        ("rnu", "No such command 'rnu'"),
        ("resume nowhere", "nowhere: no such folder"),
        ("resume e.toml", "e.toml is a file; expected the folder of a run"),
        ("resume .", ". holds no run (experiment.toml is missing)"),
        ("report nowhere", "nowhere: no such folder"),
        ("compare nowhere", "nowhere: no such folder"),
        ("compare", "Missing argument 'DIR'; see: edgefl compare --help"),
        ("compare . --out ''", "DIR '': must be the name of a folder"),
        ("verify old --code ''", "DIR '': must be the name of a folder"),
        ("reproduce fedbuff --out ''", "DIR '': must be the name of a folder"),
        ("reproduce fedbuff --out e.toml", "--out e.toml is a file; expected a folder"),
        ("export old --out e.toml", "--out e.toml is a file; expected a folder"),
        ("profiles PI4", "profile 'PI4' not found; did you mean 'pi-4'? available: 3g, "),
        ("profiles pi4", "profile 'pi4' not found; did you mean 'pi-4'? available: 3g, "),
        ("profiles ./x.toml", "x.toml: no such file"),
        ("profiles check", "Missing argument 'FILE'; see: edgefl profiles check --help"),
        ("profiles pi-4 pi-5", "Got unexpected extra argument"),
        ("profiles --json pi-4", "profiles --json lists all profiles; for one, put --json after"),
        ("profiles imprt fedscale x", "No such command 'imprt'. Did you mean 'import'?"),
        ("profiles import fedscal x", "format 'fedscal' not found; did you mean 'fedscale'?"),
        ("profiles export 3g power-profile", "format 'power-profile' is read-only"),
        ("profiles export lte mahimahi --way in", "Invalid value for '--way'"),
        ("bench speed", "No such command 'speed'"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line_with_exit_code_2(
    here: Path, runs: Mock, edgefl: Shell, command: str, words: str
) -> None:
    assert edgefl.refuses(2, *shlex.split(command)).startswith(words)
    runs.assert_not_called()


@pytest.mark.parametrize("value", ["0", "x", "1.5"])
def test_a_wrong_number_on_the_command_line_is_named(here: Path, edgefl: Shell, value: str) -> None:
    assert value in edgefl.refuses(2, "sweep", "e.toml", "--jobs", value).partition("; see: ")[0]


@pytest.mark.parametrize(
    "command",
    [
        "chaos e.toml --every",
        "bench peers --seconds",
        "profiles from --core cortex-a76 --mhz",
        "profiles from --core cortex-a76 --mhz 2000 --ram-gib",
        "profiles fit rows.csv --out p.toml --apart",
        "profiles fit rows.csv --out p.toml --spread",
    ],
)
def test_a_number_that_is_not_finite_is_refused(here: Path, edgefl: Shell, command: str) -> None:
    *words, option = shlex.split(command)
    assert option in edgefl.refuses(2, *words, option, "nan")
    assert not (here / "p.toml").exists()


def test_a_run_of_another_user_is_refused_in_one_line(
    here: Path, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "theirs").mkdir()
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    for command in ("report", "compare"):
        assert edgefl.refuses(2, command, "theirs").startswith("theirs: permission denied")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("strategy.name: 'x' not found"), 2, "strategy.name: 'x' not found"),
        (RunError("the server\ndied"), 1, "the server died"),
        (OSError(28, "No space left on device"), 1, "no space left on the device (EDGEFL_TRACEBACK=1"),
        (SystemError("no exception set"), 1, "out of memory: no exception set (EDGEFL_TRACEBACK=1"),
        (KeyboardInterrupt(), 130, "interrupted before anything was written"),
    ],
)
def test_an_error_of_a_run_has_one_line_and_its_exit_code(
    here: Path, runs: Mock, edgefl: Shell, error: BaseException, code: int, words: str
) -> None:
    runs.side_effect = error
    assert edgefl.refuses(code, "run", "e.toml", "--out", "o").startswith(words)


def test_a_bug_keeps_its_traceback(here: Path, runs: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        main(["run", "e.toml"])
    monkeypatch.setenv("EDGEFL_TRACEBACK", "1")
    runs.side_effect = lambda *_, **__: Path("/nowhere/at/all").read_text()
    with pytest.raises(FileNotFoundError):
        main(["run", "e.toml"])


@pytest.mark.parametrize("command", [["run", "e.toml", "--out", "new"], ["resume", "old"]])
def test_ctrl_c_names_the_command_that_resumes_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell, command: list[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        (here / "new").mkdir()
        (here / "new" / "experiment.toml").touch()
        raise KeyboardInterrupt

    stand_in(monkeypatch, "edgefl.run.supervisor", run=interrupted, resume=interrupted)
    assert edgefl.refuses(130, *command) == f"interrupted; carry on with: edgefl resume {command[-1]}"


def test_ctrl_c_outside_a_run_prints_interrupted(monkeypatch: pytest.MonkeyPatch, edgefl: Shell) -> None:
    monkeypatch.setattr("edgefl.cli.doctor.examine", Mock(side_effect=KeyboardInterrupt))
    assert edgefl.refuses(130, "doctor") == "interrupted"


def test_resume_and_compare_pass_arguments(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    calls, beside = Mock(), Mock(return_value="a beside b")
    calls.return_value.summary.return_value = SUMMARY
    stand_in(monkeypatch, "edgefl.run.supervisor", resume=calls)
    edgefl.shows("resume", "old", "-q")
    assert calls.call_args_list == [call(Path("old"), True, None, hosts=None)]
    edgefl.shows("resume", "old", "-q", "--web")
    assert calls.call_args.args[2].fileno() == -1  # the page's socket, closed again
    with monkeypatch.context() as bad:
        bad.setitem(SUMMARY, "fidelity", {**SUMMARY["fidelity"], "valid": False})
        assert edgefl.refuses(3, "resume", "old", "-q").startswith("INVALID: ")
        assert edgefl.refuses(0, "resume", "old", "-q", "--accept-invalid").startswith("INVALID: ")
    stand_in(monkeypatch, "edgefl.results.sweep", compare_folders=beside)
    for arguments in (("old", "old", "--out", "c", "--target", "0.5"), ("old",)):
        assert edgefl.shows("compare", *arguments) == "a beside b\n"
    two, one = call([Path("old"), Path("old")], Path("c"), 0.5), call([Path("old")], None, None)
    assert beside.call_args_list == [two, one]


def test_report_and_trace_print_paths(here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell) -> None:
    for name, file in (("report", "report.html"), ("trace", "trace.json")):
        write = {f"write_{name}": lambda folder, *_, file=file: folder / file}
        stand_in(monkeypatch, f"edgefl.results.{name}", **write)
        assert edgefl.shows(name, "old") == f"old/{file}\n"


@pytest.mark.parametrize("name", ["record.sqlite", "summary.json", "experiment.toml"])
def test_report_replaces_only_pages(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell, name: str
) -> None:
    """`edgefl report runs/a --out runs/a/record.sqlite` would destroy the run."""
    stand_in(monkeypatch, "edgefl.results.report", write_report=lambda _, out: out)
    (here / "old" / name).write_text("SQLite")
    assert edgefl.refuses(2, "report", "old", "--out", f"old/{name}") == (
        f"--out old/{name}: the file exists and is not an HTML page; name another file"
    )
    (here / "old" / "second.html").write_text("<!DOCTYPE html>\n")
    (here / "empty").touch()
    for new in ("old/second.html", "page", "empty", "/dev/null"):
        assert edgefl.shows("report", "old", "--out", new) == f"{new}\n"


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INVALID"])
@pytest.mark.parametrize("what", ["aggregate", "ingest", "spawn", "fidelity"])
def test_bench_writes_its_result(
    here: Path, monkeypatch: pytest.MonkeyPatch, what: str, verdict: str
) -> None:
    result = {"verdict": verdict}
    asked, shown = Mock(return_value=result), Mock()
    stand_in(monkeypatch, f"edgefl.lab.{what}", run=lambda quick, say: asked(quick), show=shown)
    code = int(what == "fidelity" and verdict != "PASS")
    assert main(["bench", what, "--json", "f.json", "--quick"]) == code
    assert main(["bench", what]) == code
    assert (asked.call_args_list, shown.call_args_list) == ([call(True), call(False)], [call(result)] * 2)
    assert json.loads((here / "f.json").read_text()) == result


@pytest.mark.parametrize("file", ["f.png", "f.svg"])
def test_bench_refuses_a_file_that_a_picture_would_replace(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell, file: str
) -> None:
    calls = Mock()
    stand_in(monkeypatch, "edgefl.lab.aggregate", run=calls, draw=calls)
    assert edgefl.refuses(2, "bench", "aggregate", "--json", file) == (
        f"--json {file}: a picture is written to this file; name another"
    )
    calls.assert_not_called()


def test_a_full_disk_leaves_the_earlier_result_of_bench_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    (here / "f.json").write_text("earlier")
    stand_in(monkeypatch, "edgefl.lab.ingest", run=Mock(return_value={}), show=Mock())
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert edgefl.refuses(1, "bench", "ingest", "--json", "f.json") == (
        "f.json cannot be written: No space left on device"
    )
    assert (here / "f.json").read_text() == "earlier"


def test_bench_draws_no_pictures_beside_a_device(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, run = Mock(), Mock(return_value={})
    stand_in(monkeypatch, "edgefl.lab.aggregate", run=run, show=Mock(), draw=drawn)
    assert main(["bench", "aggregate", "--json", "/dev/null"]) == 0
    drawn.assert_not_called()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("full", "is a folder; expected a file"),
        ("nowhere/f.json", "is not an existing folder"),
        ("e.toml/f.json", "is not an existing folder"),
        ("old/summary.json", "in the folder of a run"),
    ],
)
@pytest.mark.parametrize("what", ["ingest", "fidelity"])
def test_bench_checks_its_output_file_before_it_measures(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell, what: str, file: str, says: str
) -> None:
    calls = Mock()
    stand_in(monkeypatch, f"edgefl.lab.{what}", run=calls)
    said = edgefl.refuses(2, "bench", what, "--json", file)
    assert said.startswith(f"--json {file}")
    assert says in said
    calls.assert_not_called()


def test_bench_needs_a_folder_in_which_it_can_replace_the_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    (here / "f.json").touch()
    stand_in(monkeypatch, "edgefl.lab.ingest", run=Mock(return_value={}), show=Mock())
    monkeypatch.setattr("os.access", lambda place, _: Path(place).suffix == ".json")
    assert edgefl.refuses(2, "bench", "ingest", "--json", "f.json") == "--json f.json: cannot be written"


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: edgefl")


def commands(found: Any, name: str = "") -> Iterator[str]:
    yield name
    for each in getattr(found, "commands", {}).values():
        yield from commands(each, f"{name} {each.name}".strip())


@pytest.mark.parametrize("command", [*commands(typer.main.get_command(app))])
def test_help_fits_80_columns_without_cutting_a_sentence(edgefl: Shell, command: str) -> None:
    said = edgefl.fits(*command.split(), "--help")
    assert f"Usage: edgefl {command}".strip() in said
    assert not re.findall(r".*\w\.\.\.$", said, flags=re.MULTILINE)


def helps(command: Any) -> list[str]:
    inner = getattr(command, "commands", {}).values()
    own = command.get_help(command.context_class(command))
    return [own, *(text for each in inner for text in helps(each))]


def test_a_command_loaded_alone_has_the_same_help_as_among_all() -> None:
    everything = command_tree("no such command")
    assert len(everything.commands) > 20
    for name, whole in everything.commands.items():
        alone = command_tree(name)
        assert list(alone.commands) == [name]
        assert helps(alone.commands[name]) == helps(whole)


def test_the_version_is_one_line(edgefl: Shell) -> None:
    assert edgefl.fits("--version").startswith("edgefl")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def test_control_characters_in_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, tables, notes and the live view contain names of files, keys, values and profiles."""
    monkeypatch.chdir(tmp_path)
    Path(f"{HOSTILE}.toml").write_text("seed = 1")
    quoted = HOSTILE.replace("\x1b", "\\u001b").replace("\x07", "\\u0007").replace("\x9b", "\\u009b")
    Path("key.toml").write_text(f'[fleet]\ndevices = {{ "{quoted}" = 1 }}\n[stop]\nversions = 1\n')
    for arguments in (
        ["run", f"{HOSTILE}.toml"],
        ["run", "key.toml"],
        ["run", "key.toml", "--set", HOSTILE],
        ["profiles", HOSTILE],
        ["predict", HOSTILE, "--device", "pi-4"],
        [HOSTILE],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert "owned" in said
        assert not set("\x1b\x07\x9b") & set(said), arguments
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=80)
    console.print(table(("name",), [(HOSTILE,)], title=HOSTILE), Text(HOSTILE, "bold"))
    left = re.sub("\x1b\\[[0-9;]*m", "", console.file.getvalue())  # rich's own colours
    assert "owned" in left
    assert not set("\x1b\x07\x9b") & set(left)


def program_result(exit_code: int = 0, valid: bool = True) -> SimpleNamespace:
    held = HeldVerdict(0.1, 0.1, () if valid else ("stolen",), Conditions())
    phones = [SimpleNamespace(wall_s=1.0, why="")]
    given = {"exit_code": exit_code, "valid": valid, "phones": phones, "held": held}
    return SimpleNamespace(**given, time_scale=1.0, model_errors=(), unjudged="")


@pytest.mark.parametrize(
    ("command", "valid", "options", "code"),
    [(0, True, [], 0), (0, False, [], 3), (0, False, ["--accept-invalid"], 0), (7, False, [], 7)],
)
def test_exec_returns_the_exit_code_of_its_command_or_of_the_verdict(
    monkeypatch: pytest.MonkeyPatch, command: int, valid: bool, options: list[str], code: int
) -> None:
    monkeypatch.setattr("edgefl.programs.run", lambda *_: program_result(command, valid))
    assert main(["exec", "-q", *options, "--device", "pi-4", "true"]) == code


def test_exec_notes_that_python_runs_as_interpreted_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note is omitted if the speed was given as a class of code or as a share, or is not limited."""
    monkeypatch.setattr("edgefl.programs.run", lambda *_: program_result())
    given = (["--share", "0.2"], ["--like", "interpreter"], ["--throttle", "off"])
    for options, told in (([], True), *((each, False) for each in given)):
        assert main(["exec", *options, "--device", "pi-4", "python3", "x.py"]) == 0
        assert ("if it trains with torch, add --like torch:MODEL" in capsys.readouterr().err) is told


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from edgefl.cli import app, main
for line in ("run e.toml", "resume old", "predict mlp --device pi-4", "verify old", "measure"):
    assert main(line.split()) == 2
"""


def test_without_torch_a_command_names_the_package_to_install(here: Path) -> None:
    """The commands run in a process in which torch cannot be imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    says = "edgefl: .* needs torch, which is not installed: pip install torch"
    assert all(re.match(says, each) for each in lines)
