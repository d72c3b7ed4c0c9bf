"""Measures the fidelity of the emulation: compares each quantity with its declared value.

Each metric comes from an ordinary run with real client processes. Only the training is replaced by matrix
products, whose number of operations is known. A metric is INVALID if the state of the host made the run
unreliable, or if the metric misses its limit while other processes use the host.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from edgefl import toml
from edgefl.devices import device_names, load_device
from edgefl.devices.schema import Device
from edgefl.devices.thermal import ThermalModel, thermal_model
from edgefl.experiment import Clock, Fleet, Model, Stop, Training
from edgefl.host import open as throttle
from edgefl.host import probe
from edgefl.host.capacity import UsageMeter, capacity_cores
from edgefl.host.verdict import Conditions
from edgefl.kernels.arguments import Doubles
from edgefl.lab import bench
from edgefl.lab.bench import Judged, Say, judged
from edgefl.lab.workloads import EXERCISE, PRODUCT_FLOP, ExerciseArgs
from edgefl.learning.operations import StepWork
from edgefl.results import tables
from edgefl.results.summary import ACHIEVED, fidelity_of

Throttle = Literal["paced", "cgroup", "sigstop"]
Link = Mapping[str, Mapping[str, float | str]]
"""The ``down`` and ``up`` tables of a network profile."""

DEVICES = ("watch-a7", "moto-g4", "pi-4", "pixel-3a", "pixel-2", "pixel-3", "pixel-4", "flagship-sd8g2")
"""Eight profiles, from a watch to a flagship phone, whose compute rates differ by a factor of up to 40."""
EACH = 2
"""Number of clients with each device profile."""
HOME: dict[str, Link] = {
    "home": {"down": {"rate_mbps": 50.0, "delay_ms": 10.0}, "up": {"rate_mbps": 20.0, "delay_ms": 10.0}}
}
FLEET = dict.fromkeys(DEVICES, EACH)
ALONE = "pixel-3"
WORK = ExerciseArgs(200_000, 0.5)
MECHANISMS: tuple[Throttle, ...] = ("paced", "sigstop", "cgroup")
LENGTHS = {
    "fleet": (12.0, 4.0),
    "alone": (8.0, 3.0),
    "shares": (10.0, 4.0),
    "links": (24.0, 8.0),
    "fast_links": (12.0, 3.0),
    "heat": (1800.0, 300.0),
    "ranks": (10.0, 3.0),
}
"""Duration of each run in emulated seconds, without and with ``--quick``."""


def run(
    quick: bool = False,
    *,
    length: Mapping[str, float] | None = None,
    mechanisms: Sequence[Throttle] = MECHANISMS,
    say: Say = bench.silent,
) -> dict[str, Any]:
    """Measure all quantities; return plain values for `show` and a JSON file.

    ``lines`` contains the fields of `Judged` for each quantity and mechanism, ``rates`` contains the compute
    rate of each trip in FLOP/s, keyed by mechanism, and ``skipped`` lists the mechanisms that this host does
    not support, with the reasons.
    """
    length = length or {name: both[quick] for name, both in LENGTHS.items()}
    began_s = time.monotonic()
    result: dict[str, Any] = {"host": bench.machine(), "skipped": [], "rates": {}}
    lines = []
    for mechanism in mechanisms:
        lines += _mechanism(mechanism, length, result, say)
    lines += _links(length, say)
    say("phones that get hot")
    hot_devices = dict.fromkeys(HOT_DEVICES, 1)
    hot = trial(hot_devices, {"near": {}}, HOT_WORK, length["heat"], time_scale=HOT_TIME_SCALE, thermal=True)
    lines.append(thermal(length["heat"], predicted_s(hot), hot))
    say("every bundled device")
    rates = bundled_rates()
    lines.append(ranks(trial(dict.fromkeys(rates, 1), HOME, ExerciseArgs(1000, 0.5), length["ranks"]), rates))
    verdicts = [line.verdict for line in lines]
    result["lines"] = [line._asdict() for line in lines]
    result["verdict"] = next((each for each in ("FAIL", "INVALID") if each in verdicts), "PASS")
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _mechanism(
    mechanism: Throttle, length: Mapping[str, float], result: dict[str, Any], say: Say
) -> list[Judged]:
    """Measure one mechanism that limits processes to their devices' rates."""
    tried = None if mechanism == "paced" else probe.throttle(mechanism)
    if tried is not None and tried.what == "none":
        result["skipped"].append(f"{mechanism}: {tried.why_not}")
        return []
    say(f"{sum(FLEET.values())} clients of {len(FLEET)} profiles, {mechanism}")
    fleet = trial(FLEET, HOME, WORK, length["fleet"], throttle=mechanism)
    say(f"one {ALONE} alone, {mechanism}")
    alone = trial({ALONE: 1}, HOME, WORK, length["alone"], throttle=mechanism, time_scale=fleet.time_scale)
    declared_s, achieved_s = fleet.times("compute")
    flop = fleet.columns["steps"] * PRODUCT_FLOP / WORK.real
    rates = {"declared": (flop / declared_s).tolist(), "achieved": (flop / achieved_s).tolist()}
    result["rates"][mechanism] = rates
    lines = [rate(mechanism, fleet), trip(mechanism, fleet), isolation(mechanism, alone, fleet, ALONE)]
    if tried is not None:
        say(f"processes without pacing of their own, {mechanism}")
        found, conditions = held_processes(mechanism, DEVICES, length["shares"])
        what = ("core share", mechanism, f"{len(found)} processes")
        lines.append(_within(what, found, {"median": 0.03}, conditions))
    return lines


# ---- links: rates from 1 to 400 Mbps, delays, each distribution of jitter, loss -------------------

SLOW_PARAMETERS = 62_500
"""Number of parameters of the model in runs with slow links: 250 kB, which take 2 s to send at 1 Mbps."""
SLOW_WORK, FAST_WORK = ExerciseArgs(SLOW_PARAMETERS, 0.02), ExerciseArgs(1_000_000, 0.1)
SLOW: dict[str, Link] = {
    "mbps-1": {"down": {"rate_mbps": 1.0, "delay_ms": 150.0}, "up": {"rate_mbps": 1.0}},
    "mbps-10": {"down": {"rate_mbps": 10.0}, "up": {"rate_mbps": 10.0, "delay_ms": 50.0}},
}
FAST: dict[str, Link] = {
    "mbps-100": {"down": {"rate_mbps": 100.0, "delay_ms": 10.0}, "up": {"rate_mbps": 100.0}},
    "mbps-400": {"down": {"rate_mbps": 400.0}, "up": {"rate_mbps": 400.0, "delay_ms": 2.0}},
}
LOSSY, LOSSY_MBPS = {"loss-1": 1.0, "loss-5": 5.0}, 5.0
"""Percentage of packets that uploads lose, keyed by network, and the rate of these uploads in Mbps."""
JITTER = {
    "normal": (50.0, 10.0, stats.norm(50.0, 10.0)),
    "uniform": (40.0, 20.0, stats.uniform(20.0, 40.0)),
    "exponential": (30.0, 10.0, stats.expon(30.0, 10.0)),
}
"""For each kind of jitter: the declared delay of uploads in ms, the spread in ms, and the distribution."""
MTU_BYTES, HEADER_BYTES = 1500, 40
HOT_DEVICES = ("pixel-4", "pi-4", "pixel-3a", "pixel-2", "moto-g4", "poco-f3", "pi-3b-plus", "oneplus-3")
"""Devices whose profiles have a complete thermal model."""
HOT_TIME_SCALE = 0.02
"""Wall seconds per emulated second: half an emulated hour takes 36 wall seconds."""
HOT_WORK = ExerciseArgs(1000, compute_s=20.0, real=0.004)
"""Only a part of the work is computed; all of it would overload the host at this time scale."""


def _links(length: Mapping[str, float], say: Say) -> list[Judged]:
    """Measure a run with links of up to 10 Mbps and a run with links of 100 and 400 Mbps."""
    lossy: dict[str, Link] = {
        name: {"up": {"rate_mbps": LOSSY_MBPS, "loss_pct": pct}} for name, pct in LOSSY.items()
    }
    jittery: dict[str, Link] = {
        kind: {"up": {"delay_ms": delay, "jitter_ms": spread, "jitter_dist": kind}}
        for kind, (delay, spread, _) in JITTER.items()
    }
    say("links of up to 10 Mbps, with jitter and loss")
    links = {**SLOW, **lossy, **jittery}
    fleet = dict.fromkeys(DEVICES[: len(links)], EACH)
    slow = trial(fleet, links, SLOW_WORK, length["links"], assigned=dict(zip(fleet, links, strict=True)))
    say("links of 100 and 400 Mbps")
    assigned = {device: list(FAST)[2 * i // len(DEVICES)] for i, device in enumerate(DEVICES)}
    fast = trial(FLEET, FAST, FAST_WORK, length["fast_links"], assigned=assigned)
    each = [(name, links[name], slow) for name in SLOW] + [(name, FAST[name], fast) for name in FAST]
    return [
        *(transfer(float(link["up"]["rate_mbps"]), name, run) for name, link, run in each),
        *(
            delay(sum(float(way.get("delay_ms", 0.0)) for way in link.values()), name, run)
            for name, link, run in each
        ),
        *(jitter(kind, kind, slow) for kind in JITTER),
        *(_loss(name, slow) for name in LOSSY),
    ]


def _loss(name: str, run: TripTimes) -> Judged:
    """Judge packet loss; infer the number of retransmitted packets from the additional time of uploads."""
    _, achieved_s = run.times("up", name)
    nbytes = 4 * SLOW_PARAMETERS
    packets = math.ceil(nbytes / (MTU_BYTES - HEADER_BYTES))
    took_bytes = achieved_s * LOSSY_MBPS * 1e6 / 8
    again = np.rint((took_bytes - nbytes - packets * HEADER_BYTES) / MTU_BYTES).clip(0)
    lost = int(again.sum())
    return loss(LOSSY[name], lost, lost + packets * len(again), run)


# ---- runs ---------------------------------------------------------------------------------------


class TripTimes(NamedTuple):
    """Times of the finished trips of a run, in emulated seconds, and the state of the host during the run."""

    columns: dict[str, Doubles]
    client: npt.NDArray[np.int64]
    clients: list[tuple[str, str]]
    """The device profile and the network of each client."""
    time_scale: float
    conditions: Conditions

    def of(self, name: str) -> npt.NDArray[np.bool_]:
        """Return a mask that selects the trips with the device profile or network ``name``."""
        return np.array([name in pair for pair in self.clients])[self.client]

    def times(self, quantity: str, name: str = "") -> tuple[Doubles, Doubles]:
        """Return the declared and the achieved times of all trips.

        If ``name`` is given, only the trips with this device profile or network are included.
        """
        chosen = self.of(name) if name else slice(None)
        return self.columns[f"{quantity}_declared_s"][chosen], self.columns[ACHIEVED[quantity]][chosen]


def trial(
    fleet: Mapping[str, int],
    links: Mapping[str, Link],
    work: ExerciseArgs,
    seconds: float,
    *,
    assigned: Mapping[str, str] | None = None,
    time_scale: float | Literal["auto"] = "auto",
    **more: Any,
) -> TripTimes:
    """Run a fleet for ``seconds`` emulated seconds and return the times of its trips.

    ``assigned`` maps devices to the names of ``links``; by default, all devices use the first link. ``more``
    contains further fields of `Fleet`. Raises the same errors as a run.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-fidelity-") as name:
        folder = Path(name)
        for network, link in links.items():
            given = [f"{way}.{key}" for way, keys in link.items() for key in keys]
            sources = dict.fromkeys(given, "assumed: made up to be measured")
            profile = {"id": network, "name": network, "down": {}, "up": {}, **link, "sources": sources}
            (folder / f"{network}.toml").write_text(toml.write(profile))
        on = {device: (assigned or {}).get(device, next(iter(links))) for device in fleet}
        experiment = bench.settings(
            name="fidelity",
            fleet=Fleet(
                devices=dict(fleet),
                network={device: str(folder / f"{network}.toml") for device, network in on.items()},
                memory="off",
                join_spread_s=work.compute_s,
                **more,
            ),
            model=Model(name="exercise", args=work._asdict()),
            training=Training(batch_size=1),
            strategy={"name": "fedbuff", "buffer_size": sum(fleet.values())},
            clock=Clock(kind="wall", time_scale=time_scale),
            stop=Stop(emulated_s=seconds),
        )
        with bench.run_record(experiment, EXERCISE, folder / "run") as record:
            trips, conditions = record.trips, fidelity_of(record)
            ended = ~np.isnan(trips["trip_achieved_s"])
            declared = (f"{quantity}_declared_s" for quantity in ACHIEVED)
            wanted = [*declared, *ACHIEVED.values(), "steps", "work_s", "sent_s"]
            return TripTimes(
                columns={column: np.asarray(trips[column][ended], dtype=np.float64) for column in wanted},
                client=trips["client"][ended],
                clients=[(row.profile, row.network) for row in record.clients],
                time_scale=record.meta.time_scale,
                conditions=Conditions(**{each: conditions[each] for each in Conditions.__struct_fields__}),
            )


def bundled_rates() -> dict[str, float]:
    """Return the rate, in FLOP/s, of each bundled profile that describes a processor.

    Profiles with random speeds or absences are left out. Phones from ``phones.toml`` (profiles with
    ``units``) are also left out, because their rates are scaled from the rates of one phone.
    """
    devices = [load_device(name) for name in device_names()]
    return {
        one.id: rate_of(one)
        for one in devices
        if one.cpu is not None and not (one.slowdown or one.delay_model or one.availability or one.units)
    }


def rate_of(device: Device) -> float:
    """Return the rate, in FLOP/s, of matrix products on a device whose profile describes a processor."""
    model = device.time_model()
    assert model is not None
    seconds: float = model.seconds(StepWork(matmul_flop=PRODUCT_FLOP))
    return PRODUCT_FLOP / seconds


STEP_S = 0.05


def stepped(model: ThermalModel, temp_c: float, rest_s: float, work_s: float) -> tuple[float, float]:
    """Return the time in seconds that work takes on a device after a rest, and the final temperature.

    The rest takes ``rest_s`` seconds. At full speed, the work would take ``work_s`` seconds. This function
    integrates by explicit Euler steps, whereas `ThermalModel` uses the closed form.

    >>> body = ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5))
    >>> round(stepped(body, 25.0, 0.0, 100.0)[0])
    129
    """
    took_s = 0.0
    while rest_s > 0 or work_s > 0:
        speed = 0.0 if rest_s > 0 else model.speeds[sum(temp_c >= edge for edge in model.step_c)]
        step_s = min(STEP_S, work_s / speed if speed else rest_s)
        temp_c += step_s * (model.ambient_c + model.power_w(speed) * model.r_c_per_w - temp_c) / model.tau_s
        if rest_s > 0:
            rest_s -= step_s
        else:
            work_s -= step_s * speed
            took_s += step_s
    return took_s, temp_c


def predicted_s(run: TripTimes) -> Doubles:
    """Return the simulated training time of each trip, in seconds, on devices that heat up.

    Each profile may be used by only one client.
    """
    predicted = np.empty(len(run.client))
    start_s = run.columns["sent_s"] + run.columns["down_s"]
    for name, _ in run.clients:
        device, trips = load_device(name), np.flatnonzero(run.of(name))
        model = thermal_model(device)
        assert model is not None
        temp_c, now_s = model.ambient_c, 0.0
        for trip in trips[np.argsort(run.columns["sent_s"][trips])].tolist():
            rest_s, cold_s = start_s[trip] - now_s, run.columns["work_s"][trip]
            predicted[trip], temp_c = stepped(model, temp_c, rest_s, cold_s)
            now_s = start_s[trip] + predicted[trip]
    return predicted


LOAD = 0.3
"""Share of the host's cores that `held_processes` divides among all processes that it starts."""


def held_processes(mechanism: str, devices: Sequence[str], seconds: float) -> tuple[Doubles, Conditions]:
    """Limit two busy processes per device to CPU shares that are proportional to the device's rate.

    Returns the relative error of the CPU time of each process, and the state of the host.
    """
    rates = np.repeat([rate_of(load_device(name)) for name in devices], EACH)
    shares = rates / rates.sum() * LOAD * capacity_cores()
    usage = UsageMeter()
    usage.begin()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(probe.loaded()) for _ in shares]
        throttles = [
            stack.enter_context(throttle(mechanism, child.pid, share))
            for child, share in zip(children, shares.tolist(), strict=True)
        ]
        time.sleep(seconds)
        found = np.array([throttle.achieved().error for throttle in throttles])
    usage.end()
    used = usage.usage()  # the usage of child processes is known only after they have ended
    return found, Conditions(others=used["others"], steal=used["steal"])


# ---- limits and verdicts -----------------------------------------------------------------------

ALPHA = 0.01
CONFIDENCE = 0.99
DELAY_MS = 1.0


def summary_of(found: Doubles) -> dict[str, float]:
    """Return the median and 95th percentile of the absolute errors, and the median of the signed errors.

    All three are NaN if ``found`` is empty.
    """
    size = np.abs(found)
    return {"median": _percentile(size), "p95": _percentile(size, 95), "signed": _percentile(found)}


def _percentile(values: Doubles, percent: float = 50) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _within(
    what: tuple[str, str, str], found: Doubles, most: dict[str, float], conditions: Conditions
) -> Judged:
    """Judge the errors ``found``; ``most`` contains upper limits for some of the metrics of `summary_of`."""
    figures = summary_of(found)
    bar = ", ".join(f"{name} {limit:.0%}".removeprefix("median ") for name, limit in most.items())
    held = all(figures[name] <= limit for name, limit in most.items())
    return judged(what, len(found), figures, bar, held, conditions)


def rate(mechanism: str, run: TripTimes) -> Judged:
    """Judge the achieved compute rate (work per time) against the declared rate."""
    declared, achieved = run.times("compute")
    most = {"median": 0.01, "p95": 0.03}
    return _within(("compute rate", mechanism, "8 profiles"), declared / achieved - 1.0, most, run.conditions)


def trip(mechanism: str, run: TripTimes) -> Judged:
    """Judge the duration of whole trips against the declared duration."""
    declared, achieved = run.times("trip")
    found = achieved / declared - 1.0
    return _within(("whole trip", mechanism, "8 profiles"), found, {"p95": 0.03}, run.conditions)


def transfer(rate_mbps: float, network: str, run: TripTimes) -> Judged:
    """Judge the times of downloads and uploads over links with the rate ``rate_mbps``."""
    declared, achieved = np.hstack([run.times("down", network), run.times("up", network)])
    most = {"p95": 0.02 if rate_mbps <= 100 else 0.05}
    found = achieved / declared - 1.0
    return _within(("transfer", "link", f"{rate_mbps:g} Mbps"), found, most, run.conditions)


def delay(delay_ms: float, network: str, run: TripTimes) -> Judged:
    """Judge the delay of a link without jitter against the declared delay."""
    declared, achieved = run.times("delay", network)
    off_ms = np.abs(achieved - declared) * 1e3
    most_ms = max(DELAY_MS, 0.02 * delay_ms)
    figures = {"median_ms": _percentile(off_ms), "p95_ms": _percentile(off_ms, 95)}
    held, bar = figures["p95_ms"] <= most_ms, f"p95 {most_ms:g} ms"
    return judged(("delay", "link", f"{delay_ms:g} ms"), len(off_ms), figures, bar, held, run.conditions)


def jitter(kind: str, network: str, run: TripTimes) -> Judged:
    """Judge random delays against their declared distribution with a Kolmogorov–Smirnov test."""
    _, achieved = run.times("delay", network)
    delay, spread, declared = JITTER[kind]
    distance, chance = stats.kstest(achieved * 1e3, declared.cdf) if len(achieved) else (math.nan, 0.0)
    figures = {"ks": float(distance), "p_value": float(chance)}
    bar, held = f"p above {ALPHA:g}", bool(chance > ALPHA)
    what = ("jitter", "link", f"{kind}, {delay:g} ± {spread:g} ms")
    return judged(what, len(achieved), figures, bar, held, run.conditions)


def loss(loss_pct: float, lost: int, sent: int, run: TripTimes) -> Judged:
    """Judge the share of retransmitted packets against the declared loss."""
    low, high = map(int, stats.binom.interval(CONFIDENCE, sent, loss_pct / 100.0)) if sent else (0, 0)
    figures = {"lost": float(lost), "sent": float(sent), "share": lost / sent if sent else math.nan}
    held = low <= lost <= high
    return judged(("loss", "link", f"{loss_pct:g}%"), sent, figures, f"{low} to {high}", held, run.conditions)


def thermal(seconds: float, predicted_s: Doubles, run: TripTimes) -> Judged:
    """Compare the speed of each trip on devices that heat up with a simulation in small time steps."""
    found = predicted_s / run.columns["compute_s"] - 1.0
    rmse = float(np.sqrt(np.mean(found**2))) if len(found) else math.nan
    figures, what = {"rmse": rmse, **summary_of(found)}, ("thermal curve", "paced", f"{seconds / 60:g} min")
    return judged(what, len(found), figures, "RMSE 3%", rmse <= 0.03, run.conditions)


def isolation(mechanism: str, alone: TripTimes, beside: TripTimes, profile: str) -> Judged:
    """Judge how much a client's times change when 15 other clients run in parallel."""
    pairs = {what: [run.times(what, profile) for run in (alone, beside)] for what in ("compute", "trip")}
    measured = min(len(achieved) for pair in pairs.values() for _, achieved in pair)
    shift = {}
    for quantity, pair in pairs.items():
        medians = [_percentile(achieved / declared) for declared, achieved in pair]
        shift[quantity] = abs(medians[1] / medians[0] - 1.0)
    what, held = ("isolation", mechanism, f"{profile}, 15 others"), max(shift.values()) < 0.02
    return judged(what, measured, shift, "below 2%", held, alone.conditions, beside.conditions)


def ranks(run: TripTimes, rates: Mapping[str, float]) -> Judged:
    """Judge the rank correlation between the measured speeds of all devices and the declared ``rates``."""
    pairs = []
    for name, rate in rates.items():
        declared_s, achieved_s = run.times("compute", name)
        if len(achieved_s):
            pairs.append((rate, rate * _percentile(declared_s / achieved_s)))
    count = len(pairs)
    rho = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic) if count > 2 else math.nan
    what = ("ranks", "paced", f"{count} devices")
    return judged(what, count, {"rho": rho}, "ρ from 0.99", rho >= 0.99, run.conditions)


# ---- printed output ----------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print a row for each quantity, and the reason for each verdict other than PASS."""
    lines, facts = result["lines"], result["host"]
    rows = [
        (_name(line), f"{line['measured']:,}", found(line["figures"]), line["bar"], line["verdict"])
        for line in lines
    ]
    tables.show(
        tables.table(["quantity", ">measured", "error or figure", "limit", "verdict"], rows),
        *(f"{_name(line)}: {line['why']}" for line in lines if line["why"]),
        *(f"not measured with {skipped}" for skipped in result["skipped"]),
        f"{bench.machine_line(facts)} before; {result['seconds']:g} s. {result['verdict']}",
    )


def _name(line: dict[str, Any]) -> str:
    """Return the name of a row: the quantity, followed by the mechanism or the declared value.

    The name contains the mechanism if the quantity is measured with several mechanisms.
    """
    several = line["quantity"] in ("compute rate", "whole trip", "isolation", "core share")
    return f"{line['quantity']}, {line['mechanism'] if several else line['declared'].partition(',')[0]}"


def found(figures: dict[str, float | None]) -> str:
    """Format the values of a row.

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
"""Formats of values, keyed by metric. The first key that a quantity's metrics contain selects the format."""
