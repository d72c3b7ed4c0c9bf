"""The `Hosts` on which a run's clients or workers are started; by default only this host.

`edgefl.hosts.nodes.Nodes` is the other implementation. With nodes, this host's zygote still loads the
workload, makes the first model and forks the evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from edgefl.experiment import Experiment
from edgefl.host.capacity import most_workers
from edgefl.host.channel import Channel
from edgefl.parameters.buffer import Shape
from edgefl.results.rows import NodeRow
from edgefl.run import control


class Share(NamedTuple):
    """The peers that are assigned to one host."""

    host: str
    peers: Sequence[int]
    step_s: float
    """CPU time of a training step on that host, in seconds."""
    cores: float | None = None
    """Number of cores for these peers; None if they may use all cores that this process may use."""
    as_is: bool = False
    """True if the peers run without the speed and memory limits of their device profiles."""


class Seat(NamedTuple):
    """The data with which a peer connects to the server: the address, the server's process id (0 if the
    server is on another machine) and the server's public key."""

    address: str
    server: int = 0
    key: bytes = b""


class Hosts(Protocol):
    """The machines that run clients or workers. The supervisor calls the methods of this object and receives
    its messages."""

    name: str
    compare: bool
    """True if the hosts load data and model themselves, so that their fingerprints must be compared."""
    wanted: int
    """Number of hosts that must be ready before the run starts."""
    rows: list[NodeRow]
    """Rows for the run's record, one for each host."""

    @property
    def door(self) -> str:
        """Address of the server's socket for peers on other machines; "" if all peers are on this machine."""

    def adapted(self, experiment: Experiment, base: Path) -> Experiment:
        """Return the experiment, changed to run on these hosts. Raises `ConfigError` if it cannot."""

    def open(self, fd: int, say: Callable[[str], None]) -> None:
        """Start accepting hosts.

        From now on, `wait` returns when ``fd`` is readable. ``say`` shows a line of text to the user.
        """

    def wait(self, timeout_s: float | None) -> float | None:
        """Wait for messages from the hosts. Return for how many seconds the caller should then wait for other
        messages, or None for no limit."""

    def receive(self) -> Iterator[control.FromHosts]:
        """Yield the messages that have arrived from the hosts."""

    def prepare(self, message: control.Prepare, *, same_bits: bool) -> None:
        """Load the data and the model on all hosts.

        If ``same_bits`` is True, training must give the same bits on all hosts.
        """

    def expect(
        self, fingerprint: control.Fingerprint | None, host_step_s: float
    ) -> Iterator[control.FromHosts]:
        """Accept the hosts whose fingerprints equal ``fingerprint``, this host's fingerprint.

        ``host_step_s`` is the time in seconds of a training step on this host.
        """

    def carries(self) -> int:
        """Return the number of workers that the hosts can run."""

    def shares(self, count: int) -> list[Share]:
        """Divide ``count`` peers, which are started in the order of their numbers, among the hosts."""

    def adopt(self, shape: Shape) -> None:
        """Create parameter buffers on the hosts that share no memory with this host."""

    def seat(self, server: control.Listening, name: bytes) -> Seat: ...

    def spawn(self, spawn: control.Spawn) -> None:
        """Start a peer."""

    def expel(self, message: control.Expel) -> control.Departed | None:
        """Kill a peer. If it has no process yet, return its `Departed` message, which no host would send."""

    def clear(self, restarts: int) -> Iterator[control.FromHosts]:
        """Kill all peers, because their server has died; each host then sends a `control.Cleared` message."""

    def usage(self, here: dict[str, float | None]) -> dict[str, float | None]:
        """Return the load of the most heavily loaded machine; ``here`` is the load of this host."""

    def close(self, outcome: str = "") -> None:
        """End all peers, because the run is over."""


class ThisHost:
    """This host, whose zygote starts the peers. The zygote sends messages to the supervisor directly."""

    name, compare, wanted, door = "zygote", False, 1, ""
    zygote: Channel[control.FromZygote]

    def __init__(self) -> None:
        self.rows: list[NodeRow] = []
        self._step_s = 0.0

    def adapted(self, experiment: Experiment, base: Path) -> Experiment:
        return experiment

    def open(self, fd: int, say: Callable[[str], None]) -> None:
        pass

    def wait(self, timeout_s: float | None) -> float | None:
        return timeout_s

    def receive(self) -> Iterator[control.FromHosts]:
        return iter(())

    def prepare(self, message: control.Prepare, *, same_bits: bool) -> None:
        self.zygote.tell(message)

    def expect(
        self, fingerprint: control.Fingerprint | None, host_step_s: float
    ) -> Iterator[control.FromHosts]:
        self._step_s = host_step_s
        yield control.Gathered(1)

    def carries(self) -> int:
        return most_workers()

    def shares(self, count: int) -> list[Share]:
        return [Share("", range(count), self._step_s)]

    def adopt(self, shape: Shape) -> None:
        pass

    def seat(self, server: control.Listening, name: bytes) -> Seat:
        return Seat(control.address(server.root, server.secret, name), server.pid)

    def spawn(self, spawn: control.Spawn) -> None:
        self.zygote.tell(spawn)

    def expel(self, message: control.Expel) -> control.Departed | None:
        self.zygote.tell(message)
        return None

    def clear(self, restarts: int) -> Iterator[control.FromHosts]:
        self.zygote.tell(control.Clear(restarts))
        return iter(())

    def usage(self, here: dict[str, float | None]) -> dict[str, float | None]:
        return here

    def close(self, outcome: str = "") -> None:
        pass
