"""A node: a process that joins a run and hosts some of its clients or workers (its peers).

The peers are forks of the node's zygote, a process that has already loaded the data and the model. The node
forwards messages between the supervisor and the zygote. When a node ends, so do all its peers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from edgefl.errors import ConfigError, RunError
from edgefl.host.capacity import UsageMeter, capacity_cores, host, machine, most_workers
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import Child, end_child, exit_of, kill_tree
from edgefl.host.confinement import Enforcement, enforced
from edgefl.host.process import start_process
from edgefl.hosts import messages
from edgefl.hosts.nodes import LOOPBACK, encode, software
from edgefl.run import control
from edgefl.terminal import say
from edgefl.zeromq import keys
from edgefl.zeromq.door import CallerSocket, endpoint
from edgefl.zeromq.sockets import Full

REACH_S = 60.0
"""Seconds for which a node tries to reach the run before it gives up."""
GRACE_S = 10.0
"""Time limit in seconds for the exit of the zygote; after that, it is killed."""
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(list[messages.ToNode])


def join(
    address: str,
    key: keys.Key | None = None,
    *,
    workers: int | None = None,
    device: str = "",
    as_is: bool = False,
) -> str:
    """Host clients or workers of the run at ``address`` until the run ends; return how it ended, or "" if it
    was completed.

    Under the virtual clock the node hosts ``workers`` worker processes (by default one per usable core);
    under the wall clock it hosts as many clients as its capacity allows. The user's modules are searched for
    in the working directory.

    If ``device`` is given, the node hosts only one client, which has this device profile. If ``as_is`` is
    True, this client is not slowed down.

    Raises `ConfigError` if the run rejects this node, and `RunError` if the run cannot be reached or if its
    supervisor has ended.
    """
    about = messages.Join(
        host(), machine(), capacity_cores(), software(), workers or most_workers(), device, as_is
    )
    say(f"edgefl: looking for a run at {address}", err=True)
    with contextlib.ExitStack() as stack:
        return _Node(address, key, about, stack).run()


class _NodeSocket(CallerSocket):
    """A node's connection to the run's door, the socket at which nodes join. If the connection breaks,
    messages in transit are lost."""

    def __init__(self, address: str, key: keys.Key) -> None:
        super().__init__(address, key.secret, key.server, events=_EVENTS)
        self.reached = self.connected = False

    def broke(self) -> bool:
        """Return True if the connection was established and then lost. Raises `ConfigError` if the run does
        not accept this node's key."""
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError("the run does not accept this node's key")
            elif event == zmq.EVENT_CONNECTED:
                self.reached = True
            elif self.connected:
                return True
        return False

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super().close()


class _Node:
    def __init__(
        self, address: str, key: keys.Key | None, about: messages.Join, stack: contextlib.ExitStack
    ) -> None:
        self._address, self._keyed, self._stack = address, key is not None, stack
        self._as_is = about.as_is
        self._line = _NodeSocket(address, key or keys.Key("", os.urandom(32), keys.public(keys.OPEN)))
        stack.callback(self._line.close)
        self._outbox: list[messages.FromNode] = [about]
        self._zygote: Channel[control.FromZygote] | None = None
        self._child: Child | None = None
        self._adopted = False
        """True if the zygote may have peers; before that, it loads data, or waits for the run to start."""
        self._usage = UsageMeter()
        self._until_s = time.monotonic() + REACH_S

    def run(self) -> str:
        try:
            while (over := self._turn()) is None:
                pass
            self._usage.end()
            self._end_zygote()
            with contextlib.suppress(Full):  # the supervisor may be gone
                self._line.send([encode([messages.NodeEnded(self._usage.usage())])])
            return over.outcome
        except BaseException as error:
            if not isinstance(error, ConfigError) or self._zygote is not None:
                self._report_leaving(str(error) or "interrupted")
            raise
        finally:
            self._end_zygote()

    def _turn(self) -> messages.Over | None:
        """Forward waiting messages in both directions; return the message that ends the run, if it has
        arrived."""
        self._send()
        self._line.wait(20 if self._outbox else 1000)
        broke = self._line.broke()
        for message in self._received():
            if isinstance(message, messages.Over):
                return message
            self._carry_out(message)
        if broke:
            raise RunError("the run's process is gone, or the connection to it was lost")
        if not self._line.connected and time.monotonic() > self._until_s:
            raise RunError(f"{self._address}: {self._join_failure()}")
        self._pass_on()
        return None

    def _join_failure(self) -> str:
        """Return the reason why this node could not join."""
        if self._line.reached:
            wants = "another key" if self._keyed else "a key (--key FILE)"
            return f"the server there requires {wants}, or is not a run"
        here = endpoint(self._address, "address")[0] in LOOPBACK
        return f"no run answers there{', which is this host itself' if here else ''}"

    def _send(self) -> None:
        if self._outbox:
            with contextlib.suppress(Full):
                self._line.send([encode(self._outbox)])
                self._outbox = []

    def _received(self) -> Iterator[messages.ToNode]:
        while (frames := self._line.receive()) is not None:
            yield from _decoder.decode(frames[0])

    def _carry_out(self, message: messages.ToNode) -> None:
        match message:
            case Refused():
                raise ConfigError(f"the run rejected this node: {message.message}")
            case control.Prepare():
                say(f"edgefl: joined {self._address}: loading data and model", err=True)
                enforcement = Enforcement()  # a real device (`--as-is`) is not limited
                try:
                    if not self._as_is:
                        enforcement = self._stack.enter_context(enforced(message.experiment))
                except ConfigError as error:  # this node cannot limit clients, for example
                    self._report_leaving(str(error))
                    raise
                self._start_zygote()
                message = msgspec.structs.replace(message, base=str(Path.cwd()), enforcement=enforcement)
            case control.Adopt():
                self._adopted = True
                self._usage.begin()
            case control.Spawn(address=address):
                # Use the host in the address with which this node joined. The host in ``address`` may be
                # 0.0.0.0, or unreachable because this node uses a tunnel.
                port = address.rpartition(":")[2]
                where = self._address.rpartition(":")[0]
                message = msgspec.structs.replace(message, address=f"{where}:{port}")
        if self._zygote is not None and not isinstance(message, messages.Alive):
            self._zygote.tell(message)

    def _start_zygote(self) -> None:
        environment, module = dict(os.environ), "edgefl.run.zygote"
        self._child, self._zygote = start_process(
            "edgefl.host.child", control.FromZygote, environment, module
        )
        self._line.watch(self._zygote.fileno())

    def _pass_on(self) -> None:
        """Queue the zygote's messages for the supervisor. If the zygote has failed, raise its error."""
        if self._zygote is None:
            return
        try:
            for message in self._zygote.receive_ready():
                if isinstance(message, Refused):
                    raise (ConfigError if message.config else RunError)(message.message)
                if isinstance(message, control.Prepared):
                    assert message.fingerprint is not None
                    self._outbox.append(messages.Agreed(message.fingerprint, message.host_step_s))
                else:
                    self._outbox.append(message)
        except Closed:
            assert self._child is not None
            end = exit_of(self._child, GRACE_S)
            how = f"ended early ({end})" if end else "closed its channel"
            raise RunError(f"the zygote process {how}") from None

    def _report_leaving(self, why: str) -> None:
        """Send the supervisor the reason why this node leaves the run, unless the send queue is full."""
        with contextlib.suppress(Full):
            self._line.send([encode([Refused(why, config=False)])])

    def _end_zygote(self) -> None:
        """Wait until the zygote and all its forks have ended."""
        if self._zygote is None or self._child is None:
            return
        self._zygote.close()
        if not self._adopted:
            kill_tree(self._child)  # while it loads data, it would not notice that the channel is closed
        end_child(self._child, GRACE_S)
        self._child = None
