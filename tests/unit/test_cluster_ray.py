"""Nodes of a Ray cluster, as the driver reports them: the server's address, absent nodes and ended nodes."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.cli.run import _cluster_for
from edgefl.errors import ConfigError, RunError
from edgefl.host.channel import Channel, Refused, pair
from edgefl.hosts.ray import _opened
from edgefl.hosts.ray_driver import ActorEnded, FromDriver, Opened, Placed
from edgefl.results.store import Store
from edgefl.zeromq.keys import public


def test_a_run_that_only_lacks_its_results_needs_no_cluster(tmp_path: Path) -> None:
    """Regression: resuming such a run was refused with "there is nothing to resume"."""
    with Store(tmp_path) as store:
        store.set_meta(status="done")
    with _cluster_for("auto", tmp_path, quiet=True) as nodes:
        assert nodes is None


@pytest.fixture
def ends() -> Iterator[tuple[Channel[FromDriver], Channel[Opened]]]:
    """The supervisor's end of the channel, and the driver's."""
    ours, theirs = pair()
    with (
        contextlib.closing(Channel(ours, FromDriver)) as here,
        contextlib.closing(Channel(theirs, Opened)) as there,
    ):
        yield here, there


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is no address there")
def test_the_door_has_an_address_that_nodes_reach_and_a_run_without_nodes_ends(
    ends: tuple[Channel[FromDriver], Channel[Opened]],
) -> None:
    here, there = ends
    with socket.create_server(("127.0.0.1", 0)) as head:
        joiners = {"a": public(bytes(32)), "b": public(bytes(31) + b"\1")}
        absent = {"c": "its cores are not free"}
        there.send(Placed(f"127.0.0.1:{head.getsockname()[1]}", "127.0.0.2", joiners, absent))
        with contextlib.closing(_opened(here, "auto")) as nodes:
            assert nodes.address.startswith("tcp://127.0.0.2:")
            assert there.receive().address == nodes.address
            assert nodes.wanted == 2
            said: list[str] = []
            nodes.say = said.append
            assert [nodes.outlook(), nodes.outlook()] == [2, 2]
            assert said == ["node c does not take part: its cores are not free"]
            there.send(ActorEnded("b", "out of memory"))
            assert nodes.outlook() == 1
            there.close()
            with pytest.raises(
                RunError, match=r"^no node of the Ray cluster is left: node b: out of memory$"
            ):
                nodes.outlook()


def test_an_unavailable_cluster_is_an_error_of_one_line(
    ends: tuple[Channel[FromDriver], Channel[Opened]],
) -> None:
    here, there = ends
    there.send(Refused("no module named 'msgpack'", config=True))
    with pytest.raises(ConfigError, match=r"^--ray auto: no module named 'msgpack'$"):
        _opened(here, "auto")
    there.close()
    with pytest.raises(ConfigError, match=r"^--ray auto: no cluster answered within 60 s$"):
        _opened(here, "auto")
