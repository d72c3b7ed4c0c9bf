"""Runs on a Ray cluster of three nodes on this host, which share its network or have their own namespaces."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
import pytest

import edgefl
from edgefl import Clock, Evaluation, Experiment, Fleet, Stop

from .runs import Command, experiment, summary, wait_for_versions
from .spaces import spaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
PORT = 6397
NODES = 3


def phones() -> Experiment:
    """Sixty phones of three profiles, in a run long enough for a node to be killed partway through."""
    return experiment(
        fleet=Fleet(devices={"pixel-3a": 30, "pi-4": 15, "moto-g4": 15}),
        clock=Clock(kind="virtual"),
        evaluation=Evaluation(every_versions=100),
        stop=Stop(versions=2000),
    )


class RayNodes:
    """Ray nodes on this host, the head first. ``prefixes`` contains the prefix of each node's command."""

    def __init__(self, addresses: list[str], prefixes: list[list[str]], folder: Path) -> None:
        self._addresses, self._prefixes, self._folder = addresses, prefixes, folder
        self.address = f"{addresses[0]}:{PORT}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, number: int) -> None:
        """Start a node and wait for it, because two nodes that start together may take the same names."""
        head = ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", str(self._folder)]
        process = subprocess.Popen(
            [
                *self._prefixes[number],
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"),
                *("--node-ip-address", self._addresses[number], "--object-store-memory", "80000000"),
                *("--disable-usage-stats", "--include-log-monitor=false"),
                *(["--address", self.address] if number else head),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError(f"node {number} has not started: {''.join(said)}")

    def run(self, *arguments: str) -> Command:
        return Command(*arguments, "--ray", self.address, before=self._prefixes[0])

    def hosting(self) -> list[psutil.Process]:
        """Return edgefl's processes on these nodes, including its Ray actors."""
        found = []
        for node in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(node.pid).children(recursive=True)
        return [one for one in found if _named(one, "edgefl", "RayNode")]

    def kill(self, number: int) -> None:
        """Kill Ray and its actor on a node; the processes that the actor started must end by themselves."""
        node = psutil.Process(self.processes[number].pid)
        for process in [node, *node.children(recursive=True)]:
            if not _named(process, "edgefl"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.communicate()


def _named(process: psutil.Process, *parts: str) -> bool:
    """Return True if the process runs and its name contains one of these parts."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(part in process.name() for part in parts)
    return False


@contextlib.contextmanager
def cluster(where: str, folder: Path) -> Iterator[RayNodes]:
    with contextlib.ExitStack() as stack:
        if where == "namespaces":
            places = stack.enter_context(spaces(NODES))
        else:
            own = next(
                found.address
                for interface, addresses in psutil.net_if_addrs().items()
                for found in addresses
                if found.family == socket.AF_INET and interface != "lo"
            )
            places = [own] * NODES, [[]] * NODES
        nodes = RayNodes(*places, folder)
        stack.callback(nodes.end)
        for number in range(NODES):
            nodes.start(number)
        yield nodes


def wait_until_free(nodes: RayNodes) -> None:
    """Wait until no process of a run is left on the nodes."""
    while nodes.hosting():
        threading.Event().wait(0.1)


@pytest.mark.parametrize("where", ["processes", "namespaces"])
def test_a_run_has_the_same_bits_after_kills_of_a_node_and_of_the_driver(where: str, tmp_path: Path) -> None:
    wanted, folders = phones(), {name: tmp_path / name for name in ("alone", "node", "driver")}
    edgefl.run(wanted, folders["alone"])
    file = str(Command.write(wanted, folders["alone"]))
    with tempfile.TemporaryDirectory() as short, cluster(where, Path(short)) as nodes:
        command = nodes.run("run", file, "--out", str(folders["node"]))
        wait_for_versions(folders["node"], 100, command)
        nodes.kill(NODES - 1)
        said = command.ends(0, "edgefl: done: ")
        assert said.count(" joined: ") == NODES
        assert said.count(" is lost: its connection broke") == 1

        command = nodes.run("run", file, "--out", str(folders["driver"]))
        wait_for_versions(folders["driver"], 100, command)
        command.kill_group()
        command.finish()
        wait_until_free(nodes)
        nodes.run("resume", str(folders["driver"])).ends(0)
        wait_until_free(nodes)
    bits = {name: summary(folder)["model_sha256"] for name, folder in folders.items()}
    assert set(bits.values()) == {bits["alone"]}


def test_the_runs_of_a_sweep_have_the_bits_of_runs_on_this_host(tmp_path: Path) -> None:
    """When the same command is repeated, it starts no process on the cluster, since all runs exist."""
    wanted = msgspec.structs.replace(phones(), stop=Stop(versions=100))
    file = str(Command.write(wanted, tmp_path / "runs"))
    grid = ("--grid", "strategy.buffer_size=3,6", "--seeds", "1,2")
    Command("sweep", file, *grid, "--out", str(tmp_path / "alone")).ends(0)
    with tempfile.TemporaryDirectory() as short, cluster("processes", Path(short)) as nodes:
        said = nodes.run("sweep", file, *grid, "--out", str(tmp_path / "cluster")).ends(0)
        assert said.count("placing a process on each node") == 4
        again = nodes.run("sweep", file, *grid, "--out", str(tmp_path / "cluster")).ends(0)
        assert "placing" not in again
        wait_until_free(nodes)
    bits = [
        {run.name: summary(run)["model_sha256"] for run in (tmp_path / name / "runs").iterdir()}
        for name in ("alone", "cluster")
    ]
    assert len(bits[0]) == 4
    assert bits[0] == bits[1]
    used = [summary(run)["nodes"] for run in (tmp_path / "cluster" / "runs").iterdir()]
    assert [len(nodes) for nodes in used] == [NODES] * 4


def test_wrong_options_for_a_cluster_are_refused_in_one_line(tmp_path: Path) -> None:
    file = str(Command.write(phones(), tmp_path / "run"))
    Command("run", file, "--ray", "here").ends(2, "--ray: must be HOST:PORT of the cluster's head, or auto")
    Command("run", file, "--ray", "127.0.0.1:1").ends(2, "--ray 127.0.0.1:1: no cluster answers")
    Command("sweep", file, "--ray", "127.0.0.1:1").ends(2, "--ray 127.0.0.1:1: no cluster answers")
    Command("sweep", file, "--ray", "auto", "-j", "2").ends(2, "--jobs and --ray: give only one of them")


def test_phones_of_a_killed_node_continue_on_other_nodes(tmp_path: Path) -> None:
    wanted = experiment(
        fleet=Fleet(devices={"pi-zero-2w": 30, "watch-a7": 30}, network="fios"),
        strategy={"name": "fedbuff", "buffer_size": 10},
        clock=Clock(kind="wall", time_scale=60.0),
        stop=Stop(versions=30),
    )
    folder = tmp_path / "run"
    file = str(Command.write(wanted, folder))
    with tempfile.TemporaryDirectory() as short, cluster("processes", Path(short)) as nodes:
        command = nodes.run("run", file, "--accept-invalid", "--out", str(folder))
        wait_for_versions(folder, 5, command)
        nodes.kill(NODES - 1)
        command.ends(0, "edgefl: done: ", " is lost: its connection broke")
        wait_until_free(nodes)
    figures = summary(folder)
    assert figures["versions"] == 30
    assert [bool(node["lost"]) for node in figures["nodes"]].count(True) == 1
