"""A node: a process that joins a run by its door and hosts clients or workers of it, as forks of its zygote.

It passes on what supervisor and zygote say to each other. Whatever ends it ends what it hosts.
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
from edgefl.host.capacity import UsageMeter, capacity_cores, host, machine
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import Child, end_child, exit_of
from edgefl.host.confinement import enforced
from edgefl.host.process import start_process
from edgefl.hosts import messages
from edgefl.hosts.nodes import LOOPBACK, encode, software
from edgefl.processes import usable_cores
from edgefl.run import control
from edgefl.terminal import say
from edgefl.zeromq import keys
from edgefl.zeromq.door import CallerSocket, endpoint
from edgefl.zeromq.sockets import Full

REACH_S = 60.0
"""Seconds that a node tries to get in."""
GRACE_S = 10.0
"""Time that the zygote is given to leave before it is killed."""
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
    """Host peers for the run behind ``address`` until it is over; returns how it ended, "" if it was done.

    ``workers`` (default: the usable cores) are hosted under the virtual clock; clients under the wall clock
    are as many as this host can carry of them. User's own modules are looked for in the working directory.

    With a ``device`` it is one client of that profile and no other; ``as_is`` if it is not to be held to it.

    Raises `ConfigError` where the run does not take this node, `RunError` where the run cannot be reached or
    its supervisor is gone.
    """
    say(f"edgefl: looking for a run at {address}", err=True)
    with contextlib.ExitStack() as stack:
        about = messages.Join(
            host(), machine(), capacity_cores(), software(), workers or usable_cores(), device, as_is
        )
        return _Node(address, key, about, stack).run()


class _NodeSocket(CallerSocket):
    """The connection to the run's door, which tells when it breaks: what was on the way then is lost."""

    def __init__(self, address: str, key: keys.Key) -> None:
        super().__init__(address, key.secret, key.server, events=_EVENTS)
        self.reached = self.inside = False

    def broke(self) -> bool:
        """Returns True if the connection was there and is no more. `ConfigError` if the key is not known."""
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.inside = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError("the run does not let in this key")
            elif event == zmq.EVENT_CONNECTED:
                self.reached = True
            elif self.inside:
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
        self._line = _NodeSocket(address, key or keys.Key("", os.urandom(32), keys.public(keys.OPEN)))
        stack.callback(self._line.close)
        self._outbox: list[messages.FromNode] = [about]
        self._zygote: Channel[control.FromZygote] | None = None
        self._child: Child | None = None
        self._usage = UsageMeter()
        self._until_s = time.monotonic() + REACH_S

    def run(self) -> str:
        try:
            while (over := self._turn()) is None:
                pass
            self._usage.end()
            self._end_zygote()
            with contextlib.suppress(Full):  # nobody is there to hear it
                self._line.send([encode([messages.NodeEnded(self._usage.usage())])])
            return over.outcome
        except BaseException as error:
            if not isinstance(error, ConfigError) or self._zygote is not None:
                self._say_farewell(str(error) or "interrupted")
            raise
        finally:
            self._end_zygote()

    def _turn(self) -> messages.Over | None:
        """Hear and pass on what is said; the end of the run, once it is there."""
        self._send()
        self._line.wait(20 if self._outbox else 1000)
        broke = self._line.broke()
        for message in self._told():
            if isinstance(message, messages.Over):
                return message
            self._carry_out(message)
        if broke:
            raise RunError("the run's process is gone, or the connection to it broke")
        if not self._line.inside and time.monotonic() > self._until_s:
            raise RunError(f"{self._address}: {self._outside()}")
        self._pass_on()
        return None

    def _outside(self) -> str:
        """The reason why this node could not get in."""
        if self._line.reached:
            wants = "another key" if self._keyed else "a key (--key FILE)"
            return f"what answers there wants {wants}, or is no run"
        here = endpoint(self._address, "address")[0] in LOOPBACK
        return f"no run answers there{', which is this host itself' if here else ''}"

    def _send(self) -> None:
        if self._outbox:
            with contextlib.suppress(Full):
                self._line.send([encode(self._outbox)])
                self._outbox = []

    def _told(self) -> Iterator[messages.ToNode]:
        while (frames := self._line.receive()) is not None:
            yield from _decoder.decode(frames[0])

    def _carry_out(self, message: messages.ToNode) -> None:
        match message:
            case Refused():
                raise ConfigError(f"the run does not take this node: {message.message}")
            case control.Prepare():
                say(f"edgefl: joined {self._address}: loading data and model", err=True)
                enforcement = self._stack.enter_context(enforced(message.experiment))
                self._start_zygote()
                message = msgspec.structs.replace(message, base=str(Path.cwd()), enforcement=enforcement)
            case control.Adopt():
                self._usage.begin()
            case control.Spawn(address=address):  # it may call itself 0.0.0.0, or be behind a tunnel
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
        """Tell the supervisor what the zygote says. Raises where that cannot go on."""
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
            end = exit_of(self._child, 1.0)
            how = f"ended early ({end})" if end else "closed its channel"
            raise RunError(f"the zygote process {how}") from None

    def _say_farewell(self, why: str) -> None:
        """Tell the supervisor that this node is gone, if it hears."""
        with contextlib.suppress(Full):
            self._line.send([encode([Refused(why, config=False)])])

    def _end_zygote(self) -> None:
        """Wait for the zygote to leave, and with it all that it has forked."""
        if self._zygote is None or self._child is None:
            return
        self._zygote.close()
        end_child(self._child, GRACE_S)
