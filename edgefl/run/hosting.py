"""The `Hosts` on which a run's clients or workers are started; by default only this host.

`edgefl.hosts.nodes.Nodes` is the other implementation. With nodes, this host's zygote still loads the
workload, makes the first model and hosts the evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from edgefl.experiment import Experiment
from edgefl.host.channel import Channel
from edgefl.parameters.buffer import Shape
from edgefl.processes import usable_cores
from edgefl.results.rows import NodeRow
from edgefl.run import control


class Share(NamedTuple):
    """The peers that are assigned to one host."""

    host: str
    peers: Sequence[int]
    step_s: float
    """CPU seconds of a training step on that host."""
    cores: float | None = None
    """Cores for these peers; None for all that this process may use."""
    as_is: bool = False
    """True if the peers are not limited to their device profiles."""


class Seat(NamedTuple):
    """The server's address, pid (0 if remote) and public key, with which a peer connects."""

    address: str
    server: int = 0
    key: bytes = b""


class Hosts(Protocol):
    """The machines that run clients or workers. The supervisor calls this object and receives its
    messages."""

    name: str
    compare: bool
    """True if the hosts load data and model themselves; then their fingerprints must be compared."""
    wanted: int
    """Number of hosts that the run waits for."""
    rows: list[NodeRow]
    """Rows of the hosts for the run's record."""

    @property
    def door(self) -> str:
        """Address of the server's socket for peers on other machines; "" if all peers are on this machine."""

    def adapted(self, experiment: Experiment, base: Path) -> Experiment:
        """Return the experiment as it runs on these hosts. Raises `ConfigError` if it cannot."""

    def open(self, fd: int, say: Callable[[str], None]) -> None:
        """Start accepting hosts. `wait` returns when ``fd`` is readable; ``say`` shows the user a line."""

    def wait(self, timeout_s: float | None) -> float | None:
        """Wait for messages of the hosts; return the time for which the caller should still wait, s."""

    def receive(self) -> Iterator[control.FromHosts]:
        """Yield the messages that have arrived."""

    def prepare(self, message: control.Prepare, *, same_bits: bool) -> None:
        """Load data and model on all hosts. ``same_bits``: training must give the same bits on all hosts."""

    def expect(
        self, fingerprint: control.Fingerprint | None, host_step_s: float
    ) -> Iterator[control.FromHosts]:
        """Accept the hosts that match this host's fingerprint. ``host_step_s`` is the time of a training step
        on this host."""

    def carries(self) -> int:
        """Return the number of workers that the hosts have room for."""

    def shares(self, count: int) -> list[Share]:
        """Return each host's share of ``count`` peers that are spawned in order."""

    def adopt(self, shape: Shape) -> None:
        """Make parameter buffers on hosts that share no memory with this one."""

    def seat(self, server: control.Listening, name: bytes) -> Seat: ...

    def spawn(self, spawn: control.Spawn) -> None:
        """Start a peer."""

    def expel(self, message: control.Expel) -> control.Departed | None:
        """Kill a peer; if it has no process, return its `Departed` message at once."""

    def clear(self, restarts: int) -> Iterator[control.FromHosts]:
        """Kill all peers, because their server is gone; `control.Cleared` follows."""

    def usage(self, here: dict[str, float | None]) -> dict[str, float | None]:
        """Return the load of the worst host; ``here`` is the load of this one."""

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
        return usable_cores()

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
