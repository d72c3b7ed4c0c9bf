"""Tests of local data that grow during a run: number of examples, their order, and the time of a trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl import config
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Growth, Privacy, Secure
from edgefl.learning.growth import GrowingData
from edgefl.run.workload import Workload


def experiment(**other: Any) -> Experiment:
    given: dict[str, Any] = {
        "fleet": edgefl.Fleet(devices={"pi-4": 2, "moto-g4": 1}, network="lte", variation=0),
        "data": edgefl.Data(growth=Growth(start=0.1, least_per_trip=0.05, most_per_trip=0.2)),
        "model": edgefl.Model(args={"hidden": [8]}),
        "training": edgefl.Training(epochs=2, batch_size=16),
        "strategy": {"name": "aso-fed", "dynamic_step": False},
        "stop": edgefl.Stop(versions=30),
    }
    return config.validate(Experiment(**given | other))


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("privacy", {"privacy": Privacy(clip_norm=1.0)}),
        ("server.secure", {"server": edgefl.Server(secure=Secure(kind="masks"))}),
    ],
)
def test_growing_data_are_refused_if_weights_must_be_known_before_the_run(
    key: str, other: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: cannot be combined with data.growth"):
        experiment(**other)


def workload() -> Workload:
    found = experiment()
    return Workload(found, fleet_of(found), Path())


def test_each_client_gains_its_own_share_per_trip_until_it_has_all_examples() -> None:
    growth = Growth(start=0.1, least_per_trip=0.01, most_per_trip=0.03)
    grows, again = (GrowingData([1000] * 50, growth, seed=4) for _ in range(2))
    gains = [grows.held(client, 10) - 100 for client in range(50)]
    assert min(gains) >= 100
    assert max(gains) <= 300
    assert len(set(gains)) > 30
    for client in range(50):
        held = [grows.held(client, trip) for trip in range(100)]
        assert held == sorted(held)
        assert (held[0], held[-1]) == (100, 1000)
    assert [again.held(client, 10) - 100 for client in reversed(range(50))] == gains[::-1]
    assert GrowingData([3], Growth(start=0.01), seed=4).held(0, 0) == 1
    assert GrowingData([7], None, seed=4).held(0, 0) == 7


def test_a_client_keeps_its_examples_and_gains_new_ones_in_random_order() -> None:
    found = workload()
    for client in range(3):
        before: set[int] = set()
        for trip in range(30):
            rows = found._rows_on(client, trip).tolist()
            assert before <= set(rows)
            assert len(set(rows)) == len(rows)
            before = set(rows)
        whole = found._rows[client].tolist()
        assert before == set(whole)
        assert rows != whole


def test_the_time_of_a_trip_follows_the_number_of_examples() -> None:
    """A trip is two epochs; the last batch of an epoch may be short."""
    found = workload()
    times_s = []
    for trip in range(30):
        plan, held = found.plan(0, trip), len(found._rows_on(0, trip))
        sizes = found.rule.batches(held)
        assert plan.work_s == pytest.approx(sum(found._trips.step_s(0, size) for size in sizes), rel=1e-12)
        times_s.append(plan.work_s)
    assert times_s == sorted(times_s)
    assert times_s[-1] > 5 * times_s[0]
    assert found.known[0].examples == len(found._rows_on(0, 0))
    assert found.known[0].steps == 2 * -(-found.known[0].examples // 16)


def test_the_smallest_later_batch_is_tried_before_the_run(tmp_path: Path) -> None:
    """Batch normalisation fails on a batch of one example, which is the last batch if a client has 16 n + 1
    examples."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef net(**shapes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    found = experiment(model=edgefl.Model(name="nets:net"), strategy={"name": "fedbuff"})
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        Workload(found, fleet_of(found), tmp_path).prepared()
