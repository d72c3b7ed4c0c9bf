"""Tests of runs with nodes, which are separate processes that host workers and clients and may be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl import Clock, Experiment, Fleet, Model, Server, Stop
from edgefl.hosts.nodes import Nodes, opened
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.run import supervisor

from .disturbed import left, made_in, plan
from .runs import MINUTE_S, Command, experiment, incidents, summary, virtual
from .spaces import spaces

pytestmark = pytest.mark.timeout(300)
ANY = "tcp://127.0.0.1:*"
DELAY_MS = 50


def join(address: str, folder: Path, workers: int = 1) -> Command:
    """Start a node whose modules are in this folder."""
    return Command("join", address, "--workers", str(workers), cwd=folder)


def serve(wanted: Experiment, folder: Path, nodes: Nodes) -> Result:
    return supervisor.run(wanted, folder, quiet=True, base=folder.parent, hosts=nodes)


def run_on_nodes(
    wanted: Experiment, folder: Path, count: int, deeds: dict[int, str]
) -> tuple[dict[str, Any], list[Command]]:
    """Make a run on nodes that carry out the deeds (see `plan`); return its summary and the nodes."""
    with opened(ANY, None, count) as nodes:
        joined = [join(nodes.address, folder) for _ in range(count)]
        plan(folder, deeds)
        figures = serve(wanted, folder / "run", nodes).summary()
    assert left(folder) == []
    return figures, joined


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the experiment's final model on one host."""
    folder = tmp_path_factory.mktemp("alone")
    wanted = virtual(1, model=made_in(folder))
    figures = supervisor.run(wanted, folder / "run", quiet=True, base=folder).summary()
    return str(figures["model_sha256"])


def test_a_node_that_is_killed_changes_no_bit(alone: str, tmp_path: Path) -> None:
    early = {4: "kill it"}  # so that the run still needs this worker's results
    figures, joined = run_on_nodes(virtual(model=made_in(tmp_path)), tmp_path, 2, early)
    assert sorted(command.finish()[0] for command in joined) == [-9, 0]
    assert figures["model_sha256"] == alone
    lost = incidents(tmp_path / "run", "death")
    assert any("is lost: its connection broke" in death.detail for death in lost)


@pytest.mark.slow
def test_a_stopped_node_changes_no_bit_and_ends_when_it_continues(
    alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.hosts.nodes.ENDING_S", 5.0)
    figures, joined = run_on_nodes(virtual(model=made_in(tmp_path)), tmp_path, 2, {4: "stop it"})
    stopped = [command.process.pid for command in joined if command.process.poll() is None]
    for node in map(psutil.Process, stopped):
        for process in (*node.children(recursive=True), node):
            process.resume()
    # Once it continues, the stopped node reads that it was rejected or that the run has ended.
    assert sorted(command.finish()[0] for command in joined) in ([0, 1], [0, 2])
    assert figures["model_sha256"] == alone
    lost = incidents(tmp_path / "run", "hang")
    assert any("silent for" in one.detail for one in lost)


@pytest.mark.slow
def test_the_run_continues_on_the_other_nodes(alone: str, tmp_path: Path) -> None:
    """A node's zygote is killed, another node is interrupted, and a killed worker is replaced on its node."""
    deeds = {4: "die", 8: "kill the zygote", 16: "interrupt it"}
    figures, joined = run_on_nodes(virtual(4, model=made_in(tmp_path)), tmp_path, 3, deeds)
    ends = {code: err for code, _, err in (command.finish() for command in joined)}
    assert sorted(ends) == [0, 1, 130]
    assert "the zygote process ended early (signal 9)" in ends[1]
    assert figures["model_sha256"] == alone


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_its_nodes_stay(alone: str, tmp_path: Path) -> None:
    deeds = {12: f"kill the server of {os.getpid()}"}
    figures, joined = run_on_nodes(virtual(model=made_in(tmp_path)), tmp_path, 2, deeds)
    assert [command.finish()[0] for command in joined] == [0, 0]
    assert figures["model_sha256"] == alone
    assert len(incidents(tmp_path / "run", "restart")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("deed", "codes", "says"), [
    ("kill it", (-9, 1), "the run's process is gone"),
    ("interrupt it", (130, 0), ""),
])  # fmt: skip
def test_nodes_end_with_the_run_which_can_be_resumed_on_others(
    alone: str, deed: str, codes: tuple[int, int], says: str, tmp_path: Path
) -> None:
    run, node = codes
    file = Command.write(virtual(model=made_in(tmp_path)), tmp_path / "run")
    command = Command("serve", str(file), "--bind", ANY, "--out", str(tmp_path / "run"), "--nodes", "2")
    plan(tmp_path, {12: f"{deed} of {command.process.pid}"})
    address = read_address(command)
    for joined in [join(address, tmp_path) for _ in range(2)]:
        code, _, err = joined.finish()
        assert (code, says in err) == (node, True)
    assert command.finish()[0] == run
    with opened(ANY, None, 1) as nodes:
        joined = join(nodes.address, tmp_path)
        figures = supervisor.resume(tmp_path / "run", quiet=True, hosts=nodes).summary()
    joined.ends(0)
    assert figures["model_sha256"] == alone
    with Record(tmp_path / "run") as record:
        (resume,) = record.meta.resumes
    assert resume.nodes == (0 if says else 2)  # a run that is killed does not record its nodes


def read_address(command: Command) -> str:
    """Read the address for nodes from the run's stderr."""
    assert command.process.stderr is not None
    line = next(line for line in command.process.stderr if "edgefl join tcp://" in line)
    return line.split()[-1]


@pytest.mark.slow
def test_a_node_that_joins_after_the_loss_of_all_others_takes_their_workers(
    alone: str, tmp_path: Path
) -> None:
    plan(tmp_path, {12: "kill it"})
    with opened(ANY, None, 1) as nodes:
        first = join(nodes.address, tmp_path, workers=2)
        others: list[Command] = []

        def later() -> None:
            first.process.wait()
            others.append(join(nodes.address, tmp_path, workers=2))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(later)
            figures = serve(virtual(model=made_in(tmp_path)), tmp_path / "run", nodes).summary()
    assert first.finish()[0] == -9
    others[0].ends(0)
    assert figures["model_sha256"] == alone


@pytest.mark.slow
def test_a_node_that_joins_later_has_its_own_workers_and_those_of_a_lost_node(
    alone: str, tmp_path: Path
) -> None:
    wanted = virtual(None, model=made_in(tmp_path), server=Server(heartbeat_s=MINUTE_S))
    plan(tmp_path, {4: "kill it", 12: "wait"})
    with opened(ANY, None, 2) as nodes:
        joined = [join(nodes.address, tmp_path) for _ in range(2)]

        def two_workers(command: Command) -> bool:
            with suppress(psutil.NoSuchProcess):
                return len(command.named("edgefl-worker")) == 2
            return False

        def later() -> None:
            # Wait until one node is lost, a worker waits for "go", and the other node has two workers.
            while left(tmp_path) or not any(map(two_workers, joined)):
                time.sleep(0.05)
            joined.append(join(nodes.address, tmp_path, workers=2))
            while not two_workers(joined[2]):
                time.sleep(0.05)
            (tmp_path / "go").touch()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(later)
            figures = serve(wanted, tmp_path / "run", nodes).summary()
    assert sorted(command.finish()[0] for command in joined) == [-9, 0, 0]
    assert figures["model_sha256"] == alone
    lost, *others = sorted(figures["nodes"], key=lambda node: (node["lost"] == "", 2 in node["peers"]))
    assert (len(lost["peers"]), others[0]["peers"]) == (1, [0, 1])
    assert others[1]["peers"] in ([0, 2], [1, 2])
    assert any("has room for it" in death.detail for death in incidents(tmp_path / "run", "death"))


def test_ctrl_c_ends_a_node_in_the_background_that_looks_for_a_run() -> None:
    """A shell starts such a process with SIGINT ignored."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        node = Command("join", address, before=["sh", "-c", "trap '' INT; exec \"$@\"", "sh"])
        assert node.process.stderr is not None
        assert node.process.stderr.readline() == f"edgefl: looking for a run at {address}\n"
        node.process.send_signal(signal.SIGINT)
        assert node.ends(130) == "edgefl: interrupted\n"


@pytest.mark.slow
def test_a_node_with_another_model_or_without_one_is_rejected_in_one_line(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        made_in(tmp_path / folder)
    file = tmp_path / "there" / "disturbed_model.py"
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    (tmp_path / "nothing").mkdir()
    wanted = virtual(model=made_in(tmp_path / "here"))
    with opened(ANY, None, 1) as nodes:
        other, none = join(nodes.address, tmp_path / "there"), join(nodes.address, tmp_path / "nothing")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(serve, wanted, tmp_path / "here" / "run", nodes)
            other.ends(2, "the run rejected this node", "different bits than on this host")
            none.ends(2, "disturbed_model")
            good = join(nodes.address, tmp_path / "here")
            assert running.result().summary()["versions"] == 12
    good.ends(0)


@pytest.mark.slow
def test_other_nodes_take_the_phones_of_a_lost_node(tmp_path: Path) -> None:
    """The run takes several seconds, and the supervisor notices the loss within one second."""
    wanted = experiment(model=made_in(tmp_path), stop=Stop(versions=150))
    figures, joined = run_on_nodes(wanted, tmp_path, 3, {16: "kill it"})
    assert sorted(command.finish()[0] for command in joined) == [-9, 0, 0]
    assert figures["versions"] == 150
    assert figures["integrity"]["checksum_mismatches"] == figures["integrity"]["version_mismatches"] == 0
    lost = [node for node in figures["nodes"] if node["lost"]]
    assert [node["lost"] for node in lost] == ["its connection broke"]
    assert len(incidents(tmp_path / "run", "death")) >= len(lost[0]["peers"])
    hosted = [node["peers"] for node in figures["nodes"] if not node["lost"]]
    assert set(lost[0]["peers"]) <= {number for peers in hosted for number in peers}


@contextmanager
def slow_link(addresses: list[str], before: list[str], port: int) -> Iterator[str]:
    """Start a relay with a delay of 50 ms each way and a loss of 1% of the segments; yield its address."""
    arguments = [addresses[0], "127.0.0.1", str(port), str(DELAY_MS), "0.01"]
    command = [*before, sys.executable, str(Path(__file__).with_name("slow_link.py")), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as relay:
        try:
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"carries\n"
            yield f"tcp://{addresses[0]}:{port}"
        finally:
            relay.kill()


@pytest.mark.slow
def test_a_slow_link_leaves_a_devices_own_trips_exact_and_makes_the_run_invalid(tmp_path: Path) -> None:
    """By the device's clock, trips take their declared time. The server also sees the delays of the link."""
    scale, trips = 8.0, 40
    wanted = experiment(
        fleet=Fleet(devices={"pi-4": 1}, network="fios"),
        model=Model(args={"hidden": [64]}),
        strategy={"name": "fedbuff", "buffer_size": 1},
        clock=Clock(kind="wall", time_scale=scale),
        stop=Stop(trips=trips),
    )
    folder = tmp_path / "run"
    file = str(Command.write(wanted, folder))
    with spaces(2) as (addresses, (here, there)), slow_link(addresses, here, 7000) as address:
        run = Command("serve", file, "--bind", "tcp://127.0.0.1:7000", "--out", str(folder), before=here)
        read_address(run)
        node = Command("join", address, "--device", "pi-4", before=there)
        run.ends(3, "edgefl: INVALID: ")
        node.ends(0)
    figures = summary(folder)
    assert figures["client_trips"] >= trips
    assert figures["dropped_updates"] == 0
    assert figures["integrity"]["checked"] >= trips
    assert figures["integrity"]["checksum_mismatches"] == figures["integrity"]["version_mismatches"] == 0
    fidelity = figures["fidelity"]
    assert any("trips as the server saw them" in reason for reason in fidelity["reasons"])
    own, seen = fidelity["by_device"]["pi-4"]["trip"], fidelity["by_device"]["pi-4"]["round"]
    assert own["median_abs_error"] < 0.2
    assert own["measured"] == seen["measured"] >= trips
    added_s = seen["achieved_s"] - own["achieved_s"]
    assert added_s > seen["measured"] * 2 * DELAY_MS / 1000 / scale
