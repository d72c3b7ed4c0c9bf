"""Measure how often `pytest --edgefl-against` detects planted regressions or gives false alarms.

A temporary repository has two commits. There are three kinds of functions: a training step in torch,
operations on numpy arrays, and pure Python. For each kind, the second commit contains an unchanged function
and a function that does 5% more work (21 units instead of 20). Each round compares all six functions, with
new processes for each kind, while busy loops occupy some cores. The table counts the outcomes. REGRESSION is
right for a function that does more work, and a false alarm for an unchanged function.

    python benchmarks/gate_against.py [--rounds N] [--busy N] [--only CHANGE] [--kinds KIND…] [--rows FILE]
    python benchmarks/gate_against.py --sum FILE…        print the table of the rounds in files

Each comparison is appended to FILE as one line, and the table counts all lines of FILE. If a run is stopped,
the same command adds more rounds to those that are already in FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.host.capacity import host
from edgefl.regression.against import AgainstBase, verdict_of
from edgefl.regression.checkout import find_base
from edgefl.regression.paired import estimate
from edgefl.regression.process import FunctionLocation
from edgefl.regression.sides import CallRequest

TOLERANCE = 0.05
STEPS = {
    "torch": """
import torch
from torch.nn.functional import cross_entropy


def prepare():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(32, 64), torch.arange(32) % 10


def work(parts, units):
    net, optimizer, inputs, labels = parts
    for _ in range(units):
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
""",
    "numpy": """
import numpy as np


def prepare():
    return np.random.default_rng(0).standard_normal((64, 64))


def work(array, units):
    for _ in range(units):
        np.sort(array @ array + np.exp(-array * array), axis=1).sum(0)
""",
    "python": """
def prepare():
    return [f"word{i % 97}" for i in range(400)]


def work(words, units):
    for _ in range(units):
        counts = {}
        for word in words:
            counts[word] = counts.get(word, 0) + len(word)
        sorted(counts)
""",
}
ENDS = """

def same(parts):
    work(parts, 20)


def more(parts):
    work(parts, {units})


VERSION = {version}
"""


def repository(folder: Path) -> Path:
    """Create the repository with both commits, and return its folder."""
    top = folder / "project"
    top.mkdir()
    git = ("git", "-C", str(top), "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    for version, units in enumerate((20, 21)):
        for kind, text in STEPS.items():
            (top / f"{kind}_steps.py").write_text(text + ENDS.format(version=version, units=units))
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", f"version {version}"], check=True)
    return top


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep ``loops`` processes computing without a pause while the context is open."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def one_round(top: Path, kind: str, changes: Sequence[str], rows: Path, note: dict[str, Any]) -> None:
    """Compare the functions of one kind once, and append a row for each function to the file ``rows``."""
    file = str(top / f"{kind}_steps.py")
    against = AgainstBase(find_base("HEAD~1", top))
    try:
        for change in changes:
            where, setup = (FunctionLocation(f"{kind}_steps", file, name) for name in (change, "prepare"))
            call = CallRequest(
                function=where, setup=setup, args=[], kwargs={}, device="moto-g4", network=None, layout=0,
                limit_s=120,
            )  # fmt: skip
            began_s = time.monotonic()
            found = against.compare(change, call, TOLERANCE, None, lambda _: None)
            row = {
                **note, "function": f"{kind}_{change}", "outcome": verdict_of(found, TOLERANCE).outcome,
                "growth": estimate(found.pairs).growth, "wall_s": time.monotonic() - began_s,
                "load": os.getloadavg()[0], "pairs": [[one.layout, one.log_ratio] for one in found.pairs],
            }  # fmt: skip
            with rows.open("a") as file_of_rows:
                file_of_rows.write(json.dumps(row) + "\n")
    finally:
        against.close()


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table that counts each outcome, with a row per function and number of busy loops."""
    lines = [
        "| busy loops | function | change | runs | REGRESSION | OK | could not be judged | "
        "measured growth, 5% to 95% | wall, median |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for busy_loops in sorted({row["busy"] for row in rows}):
        for change in ("same", "more"):
            for kind in STEPS:
                mine = [
                    row for row in rows if row["busy"] == busy_loops and row["function"] == f"{kind}_{change}"
                ]
                if mine:
                    lines.append(_line(busy_loops, kind, change, mine))
    return "\n".join(lines)


def _line(busy_loops: int, kind: str, change: str, mine: list[dict[str, Any]]) -> str:
    counts = [sum(row["outcome"] == outcome for row in mine) for outcome in ("FAIL", "PASS", "INVALID")]
    growths = sorted(row["growth"] for row in mine)
    low, high = growths[int(0.05 * len(growths))], growths[int(0.95 * (len(growths) - 1))]
    wall_s = statistics.median(row["wall_s"] for row in mine)
    planted = "none" if change == "same" else "+5%"
    cells = (busy_loops, kind, planted, len(mine), *counts, f"{low:+.1%} to {high:+.1%}", f"{wall_s:.0f} s")
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    assert __doc__ is not None
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--busy", type=int, default=1, help="busy loops beside the comparisons")
    parser.add_argument("--only", choices=("same", "more"))
    parser.add_argument("--kinds", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no comparison after this time")
    parser.add_argument("--rows", type=Path, default=Path("gate_against.jsonl"))
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    files = given.sum or [given.rows]
    if not given.sum:
        changes = [given.only] if given.only else ["same", "more"]
        note = {"busy": given.busy, "cpu": host().cpu, "python": platform.python_version()}
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, busy(given.busy):
            top = repository(Path(os.path.realpath(folder)))
            for number in range(given.rounds):
                for kind in given.kinds:
                    if time.monotonic() - began_s < given.seconds:
                        one_round(top, kind, changes, given.rows, note)
                print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
    try:
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(str(error)) from None
    print(table(rows))


if __name__ == "__main__":
    main()
