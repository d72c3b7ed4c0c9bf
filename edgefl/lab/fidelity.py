"""How well phones are emulated: every mechanism and quantity against what was declared, in real runs.

Each run is one of `edgefl.run`, with its real client processes; only the training is another one, products of
matrices whose amount is known. A figure counts if its run was under conditions in which it may be believed.

    exercise.py            what the clients compute
    fidelity_runs.py       one run, and what it measured
    fidelity_bars.py       what each quantity is held to
    fidelity_links.py      links: rate, delay, jitter, loss
    fidelity_heat.py       the thermal curve, simulated in small steps beside
    fidelity_shares.py     processes that know nothing of being held
    fidelity_slowed.py     the same on a host that is slowed to half
    fidelity_tables.py     what is printed
    fidelity_picture.py    what is drawn
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgefl.devices import load_device
from edgefl.lab import fidelity_bars as bars
from edgefl.lab.exercise import Exercise
from edgefl.lab.fidelity_heat import heated
from edgefl.lab.fidelity_links import links
from edgefl.lab.fidelity_runs import DEVICES, EACH, Played, Throttle, Way, bundled_devices, trial
from edgefl.lab.fidelity_shares import held
from edgefl.lab.fidelity_slowed import slowed_runs
from edgefl.lab.fidelity_tables import show
from edgefl.limits import probe
from edgefl.limits.capacity import host

HOME = {"home": {"down": Way(50.0, 10.0), "up": Way(20.0, 10.0)}}
FLEET = dict.fromkeys(DEVICES, EACH)
ALONE = "pixel-3"
WORK = Exercise(200_000, 0.5)
MECHANISMS: tuple[Throttle, ...] = ("paced", "sigstop", "cgroup")


class Length(NamedTuple):
    """Emulated seconds of each run."""

    fleet: float
    alone: float
    shares: float
    links: float
    fast_links: float
    heat: float
    ranks: float


FULL = Length(fleet=12.0, alone=8.0, shares=10.0, links=24.0, fast_links=12.0, heat=1800.0, ranks=10.0)
QUICK = Length(fleet=4.0, alone=3.0, shares=4.0, links=8.0, fast_links=3.0, heat=300.0, ranks=3.0)


def run(
    json_path: Path | str | None = None,
    quick: bool = False,
    *,
    slowed: bool = False,
    length: Length | None = None,
    mechanisms: Sequence[Throttle] = MECHANISMS,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure, print a table, write ``json_path`` and a picture beside it if given, return what it holds.

    ``lines`` has one entry a quantity and mechanism: the fields of `fidelity_bars.Line`. ``slowed`` measures
    the same experiment on a host slowed to half instead. ``skipped`` says which mechanisms do not work here
    and why. ``curves`` is what the picture shows. ``say`` is told what is measured next.
    """
    length = length or (QUICK if quick else FULL)
    began_s = time.monotonic()
    result: dict[str, Any] = {
        "host": {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2)},
        "skipped": [],
        "curves": {},
    }
    lines = (
        slowed_runs(FLEET, HOME, WORK, length.fleet, result, say)
        if slowed
        else _measured(length, mechanisms, result, say)
    )
    result["lines"] = [line.plain() for line in lines]
    result["verdict"] = bars.worst([line.verdict for line in lines])
    result["seconds"] = round(time.monotonic() - began_s, 1)
    show(result)
    if json_path is not None:
        from edgefl.lab.fidelity_picture import draw

        path = Path(json_path)
        path.write_text(json.dumps(result, indent=2) + "\n")
        if not slowed:
            draw(result, [path.with_suffix(".png"), path.with_suffix(".svg")])
    return result


def _measured(
    length: Length, mechanisms: Sequence[Throttle], result: dict[str, Any], say: Callable[[str], None]
) -> list[bars.Line]:
    curves = result["curves"]
    curves["rates"] = {}
    lines: list[bars.Line] = []
    for mechanism in mechanisms:
        if why := _unusable(mechanism):
            result["skipped"].append(f"{mechanism}: {why}")
            continue
        say(f"{sum(FLEET.values())} clients of {len(FLEET)} profiles, {mechanism}")
        fleet = trial(FLEET, HOME, WORK, length.fleet, throttle=mechanism)
        say(f"one {ALONE} alone, {mechanism}")
        alone = trial({ALONE: 1}, HOME, WORK, length.alone, throttle=mechanism, time_scale=fleet.time_scale)
        lines += [bars.rate(mechanism, fleet), bars.trip(mechanism, fleet)]
        lines.append(bars.isolation(mechanism, alone, fleet, ALONE))
        curves["rates"][mechanism] = _rates(fleet)
        if mechanism != "paced":
            say(f"processes that know nothing of it, {mechanism}")
            lines.append(held(mechanism, DEVICES, length.shares))
    lines += links(DEVICES, length.links, length.fast_links, curves, say)
    say("phones that get hot")
    lines.append(heated(length.heat, curves))
    say("every bundled device")
    names = bundled_devices()
    everything = trial(dict.fromkeys(names, 1), HOME, Exercise(1000, 0.5), length.ranks)
    declared = np.array([load_device(name).train_flop_per_s for name in everything.profiles])
    line, speeds = bars.ranks(everything, declared)
    curves["ranks"] = {
        "devices": everything.profiles,
        "declared": declared.tolist(),
        "measured": [value if value > 0 else None for value in speeds.tolist()],
    }
    return [*lines, line]


def _unusable(mechanism: Throttle) -> str:
    """Why it cannot be used here; empty if it can."""
    if mechanism == "paced":
        return ""
    if not sys.platform.startswith("linux"):
        return "works on Linux only"
    found = probe.throttle(mechanism)
    return found.why_not if found.what == "none" else ""


def _rates(fleet: Played) -> dict[str, list[float]]:
    """Declared and achieved compute rates, FLOP/s, of each trip."""
    declared_s, achieved_s = fleet.times("compute")
    flop = fleet.columns["flops"]
    return {"declared": (flop / declared_s).tolist(), "achieved": (flop / achieved_s).tolist()}
