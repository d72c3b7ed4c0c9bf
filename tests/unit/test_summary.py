"""Figures in summary.json that depend on the hosts of a run: nodes, real devices, and memory of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edgefl.results.report import summary_table
from edgefl.results.rows import MemoryUse, NodeRow, Resume, TripRow
from edgefl.results.store import Store
from edgefl.results.summary import summarize
from tests.reports import client, printed, trip


def timed(task: int, client: int, compute_s: float, **fields: Any) -> TripRow:
    """Return a trip whose profile declares 1 s for each of 3 parts; its training took ``compute_s``."""
    parts = ("down_s", "up_s", "down_declared_s", "compute_declared_s", "up_declared_s")
    times = {**dict.fromkeys(parts, 1.0), "trip_declared_s": 3.0, "trip_achieved_s": 2.0 + compute_s}
    return trip(task, client, arrived_s=3.0, staleness=0, compute_s=compute_s, **times, **fields)


def node(peers: list[int], **fields: Any) -> NodeRow:
    known = {"name": "n", "cpu": "", "cores": 2.0, "system": "", "machine": "", "host_step_s": 0.1}
    return NodeRow(peers=peers, **{**known, **fields})


def test_the_times_of_a_real_device_are_compared_with_its_profile_and_not_judged(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0, "pixel-4"), client(1, "pi-4")])
        store.trip(timed(0, 0, 1.0))
        for task, compute_s in enumerate((1.5, 2.0, 2.5), 1):
            store.trip(timed(task, 1, compute_s))
        store.trip(trip(4, 1, 3.0, fate="lost"))
        store.trip(trip(5, 0, 3.0, arrived_s=4.0, staleness=0))  # this trip reported no times
        store.set_meta(strategy="fedbuff", clock="wall", nodes=[node([1], as_is=True)])
    found = summarize(tmp_path)
    ratio = {"p5": 1.55, "median": 2.0, "p95": 2.45}
    assert found["real_devices"] == [
        {"client": 1, "profile": "pi-4", "trips": 3, "compute_s": 2.0, "declared_s": 1.0, "ratio": ratio}
    ]
    fidelity = found["fidelity"]
    assert (fidelity["valid"], fidelity["trips"], fidelity["unmeasured"]) == (True, 1, 1)
    text = " ".join(printed(summary_table(found, tmp_path)).split())
    assert "a real pi-4 median 2 times its profile's training time" in text


def test_after_its_real_device_is_lost_a_client_is_emulated_and_judged(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([client(0, "pi-4")])
        store.trip(timed(0, 0, 2.0))
        for task in (1, 2, 3):
            store.trip(timed(task, 0, 1.0, lateness_s=0.0))
        nodes = [node([0], as_is=True, lost="its connection broke"), node([0])]
        store.set_meta(strategy="fedbuff", clock="wall", nodes=nodes)
    found = summarize(tmp_path)
    (real,) = found["real_devices"]
    assert (real["trips"], real["ratio"]["median"], found["fidelity"]["trips"]) == (1, 2.0, 3)


def test_a_run_on_real_devices_only_is_judged_by_the_state_of_the_host(tmp_path: Path) -> None:
    for load, reasons in ((0.5, []), (0.95, ["host load 95.0%, at most 90% is allowed"])):
        folder = tmp_path / str(load)
        folder.mkdir()
        with Store(folder) as store:
            store.clients([client(0, "pi-4")])
            store.trip(timed(0, 0, 1.5))
            store.set_meta(clock="wall", load=load, nodes=[node([0], as_is=True)])
        fidelity = summarize(folder)["fidelity"]
        assert (fidelity["valid"], fidelity["trips"], list(fidelity["reasons"])) == (not reasons, 0, reasons)
        text = " ".join(printed(summary_table(summarize(folder), folder)).split())
        assert (" VALID, no trip was timed" in text) is not bool(reasons)
    with Store(tmp_path) as store:
        store.set_meta(clock="wall", nodes=[node([0], as_is=True)])
    assert list(summarize(tmp_path)["fidelity"]["reasons"]) == ["no trip was measured"]


def test_the_cost_of_a_step_is_relative_to_that_of_the_host_that_trained(tmp_path: Path) -> None:
    """A step takes 0.1 s on this host and 0.4 s on the node. Trips without steps or CPU time are left out."""
    with Store(tmp_path) as store:
        store.clients([client(0), client(1)])
        for task, (owner, steps, cpu_s) in enumerate(((0, 5, 0.75), (1, 5, 3.0), (0, 0, 0.0), (1, 5, None))):
            store.trip(timed(task, owner, 1.0, steps=steps, cpu_s=cpu_s))
        store.set_meta(clock="wall", host_step_s=0.1, nodes=[node([1], host_step_s=0.4)])
    assert summarize(tmp_path)["fidelity"]["step_cost"] == 1.5


def step_cost(folder: Path, arrived_s: float, cpu_s: float, **meta: Any) -> Any:
    """Return the cost of a step in a run with one trip of 5 steps. A step takes 0.1 s on the first host."""
    folder.mkdir()
    with Store(folder) as store:
        store.clients([client(0)])
        row = timed(0, 0, 1.0, steps=5, cpu_s=cpu_s)
        store.trip(msgspec.structs.replace(row, arrived_s=arrived_s))
        store.set_meta(clock="wall", host_step_s=0.1, **meta)
    return summarize(folder)["fidelity"]["step_cost"]


def test_the_cost_of_a_step_after_a_resume_is_relative_to_that_measured_before_the_resume(
    tmp_path: Path,
) -> None:
    """The run is resumed after 3 s, and again after 5 s, on hosts that are slower than the first."""
    resumes = [Resume(3.0, 0.4, 0), Resume(5.0, 0.3, 0)]
    for number, (arrived_s, cpu_s) in enumerate(((3.0, 0.5), (5.0, 2.0), (7.0, 1.5))):
        assert step_cost(tmp_path / str(number), arrived_s, cpu_s, resumes=resumes) == 1.0


def test_the_cost_of_a_step_is_relative_to_that_of_the_nodes_between_two_resumes(tmp_path: Path) -> None:
    """The run begins on a node, is resumed on a slower one after 3 s, and without nodes after 5 s."""
    nodes = [node([0], host_step_s=0.2), node([0], host_step_s=0.4)]
    resumes = [Resume(3.0, 0.5, 1), Resume(5.0, 0.3, 2)]
    for number, (arrived_s, cpu_s) in enumerate(((3.0, 1.0), (5.0, 2.0), (8.0, 1.5))):
        folder = tmp_path / str(number)
        assert step_cost(folder, arrived_s, cpu_s, resumes=resumes, nodes=nodes) == 1.0


def test_bytes_between_nodes_are_given_per_version_and_memory_per_process_and_profile(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.clients([msgspec.structs.replace(client(0), memory_mib=512.0), client(1, "none-trained")])
        for task, (peak, grew) in enumerate(((3.0, 5.0), (2.0, 7.0))):
            store.trip(timed(task, 0, 1.0, peak_mib=peak, process_grew_mib=grew))
        store.set_meta(
            clock="wall",
            network={"in": 900, "out": 500, "versions": 4},
            memory=MemoryUse(server_mib=50.0, clients_mib={0: 10.0, 1: 20.0}),
        )
    found = summarize(tmp_path)
    per_version = {"in_a_version": 225.0, "out_a_version": 125.0}
    assert found["network"] == {"in": 900, "out": 500, "versions": 4, **per_version}
    memory = found["memory"]
    assert [memory[name] for name in ("server_mib", "per_process_mib", "processes_mib")] == [50.0, 15.0, 30.0]
    assert memory["by_profile"] == {"pi-4": {"peak_mib": 3.0, "limit_mib": 512.0, "process_grew_mib": 7.0}}
