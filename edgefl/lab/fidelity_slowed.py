"""The same experiment on a host that is slowed to half: the same emulated times, or INVALID.

Three ways to slow it: other processes that compute on every core, a CPU quota of half the cores around the
run and all its processes, and that quota around a fleet that asks for all it leaves. Wrong times without a
word are the only thing that may not come of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from edgefl.lab.exercise import Exercise
from edgefl.lab.fidelity_bars import Line
from edgefl.lab.fidelity_runs import Played, Way, trial
from edgefl.limits import load, probe
from edgefl.limits.capacity import usable_cores
from edgefl.limits.groups import Groups, NoGroup, find, write
from edgefl.limits.throttle import CpuGroup

SAME = 0.03
PERIOD_US = 10_000
FULL_LOAD = 0.5
"""Share of the whole host that a fleet asks for which asks for all of half a host."""


def slowed_runs(
    fleet: Mapping[str, int],
    networks: Mapping[str, Mapping[str, Way]],
    work: Exercise,
    seconds: float,
    result: dict[str, Any],
    say: Callable[[str], None],
) -> list[Line]:
    """A run as it is, and the slowed ones against it."""
    play = partial(trial, fleet, networks, work, seconds)
    say("the host as it is")
    plain = play()
    say("beside as many processes that compute as there are cores")
    with busy(usable_cores()):
        lines = [same("competing load", plain, play(time_scale=plain.time_scale))]
    try:
        with quota(usable_cores() / 2):
            say("within a CPU quota of half the cores")
            lines.append(same("quota of half", plain, play()))
            say("within that quota, asking for all of it")
            squeezed = plain.time_scale * (plain.conditions.load or FULL_LOAD) / FULL_LOAD
            lines.append(same("quota, all asked", plain, play(time_scale=squeezed)))
    except NoGroup as error:
        result["skipped"].append(f"CPU quota: {error}")
    return lines


def same(how: str, plain: Played, slowed: Played) -> Line:
    """PASS if the slowed run has the times of the plain one, or says INVALID; FAIL if neither."""
    found = _sums(slowed)
    off = max(
        (abs(found.get(what, np.inf) / was - 1.0) for what, was in _sums(plain).items()), default=np.inf
    )
    figures = {"off": off, "time_scale": slowed.time_scale, **_shares(slowed)}
    measured = len(slowed.client)
    said = slowed.reasons[0] if slowed.reasons else ""
    bar = f"the same within {SAME:.0%}, or INVALID"
    if plain.reasons:
        return Line(how, "paced", "", measured, figures, bar, "INVALID", f"as it is: {plain.reasons[0]}")
    if said or off <= SAME:
        return Line(how, "paced", "", measured, figures, bar, "PASS", f"says INVALID: {said}" if said else "")
    return Line(how, "paced", "", measured, figures, bar, "FAIL", "wrong times, and not a word")


def _sums(run: Played) -> dict[str, float]:
    """Achieved over declared time: of all training, and of each device's trips."""
    sums = {"training": run.times("compute")}
    for name in sorted(set(run.profiles)):
        sums[name] = run.times("trip", np.array([profile == name for profile in run.profiles]))
    return {
        what: float(achieved.sum() / declared.sum())
        for what, (declared, achieved) in sums.items()
        if len(declared)
    }


def _shares(run: Played) -> dict[str, float]:
    names = ("load", "used", "others", "throttled")
    return {name: value for name in names if (value := getattr(run.conditions, name)) is not None}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute all the time, until the end."""
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(probe.loaded("compute", load.LONGEST_S))
        yield


@contextlib.contextmanager
def quota(cores: float) -> Iterator[None]:
    """This process and all that it starts within a CPU quota. `NoGroup` where no group can be made."""
    with Groups(["cpu"]) as groups:
        home, group = find("cpu"), groups.group("slowed")
        CpuGroup(group.place("cpu")).limit(round(cores * PERIOD_US), PERIOD_US)
        group.enter(os.getpid())
        try:
            yield
        finally:
            write(home.folder / "cgroup.procs", str(os.getpid()))
