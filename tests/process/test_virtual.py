"""The virtual clock: bit-identical results for any number of workers, even if some die; large fleets."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import edgefl
from edgefl import Clock, Data, Evaluation, Fleet, Model, RunError, Server, Stop, Training
from edgefl.devices import load_device
from edgefl.devices.individuals import unit_factor
from edgefl.lab.verify import verify
from edgefl.learning.models import make_model
from edgefl.learning.rule import LocalRule
from edgefl.learning.work import step_work
from edgefl.results.record import Record
from edgefl.results.rows import ClientRow
from edgefl.run import supervisor

from .disturbed import left, made_in, plan
from .runs import BATCH_NORMALISED, Command, experiment, summary, virtual

pytestmark = pytest.mark.timeout(300)
CASES = [
    pytest.param({"name": "fedavg", "cohort": 3, "over_selection": 1.4}, "float32", id="fedavg"),
    pytest.param({"name": "favano", "participants": 3, "interval_s": 0.1}, "float32", id="favano"),
    pytest.param({"name": "fedstaleweight", "buffer_size": 3}, "int8", id="fedstaleweight-int8"),
    pytest.param(
        {
            "name": "fedbuff", "buffer_size": 2, "arrival_process": "poisson", "arrival_rate_per_s": 9.0,
            "momentum": 0.5, "privacy": {"clip_norm": 0.5, "noise_multiplier": 0.1, "noise": "seeded"},
        },
        "float32",
        id="fedbuff-poisson-noise",
    ),
]  # fmt: skip
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0}


def trips_of(folder: Path) -> list[tuple[object, ...]]:
    with Record(folder) as record:
        columns = ("task", "client", "base_version", "sent_s", "arrived_s", "staleness", "fate")
        return list(zip(*(record.trips[name].tolist() for name in columns), strict=True))


@pytest.mark.parametrize(("strategy", "update_format"), CASES)
def test_bits_do_not_depend_on_workers_transport_and_back_end(
    strategy: dict[str, object], update_format: str, tmp_path: Path
) -> None:
    found, given = {}, dict(strategy)
    private = given.pop("privacy", None)
    for workers, transport, backend in ((1, "shm", "reference"), (3, "wire", "c")):
        folder = tmp_path / str(workers)
        server = Server(transport=transport, backend=backend, update_format=update_format)
        wanted = virtual(workers, strategy=given, server=server, privacy=private)
        figures = edgefl.run(wanted, folder).summary()
        assert figures["processes"] == workers
        assert figures["versions"] == 12
        assert figures["client_trips"] == figures["curve"]["trips"][-1]  # cancelled trips count in both
        assert figures["aggregation"]["backend"] == backend
        assert figures["integrity"]["checksum_mismatches"] == 0
        if strategy["name"] == "fedstaleweight":  # no trip is cancelled
            assert figures["integrity"]["checked"] == figures["trips"]["applied"]
            floats = 4 * figures["client_trips"] * figures["parameters"]
            assert figures["bytes"]["up"] / floats == pytest.approx(BYTES[update_format] / 4, rel=0.03)
            assert figures["bytes"]["down"] == floats
        rows = [row for row in trips_of(folder) if row[-1]]
        found[workers] = (figures["model_sha256"], figures["emulated_s"], str(rows))
    assert found[1] == found[3]
    assert verify(folder).model_sha256 == found[3][0]


def test_running_statistics_are_averaged_under_each_optimizer_of_the_server(tmp_path: Path) -> None:
    """After one step from the same model, all cohorts have the same statistics, so the averages are equal."""
    (tmp_path / "normed.py").write_text(BATCH_NORMALISED)
    found, models = {}, set()
    for name, fields in {
        "fedavg": {},
        "fedadam": {},
        "fedavgm": {"momentum": 0.5, "server_lr": 3.0},
        "feddyn": {"weighting": "examples"},
    }.items():
        wanted = virtual(
            1,
            strategy={"name": name, "cohort": 4, **fields},
            model=Model(name="normed:net"),
            training=Training(steps=1),
            stop=Stop(versions=1),
        )
        result = supervisor.run(wanted, tmp_path / name, quiet=True, base=tmp_path)
        model = result.model()
        found[name] = [model[f"2.{buffer}"].tolist() for buffer in ("running_mean", "running_var")]
        models.add(str(model["1.weight"].tolist()))
        assert verify(tmp_path / name, code=tmp_path).model_sha256 == result.summary()["model_sha256"]
    assert len(models) >= 3
    assert found["fedavg"][1] != [1.0] * 8
    assert found["fedadam"] == found["fedavgm"] == found["feddyn"] == found["fedavg"]


def test_a_run_whose_trips_take_no_time_is_ended(tmp_path: Path) -> None:
    timeless = virtual(
        1,
        fleet=Fleet(devices={"tier-p50": 1}, network="none"),  # a step of this profile takes no fixed time
        model=Model(args={"hidden": [4]}, flops_per_example=0),
        strategy={"name": "fedbuff", "buffer_size": 1},
        training=Training(steps=1, batch_size=1),
        stop=Stop(emulated_s=5),
    )
    with pytest.raises(RunError, match=r"emulated time stands still at \S+ s: 1001 trips took no time"):
        edgefl.run(timeless, tmp_path / "run")


@pytest.mark.slow
def test_another_precision_has_other_bits_and_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    found = []
    for precision, memory_format, workers in (
        ("float32", "contiguous", 2),
        ("bfloat16", "channels_last", 1),
        ("bfloat16", "channels_last", 3),
    ):
        folder = tmp_path / f"{precision}-{workers}"
        chosen = Training(steps=2, precision=precision, memory_format=memory_format)
        wanted = virtual(workers, model=Model(name="cnn-fedbuff"), training=chosen, stop=Stop(versions=4))
        found.append(edgefl.run(wanted, folder).summary()["model_sha256"])
    assert found[0] != found[1] == found[2]
    assert verify(folder).model_sha256 == found[2]


@pytest.mark.slow
def test_int8_learns_like_float32_in_less_time_and_error_feedback_changes_only_int8(tmp_path: Path) -> None:
    figures = {}
    for name in ("float32", "int8"):
        for feedback in (True, False):
            server = Server(update_format=name, error_feedback=feedback)
            wanted = virtual(server=server, stop=Stop(versions=60))
            figures[name, feedback] = edgefl.run(wanted, tmp_path / f"{name}-{feedback}").summary()
    plain, short = figures["float32", True], figures["int8", True]
    assert short["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)
    assert short["emulated_s"] < plain["emulated_s"]
    assert plain["model_sha256"] == figures["float32", False]["model_sha256"] != short["model_sha256"]
    assert short["model_sha256"] != figures["int8", False]["model_sha256"]


def declared_s(row: ClientRow) -> tuple[float, float]:
    """Return the seconds that the profile gives for a step on a full batch and for all steps of a trip."""
    model = load_device(row.profile).time_model()
    network = make_model(Model(args={"hidden": [16]}), (1, 8, 8), 10, 0)
    sizes = LocalRule(steps=3).batches(row.examples)
    steps_s = [model.seconds(step_work(network, (1, 8, 8), size)) for size in sizes]
    return steps_s[0], sum(steps_s)


def test_events_are_in_order_and_trips_take_the_times_of_their_profiles(finished: Path) -> None:
    with Record(finished) as record:
        times = [event.at_s for _, event in record.events() if type(event).__name__ != "Evaluated"]
        trips, clients = record.trips, record.clients
        done = ~np.isnan(trips["arrived_s"])
        arrived = trips["arrived_s"][done]
        assert times == sorted(times)
        assert (np.diff(np.unique(arrived)) > 0).all()
        np.testing.assert_allclose(arrived - trips["sent_s"][done], trips["trip_declared_s"][done], rtol=1e-9)
        units = np.array([unit_factor(record.meta.seed, row.client) for row in clients])
        steps_s, works_s = units * np.array([declared_s(row) for row in clients]).T
        np.testing.assert_allclose(trips["work_s"][done], works_s[trips["client"][done]], rtol=1e-9)
        assert [row.step_s for row in clients] == pytest.approx(steps_s.tolist())
        scatter = trips["compute_declared_s"][done] / trips["work_s"][done]
        assert 0.9 < scatter.min() < np.median(scatter) < 1.5
        assert len(set(scatter.tolist())) == len(scatter)


def test_killed_workers_change_no_bits(tmp_path: Path) -> None:
    wanted = virtual(model=made_in(tmp_path), server=Server(update_format="int8"), stop=Stop(versions=25))
    calm = supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path).summary()
    plan(tmp_path, {10: "die", 25: "die", 40: "die"})
    Command.run(wanted, tmp_path / "killed").ends()
    assert left(tmp_path) == []
    killed = summary(tmp_path / "killed")
    assert killed["model_sha256"] == calm["model_sha256"]
    assert killed["incidents"] == {"death": 3}
    assert killed["trips"]["lost"] == 0


LOADER = """
import numpy as np

def load(spec, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((100_000, 8), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return x, y, x[:500], y[:500]
"""
BASE_MIB = 600
"""Maximum memory of all processes of a run on a small fleet, MiB. Each client adds `MIB_PER_CLIENT`."""
MIB_PER_CLIENT = 1 / 256


def most_mib(command: Command) -> float:
    """Return the peak total memory (proportional set size) of the run's processes until the run ends, MiB."""
    most = 0.0
    while command.process.poll() is None:
        held = 0.0
        for process in command.family():
            try:
                held += process.memory_full_info().pss / 2**20
            except psutil.Error:  # it has just ended
                continue
        most = max(most, held)
        time.sleep(0.5)  # between two measurements
    return most


@pytest.mark.parametrize(
    "clients", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_large_fleet_needs_little_memory_if_few_phones_train(clients: int, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(LOADER)
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": clients // 2, "moto-g4": clients - clients // 2}, network="lte"),
        data=Data(name="many:load"),
        model=Model(args={"hidden": [16]}),
        training=Training(steps=1),
        strategy={"name": "fedstaleweight", "concurrency": 300, "buffer_size": 10, "restart": "new-version"},
        clock=Clock(kind="virtual", workers=2),
        evaluation=Evaluation(every_versions=1000),
        stop=Stop(trips=400),
    )
    command = Command.run(wanted, tmp_path / "run")
    held_mib = most_mib(command)
    command.ends()
    found = summary(tmp_path / "run")
    assert found["clients"] == clients
    assert found["client_trips"] >= 400
    assert 0 < held_mib < BASE_MIB + clients * MIB_PER_CLIENT
