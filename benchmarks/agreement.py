"""Compare three methods of estimating how long a function takes on a device.

    python benchmarks/agreement.py [--device pi-4] [--calls 15] [--rounds 7] [--only step numpy] [--awake]

The functions are a Python loop, numpy operations, a training step in torch, compression, and a function that
is a training step in torch, then a loop in Python. The time of a call on the device is determined by `edgefl
exec` (the program's own clock, divided by the time scale), by a device test (`pytest` with the mark
``edge_device``), and by `edgefl predict` (this host's CPU time divided by `relative`; for the training step,
the predicted time). The benchmark prints the median of each method over the rounds, and its difference from
the mean of the three.

Run it on a quiet host. Each result depends on this host's CPU time, which other virtual machines on the same
hardware can change by a third within seconds, so the three methods take turns. Each function is timed in its
own process, which keeps freed memory as device tests do. Otherwise glibc would return large arrays to the
system after each call, and every call would spend time on page faults.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

from edgefl import programs
from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, relative
from edgefl.devices.prediction import predict
from edgefl.host.calibration import calibrate
from edgefl.learning.models import model_to_trace
from edgefl.results.tables import percent, short_time, show, table

sys.path.insert(0, str(Path(__file__).parent))
from agreed_functions import BATCH, FUNCTIONS, MODEL, SHAPE

HERE = Path(__file__).parent
STEP = f"torch:{MODEL}@{BATCH}"
CLASS = {"loop": "interpreter", "numpy": "interpreter", "gzip": "integer", "half": "interpreter"}
"""Code class of each function that is not pure torch; for ``half``, the class of the part outside torch."""
TEST = """
import pytest, agreed_functions
@pytest.mark.edge_device({device!r}, like={like!r}, time_scale=0)
def test_it(edge_device):
    result = edge_device.run(agreed_functions.{function})
    open({out!r}, "w").write(f"{{result.seconds}} {{result.doubt}}")
"""


def program(name: str, calls: int) -> tuple[str, ...]:
    """Return the command that prints the time of a call in seconds."""
    return (sys.executable, str(HERE / "agreed_functions.py"), name, str(calls))


def here_s(name: str, calls: int) -> float:
    """Return the CPU time of a call on this host in seconds, measured in a separate process."""
    command = (*program(name, calls), "thread_time")
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def by_exec(device: str, name: str, like: str, calls: int, awake: bool) -> float:
    """Return the time of a call in emulated seconds, measured by a program under `edgefl exec`."""
    command = program(name, calls)
    threads = None if "torch" in like else 1
    phone = programs.Phone(device=device, command=command, like=like, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        result = programs.run([phone], programs.ProgramOptions(out=out, awake=awake, print_lines=False))
        for reason in result.held.reasons:
            print(f"{name}: INVALID: {reason}", file=sys.stderr)
        return float((out / "phones" / f"0-{device}.out").read_text()) / result.time_scale


def by_plugin(device: str, name: str) -> float:
    """Return the time of a call on the device in seconds, measured by a device test."""
    with tempfile.TemporaryDirectory() as folder:
        out, test = Path(folder) / "out", Path(folder) / "test_it.py"
        function, like = FUNCTIONS[name].__name__, CLASS.get(name, "interpreter")
        test.write_text(TEST.format(device=device, like=like, function=function, out=str(out)))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
        done = subprocess.run(command, check=False, cwd=HERE, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"the device test of {name} failed:\n{done.stdout}{done.stderr}")
        seconds, _, doubt = out.read_text().partition(" ")
        if doubt:
            print(f"{name}: device test: {doubt}", file=sys.stderr)
        return float(seconds)


def one_round(name_of_device: str, names: list[str], calls: int, awake: bool) -> dict[str, tuple[float, ...]]:
    """Return four times in seconds for a call of each function.

    They are the CPU time on this host, and the times on the device according to ``exec``, a device test and
    ``predict``.
    """
    device, host = load_device(name_of_device), calibrate()
    module, _ = model_to_trace(MODEL)
    step_s = predict(module, BATCH, device=device, input_shape=SHAPE).seconds
    host_s = {name: here_s(name, calls) for name in (FUNCTIONS if "half" in names else names)}
    speed = {name: relative(clusters_of(device), of, 1, host).value for name, of in CLASS.items()}  # type: ignore[arg-type]
    predicted = {name: host_s[name] / speed[name] for name in names if name not in ("step", "half")}
    predicted["step"], likes = step_s, {**CLASS, "step": STEP}
    if "half" in names:
        predicted["half"] = step_s + host_s["loop"] / speed["half"]
        part = host_s["loop"] / host_s["half"]
        likes["half"] = f"interpreter={part:.4f},{STEP}={1 - part:.4f}"
    return {
        name: (
            host_s[name],
            by_exec(name_of_device, name, likes[name], calls, awake),
            by_plugin(name_of_device, name),
            predicted[name],
        )
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="pi-4")
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--awake", action="store_true", help="keep idle cores busy under exec")
    given = parser.parse_args()
    ways: dict[str, list[tuple[float, ...]]] = {name: [] for name in given.only}
    for _ in range(given.rounds):
        for name, seconds in one_round(given.device, given.only, given.calls, given.awake).items():
            ways[name].append(seconds)
            print(name, *map(short_time, seconds), file=sys.stderr, flush=True)
    rows = []
    for name, rounds in ways.items():
        host_s, *answers = map(median, zip(*rounds, strict=True))
        off = [percent(answer / fmean(answers) - 1, 1) for answer in answers]
        rows.append((name, short_time(host_s), *map(short_time, answers), *off))
    heads = ("function", ">this host", ">exec", ">device test", ">predict", ">exec", ">test", ">predict")
    show(table(heads, rows, f"{given.device}: time of a call, and each method's difference from the mean"))


if __name__ == "__main__":
    main()
