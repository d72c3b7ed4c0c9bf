"""Compare three answers to one question: how long does a device take for a function?

    python benchmarks/agreement.py [--device pi-4] [--calls 15]

For a Python loop, numpy, a training step in torch, compression, and a function that is half torch, half
Python: seconds of a call on the device by `edgefl exec` (the program's own clock, divided by the time scale),
by a device test (`pytest`, mark ``edge_device``), and by `edgefl predict` (this host's CPU time ÷ `relative`;
a step's own time). Prints the three, and each one's distance from their mean. Run it on a quiet host.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from edgefl import programs
from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, relative
from edgefl.devices.prediction import predict
from edgefl.host.calibration import calibrate
from edgefl.learning.models import model_to_trace
from edgefl.results.tables import percent, short_time, show, table

sys.path.insert(0, str(Path(__file__).parent))
from agreed_functions import BATCH, MODEL, SHAPE, call_s

HERE = Path(__file__).parent
STEP = f"torch:{MODEL}@{BATCH}"
CLASS = {"loop": "interpreter", "numpy": "interpreter", "gzip": "integer", "half": "interpreter"}
"""Class of a function's code outside torch."""
TEST = """
import pytest, agreed_functions
@pytest.mark.edge_device({device!r}, like={like!r}, time_scale=0)
def test_it(edge_device):
    result = edge_device.run(agreed_functions.{function})
    open({out!r}, "w").write(f"{{result.seconds}} {{result.doubt}}")
"""
FUNCTION = {"loop": "loop", "numpy": "arrays", "step": "step", "gzip": "gzip", "half": "half"}


def by_exec(device: str, name: str, like: str, calls: int) -> float:
    """Return seconds of a call by the clock of a program under `edgefl exec`, at the device's pace."""
    command = (sys.executable, str(HERE / "agreed_functions.py"), name, str(calls))
    threads = None if "torch" in like else 1
    phone = programs.Phone(device=device, command=command, like=like, threads=threads)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        result = programs.run([phone], programs.ProgramOptions(out=out, print_lines=False))
        for reason in result.held.reasons:
            print(f"{name}: INVALID: {reason}", file=sys.stderr)
        return float((out / "phones" / f"0-{device}.out").read_text()) / result.time_scale


def by_plugin(device: str, name: str) -> float:
    """Return seconds of a call by a device test."""
    with tempfile.TemporaryDirectory() as folder:
        out, test = Path(folder) / "out", Path(folder) / "test_it.py"
        test.write_text(
            TEST.format(
                device=device, like=CLASS.get(name, "interpreter"), function=FUNCTION[name], out=str(out)
            )
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
        done = subprocess.run(command, check=False, cwd=HERE, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"the device test of {name} failed:\n{done.stdout}{done.stderr}")
        seconds, _, doubt = out.read_text().partition(" ")
        if doubt:
            print(f"{name}: device test: {doubt}", file=sys.stderr)
        return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="pi-4")
    parser.add_argument("--calls", type=int, default=15)
    given = parser.parse_args()
    device, host = load_device(given.device), calibrate()
    module, _ = model_to_trace(MODEL)
    step_s = predict(module, BATCH, device=device, input_shape=SHAPE).seconds
    host_s = {name: call_s(name, given.calls, time.thread_time) for name in FUNCTION}
    speed = {name: relative(clusters_of(device), of, 1, host).value for name, of in CLASS.items()}  # type: ignore[arg-type]
    predicted = {name: host_s[name] / speed[name] for name in ("loop", "numpy", "gzip")}
    predicted["step"] = step_s
    predicted["half"] = step_s + host_s["loop"] / speed["half"]
    part = host_s["loop"] / host_s["half"]
    likes = {**CLASS, "step": STEP, "half": f"interpreter={part:.4f},{STEP}={1 - part:.4f}"}
    rows = []
    for name in FUNCTION:
        ways = (
            by_exec(given.device, name, likes[name], given.calls),
            by_plugin(given.device, name),
            predicted[name],
        )
        off = [percent(way / fmean(ways) - 1, 1) for way in ways]
        rows.append((name, short_time(host_s[name]), *map(short_time, ways), *off))
    heads = ("function", ">this host", ">exec", ">device test", ">predict", ">exec", ">test", ">predict")
    show(table(heads, rows, f"{given.device}: seconds of a call, and each one's distance from the mean"))


if __name__ == "__main__":
    main()
