"""Measure false alarms and detected regressions of device tests that count work.

The work of three functions is counted as in `pytest --edgefl-compare`, by a real measuring process, with
random hash seeds and under each combination of

    load        0, 1 or 3 other processes that compute all the time on the same cores
    cores       1 or 2 cores for all of these processes
    capability  ATEN_CPU_CAPABILITY: default or avx2

Each count serves as a baseline for all counts of the same function, under all conditions. Any growth is then
a false alarm. Comparisons that cannot be judged are counted, too. After that, counts with 1% more work of one
kind are compared with a baseline that was saved under another condition:

    torch       a batch of 101 examples instead of 100
    python      101 iterations of a Python loop instead of 100
    memory      101 KiB of tensors kept instead of 100
    sent        101 kB sent instead of 100

    python benchmarks/gate_counts.py [--runs 8] [--planted 100] [--save FILE] [--against FILE]

``--save`` writes the baselines of the first condition to a file. ``--against`` also compares all counts with
the baselines in such a file, which another version of Python may have written.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from edgefl.devices import load_device, load_network
from edgefl.processes import usable_cores
from edgefl.regression import baseline
from edgefl.regression.counts import CountedEntry, CountedRun, compare, entry_of
from edgefl.regression.measure import count
from edgefl.regression.measurement import MeasurementPlan
from edgefl.regression.process import MeasuringProcess, PrepareRequest, locate

DEVICE, NETWORK = "moto-g4", "lte"
BUSY = "while True: pass"
KEPT: list[torch.Tensor] = []

# ---- functions that are counted ------------------------------------------------------------------


def batch(rows: int) -> Any:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(rows, 64), torch.randint(10, (rows,))


def step(parts: Any, rows: int) -> None:
    net, optimizer, inputs, labels = parts
    optimizer.zero_grad()
    loss: Any = cross_entropy(net(inputs), labels)
    loss.backward()
    optimizer.step()


def preprocess(turns: int) -> float:
    counts: dict[str, int] = {}
    for turn in range(turns):
        word = f"word {turn % 7}"
        counts[word] = counts.get(word, 0) + len(set(word))
    return float(np.array(sorted(counts.values())).mean())


def upload(edge_device: Any, kib: int, kb: int) -> None:
    KEPT.append(torch.ones(kib << 8))
    edge_device.send(bytes(kb * 1000))


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, dict[str, int]]] = {
    "step": (step, batch, {"rows": 100}),
    "preprocess": (preprocess, None, {"turns": 100}),
    "upload": (upload, None, {"kib": 100, "kb": 100}),
}
PLANTED = {
    "torch": ("step", {"rows": 101}, {"matmul_flop"}),
    "python": ("preprocess", {"turns": 101}, {"instructions"}),
    "memory": ("upload", {"kib": 101}, {"tensor_kept_bytes"}),
    "sent": ("upload", {"kb": 101}, {"sent_bytes"}),
}
"""Maps each kind of planted work to the function, the changed arguments, and the metrics that must grow."""


# ---- conditions ----------------------------------------------------------------------------------


class Condition(NamedTuple):
    """The load of the host, and settings of the measuring process."""

    load: int
    cores: int
    capability: str

    def __str__(self) -> str:
        return f"{self.load} busy, {self.cores} cores, {self.capability}"

    @contextlib.contextmanager
    def process(self) -> Iterator[MeasuringProcess]:
        before, allowed = dict(os.environ), os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(allowed)[: self.cores])
        os.environ |= {
            "ATEN_CPU_CAPABILITY": self.capability,
            "PYTHONHASHSEED": str(random.randrange(1, 2**32)),
        }
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(self.load)]
        try:
            with contextlib.closing(MeasuringProcess()) as process:
                yield process
        finally:
            for one in busy:
                one.kill()
                one.wait()
            os.environ.clear()
            os.environ |= before
            os.sched_setaffinity(0, allowed)


def conditions() -> list[Condition]:
    """Return all combinations of load, cores and capability that are possible on this host."""
    cores = sorted({1, min(2, usable_cores())})
    return [Condition(*one) for one in itertools.product((0, 1, 3), cores, ("default", "avx2"))]


def counted(process: MeasuringProcess, name: str, **changed: int) -> CountedRun:
    """Count the work of one of the `FUNCTIONS`; ``changed`` overrides its usual arguments."""
    function, setup, kwargs = FUNCTIONS[name]
    request = PrepareRequest(
        function=locate(function), setup=None if setup is None else locate(setup), args=[],
        kwargs=kwargs | changed, path=sys.path[:], device=DEVICE, network=NETWORK, shots=None, limit_s=99.0,
    )  # fmt: skip
    return count(process, MeasurementPlan(load_device(DEVICE), load_network(NETWORK), request, 9, 0.0))


class Counted(NamedTuple):
    """All counts under one condition, for the unchanged functions (``runs``) and those with planted work."""

    condition: Condition
    runs: dict[str, list[CountedRun]]
    planted: list[tuple[str, CountedRun]]

    def entries(self) -> dict[str, list[CountedEntry]]:
        """Return a baseline for each count, in one list per function."""
        here = baseline.versions()
        return {name: [entry_of("test", name, run, here) for run in runs] for name, runs in self.runs.items()}


def count_all(condition: Condition, runs: int, planted: Sequence[str]) -> Counted:
    """Under one condition, count each unchanged function ``runs`` times and each kind in ``planted`` once."""
    with condition.process() as process:
        plain = {name: [counted(process, name) for _ in range(runs)] for name in FUNCTIONS}
        more = [(kind, counted(process, PLANTED[kind][0], **PLANTED[kind][1])) for kind in planted]
    return Counted(condition, plain, more)


# ---- comparisons ---------------------------------------------------------------------------------


def false_alarms(found: Sequence[Counted], entries: dict[str, list[CountedEntry]]) -> Counter[str]:
    """Compare every count with every baseline of its function; return the number of each outcome.

    Print the first five comparisons whose outcome is REGRESSION, and the first five that are NOT JUDGED.
    """
    outcomes: Counter[str] = Counter()
    for one in found:
        for name, runs in one.runs.items():
            for run, before in itertools.product(runs, entries[name]):
                verdict = compare(before, run, baseline.versions())
                outcome = "REGRESSION" if verdict.grew else "NOT JUDGED" if verdict.unjudged else "OK"
                outcomes[outcome] += 1
                if outcome != "OK" and outcomes[outcome] <= 5:
                    print(f"  {one.condition}: {name}: {[*map(str, verdict.grew), *verdict.unjudged]}")
    return outcomes


def detected(found: Sequence[Counted]) -> dict[str, Counter[str]]:
    """Compare planted work with the baseline of the next condition; count how often it is detected."""
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in PLANTED}
    for one, other in zip(found, [*found[1:], found[0]], strict=True):
        for kind, run in one.planted:
            name, _, figures = PLANTED[kind]
            grew = {each.name for each in compare(other.entries()[name][0], run, baseline.versions()).grew}
            outcomes[kind]["runs"] += 1
            outcomes[kind]["detected"] += bool(grew)
            outcomes[kind]["named"] += figures <= grew
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=8, help="counts of each function under each condition")
    parser.add_argument("--planted", type=int, default=100, help="counts with 1%% more work")
    parser.add_argument("--save", type=Path, help="write the first condition's baselines to this file")
    parser.add_argument("--against", type=Path, help="compare with the baselines in this file, too")
    given = parser.parse_args()
    wanted, start_s = conditions(), time.monotonic()
    kinds = list(itertools.islice(itertools.cycle(PLANTED), given.planted))
    found = []
    for place, condition in enumerate(wanted):
        found.append(count_all(condition, given.runs, kinds[place :: len(wanted)]))
        print(f"{condition}: counted, {time.monotonic() - start_s:.0f} s so far", flush=True)
    entries = {name: [entry for one in found for entry in one.entries()[name]] for name in FUNCTIONS}
    if given.save is not None:
        baseline.save(given.save, [], [each[0] for each in entries.values()])
    outcomes, counts = false_alarms(found, entries), sum(map(len, entries.values()))
    print(f"unchanged: {counts} counts, {outcomes.total()} comparisons: {dict(outcomes)}")
    if given.against is not None:
        before = {entry.function: [entry] for entry in baseline.load_counted(given.against).values()}
        print(f"against {given.against.name}: {dict(false_alarms(found, before))}")
    for kind, outcome in detected(found).items():
        print(f"1% more {kind}: {dict(outcome)}")
    versions = baseline.versions()
    print(f"Python {versions.python}, torch {versions.torch}, {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
