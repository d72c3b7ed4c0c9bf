"""The process with the parties that unmask or decrypt sums for the server: clients that hold shares of masks,
clients that reveal shares, or a trusted aggregator.

The server starts this process for the first sum, and restarts it if it dies. The process has the phones'
keys, which the server does not have, and reads the encrypted shares or updates of a sum from the parameter
buffer. A file lists the masks or updates that were summed, so that after a restart no update is summed twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl import failpoints, kernels
from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.host.capacity import most_workers
from edgefl.host.channel import Channel, Closed, Refused
from edgefl.host.children import end_child, exit_of
from edgefl.host.process import become_child, start_process
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run.hidden import Members, Phones, phones_secret, scheme_of
from edgefl.run.secure_parties import AnyRules, SumReply
from edgefl.secure import USED_FILE

MAX_STARTS = 5
"""Maximum number of starts of the process for one sum; if all of them fail, the run ends."""
GRACE_S = 5.0


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Server → process: the run's rules; the parameter buffer's descriptor is attached."""

    experiment: Experiment
    folder: str
    clients: int
    rules: AnyRules
    failpoints_of: int
    """Number of server restarts, which selects the failpoints that apply; −1 if none applies."""


class SumRequest(msgspec.Struct, frozen=True, tag="sum"):
    """Server → process: the clients, slots and weights of a sum, and the helpers that are online."""

    members: list[tuple[int, int, float]]
    online: list[int]


class SecureProcess:
    """The server's connection to the process that unmasks or decrypts sums."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        clients: int,
        rules: AnyRules,
        buffer: ParameterBuffer,
    ) -> None:
        self._begin = Begin(experiment, str(folder), clients, rules, failpoints.restarts)
        self._buffer = buffer
        self._child: Any = None
        self._channel: Channel[SumReply | Refused]

    def ask(self, members: Members, online: Sequence[int]) -> SumReply:
        """Request the sum of ``members``, and return the reply.

        Raises `RunError` if the process ends `MAX_STARTS` times before it replies, or if it cannot continue,
        for example because the disk is full.
        """
        end = None
        for _ in range(MAX_STARTS):
            try:
                if self._child is None:
                    self._start()
                self._channel.send(SumRequest(list(members), list(online)))
                reply = self._channel.receive()
                if isinstance(reply, Refused):
                    raise RunError(reply.message)
                return reply
            except Closed:
                end = exit_of(self._child, GRACE_S)
                self.close()
        raise RunError(f"the process that unmasks sums ended early {MAX_STARTS} times ({end})")

    def _start(self) -> None:
        incoming, module = SumReply | Refused, "edgefl.run.secure_process"
        self._child, self._channel = start_process("edgefl.host.child", incoming, dict(os.environ), module)
        self._channel.send(self._begin, self._buffer.fd)
        self._begin = msgspec.structs.replace(self._begin, failpoints_of=-1)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._channel.close()
            end_child(self._child, GRACE_S)
            self._child = None


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-secure")
    kernels.set_threads(min(kernels.threads(), most_workers()))  # see `server_process._serve`
    channel: Channel[Begin | SumRequest] = Channel.inherit(channel_fd, Begin | SumRequest)
    try:
        begin = channel.receive()
        assert isinstance(begin, Begin)
        failpoints.restarts = begin.failpoints_of
        buffer, rules, folder = ParameterBuffer.attach(channel.descriptor()), begin.rules, Path(begin.folder)
        secret = phones_secret(begin.experiment, folder)
        phones, secure = Phones(secret, begin.experiment.seed, begin.clients), begin.experiment.server.secure
        assert secure is not None
        parties = scheme_of(secure.kind).parties(phones, rules, buffer, folder / USED_FILE)
        while True:
            message = channel.receive()
            assert isinstance(message, SumRequest)
            failpoints.pass_by("asked")
            reply = parties.reply(message.members, frozenset(message.online))
            parties.used.save()
            failpoints.pass_by("saved")
            channel.send(reply)
    except Closed:
        return 0
