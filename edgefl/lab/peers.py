"""Measures the speed of edgefl and other frameworks in whole experiments with the same training and data.

Each of the other frameworks runs in an environment of its own, which this module creates with pip. The
programs in `edgefl.lab.rivals` report when each new model is complete. The speed is measured over all models
after the first one. If a framework cannot be installed or run, its row shows the reason.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from edgefl.errors import ConfigError, RunError, unknown
from edgefl.experiment import Data
from edgefl.files import cache_folder
from edgefl.host.capacity import most_workers
from edgefl.host.children import kill_tree
from edgefl.host.memory import proportional_mib
from edgefl.lab import bench
from edgefl.lab.bench import Say
from edgefl.results import tables

PACKAGES = {
    "pfl": ("pfl==0.6.0", "torch=={torch}"),
    "flower": ("flwr[simulation]==1.42.0", "torch=={torch}"),
    "flsim": ("flsim==0.1.0", "torch=={torch}"),
}
"""Packages that pip installs for each framework; ``{torch}`` is the version of torch that edgefl uses."""
FRAMEWORKS = ("edgefl", "torch", *PACKAGES)
"""Names of the frameworks. ``torch`` is the upper limit: training without a framework, in the environment of
edgefl."""
PATIENCE_S = 300.0
"""Number of seconds without a new model after which a program is stopped. edgefl reports its models only when
its measurement has ended, so the duration of the measurement is added to this limit."""
LOOK_S = 1.0
"""Seconds between two measurements of memory."""
_START = "import sys; sys.path.append({lab!r}); from rivals.with_{name} import main; main(sys.argv[1])"


class Setting(NamedTuple):
    """The fields of `rivals.task.Task` whose values come from a published experiment."""

    net: str
    data: str
    clients: int
    cohort: int
    batch_size: int
    lr: float
    steps: int | None = None
    asynchronous: bool = False


SETTINGS = {
    "pfl": Setting("cnn-pfl", "cifar-10", clients=1000, cohort=50, batch_size=10, lr=0.1),
    "flute": Setting("linear", "mnist", clients=1000, cohort=10, batch_size=10, lr=0.03),
    "fedstaleweight": Setting("cnn-groupnorm", "mnist", 15, 5, 32, 0.01, steps=1, asynchronous=True),
}
"""The settings: the CIFAR-10 benchmark of pfl-research without noise, with 50 images per client
(``image_classification/configs/baseline.yaml``); the logistic regression of FLUTE
(``experiments/cv_lr_mnist``); and the FashionMNIST setting of FedStaleWeight (Ma 2024, section 6.2), here
with the images of MNIST, which have the same size. In the last setting, frameworks without an asynchronous
mode train in rounds; the number of clients per round is the buffer size of FedStaleWeight."""


class Case(NamedTuple):
    """One framework in one setting, with the number of processes and of threads per process."""

    setting: str
    framework: str
    processes: int
    threads: int

    def __str__(self) -> str:
        shape = f"{tables.many(self.processes, 'process')} × {tables.many(self.threads, 'thread')}"
        return f"{self.setting}: {self.framework}, {shape}"


class Turn(NamedTuple):
    """Metrics of one run of a program."""

    version: str
    trips_per_s: float
    start_s: float
    """Start-up time in seconds: the time until the first new model, minus the time that this model's trips
    take at the measured speed."""
    peak_mib: float
    """Peak proportional memory (PSS), in MiB, of all processes of the program together."""


def cases(settings: Iterable[str], frameworks: Iterable[str]) -> list[Case]:
    """Return the cases to measure: for each framework, the process and thread counts that may be fastest.

    Most cases use all cores, either for processes or for threads.
    """
    cores = most_workers()
    each = {name: [(cores, 1)] for name in ("edgefl", "torch")}
    each |= {"pfl": [(1, 1), (1, cores), (cores, 1)], "flower": [(cores, 1), (1, cores)]}
    each |= {"flsim": [(1, 1), (1, cores)]}
    shapes = {name: list(dict.fromkeys(found)) for name, found in each.items()}
    return [Case(s, name, *shape) for s in settings for name in frameworks for shape in shapes[name]]


def chosen(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Return the names in the comma-separated list ``text``, or all ``known`` names if ``text`` is None.

    Raises `ConfigError` for an unknown name; the message starts with ``option``.
    """
    names = list(known) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: {unknown('name', name, known)}")
    return names


def run(
    quick: bool = False,
    *,
    only: str | None = None,
    settings: str | None = None,
    venvs: Path | None = None,
    seconds: float | None = None,
    say: Say = bench.silent,
) -> dict[str, Any]:
    """Measure all cases in turn; return plain values for `show` and a JSON file.

    ``only`` and ``settings`` are comma-separated lists of names. ``rows`` contains an entry for each case:
    the medians of the metrics of `Turn` over all turns, the ``spread`` of ``trips_per_s``, and ``why``, the
    reason if the case could not be measured.
    """
    frameworks = chosen("--only", only, FRAMEWORKS)
    wanted = cases(chosen("--settings", settings, list(SETTINGS)), frameworks)
    folder = (venvs or cache_folder() / "peers").absolute()  # the programs start in another folder
    seconds, repetitions = seconds or (10.0 if quick else 30.0), 1 if quick else 3
    here = bench.machine()  # before pip and the measurement, which themselves cause load
    pythons: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in frameworks:
        if name in PACKAGES:
            say(f"{name}: environment in {folder / name}")
        try:
            pythons[name] = interpreter(name, folder)
        except RunError as error:
            missing[name] = str(error)
    turns: dict[Case, list[Turn]] = {case: [] for case in wanted}
    why = {case: missing[case.framework] for case in wanted if case.framework in missing}
    for number in range(repetitions):
        for case in wanted:
            if case not in why:
                say(f"turn {number + 1} of {repetitions}: {case}")
                try:
                    turns[case].append(measured(case, pythons[case.framework], seconds))
                except RunError as error:
                    why[case] = str(error)
    return {
        "host": here,
        "seconds": seconds,
        "repetitions": repetitions,
        "venvs": str(folder),
        "rows": [_row(case, turns[case], why.get(case, "")) for case in wanted],
    }


def _row(case: Case, turns: Sequence[Turn], why: str) -> dict[str, Any]:
    row: dict[str, Any] = {**case._asdict(), "why": why}
    if turns:
        rate, spread = bench.median_and_spread([turn.trips_per_s for turn in turns])
        row |= {"version": turns[0].version, "trips_per_s": rate, "spread": spread}
        row |= {
            name: statistics.median(getattr(turn, name) for turn in turns) for name in ("start_s", "peak_mib")
        }
    return row


def interpreter(framework: str, folder: Path) -> str:
    """Install a framework with pip in an environment in ``folder``; return the environment's interpreter.

    An existing environment with the same packages is reused. If the installation fails, raises `RunError`
    with the last line of its output. Raises `ConfigError` if the subfolder for the environment contains
    something else, such as a copy of the framework's sources.
    """
    if framework not in PACKAGES:
        return sys.executable
    import torch

    release = torch.__version__.partition("+")[0]
    packages = [name.format(torch=release) for name in PACKAGES[framework]]
    home, stamp = folder / framework, folder / framework / "edgefl-packages.json"
    python = str(home / "bin" / "python")
    with suppress(OSError, ValueError):
        if json.loads(stamp.read_text()) == packages:
            return python
    known = stamp.exists() or (home / "pyvenv.cfg").exists()
    if home.exists() and not known and (home.is_file() or any(home.iterdir())):  # --clear would delete it
        raise ConfigError(f"--venvs {folder}: {home} exists and is not an environment; name another folder")
    _finish([sys.executable, "-m", "venv", "--clear", str(home)], "venv")
    _finish([python, "-m", "pip", "install", "--quiet", *packages], "pip")
    stamp.write_text(json.dumps(packages))
    return python


def measured(case: Case, python: str, seconds: float) -> Turn:
    """Run one program until it ends, and return its measurements.

    If the program fails, raises `RunError` with the last line of its error output.
    """
    lab = str(Path(__file__).parent)
    threads = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory(prefix="edgefl-peers-") as name:
        write_task(case, Path(name), seconds)
        start = _START.format(lab=lab, name=case.framework)
        started_s = time.monotonic()
        with open(Path(name) / "errors", "w+") as errors:
            with (
                subprocess.Popen(
                    [python, "-c", start, name],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=name,
                    env={**os.environ, **threads},
                ) as program,
                _peak_memory(program) as peak_mib,
            ):
                printed = _printed(program, seconds + PATIENCE_S)
            if program.returncode:
                errors.seek(0)
                raise RunError(last_line(errors.read()) or f"exit code {program.returncode}")
    return speed(printed, started_s, peak_mib[0])


def write_task(case: Case, folder: Path, seconds: float) -> None:
    """Write the input files of a program: ``task.json``, and ``x`` and ``y`` with all clients' examples."""
    from edgefl.learning.data import load_data

    setting = SETTINGS[case.setting]
    data = load_data(Data(name=setting.data), seed=0)
    x = np.ascontiguousarray(data.train_x[:], np.float32)
    x.tofile(folder / "x")
    np.asarray(data.train_y, np.int64).tofile(folder / "y")
    shape = {"processes": case.processes, "threads": case.threads, "shape": x.shape, "seconds": seconds}
    (folder / "task.json").write_text(json.dumps({**setting._asdict(), **shape}))


def _printed(program: subprocess.Popen[str], patience_s: float) -> list[dict[str, Any]]:
    """Return the JSON objects that a program prints; kill it if ``patience_s`` seconds pass without one."""
    assert program.stdout is not None
    killer = threading.Timer(patience_s, kill_tree, [program])
    killer.start()
    found = []
    try:
        for line in program.stdout:
            with suppress(ValueError):
                if isinstance(line := json.loads(line), dict):
                    found.append(line)
                    killer.cancel()
                    killer = threading.Timer(patience_s, kill_tree, [program])
                    killer.start()
        program.wait()
    finally:
        killer.cancel()
        if program.poll() is None:
            kill_tree(program)
            program.wait()
    return found


@contextmanager
def _peak_memory(program: subprocess.Popen[str]) -> Iterator[list[float]]:
    """Yield a list with one number: the peak PSS of a program with all its descendants, in MiB.

    The number is updated until the ``with`` block ends.
    """
    ended, peak = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(LOOK_S):
            with suppress(psutil.Error):
                family = psutil.Process(program.pid)
                pids = [family.pid, *(child.pid for child in family.children(recursive=True))]
                peak[0] = max(peak[0], sum(proportional_mib(pid) or 0.0 for pid in pids))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def speed(printed: Sequence[dict[str, Any]], started_s: float, peak_mib: float) -> Turn:
    """Compute the metrics of a program from the JSON objects that it printed.

    Raises `RunError` if fewer than two of these objects report a model.

    >>> rounds = [{"trips": 10, "at_s": 107.0}, {"trips": 20, "at_s": 109.0}, {"trips": 30, "at_s": 111.0}]
    >>> speed([{"version": "1.0"}, *rounds], started_s=100.0, peak_mib=50.0)
    Turn(version='1.0', trips_per_s=5.0, start_s=5.0, peak_mib=50.0)
    """
    release = next((line["version"] for line in printed if "version" in line), "")
    models = [line for line in printed if "trips" in line]
    if len(models) < 2:
        raise RunError(f"made only {tables.many(len(models), 'model')} in the time given; 2 are needed")
    first, last = models[0], models[-1]
    rate = (last["trips"] - first["trips"]) / (last["at_s"] - first["at_s"])
    start_s = max(0.0, first["at_s"] - started_s - first["trips"] / rate)
    return Turn(release, rate, start_s, peak_mib)


def show(result: dict[str, Any]) -> None:
    """Print a row for each case, with edgefl's speed in the same setting divided by the case's speed."""
    heads = ["setting", "framework", "version", ">processes", ">threads"]
    heads += [">trips/s", ">spread", ">edgefl ÷ it", ">start s", ">peak MiB"]
    rows, reasons = [], []
    ours = {
        row["setting"]: row["trips_per_s"]
        for row in result["rows"]
        if row["framework"] == "edgefl" and not row["why"]
    }
    for row in result["rows"]:
        name = [row["setting"], row["framework"], row.get("version"), row["processes"], row["threads"]]
        found: list[Any] = [None] * 5
        if not row["why"]:
            rate, best = row["trips_per_s"], ours.get(row["setting"])
            ratio = None if best is None else best / rate
            spread = None if result["repetitions"] == 1 else tables.percent(row["spread"])
            found = [rate, spread, ratio, row["start_s"], row["peak_mib"]]
        else:
            reasons.append(f"{row['setting']}: {row['framework']}: {row['why']}")
        rows.append([tables.figure(each) for each in (*name, *found)])
    facts = bench.machine_line(result["host"])
    tables.show(
        tables.table(heads, rows, "Whole experiments"),
        f"{facts}; {tables.many(result['repetitions'], 'turn')} of {result['seconds']:g} s",
        *dict.fromkeys(reasons),
        f"rm -r {result['venvs']} removes what pip installed",
    )


def _finish(command: Sequence[str], what: str) -> None:
    """Run a command until it ends. If it fails, raise `RunError` with the last line of its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RunError(f"{what}: {last_line(done.stdout) or f'exit code {done.returncode}'}")


def last_line(text: str) -> str:
    """Return the last line that is not empty.

    >>> last_line("Traceback\\nImportError: no pfl\\n\\n")
    'ImportError: no pfl'
    """
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
