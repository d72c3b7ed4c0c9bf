"""Reads the history of metrics from the baselines in git, and finds the commits at which a level changed."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from edgefl.errors import ConfigError
from edgefl.regression import baseline
from edgefl.regression.checkout import git
from edgefl.regression.counts import FIGURES, INSTRUCTIONS, NATIVE, Figure

MAX_COMMITS = 200
MIN_STEP = 0.02
"""Relative changes in a metric's level up to this size are ignored."""
SURE = 4.0
"""Minimum size of a change of level, in standard errors; smaller changes are ignored."""


class Point(NamedTuple):
    """The value of a metric at a commit."""

    commit: str
    subject: str
    value: float


class _Key(NamedTuple):
    """Identifies a metric of a function."""

    test: str
    function: str
    figure: str
    unit: str
    exact: bool = False
    """True if the metric has no noise."""


class Series(NamedTuple):
    """The values of one metric of a function over successive commits, oldest first."""

    test: str
    function: str
    figure: str
    unit: str
    exact: bool
    """True if the metric has no noise."""
    points: Sequence[Point]

    @property
    def steps(self) -> list[int]:
        """Indices of the points at which the level changes."""
        return steps([point.value for point in self.points], exact=self.exact)


def steps(values: Sequence[float], *, exact: bool = False) -> list[int]:
    """Return the indices at which the level changes, found by binary segmentation.

    The noise is estimated from successive differences. If values are ``exact``, like counts, the noise is 0.

    >>> steps([10.0, 10.1, 9.9, 10.0, 12.0, 12.1, 11.9, 12.0]), steps([10.0, 10.1, 9.9, 10.0, 10.1])
    ([4], [])
    >>> steps([10, 12], exact=True)
    [1]
    """
    logs = [math.log(max(value, 1e-12)) for value in values]
    jumps = sorted(abs(after - before) for before, after in itertools.pairwise(logs))
    # If the noise is normal, successive values differ by N(0, 2σ²), whose median absolute value is 0.954 σ.
    noise = statistics.median_low(jumps) / 0.954 if jumps and not exact else 0.0

    def search(start: int, end: int) -> Iterator[int]:
        best, where = 0.0, 0
        for split in range(start + 1, end):
            change = abs(statistics.fmean(logs[split:end]) - statistics.fmean(logs[start:split]))
            error = noise * math.sqrt(1 / (split - start) + 1 / (end - split))
            if change > MIN_STEP and change >= SURE * error:
                strength = change / math.sqrt(1 / (split - start) + 1 / (end - split))
                if strength > best:
                    best, where = strength, split
        if where:
            yield from search(start, where)
            yield where
            yield from search(where, end)

    return list(search(0, len(logs)))


def history(file: Path) -> list[Series]:
    """Return a baseline file's metrics at each commit that changed the file.

    The result is empty if git is not installed or the file is not in a repository. Commits with an invalid
    file are left out.
    """
    folder = file.parent
    if not folder.is_dir() or shutil.which("git") is None:
        return []
    # Records end with NUL, because a subject may contain a line separator.
    options = "-z", "--no-show-signature", "--reverse", "--format=%H%x09%h%x09%s"
    log = git(folder, "log", f"-{MAX_COMMITS}", *options, "--", file.name)
    found: dict[_Key, list[Point]] = {}
    for record in filter(None, log.stdout.split("\0")) if not log.returncode else ():
        commit, short, subject = record.split("\t", 2)
        text = git(folder, "show", f"{commit}:./{file.name}").stdout
        for key, value in _figures(text, file):
            found.setdefault(key, []).append(Point(short, subject, value))
    return [Series(*key, points) for key, points in found.items()]


def _figures(text: str, file: Path) -> Iterator[tuple[_Key, float]]:
    """Yield the metrics in a baseline file's text: counts, and medians of times and memory on each host."""
    try:
        found = baseline.parse(text.encode(), file)
    except ConfigError:
        return
    for entry in found.counted:
        one = partial(_Key, entry.test, entry.function, exact=True)
        for name, count in entry.figures.items():
            yield _counted(one, name, count)
        for version, python in entry.python.items():
            executed = {INSTRUCTIONS: sum(python.instructions.values())} if python.instructions else {}
            for name, count in (python.figures | executed).items():
                yield _counted(one, name, count, f", Python {version}")
        for environment, native in entry.native.items():
            yield _counted(one, NATIVE, sum(native.values()), f", {environment}")
    for timed in found.entries:
        host = f"{timed.host.cpu}, {timed.host.cores} cores"
        one = partial(_Key, timed.test, timed.function, exact=False)
        yield one(f"CPU time on {host}", "ms"), 1e3 * statistics.median(timed.host_cpu_s)
        yield one(f"memory on {host}", "MiB"), statistics.median(timed.peak_mib)


def _counted(key: Callable[..., _Key], name: str, count: int, version: str = "") -> tuple[_Key, float]:
    figure = FIGURES.get(name, Figure(name))
    scale, unit = (1 << 20, "MiB") if figure.unit == "B" else (1, "")
    return key(f"{figure.text}{version}", unit), count / scale
