"""Nodes that sum their own updates: one host's bits, also when a node, an adder or the server is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl import Checkpoint, Experiment, Server
from edgefl.results.record import Record
from edgefl.run import supervisor
from edgefl.run.nodes import opened
from edgefl.run.verify import verify

from .disturbed import left, made_in, plan
from .runs import PATIENCE_S, Command, experiment, incidents, virtual
from .test_nodes import ANY, join, read_address, serve

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SUMS = Server(partial_sums=True, heartbeat_s=PATIENCE_S)
OFTEN = Checkpoint(every_s=0.2)
ALL = {"name": "fedbuff", "buffer_size": 6}
"""A version needs an update of each phone, so that nodes hold some nearly always."""


def phones(folder: Path) -> Experiment:
    return virtual(2, model=made_in(folder), server=SUMS, checkpoint=OFTEN, strategy=ALL)


def live(folder: Path) -> Experiment:
    return experiment(model=made_in(folder), server=SUMS, checkpoint=OFTEN, strategy=ALL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that this experiment ends with on one host."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        figures = edgefl.run(phones(folder), folder / "run").summary()
    return str(figures["model_sha256"])


def on_two_nodes(wanted: Experiment, folder: Path, deeds: dict[int, str]) -> tuple[dict[str, Any], list[int]]:
    """The run's figures, and how its nodes ended. In a deed "FIRST" is the process of the first node."""
    with opened(ANY, None, 2) as nodes:
        joined = [join(nodes.address, folder) for _ in range(2)]
        first = str(joined[0].process.pid)
        plan(folder, {step: deed.replace("FIRST", first) for step, deed in deeds.items()})
        figures = serve(wanted, folder / "run", nodes).summary()
    assert left(folder) == []
    return figures, sorted(command.finish()[0] for command in joined)


def test_the_bits_are_those_of_one_host_while_an_adder_and_then_a_node_are_killed(
    alone: str, tmp_path: Path
) -> None:
    deeds = {6: "kill the adder of FIRST", 20: "kill it of FIRST"}
    figures, codes = on_two_nodes(phones(tmp_path), tmp_path, deeds)
    assert (figures["model_sha256"], codes) == (alone, [-9, 0])
    assert figures["aggregation"]["node_seconds"] > 0
    assert figures["integrity"]["checksum_mismatches"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert verify(tmp_path / "run", code=tmp_path).model_sha256 == alone


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize(("deed", "codes"), [("interrupt it", (130, 0)), ("kill it", (-9, 1))])
def test_a_run_that_ends_early_goes_on_without_its_nodes(
    alone: str, deed: str, codes: tuple[int, int], clock: str, tmp_path: Path
) -> None:
    """It brings what they hold, or is resumed from its last checkpoint where it cannot."""
    wanted = phones(tmp_path) if clock == "virtual" else live(tmp_path)
    file = Command.write(wanted, tmp_path / "run")
    command = Command("serve", str(file), "--bind", ANY, "--out", str(tmp_path / "run"), "--nodes", "2")
    plan(tmp_path, {12: f"{deed} of {command.process.pid}"})
    address = read_address(command)
    joined = [join(address, tmp_path) for _ in range(2)]
    assert [node.finish()[0] for node in joined] == [codes[1]] * 2
    assert command.finish()[0] == codes[0]
    figures = supervisor.resume(tmp_path / "run", quiet=True).summary()
    assert (figures["versions"], figures["dropped_updates"]) == (12, 0)
    assert figures["integrity"]["checksum_mismatches"] == 0
    if clock == "virtual":
        assert figures["model_sha256"] == alone
    verify(tmp_path / "run", code=tmp_path)


@pytest.mark.parametrize("deed", ["kill it of FIRST", "kill the adder of FIRST", "kill the server of RUN"])
def test_under_the_wall_clock_only_what_a_lost_node_held_is_lost(deed: str, tmp_path: Path) -> None:
    figures, codes = on_two_nodes(live(tmp_path), tmp_path, {5: deed.replace("RUN", str(os.getpid()))})
    lost = "kill it" in deed
    assert codes == ([-9, 0] if lost else [0, 0])
    assert figures["versions"] == 12
    assert figures["integrity"]["checksum_mismatches"] == figures["integrity"]["version_mismatches"] == 0
    dropped = incidents(tmp_path / "run", "node")
    assert len(dropped) == figures["dropped_updates"]
    assert lost or dropped == []
    if "server" in deed:
        assert len(incidents(tmp_path / "run", "restart")) == 1
    with Record(tmp_path / "run") as record:
        reasons = {row for row in record.trips["reason"].tolist() if "node" in row and "was lost" in row}
    assert bool(reasons) == bool(dropped)
    verify(tmp_path / "run", code=tmp_path)
