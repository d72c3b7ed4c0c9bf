"""Measure the power of the regression tests: how often they detect planted regressions or raise false alarms.

The measured function (the step) trains a perceptron with 784, 128 and 10 units on 10 batches of 32 examples
with SGD. Each run is measured in a real measuring process and compared with a baseline of the unchanged step,
as in `pytest --edgefl-compare --edgefl-timed`. A process serves three runs and computes at the host's full
speed. There are three kinds of runs:

    unchanged           the step as it is; any alarm is false
    time +10%           11 batches instead of 10
    memory +20 MiB      a block of 20 MiB held during the step

Only measured metrics are judged. The number of FLOP is ignored, because it always distinguishes 11 batches
from 10. A run is an ALARM if the metric of its planted regression grew according to
`edgefl.regression.verdict` (of an unchanged step: if any metric grew), OTHER if only another metric grew,
INVALID if its metrics are unreliable or not comparable, and otherwise CLEAN.

    python benchmarks/regression_power.py [--runs 100] [--baselines 10] [--json FILE]
    python benchmarks/regression_power.py --load [--runs 20]      baselines under one load, runs under another
    python benchmarks/regression_power.py --sum FILE…             one table of the runs in several files
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from edgefl.errors import Invalid, NotMet
from edgefl.processes import usable_cores
from edgefl.regression import baseline, verdict
from edgefl.regression.device import DeviceTest, EdgeDevice, MarkOptions
from edgefl.regression.measurement import Measurement
from edgefl.regression.session import Session, SessionOptions

BATCHES = 10
DEVICE = "pixel-3a"


def prepared(batches: int = BATCHES, mib: int = 0) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(32, 784), torch.arange(32) % 10


def training_step(parts: Any, batches: int = BATCHES, mib: int = 0) -> None:
    net, optimizer, inputs, labels = parts
    held = bytearray(b"x") * (mib << 20)
    for _ in range(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    del held


class Kind(NamedTuple):
    name: str
    metrics: tuple[str, ...]
    """Metrics whose growth is an ALARM; the growth of any other metric is OTHER."""
    arguments: dict[str, int]


KINDS = (
    Kind("unchanged", tuple(verdict.TESTED), {}),
    Kind("time +10%", ("cpu_s",), {"batches": BATCHES * 11 // 10}),
    Kind("memory +20 MiB", ("peak_mib",), {"mib": 20}),
)


class Bench:
    """A test module and its baseline."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "test_step.py"
        self.before: baseline.BaselineEntry | None = None

    def save(self) -> None:
        """Measure the unchanged step as the baseline. Raises `Invalid` if the measurement is unreliable."""
        with contextlib.closing(Session(SessionOptions(save=True, timed=True))) as session:
            device = self._device(session)
            result = device.run(training_step, setup=prepared)
            entry, counted = device.entry(result), device.counted_entry(result)
        assert entry is not None
        assert counted is not None
        path = baseline.path_of(self.file)
        baseline.save(path, [entry], [counted])
        self.before = baseline.load(path)[entry.key]

    def runs(self, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
        """Run each kind once, all in one session with its own measuring process."""
        with contextlib.closing(Session(SessionOptions(compare=True, timed=True))) as session:
            for kind in kinds:
                yield self._run(session, kind)

    def _device(self, session: Session) -> EdgeDevice:
        return EdgeDevice(
            MarkOptions(DEVICE, time_scale=0.0), DeviceTest("test_step", self.file, "test_step", 1), session
        )

    def _run(self, session: Session, kind: Kind) -> dict[str, Any]:
        assert self.before is not None
        began = time.monotonic()
        row: dict[str, Any] = {"kind": kind.name}
        session.compared.clear()  # each run counts as a separate test, on this device only
        try:
            device = self._device(session)
            result = device.run(training_step, setup=prepared, **kind.arguments)
            row |= circumstances(self.before, result.measured)
            before = self.before.samples
            for one in verdict.compare(before, baseline.samples(result.measured)):
                row[one.metric] = [one.shift if one.before else 0.0, one.p]
            found = device.verdict(result, result.measured, before._replace(flop=math.inf))
            result.require(found)
        except NotMet:
            row["outcome"] = "ALARM" if set(found.grew).intersection(kind.metrics) else "OTHER"
        except Invalid as error:
            row |= {"outcome": "INVALID", "why": str(error)}
        else:
            row["outcome"] = "CLEAN"
        return row | {"wall_s": time.monotonic() - began}


def circumstances(before: baseline.BaselineEntry, measured: Measurement) -> dict[str, float]:
    """Return metrics that show how busy the host was during a measurement."""
    reference = measured.reference_cpu_s
    return {
        "repetitions": len(measured.repetitions),
        "waited": statistics.median(one.waited for one in measured.repetitions),
        "reference": statistics.median(reference) / statistics.median(before.reference.host_cpu_s),
        "reference_cv": statistics.stdev(reference) / statistics.fmean(reference),
        "noise": measured.noise,
    }


def power(runs: int, baselines: int) -> Iterator[dict[str, Any]]:
    """Run the kinds in turn, each ``runs`` times; compare an equal part of the runs with each of
    ``baselines`` baselines."""
    for count in range(baselines):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            _save(bench)
            for _ in range(count, runs, baselines):
                yield from bench.runs(KINDS)


def portability(runs: int) -> Iterator[dict[str, Any]]:
    """Compare runs under load with baselines from the idle host, then vice versa, each ``runs`` times."""
    for saved, compared in (("idle", "loaded"), ("loaded", "idle")):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            for count in range(runs):
                if count % 5 == 0:
                    with load(saved == "loaded"):
                        _save(bench)
                with load(compared == "loaded"):
                    for row in bench.runs(KINDS):
                        yield row | {"kind": f"saved {saved}, compared {compared}: {row['kind']}"}


def _save(bench: Bench) -> None:
    """Save a valid baseline. Under load, this may take several attempts."""
    for _ in range(10):
        with contextlib.suppress(Invalid):
            bench.save()
            return
    raise SystemExit("ten baselines in a row were INVALID: this host is too noisy for measurements")


@contextlib.contextmanager
def load(wanted: bool) -> Iterator[None]:
    """If ``wanted`` is True, keep every core busy with an endless computation in this context."""
    command = [sys.executable, "-c", _COMPUTING]
    count = usable_cores() if wanted else 0
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


_COMPUTING = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:  # stop when the parent ends, even if it is killed
    sum(range(10**6))
"""


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with the number of each outcome for each kind of run."""
    lines = [f"{'':44}{'runs':>6}{'ALARM':>7}{'CLEAN':>7}{'INVALID':>9}{'OTHER':>7}{'s/run':>7}"]
    for name in dict.fromkeys(row["kind"] for row in rows):
        of = [row for row in rows if row["kind"] == name]
        counts = Counter(row["outcome"] for row in of)
        wall_s = sum(row["wall_s"] for row in of) / len(of)
        cells = (
            f"{len(of):>6}{counts['ALARM']:>7}{counts['CLEAN']:>7}{counts['INVALID']:>9}{counts['OTHER']:>7}"
        )
        lines.append(f"{name:44}{cells}{wall_s:>7.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="runs of each kind (default: 100)")
    parser.add_argument("--baselines", type=int, default=10, help="number of baselines (default: 10)")
    parser.add_argument("--load", action="store_true", help="save under one load, compare under another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each run to FILE as it ends")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="show the runs in these files")
    asked = parser.parse_args()
    if asked.sum:
        rows = [row for file in asked.sum for row in json.loads(file.read_text())]
    else:
        rows = []
        for row in portability(asked.runs) if asked.load else power(asked.runs, asked.baselines):
            rows.append(row)
            if asked.json:
                asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    for row in rows:
        if row["outcome"] == "INVALID":
            print(f"INVALID {row['kind']}: {row['why']}")


if __name__ == "__main__":
    main()
