"""The nodes of a Ray cluster as a run's: `edgefl run FILE --ray ADDRESS`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edgefl.cluster.ray_driver import REACH_S, ActorEnded, FromDriver, Opened, Placed, bracketed
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Experiment
from edgefl.loading import own_code
from edgefl.run.channel import Channel, Closed
from edgefl.run.control import Refused
from edgefl.run.keys import public
from edgefl.run.nodes import LOOPBACK, Nodes
from edgefl.run.process import end_child, start_process
from edgefl.terminal import say

AUTO = "auto"
"""The cluster that this host belongs to."""
KNOCK_S = 5.0
"""Seconds that the cluster's head may take to accept a connection."""
GRACE_S = 10.0


@contextlib.contextmanager
def nodes_of(address: str, experiment: Experiment, base: Path, *, quiet: bool = False) -> Iterator[Nodes]:
    """Open a run's door to the nodes of the Ray cluster at ``address`` (``HOST:PORT`` or `AUTO`).

    Keys are made for this run; Ray hands each node its own. The folder ``base`` goes along where the
    experiment names modules of the user's.

    Raises `ConfigError` without Ray or a cluster, and where none of its nodes can take part.
    """
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed, which --ray needs: pip install 'edgefl[ray]'")
    if address != AUTO:
        _own_address(address)  # Ray itself would wait for somebody to come
    if not quiet:
        say(f"edgefl: having the Ray cluster {address} place a process on each of its nodes", err=True)
    child, channel = start_process(
        "edgefl.run.child",
        FromDriver,
        dict(os.environ),
        "edgefl.cluster.ray_driver",
        address,
        str(base) if own_code(msgspec.to_builtins(experiment)) else "",
    )
    try:
        with contextlib.closing(channel), contextlib.closing(_opened(channel, address)) as nodes:
            yield nodes
    finally:
        end_child(child, GRACE_S)  # the actors have heard that the run is over


def _own_address(head: str) -> str:
    """This host's address as ``head`` (HOST:PORT) sees it; `ConfigError` at once if nobody is there."""
    host, _, port = head.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--ray: must be HOST:PORT of the cluster's head, or {AUTO} (got {head!r})")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK_S) as knock:
            return bracketed(knock.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--ray {head}: no cluster answers there ({why})") from None


def _opened(channel: Channel[FromDriver], address: str) -> Nodes:
    """The run's door, open to the nodes that the driver has found."""
    try:
        placed = channel.receive()
    except Closed:
        raise ConfigError(f"--ray {address}: no cluster has answered within {REACH_S} s") from None
    if isinstance(placed, Refused):
        raise ConfigError(f"--ray {address}: {placed.message}")
    assert isinstance(placed, Placed)
    own, secret = _own_address(placed.head), os.urandom(32)
    if own in LOOPBACK:  # the head is here, and the other nodes may not be
        own = placed.here
    nodes = Nodes(f"tcp://{own}:*", (secret, placed.joiners), len(placed.joiners))
    channel.tell(Opened(nodes.address, public(secret)))
    nodes.outlook = _Outlook(channel, nodes, placed)
    return nodes


class _Outlook:
    """Says how many nodes the run may count on, and tells the user why it is fewer than there are."""

    def __init__(self, channel: Channel[FromDriver], nodes: Nodes, placed: Placed) -> None:
        self._channel, self._nodes = channel, nodes
        self._absent, self._there = placed.absent, set(placed.joiners)
        self._ends: list[str] = []

    def __call__(self) -> int:
        """Raises `RunError` where none is left."""
        for name, why in self._absent.items():
            self._nodes.say(f"node {name} takes no part: {why}")
        self._absent = {}
        try:
            for message in self._channel.receive_ready():
                if isinstance(message, ActorEnded):
                    self._there.discard(message.name)
                    self._ends.append(f"node {message.name}: {message.why}")
        except Closed:
            self._there.clear()
        if not self._there:
            raise RunError(f"no node of the Ray cluster is left: {'; '.join(self._ends) or 'Ray is gone'}")
        return len(self._there)
