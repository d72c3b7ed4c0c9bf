"""Attackers: which clients, what they send, and what a run with them learns and says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl.errors import ConfigError, TrainingError
from edgefl.experiment import Attackers
from edgefl.lab.verify import verify
from edgefl.learning.attacks import Attack, attacking_clients
from edgefl.learning.data import load_data

DIGITS = load_data(edgefl.Data(name="digits"), 0, [])


def changed(rules: Attackers, client: int, base: Path | None = None) -> np.ndarray:
    """Δ that the client sends in place of (1, 2, 3, …, 400)/100."""
    attack = Attack(rules, 10, 1, DIGITS, [base] if base else [])
    start = np.full(400, 5, np.float32)
    trained = start + np.arange(1, 401, dtype=np.float32) / 100
    attack.change(trained, start, client, trip=2)
    return trained - start


def test_a_share_of_the_clients_attacks_drawn_by_the_seed() -> None:
    for share, count in ((0.04, 0), (0.2, 2), (0.25, 2), (0.99, 10)):
        drawn = attacking_clients(Attackers(share=share), 10, seed=3)
        assert len(drawn) == count
        assert list(drawn) == sorted(set(drawn))
    draws = {attacking_clients(Attackers(share=0.3), 10, seed) for seed in range(20)}
    assert len(draws) > 10
    assert attacking_clients(None, 10, 0) == ()


def test_only_attackers_change_their_update() -> None:
    honest = np.arange(1, 401, dtype=np.float32) / 100
    rules = Attackers(share=0.2, scale=3.0)
    attackers = attacking_clients(rules, 10, 1)
    for client in range(10):
        expected = -3 * honest if client in attackers else honest
        np.testing.assert_allclose(changed(rules, client), expected, rtol=1e-4)


def test_noise_has_the_size_of_the_update_and_a_stream_of_its_own() -> None:
    rules = Attackers(share=0.2, kind="gaussian", scale=2.0)
    first, second = attacking_clients(rules, 10, 1)
    noise, norm = changed(rules, first), np.linalg.norm(np.arange(1, 401) / 100)
    assert 1.8 < np.linalg.norm(noise) / norm < 2.2
    np.testing.assert_array_equal(changed(rules, first), noise)
    assert not np.array_equal(changed(rules, second), noise)


def test_labels_are_flipped_for_attackers_only() -> None:
    rules = Attackers(share=0.2, kind="label-flip")
    attack = Attack(rules, 10, 1, DIGITS, [])
    for client in range(10):
        found = attack.targets(client, DIGITS.train_y)
        flipped = client in attacking_clients(rules, 10, 1)
        np.testing.assert_array_equal(found, 9 - DIGITS.train_y if flipped else DIGITS.train_y)
    np.testing.assert_allclose(changed(rules, 0), np.arange(1, 401, dtype=np.float32) / 100, rtol=1e-4)


def test_an_attack_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "own_attack.py").write_text(
        "def attack(delta, client, trip, rng):\n    delta[:] = client + trip\n"
        "def fails(delta, client, trip, rng):\n    raise ValueError('no')\n"
        "number = 7\n"
    )
    rules = Attackers(share=0.99, kind="own_attack:attack")
    np.testing.assert_allclose(changed(rules, 4, tmp_path), np.full(400, 6.0))
    with pytest.raises(TrainingError, match="'own_attack:fails' raised ValueError: no"):
        changed(Attackers(share=0.99, kind="own_attack:fails"), 4, tmp_path)
    with pytest.raises(ConfigError, match=r"'own_attack:number' must be a function \(got int\)"):
        changed(Attackers(share=0.99, kind="own_attack:number"), 4, tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("sign-flop", "digits", "attack 'sign-flop' not found; did you mean 'sign-flip'"),
        ("label-flip", "diabetes", "'label-flip' needs data with one class per example"),
    ],
)
def test_impossible_attacks_are_refused(kind: str, data: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"fleet.attackers.kind: {why}"):
        Attack(Attackers(share=0.2, kind=kind), 10, 1, load_data(edgefl.Data(name=data), 0, []), [])


def run(folder: Path, strategy: dict[str, Any], attackers: Attackers | None) -> dict[str, Any]:
    fleet = edgefl.Fleet(devices={"pi-4": 10}, network="none", attackers=attackers)
    edgefl.run(
        edgefl.Experiment(
            data=edgefl.Data(name="digits", partition="iid"),
            model=edgefl.Model(name="mlp", args={"hidden": [16]}),
            fleet=fleet,
            clock=edgefl.Clock(kind="virtual"),
            training=edgefl.Training(lr=0.1),
            stop=edgefl.Stop(versions=25),
            strategy={"buffer_size": 10, "restart": "after-step", **strategy},
        ),
        out=folder,
    )
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_the_median_learns_where_the_average_does_not(tmp_path: Path) -> None:
    """Two of ten clients send −20Δ: the average goes uphill. Without attackers both learn."""
    attackers = Attackers(share=0.2, scale=20.0)
    average = run(tmp_path / "average", {"name": "fedbuff", "exponent": 0.0}, attackers)
    median = run(tmp_path / "median", {"name": "median"}, attackers)
    honest = run(tmp_path / "honest", {"name": "median"}, None)
    assert average["accuracy"] < 0.3
    assert median["accuracy"] > 0.6
    assert honest["accuracy"] > 0.6
    assert average["attackers"] == {"clients": 2, "weight_share": pytest.approx(0.2, abs=0.02)}
    assert "attackers" not in honest
    assert verify(tmp_path / "median").versions == 25


def test_krum_gives_attackers_no_weight(tmp_path: Path) -> None:
    found = run(tmp_path / "krum", {"name": "krum", "selected": 4}, Attackers(share=0.2, scale=20.0))
    assert found["attackers"] == {"clients": 2, "weight_share": 0.0}
