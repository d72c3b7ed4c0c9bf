"""Tests of links that replay a trace or break, in real runs under both clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Stop
from edgefl.core.events import Failed
from edgefl.devices.link import read_trace
from edgefl.results.record import Record

from .runs import experiment

NETWORK = """
id = "link"
name = "A test's link"
[down]
{way}
[up]
{way}
[sources]
down = "assumed: a test"
up = "assumed: a test"
"""


def network(folder: Path, way: str) -> str:
    (folder / "link.toml").write_text(NETWORK.format(way=way))
    return str(folder / "link.toml")


def wanted(kind: str, link: str, **changes: object) -> edgefl.Experiment:
    fleet = Fleet(devices={"pi-zero-2w": 4}, network=link)
    clock = Clock(kind=kind, workers=2)
    return experiment(**{"fleet": fleet, "clock": clock, **changes})


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_transfers_follow_their_trace(kind: str, tmp_path: Path) -> None:
    # The trace alternates: for 0.1 s it has a packet every 5 ms, then for 0.1 s one every 50 ms.
    times = [t for start in range(0, 2000, 200) for t in (*range(start + 5, start + 101, 5), start + 150)]
    (tmp_path / "t.trace").write_text("".join(f"{t}\n" for t in [*times, 2000]))
    link = network(tmp_path, 'trace = "t.trace"\ndelay_ms = 5')
    edgefl.run(wanted(kind, link, stop=Stop(trips=24 if kind == "virtual" else 9)), tmp_path / "run")
    trace = read_trace(str(tmp_path / "t.trace"))
    with Record(tmp_path / "run") as record:
        trips = record.trips
        done = ~np.isnan(trips["arrived_s"])
        down = trips["down_declared_s"][done]
        declared, took = trips["trip_declared_s"][done], trips["trip_achieved_s"][done]
        size, rows = int(trips["down_bytes"][done][0]), record.clients
    assert {row.down_mbps for row in rows} == {trace.rate_mbps}
    wire = size + -(-size // 1460) * 40
    lengths = {round(0.005 + trace.delivers_s(at / 1e4, wire), 4) for at in range(20_000)}
    assert set(np.round(down, 4)) <= {round(length + d, 4) for length in lengths for d in (-1e-4, 0, 1e-4)}
    # The time of a download depends on when the trip starts.
    assert len(set(np.round(down, 4))) > (5 if kind == "virtual" else 1)
    assert (took >= declared * (1 - 1e-6)).all()


def test_a_link_that_breaks_costs_the_task(tmp_path: Path) -> None:
    """Under the virtual clock, the results are the same for any number of workers."""
    link = network(tmp_path, 'rate_mbps = 2\ndelay_ms = 5\nloss_pct = 3\non_loss = "disconnect"')
    found = set()
    for name, clock in {
        "wall": Clock(kind="wall"),
        "1": Clock(kind="virtual", workers=1),
        "3": Clock(kind="virtual", workers=3),
    }.items():
        versions = 4 if name == "wall" else 12
        run = wanted(clock.kind, link, clock=clock, stop=Stop(versions=versions))
        figures = edgefl.run(run, tmp_path / name).summary()
        assert figures["versions"] == versions
        with Record(tmp_path / name) as record:
            failed = [event for _, event in record.events() if isinstance(event, Failed)]
            incidents = record.incidents
        assert failed
        assert figures["trips"]["lost"] == len(failed) == figures["incidents"]["failed"]
        assert all(event.reason.startswith("the link was lost after ") for event in failed)
        assert {row.detail for row in incidents} == {event.reason for event in failed}
        if name != "wall":
            found.add((figures["model_sha256"], figures["emulated_s"], len(failed)))
    assert len(found) == 1


def test_a_missing_trace_is_refused_at_once(tmp_path: Path) -> None:
    link = network(tmp_path, 'trace = "t.trace"')
    with pytest.raises(edgefl.ConfigError, match=r"^.*No such file.*$"):
        edgefl.run(wanted("virtual", link), tmp_path / "run")
    assert not (tmp_path / "run").exists()
