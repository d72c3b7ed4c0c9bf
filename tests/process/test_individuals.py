"""Tests that the phones of a default fleet act independently, and that phones in phase are detected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.devices.fleet import in_phase
from edgefl.experiment import Clock, Data, Evaluation, Experiment, Fleet, Stop
from edgefl.strategies import resolve

FEDBUFF = {"name": "fedbuff", "buffer_size": 4}
CLONES = {"units": "identical", "variation": 0.0, "phase": "aligned"}


def wanted(
    kind: Any = "virtual",
    seed: int = 1,
    strategy: Mapping[str, Any] = FEDBUFF,
    versions: int = 60,
    **fleet: Any,
) -> Experiment:
    """Return an experiment with the fleet of docs/sweeps.md and the given changes."""
    devices = {"pixel-3a": 4, "pi-4": 4, "moto-g4": 4}
    return Experiment(
        fleet=Fleet(**{"devices": devices, "network": "lte", **fleet}),
        data=Data(partition="dirichlet", alpha=0.3),
        strategy=dict(strategy),
        clock=Clock(kind=kind),
        evaluation=Evaluation(every_versions=versions),
        stop=Stop(versions=versions),
        seed=seed,
    )


def phase(folder: Path, *given: Any, **fleet: Any) -> dict[str, Any]:
    """Make a run; return the figures in its summary on how much phones act in phase."""
    found: dict[str, Any] = edgefl.run(wanted(*given, **fleet), folder).summary()["phase"]
    return found


def independent(found: Mapping[str, Any]) -> bool:
    """Return True if both shares are within the 99% intervals of independent phones."""
    names = ("one_profile_buffers", "coincident_arrivals")
    return all(found[name]["low"] <= found[name]["share"] <= found[name]["high"] for name in names)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_default_fleet_acts_like_independent_phones(seed: int, tmp_path: Path) -> None:
    found = phase(tmp_path / "run", "virtual", seed)
    assert independent(found)
    assert found["warning"] == ""


def test_a_default_fleet_acts_like_independent_phones_under_the_wall_clock(tmp_path: Path) -> None:
    """Delays of a busy host change the shares of a run, so it is enough if one of three seeds passes."""
    assert any(independent(phase(tmp_path / str(seed), "wall", seed)) for seed in (1, 2, 3))


BY_DESIGN: dict[str, dict[str, Any]] = {
    "all devices are from papers, which state no differences between units": {
        "devices": {"paper-half-normal": 12}, "network": "none",
    },
    "the strategy starts its clients together": {
        "strategy": {"name": "quafl", "participants": 4, "interval_s": 4.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", BY_DESIGN)
def test_some_experiments_make_clients_act_together_by_design(reason: str) -> None:
    made = wanted(**BY_DESIGN[reason])
    assert in_phase(made, resolve(made.strategy)) == reason


def test_identical_phones_act_together_by_design_and_cause_no_warning(tmp_path: Path) -> None:
    found = phase(tmp_path / "run", versions=20, **CLONES)
    assert not independent(found)
    assert found["warning"] == ""
    reason = "fleet.units = 'identical' and fleet.variation = 0 make all phones of a model alike"
    assert found["by_design"] == reason


def test_clones_in_phase_are_found(tmp_path: Path) -> None:
    found = phase(tmp_path / "run", versions=20, **CLONES | {"variation": 1e-9})
    assert not independent(found)
    assert found["one_profile_buffers"]["share"] == 1.0 > found["one_profile_buffers"]["high"]
    assert found["coincident_arrivals"]["share"] == 1.0
    assert "in phase" in found["warning"]
