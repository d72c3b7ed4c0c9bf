"""How well phones are emulated: every mechanism and quantity against what was declared, in real runs.

Each run is one of `edgefl.run`, with its real client processes; only the training is another one, products of
matrices whose amount is known. A figure counts if its run was under conditions in which it may be believed.

A host slowed to half must give the same emulated times, or say INVALID. Three ways to slow it: other
processes that compute on every core, a CPU quota of half the cores around the run and all its processes, and
that quota around a fleet that asks for all it leaves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from edgefl import limits
from edgefl.devices import load_device
from edgefl.devices.thermal import POWER_EXPONENT, ThermalModel, thermal_model
from edgefl.lab import fidelity_bars as bars
from edgefl.lab.fidelity_bars import Line
from edgefl.lab.fidelity_runs import DEVICES, EACH, Floats, Played, Throttle, Way, bundled_devices, trial
from edgefl.lab.workloads import ExerciseArgs
from edgefl.limits import load, probe
from edgefl.limits.capacity import StealMeter, UsageMeter, host, usable_cores
from edgefl.limits.fidelity import Conditions
from edgefl.limits.groups import Groups, NoGroup, find, write
from edgefl.limits.throttle import CpuGroup
from edgefl.results.tables import show as show_tables
from edgefl.results.tables import table

HOME = {"home": {"down": Way(50.0, 10.0), "up": Way(20.0, 10.0)}}
FLEET = dict.fromkeys(DEVICES, EACH)
ALONE = "pixel-3"
WORK = ExerciseArgs(200_000, 0.5)
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
    everything = trial(dict.fromkeys(names, 1), HOME, ExerciseArgs(1000, 0.5), length.ranks)
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


SLOW_PARAMETERS = 62_500
"""A quarter of a megabyte each way: two seconds at 1 Mbps."""
FAST_PARAMETERS = 1_000_000
COMPUTE_S, FAST_COMPUTE_S = 0.02, 0.1
LOSSY = {"loss-1": (5.0, 1.0), "loss-5": (5.0, 5.0)}
"""Mbps and packets lost on the way up, %."""
JITTER = {"normal": (50.0, 10.0), "uniform": (40.0, 20.0), "exponential": (30.0, 10.0)}
"""One-way delay and its spread on the way up, ms."""
MTU_BYTES, HEADER_BYTES = 1500, 40


class Plain(NamedTuple):
    """A link without jitter and loss: its rate both ways, and a delay one way."""

    rate_mbps: float
    delayed: Literal["down", "up"]
    delay_ms: float

    @property
    def ways(self) -> dict[str, Way]:
        """Both directions."""
        delays = {"down": 0.0, "up": 0.0} | {self.delayed: self.delay_ms}
        return {way: Way(self.rate_mbps, delay_ms) for way, delay_ms in delays.items()}


SLOW = {"mbps-1": Plain(1.0, "down", 150.0), "mbps-10": Plain(10.0, "up", 50.0)}
FAST = {"mbps-100": Plain(100.0, "down", 10.0), "mbps-400": Plain(400.0, "up", 2.0)}


def links(
    devices: Sequence[str],
    seconds: float,
    fast_seconds: float,
    curves: dict[str, Any],
    say: Callable[[str], None],
) -> list[Line]:
    """Two runs, of links up to 10 Mbps and from 100 Mbps on, and a line for each thing declared."""
    networks = {
        **{name: link.ways for name, link in SLOW.items()},
        **{name: {"down": Way(), "up": Way(rate, loss_pct=loss)} for name, (rate, loss) in LOSSY.items()},
        **{
            kind: {"down": Way(), "up": Way(None, delay, spread, kind)}
            for kind, (delay, spread) in JITTER.items()
        },
    }
    say("links to 10 Mbps, with jitter and loss")
    fleet = dict.fromkeys(devices[: len(networks)], EACH)
    assigned = dict(zip(devices, networks, strict=False))
    slow = trial(fleet, networks, ExerciseArgs(SLOW_PARAMETERS, COMPUTE_S), seconds, assigned=assigned)
    say("links of 100 and 400 Mbps")
    networks = {name: link.ways for name, link in FAST.items()}
    half = len(devices) // 2
    assigned = {
        device: name
        for name, part in zip(networks, (devices[:half], devices[half:]), strict=True)
        for device in part
    }
    fleet = dict.fromkeys(devices, EACH)
    fast = trial(
        fleet, networks, ExerciseArgs(FAST_PARAMETERS, FAST_COMPUTE_S), fast_seconds, assigned=assigned
    )
    return [
        *(bars.transfer(link.rate_mbps, name, slow) for name, link in SLOW.items()),
        *(bars.transfer(link.rate_mbps, name, fast) for name, link in FAST.items()),
        *(bars.delay(link.delay_ms, name, slow) for name, link in SLOW.items()),
        *(bars.delay(link.delay_ms, name, fast) for name, link in FAST.items()),
        *(_jitter(kind, slow, curves) for kind in JITTER),
        *(_loss(name, slow) for name in LOSSY),
    ]


def _jitter(kind: str, run: Played, curves: dict[str, Any]) -> Line:
    delay, spread = JITTER[kind]
    _, achieved_s = run.times("delay", run.on(kind))
    curves.setdefault("delays_ms", {})[kind] = np.sort(achieved_s * 1e3).tolist()
    return bars.jitter(f"{kind}, {delay:g} ± {spread:g} ms", lambda s: cdf(kind, s * 1e3), kind, run)


def cdf(kind: str, ms: Floats) -> Floats:
    """The distribution function that a network with this jitter declares for its delay.

    >>> [round(float(cdf(kind, np.array([JITTER[kind][0]]))[0]), 3) for kind in JITTER]
    [0.5, 0.5, 0.0]
    """
    delay, spread = JITTER[kind]
    if kind == "normal":
        return np.array([0.5 * (1.0 + math.erf((x - delay) / (spread * math.sqrt(2.0)))) for x in ms])
    if kind == "uniform":
        return np.clip((ms - delay + spread) / (2.0 * spread), 0.0, 1.0)
    return 1.0 - np.exp(-np.maximum(ms - delay, 0.0) / spread)


def _loss(name: str, run: Played) -> Line:
    """Packets that were sent again, by what each upload took longer than one without loss."""
    rate_mbps, loss_pct = LOSSY[name]
    _, achieved_s = run.times("up", run.on(name))
    nbytes = 4 * SLOW_PARAMETERS
    packets = math.ceil(nbytes / (MTU_BYTES - HEADER_BYTES))
    took_bytes = achieved_s * rate_mbps * 1e6 / 8
    again = np.rint((took_bytes - nbytes - packets * HEADER_BYTES) / MTU_BYTES).clip(0)
    lost = int(again.sum())
    return bars.loss(loss_pct, lost, lost + packets * len(again), run)


HOT_DEVICES = ("pixel-4", "pi-4", "pixel-3a", "pixel-2", "moto-g4", "poco-f3", "pi-3b-plus", "oneplus-3")
"""Phones and boards whose profiles give their thermal figures in full."""
COMPUTE_S = 20.0
TIME_SCALE = 0.02
"""Half an hour of heat in 36 seconds."""
REAL = 0.004
"""Share of the work that is done: at this time scale the whole would take more than the host has."""
STEP_S = 0.05


class Body:
    """A device's temperature in explicit Euler steps."""

    def __init__(self, model: ThermalModel) -> None:
        self._model = model
        self.temp_c = model.ambient_c

    def _pass(self, seconds: float, power_w: float) -> None:
        model = self._model
        self.temp_c += seconds * (model.ambient_c + power_w * model.r_c_per_w - self.temp_c) / model.tau_s

    def rest(self, seconds: float) -> None:
        """Do nothing."""
        while seconds > 0:
            self._pass(min(STEP_S, seconds), 0.0)
            seconds -= STEP_S

    def compute(self, work_s: float) -> float:
        """Do what takes ``work_s`` at full speed; the seconds that it takes.

        >>> body = Body(ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5)))
        >>> round(body.compute(100.0))
        129
        """
        model, took_s = self._model, 0.0
        while work_s > 0:
            speed = model.speeds[sum(self.temp_c >= edge for edge in model.step_c)]
            step_s = min(STEP_S, work_s / speed)
            self._pass(step_s, model.busy_w * speed**POWER_EXPONENT)
            work_s -= step_s * speed
            took_s += step_s
        return took_s


def heated(seconds: float, curves: dict[str, Any]) -> bars.Line:
    """Let the devices train for so long, and compare each trip's speed with the simulation's."""
    network = {"near": {"down": Way(), "up": Way()}}
    work = ExerciseArgs(1000, COMPUTE_S, REAL)
    run = trial(dict.fromkeys(HOT_DEVICES, 1), network, work, seconds, time_scale=TIME_SCALE, thermal=True)
    predicted = np.empty(len(run.client))
    curve = curves["heat"] = {}
    for client, name in enumerate(run.profiles):
        mine = np.flatnonzero(run.client == client)
        order = mine[np.argsort(run.columns["sent_s"][mine])]
        predicted[order], cold = _predicted(name, run, order)
        curve[name] = {
            "at_s": run.columns["sent_s"][order].tolist(),
            "predicted": (cold / predicted[order]).tolist(),
            "achieved": (cold / run.columns["compute_s"][order]).tolist(),
        }
    return bars.thermal(seconds, predicted, run.columns["compute_s"], run)


def _predicted(name: str, run: Played, order: np.ndarray[Any, Any]) -> tuple[Floats, Floats]:
    """Seconds that each trip's training takes a device that rests between trips, and takes a cold one."""
    device = load_device(name)
    model = thermal_model(device)
    assert model is not None
    body, now_s = Body(model), 0.0
    cold = run.columns["flops"][order] / device.train_flop_per_s
    found = np.empty(len(order))
    for i, trip in enumerate(order):
        starts_s = run.columns["sent_s"][trip] + run.columns["down_s"][trip]
        body.rest(max(0.0, starts_s - now_s))
        found[i] = body.compute(cold[i])
        now_s = starts_s + found[i]
    return found, cold


LOAD = 0.3
"""Share of the host's cores that all of them are given together."""


def held(mechanism: Throttle, devices: Sequence[str], seconds: float) -> bars.Line:
    """Hold busy processes for so long, two a device, to shares in proportion to the devices' rates."""
    rates = np.repeat([load_device(name).train_flop_per_s for name in devices], EACH)
    shares = rates / rates.sum() * LOAD * usable_cores()
    usage, steal = UsageMeter(), StealMeter()
    usage.begin()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(probe.loaded("compute", load.LONGEST_S)) for _ in shares]
        throttles = [
            stack.enter_context(limits.open(mechanism, child.pid, share))
            for child, share in zip(children, shares.tolist(), strict=True)
        ]
        time.sleep(seconds)
        found = np.array([throttle.achieved().error for throttle in throttles])
    used = usage.usage()  # once the processes have ended: their time is this process's then
    return bars.share(mechanism, found, Conditions(others=used.others, steal=steal.share()))


SAME = 0.03
PERIOD_US = 10_000
FULL_LOAD = 0.5
"""Share of the whole host that a fleet asks for which asks for all of half a host."""


def slowed_runs(
    fleet: Mapping[str, int],
    networks: Mapping[str, Mapping[str, Way]],
    work: ExerciseArgs,
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


SLOWED = "off"
"""Only lines of slowed runs have this figure."""


def show(result: dict[str, Any]) -> None:
    """Print it."""
    lines = result["lines"]
    slowed = any(SLOWED in line["figures"] for line in lines)
    made = _slowed_table(lines) if slowed else _table(lines)
    show_tables(made)
    for line in lines:
        if line["why"]:
            show_tables(f"{line['quantity'] if slowed else _name(line)}: {line['why']}")
    for skipped in result["skipped"]:
        show_tables(f"left out, {skipped}")
    facts = result["host"]
    show_tables(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']} before; {result['seconds']:g} s. "
        f"{result['verdict']}"
    )


def _table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (_name(line), f"{line['measured']:,}", found(line["figures"]), line["bar"], line["verdict"])
        for line in lines
    ]
    return table(["quantity", ">n", "error or figure", "bar", ""], rows)


def _name(line: dict[str, Any]) -> str:
    """The quantity, and of what: a mechanism where several have it, else what was declared."""
    several = line["quantity"] in ("compute rate", "whole trip", "isolation", "core share")
    return f"{line['quantity']}, {line['mechanism'] if several else line['declared'].partition(',')[0]}"


def _slowed_table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (
            line["quantity"],
            f"{line['figures']['time_scale']:.3g}",
            *(_share(line["figures"].get(name)) for name in ("load", "others", "throttled")),
            _share(line["figures"]["off"], ".1%"),
            "INVALID" if line["why"].startswith("says") else "VALID",
            line["verdict"],
        )
        for line in lines
    ]
    heads = ["host", ">scale", ">asked", ">others", ">stopped", ">off by", "run says", ""]
    return table(heads, rows)


def _share(value: float | None, form: str = ".0%") -> str:
    return "–" if value is None else format(value, form)


def found(figures: dict[str, float | None]) -> str:
    """The figures of a line in a few words.

    >>> found({"median": 0.0004, "p95": 0.0123, "signed": 0.0001})
    '0.04%, p95 1.23%'
    >>> found({"lost": 612.0, "sent": 30000.0, "share": 0.0204})
    '612 lost'
    """
    known = {name: value for name, value in figures.items() if value is not None}
    if known.keys() < figures.keys() or not known:
        return "–"
    if "rmse" in known:
        return f"RMSE {known['rmse']:.2%}"
    if "median" in known:
        return f"{known['median']:.2%}, p95 {known['p95']:.2%}"
    if "p95_ms" in known:
        return f"{known['median_ms']:.2f}, p95 {known['p95_ms']:.2f} ms"
    if "ks" in known:
        return f"D {known['ks']:.3f}, p {known['p_value']:.2f}"
    if "lost" in known:
        return f"{known['lost']:.0f} lost"
    if "rho" in known:
        return f"ρ {known['rho']:.4f}"
    return f"{max(known.values()):.2%} at most"


BAR = 3.0
"""The compute rate's 95th percentile, %."""
HOT = 4
"""Devices whose heat is drawn."""


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Four panels, to each of ``paths``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (left, right), (below, beside) = figure.subplots(2, 2)
    curves = result["curves"]
    _ranks(left, curves["ranks"])
    _errors(right, curves["rates"])
    _delays(below, curves["delays_ms"])
    _heat(beside, curves["heat"])
    figure.suptitle(f"Fidelity on {result['host']['cpu']}, {result['host']['cores']} cores", fontsize=10)
    for path in paths:
        figure.savefig(path, dpi=130)


def _ranks(axes: Any, ranks: dict[str, Any]) -> None:
    declared = np.array(ranks["declared"]) / 1e9
    measured = np.array(ranks["measured"], dtype=np.float64) / 1e9
    span = (0.8 * declared.min(), 1.25 * declared.max())
    axes.plot(span, span, color="0.6", linewidth=1)
    axes.plot(declared, measured, "o", markersize=4)
    for name, x, y in zip(ranks["devices"], declared, measured, strict=True):
        if x in (declared.min(), declared.max()):
            axes.annotate(
                name, (x, y), fontsize=7, textcoords="offset points", xytext=(-4, 4), ha="right", va="bottom"
            )
    axes.set(
        xscale="log", yscale="log", xlim=span, ylim=span, xlabel="declared GFLOPS", ylabel="measured GFLOPS"
    )
    axes.set_title(f"Training rate of {len(declared)} devices", fontsize=10)


def _errors(axes: Any, rates: dict[str, dict[str, list[float]]]) -> None:
    for name, found in rates.items():
        errors = np.sort(np.abs(np.array(found["achieved"]) / np.array(found["declared"]) - 1.0)) * 100
        axes.step(np.maximum(errors, 1e-3), np.arange(1, len(errors) + 1) / len(errors), label=name)
    axes.axvline(BAR, color="0.6", linewidth=1, linestyle="--")
    axes.axhline(0.95, color="0.6", linewidth=1, linestyle="--")
    axes.set(xscale="log", xlabel="error of a trip's compute rate, %", ylabel="share of trips below it")
    axes.set_title("Errors by mechanism; dashed: the 95th percentile's bar", fontsize=10)
    axes.legend(fontsize=8)


def _delays(axes: Any, delays_ms: dict[str, list[float]]) -> None:
    for i, (kind, found) in enumerate(delays_ms.items()):
        delay, spread = JITTER[kind]
        grid = np.linspace(max(0.0, delay - 4 * spread), delay + 6 * spread, 300)
        axes.plot(grid, cdf(kind, grid), color=f"C{i}", linewidth=3, alpha=0.3)
        axes.step(found, np.arange(1, len(found) + 1) / len(found), color=f"C{i}", linewidth=1, label=kind)
    axes.set(xlabel="one-way delay, ms", ylabel="share of messages below it", xlim=(0, 100))
    axes.set_title("Jitter; broad: as declared", fontsize=10)
    axes.legend(fontsize=8)


def _heat(axes: Any, heat: dict[str, dict[str, list[float]]]) -> None:
    falls = sorted(heat, key=lambda name: min(heat[name]["predicted"], default=1.0))
    for i, name in enumerate(falls[:HOT]):
        found = heat[name]
        minutes = np.array(found["at_s"]) / 60
        axes.plot(minutes, found["predicted"], color=f"C{i}", linewidth=4, alpha=0.3)
        axes.plot(minutes, found["achieved"], ".", color=f"C{i}", markersize=3, label=name)
    axes.set(xlabel="emulated minutes of training", ylabel="speed, of a cold device's")
    axes.set_title("Heat; broad: simulated in small steps", fontsize=10)
    axes.legend(fontsize=8)
