"""The Ray driver of one run: it starts an actor on each node of the cluster. The actors host the run's peers.

The driver is a separate process because Ray's core prints to the terminal, starts threads, and exits when the
cluster is lost. The driver ends when all actors have ended. If the supervisor dies, the driver dies too, and
Ray ends the actors.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.host.channel import Channel, Refused
from edgefl.host.process import STOPS, become_child
from edgefl.hosts.node import join
from edgefl.zeromq.keys import Key, public

CONNECT_S = 60
"""Seconds that Ray may take to connect to the cluster. Ray's own limit is ten minutes."""
START_S = 60.0
"""Seconds that a node may take to free its cores and start a process."""
RESTARTS = 3
"""Maximum number of times that Ray restarts an actor whose process was killed on a live node."""
PASSED_ON = ("EDGEFL_DATA", "EDGEFL_MIRROR", "EDGEFL_MODULES", "EDGEFL_OFFLINE")
"""Names of the environment variables that actors inherit from this process unless their node sets them."""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Message from the driver to the supervisor: an actor has been started on each node in ``joiners``."""

    head: str
    """Address of the head node of the cluster."""
    here: str
    """Address at which other nodes reach this process's node."""
    joiners: dict[str, bytes]
    """Public key of each node that will join the run, keyed by node name."""
    absent: dict[str, str]
    """Reason why no actor was started on a node, keyed by node name."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Message from the supervisor to the driver: the run accepts nodes at this address; ``key`` is the public
    key of the run."""

    address: str
    key: bytes


class ActorEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Message from the driver to the supervisor: the actor on this node has ended, and Ray will not restart
    it."""

    name: str
    why: str


FromDriver = Placed | ActorEnded | Refused


class RayNode:
    """The Ray actor. Its process is a node (`edgefl.hosts.node`), so the peers on the node end with the
    actor."""

    def __init__(self, environment: dict[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)

    def join(self, address: str, key: Key, workers: int) -> str:
        """Host peers of the run until the run ends; return how it ended, or "" if it was completed."""
        return join(address, key, workers=workers)


def main(channel_fd: int, parent_pid: int, address: str, code: str, device: str) -> None:
    """Start actors in the cluster at ``address``, and send the folder ``code`` with the user's modules to
    them. ``device`` is the experiment's ``training.device``."""
    become_child(parent_pid, "edgefl-ray")
    channel: Channel[Opened] = Channel.inherit(channel_fd, Opened)
    if not os.environ.get("EDGEFL_TRACEBACK"):
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    try:
        _drive(channel, address, code, int(device == "cuda"))
    except Exception as error:  # Ray raises exceptions of many types
        channel.tell(Refused(_line(error), config=True))


def _drive(channel: Channel[Opened], address: str, code: str, gpus: int) -> None:
    """Run the driver until all actors have ended. Each actor reserves ``gpus`` GPUs of its node."""
    import ray

    _connect(address, code)
    nodes = dict(_named(ray.nodes()))
    actors = {name: _actor(node, cores, gpus) for name, (node, cores, have) in nodes.items() if have >= gpus}
    busy = "its cores or its GPUs are not free" if gpus else "its cores are not free"
    late = dict(_unavailable(actors, busy))
    for name in late:
        ray.kill(actors.pop(name))  # otherwise the actor would take the node's cores later
    absent = late | {name: "it has no GPU" for name in nodes if name not in late | actors}
    secrets = {name: os.urandom(32) for name in actors}
    if not secrets:
        why = "; ".join(f"node {name}: {why}" for name, why in absent.items()) or "none has CPU cores"
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
    """Connect to the cluster, and send the user's modules to all nodes. Raises `ConfigError` if Ray fails."""
    import ray

    environment = {"working_dir": code, "excludes": ["runs"]} if code else {}
    signal.alarm(CONNECT_S)  # ends this process even if Ray's core blocks
    try:
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="CRITICAL")
    except Exception as error:
        raise ConfigError(f"Ray: {_line(error)}") from error
    signal.alarm(0)
    for number in STOPS:  # Ray has installed its own handlers
        signal.signal(number, signal.SIG_IGN)


def _named(nodes: Iterable[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Yield, for each live node with cores, a readable name and the tuple (Ray's node id, number of cores,
    number of GPUs).

    >>> node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeID": "aa", "Resources": {"CPU": 4.0}}
    >>> dict(_named([node, {**node, "NodeID": "bb"}, {**node, "Alive": False}, {**node, "Resources": {}}]))
    {'10.0.0.1': ('aa', 4, 0), '10.0.0.1-2': ('bb', 4, 0)}
    """
    taken: Counter[str] = Counter()
    for node in sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        if node["Alive"] and (cores := int(node["Resources"].get("CPU", 0))):
            name, gpus = node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0))
            taken[name] += 1
            yield name if taken[name] == 1 else f"{name}-{taken[name]}", (node["NodeID"], cores, gpus)


def bracketed(host: str) -> str:
    """Return an IP address as it is written before a port: IPv6 addresses are put in brackets.

    >>> bracketed("10.0.0.1"), bracketed("fd00::1")
    ('10.0.0.1', '[fd00::1]')
    """
    return f"[{host}]" if ":" in host else host


def _actor(node: str, cores: int, gpus: int) -> Any:
    """Start an actor that reserves all cores of a node, so that Ray runs nothing else there meanwhile.

    The actor and its processes see only the GPUs that the actor has reserved; Ray hides the others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(RayNode)
        .options(
            num_cpus=cores,
            num_gpus=gpus,
            max_restarts=RESTARTS,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote({name: os.environ[name] for name in PASSED_ON if name in os.environ})
    )


def _unavailable(actors: dict[str, Any], busy: str) -> Iterator[tuple[str, str]]:
    """Yield each node on which no actor could be started, with the reason, which is ``busy`` if the actor did
    not start in time."""
    import ray

    started = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
    done, late = ray.wait(list(started), num_returns=len(started), timeout=START_S)
    for one in late:
        yield started[one], busy
    for one in done:
        if why := _outcome(one, ""):
            yield started[one], why


def _outcome(result: Any, fine: str = "the run is over") -> str:
    """Return the reason why a call to an actor has ended, or ``fine`` if it ended without an error."""
    import ray

    try:
        ray.get(result)
    except ray.exceptions.RayTaskError as error:
        return _line(error.cause)
    except ray.exceptions.RayError as error:
        return _line(error)
    return fine


def _line(error: BaseException) -> str:
    """Return the last line of an error message. In a traceback this is the line that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
