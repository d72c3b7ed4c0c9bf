"""The runs of ``bench fidelity``: ordinary ones, on links made up to be measured."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import limits, toml
from edgefl.devices import device_names, load_device
from edgefl.devices.thermal import ThermalModel, thermal_model
from edgefl.experiment import Checkpoint, Clock, Evaluation, Experiment, Fleet, Model, Stop
from edgefl.lab.workloads import EXERCISE, ExerciseArgs
from edgefl.limits import probe
from edgefl.limits.capacity import StealMeter, UsageMeter, usable_cores
from edgefl.limits.fidelity import Conditions
from edgefl.limits.groups import Groups, find, write
from edgefl.limits.throttle import set_quota
from edgefl.results.record import Record
from edgefl.results.summary import fidelity_of
from edgefl.run import supervisor

Floats = npt.NDArray[np.float64]
Throttle = Literal["paced", "cgroup", "sigstop"]

DEVICES = ("watch-a7", "moto-g4", "pi-4", "pixel-3a", "pixel-2", "pixel-3", "pixel-4", "flagship-sd8g2")
"""Eight profiles, from a watch to a flagship: a factor of 40."""
EACH = 2
"""Clients of each device."""
NEVER = 10**9
TIMES = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "delay": ("delay_declared_s", "delay_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}


class LinkDirection(NamedTuple):
    """One direction of a made-up link; no rate is no limit."""

    rate_mbps: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    jitter_dist: str = "none"
    loss_pct: float = 0.0


class MadeUpLink(NamedTuple):
    """Both directions of a link."""

    down: LinkDirection = LinkDirection()
    up: LinkDirection = LinkDirection()


class TripTimes(NamedTuple):
    """A run's finished trips, column by column, and its conditions; seconds are emulated."""

    columns: dict[str, Floats]
    client: npt.NDArray[np.int64]
    profiles: list[str]
    """By client."""
    networks: list[str]
    """By client."""
    time_scale: float
    conditions: Conditions
    reasons: tuple[str, ...]
    """The run's own reasons for being INVALID; empty if it is not."""

    def times(self, quantity: str, clients: npt.NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
        """Declared and achieved, of all trips or of those of the clients that are chosen."""
        chosen = np.ones(len(self.client), dtype=bool) if clients is None else clients[self.client]
        declared, achieved = TIMES[quantity]
        return self.columns[declared][chosen], self.columns[achieved][chosen]

    def on(self, network: str) -> npt.NDArray[np.bool_]:
        """A mask of the clients on this network."""
        return np.array([name == network for name in self.networks])

    def of(self, profile: str) -> npt.NDArray[np.bool_]:
        """A mask of the clients of this profile."""
        return np.array([name == profile for name in self.profiles])


def trial(
    fleet: Mapping[str, int],
    links: Mapping[str, MadeUpLink],
    work: ExerciseArgs,
    seconds: float,
    *,
    throttle: Throttle = "paced",
    assigned: Mapping[str, str] | None = None,
    time_scale: float | Literal["auto"] = "auto",
    thermal: bool = False,
) -> TripTimes:
    """Let a fleet make trips for so many emulated ``seconds`` and read off what they took.

    ``assigned`` says which device is on which of the ``links``; without it all are on the first. Raises what
    a run raises.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-fidelity-") as name:
        folder = Path(name)
        paths = {network: _write_network(folder, network, link) for network, link in links.items()}
        on = {device: paths[(assigned or {}).get(device, next(iter(paths)))] for device in fleet}
        experiment = Experiment(
            name="fidelity",
            fleet=Fleet(
                devices=dict(fleet),
                network=on,
                memory="off",
                throttle=throttle,
                thermal=thermal,
                join_spread_s=work.compute_s,
            ),
            model=Model(name="exercise", args=work._asdict()),
            strategy={"name": "fedbuff", "buffer_size": sum(fleet.values())},
            clock=Clock(kind="wall", time_scale=time_scale),
            evaluation=Evaluation(every_versions=NEVER),
            checkpoint=Checkpoint(every_s=float(NEVER)),
            stop=Stop(emulated_s=seconds),
        )
        with supervisor.run(experiment, folder / "run", quiet=True, workload=EXERCISE).record as record:
            return _trip_times(record)


def _trip_times(record: Record) -> TripTimes:
    trips = record.trips
    ended = ~np.isnan(trips["trip_achieved_s"])
    found = fidelity_of(record)
    wanted = [*(name for pair in TIMES.values() for name in pair), "flops", "sent_s"]
    return TripTimes(
        columns={name: np.asarray(trips[name][ended], dtype=np.float64) for name in wanted},
        client=trips["client"][ended],
        profiles=[row.profile for row in record.clients],
        networks=[row.network for row in record.clients],
        time_scale=record.meta.time_scale,
        conditions=Conditions(**{name: found[name] for name in Conditions.__struct_fields__}),
        reasons=tuple(found["reasons"]),
    )


def _write_network(folder: Path, name: str, link: MadeUpLink) -> str:
    """Write the link's profile; returns its path."""
    nothing = LinkDirection()._asdict()
    ways = {
        way: {key: value for key, value in direction._asdict().items() if value != nothing[key]}
        for way, direction in link._asdict().items()
    }
    given = [f"{way}.{key}" for way, keys in ways.items() for key in keys]
    sources = dict.fromkeys(given, "assumed: made up to be measured")
    file = folder / f"{name}.toml"
    file.write_text(toml.write({"id": name, "name": name, **ways, "sources": sources}))
    return str(file)


def bundled_devices() -> list[str]:
    """Every bundled profile of one device that computes at a rate of its own and is there all the time."""
    devices = [load_device(name) for name in device_names()]
    return [
        one.id
        for one in devices
        if one.cpu is not None and not (one.slowdown or one.delay_model or one.availability)
    ]


# ---- heat --------------------------------------------------------------------------------------

STEP_S = 0.05


class SteppedBody:
    """A device's temperature in explicit Euler steps: `ThermalModel` has it in closed form."""

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
        """Do what takes ``work_s`` at full speed; returns the seconds that it takes.

        >>> body = SteppedBody(ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5)))
        >>> round(body.compute(100.0))
        129
        """
        model, took_s = self._model, 0.0
        while work_s > 0:
            speed = model.speeds[sum(self.temp_c >= edge for edge in model.step_c)]
            step_s = min(STEP_S, work_s / speed)
            self._pass(step_s, model.power_w(speed))
            work_s -= step_s * speed
            took_s += step_s
        return took_s


def predicted_s(name: str, run: TripTimes, trips: npt.NDArray[np.int64]) -> Floats:
    """Seconds that a device's training takes on its ``trips``, in order, as it gets hot."""
    device = load_device(name)
    model = thermal_model(device)
    assert model is not None
    body, now_s = SteppedBody(model), 0.0
    cold_s = run.columns["flops"][trips] / device.train_flop_per_s
    starts_s = run.columns["sent_s"][trips] + run.columns["down_s"][trips]
    hot_s = np.empty(len(trips))
    for i, start_s in enumerate(starts_s.tolist()):
        body.rest(max(0.0, start_s - now_s))
        hot_s[i] = body.compute(cold_s[i])
        now_s = start_s + hot_s[i]
    return hot_s


# ---- the host ----------------------------------------------------------------------------------

LOAD = 0.3
"""Share of the host's cores that all of `held_processes` are given together."""
PERIOD_US = 10_000


def held_processes(mechanism: str, devices: Sequence[str], seconds: float) -> tuple[Floats, Conditions]:
    """Hold busy processes that know nothing of it, two a device, to shares in proportion to its rate.

    Returns the error of each one's CPU time, and the conditions meanwhile.
    """
    rates = np.repeat([load_device(name).train_flop_per_s for name in devices], EACH)
    shares = rates / rates.sum() * LOAD * usable_cores()
    usage, steal = UsageMeter(), StealMeter()
    usage.begin()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(probe.loaded()) for _ in shares]
        throttles = [
            stack.enter_context(limits.open(mechanism, child.pid, share))
            for child, share in zip(children, shares.tolist(), strict=True)
        ]
        time.sleep(seconds)
        found = np.array([throttle.achieved().error for throttle in throttles])
    used = usage.usage()  # once the processes have ended: their time is this process's then
    return found, Conditions(others=used.others, steal=steal.share())


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that compute all the time, until the end."""
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(probe.loaded())
        yield


@contextlib.contextmanager
def quota(cores: float) -> Iterator[None]:
    """This process and all that it starts within a CPU quota. `NoGroup` where no group can be made."""
    with Groups(["cpu"]) as groups:
        home, group = find("cpu"), groups.group("slowed")
        set_quota(group.place("cpu"), round(cores * PERIOD_US), PERIOD_US)
        group.enter(os.getpid())
        try:
            yield
        finally:
            write(home.folder / "cgroup.procs", str(os.getpid()))
