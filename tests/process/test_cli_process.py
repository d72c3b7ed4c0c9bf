"""Tests of the command line as a process: its imports, closed pipes, signals and colours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from edgefl.cli import main
from edgefl.processes import command_of, finding_edgefl

PYTHON = [sys.executable, "-W", "error"]
EDGEFL = [*PYTHON, "-m", "edgefl"]
HELP = [["--help"], ["run", "--help"], ["bench", "--help"], ["--version"], ["rnu"]]
HEAVY = {"torch", "numba", "numpy", "matplotlib", "sklearn", "scipy", "zmq", "rich", "psutil"}
LIBRARIES = {"torch", "numba", "matplotlib", "sklearn", "zmq"}
ONE = "[fleet]\ndevices = { pi-4 = 1 }\n[stop]\nversions = 1\n"


def edgefl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    return subprocess.run(
        [*EDGEFL, *arguments], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy_and_an_error_in_the_file_no_training_library(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(ONE.replace("pi-4", "pi4"))
    body = (
        "import sys\n"
        "from edgefl.cli import main\n"
        f"for command in {HELP!r}: main(command)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
        f"main(['run', {str(tmp_path / 'e.toml')!r}])\n"
        f"print(sorted({LIBRARIES!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([*PYTHON, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]
    assert "did you mean 'pi-4'" in done.stderr


def printing_to(stdout: IO[str] | None, command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["profiles", "--json"], ["--help"]])
def test_a_closed_pipe_ends_a_command_silently(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        assert printing_to(unread, [*EDGEFL, *arguments]) == (1, "")


def test_unwritable_output_is_reported_and_closed_output_is_no_error() -> None:
    with Path("/dev/full").open("w") as full:
        code, err = printing_to(full, [*EDGEFL, "profiles", "pixel-4", "--json"])
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("edgefl: no space left on the device")
    assert printing_to(None, ["sh", "-c", 'exec "$@" >&-', "sh", *EDGEFL, "profiles", "pixel-4"]) == (0, "")


INTERRUPTED = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored

def run(experiment, folder, *_, **__):
    folder.mkdir()
    (folder / "experiment.toml").touch()
    signal.raise_signal(signal.SIGINT)

sys.modules["edgefl.run.supervisor"] = types.SimpleNamespace(run=run)
from edgefl.cli import main
sys.exit(main(["run", "e.toml", "--out", "o"]))
"""


def test_ctrl_c_ends_a_run_with_one_line(tmp_path: Path) -> None:
    """A stand-in for the supervisor makes the run's folder and interrupts itself."""
    (tmp_path / "e.toml").write_text(ONE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*PYTHON, "-c", INTERRUPTED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "edgefl: interrupted; carry on with: edgefl resume o\n")


EARLY = """
import os, signal, sys

number = {number}
signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

class Hurried:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Hurried())
from edgefl.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_during_the_imports_of_a_command_is_one_line(number: signal.Signals, code: int) -> None:
    body = EARLY.replace("{number}", str(int(number)))
    done = subprocess.run([*PYTHON, "-c", body, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "edgefl: interrupted\n")


LATE = """
import atexit, os, signal, sys
from edgefl.__main__ import main
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(main())
"""


def test_ctrl_c_after_the_command_changes_nothing() -> None:
    done = subprocess.run([*PYTHON, "-c", LATE, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_gets_no_colours_and_at_most_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = edgefl("profiles").stdout
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) == 80
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["profiles"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_output_in_ascii_has_question_marks_and_an_error_has_escapes(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(ONE)
    done = edgefl("profiles", "pixel-4", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "pixel-4" in done.stdout
    assert "?" in done.stdout
    named = edgefl("run", str(tmp_path / "e.toml"), "--set", "name=Läufe", LC_ALL="C", PYTHONUTF8="0")
    assert named.returncode == 2
    assert re.fullmatch(r"edgefl: .*: this locale cannot write the name; set LC_ALL=C.UTF-8\n", named.stderr)
    wrong = edgefl("resume", "Läufe", PYTHONUTF8="1", PYTHONIOENCODING="ascii:backslashreplace")
    assert wrong.returncode == 2
    assert r"L\xe4ufe: no such folder" in wrong.stderr


OWN = """
import os


def train(model, examples, context):
    assert "PYTHONSAFEPATH" not in os.environ
    import beside
    beside.train(model, examples, context)
"""
BESIDE = """
def train(model, examples, context):
    for x, y in examples.batches():
        for weights in model.parameters():
            weights.data += 0.01
        context.step(len(y))
"""
SMALL = """
[fleet]
devices = { pi-4 = 2 }
[data]
name = "digits"
[training]
function = "own:train"
steps = 1
[stop]
trips = 4
"""


@pytest.mark.parametrize("clock", [pytest.param("wall", marks=pytest.mark.slow), "virtual"])
def test_files_beside_an_experiment_replace_no_installed_modules(
    clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training function still imports a module beside it when it is called."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("random", "types", "queue", "http", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    files = {"own.py": OWN, "beside.py": BESIDE, "small.toml": f'{SMALL}[clock]\nkind = "{clock}"\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = command_of("edgefl", "run", "small.toml", "--out", "run", "--web", "--accept-invalid")
    env = finding_edgefl(os.environ)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
