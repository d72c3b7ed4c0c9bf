"""Runs whose clients upload in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import edgefl
from edgefl import Clock, Fleet, Server, Stop
from edgefl.results.record import IncidentRow, Record
from edgefl.run import supervisor

from .disturbed import left, made_in, plan
from .runs import PATIENCE_S, Command, experiment, summary, versions_of, wait_for, wait_for_versions

BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0}


def virtual(workers: int = 2, *, stop: Stop | None = None, **server: Any) -> edgefl.Experiment:
    return experiment(
        fleet=Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte"),
        clock=Clock(kind="virtual", workers=workers),
        server=Server(**server),
        stop=stop or Stop(versions=40),
    )


@pytest.mark.parametrize("name", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_the_same_bits_over_both_transports_and_any_number_of_workers(name: str, tmp_path: Path) -> None:
    found = {}
    for transport, workers in (("shm", 1), ("wire", 3)):
        folder = tmp_path / f"{transport}-{workers}"
        figures = edgefl.run(virtual(workers, update_format=name, transport=transport), folder).summary()
        assert figures["integrity"]["checksum_mismatches"] == 0
        assert figures["integrity"]["checked"] == figures["trips"]["applied"]
        found[transport, workers] = (figures["model_sha256"], figures["emulated_s"])
        ratio = figures["bytes"]["up"] / (figures["client_trips"] * 4 * figures["parameters"])
        assert ratio == pytest.approx(BYTES[name] / 4, rel=0.03)
        assert figures["bytes"]["down"] == figures["client_trips"] * 4 * figures["parameters"]
    assert len(set(found.values())) == 1


def incidents_of(folder: Path) -> list[IncidentRow]:
    """Incidents on record; none while there is no record that can be read."""
    try:
        with Record(folder) as record:
            return record.incidents
    except edgefl.ConfigError:
        return []


def test_formats_learn_alike_and_shorten_the_upload(tmp_path: Path) -> None:
    figures = {
        name: edgefl.run(virtual(update_format=name, stop=Stop(versions=120)), tmp_path / name).summary()
        for name in ("float32", "float16", "int8")
    }
    assert len({each["model_sha256"] for each in figures.values()}) == 3
    for name in ("float16", "int8"):
        assert figures[name]["accuracy"] == pytest.approx(figures["float32"]["accuracy"], abs=0.05)
        assert figures[name]["emulated_s"] < figures["float32"]["emulated_s"]


def test_error_feedback_changes_the_run_and_float32_has_none(tmp_path: Path) -> None:
    def sha(folder: str, **server: Any) -> str:
        return str(edgefl.run(virtual(**server), tmp_path / folder).summary()["model_sha256"])

    few = Stop(versions=4)
    assert sha("a", update_format="int8", stop=few) != sha(
        "b", update_format="int8", error_feedback=False, stop=few
    )
    assert sha("c", stop=few) == sha("d", error_feedback=False, stop=few)


def test_a_worker_that_dies_leaves_no_residual(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(virtual(update_format="int8"), model=made_in(tmp_path))
    calm = supervisor.run(wanted, tmp_path / "calm", quiet=True, base=tmp_path).summary()
    plan(tmp_path, {20: "die", 50: "die"})
    code, _, err = Command.run(wanted, tmp_path / "killed").finish()
    assert code == 0, err
    assert left(tmp_path) == []
    assert summary(tmp_path / "killed")["model_sha256"] == calm["model_sha256"]


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_an_altered_update_is_noticed_and_a_killed_run_goes_on(transport: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(
        server=Server(update_format="int8", transport=transport, heartbeat_s=PATIENCE_S),
        stop=Stop(versions=100_000),
    )
    command = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "alter:2:1"})
    wait_for(lambda: bool(incidents_of(folder)), "an incident", command)
    command.kill_group()
    command.finish()
    more = versions_of(folder) + 5
    again = Command("resume", str(folder))
    wait_for_versions(folder, more, again)
    again.interrupt()
    assert again.finish()[0] == 130
    figures = summary(folder)
    assert figures["incidents"]["checksum"] == 1
    assert figures["integrity"]["version_mismatches"] == 0


def test_a_format_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(edgefl.ConfigError, match=r"server.update_format: must be .*'int8'.*got 'int4'"):
        edgefl.run(virtual(update_format="int4"), tmp_path / "run")
