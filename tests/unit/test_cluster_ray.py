"""Nodes of a Ray cluster, as the driver reports them: the server's address, absent nodes and ended nodes."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

from edgefl.cli.run import _cluster_for
from edgefl.errors import ConfigError, RunError
from edgefl.host.channel import Channel, Refused, pair
from edgefl.hosts import ray_driver
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


@pytest.mark.parametrize(
    ("gpus", "reserved", "why"),
    [
        (0, [{"num_cpus": 4, "num_gpus": 0}, {"num_cpus": 2, "num_gpus": 0}], "its cores are not free"),
        (1, [{"num_cpus": 2, "num_gpus": 1}], "its cores or its GPUs are not free"),
    ],
)
def test_actors_reserve_a_gpu_if_the_workers_train_on_gpus(
    gpus: int,
    reserved: list[dict[str, int]],
    why: str,
    ends: tuple[Channel[FromDriver], Channel[Opened]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the actors reserved no GPU, and Ray hides GPUs that are not reserved."""
    ray, strategies = MagicMock(), ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = MagicMock()  # type: ignore[attr-defined]
    modules = {"ray": ray, "ray.util": ray.util, "ray.util.scheduling_strategies": strategies}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_driver, "_connect", lambda address, code: None)
    resources = {"10.0.0.1": {"CPU": 4.0}, "10.0.0.2": {"CPU": 2.0, "GPU": 8.0}}
    ray.nodes.return_value = [
        {"Alive": True, "NodeManagerAddress": name, "NodeID": name, "Resources": have}
        for name, have in resources.items()
    ]
    ray.wait = lambda started, **_: ([], started)
    ray.remote.return_value.options.return_value.remote = lambda _: SimpleNamespace(__ray_ready__=MagicMock())
    with pytest.raises(ConfigError) as error:
        ray_driver._drive(ends[1], "auto", "", gpus)
    calls = [call.kwargs for call in ray.remote.return_value.options.call_args_list]
    assert [{name: call.get(name) for name in ("num_cpus", "num_gpus")} for call in calls] == reserved
    first = why if not gpus else "it has no GPU"
    assert f"node 10.0.0.1: {first}" in str(error.value)
    assert f"node 10.0.0.2: {why}" in str(error.value)
