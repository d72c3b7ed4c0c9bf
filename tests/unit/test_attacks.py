"""Attackers: which clients attack, what they send, and which settings are refused."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import config
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError, TrainingError
from edgefl.experiment import Attackers
from edgefl.learning.attacks import Attack, alie_z, attacking_clients
from edgefl.learning.data import load_data
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run.demands import shape_of
from edgefl.run.update import UpdateMaker
from edgefl.run.workload import Workload
from edgefl.seeds import stream
from edgefl.strategies import resolve
from edgefl.strategies.base import Until

DIGITS = load_data(edgefl.Data(name="digits"), 0, [])


def changed(rules: Attackers, client: int, base: Path | None = None) -> np.ndarray:
    """Return the update that the client sends in place of (1, 2, 3, …, 400)/100."""
    attack = Attack(rules, 10, 1, DIGITS, [base] if base else [])
    start = np.full(400, 5, np.float32)
    trained = start + np.arange(1, 401, dtype=np.float32) / 100
    attack.change(trained, start, client, trip=2)
    return trained - start


def test_the_seed_draws_the_attacking_share_of_the_clients() -> None:
    for share, count in ((0.06, 1), (0.2, 2), (0.25, 2), (0.94, 9)):
        drawn = attacking_clients(Attackers(share=share), 10, seed=3)
        assert len(drawn) == count
        assert list(drawn) == sorted(set(drawn))
    draws = {attacking_clients(Attackers(share=0.3), 10, seed) for seed in range(20)}
    assert len(draws) > 10
    assert attacking_clients(None, 10, 0) == ()


@pytest.mark.parametrize(
    ("share", "clients", "count"), [(0.05, 6, 0), (0.95, 6, 6), (0.9, 1, 1), (0.5, 1, 0)]
)
def test_a_share_of_no_client_or_of_all_is_refused(share: float, clients: int, count: int) -> None:
    why = f"{share} of {clients} clients is {count} attackers, rounded; the number must be "
    with pytest.raises(ConfigError) as caught:
        attacking_clients(Attackers(share=share), clients, 0)
    assert str(caught.value) == f"fleet.attackers.share: {why}at least 1 and fewer than {clients}"


def test_only_attackers_change_their_update() -> None:
    honest = np.arange(1, 401, dtype=np.float32) / 100
    rules = Attackers(share=0.2, scale=3.0)
    attackers = attacking_clients(rules, 10, 1)
    for client in range(10):
        expected = -3 * honest if client in attackers else honest
        np.testing.assert_allclose(changed(rules, client), expected, rtol=1e-4)


def test_noise_has_the_size_of_the_update_and_each_client_its_own() -> None:
    rules = Attackers(share=0.2, kind="gaussian", scale=2.0)
    first, second = attacking_clients(rules, 10, 1)
    noise, norm = changed(rules, first), np.linalg.norm(np.arange(1, 401) / 100)
    assert 1.8 < np.linalg.norm(noise) / norm < 2.2
    np.testing.assert_array_equal(changed(rules, first), noise)
    assert not np.array_equal(changed(rules, second), noise)


def test_only_attackers_train_on_flipped_labels() -> None:
    rules = Attackers(share=0.2, kind="label-flip")
    attack = Attack(rules, 10, 1, DIGITS, [])
    for client in range(10):
        found = attack.targets(client, DIGITS.train_y)
        flipped = client in attacking_clients(rules, 10, 1)
        np.testing.assert_array_equal(found, 9 - DIGITS.train_y if flipped else DIGITS.train_y)
    np.testing.assert_allclose(changed(rules, 0), np.arange(1, 401, dtype=np.float32) / 100, rtol=1e-4)


def test_a_users_function_can_be_the_attack(tmp_path: Path) -> None:
    (tmp_path / "own_attack.py").write_text(
        "def attack(delta, client, trip, rng):\n    delta[:] = client + trip\n"
        "def fails(delta, client, trip, rng):\n    raise ValueError('no')\n"
        "def exits(delta, client, trip, rng):\n    raise SystemExit('no')\n"
        "class Silent(Exception):\n    def __str__(self):\n        raise KeyError\n"
        "def silent(delta, client, trip, rng):\n    raise Silent\n"
        "def both(delta, client, trip, rng):\n    delta[:] = 2\n    return float(delta[0])\n"
        "def returns(delta, client, trip, rng):\n    return -delta\n"
        "number = 7\n"
    )
    rules = Attackers(share=0.9, kind="own_attack:attack")
    np.testing.assert_allclose(changed(rules, 4, tmp_path), np.full(400, 6.0))
    with pytest.raises(TrainingError, match="'own_attack:fails' raised ValueError: no"):
        changed(Attackers(share=0.9, kind="own_attack:fails"), 4, tmp_path)
    with pytest.raises(TrainingError, match="'own_attack:exits' raised SystemExit: no"):
        changed(Attackers(share=0.9, kind="own_attack:exits"), 4, tmp_path)
    with pytest.raises(TrainingError, match=r"'own_attack:silent' raised Silent$"):
        changed(Attackers(share=0.9, kind="own_attack:silent"), 4, tmp_path)
    both = Attackers(share=0.9, kind="own_attack:both")
    np.testing.assert_allclose(changed(both, 4, tmp_path), np.full(400, 2.0))
    with pytest.raises(TrainingError, match="must change delta in place, but returned another array"):
        changed(Attackers(share=0.9, kind="own_attack:returns"), 4, tmp_path)
    for name, allowed in (("fails", False), ("returns", False), ("both", True), ("attack", True)):
        attack = Attack(Attackers(share=0.9, kind=f"own_attack:{name}"), 10, 1, DIGITS, [tmp_path])
        with nullcontext() if allowed else pytest.raises(ConfigError, match=f"kind: 'own_attack:{name}'"):
            attack.try_own(400)
    with pytest.raises(ConfigError, match=r"'own_attack:number' must be a function \(got int\)"):
        changed(Attackers(share=0.9, kind="own_attack:number"), 4, tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("sign-flop", "digits", "kind: attack 'sign-flop' not found; did you mean 'sign-flip'"),
        ("label-flip", "diabetes", "kind: 'label-flip' needs data with one class per example"),
        ("alie", "digits", "z: its formula yields no z above 0 for 2 attackers of 10 clients; set z"),
    ],
)
def test_impossible_attacks_are_refused(kind: str, data: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"fleet.attackers.{why}"):
        Attack(Attackers(share=0.2, kind=kind), 10, 1, load_data(edgefl.Data(name=data), 0, []), [])
    with pytest.raises(ConfigError, match="'alie' needs 2 or more attackers, got 1 attackers of 10 clients"):
        Attack(Attackers(share=0.1, kind="alie", z=1.0), 10, 1, DIGITS, [])


NO_SCALE = "attackers.scale: has no effect without kind 'sign-flip'"


@pytest.mark.parametrize(
    ("settings", "clock", "why"),
    [
        ({"z": 1.0}, "virtual", "attackers.z: has no effect without fleet.attackers.kind = 'alie', got 1.0"),
        ({"kind": "alie", "scale": 2.0}, "virtual", NO_SCALE),
        ({"kind": "own_attack:attack", "scale": 2.0}, "virtual", NO_SCALE),
        ({"kind": "alie"}, "wall", "attackers.kind: must be another kind if clock.kind = 'wall'"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], clock: Any, why: str) -> None:
    fleet = edgefl.Fleet(devices={"pi-4": 10}, attackers=Attackers(share=0.2, **settings))
    wanted = edgefl.Experiment(fleet=fleet, clock=edgefl.Clock(kind=clock), stop=edgefl.Stop(versions=1))
    with pytest.raises(ConfigError, match=f"fleet.{why}"):
        config.validate(wanted, Path())


@pytest.mark.parametrize(("clients", "attackers"), [(50, 24), (100, 20), (51, 12), (31, 6)])
def test_z_is_that_of_the_papers_formula(clients: int, attackers: int) -> None:
    """If the n − m honest updates are normally distributed, s of them are expected beyond z standard
    deviations. These s and the m attackers form a majority."""
    z, honest = alie_z(clients, attackers), clients - attackers
    beyond = honest * math.erfc(z / math.sqrt(2)) / 2
    assert beyond == pytest.approx(math.floor(clients / 2 + 1) - attackers, rel=1e-9)


COLLUDING = edgefl.Experiment(
    data=edgefl.Data(name="digits"),
    model=edgefl.Model(name="mlp", args={"hidden": [8]}),
    fleet=edgefl.Fleet(devices={"pi-4": 12}, attackers=Attackers(share=0.25, kind="alie", z=1.5)),
    stop=edgefl.Stop(versions=1),
)


def test_alie_sends_the_attackers_mean_update_minus_z_deviations(tmp_path: Path) -> None:
    """The test computes the mean and the deviation itself, from the updates that all attackers train."""
    workload = Workload(config.validate(COLLUDING, tmp_path), fleet_of(COLLUDING), tmp_path)
    flat, base = workload.flat.array, workload.flat.array.copy()
    attackers = attacking_clients(COLLUDING.fleet.attackers, 12, 0)
    client = attackers[1]

    def trained(as_client: int) -> np.ndarray:
        np.copyto(flat, base)
        if as_client == client:
            workload.train(client, 3, None)
        else:
            rng = stream(0, "collusion", client, 3, as_client)
            workload._trainer.run(
                workload.data.train_x,
                workload.data.train_y,
                workload.rule,
                rng,
                rows=workload._rows[as_client],
            )
        return flat - base

    updates = [trained(one) for one in attackers]
    honest = [float(np.mean([update[place] for update in updates])) for place in range(50)]
    deviations = [float(np.std([update[place] for update in updates])) for place in range(50)]
    steps: list[float] = []
    trained(client)
    workload.finish_update(client, 3, base, steps.append)
    np.testing.assert_allclose(
        (flat - base)[:50], np.array(honest) - 1.5 * np.array(deviations), rtol=1e-3, atol=1e-6
    )
    assert steps  # a long computation calls back so that messages are handled
    for other in range(12):
        if other not in attackers:
            expected = trained(other).copy()
            workload.finish_update(other, 3, base, None)
            np.testing.assert_array_equal(flat - base, expected)


def test_alie_attackers_train_as_long_as_their_trip_and_with_its_gain(tmp_path: Path) -> None:
    """FAVANO and QuAFL end trips at a poll, and FAVANO multiplies the progress of each trip by a gain."""
    wanted = config.validate(COLLUDING, tmp_path)
    workload = Workload(wanted, fleet_of(wanted), tmp_path)
    shape = shape_of(wanted, resolve(wanted.strategy), workload.flat.size, 12)
    flat, base = workload.flat.array, workload.flat.array.copy()
    client, *_ = attackers = attacking_clients(COLLUDING.fleet.attackers, 12, 0)
    until, updates = Until(at_s=3.0, gain=4.0, per_step=True), []
    for one in attackers:
        np.copyto(flat, base)
        x, y, rows = workload.data.train_x, workload.data.train_y, workload._rows[one]
        name = "batches" if one == client else "collusion"
        rng = stream(0, name, client, 3, *[one] * (one != client))
        workload._trainer.run(x, y, workload.rule, rng, rows=rows, steps=2)
        updates.append((flat - base) * np.float32(2.0))  # the gain, divided by two steps
    expected = np.mean(updates, axis=0) - 1.5 * np.std(updates, axis=0)
    np.copyto(flat, base)
    with closing(ParameterBuffer.create(shape)) as buffer:
        UpdateMaker(workload, buffer).train(client, 3, 0, base, None, until, 2)
    np.testing.assert_allclose(flat - base, expected, rtol=1e-3, atol=1e-6)


def test_each_trip_draws_at_most_seven_colluders() -> None:
    attack = Attack(Attackers(share=0.4, kind="alie"), 50, 1, DIGITS, [])
    attackers = attacking_clients(Attackers(share=0.4), 50, 1)
    drawn = [attack.colluders(attackers[0], trip) for trip in range(20)]
    for one in drawn:
        assert len(set(one)) == 7
        assert set(one) < set(attackers[1:])
    assert len({tuple(one) for one in drawn}) > 10
    assert attack.colluders(min(set(range(50)) - set(attackers)), 0) == []
