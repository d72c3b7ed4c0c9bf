"""The runs of ``bench fidelity``: real ones, of real client processes, each for some quantities."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.devices import device_names, load_device
from edgefl.experiment import Checkpoint, Clock, Evaluation, Experiment, Fleet, Model, Stop
from edgefl.lab.workloads import EXERCISE, ExerciseArgs
from edgefl.limits.fidelity import Conditions, bounds
from edgefl.results.record import Record
from edgefl.results.summary import fidelity_of
from edgefl.run import supervisor

Floats = npt.NDArray[np.float64]
Throttle = Literal["paced", "cgroup", "sigstop"]

DEVICES = ("watch-a7", "moto-g4", "pi-4", "pixel-3a", "pixel-2", "pixel-3", "pixel-4", "flagship-sd8g2")
"""Eight profiles, from a watch to a flagship: a factor of 40."""
EACH = 2
NEVER = 10**9
TIMES = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "delay": ("delay_declared_s", "delay_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}


class Way(NamedTuple):
    """One direction of a made-up link."""

    rate_mbps: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    jitter_dist: str = "none"
    loss_pct: float = 0.0


class Played(NamedTuple):
    """What a run has measured; columns are of finished trips, seconds are emulated."""

    columns: dict[str, Floats]
    client: npt.NDArray[np.int64]
    profiles: list[str]
    """By client."""
    networks: list[str]
    """By client."""
    time_scale: float
    conditions: Conditions
    reasons: tuple[str, ...]
    """Why the run called itself INVALID; empty if it did not."""

    def times(self, quantity: str, clients: npt.NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
        """Declared and achieved, of all trips or of those of the clients that are chosen."""
        chosen = np.ones(len(self.client), dtype=bool) if clients is None else clients[self.client]
        declared, achieved = TIMES[quantity]
        return self.columns[declared][chosen], self.columns[achieved][chosen]

    def on(self, network: str) -> npt.NDArray[np.bool_]:
        """Which clients are on it."""
        return np.array([name == network for name in self.networks])

    @property
    def doubt(self) -> str:
        """Why figures of this run say nothing, in one line; empty if they count."""
        return next(iter(bounds(None, None, self.conditions)), "")


def trial(
    fleet: Mapping[str, int],
    networks: Mapping[str, Mapping[str, Way]],
    work: ExerciseArgs,
    seconds: float,
    *,
    throttle: Throttle = "paced",
    assigned: Mapping[str, str] | None = None,
    time_scale: float | Literal["auto"] = "auto",
    thermal: bool = False,
) -> Played:
    """Let a fleet make trips for so many emulated ``seconds`` and read off what they took.

    ``networks`` are made up by name, ``assigned`` says which device is on which of them; without it all are
    on the first. Raises what a run raises.
    """
    with tempfile.TemporaryDirectory(prefix="edgefl-fidelity-") as name:
        folder = Path(name)
        paths = {network: _write(folder, network, ways) for network, ways in networks.items()}
        on = {device: paths[(assigned or {}).get(device, next(iter(paths)))] for device in fleet}
        clients = sum(fleet.values())
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
            strategy={"name": "fedbuff", "buffer_size": clients},
            clock=Clock(kind="wall", time_scale=time_scale),
            evaluation=Evaluation(every_versions=NEVER),
            checkpoint=Checkpoint(every_s=float(NEVER)),
            stop=Stop(emulated_s=seconds),
        )
        supervisor.run(experiment, folder / "run", quiet=True, workload=EXERCISE)
        with Record(folder / "run") as record:
            return _read(record)


def _read(record: Record) -> Played:
    trips = record.trips
    ended = ~np.isnan(trips["trip_achieved_s"])
    found = fidelity_of(record)
    wanted = [*(name for pair in TIMES.values() for name in pair), "flops", "sent_s"]
    return Played(
        columns={name: np.asarray(trips[name][ended], dtype=np.float64) for name in wanted},
        client=trips["client"][ended],
        profiles=[row.profile for row in record.clients],
        networks=[row.network for row in record.clients],
        time_scale=record.meta.time_scale,
        conditions=Conditions(**{name: found[name] for name in Conditions.__struct_fields__}),
        reasons=tuple(found["reasons"]),
    )


def _write(folder: Path, name: str, ways: Mapping[str, Way]) -> str:
    lines = [f'id = "{name}"', f'name = "{name}"']
    sources = []
    for direction in ("down", "up"):
        lines.append(f"[{direction}]")
        for key, value in ways[direction]._asdict().items():
            if value not in (None, 0.0, "none"):
                lines.append(f"{key} = {_literal(value)}")
                sources.append(f'"{direction}.{key}" = "assumed: made up to be measured"')
    file = folder / f"{name}.toml"
    file.write_text("\n".join([*lines, "[sources]", *sources]) + "\n")
    return str(file)


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def bundled_devices() -> list[str]:
    """Every bundled profile of one device that computes at a rate of its own and is there all the time."""
    devices = [load_device(name) for name in device_names()]
    return [
        one.id
        for one in devices
        if one.cpu is not None and not (one.slowdown or one.delay_model or one.availability)
    ]
