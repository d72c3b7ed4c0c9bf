"""The process with the parties that unmask or open sums for the server: holders of masks, or an aggregator.

The server starts it at the first sum and starts it again if it dies. It has the phones' keys, which the
server does not, and reads the sealed shares or updates of a sum in the parameter buffer. What was summed is
in a file, so that no update counts in two sums after a restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import RunError
from edgefl.experiment import Experiment
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import end_child, exit_of
from edgefl.host.process import become_child, start_process
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run.hidden import Phones, id_of, phones_secret, sealed_share, sealed_update
from edgefl.secure import USED_FILE, SecureError
from edgefl.secure.coded import Answer, Holder, Member, Request, Rules
from edgefl.secure.trusted import SealedUpdate, TrustedAggregator, TrustedRules

MOST_STARTS = 5
"""Starts of the process for one sum, after which the run ends."""
GRACE_S = 5.0
Members = Sequence[tuple[int, int, float]]
"""Client, slot and weight of each update of a sum."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Server → process: the run's rules; the parameter buffer's descriptor is attached."""

    experiment: Experiment
    folder: str
    clients: int
    rules: Rules | TrustedRules


class SumRequest(msgspec.Struct, frozen=True, tag="sum"):
    """Server → process: clients, slots and weights of a sum."""

    members: list[tuple[int, int, float]]


class SumReply(msgspec.Struct, frozen=True, tag="reply"):
    """Process → server: the holders' answers; or the sum's bytes, or why it was ``refused``."""

    answers: list[Answer] = []
    total: bytes = b""
    refused: str = ""


class SecureProcess:
    """The server's connection to the process."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        clients: int,
        rules: Rules | TrustedRules,
        buffer: ParameterBuffer,
    ) -> None:
        self._begin, self._buffer = Begin(experiment, str(folder), clients, rules), buffer
        self._child: Any = None
        self._channel: Channel[SumReply]

    def ask(self, members: Members) -> SumReply:
        """Return the reply to a sum's request. `RunError` if the process ends again and again."""
        end = None
        for _ in range(MOST_STARTS):
            try:
                if self._child is None:
                    self._start()
                self._channel.send(SumRequest(list(members)))
                return self._channel.receive()
            except Closed:
                end = exit_of(self._child, GRACE_S)
                self.close()
        raise RunError(f"the process that unmasks sums ended early {MOST_STARTS} times ({end})")

    def _start(self) -> None:
        self._child, self._channel = start_process("edgefl.run.secure_process", SumReply, dict(os.environ))
        self._channel.send(self._begin, self._buffer.fd)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._channel.close()
            end_child(self._child, GRACE_S)
            self._child = None


class _Used:
    """Ids of summed masks or updates by party, in memory and in a file."""

    def __init__(self, path: Path, parties: Sequence[int]) -> None:
        self.of: dict[int, dict[bytes, bytes]] = {party: {} for party in parties}
        if path.exists():
            for line in path.read_text().splitlines():
                party, name, digest = line.split(" ")
                self.of[int(party)][bytes.fromhex(name)] = bytes.fromhex(digest)
        self._saved = {party: set(names) for party, names in self.of.items()}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def save(self) -> None:
        """Write new ids to the file, in one write, before the reply is sent."""
        lines = []
        for party, names in self.of.items():
            new = names.keys() - self._saved[party]
            lines += [f"{party} {name.hex()} {names[name].hex()}\n" for name in sorted(new)]
            self._saved[party] |= new
        os.write(self._file, "".join(lines).encode())


class _Holders:
    """All holders of masks."""

    def __init__(self, phones: Phones, rules: Rules, buffer: ParameterBuffer, path: Path) -> None:
        self._rules, self._buffer = rules, buffer
        self.used = _Used(path, range(1, rules.code.holders + 1))
        self._holders = [
            Holder(number, phones.keys(client), phones.public, rules, self.used.of[number])
            for number, client in enumerate(phones.holders, start=1)
        ]

    def reply(self, members: Members) -> SumReply:
        return SumReply([holder.answer(self._request(members, holder.number)) for holder in self._holders])

    def _request(self, members: Members, holder: int) -> Request:
        """Build the request that this holder would receive."""
        found = []
        for client, slot, weight in members:
            raw = self._buffer.raw(slot)
            sealed = sealed_share(raw, self._rules, holder)
            found.append(Member(client, id_of(raw, self._rules.code.size), int(weight), sealed))
        return Request(found)


class _Aggregator:
    """The trusted aggregator."""

    def __init__(self, phones: Phones, rules: TrustedRules, buffer: ParameterBuffer, path: Path) -> None:
        self._size, self._buffer, self.used = rules.size, buffer, _Used(path, [0])
        self._aggregator = TrustedAggregator(phones.aggregator, phones.public, rules, self.used.of[0])

    def reply(self, members: Members) -> SumReply:
        updates = []
        for client, slot, weight in members:
            raw = self._buffer.raw(slot)
            updates.append(
                SealedUpdate(client, id_of(raw, self._size), weight, sealed_update(raw, self._size))
            )
        try:
            return SumReply(total=self._aggregator.sum(updates).tobytes())
        except SecureError as error:
            return SumReply(refused=str(error))


def main(channel_fd: int, parent_pid: int) -> int:
    become_child(parent_pid, "edgefl-secure")
    channel: Channel[Begin | SumRequest] = Channel.inherit(channel_fd, Begin | SumRequest)
    try:
        begin = channel.receive()
        assert isinstance(begin, Begin)
        buffer, rules, folder = ParameterBuffer.attach(channel.descriptor()), begin.rules, Path(begin.folder)
        secret = phones_secret(begin.experiment, folder)
        phones, path = Phones(secret, begin.experiment.seed, begin.clients, rules), folder / USED_FILE
        party: _Holders | _Aggregator
        if isinstance(rules, TrustedRules):
            party = _Aggregator(phones, rules, buffer, path)
        else:
            party = _Holders(phones, rules, buffer, path)
        while True:
            message = channel.receive()
            assert isinstance(message, SumRequest)
            reply = party.reply(message.members)
            party.used.save()
            channel.send(reply)
    except Closed:
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
