"""The nodes of a run: processes, on this host or others, that host the run's clients or workers (its peers).

This module runs in the supervisor: it accepts nodes that join, assigns peers to them, and detects lost nodes.
A node (`edgefl.hosts.node`) loads the data and the model itself. It is accepted only if both are the same as
on this host. If the bits of the run's results depend on the node's training, its training steps must also
give the same bits as on this host.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edgefl import terminal
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError, EdgeflError, RunError, shortened
from edgefl.experiment import Experiment
from edgefl.host.capacity import machine
from edgefl.host.channel import Refused
from edgefl.hosts import messages
from edgefl.parameters.buffer import Shape
from edgefl.results.rows import NodeRow
from edgefl.results.tables import many
from edgefl.run import control
from edgefl.run.demands import shape_of
from edgefl.run.hosting import Seat, Share
from edgefl.run.peers import MAX_DETAIL
from edgefl.strategies import resolve
from edgefl.zeromq import keys
from edgefl.zeromq.door import DoorSocket, endpoint
from edgefl.zeromq.sockets import Full, Unreachable

ALIVE_MS = 1000
"""Interval between checks that the nodes are still connected, in milliseconds."""
GRACE_S = 15.0
"""Seconds that `Nodes.close` waits for the nodes to end. A node's own limit for its zygote is shorter."""
ENDING_S = 40.0
"""Seconds that a node may take to end a process when the run requests it. A node that takes longer is treated
as lost, because it is suspended or hangs. TCP needs the same time to detect that a host has disappeared."""
MAX_BYTES = 4 * 2**20
"""Maximum size of a message from a node, in bytes."""
BITS_DEPEND_ON = ("python", "torch", "numpy")
"""Software, besides edgefl, whose version can change the bits of training results."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_decoder = msgspec.msgpack.Decoder(list[messages.FromNode])
encode = msgspec.msgpack.encode


def software() -> dict[str, str]:
    """Return the versions of edgefl, Python, torch and numpy on this host, keyed by name."""
    found = {"python": platform.python_version()}
    for name in ("edgefl", "torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def on_nodes(experiment: Experiment, base: Path) -> Experiment:
    """Return the experiment with ``transport = "wire"``, which nodes need. Raises `ConfigError` if the
    experiment cannot run on nodes."""
    strategy = resolve(experiment.strategy, [base])
    if experiment.server.secure is not None:
        raise ConfigError("[server.secure] needs all clients on this host, not on nodes")
    if shape_of(experiment, strategy, size=1, clients=len(fleet_of(experiment))).kept:
        raise ConfigError(
            "nodes cannot keep a client's vectors between trips (a strategy's client_vectors, or the error "
            "feedback of rounded updates, which server.error_feedback = false turns off)"
        )
    server = msgspec.structs.replace(experiment.server, transport="wire")
    return msgspec.structs.replace(experiment, server=server)


@contextlib.contextmanager
def opened(bind: str, folder: Path | None, wanted: int, *, insecure: bool = False) -> Iterator[Nodes]:
    """Open a run's door, the socket at which nodes join, with the keys in ``folder``; close it at the end.

    If ``folder`` is None, anybody who can reach the address may join. Raises `ConfigError` if the keys are
    invalid, if anybody on the network could join and ``insecure`` is False, or if ``insecure`` is given with
    keys.
    """
    host, port = endpoint(bind, "--bind", any_port=True)
    if folder is not None and insecure:
        raise ConfigError("--insecure: cannot be combined with --keys, which admits only hosts with a key")
    if folder is None and host not in LOOPBACK:
        if not insecure:
            raise ConfigError(
                f"--bind {bind}: anybody who can reach this address could join and host the run's clients; "
                "give --keys DIR (edgefl keygen DIR NAME creates the keys), or --insecure"
            )
        terminal.say(f"edgefl: anybody who can reach {bind} may join this run", err=True)
    known = None if folder is None else keys.read_server(folder)
    if known is not None and (there := len(known[1])) < wanted:
        raise ConfigError(
            f"{folder} contains {many(there, 'node key')}, but the run waits for {many(wanted, 'node')}, "
            f"each with its own key; create more keys with: edgefl keygen {folder} NAME"
        )
    with contextlib.ExitStack() as stack:
        try:
            nodes = Nodes(bind, known, wanted)
            stack.callback(nodes.close, "interrupted")
            if port != "*":
                DoorSocket(nodes.door, keys.OPEN, MAX_BYTES).close()  # fails if the port is taken
        except RunError as error:
            raise ConfigError(f"--bind: {error}") from None
        yield nodes


@dataclass(eq=False)
class Node:
    """A node that has joined."""

    name: str
    about: messages.Join
    host_step_s: float = 0.0
    """CPU seconds that a training step takes on the node; 0 until the node is accepted."""
    cores: float = 0.0
    """Number of cores that this node may use. Nodes on the same machine have equal shares of its cores."""
    peers: dict[tuple[control.Role, int], int] = field(default_factory=dict)
    """Epoch of each peer on the node, keyed by the peer's role and ID."""
    hosted: set[int] = field(default_factory=set)
    """IDs of all peers that the node has ever hosted."""
    moved: dict[tuple[control.Role, int], str] = field(default_factory=dict)
    """Reason for ending each peer that moves to another node, keyed by role and ID. The current task of such
    a peer does not count as failed."""
    ending: dict[tuple[control.Role, int] | None, float] = field(default_factory=dict)
    """Monotonic time at which the node was told to end each peer that has not ended yet. The key None stands
    for all peers of a killed server."""
    cleared: int = 0
    outbox: deque[messages.ToNode] = field(default_factory=deque)

    @property
    def agreed(self) -> bool:
        return self.host_step_s > 0.0

    def row(self, lost: str = "", usage: dict[str, float | None] | None = None) -> NodeRow:
        """Return the row that describes this node in the run's record."""
        cpu, _, system = self.about.host
        return NodeRow(
            name=self.name,
            cpu=cpu,
            cores=self.cores,
            system=system,
            machine=self.about.machine,
            host_step_s=self.host_step_s,
            peers=sorted(self.hosted),
            as_is=self.about.as_is,
            lost=lost,
            usage=usage or {},
        )


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is not None, or None if there is no such value."""
    return max((value for value in values if value is not None), default=None)


def _together(usages: list[dict[str, float | None]]) -> tuple[float, float]:
    """Return the share of a machine's CPU time that the run used, and the share that other processes used.

    Each item of ``usages`` was measured by one process of the run. Its ``others`` is the share of all other
    processes, including the other processes of the run.
    """
    shares = [(usage.get("used") or 0.0, usage.get("others") or 0.0) for usage in usages]
    used, busy = sum(own for own, _ in shares), max(map(sum, shares))
    return min(1.0, used), max(0.0, busy - used)


class Nodes:
    """The nodes that join a run at the address ``bind``; implements `Hosts`.

    ``bind`` is ``tcp://HOST:PORT``, or ``tcp://HOST:*`` for any free port. ``known`` contains the secret key
    of the door (the socket at which nodes join) and the public keys of the nodes that may join, keyed by
    name; if it is None, any node may join. The run waits for ``wanted`` nodes. An instance serves one run.
    Raises `RunError` if the address is not available.
    """

    name, compare = "nodes", True

    def __init__(self, bind: str, known: tuple[bytes, dict[str, bytes]] | None, wanted: int = 1) -> None:
        secret, joiners = known or (keys.OPEN, {})
        self._door = DoorSocket(bind, secret, MAX_BYTES, anyone=known is None)
        for name, key in joiners.items():
            self._door.admit(name.encode(), key)
        self.wanted, self._bind = wanted, bind
        self.say: Callable[[str], None] = lambda _: None
        """Function that shows a message to the user."""
        self.invitation = ""
        """Instructions for joining, which are shown to the user when the run starts to wait for nodes."""
        self.outlook: Callable[[], int] | None = None
        """Function that returns how many nodes may still take part, and raises `EdgeflError` if none may;
        None if no launcher, such as Ray, starts the nodes."""
        self._nodes: dict[str, Node] = {}
        self._unplaced: list[control.Spawn] = []
        """Start messages for the peers that no node can host yet."""
        self._prepare: control.Prepare | None = None
        self._expected: control.Fingerprint | None = None
        self._same_bits = False
        self._waiting: dict[str, messages.Agreed] = {}
        """Fingerprints of nodes that have loaded the data and the model, keyed by node name, until they are
        compared with the fingerprint of this host."""
        self._adopt: control.Adopt | None = None
        self._reserved: dict[int, str] = {}
        """Name of the node for which a client is reserved, keyed by client ID. Only nodes that host a single
        client, of a given device profile, have a reserved client."""
        self._away: set[int] = set()
        """IDs of the peers of lost nodes, until the server requests another process for them, for example
        after ``fleet.rejoin_s``."""
        self._scale = 1.0
        """Time scale of the run; 1 before the first peer is started."""
        self._clearing = 0
        self._next_check_s = 0.0
        self._closed = False
        self.rows: list[NodeRow] = []
        """Rows of the record for nodes that left after hosting peers, and nodes that ended with the run."""

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def door(self) -> str:
        """Address at which the run's server listens for peers: the port after this socket's port, or any free
        port if this socket's port is not fixed."""
        where, _, port = self._bind.rpartition(":")
        return f"{where}:{int(port) + 1 if port.isdecimal() else '*'}"

    @property
    def agreed(self) -> list[Node]:
        """The accepted nodes, which can host peers."""
        return [node for node in self._nodes.values() if node.agreed]

    # ---- methods that the supervisor's loop calls -----------------------------------------------

    def adapted(self, experiment: Experiment, base: Path) -> Experiment:
        return on_nodes(experiment, base)

    def open(self, fd: int, say: Callable[[str], None]) -> None:
        self.say = lambda text: say(shortened(text, MAX_DETAIL))  # contains text from nodes
        self._door.watch(fd)
        if self.invitation:
            terminal.say(self.invitation, err=True)

    def wait(self, timeout_s: float | None) -> float:
        """Send the queued messages to the nodes, then wait up to one second for messages from them.

        Return 0, because the caller need not wait any longer.
        """
        late = any(not self._send(node) for node in self._nodes.values())
        most_ms = 20 if late else ALIVE_MS
        self._door.wait(most_ms if timeout_s is None else min(round(1000 * timeout_s), most_ms))
        return 0.0

    def receive(self) -> Iterator[control.FromHosts]:
        """Yield the messages from nodes that concern the run, and a message for each peer that ended because
        its node was lost."""
        for name, frames in self._door.receive():
            try:
                received = _decoder.decode(frames[0])
            except (msgspec.DecodeError, RecursionError, ValueError, IndexError):
                if name.decode() not in self._nodes:  # the node may have another version of edgefl
                    self._answer(name.decode(), f"its message is not valid for edgefl {software()['edgefl']}")
                yield from self._lose(name.decode(), "it sent an invalid message")
                continue
            for message in received:
                yield from self._handle(name.decode(), message)
        if (late_s := time.monotonic() - self._next_check_s) >= 0.0:
            self._next_check_s = time.monotonic() + ALIVE_MS / 1000
            yield from self._update_wanted()
            yield from self._drop_unresponsive(late_s)
            for node in [node for node in self._nodes.values() if not self._reachable(node)]:
                yield from self._lose(node.name, "its connection broke")

    def _drop_unresponsive(self, late_s: float) -> Iterator[control.FromHosts]:
        """Treat a node as lost if it has not ended a process in time.

        ``late_s`` is the delay of this check. If it is long, this process itself was held up and may not have
        read the nodes' answers yet, so all nodes get this time in addition.
        """
        now = time.monotonic()
        for node in [node for node in self._nodes.values() if node.ending]:
            if late_s > 2 * ALIVE_MS / 1000:
                node.ending = {who: min(now, since_s + late_s) for who, since_s in node.ending.items()}
            if now - min(node.ending.values()) > ENDING_S:
                why = f"it did not end a process of the run within {ENDING_S:g} s"
                self._answer(node.name, why)  # a suspended node that is resumed receives this and exits
                yield from self._lose(node.name, why)

    def _update_wanted(self) -> Iterator[control.FromHosts]:
        try:
            if self.outlook is not None and (most := self.outlook()) < self.wanted:
                self.wanted = most
                yield control.Gathered(len(self.agreed))
        except EdgeflError as error:
            yield Refused(str(error), config=isinstance(error, ConfigError))

    def _reachable(self, node: Node) -> bool:
        try:
            self._door.send(node.name.encode(), [encode([messages.Alive()])])
        except Full:
            pass
        except Unreachable:
            return False
        return True

    def _send(self, node: Node) -> bool:
        """Send the queued messages to a node; return False if ZeroMQ's send queue is full."""
        if node.outbox:
            try:
                self._door.send(node.name.encode(), [encode(list(node.outbox))])
            except Full:
                return False
            except Unreachable:
                pass  # `receive` detects the loss
            node.outbox.clear()
        return True

    def _handle(self, name: str, message: messages.FromNode) -> Iterator[control.FromHosts]:
        if isinstance(message, messages.Join):
            yield from self._lose(name, "it joined again")
            self._join(name, message)
            return
        node = self._nodes.get(name)
        if node is None:
            return
        match message:
            case messages.Agreed() if not node.agreed:
                self._waiting[name] = message
                yield from self._compare()
            case control.Departed(role=role, peer=peer, epoch=epoch):
                if node.peers.get((role, peer)) == epoch:
                    del node.peers[role, peer]
                    node.ending.pop((role, peer), None)
                    moved = node.moved.pop((role, peer), "")
                    yield control.Departed(role, peer, epoch, moved) if moved else message
            case control.Cleared(restarts=restarts):
                node.cleared = restarts
                if restarts == self._clearing:
                    node.ending.pop(None, None)
                yield from self._all_clear()
            case Refused():
                yield from self._lose(name, message.message)
            case messages.NodeEnded(usage=usage) if self._closed:
                if node.agreed:  # otherwise it was still loading
                    self.rows.append(node.row(usage=usage))
                del self._nodes[name]
                self._waiting.pop(name, None)
            case messages.Agreed() | messages.NodeEnded():
                yield from self._lose(name, "it sent a message at the wrong time")

    # ---- nodes that join and leave --------------------------------------------------------------

    def _join(self, name: str, join: messages.Join) -> None:
        if self._closed:  # `close` would wait for the node, which would load data and model for nothing
            self._answer(name, "the run has ended")
            return
        here, names = software(), ("edgefl", *(BITS_DEPEND_ON if self._same_bits else ()))
        differ = [f"{what} {join.software.get(what)}, but this host has {here[what]}" for what in names
                  if join.software.get(what) != here[what]]  # fmt: skip
        if differ:
            self._refuse(name, f"it has {'; '.join(differ)}")
            return
        self._nodes[name] = node = Node(name, join)
        if self._prepare is not None:
            node.outbox.append(self._prepare)
        self.say(f"node {name} joined: {join.cores:g} core{'' if join.cores == 1 else 's'}, {join.host[0]}")

    def _refuse(self, name: str, why: str) -> None:
        """Reject a node, and send it the reason."""
        self._nodes.pop(name, None)
        self._waiting.pop(name, None)
        self.say(f"node {name} was rejected: {why}")
        self._answer(name, why)

    def _answer(self, name: str, why: str) -> None:
        with contextlib.suppress(Full, Unreachable):
            self._door.send(name.encode(), [encode([Refused(why, config=True)])])

    def _compare(self) -> Iterator[control.FromHosts]:
        """Once this host has loaded the data and the model, accept the nodes whose data and model are the
        same, and reject the others."""
        if self._expected is None:
            return
        for name, agreed in list(self._waiting.items()):
            del self._waiting[name]
            if agreed.fingerprint.data != self._expected.data:
                self._refuse(name, "its data, their split or its initial model differ from this host's")
            elif why := self._reserve(self._nodes[name]):
                self._refuse(name, why)
            elif self._same_bits and agreed.fingerprint.training != self._expected.training:
                why = "its training steps give different bits than on this host (another type of CPU or GPU?)"
                self._refuse(name, why)
            else:
                yield from self._accept(self._nodes[name], agreed)

    def _reserve(self, node: Node) -> str:
        """Reserve a client for a node that hosts a single client, of a given device profile. If this is not
        possible, return the reason, else ""."""
        device = node.about.device
        if not device:
            return ""
        if self._same_bits:
            return "under the virtual clock nodes host workers, so a node cannot be a device"
        if node.about.as_is and self._scale != 1.0:
            return "it joined with --as-is, which needs a time scale of 1"
        assert self._prepare is not None
        experiment, waiting = self._prepare.experiment, {spawn.peer for spawn in self._unplaced}
        if experiment.fleet.on_death == "replace":
            waiting |= self._away
        free = waiting if self._adopt is not None else None
        for info in fleet_of(experiment):
            number = info.client
            if info.profile == device and number not in self._reserved and (free is None or number in free):
                self._reserved[number] = node.name
                return ""
        return f"this run has no client with the profile {device} that needs a host"

    def _accept(self, node: Node, agreed: messages.Agreed) -> Iterator[control.FromHosts]:
        """Accept a node: assign it peers that no node hosts, and workers from nodes that host too many."""
        node.host_step_s, node.cleared = agreed.host_step_s, self._clearing
        self._share_cores()
        if self._adopt is not None:
            node.outbox.append(self._adopt)
            unplaced, self._unplaced = self._unplaced, []
            for spawn in unplaced:  # a peer that still has no node is queued again
                self.spawn(spawn)
        yield control.Gathered(len(self.agreed))
        if self._same_bits:
            self._make_room(f"node {node.name} has room for it")

    def _make_room(self, why: str) -> None:
        """End the workers that nodes host in excess of their share, so that other nodes restart them."""
        carried = sum(node.about.workers for node in self.agreed)
        share = -(-sum(len(node.peers) for node in self.agreed) // carried)
        for node in self.agreed:
            for who, epoch in list(node.peers.items())[share * node.about.workers :]:
                node.moved[who] = why
                node.outbox.append(control.Expel(*who, epoch))

    def _share_cores(self) -> None:
        """Divide the cores of each machine equally among the nodes on it."""
        for node in self.agreed:
            there = sum(other.about.machine == node.about.machine for other in self.agreed)
            node.cores = node.about.cores / there

    def _lose(self, name: str, why: str) -> Iterator[control.FromHosts]:
        """Remove a lost node, and yield a message that reports the end of each of its peers."""
        self._waiting.pop(name, None)
        if (node := self._nodes.pop(name, None)) is None:
            return
        why = shortened(why, MAX_DETAIL)
        self.say(f"node {name} is lost: {why}")
        self._share_cores()
        self._reserved = {client: of for client, of in self._reserved.items() if of != name}
        if node.hosted:
            self.rows.append(node.row(lost=why))
        self._away.update(peer for _, peer in node.peers)
        for (role, peer), epoch in node.peers.items():
            yield control.Departed(role, peer, epoch, f"node {name} is lost: {why}")
        yield from self._all_clear()

    def _all_clear(self) -> Iterator[control.FromHosts]:
        if self._clearing and all(node.cleared == self._clearing for node in self.agreed):
            yield control.Cleared(self._clearing)

    # ---- commands from the supervisor -----------------------------------------------------------

    def prepare(self, message: control.Prepare, *, same_bits: bool) -> None:
        self._prepare, self._same_bits = message, same_bits

    def expect(
        self, fingerprint: control.Fingerprint | None, host_step_s: float
    ) -> Iterator[control.FromHosts]:
        self._expected = fingerprint
        yield from self._compare()

    def adopt(self, shape: Shape) -> None:
        """Make the nodes create their parameter buffers, after which they can host peers."""
        self._adopt = control.Adopt(initialise=False, shape=shape)
        for node in self.agreed:
            node.outbox.append(self._adopt)

    def spawn(self, spawn: control.Spawn) -> None:
        """Start a peer on the node with the lowest load relative to its capacity. If no node can host it, it
        waits until one can."""
        self._scale = spawn.time_scale
        self._away.discard(spawn.peer)
        node = self._host_of(spawn.peer, {node.name: len(node.peers) for node in self.agreed})
        if node is None:
            if not self._unplaced:
                self.say("some clients have no node; waiting for a node to join")
            self._unplaced.append(spawn)
            return
        spawn = msgspec.structs.replace(spawn, as_is=node.about.as_is)
        node.peers[spawn.role, spawn.peer] = spawn.epoch
        node.hosted.add(spawn.peer)
        node.outbox.append(spawn)

    def _host_of(self, number: int, peers: dict[str, int]) -> Node | None:
        """Return the node that is reserved for this peer; if there is none, the node with the fewest
        ``peers`` relative to its capacity."""

        def full(name: str) -> float:
            node = self._nodes[name]
            carries = node.about.workers if self._same_bits else node.cores / node.host_step_s
            return (peers[name] + 1) / carries

        if (own := self._reserved.get(number)) is not None:
            return self._nodes[own]
        names = [name for name in sorted(peers) if not self._nodes[name].about.device]
        return self._nodes[min(names, key=full)] if names else None

    def carries(self) -> int:
        return sum(node.about.workers for node in self.agreed)

    def shares(self, count: int) -> list[Share]:
        given: dict[str, list[int]] = {node.name: [] for node in self.agreed}
        for number in range(count):
            node = self._host_of(number, {name: len(numbers) for name, numbers in given.items()})
            if node is not None:
                given[node.name].append(number)
        return [
            Share(node.name, given[node.name], node.host_step_s, node.cores, node.about.as_is)
            for node in self.agreed
        ]

    def seat(self, server: control.Listening, name: bytes) -> Seat:
        return Seat(server.door, key=server.key)

    def usage(self, here: dict[str, float | None]) -> dict[str, float | None]:
        found = [(machine(), here), *((row.machine, row.usage) for row in self.rows)]
        by_machine: dict[str, list[dict[str, float | None]]] = {}
        for name, usage in found:
            by_machine.setdefault(name, []).append(usage)
        used, others = zip(*(_together(usages) for usages in by_machine.values()), strict=True)
        return {
            "steal": largest(usage.get("steal") for _, usage in found),
            "throttled": largest(usage.get("throttled") for _, usage in found),
            "used": largest(used),
            "others": largest(others),
        }

    def expel(self, message: control.Expel) -> control.Departed | None:
        who = message.role, message.peer
        for spawn in [spawn for spawn in self._unplaced if (spawn.role, spawn.peer) == who]:
            self._unplaced.remove(spawn)
            return control.Departed(*who, message.epoch, "no node could run it")
        for node in self._nodes.values():
            if node.peers.get(who) == message.epoch:
                node.ending.setdefault(who, time.monotonic())
                node.outbox.append(message)
        return None

    def clear(self, restarts: int) -> Iterator[control.FromHosts]:
        self._clearing = restarts
        self._unplaced.clear()
        for node in self.agreed:
            node.peers.clear()
            node.moved.clear()
            node.ending = {None: time.monotonic()}
            node.outbox.append(control.Clear(restarts))
        yield from self._all_clear()

    def close(self, outcome: str = "") -> None:
        if self._closed:
            return
        self._closed, self._clearing = True, 0
        for node in self._nodes.values():
            node.outbox.append(messages.Over(outcome))
        until_s = time.monotonic() + GRACE_S
        try:
            while self._nodes and time.monotonic() < until_s:
                self.wait(None)
                for _ in self.receive():
                    pass  # the run is over
        finally:
            self._door.close()
