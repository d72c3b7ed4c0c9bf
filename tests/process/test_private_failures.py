"""Tests that failures of a client in a private run do not change how other clients take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgefl import Result, Stop, Training
from edgefl.experiment import Experiment
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.run import supervisor

from .disturbed import killed
from .runs import virtual

pytestmark = pytest.mark.timeout(300)
TRAINING = """
import os

import torch


def train(model, examples, context):
    if {how!r} == "raises" and context.client == 1:
        raise ValueError("its data")
    if {how!r} == "dies" and context.client == 1:
        os._exit(7)
    for x, y in examples.batches():
        model.zero_grad()
        loss = context.criterion(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        context.step(len(y), float(loss))
        if {how!r} == "all" or {how!r} == "nan" and context.client == 1:
            with torch.no_grad():
                next(model.parameters())[:] = float("nan")
"""


def wanted(folder: Path, how: str, **changes: Any) -> Experiment:
    """Return a private experiment in which client 1 raises an error, dies or gives NaN, as ``how`` says. With
    "all", every client gives NaN; with "well", no client fails."""
    (folder / f"training_{how}.py").write_text(TRAINING.format(how=how))
    given = {
        "training": Training(function=f"training_{how}:train", steps=2),
        "strategy": {"name": "fedbuff", "buffer_size": 2},
        "privacy": {"clip_norm": 0.5, "noise_multiplier": 1.0, "quantile": 0.5, "noise": "seeded"},
        "stop": Stop(versions=8),
    }
    return virtual(**{**given, **changes})


def cohorts(folder: Path) -> list[tuple[int, list[int], float]]:
    """Return each version's number, clients and time."""
    with Record(folder) as record:
        owner = dict(zip(record.trips["task"].tolist(), record.trips["client"].tolist(), strict=True))
        made_at_s = record.versions["at_s"].tolist()
        sums = [(version, [owner[task] for task in tasks.tolist()]) for version, tasks, _ in record.sums()]
    return [(*one, at_s) for one, at_s in zip(sums, made_at_s, strict=True)]


@pytest.mark.parametrize("ways", [["raises"], pytest.param(["nan", "dies"], marks=pytest.mark.slow)], ids=str)
def test_the_clients_of_each_version_do_not_depend_on_failures_of_one_client(
    tmp_path: Path, ways: list[str]
) -> None:
    found, epsilons = {}, {}
    for how in ("well", *ways):
        supervisor.run(wanted(tmp_path, how), tmp_path / how, quiet=True, base=tmp_path)
        figures = Result(tmp_path / how).summary()
        found[how], epsilons[how] = cohorts(tmp_path / how), figures["privacy"]["epsilon"]
        assert verify(tmp_path / how, code=tmp_path).versions == 8
        assert figures["trips"]["dropped"] == figures["trips"]["lost"] == 0
    assert any(1 in clients for _, clients, _ in found["well"])
    assert all(cohorts_ == found["well"] for cohorts_ in found.values())
    assert len(set(epsilons.values())) == 1


@pytest.mark.parametrize("stop", [Stop(accuracy=0.99), Stop(versions=2)], ids=["accuracy", "versions"])
def test_a_run_whose_trips_all_fail_ends_without_a_result(stop: Stop, tmp_path: Path) -> None:
    supervisor.run(wanted(tmp_path, "all", stop=stop), tmp_path / "run", quiet=True, base=tmp_path)
    figures = Result(tmp_path / "run").summary()
    few = stop.versions is not None
    assert figures["stop_reason"] == "versions" if few else figures["stop_reason"].startswith("no progress")
    assert figures["versions"] > 0
    assert "failed or gave a bad update" in figures["no_progress"]


def test_kills_of_the_server_change_no_bit_of_a_run_with_a_failing_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing client's zero update is restored from the checkpoint or the journal, and counts once."""
    experiment = wanted(tmp_path, "raises")
    supervisor.run(experiment, tmp_path / "whole", quiet=True, base=tmp_path)
    assert killed(experiment, tmp_path / "run", ["event:0:9", "event:0:12", "event:0:4"], monkeypatch) == 3
    whole, again = (Result(tmp_path / name).summary() for name in ("whole", "run"))
    assert whole["model_sha256"] == again["model_sha256"]
    assert whole["trips"] == again["trips"]
    assert cohorts(tmp_path / "whole") == cohorts(tmp_path / "run")
    verify(tmp_path / "run", code=tmp_path)
