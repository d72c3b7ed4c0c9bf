"""Use the nodes of a Ray cluster for a run: `edgefl run FILE --ray ADDRESS`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, RunError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import end_child
from edgefl.host.process import start_process
from edgefl.hosts.nodes import LOOPBACK, Nodes
from edgefl.hosts.ray_driver import CONNECT_S, ActorEnded, FromDriver, Opened, Placed, bracketed
from edgefl.loading import own_code
from edgefl.terminal import say
from edgefl.zeromq.keys import public

AUTO = "auto"
"""Address of the cluster to which this host belongs."""
HEAD_TIMEOUT_S = 5.0
"""Time limit in seconds for connecting to the head node of the cluster."""
GRACE_S = 10.0


@contextlib.contextmanager
def nodes_of(address: str, experiment: Experiment, base: Path, *, quiet: bool = False) -> Iterator[Nodes]:
    """Admit the nodes of the Ray cluster at ``address`` (``HOST:PORT`` or `AUTO`) to a run.

    Ray sends each node a new key for this run. If the experiment uses the user's own Python modules, the
    folder ``base`` is also sent to the nodes.

    Raises `ConfigError` if Ray is not installed, if the cluster cannot be reached, or if no node can take
    part.
    """
    if find_spec("ray") is None:
        raise ConfigError("--ray needs ray, which is not installed: pip install 'edgefl[ray]'")
    if address != AUTO:
        _own_address(address)  # fail immediately if no cluster answers
    if not quiet:
        say(f"edgefl: placing a process on each node of the Ray cluster {address}", err=True)
    child, channel = start_process(
        "edgefl.host.child",
        FromDriver,
        dict(os.environ),
        "edgefl.hosts.ray_driver",
        address,
        str(base) if own_code(msgspec.to_builtins(experiment)) else "",
        experiment.training.device,
    )
    try:
        with contextlib.closing(channel), contextlib.closing(_opened(channel, address)) as nodes:
            yield nodes
    finally:
        end_child(child, GRACE_S)  # the actors were already notified of the run's end


def _own_address(head: str) -> str:
    """Return the address from which this host connects to ``head`` (HOST:PORT). Raises `ConfigError` if
    nothing listens at ``head``."""
    host, _, port = head.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--ray: must be HOST:PORT of the cluster's head, or {AUTO} (got {head!r})")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), HEAD_TIMEOUT_S) as connection:
            return bracketed(connection.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--ray {head}: no cluster answers ({why})") from None


def _opened(channel: Channel[FromDriver], address: str) -> Nodes:
    """Return a `Nodes` object that accepts the nodes on which the driver has placed actors."""
    try:
        placed = channel.receive()
    except Closed:
        raise ConfigError(f"--ray {address}: no cluster answered within {CONNECT_S} s") from None
    if isinstance(placed, Refused):
        raise ConfigError(f"--ray {address}: {placed.message}")
    assert isinstance(placed, Placed)
    own, secret = _own_address(placed.head), os.urandom(32)
    if own in LOOPBACK:  # the head is on this host, but other nodes may not be
        own = placed.here
    nodes = Nodes(f"tcp://{own}:*", (secret, placed.joiners), len(placed.joiners))
    channel.tell(Opened(nodes.address, public(secret)))
    nodes.outlook = _NodeCounter(channel, nodes, placed)
    return nodes


class _NodeCounter:
    """Counts the nodes that may still take part in the run, and shows the user why other nodes cannot."""

    def __init__(self, channel: Channel[FromDriver], nodes: Nodes, placed: Placed) -> None:
        self._channel, self._nodes = channel, nodes
        self._absent, self._there = placed.absent, set(placed.joiners)
        self._ends: list[str] = []

    def __call__(self) -> int:
        """Return the number of nodes that may still take part. Raises `RunError` if no node is left."""
        for name, why in self._absent.items():
            self._nodes.say(f"node {name} does not take part: {why}")
        self._absent = {}
        try:
            for message in self._channel.receive_ready():
                if isinstance(message, ActorEnded):
                    self._there.discard(message.name)
                    self._ends.append(f"node {message.name}: {message.why}")
        except Closed:
            self._there.clear()
        if not self._there:
            raise RunError(f"no node of the Ray cluster is left: {'; '.join(self._ends) or 'Ray has ended'}")
        return len(self._there)
