"""The fidelity of the emulation: every mechanism and quantity against what was declared, in real runs.

Each run is one of `edgefl.run`, with its real client processes; only the training is another one, products of
matrices whose amount is known. A figure counts only if its run was under conditions in which it may be
believed: INVALID is no PASS, and a bar that is missed while others use the host is INVALID, not FAIL.

A host slowed to half must give the same emulated times, or say INVALID. Three ways to slow it: other
processes that compute on every core, a CPU quota of half the cores around the run and all its processes, and
that quota around a fleet that asks for all it leaves.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from edgefl.devices import load_device
from edgefl.lab.fidelity_runs import (
    DEVICES,
    EACH,
    Floats,
    LinkDirection,
    MadeUpLink,
    Throttle,
    TripTimes,
    bundled_devices,
    busy,
    held_processes,
    predicted_s,
    quota,
    trial,
)
from edgefl.lab.workloads import ExerciseArgs
from edgefl.limits import probe
from edgefl.limits.capacity import host, usable_cores
from edgefl.limits.fidelity import OTHERS_NOTED, Conditions, bounds
from edgefl.limits.groups import NoGroup
from edgefl.results import tables

Say = Callable[[str], None]

HOME = {"home": MadeUpLink(LinkDirection(50.0, 10.0), LinkDirection(20.0, 10.0))}
FLEET = dict.fromkeys(DEVICES, EACH)
ALONE = "pixel-3"
WORK = ExerciseArgs(200_000, 0.5)
MECHANISMS: tuple[Throttle, ...] = ("paced", "sigstop", "cgroup")
FULL_LOAD = 0.5
"""Share of the whole host that a fleet asks for which asks for all of half a host."""


class RunLengths(NamedTuple):
    """Emulated seconds of each run."""

    fleet: float
    alone: float
    shares: float
    links: float
    fast_links: float
    heat: float
    ranks: float


FULL = RunLengths(fleet=12.0, alone=8.0, shares=10.0, links=24.0, fast_links=12.0, heat=1800.0, ranks=10.0)
QUICK = RunLengths(fleet=4.0, alone=3.0, shares=4.0, links=8.0, fast_links=3.0, heat=300.0, ranks=3.0)


def run(
    json_path: Path | str | None = None,
    quick: bool = False,
    *,
    slowed: bool = False,
    length: RunLengths | None = None,
    mechanisms: Sequence[Throttle] = MECHANISMS,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Measure, print a table, write ``json_path`` and a picture beside it if given, return what it holds.

    ``lines`` has one entry a quantity and mechanism: the fields of `JudgedQuantity`. ``rates`` has the
    compute rates of each trip by mechanism, FLOP/s, which the picture shows. ``skipped`` says which
    mechanisms do not work here and why. ``slowed`` measures the same experiment on a host slowed to half
    instead. ``say`` is told what is measured next.
    """
    length = length or (QUICK if quick else FULL)
    began_s = time.monotonic()
    result: dict[str, Any] = {
        "host": {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2)},
        "skipped": [],
        "rates": {},
    }
    lines = _slowed(length.fleet, result, say) if slowed else _measured(length, mechanisms, result, say)
    result["lines"] = [line.plain() for line in lines]
    result["verdict"] = worst([line.verdict for line in lines])
    result["seconds"] = round(time.monotonic() - began_s, 1)
    show(result)
    if json_path is not None:
        path = Path(json_path)
        path.write_text(json.dumps(result, indent=2) + "\n")
        if not slowed:
            draw(result, [path.with_suffix(".png"), path.with_suffix(".svg")])
    return result


def _measured(
    length: RunLengths, mechanisms: Sequence[Throttle], result: dict[str, Any], say: Say
) -> list[JudgedQuantity]:
    lines: list[JudgedQuantity] = []
    for mechanism in mechanisms:
        if why := _unusable(mechanism):
            result["skipped"].append(f"{mechanism}: {why}")
            continue
        say(f"{sum(FLEET.values())} clients of {len(FLEET)} profiles, {mechanism}")
        fleet = trial(FLEET, HOME, WORK, length.fleet, throttle=mechanism)
        say(f"one {ALONE} alone, {mechanism}")
        alone = trial({ALONE: 1}, HOME, WORK, length.alone, throttle=mechanism, time_scale=fleet.time_scale)
        lines += [rate(mechanism, fleet), trip(mechanism, fleet)]
        lines.append(isolation(mechanism, alone, fleet, ALONE))
        declared_s, achieved_s = fleet.times("compute")
        flop = fleet.columns["flops"]
        rates = {"declared": (flop / declared_s).tolist(), "achieved": (flop / achieved_s).tolist()}
        result["rates"][mechanism] = rates
        if mechanism != "paced":
            say(f"processes that know nothing of it, {mechanism}")
            lines.append(share(mechanism, *held_processes(mechanism, DEVICES, length.shares)))
    lines += _links(length, say)
    say("phones that get hot")
    lines.append(_heated(length.heat))
    say("every bundled device")
    names = bundled_devices()
    everything = trial(dict.fromkeys(names, 1), HOME, ExerciseArgs(1000, 0.5), length.ranks)
    declared = np.array([load_device(name).train_flop_per_s for name in everything.profiles])
    return [*lines, ranks(everything, declared)]


def _unusable(mechanism: Throttle) -> str:
    """The reason why it cannot be used here; empty if it can."""
    if mechanism == "paced":
        return ""
    if not sys.platform.startswith("linux"):
        return "works on Linux only"
    found = probe.throttle(mechanism)
    return found.why_not if found.what == "none" else ""


# ---- links: rates from 1 to 400 Mbps, delays, jitter of each kind, loss --------------------------


SLOW_PARAMETERS = 62_500
"""A quarter of a megabyte each way: two seconds at 1 Mbps."""
SLOW_WORK, FAST_WORK = ExerciseArgs(SLOW_PARAMETERS, 0.02), ExerciseArgs(1_000_000, 0.1)
SLOW = {
    "mbps-1": MadeUpLink(LinkDirection(1.0, 150.0), LinkDirection(1.0)),
    "mbps-10": MadeUpLink(LinkDirection(10.0), LinkDirection(10.0, 50.0)),
}
FAST = {
    "mbps-100": MadeUpLink(LinkDirection(100.0, 10.0), LinkDirection(100.0)),
    "mbps-400": MadeUpLink(LinkDirection(400.0), LinkDirection(400.0, 2.0)),
}
LOSSY, LOSSY_MBPS = {"loss-1": 1.0, "loss-5": 5.0}, 5.0
"""Packets lost on the way up, %, and the rate of that way."""
JITTER = {"normal": (50.0, 10.0), "uniform": (40.0, 20.0), "exponential": (30.0, 10.0)}
"""One-way delay and its spread on the way up, ms."""
MTU_BYTES, HEADER_BYTES = 1500, 40


def _links(length: RunLengths, say: Say) -> list[JudgedQuantity]:
    """Two runs, of links up to 10 Mbps and from 100 Mbps on, and a line for each thing declared."""
    links = {
        **SLOW,
        **{name: MadeUpLink(up=LinkDirection(LOSSY_MBPS, loss_pct=pct)) for name, pct in LOSSY.items()},
        **{
            kind: MadeUpLink(up=LinkDirection(None, delay, spread, kind))
            for kind, (delay, spread) in JITTER.items()
        },
    }
    say("links to 10 Mbps, with jitter and loss")
    fleet = dict.fromkeys(DEVICES[: len(links)], EACH)
    assigned = dict(zip(fleet, links, strict=True))
    slow = trial(fleet, links, SLOW_WORK, length.links, assigned=assigned)
    say("links of 100 and 400 Mbps")
    assigned = {device: list(FAST)[2 * i // len(DEVICES)] for i, device in enumerate(DEVICES)}
    fast = trial(FLEET, FAST, FAST_WORK, length.fast_links, assigned=assigned)
    each = [*((name, link, slow) for name, link in SLOW.items()), *((n, k, fast) for n, k in FAST.items())]
    return [
        *(transfer(link.up.rate_mbps or 0.0, name, run) for name, link, run in each),
        *(delay(link.down.delay_ms + link.up.delay_ms, name, run) for name, link, run in each),
        *(
            jitter(f"{kind}, {delay:g} ± {spread:g} ms", distribution(kind), kind, slow)
            for kind, (delay, spread) in JITTER.items()
        ),
        *(_loss(name, slow) for name in LOSSY),
    ]


def distribution(kind: str) -> Any:
    """The distribution, in ms, that a network with this jitter declares for its delay.

    >>> [round(float(distribution(kind).cdf(JITTER[kind][0])), 3) for kind in JITTER]
    [0.5, 0.5, 0.0]
    """
    delay, spread = JITTER[kind]
    if kind == "uniform":
        return stats.uniform(delay - spread, 2 * spread)
    return {"normal": stats.norm, "exponential": stats.expon}[kind](delay, spread)


def _loss(name: str, run: TripTimes) -> JudgedQuantity:
    """Packets that were sent again, by what each upload took longer than one without loss."""
    _, achieved_s = run.times("up", run.on(name))
    nbytes = 4 * SLOW_PARAMETERS
    packets = math.ceil(nbytes / (MTU_BYTES - HEADER_BYTES))
    took_bytes = achieved_s * LOSSY_MBPS * 1e6 / 8
    again = np.rint((took_bytes - nbytes - packets * HEADER_BYTES) / MTU_BYTES).clip(0)
    lost = int(again.sum())
    return loss(LOSSY[name], lost, lost + packets * len(again), run)


# ---- heat, and a slowed host -------------------------------------------------------------------

HOT_DEVICES = ("pixel-4", "pi-4", "pixel-3a", "pixel-2", "moto-g4", "poco-f3", "pi-3b-plus", "oneplus-3")
"""Devices whose profiles give their thermal figures in full."""
HOT_TIME_SCALE = 0.02
"""Half an hour of heat in 36 seconds."""
HOT_WORK = ExerciseArgs(1000, compute_s=20.0, real=0.004)
"""A share of the work is done: at this time scale the whole would take more than the host has."""


def _heated(seconds: float) -> JudgedQuantity:
    """Let devices train for so long, and compare each trip's speed with the simulation's."""
    near = {"near": MadeUpLink()}
    fleet = dict.fromkeys(HOT_DEVICES, 1)
    run = trial(fleet, near, HOT_WORK, seconds, time_scale=HOT_TIME_SCALE, thermal=True)
    predicted = np.empty(len(run.client))
    for client, name in enumerate(run.profiles):
        mine = np.flatnonzero(run.client == client)
        order = mine[np.argsort(run.columns["sent_s"][mine])]
        predicted[order] = predicted_s(name, run, order)
    return thermal(seconds, predicted, run.columns["compute_s"], run)


def _slowed(seconds: float, result: dict[str, Any], say: Say) -> list[JudgedQuantity]:
    """A run as it is, and the slowed ones against it."""
    play = partial(trial, FLEET, HOME, WORK, seconds)
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


# ---- bars and verdicts -------------------------------------------------------------------------

Verdict = Literal["PASS", "FAIL", "INVALID"]
ALPHA = 0.01
CONFIDENCE = 0.99
DELAY_MS = 1.0
SAME = 0.03
"""A slowed run's times may be off by so much."""


class JudgedQuantity(NamedTuple):
    """One quantity under one mechanism."""

    quantity: str
    mechanism: str
    declared: str
    """The declared value, for people."""
    measured: int
    """Trips, packets or devices."""
    figures: dict[str, float]
    """Measured values; errors are shares."""
    bar: str
    verdict: Verdict
    why: str = ""
    """The reason of a verdict that is no PASS."""

    def plain(self) -> dict[str, Any]:
        """Its fields for JSON: a figure that is none is None."""
        figures = {name: value if math.isfinite(value) else None for name, value in self.figures.items()}
        return {**self._asdict(), "figures": figures}


def judged(
    quantity: str,
    mechanism: str,
    declared: str,
    measured: int,
    figures: dict[str, float],
    bar: str,
    held: bool,
    *conditions: Conditions,
) -> JudgedQuantity:
    """The verdict on figures that hold their bar or do not, found under these conditions."""
    doubt = next((why for each in conditions for why in bounds(None, None, each)), "")
    others = max(each.others or 0.0 for each in conditions)
    verdict: Verdict = "PASS" if held else "FAIL"
    why = "" if held else "the bar is missed"
    if not measured:
        verdict, why = "INVALID", "nothing was measured"
    elif doubt:
        verdict, why = "INVALID", doubt
    elif not held and others > OTHERS_NOTED:
        verdict, why = "INVALID", f"other processes used {others:.0%} of the host"
    return JudgedQuantity(quantity, mechanism, declared, measured, figures, bar, verdict, why)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL if any is, else INVALID if any is.

    >>> worst(["PASS", "INVALID", "PASS"])
    'INVALID'
    """
    return next((verdict for verdict in ("FAIL", "INVALID") if verdict in verdicts), "PASS")


def errors(declared: Floats, achieved: Floats) -> Floats:
    """Achieved over declared, less 1, where something was declared."""
    return achieved[declared > 0] / declared[declared > 0] - 1.0


def summary_of(found: Floats) -> dict[str, float]:
    """Median and 95th percentile of the errors' sizes, and their signed median."""
    size = np.abs(found)
    return {"median": _median(size), "p95": _p95(size), "signed": _median(found)}


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _p95(values: Floats) -> float:
    return float(np.percentile(values, 95)) if len(values) else math.nan


def _within(
    quantity: str,
    mechanism: str,
    declared: str,
    found: Floats,
    most: dict[str, float],
    conditions: Conditions,
) -> JudgedQuantity:
    """The verdict on errors of which these figures may be so much at most."""
    figures = summary_of(found)
    bar = ", ".join(f"{name} {limit:.0%}".removeprefix("median ") for name, limit in most.items())
    held = all(figures[name] <= limit for name, limit in most.items())
    return judged(quantity, mechanism, declared, len(found), figures, bar, held, conditions)


def rate(mechanism: str, run: TripTimes) -> JudgedQuantity:
    """Compute rate: the work over the time that it took, against the declared rate."""
    declared, achieved = run.times("compute")
    most = {"median": 0.01, "p95": 0.03}
    return _within("compute rate", mechanism, "8 profiles", declared / achieved - 1.0, most, run.conditions)


def trip(mechanism: str, run: TripTimes) -> JudgedQuantity:
    """The whole trip's time."""
    found = errors(*run.times("trip"))
    return _within("whole trip", mechanism, "8 profiles", found, {"p95": 0.03}, run.conditions)


def share(mechanism: str, found: Floats, conditions: Conditions) -> JudgedQuantity:
    """CPU time that processes which know nothing of it were let have, over what they should."""
    return _within("core share", mechanism, f"{len(found)} processes", found, {"median": 0.03}, conditions)


def transfer(rate_mbps: float, network: str, run: TripTimes) -> JudgedQuantity:
    """Download and upload times over links of one rate."""
    there = run.on(network)
    found = np.concatenate([errors(*run.times(way, there)) for way in ("down", "up")])
    most = {"p95": 0.02 if rate_mbps <= 100 else 0.05}
    return _within("transfer", "link", f"{rate_mbps:g} Mbps", found, most, run.conditions)


def delay(delay_ms: float, network: str, run: TripTimes) -> JudgedQuantity:
    """One-way delays of a link without jitter."""
    declared, achieved = run.times("delay", run.on(network))
    off_ms = np.abs(achieved - declared) * 1e3
    most_ms = max(DELAY_MS, 0.02 * delay_ms)
    figures = {"median_ms": _median(off_ms), "p95_ms": _p95(off_ms)}
    held, bar = figures["p95_ms"] <= most_ms, f"p95 {most_ms:g} ms"
    return judged("delay", "link", f"{delay_ms:g} ms", len(off_ms), figures, bar, held, run.conditions)


def jitter(declared: str, distribution: Any, network: str, run: TripTimes) -> JudgedQuantity:
    """Delays that vary, against their network's ``distribution`` in ms (scipy's): Kolmogorov–Smirnov."""
    _, achieved = run.times("delay", run.on(network))
    distance, chance = stats.kstest(achieved * 1e3, distribution.cdf) if len(achieved) else (math.nan, 0.0)
    figures = {"ks": float(distance), "p_value": float(chance)}
    bar, held = f"p above {ALPHA:g}", bool(chance > ALPHA)
    return judged("jitter", "link", declared, len(achieved), figures, bar, held, run.conditions)


def loss(loss_pct: float, lost: int, sent: int, run: TripTimes) -> JudgedQuantity:
    """Packets that were sent again, as the transfers' times show them, of all that were sent."""
    low, high = map(int, stats.binom.interval(CONFIDENCE, sent, loss_pct / 100.0)) if sent else (0, 0)
    figures = {"lost": float(lost), "sent": float(sent), "share": lost / sent if sent else math.nan}
    held = low <= lost <= high
    return judged("loss", "link", f"{loss_pct:g}%", sent, figures, f"{low} to {high}", held, run.conditions)


def thermal(seconds: float, predicted_s: Floats, achieved_s: Floats, run: TripTimes) -> JudgedQuantity:
    """Speeds of devices that get hot, trip by trip, against a simulation in small steps."""
    found = predicted_s / achieved_s - 1.0
    rmse = float(np.sqrt(np.mean(found**2))) if len(found) else math.nan
    figures, declared = {"rmse": rmse, **summary_of(found)}, f"{seconds / 60:g} min"
    return judged(
        "thermal curve", "paced", declared, len(found), figures, "RMSE 3%", rmse <= 0.03, run.conditions
    )


def isolation(mechanism: str, alone: TripTimes, beside: TripTimes, profile: str) -> JudgedQuantity:
    """The shift of a client's times when 15 others run."""
    shift, measured = {}, 0
    for quantity in ("compute", "trip"):
        medians = []
        for run in (alone, beside):
            declared, achieved = run.times(quantity, run.of(profile))
            measured = min(len(achieved), measured or len(achieved))
            medians.append(_median(achieved / declared))
        shift[quantity] = abs(medians[1] / medians[0] - 1.0)
    held = max(shift.values()) < 0.02
    declared_as, conditions = f"{profile}, 15 others", (alone.conditions, beside.conditions)
    return judged("isolation", mechanism, declared_as, measured, shift, "below 2%", held, *conditions)


def ranks(run: TripTimes, rates: Floats) -> JudgedQuantity:
    """Rank correlation of measured and declared speed over all devices."""
    declared, achieved = run.times("compute")
    speeds = np.array(
        [rates[client] * _median((declared / achieved)[run.client == client]) for client in range(len(rates))]
    )
    known = ~np.isnan(speeds)
    count = int(known.sum())
    rho = float(stats.spearmanr(rates[known], speeds[known]).statistic) if count > 2 else math.nan
    figures, held = {"rho": rho}, rho >= 0.99
    return judged("ranks", "paced", f"{count} devices", count, figures, "ρ from 0.99", held, run.conditions)


def same(how: str, plain: TripTimes, slowed: TripTimes) -> JudgedQuantity:
    """PASS if the slowed run has the times of the plain one, or says INVALID; FAIL if neither."""
    found = _sums(slowed)
    off = max(
        (abs(found.get(what, np.inf) / was - 1.0) for what, was in _sums(plain).items()), default=np.inf
    )
    shares = {name: getattr(slowed.conditions, name) for name in ("load", "used", "others", "throttled")}
    figures = {"off": off, "time_scale": slowed.time_scale}
    figures |= {name: value for name, value in shares.items() if value is not None}
    said = slowed.reasons[0] if slowed.reasons else ""
    verdict: Verdict = "PASS"
    why = f"says INVALID: {said}" if said else ""
    if plain.reasons:
        verdict, why = "INVALID", f"as it is: {plain.reasons[0]}"
    elif not said and off > SAME:
        verdict, why = "FAIL", "wrong times, and not a word"
    bar = f"the same within {SAME:.0%}, or INVALID"
    return JudgedQuantity(how, "paced", "", len(slowed.client), figures, bar, verdict, why)


def _sums(run: TripTimes) -> dict[str, float]:
    """Achieved over declared time: of all training, and of each device's trips."""
    sums = {"training": run.times("compute")}
    for name in sorted(set(run.profiles)):
        sums[name] = run.times("trip", run.of(name))
    return {
        what: float(achieved.sum() / declared.sum())
        for what, (declared, achieved) in sums.items()
        if len(declared)
    }


# ---- what is printed and drawn -----------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print a line a quantity, and a word on each that misses its bar."""
    lines, facts = result["lines"], result["host"]
    slowed = any("off" in line["figures"] for line in lines)
    tables.show(
        _slowed_table(lines) if slowed else _table(lines),
        *(f"{line['quantity'] if slowed else _name(line)}: {line['why']}" for line in lines if line["why"]),
        *(f"left out, {skipped}" for skipped in result["skipped"]),
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']} before; {result['seconds']:g} s. "
        f"{result['verdict']}",
    )


def _table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (_name(line), f"{line['measured']:,}", found(line["figures"]), line["bar"], line["verdict"])
        for line in lines
    ]
    return tables.table(["quantity", ">n", "error or figure", "bar", ""], rows)


def _name(line: dict[str, Any]) -> str:
    """The quantity, and of what: a mechanism where several have it, else what was declared."""
    several = line["quantity"] in ("compute rate", "whole trip", "isolation", "core share")
    return f"{line['quantity']}, {line['mechanism'] if several else line['declared'].partition(',')[0]}"


def _slowed_table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (
            line["quantity"],
            f"{line['figures']['time_scale']:.3g}",
            *(tables.percent(line["figures"].get(name), 0) for name in ("load", "others", "throttled")),
            tables.percent(line["figures"]["off"]),
            "INVALID" if line["why"].startswith("says") else "VALID",
            line["verdict"],
        )
        for line in lines
    ]
    heads = ["host", ">scale", ">asked", ">others", ">stopped", ">off by", "run says", ""]
    return tables.table(heads, rows)


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
    for name, form in FORMS.items():
        if name in known:
            return form.format(**known)
    return f"{max(known.values()):.2%} at most"


FORMS = {
    "rmse": "RMSE {rmse:.2%}",
    "median": "{median:.2%}, p95 {p95:.2%}",
    "p95_ms": "{median_ms:.2f}, p95 {p95_ms:.2f} ms",
    "ks": "D {ks:.3f}, p {p_value:.2f}",
    "lost": "{lost:.0f} lost",
    "rho": "ρ {rho:.4f}",
}
"""The words for the figures of a quantity, by one that it has."""
BAR = 3.0
"""The compute rate's 95th percentile, %."""


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """The errors of the compute rate by mechanism, to each of ``paths``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, rates in result["rates"].items():
        errors = np.sort(np.abs(np.array(rates["achieved"]) / np.array(rates["declared"]) - 1.0)) * 100
        axes.step(np.maximum(errors, 1e-3), np.arange(1, len(errors) + 1) / len(errors), label=name)
    axes.axvline(BAR, color="0.6", linewidth=1, linestyle="--")
    axes.axhline(0.95, color="0.6", linewidth=1, linestyle="--")
    axes.set(xscale="log", xlabel="error of a trip's compute rate, %", ylabel="share of trips below it")
    axes.set_title("Errors by mechanism; dashed: the 95th percentile's bar", fontsize=10)
    axes.legend(fontsize=8)
    figure.suptitle(f"Fidelity on {result['host']['cpu']}, {result['host']['cores']} cores", fontsize=10)
    for path in paths:
        figure.savefig(path, dpi=130)
