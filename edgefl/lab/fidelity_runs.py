"""The runs of ``bench fidelity``: ordinary ones, on links made up to be measured."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
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
from edgefl.limits.capacity import UsageMeter, usable_cores
from edgefl.limits.fidelity import Conditions
from edgefl.results.summary import fidelity_of
from edgefl.run import supervisor

Floats = npt.NDArray[np.float64]
Throttle = Literal["paced", "cgroup", "sigstop"]
Link = Mapping[str, Mapping[str, float | str]]
"""What a network's profile says of ``down`` and ``up``."""

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


class TripTimes(NamedTuple):
    """A run's finished trips, column by column, and its conditions; seconds are emulated."""

    columns: dict[str, Floats]
    client: npt.NDArray[np.int64]
    clients: list[tuple[str, str]]
    """Profile and network, by client."""
    time_scale: float
    conditions: Conditions

    def of(self, name: str) -> npt.NDArray[np.bool_]:
        """A mask of the trips of a profile, or on a network."""
        return np.array([name in pair for pair in self.clients])[self.client]

    def times(self, quantity: str, name: str = "") -> tuple[Floats, Floats]:
        """Declared and achieved, of all trips or of those of a profile or network."""
        chosen = self.of(name) if name else slice(None)
        declared, achieved = TIMES[quantity]
        return self.columns[declared][chosen], self.columns[achieved][chosen]


def trial(
    fleet: Mapping[str, int],
    links: Mapping[str, Link],
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
        for network, link in links.items():
            given = [f"{way}.{key}" for way, keys in link.items() for key in keys]
            sources = dict.fromkeys(given, "assumed: made up to be measured")
            profile = {"id": network, "name": network, "down": {}, "up": {}, **link, "sources": sources}
            (folder / f"{network}.toml").write_text(toml.write(profile))
        on = {device: (assigned or {}).get(device, next(iter(links))) for device in fleet}
        experiment = Experiment(
            name="fidelity",
            fleet=Fleet(
                devices=dict(fleet),
                network={device: str(folder / f"{network}.toml") for device, network in on.items()},
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
            trips, found = record.trips, fidelity_of(record)
            ended = ~np.isnan(trips["trip_achieved_s"])
            wanted = [*(column for pair in TIMES.values() for column in pair), "flops", "sent_s"]
            return TripTimes(
                columns={column: np.asarray(trips[column][ended], dtype=np.float64) for column in wanted},
                client=trips["client"][ended],
                clients=[(row.profile, row.network) for row in record.clients],
                time_scale=record.meta.time_scale,
                conditions=Conditions(**{each: found[each] for each in Conditions.__struct_fields__}),
            )


def bundled_rates() -> dict[str, float]:
    """FLOP/s of each bundled profile of one device that has a rate of its own and is there all the time."""
    devices = [load_device(name) for name in device_names()]
    return {
        one.id: one.train_flop_per_s
        for one in devices
        if one.cpu is not None and not (one.slowdown or one.delay_model or one.availability)
    }


STEP_S = 0.05


def stepped(model: ThermalModel, temp_c: float, rest_s: float, work_s: float) -> tuple[float, float]:
    """Seconds for what takes ``work_s`` at full speed, after a rest, and the temperature at the end.

    Explicit Euler steps: `ThermalModel` has it in closed form.

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


def predicted_s(run: TripTimes) -> Floats:
    """Seconds that each trip's training takes as its device gets hot; one client has each profile."""
    predicted = np.empty(len(run.client))
    start_s = run.columns["sent_s"] + run.columns["down_s"]
    for name, _ in run.clients:
        device, trips = load_device(name), np.flatnonzero(run.of(name))
        model = thermal_model(device)
        assert model is not None
        temp_c, now_s = model.ambient_c, 0.0
        for trip in trips[np.argsort(run.columns["sent_s"][trips])].tolist():
            cold_s = run.columns["flops"][trip] / device.train_flop_per_s
            predicted[trip], temp_c = stepped(model, temp_c, start_s[trip] - now_s, cold_s)
            now_s = start_s[trip] + predicted[trip]
    return predicted


LOAD = 0.3
"""Share of the host's cores that all of `held_processes` are given together."""


def held_processes(mechanism: str, devices: Sequence[str], seconds: float) -> tuple[Floats, Conditions]:
    """Hold busy processes that know nothing of it, two a device, to shares in proportion to its rate.

    Returns the error of each one's CPU time, and the conditions meanwhile.
    """
    rates = np.repeat([load_device(name).train_flop_per_s for name in devices], EACH)
    shares = rates / rates.sum() * LOAD * usable_cores()
    usage = UsageMeter()
    usage.begin()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(probe.loaded()) for _ in shares]
        throttles = [
            stack.enter_context(limits.open(mechanism, child.pid, share))
            for child, share in zip(children, shares.tolist(), strict=True)
        ]
        time.sleep(seconds)
        found = np.array([throttle.achieved().error for throttle in throttles])
    usage.end()
    used = usage.usage()  # once the processes have ended: their time is this process's then
    return found, Conditions(others=used.others, steal=used.steal)
