"""Ray's driver of one run: an actor on each of the cluster's nodes, which hosts peers of the run there.

A process of its own, since Ray's core ends its process when the cluster is lost, prints what it likes, and
has threads. It is done when every actor is; it dies with the supervisor, and Ray then ends its actors.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.run.channel import Channel
from edgefl.run.control import Refused
from edgefl.run.keys import Key, public
from edgefl.run.node import join
from edgefl.run.process import STOPS, become_child

REACH_S = 60
"""Seconds that Ray may take to connect; without a bound it tries for ten minutes."""
START_S = 60.0
"""Seconds that a node may take to give its cores and start a process."""
RESTARTS = 3
"""How often Ray starts an actor again whose process was killed, where its node is there."""
PASSED_ON = ("EDGEFL_DATA", "EDGEFL_MODULES")
"""Variables of this process that an actor takes over where its node does not set them itself."""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """There is an actor on each of these nodes: driver → supervisor."""

    head: str
    """Address of the cluster's head."""
    here: str
    """Host of the node that this process is on, as the others know it."""
    joiners: dict[str, bytes]
    """Public keys, by name of the node."""
    absent: dict[str, str]
    """Why there is none on these."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The run's door is open for the nodes, at this address and with this public key: supervisor → driver."""

    address: str
    key: bytes


class ActorEnded(msgspec.Struct, frozen=True, tag="ended"):
    """This node's actor has ended for good: driver → supervisor."""

    name: str
    why: str


FromDriver = Placed | ActorEnded | Refused


class RayNode:
    """The actor. Its process is the node (`edgefl.run.node`), so what it hosts ends with it."""

    def __init__(self, environment: dict[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)

    def join(self, address: str, key: Key, workers: int) -> str:
        """Host peers until the run is over; returns how it ended."""
        return join(address, key, workers=workers)


def main(channel_fd: int, parent_pid: int, address: str, code: str) -> None:
    """Place actors in the cluster at ``address``, with the folder ``code`` of the user's own modules."""
    become_child(parent_pid, "edgefl-ray")
    channel: Channel[Opened] = Channel.inherit(channel_fd, Opened)
    if not os.environ.get("EDGEFL_TRACEBACK"):
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    try:
        _drive(channel, address, code)
    except Exception as error:  # Ray's own are of many kinds
        channel.tell(Refused(_line(error), config=True))


def _drive(channel: Channel[Opened], address: str, code: str) -> None:
    import ray

    _connect(address, code)
    nodes = dict(_named(ray.nodes()))
    actors = {name: _actor(*node) for name, node in nodes.items()}
    absent = dict(_not_there(actors))
    for name in absent:
        ray.kill(actors.pop(name))  # it would take its node's cores as soon as they are free
    secrets = {name: os.urandom(32) for name in actors}
    if not secrets:
        why = "; ".join(f"node {name}: {why}" for name, why in absent.items()) or "none has cores for work"
        raise ConfigError(f"no node of the Ray cluster can take part: {why}")
    joiners = {name: public(secret) for name, secret in secrets.items()}
    here = bracketed(ray.util.get_node_ip_address())
    channel.tell(Placed(ray.get_runtime_context().gcs_address, here, joiners, absent))
    door = channel.receive()
    running = {
        actors[name].join.remote(door.address, Key(name, secret, door.key), nodes[name][1]): name
        for name, secret in secrets.items()
    }
    while running:
        (done, *_), _ = ray.wait(list(running))
        channel.tell(ActorEnded(running.pop(done), _outcome(done)))


def _connect(address: str, code: str) -> None:
    """Be a driver of the cluster; its modules' folder goes to all nodes. `ConfigError` where that fails."""
    import ray

    environment = {"working_dir": code, "excludes": ["runs"]} if code else {}
    signal.alarm(REACH_S)  # which ends this process, whatever Ray's core is at
    try:
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="CRITICAL")
    except Exception as error:
        raise ConfigError(f"Ray: {_line(error)}") from error
    signal.alarm(0)
    for number in STOPS:  # Ray has put its own in their place
        signal.signal(number, signal.SIG_IGN)


def _named(nodes: Iterable[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, int]]]:
    """The living nodes that have cores: a name that a reader knows, and Ray's with the number of cores.

    >>> node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeID": "aa", "Resources": {"CPU": 4.0}}
    >>> dict(_named([node, {**node, "NodeID": "bb"}, {**node, "Alive": False}, {**node, "Resources": {}}]))
    {'10.0.0.1': ('aa', 4), '10.0.0.1-2': ('bb', 4)}
    """
    taken: Counter[str] = Counter()
    for node in sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        if node["Alive"] and (cores := int(node["Resources"].get("CPU", 0))):
            name = node["NodeManagerAddress"]
            taken[name] += 1
            yield name if taken[name] == 1 else f"{name}-{taken[name]}", (node["NodeID"], cores)


def bracketed(host: str) -> str:
    """An IP address as it stands before a port.

    >>> bracketed("10.0.0.1"), bracketed("fd00::1")
    ('10.0.0.1', '[fd00::1]')
    """
    return f"[{host}]" if ":" in host else host


def _actor(node: str, cores: int) -> Any:
    """An actor that has all of a node's cores: nothing else is to compute beside a run's phones."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(RayNode)
        .options(
            num_cpus=cores,
            max_restarts=RESTARTS,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote({name: os.environ[name] for name in PASSED_ON if name in os.environ})
    )


def _not_there(actors: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The nodes on which no actor could be started, and why."""
    import ray

    started = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
    done, late = ray.wait(list(started), num_returns=len(started), timeout=START_S)
    for one in late:
        yield started[one], "its cores are not free"
    for one in done:
        if why := _outcome(one, ""):
            yield started[one], why


def _outcome(result: Any, fine: str = "the run is over") -> str:
    """The reason for which an actor's call has ended."""
    import ray

    try:
        ray.get(result)
    except ray.exceptions.RayTaskError as error:
        return _line(error.cause)
    except ray.exceptions.RayError as error:
        return _line(error)
    return fine


def _line(error: BaseException) -> str:
    """The telling line of an error, of a traceback's text its last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
