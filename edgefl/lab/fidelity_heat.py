"""Phones that compute until they are hot, against their profiles' thermal figures stepped through time."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.devices import load_device
from edgefl.devices.thermal import POWER_EXPONENT, ThermalModel, thermal_model
from edgefl.lab import fidelity_bars as bars
from edgefl.lab.exercise import Exercise
from edgefl.lab.fidelity_runs import Floats, Played, Way, trial

DEVICES = ("pixel-4", "pi-4", "pixel-3a", "pixel-2", "moto-g4", "poco-f3", "pi-3b-plus", "oneplus-3")
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
    work = Exercise(1000, COMPUTE_S, REAL)
    run = trial(dict.fromkeys(DEVICES, 1), network, work, seconds, time_scale=TIME_SCALE, thermal=True)
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
