"""A default fleet acts like independent phones under both clocks; clones in phase are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.experiment import Clock, Data, Evaluation, Experiment, Fleet, Stop

FEDBUFF = {"name": "fedbuff", "buffer_size": 4}
CLONES = {"units": "identical", "variation": 0.0, "phase": "aligned"}


def phase(
    folder: Path, kind: Any, seed: int = 1, strategy: Mapping[str, Any] = FEDBUFF, **fleet: Any
) -> dict[str, Any]:
    """The summary's figures on phase, of the fleet of docs/sweeps.md."""
    devices = {"pixel-3a": 4, "pi-4": 4, "moto-g4": 4}
    wanted = Experiment(
        fleet=Fleet(**{"devices": devices, "network": "lte", **fleet}),
        data=Data(partition="dirichlet", alpha=0.3),
        strategy=dict(strategy),
        clock=Clock(kind=kind),
        evaluation=Evaluation(every_versions=60),
        stop=Stop(versions=60),
        seed=seed,
    )
    found: dict[str, Any] = edgefl.run(wanted, folder).summary()["phase"]
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_default_fleet_is_inside_the_interval_of_independent_phones(seed: int, tmp_path: Path) -> None:
    found = phase(tmp_path / "run", "virtual", seed)
    for name in ("one_profile_buffers", "coincident_arrivals"):
        assert found[name]["low"] <= found[name]["share"] <= found[name]["high"]
    assert found["warning"] == ""


def test_so_is_one_under_the_wall_clock(tmp_path: Path) -> None:
    found = phase(tmp_path / "run", "wall")
    assert found["one_profile_buffers"]["share"] < 0.3  # how late a busy host is moves these shares
    assert found["coincident_arrivals"]["share"] < 0.3


NO_WARNING_DUE = {
    "clones": (CLONES, "fleet.units = 'identical' and fleet.variation = 0 make all phones of a model alike"),
    "a paper's devices": (
        {"devices": {"paper-half-normal": 12}, "network": "none"},
        "all devices are from papers, which state no differences between units",
    ),
    "polls": (
        {"strategy": {"name": "quafl", "participants": 4, "interval_s": 4.0}},
        "the strategy starts its clients together",
    ),
}


@pytest.mark.parametrize("fleet", NO_WARNING_DUE)
def test_clients_that_act_together_by_design_are_no_fault(fleet: str, tmp_path: Path) -> None:
    settings, why = NO_WARNING_DUE[fleet]
    found = phase(tmp_path / "run", "virtual", **settings)
    assert found["warning"] == ""
    assert found["by_design"] == why


def test_clones_in_phase_are_found(tmp_path: Path) -> None:
    found = phase(tmp_path / "run", "virtual", **CLONES | {"variation": 1e-9})
    assert found["one_profile_buffers"]["share"] == 1.0 > found["one_profile_buffers"]["high"]
    assert found["coincident_arrivals"]["share"] == 1.0
    assert "in phase" in found["warning"]
