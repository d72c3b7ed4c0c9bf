"""Run an experiment for a long time under the wall clock, and check that its use of resources does not grow.

    python -m benchmarks.soak [experiments/soak.toml] [--set KEY=VALUE] [--minutes 60] [--samples soak.jsonl]

The benchmark starts ``edgefl run`` with the experiment, samples all processes of the run at intervals, and
ends the run as Ctrl-C does. The first quarter of the time is ignored.

- Memory must not grow by more than ``--most-mib`` according to its trend (the Theil-Sen estimate: the median
  of the slopes between all pairs of samples). The maximum in the last quarter of the time must not exceed the
  maximum in the second quarter by more than ``--most-mib``. The memory of a process is its proportional set
  size (PSS) without pages of files, which it shares with other programs.
- For descriptors, threads, files and shared memory, the minimum in the last quarter must not exceed the
  maximum in the second quarter. So a leak is detected, but not a file that is open only for a moment. The
  number of processes and the number of the server's descriptors (one for each client) may exceed the maximum
  by eight.

The exit code is 1 if one of these conditions is not met, or if the run ends by itself with an error. Run the
benchmark on Linux, from the folder of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from edgefl.lab import outcome
from edgefl.lab.chaos import MAX_MORE_DESCRIPTORS, Command
from edgefl.parameters.checkpoint import KEEP
from edgefl.regression.memory import kib
from edgefl.results.run_folder import CHECKPOINTS

Sample = dict[str, float]
"""Values of one sample, keyed by names such as ``server memory, MiB``."""
MEMORY = "memory, MiB"
MAX_MIB = 4.0
PATIENCE_S = 600.0
MIN_SAMPLES = 20
"""Minimum number of samples, so that each quarter has several. A single sample may be wrong, because a client
has the name of its parent for a moment after it is forked."""


class Trend(NamedTuple):
    """Statistics of one value over the run.

    ``second`` is its maximum in the second quarter, ``last`` its maximum in the last quarter, ``lowest`` its
    minimum in the last quarter, and ``grown`` its growth according to the trend.
    """

    name: str
    second: float
    last: float
    lowest: float
    grown: float

    def is_flat(self, most_mib: float) -> bool:
        if self.name.endswith(MEMORY):
            return self.last - self.second <= most_mib and self.grown <= most_mib
        more = MAX_MORE_DESCRIPTORS if self.name in ("processes", "server descriptors") else 0
        return self.lowest <= self.second + more


def look(command: Command, folder: Path) -> Sample:
    """Return the resources that the run uses now: for each kind of process, the maximum over its processes.

    For clients, it is the median: a client has one more descriptor while it reads a file in /proc, but a leak
    would affect all clients.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for process, kind in command.family().items():
        with contextlib.suppress(psutil.Error, KeyError):
            memory, descriptors = kib("smaps_rollup", process.pid), process.num_fds()
            pss_mib = (memory["Pss_Anon"] + memory["Pss_Shmem"] + memory["SwapPss"]) / 1024
            found[f"{kind} {MEMORY}"].append(pss_mib)
            found[f"{kind} descriptors"].append(descriptors)
            found[f"{kind} threads"].append(process.num_threads())
    medians = {name: float(np.median(found[name])) for name in found if name.startswith("client ")}
    count = sum(len(found[name]) for name in found if name.endswith(MEMORY))
    files, shared = sum(path.is_file() for path in folder.rglob("*")), list(Path("/dev/shm").glob("*edgefl*"))
    rest = {"processes": float(count), "files": float(files), "shared memory": float(len(shared))}
    return {**{name: max(values) for name, values in found.items()}, **medians, **rest}


def trends(samples: Sequence[tuple[float, Sample]]) -> Iterator[Trend]:
    """Yield the trend of each value. ``samples`` has the time in seconds and the values of each sample."""
    seconds = np.array([second for second, _ in samples])
    quarter = np.searchsorted(seconds, seconds[-1] / 4 * np.arange(1, 4))
    for name in sorted({name for _, sample in samples for name in sample}):
        values = np.array([sample.get(name, np.nan) for _, sample in samples])
        second, last = values[quarter[0] : quarter[1]], values[quarter[2] :]
        if np.isnan(second).all() or np.isnan(last).all():
            continue  # the value has too few samples: a process was sampled during its fork
        i, j = np.triu_indices(len(values) - quarter[0], 1)
        y, x = values[quarter[0] :], seconds[quarter[0] :]
        grown = np.nanmedian((y[j] - y[i]) / (x[j] - x[i])) * (x[-1] - x[0])
        yield Trend(name, *map(float, (np.nanmax(second), np.nanmax(last), np.nanmin(last), grown)))


def soak(
    file: Path, changes: Sequence[str], folder: Path, seconds: float, every_s: float, samples: Path
) -> list[tuple[float, Sample]]:
    """Run the experiment for at least ``seconds`` and until there are `MIN_SAMPLES` samples of its resources.

    Return the samples, and write them to the file ``samples``. The first sample is taken when the run has
    written as many checkpoints as a run keeps.
    """
    settings = [word for change in changes for word in ("--set", change)]
    arguments = ["run", str(file), *settings, "--out", str(folder), "--accept-invalid", "--quiet"]
    command, made = Command(arguments, {}, folder.with_suffix(".said")), []
    try:
        while not (
            outcome.counts(folder)[0] and len(list((folder / CHECKPOINTS).glob("*.safetensors"))) >= KEEP
        ):
            if command.process.poll() is not None:
                sys.exit("\n".join(command.output()))
            time.sleep(0.1)
        began = time.monotonic()
        with open(samples, "w") as out:
            while command.process.poll() is None:
                now_s = time.monotonic() - began
                if now_s >= seconds and len(made) >= MIN_SAMPLES:
                    break
                made.append((round(now_s, 2), look(command, folder)))
                out.write(json.dumps(made[-1]) + "\n")
                out.flush()
                time.sleep(every_s)
        if code := command.process.poll():
            sys.exit("\n".join([*command.output(), f"the run ended by itself, with exit code {code}"]))
        command.process.send_signal(signal.SIGINT)
        command.process.wait(PATIENCE_S)  # it takes time to write the summary, report and trace of all trips
    finally:
        command.end()
    print("\n".join(command.output()), f"exit code {command.process.returncode}", sep="")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("experiments/soak.toml"))
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--most-mib", type=float, default=MAX_MIB)
    parser.add_argument("--samples", type=Path, default=Path("soak.jsonl"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        made = soak(given.file, given.changes, folder, 60 * given.minutes, given.every_s, given.samples)
        versions, trips = outcome.counts(folder)
        print(f"{len(made)} samples in {made[-1][0] / 60:.1f} minutes; {versions} versions, {trips} trips")
    sys.exit(report(made, given.most_mib))


def report(samples: Sequence[tuple[float, Sample]], most_mib: float) -> int:
    """Print the trend of each value; return 1 if one of them grows, otherwise 0."""
    print(f"{'':28}{'2nd quarter':>12}{'last':>10}{'trend':>10}")
    found = list(trends(samples))
    for each in found:
        flat = "" if each.is_flat(most_mib) else "   NOT FLAT"
        print(f"{each.name:28}{each.second:12.1f}{each.last:10.1f}{each.grown:+10.2f}{flat}")
    return int(not all(each.is_flat(most_mib) for each in found))


if __name__ == "__main__":
    main()
