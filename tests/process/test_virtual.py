"""The virtual clock: the same bits for any number of workers, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Model, RunError, Server, Stop, Training
from edgefl.results.record import Record
from edgefl.run import supervisor
from edgefl.run.verify import verify

from .disturbed import left, made_in, plan
from .runs import Command, experiment, summary

STRATEGIES = [
    {"name": "fedbuff", "buffer_size": 3},
    {"name": "fedbuff", "buffer_size": 2, "concurrency": 3, "momentum": 0.5},
    {"name": "fedstaleweight", "buffer_size": 3},
    {"name": "fedavg", "cohort": 3, "over_selection": 1.4},
    {"name": "fedasync", "max_staleness": 2},
    {"name": "defedavg-niid"},
    {"name": "favano", "participants": 3, "interval_s": 0.1},
    {"name": "fedbuff", "arrival_process": "poisson", "arrival_rate_per_s": 9.0, "buffer_size": 2},
    {"name": "fedbuff", "buffer_size": 3, "clip_norm": 0.5, "noise_multiplier": 0.1, "momentum": 0.5},
]


def virtual(workers: int, **changes: object) -> edgefl.Experiment:
    fleet = Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte")
    return experiment(**{"fleet": fleet, "clock": Clock(kind="virtual", workers=workers), **changes})


def trips_of(folder: Path) -> list[tuple[object, ...]]:
    with Record(folder) as record:
        columns = ("task", "client", "base_version", "sent_s", "arrived_s", "staleness", "fate")
        return list(zip(*(record.trips[name].tolist() for name in columns), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: "-".join(map(str, s.values())))
def test_same_bits_for_any_number_of_workers(strategy: dict[str, object], tmp_path: Path) -> None:
    found = {}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        figures = edgefl.run(virtual(workers, strategy=strategy), folder).summary()
        assert figures["processes"] == workers
        assert figures["versions"] == 12
        assert figures["integrity"]["checksum_mismatches"] == 0
        rows = [row for row in trips_of(folder) if row[-1]]
        found[workers] = (figures["model_sha256"], figures["emulated_s"], str(rows))
    assert found[1] == found[3]


def test_a_run_that_only_time_may_end_does_not_go_on_when_time_stands_still(tmp_path: Path) -> None:
    timeless = virtual(
        1,
        fleet=Fleet(devices={"pixel-4": 2}, network="none"),
        model=Model(args={"hidden": [4]}, flops_per_example=0),
        strategy={"name": "fedbuff", "buffer_size": 2},
        training=Training(steps=1, batch_size=1),
        stop=Stop(emulated_s=5),
    )
    with pytest.raises(RunError, match=r"emulated time stands still at \S+ s: 2001 trips took none"):
        edgefl.run(timeless, tmp_path / "run")


def test_same_bits_whatever_sums_them(tmp_path: Path) -> None:
    found = set()
    for backend in ("c", "numba", "reference"):
        figures = edgefl.run(virtual(2, server=Server(backend=backend)), tmp_path / backend).summary()
        assert figures["aggregation"]["backend"] == backend
        found.add(figures["model_sha256"])
    assert len(found) == 1


def test_other_arithmetic_gives_other_bits_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    found = {}
    for precision, memory_format in (("float32", "contiguous"), ("bfloat16", "channels_last")):
        chosen = Training(steps=2, precision=precision, memory_format=memory_format)
        for workers in (1, 3):
            folder = tmp_path / f"{precision}-{workers}"
            wanted = virtual(workers, model=Model(name="cnn-fedbuff"), training=chosen, stop=Stop(versions=4))
            found[precision, workers] = edgefl.run(wanted, folder).summary()["model_sha256"]
        assert found[precision, 1] == found[precision, 3]
        assert verify(folder).model_sha256 == found[precision, 1]
    assert len(set(found.values())) == 2


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    hashes = {
        edgefl.run(virtual(2, seed=seed), tmp_path / str(seed)).summary()["model_sha256"] for seed in (1, 2)
    }
    assert len(hashes) == 2


def test_events_come_in_the_order_of_emulated_time(tmp_path: Path) -> None:
    edgefl.run(virtual(2, stop=Stop(trips=60)), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        times = [event.at_s for _, event in record.events() if type(event).__name__ != "Evaluated"]
        arrived = record.trips["arrived_s"]
    assert times == sorted(times)
    assert (np.diff(np.unique(arrived[~np.isnan(arrived)])) > 0).all()


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    wanted = virtual(2, model=made_in(tmp_path), stop=Stop(versions=60))
    calm = supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path).summary()
    plan(tmp_path, {10: "die", 40: "die", 80: "die"})
    code, _, err = Command.run(wanted, tmp_path / "killed").finish()
    assert code == 0, err
    assert left(tmp_path) == []
    killed = summary(tmp_path / "killed")
    assert killed["model_sha256"] == calm["model_sha256"]
    assert killed["incidents"] == {"death": 3}
    assert killed["trips"]["lost"] == 0


def test_virtual_time_is_the_profile_s(tmp_path: Path) -> None:
    """A phone twice as slow makes trips that take longer by what its profile says, whatever the host."""
    edgefl.run(virtual(1, stop=Stop(trips=30)), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        trips = record.trips
        done = ~np.isnan(trips["arrived_s"])
        took = trips["arrived_s"][done] - trips["sent_s"][done]
        np.testing.assert_allclose(took, trips["trip_declared_s"][done], rtol=1e-9)
        rate = trips["flops"][done] / trips["compute_declared_s"][done] / 1e9
        declared = {row.client: row.train_gflops for row in record.clients}
        np.testing.assert_allclose(rate, [declared[client] for client in trips["client"][done]], rtol=1e-6)
