"""Tests of runs whose clients add noise: their bits are reproducible, and the reported ε is correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import Clock, Result, Server, Stop
from edgefl.experiment import Privacy
from edgefl.lab.verify import verify
from edgefl.privacy.accounting import PrivacyAccount, local_epsilon
from edgefl.results.grouping import load
from edgefl.results.record import Record
from edgefl.results.spending import together
from edgefl.run import supervisor

from .disturbed import killed
from .runs import experiment, virtual
from .test_private_failures import cohorts, wanted

pytestmark = pytest.mark.timeout(300)
LOCAL = {"clip_norm": 0.5, "local_noise_multiplier": 0.5, "max_participations": 7, "noise": "seeded"}
BOTH = {**LOCAL, "noise_multiplier": 1.0}


FEDAVG = {"name": "fedavg", "cohort": 2, "over_selection": 1.5, "weighting": "uniform"}


def run(made: edgefl.Experiment, folder: Path) -> dict[str, Any]:
    supervisor.run(made, folder, quiet=True, base=folder.parent)
    return Result(folder).summary()


@pytest.mark.parametrize(
    "privacy", [pytest.param(LOCAL, id="local", marks=pytest.mark.slow), pytest.param(BOTH, id="both")]
)
def test_a_failing_client_takes_part_as_before_and_kills_change_no_bit(
    privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing client sends only noise, so neither other clients nor ε depend on whether it succeeds."""
    well = run(wanted(tmp_path, "well", strategy=FEDAVG, privacy=privacy), tmp_path / "well")
    for how, reason in (("raises", "its data"), ("nan", "not finite")):
        found = run(wanted(tmp_path, how, strategy=FEDAVG, privacy=privacy), tmp_path / how)
        assert cohorts(tmp_path / how) == cohorts(tmp_path / "well")
        assert found["privacy"] == well["privacy"]
        assert found["trips"] == well["trips"]
        with Record(tmp_path / how) as record:
            rows = record.select("SELECT client, reason FROM trips WHERE fate = 'applied' AND reason != ''")
            found_reasons = dict(rows)
            assert found_reasons.keys() == {1}
            assert found_reasons[1].startswith("summed as zero: ")
            assert reason in found_reasons[1]
    server, clock = Server(transport="wire"), Clock(kind="virtual", workers=3)
    other = wanted(tmp_path, "raises", strategy=FEDAVG, privacy=privacy, server=server, clock=clock)
    assert killed(other, tmp_path / "again", ["event:0:9", "event:0:12"], monkeypatch) == 2
    again = Result(tmp_path / "again").summary()
    first = Result(tmp_path / "raises").summary()
    assert again["model_sha256"] == first["model_sha256"]
    assert again["privacy"] == first["privacy"]
    assert verify(tmp_path / "again", code=tmp_path).versions == 8


@pytest.mark.parametrize("clock", ["virtual", pytest.param("wall", marks=pytest.mark.slow)])
def test_no_client_makes_more_trips_than_declared_and_epsilon_counts_all_its_trips(
    clock: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"strategy": FEDAVG, "privacy": LOCAL, "stop": Stop(versions=99)}
    made = virtual(**changes) if clock == "virtual" else experiment(**changes)
    result = edgefl.run(made, tmp_path / "run")
    found, rules = result.summary(), Privacy(**LOCAL)
    assert found["stop_reason"] == "participations"
    with Record(tmp_path / "run") as record:
        begun = np.bincount(record.trips["client"])
    assert begun.max() == 7
    assert begun.sum() > found["trips"]["applied"]  # cancelled trips count
    figures = found["privacy"]
    assert figures["participations"] == {"max": 7, "limit": 7}
    assert figures["epsilon"] == figures["local"]["epsilon"] == pytest.approx(local_epsilon(rules, 7))
    assert figures["local"]["epsilon_at_limit"] == pytest.approx(local_epsilon(rules, 7))
    assert not figures["private"]
    assert "from the server and from anyone who sees its updates" in figures["says"]
    assert "this noise follows from the seed and protects nobody" in figures["says"]
    spent = result.versions()["epsilon"]
    assert 0.0 < spent[0] < spent[-1] <= figures["epsilon"]
    assert (np.diff(spent) >= 0).all()
    assert "from the server and from anyone" in (tmp_path / "run" / "report.html").read_text()


def test_local_and_central_noise_are_accounted_separately(tmp_path: Path) -> None:
    central = {**BOTH, "noise": "secure"}
    result = edgefl.run(virtual(privacy=central), tmp_path / "both")
    figures = result.summary()["privacy"]
    assert figures["private"]  # the key of the server's noise is secret
    assert "from anyone who sees only the models of this run" in figures["says"]
    assert "from the server and from anyone who sees its updates" in figures["says"]
    account = PrivacyAccount(Privacy(**central), 6)
    for _, clients, _ in cohorts(tmp_path / "both"):
        account.version(clients)
    assert figures["epsilon"] == pytest.approx(account.epsilon())
    assert figures["local"]["epsilon"] == pytest.approx(
        local_epsilon(Privacy(**central), figures["participations"]["max"])
    )
    edgefl.run(virtual(privacy=LOCAL), tmp_path / "local")
    runs = load([tmp_path / "both", tmp_path / "local"])
    text = together(one.record for one in runs)
    taken = [edgefl.Result(tmp_path / name).summary()["privacy"] for name in ("both", "local")]
    most = sum(one["participations"]["max"] for one in taken)
    assert (
        f"2 runs with local noise together have spent ε = {local_epsilon(Privacy(**LOCAL), most):.3g}" in text
    )


def test_local_noise_alone_may_be_combined_with_a_strategy_that_reads_updates(tmp_path: Path) -> None:
    median = {"name": "median", "buffer_size": 3}
    found = edgefl.run(virtual(strategy=median, privacy=LOCAL, stop=Stop(versions=4)), tmp_path / "run")
    assert found.summary()["versions"] == 4
    assert verify(tmp_path / "run").versions == 4


@pytest.mark.parametrize("kind", ["masks", "trusted"])
def test_local_noise_alone_may_be_combined_with_secure_aggregation(kind: Any, tmp_path: Path) -> None:
    secure = edgefl.experiment.Secure(kind=kind)
    server = Server(heartbeat_s=30, secure=secure)
    experiment = virtual(privacy=LOCAL, server=server, stop=Stop(versions=4))
    found = edgefl.run(experiment, tmp_path / "run").summary()
    assert found["versions"] == 4
    most = found["privacy"]["participations"]["max"]
    assert found["privacy"]["local"]["epsilon"] == pytest.approx(local_epsilon(Privacy(**LOCAL), most))
    central = msgspec.structs.replace(experiment, privacy=Privacy(**BOTH))
    with pytest.raises(edgefl.ConfigError, match=r"or privacy\.local_noise_multiplier, not both"):
        edgefl.run(central, tmp_path / "refused")
